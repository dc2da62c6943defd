//! What happened to a VM and to its trace, besides the pages: one JSON object a line in `events/log.jsonl`.
//!
//! Wall times (`at_ns`) are nanoseconds since the Unix epoch by the clock of the host that wrote the line. Numbers of
//! frames are the agent's; `session` and `epoch` name what they belong to. A reader ignores types and fields that it
//! does not know: a trail outlives the program that began it.

use serde::{Deserialize, Serialize};

/// One line of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogLine {
    /// When it was written.
    pub at_ns: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Event {
    /// A writer opened the trail, with what it found.
    WriterOpened {
        /// Version of vmtrail.
        version: String,
        /// Bytes of a torn tail that recovery cut, 0 for a clean end.
        cut_bytes: u64,
    },
    /// The writer closed the trail in order.
    WriterClosed,
    /// A QEMU process carries the VM from here on.
    Residency(Residency),
    /// A QEMU process carries the VM no more (or never did).
    ResidencyEnded {
        /// Which.
        residency: u64,
        /// Why, for people: `migrated`, `detached`, `qemu ended`, `migration failed`…
        reason: String,
    },
    /// A reader attached to a residency's ports under an epoch: frames of that epoch came from there.
    Attached {
        /// Epoch of the frames.
        epoch: u64,
        /// Where.
        residency: u64,
        /// Names of the ports.
        ports: Vec<String>,
    },
    /// The agent said who it is.
    Session(Session),
    /// The first frame of a stream that this trail can hold: what came before was acknowledged to somebody else, or is
    /// counted as lost in a [`Event::Gap`].
    StreamBegan {
        /// Session.
        session: String,
        /// CPU.
        cpu: u32,
        /// First sequence.
        sequence: u64,
        /// Pages before it.
        first_page: u64,
    },
    /// Frames that never arrived and cannot come any more.
    Gap {
        /// Session.
        session: String,
        /// CPU.
        cpu: u32,
        /// First missing sequence.
        from: u64,
        /// First sequence that is there again.
        to: u64,
        /// Missing pages, where known.
        pages: Option<u64>,
        /// Why.
        cause: String,
    },
    /// The kernel's cumulative counters.
    Lost {
        /// Session.
        session: String,
        /// One entry a CPU.
        counters: Vec<Counters>,
    },
    /// A migration attempt began.
    MigrationStarted {
        /// Number of the attempt in this trail, from 1.
        attempt: u64,
        /// Residency it leaves.
        from: u64,
        /// Residency it goes to.
        to: u64,
        /// The migration URI.
        uri: String,
    },
    /// A phase of an attempt began.
    MigrationPhase {
        /// Which attempt.
        attempt: u64,
        /// `admit`, `prepare`, `migrate`, `switchover`, `commit`, `verify`, `release`, or `way-back`.
        phase: String,
    },
    /// An attempt ended.
    MigrationEnded(MigrationEnded),
    /// Recording was stopped in order: every frame below these sequences was sent.
    Stopped {
        /// Session.
        session: String,
        /// Per CPU the sequence behind the last.
        streams: Vec<StreamEnd>,
    },
    /// Guest and host clocks, compared.
    Clock {
        /// Session.
        session: String,
        /// Where.
        residency: u64,
        /// Host wall time halfway between question and answer.
        host_ns: u64,
        /// Half of the round trip: the bound of the error.
        error_ns: u64,
        /// Guest CLOCK_MONOTONIC.
        monotonic_ns: u64,
        /// Guest CLOCK_BOOTTIME.
        boottime_ns: u64,
        /// Guest CLOCK_REALTIME.
        realtime_ns: u64,
    },
    /// A guest was found at an earlier point of its own history: a restored snapshot.
    Fork {
        /// Session.
        session: String,
        /// CPU.
        cpu: u32,
        /// What we hold.
        have: u64,
        /// Where the guest is.
        next: u64,
    },
    /// What a reader received and did not store since the last such line, because the trail had it already or must not
    /// have it. Counts, not cumulative.
    Dropped {
        /// Session.
        session: String,
        /// Epoch of the attachment that received them.
        epoch: u64,
        /// Per CPU; CPUs without any are left out.
        streams: Vec<StreamDrops>,
    },
    /// A segment is removed because the trail is longer or older than it may be. Logged before the removal.
    Retired {
        /// Number of the segment.
        segment: u64,
        /// Its length.
        bytes: u64,
        /// `bytes` or `age`.
        limit: String,
        /// What goes with it.
        streams: Vec<RetiredStream>,
    },
    /// Something that a reader of the trail should know, for people.
    Note {
        /// The text.
        text: String,
    },
    /// A type of a later version.
    #[serde(other)]
    Unknown,
}

/// One QEMU process that carries the VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Residency {
    /// Number in this trail, from 1.
    pub residency: u64,
    /// Host name.
    pub host: String,
    /// QEMU's process, where known.
    pub pid: Option<i32>,
    /// QEMU's version.
    pub qemu: String,
    /// The QMP socket.
    pub qmp: String,
    /// The residency it came from.
    pub parent: Option<u64>,
    /// `attach` (it was running when we came), `boot`, `migration`, `restore`.
    pub cause: String,
}

/// One run of the agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// 16 hexadecimal digits.
    pub session: String,
    /// The guest's boot id, 32 hexadecimal digits.
    pub boot_id: String,
    /// Version of the agent.
    pub agent: String,
    /// Kernel release of the guest.
    pub kernel: String,
    /// Trace clock.
    pub clock: String,
    /// Bytes of a sub-buffer.
    pub page_size: u32,
    /// 4 or 8.
    pub long_size: u8,
    /// Whether the pages are big-endian.
    pub big_endian: bool,
    /// CPUs that may have a stream.
    pub cpus: u32,
}

/// The kernel's counters of one CPU since the agent's instance was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// CPU.
    pub cpu: u32,
    /// Events overwritten before they were read.
    pub overrun: u64,
    /// Events lost to nesting.
    pub commit_overrun: u64,
    /// Events dropped by a full ring.
    pub dropped: u64,
    /// Events read.
    pub read: u64,
}

/// Where a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamEnd {
    /// CPU.
    pub cpu: u32,
    /// The sequence behind the last.
    pub next: u64,
}

/// Frames of one CPU that were received and not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamDrops {
    /// CPU.
    pub cpu: u32,
    /// Frames that the trail holds already.
    pub duplicates: u64,
    /// Frames of an older epoch whose predecessors had not arrived; the replay brings them again.
    pub ahead: u64,
}

/// What a retired segment held of one stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetiredStream {
    /// Session.
    pub session: String,
    /// CPU.
    pub cpu: u32,
    /// First sequence.
    pub from: u64,
    /// Sequence behind the last.
    pub to: u64,
    /// Frames.
    pub frames: u64,
    /// Pages.
    pub pages: u64,
    /// Pages of the stream before `from`.
    pub first_page: u64,
    /// Pages of the stream before `to`.
    pub next_page: u64,
}

/// How a migration attempt ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigrationEnded {
    /// Which attempt.
    pub attempt: u64,
    /// `committed`, `cancelled` or `failed`.
    pub outcome: String,
    /// Why it was not committed, for people.
    pub reason: Option<String>,
    /// Source STOP to destination RESUME, by the hosts' clocks.
    pub blackout_ns: Option<u64>,
    /// What QEMU reports as `downtime`.
    pub qemu_downtime_ms: Option<u64>,
    /// How long the stopped source was held for the drain.
    pub drain_ns: Option<u64>,
    /// Whether the queues were proven empty (`false`: the budget ran out, replay did the rest).
    pub drained: Option<bool>,
    /// Bytes taken from the ports while the source was stopped.
    pub drained_bytes: Option<u64>,
    /// Per CPU the sequence behind the last one that came from the source.
    pub boundaries: Vec<StreamEnd>,
    /// Bytes of RAM that QEMU transferred.
    pub transferred_bytes: Option<u64>,
    /// QEMU's `total-time`.
    pub total_ms: Option<u64>,
}
