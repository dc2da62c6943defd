//! Judges: one per property, each trusting as little as it can of what it judges.
//!
//! [`marks`] judges the lab's trails. The others judge the simulator's ([`crate::sim`]): they know what the guest made
//! ([`Made`]), what is durable and what was declared ([`Entry`]), and nothing of how the machines came to it.

pub mod acked;
pub mod exactly_once;
pub mod false_loss;
pub mod fork;
pub mod held;
pub mod marks;
pub mod order;
pub mod page;
pub mod progress;
pub mod provisional;
pub mod recovery;
pub mod way_back;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use vmtrail_continuity::ledger::Gap;
use vmtrail_wire::{Epoch, FrameHeader, Sequence, SessionId, StreamId};

/// Who judges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Judge {
    /// Each page is there once, as the guest made it, or overwritten in the ring, or declared lost.
    ExactlyOnce,
    /// A stream's trail is in the order of its sequences; its epochs do not go back.
    Order,
    /// Whatever the agent is told to let go of, and whatever it lets go of, is durable.
    AckedIsDurable,
    /// A guest is held no longer than the drain budget.
    Held,
    /// After an attempt that failed the source streams again, and the next attempt succeeds.
    WayBack,
    /// What a crash leaves is a prefix of what was written, and no less than what was synced.
    Recovery,
    /// When the faults stop, everything arrives in a bounded time.
    Progress,
    /// What is declared lost is lost.
    NoFalseLoss,
    /// Nothing is believed of a destination that does not run.
    Provisional,
    /// A guest that was put back to an earlier state is declared as a fork, and no other.
    Fork,
    /// The machine itself: it panicked, or never came to rest.
    Machine,
}

/// What a judge found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Whose property is hurt.
    pub judge: Judge,
    /// How.
    pub text: String,
}

impl Violation {
    /// Hands out a finding.
    pub fn of(judge: Judge, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { judge, text }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.judge, self.text)
    }
}

/// A stream of one session.
pub type Stream = (SessionId, StreamId);

/// One thing in a trail, in the order in which it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// A frame with its pages.
    Frame {
        /// The header as it came.
        header: FrameHeader,
        /// The pages.
        pages: Vec<u8>,
    },
    /// A declared loss.
    Gap(Gap),
    /// A declared fork.
    Fork {
        /// The stream.
        stream: Stream,
        /// Where the trail is.
        have: Sequence,
        /// Where the guest is.
        next: Sequence,
    },
    /// An attachment.
    Attached(Epoch),
    /// The kernel's count of pages that a ring overwrote.
    Overrun {
        /// The session.
        session: SessionId,
        /// Overwritten pages by CPU.
        by_cpu: Vec<(u32, u64)>,
    },
}

/// What a guest made in one session on one CPU.
#[derive(Debug, Clone, Default)]
pub struct MadeOnCpu {
    /// Pages, numbered from 0.
    pub pages: u64,
    /// Those that the ring overwrote before anybody read them.
    pub overwritten: BTreeSet<u64>,
    /// The agent died: what it held is gone, and only that.
    pub ended: bool,
}

/// What a guest made.
#[derive(Debug, Clone, Default)]
pub struct Made {
    /// By stream.
    pub streams: BTreeMap<Stream, MadeOnCpu>,
}
