//! What a running vmtrail tells: to its own terminal, to a log, and to whoever asks over the control socket.

use serde::{Deserialize, Serialize};

use crate::trail::event::{MigrationEnded, StreamEnd};

/// One thing told. As JSON it is one line of `--json` output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "kebab-case")]
pub enum Report {
    /// Frames are being recorded.
    Recording {
        /// The trail.
        trail: String,
        /// The VM, by name or QMP path.
        vm: String,
        /// Ports read.
        ports: usize,
        /// The agent's session.
        session: String,
        /// Guest kernel.
        kernel: String,
        /// Process that records.
        pid: u32,
    },
    /// How it goes; once a second.
    Rate {
        /// Seconds since recording began.
        seconds: u64,
        /// Bytes of pages stored, in all.
        bytes: u64,
        /// Pages stored, in all.
        pages: u64,
        /// Bytes a second over the last second.
        bytes_per_s: u64,
        /// Bytes received and not yet durable.
        lag_bytes: u64,
        /// Frames declared missing, in all.
        missing_frames: u64,
        /// Events that the guest's ring overwrote, in all (the kernel's word).
        overrun_events: u64,
        /// Whether the ports are held back because the store is full or slow.
        held_back: bool,
    },
    /// A migration's phase begins.
    Phase {
        /// The attempt.
        attempt: u64,
        /// The phase.
        phase: String,
    },
    /// How a migration goes.
    Progress {
        /// The attempt.
        attempt: u64,
        /// QEMU's state.
        status: String,
        /// RAM bytes sent.
        transferred_bytes: u64,
        /// RAM bytes to go.
        remaining_bytes: u64,
        /// Megabits a second.
        megabits: u64,
        /// Passes over RAM.
        passes: u64,
        /// Expected downtime.
        expected_downtime_ms: u64,
        /// Trace bytes received and not yet durable.
        lag_bytes: u64,
    },
    /// A migration is over.
    Migrated(MigrationReport),
    /// Something that a person should know.
    Warning {
        /// The text.
        text: String,
    },
    /// Recording is over.
    Stopped {
        /// Why.
        reason: String,
        /// Whether every frame that the agent had is stored.
        complete: bool,
        /// Bytes of pages stored, in all.
        bytes: u64,
        /// Pages stored, in all.
        pages: u64,
    },
    /// A request was refused.
    Refused {
        /// Why.
        reason: String,
    },
    /// A request was done.
    Done,
}

/// The seven steps in figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigrationReport {
    /// Phases, times and boundaries, as they stand in the trail.
    #[serde(flatten)]
    pub ended: MigrationEnded,
    /// Whether each stream's next frame was the successor of its last.
    pub continuous: Option<bool>,
    /// Per CPU the first sequence that the destination delivered.
    pub resumed_at: Vec<StreamEnd>,
    /// Frames dropped because they were stored already, during this migration.
    pub duplicates: u64,
    /// Frames that came from a replay, during this migration.
    pub replayed: u64,
}
