//! The trail: the stored trace of one VM. `docs/trail.md` describes every byte of it.
//!
//! # What is promised, and when
//!
//! - **Acknowledged means synced.** [`TrailWriter::append`] and [`TrailWriter::log`] only fill memory. What they took is
//!   durable when [`Batch::commit`] returned `Ok`: written and `fdatasync`ed. [`TrailWriter::finish_batch`] then says
//!   up to which sequence each stream is durable, and only that may be acknowledged to the guest's agent.
//! - **A full disk is backpressure, not loss.** A commit that fails is rolled back to the last durable length and keeps
//!   its bytes; it can be called again when there is space.
//! - **A crash costs what was not acknowledged, nothing else.** One batch is in flight at a time, so at most the last
//!   batch on disk is torn. It is one checksummed unit: recovery keeps all of it or cuts all of it, says so, and the
//!   agent's replay brings it back.
//! - **Nothing that a guest sends becomes a path.** Names of metadata are keys inside manifests.

pub mod crash_disk;
pub mod event;
pub mod format;
pub mod metadata;
mod reader;
mod recovery;
mod sink;
pub mod storage;
mod writer;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use vmtrail_wire::{Epoch, Sequence, SessionId, StreamId};

pub use event::{Event, LogLine};
pub use format::{TrailId, VmIdentity};
pub use reader::{
    Damage, DamageKind, Entry, EventLine, EventLines, Frames, Place, SegmentFile, StoredFrame,
    Torn, TrailReader,
};
pub use writer::{Batch, Durable, MIN_FREE_BYTES, TrailWriter, WriterOptions};

/// What opening an existing trail found.
#[derive(Debug, Clone, Default)]
pub struct Recovery {
    /// Bytes of a torn tail that were cut, over all files.
    pub cut_bytes: u64,
    /// What was cut, one sentence each.
    pub cuts: Vec<String>,
    /// What is damaged but was not cut, because sound data follows it; one sentence each.
    pub damage: Vec<String>,
    /// Where each stream goes on: what to ask the agent for.
    pub resume: BTreeMap<(SessionId, StreamId), ResumePoint>,
    /// The newest epoch of any frame or attachment; the next attachment must be newer.
    pub last_epoch: Epoch,
    /// Every session of the log, in order.
    pub sessions: Vec<event::Session>,
    /// Every residency of the log, in order.
    pub residencies: Vec<event::Residency>,
    /// Residencies that the log has not ended.
    pub open_residencies: Vec<u64>,
    /// Number of the last migration attempt, 0 if there was none.
    pub last_attempt: u64,
    /// The last attempt if the log has not ended it.
    pub open_attempt: Option<u64>,
    /// Newest metadata generation that is complete, per session.
    pub metadata: BTreeMap<SessionId, u32>,
    /// Whether the last writer closed the trail in order.
    pub closed: bool,
}

/// Where a stream goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumePoint {
    /// The sequence behind the last durable one.
    pub next: Sequence,
    /// Pages of the stream up to there.
    pub next_page: u64,
}

/// Why a trail could not be created, opened or read.
#[derive(Debug, thiserror::Error)]
pub enum TrailError {
    /// A new trail was to be made where something is already.
    #[error("{dir} exists and is not empty; choose another directory, or continue that trail")]
    Exists {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory holds no trail.
    #[error("{dir} is not a trail (it has no trail.json)")]
    NotATrail {
        /// The directory.
        dir: PathBuf,
    },
    /// Another process writes to the trail.
    #[error("{dir} is being written by {}; two writers cannot share a trail", holder(*.pid))]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// The other process, where its lock file told.
        pid: Option<u32>,
    },
    /// The trail is of a version that cannot be read.
    #[error("{dir} is a trail of store version {found}, written by vmtrail {written_by}; this vmtrail reads versions {min} to {max}: use vmtrail {written_by} or later", min = format::version::MIN, max = format::version::CURRENT)]
    Version {
        /// The directory.
        dir: PathBuf,
        /// Its store version.
        found: u32,
        /// The vmtrail that made it.
        written_by: String,
    },
    /// Too little room to begin.
    #[error(
        "{dir} has {free} bytes free on its filesystem; a trail needs at least {needed} to begin"
    )]
    Full {
        /// The directory.
        dir: PathBuf,
        /// Bytes free.
        free: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// A file that must be readable is not.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How.
        what: String,
    },
    /// A batch is still being committed.
    #[error("a batch is still in flight")]
    InFlight,
    /// The filesystem refused.
    #[error("{operation} {path}")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A last commit failed.
    #[error("the last batch could not be stored")]
    Store(#[from] StoreError),
}

/// Why a commit failed. Nothing is lost: the batch keeps its bytes and can be committed again.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {path}")]
pub struct StoreError {
    /// What was being done.
    pub operation: &'static str,
    /// To which file of the trail.
    pub path: PathBuf,
    /// What the system said.
    #[source]
    pub source: io::Error,
}

impl StoreError {
    /// Whether space (or quota) is what is missing: freeing some is the cure.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(
            self.source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    }
}

/// Why an item of metadata was not taken. The guest decides how much there is, so there are bounds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// One item is too long.
    #[error("item of {len} bytes is longer than {max}")]
    ItemTooLong {
        /// Its length.
        len: usize,
        /// The bound.
        max: usize,
    },
    /// A generation is too long.
    #[error("the generation's items are longer than {max} bytes together")]
    GenerationTooLong {
        /// The bound.
        max: usize,
    },
    /// A generation has too many items.
    #[error("the generation has more than {max} items")]
    TooManyItems {
        /// The bound.
        max: usize,
    },
    /// The trail holds as much metadata as it may.
    #[error("the trail holds {held} bytes of metadata already, of at most {max}")]
    TrailFull {
        /// Held.
        held: u64,
        /// The bound.
        max: u64,
    },
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(
        || "another process".to_owned(),
        |pid| format!("process {pid}"),
    )
}

/// Dresses an I/O error with what was being done to which file.
fn io_error(
    storage: &dyn storage::Storage,
    operation: &'static str,
    name: &str,
) -> impl FnOnce(io::Error) -> TrailError {
    let path = storage.place(name);
    move |source| TrailError::Io {
        operation,
        path,
        source,
    }
}
