//! What crosses the crates: the lab with its real guests, the simulator, and the judges.
//!
//! A judge ([`check`]) trusts nothing of ours that it judges: the lab's marks are counted by the guest's own workload, and
//! the pages are decoded from what lies on the disk.

pub mod check;
pub mod lab;
pub mod sim;
