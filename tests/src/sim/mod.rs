//! The simulator: the real agent session and the real decisions of `continuity`, in a world that follows from a seed.
//!
//! ```text
//!  rings -> agent session -> virtqueue -> FIFO or socket -> decoder -> ledger -> disk
//!           (real)           (qemu)                         (real)     (real)    (live, synced, torn)
//!             ^                                                          |
//!             +---- message decoder <- in-queue <- FIFO or socket <------+ Hello, Ack
//!                   (real)
//!  monitors <-> migration machine (real)
//! ```
//!
//! What is not real: pipes of pages (vectors), QEMU (`qemu`, as the facts describe it), the disk (`disk`), the recorder's loop
//! (`host`, which calls the machines in the driver's order), and time. So a bug of the driver, of the store or of the pump
//! is not found here but in the lab.
//!
//! `world` holds the queue of events and the faults, `options` what a seed is made of, `mutation` the planted bugs, and
//! [`crate::check`] the judges.

mod disk;
mod guest;
mod host;
pub mod mutation;
pub mod options;
mod qemu;
pub mod rng;
pub mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

pub use mutation::Mutation;
pub use world::{Summary, World};

use crate::check::{Judge, Violation};

/// A seed that a judge objected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The finding.
    pub violation: Violation,
}

/// What many seeds were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Seeds that ran.
    pub seeds: u64,
    /// The sums of their summaries.
    pub events: u64,
    /// Entries in trails.
    pub entries: u64,
    /// Attempts that committed.
    pub committed: u64,
    /// Attempts that did not.
    pub not_committed: u64,
    /// Recorders that were killed.
    pub crashes: u64,
    /// VMs that were put back.
    pub forked: u64,
    /// Of these, those of which no Hello could tell.
    pub unseen_forks: u64,
}

/// Runs one seed.
///
/// # Errors
///
/// What a judge found; a panic is a finding, too.
pub fn run(seed: u64, mutation: Option<Mutation>, verbose: bool) -> Result<Summary, Violation> {
    catch_unwind(AssertUnwindSafe(|| {
        World::new(seed, mutation, verbose).run()
    }))
    .unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default();
        Err(Violation::of(Judge::Machine, format!("panic: {text}")))
    })
}

/// Runs `count` seeds from `start` on `threads` threads, until `enough` of them failed.
#[must_use]
pub fn run_many(
    start: u64,
    count: u64,
    mutation: Option<Mutation>,
    threads: usize,
    enough: usize,
) -> (Totals, Vec<Failure>) {
    let next = AtomicU64::new(start);
    let stop = AtomicBool::new(false);
    let found = Mutex::new((Totals::default(), Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut totals = Totals::default();
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed - start >= count {
                        break;
                    }
                    totals.seeds += 1;
                    match run(seed, mutation, false) {
                        Ok(summary) => totals.add(&summary),
                        Err(violation) => {
                            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                            found.1.push(Failure { seed, violation });
                            if found.1.len() >= enough {
                                stop.store(true, Ordering::Relaxed);
                            }
                        }
                    }
                }
                let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                found.0.merge(&totals);
            });
        }
    });
    let (totals, mut failures) = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    failures.sort_by_key(|failure| failure.seed);
    (totals, failures)
}

impl Totals {
    fn add(&mut self, summary: &Summary) {
        self.events += summary.events;
        self.entries += summary.entries;
        self.committed += summary.committed;
        self.not_committed += summary.not_committed;
        self.crashes += summary.crashes;
        self.forked += u64::from(summary.forked);
        self.unseen_forks += u64::from(summary.unseen_fork);
    }

    fn merge(&mut self, other: &Self) {
        self.seeds += other.seeds;
        self.events += other.events;
        self.entries += other.entries;
        self.committed += other.committed;
        self.not_committed += other.not_committed;
        self.crashes += other.crashes;
        self.forked += other.forked;
        self.unseen_forks += other.unseen_forks;
    }
}
