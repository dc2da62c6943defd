//! The bytes of a trail, shared by writer and reader. `docs/trail.md` draws them.

use serde::{Deserialize, Serialize};

/// Store versions that this crate reads and writes.
pub mod version {
    /// The oldest that is read.
    pub const MIN: u32 = 1;
    /// The one that is written.
    pub const CURRENT: u32 = 1;
}

/// A trail's name for itself: random.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TrailId(pub [u8; 16]);

/// Which VM a trail belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct VmIdentity {
    /// QEMU's `-name`, where it has one.
    pub name: Option<String>,
    /// QEMU's `-uuid`, where it has one.
    pub uuid: Option<String>,
}
