//! Each version's bytes, pinned: an agent inside a long-lived guest is old.

#[path = "versioning/v01.rs"]
mod v01;
