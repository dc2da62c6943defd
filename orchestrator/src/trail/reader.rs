//! Reading a trail.
