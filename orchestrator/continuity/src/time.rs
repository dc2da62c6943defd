//! Time as a number: it can be written in a test, sent, and printed, and a run with the same facts prints the same.

use std::time::Duration;

/// Nanoseconds since a start that only the driver knows. Monotonic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(pub u64);

impl Instant {
    /// The instant `after` later.
    #[must_use]
    pub fn after(self, after: Duration) -> Self {
        Self(self.0.saturating_add(nanos(after)))
    }

    /// Time passed since `earlier`, zero if it is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A duration in nanoseconds, at most `u64::MAX` (584 years).
#[must_use]
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
