//! One attempt to move the VM that we drive ourselves.
//!
//! ```text
//!  Preparing ----> Starting ----> Precopy ----> Draining ----> LettingGo ----> Committing ----> Ended(Committed)
//!  capabilities,   migrate        passes        stopped, not   continue        source done,
//!  incoming                                     yet saved                      destination not yet running
//!      |              |              |              |               |              |
//!      +--------------+------+-------+--------------+               |              |
//!                            | cancel, failure                      +------+-------+
//!                            v                                             | failure
//!                        WayBack --------> Ended(Cancelled | Failed) <-----+
//!                        the source runs on, a second attempt can succeed
//! ```
//!
//! The happy path: capabilities and `migrate-incoming` are answered, `migrate` is answered, the source becomes active,
//! stops, and says `pre-switchover`. Now the guest is held: the queues are looked at until they are proven empty and
//! the readers have found nothing more to read, or until the drain budget is spent. Then `migrate-continue`. The
//! commit is the destination's RESUME and nothing else: a source's `completed` was seen although the destination had
//! died of a port mismatch.
//!
//! Exactly once does not rest on the drain. What it leaves behind is replayed by the agent; the drain makes the
//! boundary clean and the replay short.

pub mod admission;
mod timers;

use std::collections::VecDeque;
use std::time::Duration;

pub use timers::Timer;
use timers::Timers;

use crate::time::{Instant, nanos};
use crate::vmm::{Command, Event, Side, Status};
use admission::Plan;

/// How long one monitor command may take.
const REPLY_DEADLINE: Duration = Duration::from_secs(5);
/// How long a migration may take to become active (a destination that does not answer its port).
const START_DEADLINE: Duration = Duration::from_secs(30);
/// How often the state is asked for besides listening: a destination without the `events` capability says little.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// How often the queues are looked at while the guest is held.
const PROBE_INTERVAL: Duration = Duration::from_millis(1);
/// How long the destination may take from the source's `completed` to its RESUME.
const COMMIT_DEADLINE: Duration = Duration::from_secs(30);
/// How long a cancelled migration may take to end.
const CANCEL_DEADLINE: Duration = Duration::from_secs(10);

/// What the user chose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The migration URI.
    pub uri: String,
    /// The guest is held no longer than this for a trace.
    pub drain_budget: Duration,
}

/// The phases that a user sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Both ends are asked.
    Admit,
    /// The destination is made ready.
    Prepare,
    /// RAM is copied while the VM runs.
    Migrate,
    /// The VM is stopped.
    Switchover,
    /// The destination is about to run.
    Commit,
    /// Streams are checked against their boundaries.
    Verify,
    /// The source is let go.
    Release,
    /// The source goes on.
    WayBack,
}

impl Phase {
    /// The name in logs and in the trail.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Prepare => "prepare",
            Self::Migrate => "migrate",
            Self::Switchover => "switchover",
            Self::Commit => "commit",
            Self::Verify => "verify",
            Self::Release => "release",
            Self::WayBack => "way-back",
        }
    }
}

/// What the driver shall do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Tell a monitor something and hand its answer to [`Migration::handle_reply`].
    Tell(Side, Command),
    /// A phase begins.
    Enter(Phase),
    /// Look whether all queues of the stopped source are empty: [`Migration::handle_queues`].
    ProbeQueues,
    /// Read all ports of the source until nothing is there: [`Migration::handle_dry`].
    ReadDry,
    /// Take down each stream's boundary: what comes next comes from the destination.
    RecordBoundary,
    /// The destination runs: its residency is real, read it.
    Commit,
    /// The attempt is over.
    End(Outcome),
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The VM runs at the destination.
    Committed,
    /// The VM runs at the source, because the user wanted it.
    Cancelled,
    /// The VM did not move.
    Failed(String),
    /// Where the VM runs cannot be told: both monitors are gone, or neither end runs it.
    Unknown(String),
}

/// Whether a request to cancel was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelAnswer {
    /// The way back begins.
    Taken,
    /// The state is being saved: a few milliseconds more and the destination runs.
    TooLate,
    /// Nothing is under way.
    Nothing,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Measured {
    /// Source STOP, host wall time.
    pub stopped_wall_ns: Option<u64>,
    /// Destination RESUME, host wall time.
    pub resumed_wall_ns: Option<u64>,
    /// How long the stopped source was held.
    pub drain_ns: Option<u64>,
    /// Whether its queues were proven empty.
    pub drained: Option<bool>,
}

impl Measured {
    /// From the source's STOP to the destination's RESUME. `None` where the hosts' clocks contradict each other.
    #[must_use]
    pub fn blackout_ns(&self) -> Option<u64> {
        self.resumed_wall_ns?.checked_sub(self.stopped_wall_ns?)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Commands that must be answered before `migrate`, in order.
    Preparing {
        waiting: VecDeque<(Side, Command)>,
    },
    Starting,
    Precopy,
    Draining {
        since: Instant,
        proven: bool,
    },
    LettingGo,
    Committing,
    WayBack {
        outcome: Outcome,
    },
    Ended,
}

/// See the module's text.
#[derive(Debug)]
pub struct Migration {
    state: State,
    timers: Timers,
    actions: VecDeque<Action>,
    options: Options,
    plan: Plan,
    measured: Measured,
    source_completed: bool,
}

impl Migration {
    /// Begins an attempt that was admitted; ports of the destination are already equal.
    #[must_use]
    pub fn new(now: Instant, options: Options, plan: Plan) -> Self {
        let mut waiting = VecDeque::new();
        if plan.events {
            waiting.push_back((Side::Source, Command::EnableEvents));
            waiting.push_back((Side::Destination, Command::EnableEvents));
        }
        if plan.return_path {
            waiting.push_back((Side::Source, Command::EnableReturnPath));
            waiting.push_back((Side::Destination, Command::EnableReturnPath));
        }
        if plan.pause_before_switchover {
            waiting.push_back((Side::Source, Command::PauseBeforeSwitchover(true)));
        }
        waiting.push_back((Side::Destination, Command::Incoming(options.uri.clone())));
        let mut migration = Self {
            state: State::Preparing { waiting },
            timers: Timers::default(),
            actions: VecDeque::new(),
            options,
            plan,
            measured: Measured::default(),
            source_completed: false,
        };
        migration.actions.push_back(Action::Enter(Phase::Prepare));
        migration.tell_next(now);
        migration
    }

    /// What was measured so far.
    #[must_use]
    pub fn measured(&self) -> Measured {
        self.measured
    }

    /// Until when the guest may be held, while it is.
    #[must_use]
    pub fn held_until(&self) -> Option<Instant> {
        match self.state {
            State::Draining { since, .. } => Some(since.after(self.options.drain_budget)),
            _ => None,
        }
    }

    /// Whether the attempt is over.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// A monitor said something.
    pub fn handle_event(&mut self, now: Instant, side: Side, event: &Event) {
        match (side, event) {
            (Side::Source, Event::Status(status)) => self.handle_source_status(now, status),
            (Side::Destination, Event::Status(Status::Failed)) => {
                self.handle_failure(now, "the destination reports that it failed");
            }
            (Side::Source, Event::Stopped { wall_ns }) => {
                self.measured.stopped_wall_ns = Some(*wall_ns);
            }
            (Side::Destination, Event::Resumed { wall_ns }) => {
                self.measured.resumed_wall_ns = Some(*wall_ns);
                self.commit();
            }
            (Side::Destination, Event::Running(true)) => self.commit(),
            (Side::Destination, Event::Closed(reason)) => {
                self.handle_destination_closed(now, reason)
            }
            (Side::Source, Event::Closed(reason)) => self.handle_source_closed(now, reason),
            _ => {}
        }
    }

    /// A monitor answered a command.
    pub fn handle_reply(
        &mut self,
        now: Instant,
        side: Side,
        command: &Command,
        result: Result<(), String>,
    ) {
        match &mut self.state {
            State::Preparing { waiting } if waiting.front() == Some(&(side, command.clone())) => {
                waiting.pop_front();
                match result {
                    Ok(()) => self.tell_next(now),
                    // Capabilities other than the pause are comfort; a monitor that refuses them can still migrate.
                    Err(reason) if matches!(command, Command::Incoming(_)) => {
                        self.way_back(
                            now,
                            Outcome::Failed(format!(
                                "the destination refused to listen on {}: {reason}",
                                self.options.uri
                            )),
                        );
                    }
                    Err(_) => {
                        if matches!(command, Command::PauseBeforeSwitchover(_)) {
                            self.plan.pause_before_switchover = false;
                        }
                        self.tell_next(now);
                    }
                }
            }
            State::Starting if matches!(command, Command::Migrate(_)) => {
                self.timers.stop(Timer::Reply);
                if let Err(reason) = result {
                    self.way_back(
                        now,
                        Outcome::Failed(format!("the source refused to migrate: {reason}")),
                    );
                }
            }
            // The pause is over already: the state will say how.
            State::LettingGo if *command == Command::Continue && result.is_err() => {
                self.actions
                    .push_back(Action::Tell(Side::Source, Command::QueryStatus));
            }
            _ => {}
        }
    }

    /// The answer to [`Action::ProbeQueues`]: `Some(true)` proven empty, `Some(false)` not empty, `None` cannot be told.
    pub fn handle_queues(&mut self, now: Instant, empty: Option<bool>) {
        let State::Draining { proven, .. } = &mut self.state else {
            return;
        };
        match empty {
            Some(false) => self.timers.set(Timer::Probe, now.after(PROBE_INTERVAL)),
            // Without proof the best that can be had is a reader that finds nothing; replay covers the rest.
            Some(true) | None => {
                *proven = empty == Some(true);
                self.actions.push_back(Action::ReadDry);
            }
        }
    }

    /// The answer to [`Action::ReadDry`]: all ports of the source were read until nothing was there.
    pub fn handle_dry(&mut self, now: Instant) {
        if let State::Draining { proven, .. } = self.state {
            self.let_go(now, proven);
        }
    }

    /// The user wants out.
    pub fn handle_cancel(&mut self, now: Instant) -> CancelAnswer {
        match self.state {
            State::Preparing { .. } | State::Starting | State::Precopy | State::Draining { .. } => {
                self.way_back(now, Outcome::Cancelled);
                CancelAnswer::Taken
            }
            State::WayBack { .. } => CancelAnswer::Taken,
            State::LettingGo | State::Committing => CancelAnswer::TooLate,
            State::Ended => CancelAnswer::Nothing,
        }
    }

    /// Call when [`Migration::poll_timeout`] has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(timer) = self.timers.take_due(now) {
            match (timer, &self.state) {
                (Timer::Reply, State::Preparing { .. } | State::Starting) => {
                    self.handle_failure(now, "a monitor did not answer in time");
                }
                (Timer::Start, State::Starting) => {
                    self.handle_failure(now, "the migration did not become active in time");
                }
                (Timer::DrainBudget, State::Draining { .. }) => self.let_go(now, false),
                (Timer::Probe, State::Draining { .. }) => {
                    self.actions.push_back(Action::ProbeQueues);
                }
                (Timer::Watch, _) => {
                    let side = if matches!(self.state, State::Committing) {
                        (Side::Destination, Command::QueryRunning)
                    } else {
                        (Side::Source, Command::QueryStatus)
                    };
                    self.actions.push_back(Action::Tell(side.0, side.1));
                    self.timers.set(Timer::Watch, now.after(WATCH_INTERVAL));
                }
                (Timer::Commit, State::Committing) => {
                    self.end(Outcome::Unknown(
                        "the source has sent everything, but the destination does not run: look at the destination's log and `query-status`, then decide which end may run".into(),
                    ));
                }
                (Timer::Cancelled, State::WayBack { outcome }) => {
                    let outcome = outcome.clone();
                    self.end(outcome);
                }
                _ => {}
            }
        }
    }

    /// The next thing to do.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When to call [`Migration::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    fn handle_source_status(&mut self, now: Instant, status: &Status) {
        match (status, &self.state) {
            (Status::Active, State::Starting) => self.enter_precopy(now),
            (Status::PreSwitchover, State::Starting | State::Precopy) => {
                self.timers.stop(Timer::Start);
                self.actions.push_back(Action::Enter(Phase::Switchover));
                self.state = State::Draining {
                    since: now,
                    proven: false,
                };
                self.timers
                    .set(Timer::DrainBudget, now.after(self.options.drain_budget));
                self.actions.push_back(Action::ProbeQueues);
            }
            // Without the pause, or because somebody else let it go.
            (Status::Device | Status::PostcopyActive, State::Starting | State::Precopy) => {
                self.actions.push_back(Action::Enter(Phase::Switchover));
                self.actions.push_back(Action::RecordBoundary);
                self.state = State::LettingGo;
            }
            (Status::Device, State::Draining { since, .. }) => {
                let since = *since;
                self.note_drain(now, since, false);
                self.actions.push_back(Action::RecordBoundary);
                self.state = State::LettingGo;
            }
            (
                Status::Completed,
                State::Starting | State::Precopy | State::Draining { .. } | State::LettingGo,
            ) => {
                self.source_completed = true;
                self.enter_committing(now);
            }
            (Status::Failed, _) => self.handle_failure(now, "the source reports that it failed"),
            (Status::Cancelled, State::WayBack { outcome }) => {
                let outcome = outcome.clone();
                self.end(outcome);
            }
            // Somebody else cancelled it.
            (
                Status::Cancelled,
                State::Starting | State::Precopy | State::Draining { .. } | State::LettingGo,
            ) => {
                self.actions.push_back(Action::Enter(Phase::WayBack));
                self.end(Outcome::Failed(
                    "the migration was cancelled by somebody else".into(),
                ));
            }
            // After `migrate_cancel` on an idle monitor there is nothing to wait for.
            (Status::None, State::WayBack { outcome }) => {
                let outcome = outcome.clone();
                self.end(outcome);
            }
            _ => {}
        }
    }

    fn handle_failure(&mut self, now: Instant, reason: &str) {
        match self.state {
            State::Preparing { .. } | State::Starting | State::Precopy | State::Draining { .. } => {
                self.way_back(now, Outcome::Failed(reason.to_owned()));
            }
            // The source falls back by itself (migration_iteration_finish, migration/migration.c, vm_start on failure).
            State::LettingGo => {
                self.actions.push_back(Action::Enter(Phase::WayBack));
                self.end(Outcome::Failed(reason.to_owned()));
            }
            State::Committing => self.end(Outcome::Unknown(reason.to_owned())),
            State::WayBack { ref outcome } => {
                let outcome = outcome.clone();
                self.end(outcome);
            }
            State::Ended => {}
        }
    }

    fn handle_destination_closed(&mut self, now: Instant, reason: &str) {
        let reason = format!("the destination's monitor is gone ({reason})");
        match self.state {
            // Its return path is broken, so the source will say `failed` and run on; wait for its word.
            State::LettingGo if !self.source_completed => {
                self.actions
                    .push_back(Action::Tell(Side::Source, Command::QueryStatus));
                self.timers.set(Timer::Watch, now.after(WATCH_INTERVAL));
            }
            _ => self.handle_failure(now, &reason),
        }
    }

    fn handle_source_closed(&mut self, now: Instant, reason: &str) {
        match self.state {
            // A source may end as soon as it has completed; the destination decides.
            State::LettingGo | State::Committing => {
                if self.state == State::LettingGo {
                    self.enter_committing(now);
                }
            }
            State::Ended => {}
            _ => self.end(Outcome::Unknown(format!(
                "the source's monitor is gone ({reason}): the VM may have ended with it"
            ))),
        }
    }

    fn tell_next(&mut self, now: Instant) {
        let State::Preparing { waiting } = &self.state else {
            return;
        };
        self.timers.set(Timer::Reply, now.after(REPLY_DEADLINE));
        if let Some((side, command)) = waiting.front() {
            self.actions.push_back(Action::Tell(*side, command.clone()));
            return;
        }
        self.state = State::Starting;
        self.timers.set(Timer::Start, now.after(START_DEADLINE));
        self.timers.set(Timer::Watch, now.after(WATCH_INTERVAL));
        self.actions.push_back(Action::Enter(Phase::Migrate));
        self.actions.push_back(Action::Tell(
            Side::Source,
            Command::Migrate(self.options.uri.clone()),
        ));
    }

    fn enter_precopy(&mut self, now: Instant) {
        self.state = State::Precopy;
        self.timers.stop(Timer::Start);
        self.timers.set(Timer::Watch, now.after(WATCH_INTERVAL));
    }

    fn let_go(&mut self, now: Instant, proven: bool) {
        let State::Draining { since, .. } = self.state else {
            return;
        };
        self.note_drain(now, since, proven);
        self.timers.stop(Timer::DrainBudget);
        self.timers.stop(Timer::Probe);
        self.state = State::LettingGo;
        self.actions
            .push_back(Action::Tell(Side::Source, Command::Continue));
        self.actions.push_back(Action::RecordBoundary);
        self.timers.set(Timer::Watch, now.after(WATCH_INTERVAL));
    }

    fn note_drain(&mut self, now: Instant, since: Instant, proven: bool) {
        self.measured.drain_ns = Some(nanos(now.since(since)));
        self.measured.drained = Some(proven);
    }

    fn enter_committing(&mut self, now: Instant) {
        self.actions.push_back(Action::Enter(Phase::Commit));
        self.state = State::Committing;
        self.timers.stop_all();
        self.timers.set(Timer::Commit, now.after(COMMIT_DEADLINE));
        self.timers.set(Timer::Watch, now.after(WATCH_INTERVAL));
        self.actions
            .push_back(Action::Tell(Side::Destination, Command::QueryRunning));
    }

    fn commit(&mut self) {
        match self.state {
            State::LettingGo => self.actions.push_back(Action::Enter(Phase::Commit)),
            State::Committing => {}
            // A postcopy destination runs before the source is done; any other RESUME at this time is not the switchover.
            _ => return,
        }
        self.actions.push_back(Action::Commit);
        self.end(Outcome::Committed);
    }

    fn way_back(&mut self, now: Instant, outcome: Outcome) {
        let started = !matches!(self.state, State::Preparing { .. });
        self.actions.push_back(Action::Enter(Phase::WayBack));
        self.state = State::WayBack {
            outcome: outcome.clone(),
        };
        self.timers.stop_all();
        if started {
            self.actions
                .push_back(Action::Tell(Side::Source, Command::Cancel));
            self.actions
                .push_back(Action::Tell(Side::Source, Command::QueryStatus));
            self.timers.set(Timer::Watch, now.after(WATCH_INTERVAL));
            self.timers
                .set(Timer::Cancelled, now.after(CANCEL_DEADLINE));
        } else {
            self.end(outcome);
        }
    }

    fn end(&mut self, outcome: Outcome) {
        self.timers.stop_all();
        if self.plan.pause_before_switchover && outcome != Outcome::Committed {
            // Whoever migrates this VM next did not ask for the pause, and would wait in it for ever.
            self.actions.push_back(Action::Tell(
                Side::Source,
                Command::PauseBeforeSwitchover(false),
            ));
        }
        self.state = State::Ended;
        self.actions.push_back(Action::End(outcome));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            missing_ports: vec![],
            pause_before_switchover: true,
            return_path: true,
            events: true,
        }
    }

    fn options() -> Options {
        Options {
            uri: "tcp:127.0.0.1:4444".into(),
            drain_budget: Duration::from_millis(50),
        }
    }

    fn at(ms: u64) -> Instant {
        Instant(0).after(Duration::from_millis(ms))
    }

    fn actions(migration: &mut Migration) -> Vec<Action> {
        std::iter::from_fn(|| migration.poll_action()).collect()
    }

    /// An attempt whose commands were all answered well, with the source active.
    fn active() -> Migration {
        let mut migration = Migration::new(at(0), options(), plan());
        for _ in 0..20 {
            for action in actions(&mut migration) {
                if let Action::Tell(side, command) = action {
                    migration.handle_reply(at(1), side, &command, Ok(()));
                }
            }
        }
        migration.handle_event(at(2), Side::Source, &Event::Status(Status::Setup));
        migration.handle_event(at(3), Side::Source, &Event::Status(Status::Active));
        assert_eq!(migration.state, State::Precopy);
        let _ = actions(&mut migration);
        migration
    }

    fn source(migration: &mut Migration, ms: u64, status: Status) {
        migration.handle_event(at(ms), Side::Source, &Event::Status(status));
    }

    fn held(ms: u64) -> Migration {
        let mut migration = active();
        migration.handle_event(at(ms), Side::Source, &Event::Stopped { wall_ns: 1000 });
        source(&mut migration, ms, Status::PreSwitchover);
        assert_eq!(
            actions(&mut migration),
            [Action::Enter(Phase::Switchover), Action::ProbeQueues]
        );
        migration
    }

    #[test]
    fn the_happy_path() {
        let mut migration = held(100);
        migration.handle_queues(at(101), Some(false));
        assert_eq!(migration.poll_timeout(), Some(at(102)));
        migration.handle_timeout(at(102));
        assert_eq!(actions(&mut migration), [Action::ProbeQueues]);
        migration.handle_queues(at(103), Some(true));
        assert_eq!(actions(&mut migration), [Action::ReadDry]);
        migration.handle_dry(at(104));
        assert_eq!(
            actions(&mut migration),
            [
                Action::Tell(Side::Source, Command::Continue),
                Action::RecordBoundary
            ]
        );
        source(&mut migration, 105, Status::Device);
        source(&mut migration, 110, Status::Completed);
        let seen = actions(&mut migration);
        assert!(
            !seen.contains(&Action::Commit),
            "completed is not the commit"
        );
        migration.handle_event(
            at(112),
            Side::Destination,
            &Event::Resumed { wall_ns: 9000 },
        );
        assert_eq!(
            actions(&mut migration),
            [Action::Commit, Action::End(Outcome::Committed)]
        );
        let measured = migration.measured();
        assert_eq!(measured.blackout_ns(), Some(8000));
        assert_eq!(measured.drain_ns, Some(4_000_000));
        assert_eq!(measured.drained, Some(true));
    }

    #[test]
    fn the_guest_is_held_no_longer_than_the_budget() {
        let mut migration = held(100);
        migration.handle_queues(at(101), Some(false));
        migration.handle_timeout(at(150));
        let seen = actions(&mut migration);
        assert!(
            seen.contains(&Action::Tell(Side::Source, Command::Continue)),
            "{seen:?}"
        );
        assert_eq!(migration.measured().drained, Some(false));
        // A late proof changes nothing.
        migration.handle_queues(at(151), Some(true));
        migration.handle_dry(at(152));
        assert_eq!(actions(&mut migration), []);
    }

    #[test]
    fn cancel_takes_the_way_back_until_the_state_is_being_saved() {
        for held_first in [false, true] {
            let mut migration = if held_first { held(100) } else { active() };
            assert_eq!(migration.handle_cancel(at(110)), CancelAnswer::Taken);
            let seen = actions(&mut migration);
            assert!(
                seen.contains(&Action::Tell(Side::Source, Command::Cancel)),
                "{seen:?}"
            );
            source(&mut migration, 111, Status::Cancelling);
            source(&mut migration, 112, Status::Cancelled);
            let seen = actions(&mut migration);
            assert_eq!(seen.last(), Some(&Action::End(Outcome::Cancelled)));
            assert!(seen.contains(&Action::Tell(
                Side::Source,
                Command::PauseBeforeSwitchover(false)
            )));
        }
        let mut migration = held(100);
        migration.handle_queues(at(100), Some(true));
        migration.handle_dry(at(100));
        assert_eq!(migration.handle_cancel(at(101)), CancelAnswer::TooLate);
    }

    #[test]
    fn a_dead_destination_is_a_failure_before_and_unknown_after_the_source_completed() {
        let closed = Event::Closed("end of file".into());
        let mut migration = active();
        migration.handle_event(at(50), Side::Destination, &closed);
        let seen = actions(&mut migration);
        assert!(
            seen.contains(&Action::Tell(Side::Source, Command::Cancel)),
            "{seen:?}"
        );
        source(&mut migration, 51, Status::Failed);
        assert!(matches!(
            actions(&mut migration).last(),
            Some(Action::End(Outcome::Failed(reason))) if reason.contains("destination's monitor")
        ));

        let mut migration = held(100);
        migration.handle_timeout(at(150));
        source(&mut migration, 160, Status::Completed);
        migration.handle_event(at(161), Side::Destination, &closed);
        assert!(matches!(
            actions(&mut migration).last(),
            Some(Action::End(Outcome::Unknown(_)))
        ));
    }

    #[test]
    fn a_destination_that_never_runs_is_not_committed() {
        let mut migration = held(100);
        migration.handle_timeout(at(150));
        source(&mut migration, 160, Status::Completed);
        for ms in (200..31_000).step_by(100) {
            migration.handle_timeout(at(ms));
        }
        let seen = actions(&mut migration);
        assert!(!seen.contains(&Action::Commit));
        assert!(
            matches!(seen.last(), Some(Action::End(Outcome::Unknown(_)))),
            "{seen:?}"
        );
    }

    #[test]
    fn states_of_a_newer_monitor_change_nothing() {
        let mut migration = active();
        source(&mut migration, 10, Status::Other("hovering".into()));
        assert_eq!(migration.state, State::Precopy);
        assert_eq!(actions(&mut migration), []);
    }

    proptest::proptest! {
        /// Whatever comes in whatever order: it ends at most once, never commits without a running destination, and
        /// every state but the end has a deadline.
        #[test]
        fn any_order_of_facts_is_bounded(facts in proptest::collection::vec((0u8..16, 0u64..200), 1..60)) {
            let mut migration = Migration::new(at(0), options(), plan());
            let (mut now, mut ended, mut runs) = (0, 0, false);
            for (fact, wait) in facts {
                now += wait;
                let at = at(now);
                match fact {
                    0 => source(&mut migration, now, Status::Setup),
                    1 => source(&mut migration, now, Status::Active),
                    2 => source(&mut migration, now, Status::PreSwitchover),
                    3 => source(&mut migration, now, Status::Device),
                    4 => source(&mut migration, now, Status::Completed),
                    5 => source(&mut migration, now, Status::Failed),
                    6 => source(&mut migration, now, Status::Cancelled),
                    7 => { runs = true; migration.handle_event(at, Side::Destination, &Event::Running(true)); }
                    8 => { migration.handle_cancel(at); }
                    9 => migration.handle_event(at, Side::Destination, &Event::Closed("x".into())),
                    10 => migration.handle_event(at, Side::Source, &Event::Closed("x".into())),
                    11 => migration.handle_queues(at, Some(true)),
                    12 => migration.handle_dry(at),
                    13 => migration.handle_timeout(at),
                    14 => migration.handle_event(at, Side::Source, &Event::Stopped { wall_ns: now }),
                    _ => source(&mut migration, now, Status::Other("new".into())),
                }
                for action in actions(&mut migration) {
                    match action {
                        Action::Tell(side, command) => {
                            migration.handle_reply(at, side, &command, Ok(()));
                        }
                        Action::End(outcome) => {
                            ended += 1;
                            proptest::prop_assert!(outcome != Outcome::Committed || runs);
                        }
                        _ => {}
                    }
                }
                proptest::prop_assert!(ended <= 1);
                if !migration.has_ended() {
                    proptest::prop_assert!(migration.poll_timeout().is_some(), "{:?}", migration.state);
                }
            }
        }
    }
}
