//! `vmtrail verify`: is the trail whole?
