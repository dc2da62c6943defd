//! See the README.

pub mod info;
pub mod trail;
pub mod verify;
