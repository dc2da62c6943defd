//! The clocks of the driver.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vmtrail_continuity::Instant;

/// Gives the machines their `now`.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: tokio::time::Instant,
}

impl Clock {
    /// A clock that begins now. It begins at one second, so that nothing that is "never" looks like "just now".
    #[must_use]
    pub fn start() -> Self {
        Self {
            start: tokio::time::Instant::now() - Duration::from_secs(1),
        }
    }

    /// Now.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant(vmtrail_continuity::time::nanos(self.start.elapsed()))
    }

    /// When the runtime has to wake for `at`.
    #[must_use]
    pub fn deadline(&self, at: Instant) -> tokio::time::Instant {
        self.start + Duration::from_nanos(at.0)
    }
}

/// Host wall time in nanoseconds since the Unix epoch; 0 on a host whose clock is set before it.
#[must_use]
pub fn wall_ns() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    vmtrail_continuity::time::nanos(since)
}
