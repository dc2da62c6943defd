//! Numbers that must not be mixed up.

use core::fmt;

/// A frame's number in its stream, counted by the agent from 0 in each session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Sequence(pub u64);

/// One attachment of a reader. Monotonic over the VM's life: the agent obeys only a newer one, because messages
/// written for an older reader can arrive after a migration (bytes already in the guest's in-queue travel with it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Epoch(pub u64);

/// One run of the agent: random, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SessionId(pub u64);

/// One ordered sequence of frames: a CPU's pages, or the session's own messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u32);

impl StreamId {
    /// The stream of everything that belongs to no CPU.
    pub const SESSION: Self = Self(u32::MAX);

    /// The CPU whose pages this stream carries; `None` for the session stream.
    #[must_use]
    pub fn cpu(self) -> Option<u32> {
        (self != Self::SESSION).then_some(self.0)
    }
}

impl Sequence {
    /// The number of the frame behind this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cpu() {
            Some(cpu) => write!(f, "cpu{cpu}"),
            None => f.write_str("session"),
        }
    }
}
