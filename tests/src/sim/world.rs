//! One seed's world: a queue of events ordered by time, and the faults among them.

use std::collections::BTreeMap;

use vmtrail_continuity::migration::Outcome;
use vmtrail_continuity::vmm::{Command, Event as Said, Status};
use vmtrail_wire::{Sequence, SessionId};

use super::disk::Disk;
use super::guest::{Around, Guest};
use super::host::{Fact, Host};
use super::mutation::Mutation;
use super::options::{MICROSECOND, MILLISECOND, Options, SECOND};
use super::qemu::{Fault, Outgoing, Qemu, Stage};
use super::rng::Rng;
use crate::check::{Judge, Made, Stream, Violation, exactly_once, fork, order, progress, way_back};

/// Events of one run at most: more is a world that does not come to rest.
const MAX_EVENTS: u64 = 3_000_000;

/// How long everything may take to arrive after the last fault. The longest timers that may stand in a row: a migration's commit deadline
/// (30 s), silence of a live port (12 s), the wedge (2 s).
const BOUND: u64 = 60 * SECOND;

/// A change of a port's host side reaches the guest by a control message of its own queue.
const CONTROL: u64 = 100 * MICROSECOND;

#[derive(Debug, Clone)]
pub(super) enum Event {
    /// The agent's thread runs.
    Guest,
    /// The kernel writes.
    Produce(usize),
    /// QEMU's main loop looks at an output queue.
    Output(usize, usize),
    /// … and at a port's input.
    Input(usize, usize),
    /// The guest looks at a port's host side.
    Control(usize, usize),
    /// The recorder runs.
    Host,
    /// A monitor's word arrives.
    Fact(usize, u64, Fact),
    /// A command arrives at a monitor.
    Tell(usize, usize, u64, Command),
    /// The queues are looked at.
    Probe(usize),
    /// A migration goes on.
    Step(usize, u64),
    /// The destination's vCPUs start.
    Run(usize, usize),
    /// The disk answers.
    Synced { life: u64, until: Option<usize> },
    /// The recorder is killed.
    Crash,
    /// … and started again.
    Restart,
    /// The recorder is not let run.
    Stall,
    /// The disk is full for a while.
    FullDisk,
    /// Somebody migrates.
    Migrate,
    /// … and changes their mind.
    Cancel(u64),
    /// The agent is killed and started again.
    RestartAgent,
    /// The VM's state is kept.
    Snapshot,
    /// The VM is put back.
    Restore,
    /// Somebody looks after the recorder.
    Watch,
    /// All faults stop.
    Calm,
    /// Is everything there?
    Check,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Storm,
    Settling,
    Migrating,
    SettlingAgain,
    Done,
}

struct Kept {
    guest: Guest,
    ports: Vec<super::qemu::Port>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kept")
    }
}

/// What a run was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Events.
    pub events: u64,
    /// Entries in the trail.
    pub entries: u64,
    /// Attempts that committed.
    pub committed: u64,
    /// Attempts that did not.
    pub not_committed: u64,
    /// Recorders that were killed.
    pub crashes: u64,
    /// Whether the VM was put back.
    pub forked: bool,
    /// Whether it was, and no Hello could tell.
    pub unseen_fork: bool,
}

/// See the module's text.
#[derive(Debug)]
pub struct World {
    pub(super) now: u64,
    pub(super) rng: Rng,
    pub(super) options: Options,
    pub(super) mutation: Option<Mutation>,
    verbose: bool,
    queue: BTreeMap<(u64, u64), Event>,
    pushed: u64,
    pub(super) qemus: Vec<Qemu>,
    /// The QEMU that holds the guest.
    vm: usize,
    guest: Guest,
    guest_at: u64,
    made: Made,
    pub(super) disk: Disk,
    pub(super) freed: BTreeMap<Stream, Sequence>,
    pub(super) host: Option<Host>,
    pub(super) host_life: u64,
    host_at: u64,
    stalled_until: u64,
    /// Time for which recorders were not let run, in all.
    pub(super) stalled_ns: u64,
    pub(super) disk_full_until: u64,
    pub(super) attempts: u64,
    fault: Option<Fault>,
    pub(super) outcomes: Vec<(u64, Outcome)>,
    pub(super) last_failed: Option<u64>,
    kept: Option<Kept>,
    forked: Option<BTreeMap<Stream, Sequence>>,
    held_at_fork: BTreeMap<Stream, Sequence>,
    estranged: u32,
    calm_at: u64,
    /// Whether frames are swallowed or cut in this seed.
    swallowed: bool,
    phase: Phase,
    phase_at: u64,
    outcomes_before: usize,
    summary: Summary,
}

impl World {
    /// The world of a seed.
    #[must_use]
    pub fn new(seed: u64, mutation: Option<Mutation>, verbose: bool) -> Self {
        let mut rng = Rng::new(seed);
        let options = Options::of(&mut rng);
        let now = SECOND;
        let mut made = Made::default();
        let session = SessionId(rng.any() | 1);
        let guest = Guest::boot(now, session, &options, &mut made);
        let mut world = Self {
            now,
            mutation,
            verbose,
            queue: BTreeMap::new(),
            pushed: 0,
            qemus: vec![Qemu::new(&options)],
            vm: 0,
            guest,
            guest_at: u64::MAX,
            made,
            disk: Disk::default(),
            freed: BTreeMap::new(),
            host: None,
            host_life: 0,
            host_at: u64::MAX,
            stalled_until: 0,
            stalled_ns: 0,
            disk_full_until: 0,
            attempts: 0,
            fault: None,
            outcomes: Vec::new(),
            last_failed: None,
            kept: None,
            forked: None,
            held_at_fork: BTreeMap::new(),
            estranged: 0,
            calm_at: now + options.storm,
            swallowed: options.swallows > 0 || options.tears > 0,
            phase: Phase::Storm,
            phase_at: now,
            outcomes_before: 0,
            summary: Summary::default(),
            rng,
            options,
        };
        world.forecast();
        world
    }

    /// What this seed is made of.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Plans the weather.
    fn forecast(&mut self) {
        let options = self.options.clone();
        let start = self.now;
        self.start_vm(0);
        self.at(start, Event::Restart);
        for cpu in 0..options.cpus as usize {
            self.at(start, Event::Produce(cpu));
        }
        let mut plan = |count: u32, event: Event| {
            for _ in 0..count {
                let at = start + self.rng.within(0, options.storm);
                self.at(at, event.clone());
            }
        };
        plan(options.kills, Event::Crash);
        plan(options.stalls, Event::Stall);
        plan(options.full_disks, Event::FullDisk);
        plan(options.migrations, Event::Migrate);
        plan(options.agent_restarts, Event::RestartAgent);
        if options.fork {
            self.at(start + options.storm / 3, Event::Snapshot);
            let after = self.rng.within(MILLISECOND, options.storm / 2);
            self.at(start + options.storm / 3 + after, Event::Restore);
        }
        self.at(start, Event::Watch);
        self.at(self.calm_at, Event::Calm);
    }

    /// Runs to the end.
    ///
    /// # Errors
    ///
    /// What a judge found.
    pub fn run(&mut self) -> Result<Summary, Violation> {
        while self.phase != Phase::Done {
            let Some(((at, _), event)) = self.queue.pop_first() else {
                return Err(Violation::of(Judge::Machine, "nothing will ever happen"));
            };
            self.now = self.now.max(at);
            self.summary.events += 1;
            if self.summary.events > MAX_EVENTS {
                return Err(Violation::of(
                    Judge::Machine,
                    "the world never comes to rest",
                ));
            }
            self.happen(event)?;
        }
        if self.forked.is_none() {
            let trail = &self.disk.entries[..self.disk.synced];
            order::judge(trail)?;
            exactly_once::judge(&self.made, trail)?;
        }
        self.judge_forks()?;
        self.summary.entries = self.disk.entries.len() as u64;
        for (_, outcome) in &self.outcomes {
            if *outcome == Outcome::Committed {
                self.summary.committed += 1;
            } else {
                self.summary.not_committed += 1;
            }
        }
        Ok(self.summary)
    }

    pub(super) fn at(&mut self, at: u64, event: Event) {
        self.pushed += 1;
        self.queue.insert((at, self.pushed), event);
    }

    pub(super) fn log(&self, line: impl FnOnce() -> String) {
        if self.verbose {
            let ns = self.now - SECOND;
            println!(
                "{:>8}.{:03} ms  {}",
                ns / MILLISECOND,
                ns % MILLISECOND / MICROSECOND,
                line()
            );
        }
    }

    pub(super) fn wake_host(&mut self, at: u64) {
        if at < self.host_at {
            self.host_at = at;
            self.at(at, Event::Host);
        }
    }

    pub(super) fn wake_host_within(&mut self, least: u64, most: u64) {
        let after = self.rng.within(least, most);
        self.wake_host(self.now + after);
    }

    fn wake_guest_within(&mut self, least: u64, most: u64) {
        let after = self.rng.within(least, most);
        self.wake_guest(self.now + after);
    }

    fn wake_guest(&mut self, at: u64) {
        if at < self.guest_at {
            self.guest_at = at;
            self.at(at, Event::Guest);
        }
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Guest => return self.guest_turn(),
            Event::Produce(cpu) => self.produce(cpu),
            Event::Output(qemu, port) => self.output(qemu, port),
            Event::Input(qemu, port) => {
                let q = &mut self.qemus[qemu];
                if q.running && q.alive && q.ports[port].pull_input(&mut self.rng) {
                    self.wake_guest_within(0, 300 * MICROSECOND);
                    self.kick_input(qemu, port);
                }
            }
            Event::Control(qemu, port) => self.control(qemu, port),
            Event::Host => {
                if self.host_at != self.now {
                    return Ok(());
                }
                self.host_at = u64::MAX;
                if self.now < self.stalled_until {
                    self.wake_host(self.stalled_until);
                } else {
                    return self.host_turn();
                }
            }
            Event::Fact(qemu, life, fact) => {
                if self.now < self.stalled_until {
                    self.at(self.stalled_until, Event::Fact(qemu, life, fact));
                } else if life == self.host_life {
                    self.log(|| format!("qemu{qemu}: {fact:?}"));
                    return self.host_hears(qemu, fact);
                }
            }
            Event::Tell(qemu, to, number, command) => self.obey(qemu, to, number, command),
            Event::Probe(qemu) => {
                let empty = self.options.probes.then(|| {
                    self.qemus[qemu]
                        .ports
                        .iter()
                        .all(super::qemu::Port::is_drained)
                });
                self.say(qemu, Fact::Queues(empty));
            }
            Event::Step(qemu, number) => self.step(qemu, number),
            Event::Run(qemu, from) => {
                if self.qemus[qemu].alive {
                    self.vm = qemu;
                    self.log(|| format!("the VM runs on qemu{qemu}, from qemu{from}"));
                    self.start_vm(qemu);
                    self.say(qemu, Fact::Said(Said::Resumed { wall_ns: self.now }));
                }
            }
            Event::Synced { life, until } => {
                if life == self.host_life {
                    if self.now < self.stalled_until {
                        self.at(self.stalled_until, Event::Synced { life, until });
                    } else {
                        self.synced(until);
                    }
                }
            }
            Event::Crash => {
                if self.phase == Phase::Storm && self.forked.is_none() {
                    let after = self.rng.within(0, 400 * MILLISECOND);
                    return self.crash(after);
                }
            }
            Event::Restart => self.restart(),
            Event::Stall => {
                if self.phase == Phase::Storm {
                    let until = self.now + self.rng.within(MILLISECOND, 400 * MILLISECOND);
                    let from = self.stalled_until.max(self.now);
                    self.stalled_until = until.max(from);
                    self.stalled_ns += self.stalled_until - from;
                    self.log(|| "the recorder stands still".into());
                }
            }
            Event::FullDisk => {
                self.disk_full_until = self.now + self.rng.within(50, 800) * MILLISECOND;
                self.log(|| "the disk is full".into());
            }
            Event::Migrate => self.migrate(),
            Event::Cancel(attempt) => {
                if attempt == self.attempts && self.now >= self.stalled_until {
                    self.log(|| "cancel".into());
                    self.cancel_attempt();
                }
            }
            Event::RestartAgent => self.restart_agent(),
            Event::Snapshot => {
                if self.qemus[self.vm].running {
                    self.log(|| "snapshot".into());
                    self.kept = Some(Kept {
                        guest: self.guest.snapshot(),
                        ports: self.qemus[self.vm].ports.clone(),
                    });
                }
            }
            Event::Restore => return self.restore(),
            Event::Watch => return self.watch(),
            Event::Calm => self.calm_down(),
            Event::Check => return self.check(),
        }
        Ok(())
    }

    // ---- the guest ----

    fn with_guest<T>(&mut self, act: impl FnOnce(&mut Guest, &mut Around<'_>) -> T) -> T {
        let mut around = Around {
            now: self.now,
            rng: &mut self.rng,
            options: &self.options,
            mutation: self.mutation,
            ports: &mut self.qemus[self.vm].ports,
            made: &mut self.made,
            durable: &self.disk.durable,
            freed: &mut self.freed,
        };
        act(&mut self.guest, &mut around)
    }

    fn guest_turn(&mut self) -> Result<(), Violation> {
        if self.guest_at != self.now {
            return Ok(());
        }
        self.guest_at = u64::MAX;
        if !self.qemus[self.vm].running {
            return Ok(());
        }
        let next = self.with_guest(Guest::wake)?;
        for port in 0..self.options.ports {
            if !self.qemus[self.vm].ports[port].queue.is_empty() {
                self.kick_output(self.vm, port);
            }
            if !self.qemus[self.vm].ports[port].input.is_empty() {
                self.kick_input(self.vm, port);
            }
        }
        if let Some(next) = next {
            self.wake_guest(next.max(self.now + MICROSECOND));
        }
        Ok(())
    }

    fn produce(&mut self, cpu: usize) {
        if self.qemus[self.vm].running {
            // Mostly a page at a time; now and then a burst that a small ring does not hold.
            let pages = if self.rng.chance(30) {
                self.rng.within(5, 40)
            } else {
                1
            };
            self.with_guest(|guest, around| guest.produce(cpu, pages, around));
            self.wake_guest_within(0, 200 * MICROSECOND);
        }
        if self.phase == Phase::Storm {
            let pause = self.rng.within(0, 2 * self.options.page_every);
            self.at(self.now + pause, Event::Produce(cpu));
        }
    }

    fn restart_agent(&mut self) {
        if self.phase != Phase::Storm || !self.qemus[self.vm].running || self.forked.is_some() {
            return;
        }
        let session = SessionId(self.rng.any() | 1);
        self.log(|| format!("the agent is restarted as {session}"));
        self.with_guest(|guest, around| guest.restart_agent(session, around));
        for port in 0..self.options.ports {
            let on = self.qemus[self.vm].ports[port].host_connected;
            self.with_guest(|guest, around| guest.host_changed(port, on, around));
        }
        self.wake_guest(self.now);
    }

    /// The agent's poll tells a level, not an edge: a reader that went and came between two looks was never away.
    fn control(&mut self, qemu: usize, port: usize) {
        if qemu != self.vm || !self.qemus[qemu].running {
            return;
        }
        let on = self.qemus[qemu].ports[port].host_connected;
        self.with_guest(|guest, around| guest.host_changed(port, on, around));
        self.wake_guest(self.now);
    }

    // ---- QEMU ----

    fn kick_output(&mut self, qemu: usize, port: usize) {
        let after = self.rng.within(5 * MICROSECOND, 150 * MICROSECOND);
        self.at(self.now + after, Event::Output(qemu, port));
    }

    pub(super) fn kick_input(&mut self, qemu: usize, port: usize) {
        let after = self.rng.within(5 * MICROSECOND, 300 * MICROSECOND);
        self.at(self.now + after, Event::Input(qemu, port));
    }

    fn output(&mut self, qemu: usize, port: usize) {
        let q = &mut self.qemus[qemu];
        if !q.alive || !(q.running || self.options.drains_stopped || !q.ran) {
            return;
        }
        let before = q.ports[port].queue.len();
        let more = q.ports[port].flush(self.rng.len(1, 9000));
        let freed = q.ports[port].queue.len() < before;
        if more {
            self.kick_output(qemu, port);
        }
        if freed && qemu == self.vm {
            self.wake_guest_within(0, 100 * MICROSECOND);
        }
        if self
            .host
            .as_ref()
            .is_some_and(|host| host.source.qemu == qemu)
        {
            self.wake_host_within(10 * MICROSECOND, 300 * MICROSECOND);
        }
    }

    pub(super) fn after_read(&mut self, qemu: usize, port: usize) {
        let q = &mut self.qemus[qemu];
        let honours = q.running || self.options.drains_stopped;
        if q.alive && q.ports[port].unthrottle(honours) {
            self.kick_output(qemu, port);
        }
    }

    pub(super) fn connect(&mut self, qemu: usize, port: usize) {
        let q = &mut self.qemus[qemu];
        let running = q.running;
        q.ports[port].connect(running);
        if running && self.options.kind == vmtrail_continuity::attach::PortKind::Socket {
            self.at(self.now + CONTROL, Event::Control(qemu, port));
            self.kick_output(qemu, port);
        }
    }

    pub(super) fn disconnect(&mut self, qemu: usize, port: usize) {
        let q = &mut self.qemus[qemu];
        let running = q.running;
        q.ports[port].disconnect(running);
        if running && self.options.kind == vmtrail_continuity::attach::PortKind::Socket {
            self.at(self.now + CONTROL, Event::Control(qemu, port));
        }
    }

    fn start_vm(&mut self, qemu: usize) {
        let honours = self.options.drains_stopped;
        let q = &mut self.qemus[qemu];
        q.running = true;
        q.ran = true;
        for index in 0..self.options.ports {
            let port = &mut self.qemus[qemu].ports[index];
            port.start(honours);
            self.at(self.now + CONTROL, Event::Control(qemu, index));
            self.kick_output(qemu, index);
            self.kick_input(qemu, index);
        }
        self.wake_guest_within(0, 300 * MICROSECOND);
    }

    fn stop_vm(&mut self, qemu: usize) {
        let q = &mut self.qemus[qemu];
        q.running = false;
        for port in &mut q.ports {
            // Kicks that came before the stop are served before it.
            while port.flush(usize::MAX) {}
        }
        self.guest_at = u64::MAX;
        let wall_ns = self.now;
        self.say(qemu, Fact::Said(Said::Stopped { wall_ns }));
    }

    fn resume_vm(&mut self, qemu: usize) {
        if self.qemus[qemu].running || !self.qemus[qemu].alive {
            return;
        }
        self.start_vm(qemu);
        let wall_ns = self.now;
        self.say(qemu, Fact::Said(Said::Resumed { wall_ns }));
    }

    pub(super) fn kill(&mut self, qemu: usize) {
        let q = &mut self.qemus[qemu];
        if q.alive {
            q.alive = false;
            q.running = false;
            let reason = "end of file".to_owned();
            self.say(qemu, Fact::Said(Said::Closed(reason)));
        }
    }

    /// A monitor says things in order, with some delay.
    fn say(&mut self, qemu: usize, fact: Fact) {
        if let Fact::Said(Said::Status(status)) = &fact {
            self.qemus[qemu].status = status.clone();
            if !self.options.events {
                return;
            }
        }
        let after = self.rng.within(20 * MICROSECOND, 1500 * MICROSECOND);
        let q = &mut self.qemus[qemu];
        q.said_at = q.said_at.max(self.now + after);
        let at = q.said_at;
        let life = self.host_life;
        self.at(at, Event::Fact(qemu, life, fact));
    }

    fn say_status(&mut self, qemu: usize, status: Status) {
        self.log(|| format!("qemu{qemu} is {status:?}"));
        self.say(qemu, Fact::Said(Said::Status(status)));
    }

    pub(super) fn tell(&mut self, qemu: usize, to: usize, number: u64, command: Command) {
        // One connection: commands arrive in the order in which they were sent.
        let at = self.now + 200 * MICROSECOND;
        self.at(at, Event::Tell(qemu, to, number, command));
    }

    fn obey(&mut self, qemu: usize, to: usize, number: u64, command: Command) {
        if !self.qemus[qemu].alive {
            let refusal = Err("the connection is closed".to_owned());
            self.say(qemu, Fact::Reply(command, refusal));
            return;
        }
        let stage = self.qemus[qemu].outgoing.as_ref().map(|going| going.stage);
        let mut result = Ok(None);
        match &command {
            Command::EnableEvents | Command::EnableReturnPath => {}
            Command::PauseBeforeSwitchover(on) => {
                if stage.is_none() {
                    self.qemus[qemu].pause = *on;
                } else {
                    result = Err("there is a migration in progress".to_owned());
                }
            }
            Command::Incoming(_) => {
                if self.fault == Some(Fault::RefuseIncoming) {
                    result = Err("address already in use".to_owned());
                } else {
                    self.say_status(qemu, Status::Setup);
                }
            }
            Command::Migrate(_) => {
                if self.fault == Some(Fault::RefuseMigrate) || stage.is_some() {
                    result = Err("connection refused".to_owned());
                } else {
                    self.qemus[qemu].outgoing = Some(Outgoing {
                        to,
                        stage: Stage::Setup,
                        fault: self.fault,
                        number,
                    });
                    self.step_after(qemu, number, 2 * MILLISECOND);
                }
            }
            Command::Continue => {
                if stage == Some(Stage::Held) {
                    self.enter(qemu, Stage::Device);
                    self.step_after(qemu, number, MILLISECOND);
                } else {
                    result = Err("migration not in expected state: pre-switchover".to_owned());
                }
            }
            Command::Cancel => self.cancel_migration(qemu),
            Command::QueryStatus => {
                result = Ok(Some(Said::Status(self.qemus[qemu].status.clone())));
            }
            Command::QueryRunning => {
                result = Ok(Some(Said::Running(self.qemus[qemu].running)));
            }
        }
        self.say(qemu, Fact::Reply(command, result));
    }

    fn step_after(&mut self, qemu: usize, number: u64, most: u64) {
        let after = self.rng.within(100 * MICROSECOND, most);
        self.at(self.now + after, Event::Step(qemu, number));
    }

    fn enter(&mut self, qemu: usize, stage: Stage) {
        if let Some(going) = &mut self.qemus[qemu].outgoing {
            going.stage = stage;
        }
    }

    /// A migration takes its next step.
    fn step(&mut self, qemu: usize, number: u64) {
        let Some(going) = self.qemus[qemu]
            .outgoing
            .clone()
            .filter(|going| going.number == number)
        else {
            return;
        };
        let Outgoing {
            to, stage, fault, ..
        } = going;
        if !self.qemus[to].alive {
            self.fail_migration(qemu);
            return;
        }
        match stage {
            Stage::Setup => {
                self.say_status(qemu, Status::Setup);
                if fault == Some(Fault::FailSetup) {
                    self.fail_migration(qemu);
                    return;
                }
                self.enter(qemu, Stage::Active);
                self.step_after(qemu, number, 5 * MILLISECOND);
            }
            Stage::Active => {
                if self.rng.chance(200) {
                    self.say_status(qemu, Status::Other("wait-unplug".into()));
                }
                self.say_status(qemu, Status::Active);
                match fault {
                    Some(Fault::FailActive) => self.fail_migration(qemu),
                    Some(Fault::CancelActive) => self.cancel_migration(qemu),
                    _ => {
                        self.enter(qemu, Stage::Stopping);
                        self.step_after(qemu, number, 40 * MILLISECOND);
                    }
                }
            }
            Stage::Stopping => {
                self.stop_vm(qemu);
                if self.qemus[qemu].pause {
                    self.enter(qemu, Stage::Held);
                    self.say_status(qemu, Status::PreSwitchover);
                    if let Some(Fault::FailHeld | Fault::CancelHeld | Fault::DestinationDies) =
                        fault
                    {
                        self.step_after(qemu, number, 20 * MILLISECOND);
                    }
                } else {
                    self.enter(qemu, Stage::Device);
                    self.step_after(qemu, number, MILLISECOND);
                }
            }
            Stage::Held => match fault {
                Some(Fault::CancelHeld) => self.cancel_migration(qemu),
                Some(Fault::DestinationDies) => {
                    self.kill(to);
                    self.step_after(qemu, number, 5 * MILLISECOND);
                }
                _ => self.fail_migration(qemu),
            },
            Stage::Device => {
                self.say_status(qemu, Status::Device);
                if fault == Some(Fault::FailDevice) {
                    self.fail_migration(qemu);
                    return;
                }
                self.say_status(to, Status::Active);
                for port in 0..self.options.ports {
                    let saved = self.qemus[qemu].ports[port].clone();
                    self.qemus[to].ports[port].load(&saved);
                    // The load unthrottles, and the bottom half does not ask whether the VM runs.
                    self.kick_output(to, port);
                }
                self.enter(qemu, Stage::Loaded);
                self.step_after(qemu, number, 8 * MILLISECOND);
            }
            Stage::Loaded => {
                if fault == Some(Fault::FailLoaded) {
                    self.kill(to);
                    self.fail_migration(qemu);
                    return;
                }
                self.enter(qemu, Stage::Over);
                self.qemus[qemu].outgoing = None;
                let after = self.rng.within(0, 3 * MILLISECOND);
                self.at(self.now + after, Event::Run(to, qemu));
                self.say_status(qemu, Status::Completed);
            }
            Stage::Over => {}
        }
    }

    fn fail_migration(&mut self, qemu: usize) {
        let Some(going) = self.qemus[qemu].outgoing.take() else {
            return;
        };
        if self.qemus[going.to].alive && self.rng.chance(500) {
            self.say_status(going.to, Status::Failed);
        }
        self.kill(going.to);
        self.say_status(qemu, Status::Failed);
        self.resume_vm(qemu);
    }

    fn cancel_migration(&mut self, qemu: usize) {
        let Some(going) = self.qemus[qemu].outgoing.clone() else {
            return;
        };
        if going.stage >= Stage::Device {
            return;
        }
        self.qemus[qemu].outgoing = None;
        if going.stage == Stage::Held {
            // So seen on QEMU 7.2: the cancelled hold passes through `device`.
            self.say_status(qemu, Status::Device);
        }
        self.say_status(qemu, Status::Cancelling);
        self.resume_vm(qemu);
        self.say_status(qemu, Status::Cancelled);
        self.kill(going.to);
    }

    // ---- people and faults ----

    fn migrate(&mut self) {
        let free = self
            .host
            .as_ref()
            .is_some_and(|host| host.attempt.is_none() && host.source.qemu == self.vm)
            && self.qemus[self.vm].running
            && self.qemus[self.vm].outgoing.is_none()
            && self.now >= self.stalled_until
            && self.forked.is_none();
        if !free || self.phase != Phase::Storm {
            return;
        }
        self.fault = self
            .rng
            .chance(self.options.migration_faults)
            .then(|| self.rng.one_of(&Fault::ALL));
        let fault = self.fault;
        self.log(|| format!("a migration begins, fault {fault:?}"));
        self.begin_migration();
        if self.rng.chance(self.options.migration_faults / 3) {
            let after = self.rng.within(0, 60 * MILLISECOND);
            self.at(self.now + after, Event::Cancel(self.attempts));
        }
    }

    fn begin_migration(&mut self) {
        self.qemus.push(Qemu::new(&self.options));
        self.begin_attempt(self.qemus.len() - 1);
    }

    fn crash(&mut self, restart_after: u64) -> Result<(), Violation> {
        let Some(host) = self.host.take() else {
            return Ok(());
        };
        self.log(|| "the recorder is killed".into());
        self.summary.crashes += 1;
        self.host_life += 1;
        self.host_at = u64::MAX;
        // A process that is gone stands still no more.
        if self.stalled_until > self.now {
            self.stalled_ns -= self.stalled_until - self.now;
            self.stalled_until = self.now;
        }
        let other = host.attempt.as_ref().map(|attempt| attempt.other.qemu);
        for qemu in [Some(host.source.qemu), other].into_iter().flatten() {
            for port in 0..self.options.ports {
                self.disconnect(qemu, port);
            }
        }
        self.disk
            .crash_and_recover(&mut self.rng, self.options.torn, self.mutation)?;
        self.at(self.now + restart_after, Event::Restart);
        Ok(())
    }

    fn restart(&mut self) {
        if self.host.is_some() {
            return;
        }
        if self.qemus[self.vm].running {
            self.start_host(self.vm);
        } else {
            self.at(self.now + 20 * MILLISECOND, Event::Restart);
        }
    }

    /// Somebody looks after what no recorder does: a source that waits for one that died, a recorder that lost its VM.
    fn watch(&mut self) -> Result<(), Violation> {
        let deserted = self.host.as_ref().is_none_or(|host| host.attempt.is_none());
        if deserted {
            for qemu in 0..self.qemus.len() {
                let held = self.qemus[qemu]
                    .outgoing
                    .as_ref()
                    .filter(|going| going.stage == Stage::Held)
                    .map(|going| (going.to, going.number));
                if let Some((to, number)) = held {
                    self.tell(qemu, to, number, Command::Continue);
                }
            }
        }
        let lost = deserted
            && self
                .host
                .as_ref()
                .is_some_and(|host| host.source.qemu != self.vm)
            && self.qemus[self.vm].running;
        self.estranged = if lost { self.estranged + 1 } else { 0 };
        if self.estranged > 5 {
            self.estranged = 0;
            self.log(|| "the recorder follows a VM that is elsewhere: started again".into());
            self.crash(0)?;
        }
        self.at(self.now + 100 * MILLISECOND, Event::Watch);
        Ok(())
    }

    /// The VM's process ends, and another one is started from the snapshot, with a recorder of its own on the same trail.
    fn restore(&mut self) -> Result<(), Violation> {
        let busy = self.host.as_ref().is_none_or(|host| host.attempt.is_some())
            || self.qemus[self.vm].outgoing.is_some()
            || !self.qemus[self.vm].running;
        let same_session = self
            .kept
            .as_ref()
            .is_some_and(|kept| kept.guest.session == self.guest.session);
        if busy || !same_session || self.phase != Phase::Storm {
            return Ok(());
        }
        let Some(Kept { guest, ports }) = self.kept.take() else {
            return Ok(());
        };
        self.log(|| "the VM is put back".into());
        self.summary.forked = true;
        self.crash(3600 * SECOND)?;
        self.kill(self.vm);
        self.held_at_fork = self.disk.durable.clone();
        let mut qemu = Qemu::new(&self.options);
        for (port, saved) in qemu.ports.iter_mut().zip(&ports) {
            port.load(saved);
        }
        self.qemus.push(qemu);
        self.vm = self.qemus.len() - 1;
        self.guest = guest;
        self.forked = Some(self.guest.next());
        self.guest.begin_line();
        self.start_host(self.vm);
        self.start_vm(self.vm);
        let vm = self.vm;
        self.say(vm, Fact::Said(Said::Resumed { wall_ns: 0 }));
        // Whatever two histories in one trail look like is the fork's judge's alone.
        self.calm_at = self.now + 2 * SECOND;
        self.at(self.calm_at, Event::Calm);
        Ok(())
    }

    fn judge_forks(&mut self) -> Result<(), Violation> {
        let told = self
            .host
            .as_ref()
            .map(|host| host.first_told.clone())
            .unwrap_or_default();
        if let Some(restored) = &self.forked {
            self.summary.unseen_fork = restored.iter().any(|(stream, put_back_to)| {
                let held = self.held_at_fork.get(stream).copied().unwrap_or_default();
                held > *put_back_to && told.get(stream).is_some_and(|told| *told >= held)
            });
        }
        fork::judge(
            &self.disk.entries,
            self.forked.as_ref(),
            &told,
            &self.held_at_fork,
        )
    }

    // ---- the end ----

    fn calm_down(&mut self) {
        if self.phase != Phase::Storm || self.now < self.calm_at {
            return;
        }
        self.log(|| "all faults stop".into());
        if self.forked.is_some() {
            self.phase = Phase::Done;
            return;
        }
        self.options.tears = 0;
        self.options.swallows = 0;
        self.options.clock_behind = false;
        self.disk_full_until = 0;
        self.fault = None;
        self.enter_phase(Phase::Settling);
        for qemu in &mut self.qemus {
            if let Some(going) = &mut qemu.outgoing
                && going.stage < Stage::Held
            {
                going.fault = None;
            }
        }
        self.produce_last();
        self.at(self.now, Event::Check);
    }

    /// Some more pages, so that there is something to arrive.
    fn produce_last(&mut self) {
        for cpu in 0..self.options.cpus as usize {
            self.at(self.now + MILLISECOND, Event::Produce(cpu));
            self.at(self.now + 3 * MILLISECOND, Event::Produce(cpu));
        }
    }

    fn enter_phase(&mut self, phase: Phase) {
        self.log(|| format!("{phase:?}"));
        self.phase = phase;
        self.phase_at = self.now;
    }

    fn is_complete(&self) -> bool {
        let quiet = self.now > self.phase_at + 5 * MILLISECOND
            && self.qemus[self.vm].running
            && self.qemus[self.vm].outgoing.is_none();
        let host = self
            .host
            .as_ref()
            .is_some_and(|host| host.attempt.is_none() && host.source.qemu == self.vm);
        // The agent does not repeat counters that the driver swallowed before they change again (docs/testing.md).
        let told = self.swallowed
            || self.made.streams.iter().all(|((session, stream), made)| {
                let told = self.disk.overrun.get(&(*session, stream.0));
                made.ended || told.copied().unwrap_or(0) == made.overwritten.len() as u64
            });
        quiet && host && told && progress::incomplete(&self.made, &self.disk.pages).is_none()
    }

    fn check(&mut self) -> Result<(), Violation> {
        let waited = self.now - self.phase_at;
        match self.phase {
            Phase::Settling | Phase::SettlingAgain => {
                if self.is_complete() {
                    let again = self.phase == Phase::Settling && self.options.migrations > 0;
                    self.enter_phase(if again { Phase::Migrating } else { Phase::Done });
                    if again {
                        self.outcomes_before = self.outcomes.len();
                        self.begin_migration();
                    }
                } else if waited > BOUND {
                    if let Some(failed) = self.last_failed {
                        let streams = progress::incomplete(&self.made, &self.disk.pages).is_none();
                        way_back::judge_streams(failed, streams, waited)?;
                    }
                    progress::judge(&self.made, &self.disk.pages, waited)?;
                    return Err(Violation::of(
                        Judge::Progress,
                        format!(
                            "{} ms after the last fault the overruns are not told, or the recorder is not with its VM",
                            waited / MILLISECOND
                        ),
                    ));
                }
            }
            Phase::Migrating => {
                if let Some((_, outcome)) = self.outcomes.get(self.outcomes_before) {
                    let committed = *outcome == Outcome::Committed;
                    way_back::judge_next(&format!("{outcome:?}"), committed)?;
                    self.enter_phase(Phase::SettlingAgain);
                    self.produce_last();
                } else if waited > BOUND {
                    way_back::judge_next("nothing at all", false)?;
                }
            }
            Phase::Storm | Phase::Done => {}
        }
        self.at(self.now + 10 * MILLISECOND, Event::Check);
        Ok(())
    }
}
