//! What a seed is made of: each seed switches on some of the faults and chooses its sizes, so that rare combinations are tried and
//! common faults do not hide behind each other ("swarm testing", Groce et al. 2012).

use std::fmt;

use vmtrail_continuity::attach::PortKind;

use super::rng::Rng;

pub(super) const MICROSECOND: u64 = 1000;
pub(super) const MILLISECOND: u64 = 1_000_000;
pub(super) const SECOND: u64 = 1_000_000_000;

/// The weather of one seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Virtual CPUs, each with a ring.
    pub cpus: u32,
    /// Ports; fewer than CPUs are shared.
    pub ports: usize,
    /// FIFO pairs or sockets.
    pub kind: PortKind,
    /// Pages that a ring holds.
    pub ring_pages: usize,
    /// Pages that the agent keeps unacknowledged, per CPU.
    pub window_pages: u64,
    /// Elements that a virtqueue holds (128 in QEMU; fewer make it full more often).
    pub queue_elements: usize,
    /// Bytes that a FIFO or a socket holds.
    pub pipe_bytes: usize,
    /// A page is made this often on each CPU, on average.
    pub page_every: u64,
    /// How long the weather lasts before all faults stop.
    pub storm: u64,
    /// The recorder is killed this many times.
    pub kills: u32,
    /// A kill loses what is not synced, and tears.
    pub torn: bool,
    /// The recorder stands still this many times.
    pub stalls: u32,
    /// The disk refuses this many times for a while.
    pub full_disks: u32,
    /// The longest sync.
    pub sync_max: u64,
    /// Migrations tried.
    pub migrations: u32,
    /// Faults of migrations, in a thousand.
    pub migration_faults: u64,
    /// Whether the source can be held before the switchover.
    pub pause: bool,
    /// Whether the monitors report migration events.
    pub events: bool,
    /// Whether a stopped QEMU still empties its queues into the port.
    pub drains_stopped: bool,
    /// Whether queues can be looked at.
    pub probes: bool,
    /// The drain budget.
    pub drain_budget: u64,
    /// Frames are cut between two elements, in a thousand.
    pub tears: u64,
    /// Frames are swallowed by the guest's driver, in a thousand.
    pub swallows: u64,
    /// The agent is killed and started again this many times.
    pub agent_restarts: u32,
    /// Recorders whose clock is behind begin with an old epoch.
    pub clock_behind: bool,
    /// The VM is put back to a snapshot that was taken earlier.
    pub fork: bool,
}

impl Options {
    /// What this seed is made of.
    #[must_use]
    pub fn of(rng: &mut Rng) -> Self {
        let cpus = u32::try_from(rng.within(1, 3)).unwrap_or(1);
        let some = |rng: &mut Rng, most: u64| {
            if rng.chance(500) {
                u32::try_from(rng.within(1, most)).unwrap_or(1)
            } else {
                0
            }
        };
        let mut options = Self {
            cpus,
            ports: rng.len(1, cpus as usize),
            kind: rng.one_of(&[PortKind::Fifo, PortKind::Socket]),
            ring_pages: rng.len(4, 60),
            window_pages: rng.within(4, 80),
            queue_elements: rng.one_of(&[2, 4, 16, 128]),
            pipe_bytes: rng.one_of(&[4096, 9000, 16_384, 65_536]),
            page_every: rng.one_of(&[2, 5, 15]) * MILLISECOND,
            storm: rng.within(300, 1500) * MILLISECOND,
            kills: some(rng, 3),
            torn: rng.chance(500),
            stalls: some(rng, 3),
            full_disks: u32::from(rng.chance(200)),
            sync_max: rng.one_of(&[1, 5, 60]) * MILLISECOND,
            migrations: some(rng, 4),
            migration_faults: rng.one_of(&[0, 300, 800]),
            pause: rng.chance(800),
            events: rng.chance(850),
            drains_stopped: rng.chance(800),
            probes: rng.chance(850),
            drain_budget: rng.one_of(&[2, 10, 50]) * MILLISECOND,
            tears: if rng.chance(300) { 200 } else { 0 },
            swallows: if rng.chance(200) { 30 } else { 0 },
            agent_restarts: u32::from(rng.chance(120)),
            clock_behind: rng.chance(150),
            fork: rng.chance(60),
        };
        if options.agent_restarts > 0 {
            // A frame that an agent's death cut swallows what its successor says first (docs/testing.md).
            options.tears = 0;
        }
        options
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns / MILLISECOND;
        write!(
            f,
            "{} cpus on {} {:?} ports, ring {} window {} pages, queue {} elements, pipe {} bytes, a page per {} ms, storm {} ms; \
             {} kills{}, {} stalls, {} full disks, sync up to {} ms; {} migrations with {}‰ faults{}{}{}{}, budget {} ms; \
             tears {}‰, swallows {}‰, {} agent restarts{}{}",
            self.cpus,
            self.ports,
            self.kind,
            self.ring_pages,
            self.window_pages,
            self.queue_elements,
            self.pipe_bytes,
            ms(self.page_every),
            ms(self.storm),
            self.kills,
            if self.torn { " (torn)" } else { "" },
            self.stalls,
            self.full_disks,
            ms(self.sync_max),
            self.migrations,
            self.migration_faults,
            if self.pause { ", pause" } else { "" },
            if self.events { ", events" } else { "" },
            if self.drains_stopped {
                ", drains stopped"
            } else {
                ""
            },
            if self.probes { ", probes" } else { "" },
            ms(self.drain_budget),
            self.tears,
            self.swallows,
            self.agent_restarts,
            if self.clock_behind {
                ", clock behind"
            } else {
                ""
            },
            if self.fork { ", fork" } else { "" },
        )
    }
}
