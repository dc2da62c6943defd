//! A scripted QMP server for tests.
