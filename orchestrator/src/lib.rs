//! vmtrail on the host: records a VM's kernel trace, follows the VM, keeps the trail.

pub mod cli;
pub mod decode;
pub mod driver;
pub mod info;
pub mod status;
pub mod trail;
pub mod verify;
