//! All deadlines of an attempt in one table, so that a log can say which one came.

use crate::time::Instant;

/// A named deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// An answer to the command that is under way.
    Reply,
    /// The migration must become active.
    Start,
    /// The next look at the migration's state, in case an event was not sent.
    Watch,
    /// The guest is held no longer than this for a trace.
    DrainBudget,
    /// The next look at the queues.
    Probe,
    /// The destination must run.
    Commit,
    /// A cancelled migration must end.
    Cancelled,
}

const COUNT: usize = 7;

/// The table.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Timers([Option<Instant>; COUNT]);

impl Timers {
    /// Sets or moves a deadline.
    pub(super) fn set(&mut self, timer: Timer, at: Instant) {
        self.0[timer as usize] = Some(at);
    }

    /// Forgets a deadline.
    pub(super) fn stop(&mut self, timer: Timer) {
        self.0[timer as usize] = None;
    }

    /// Forgets all.
    pub(super) fn stop_all(&mut self) {
        self.0 = [None; COUNT];
    }

    /// The earliest deadline.
    #[must_use]
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.iter().flatten().min().copied()
    }

    /// Takes one deadline that has come.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Timer> {
        use Timer::{Cancelled, Commit, DrainBudget, Probe, Reply, Start, Watch};
        [Reply, Start, Watch, DrainBudget, Probe, Commit, Cancelled]
            .into_iter()
            .find(|&timer| {
                let due = self.0[timer as usize].is_some_and(|at| at <= now);
                if due {
                    self.stop(timer);
                }
                due
            })
    }
}
