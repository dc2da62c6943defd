//! The protocol machine of one connection: bytes and facts in, bytes and outcomes out.
//!
//! ```text
//!                  greeting                  {"return"} to qmp_capabilities
//!  AwaitGreeting ------------> Negotiating --------------------------------> Ready
//!        |                        |   ^ |                                      |
//!        |                        |   +-+ refused with oob: once more without  |
//!        | greeting deadline      | deadline, refused                          | end of file, broken
//!        | not QMP, end of file   | end of file, broken                        | line, write deadline,
//!        v                        v                                            v event flood, close()
//!  +------------------------------------- Closed ----------------------------------------+
//! ```
//!
//! | state | what it means |
//! | --- | --- |
//! | AwaitGreeting | connected; a QEMU whose monitor is held by somebody else says nothing here, for ever |
//! | Negotiating | `qmp_capabilities` is on its way, with `oob` where the greeting offers it |
//! | Ready | commands and events |
//! | Closed | every command was answered with the reason; nothing is accepted any more |
//!
//! # Use
//!
//! After any `handle_*` or [`Session::submit`]: take [`Session::poll_transmit`] (one buffer at a
//! time; report it written with [`Session::handle_transmitted`]) and [`Session::poll_outcome`] until
//! `None`, then sleep until [`Session::poll_timeout`].
//!
//! # Commands in flight
//!
//! Commands may be given before the connection is ready; they wait. At most [`IN_BAND_WINDOW`] are
//! with QEMU at a time and the rest wait here, for two reasons. QEMU's monitor stops reading, and so
//! stops running out-of-band commands, once eight commands are queued (`QMP_REQ_QUEUE_LEN_MAX` in
//! `monitor/monitor-internal.h`). And a command that QEMU has not got yet can be taken back when
//! its deadline passes; one that it has may take effect later, which its error then says.
//!
//! A command whose deadline passed still occupies its place in the window until QEMU answers; the
//! answer is counted in [`Stats::late_replies_count`] and dropped.
//! An error without id (QEMU could not read the id) is that of the only command in flight, if there
//! is exactly one; otherwise it, and any other answer to no command of ours, is counted as a stray.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{CloseReason, CommandError, QmpError};
use crate::event::{Budget, is_critical};
use crate::line::{DEFAULT_MAX_LINE_BYTES, LineSplitter};
use crate::message::{Event, Greeting, Message, excerpt};

/// Most commands with QEMU at a time that are not out of band: one place of QEMU's eight stays free.
pub const IN_BAND_WINDOW: usize = 7;

/// Most commands in all: in flight, abandoned, and waiting.
pub const MAX_COMMANDS: usize = 256;

/// Most bytes of a command. QEMU's JSON lexer gives up at 64 MiB tokens; nothing of ours is near.
pub const MAX_COMMAND_BYTES: usize = 1 << 20;

/// Events that may be dropped: most that wait for [`Session::poll_outcome`].
pub const MAX_WAITING_EVENTS: usize = 1024;

/// Events that must not be dropped: most that wait. At this the connection is given up, loudly.
pub const MAX_WAITING_CRITICAL_EVENTS: usize = 65_536;

/// What is fixed when a session begins.
#[derive(Debug, Clone)]
pub struct SessionConfig {
    /// Most bytes of a line.
    pub max_line_bytes: usize,
    /// How long the greeting may take.
    pub greeting_deadline: Duration,
    /// How long the answer to `qmp_capabilities` may take.
    pub negotiation_deadline: Duration,
    /// How long one buffer may take to be written whole.
    pub write_deadline: Duration,
    /// Whether to ask for out-of-band commands where they are on offer.
    pub want_oob: bool,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            max_line_bytes: DEFAULT_MAX_LINE_BYTES,
            greeting_deadline: Duration::from_secs(2),
            negotiation_deadline: Duration::from_secs(5),
            write_deadline: Duration::from_secs(10),
            want_oob: true,
        }
    }
}

/// A command's number, unique in its session; the `id` on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(u64);

impl CommandId {
    /// The number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

/// What a session has to tell, in the order in which it happened.
#[derive(Debug)]
pub enum Outcome {
    /// The connection is ready.
    Ready(Greeting),
    /// A command is over: its value as JSON text, or why there is none. Exactly one for each command
    /// that was [submitted](Session::submit).
    Reply(CommandId, Result<Box<RawValue>, CommandError>),
    /// Something happened in QEMU.
    Event {
        /// What.
        event: Event,
        /// The length of its line: what it counts where events are held.
        line_bytes: usize,
    },
    /// The connection is over. The last outcome.
    Closed(CloseReason),
}

/// A deadline, by what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// The greeting.
    Greeting,
    /// The answer to `qmp_capabilities`.
    Negotiation,
    /// The buffer that is being written.
    Write,
    /// A command.
    Command(CommandId),
}

/// Where the connection stands; see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Connected.
    AwaitGreeting,
    /// Greeted.
    Negotiating,
    /// In use.
    Ready,
    /// Over.
    Closed,
}

/// Counters over the life of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Events received.
    pub events_count: u64,
    /// Events dropped because too many waited. Never one that [`is_critical`].
    pub events_dropped_count: u64,
    /// Answers to commands whose deadline had passed.
    pub late_replies_count: u64,
    /// Answers to no command of ours.
    pub stray_replies_count: u64,
}

/// One QMP connection.
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    state: State,
    closed: Option<CloseReason>,
    splitter: LineSplitter,
    greeting: Option<Greeting>,
    /// Whether `qmp_capabilities` enabled (or just asks for) out of band.
    oob: bool,
    timers: BTreeMap<Timer, u64>,

    next_id: u64,
    /// Not sent yet, in order.
    waiting: VecDeque<Waiting>,
    /// Sent, not answered.
    in_flight: BTreeMap<CommandId, InFlight>,
    /// Lines to be written.
    transmit: VecDeque<Vec<u8>>,

    outcomes: VecDeque<Outcome>,
    events: Budget,
    critical_events: Budget,
    stats: Stats,
}

#[derive(Debug)]
struct Waiting {
    id: CommandId,
    line: Vec<u8>,
    allowed: Duration,
}

#[derive(Debug)]
struct InFlight {
    owner: Owner,
    allowed: Duration,
    oob: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// `qmp_capabilities`.
    Session,
    Caller,
    /// Nobody any more: its deadline has passed.
    Abandoned,
}

impl Session {
    /// A session over a connection that was made at `now`.
    #[must_use]
    pub fn new(now: u64, config: SessionConfig) -> Self {
        let greeting_at = after(now, config.greeting_deadline);
        Self {
            splitter: LineSplitter::new(config.max_line_bytes),
            config,
            state: State::AwaitGreeting,
            closed: None,
            greeting: None,
            oob: false,
            timers: BTreeMap::from([(Timer::Greeting, greeting_at)]),
            next_id: 1,
            waiting: VecDeque::new(),
            in_flight: BTreeMap::new(),
            transmit: VecDeque::new(),
            outcomes: VecDeque::new(),
            events: Budget::default(),
            critical_events: Budget::default(),
            stats: Stats::default(),
        }
    }

    /// Gives QEMU a command, `allowed` from `now` on to be answered. `arguments` is a JSON object,
    /// or [`Value::Null`] for none.
    ///
    /// Out of band (`oob`) is for commands that QEMU marks so and for connections where
    /// [`has_oob`](Self::has_oob); such a command passes those that wait.
    pub fn submit(
        &mut self,
        now: u64,
        name: &str,
        arguments: &Value,
        allowed: Duration,
        oob: bool,
    ) -> Result<CommandId, CommandError> {
        if let Some(reason) = &self.closed {
            return Err(CommandError::Closed(reason.clone()));
        }
        if oob && !(self.state == State::Ready && self.oob) {
            return Err(CommandError::NoOutOfBand);
        }
        if self.in_flight.len() + self.waiting.len() >= MAX_COMMANDS {
            return Err(CommandError::TooMany {
                limit: MAX_COMMANDS,
            });
        }
        let id = self.new_id();
        let line = command_line(name, arguments, id, oob);
        if line.len() > MAX_COMMAND_BYTES {
            return Err(CommandError::TooLong {
                bytes: line.len(),
                limit: MAX_COMMAND_BYTES,
            });
        }
        self.timers.insert(Timer::Command(id), after(now, allowed));
        if oob {
            self.in_flight.insert(
                id,
                InFlight {
                    owner: Owner::Caller,
                    allowed,
                    oob,
                },
            );
            self.transmit.push_back(line);
        } else {
            self.waiting.push_back(Waiting { id, line, allowed });
            self.fill_window();
        }
        Ok(id)
    }

    /// Takes what was read from the peer.
    pub fn handle_bytes(&mut self, now: u64, bytes: &[u8]) {
        if self.state == State::Closed {
            return;
        }
        self.splitter.push(bytes);
        while self.state != State::Closed {
            let (message, bytes) = match self.splitter.next_line() {
                Ok(None) => break,
                Ok(Some([])) => continue,
                Ok(Some(line)) => (Message::parse(line), line.len()),
                Err(error) => return self.close(error.into()),
            };
            match message {
                Ok(message) => self.handle_message(now, message, bytes),
                Err(error) if self.state == State::AwaitGreeting => {
                    self.close(CloseReason::NotQmp(error.to_string()));
                }
                Err(error) => self.close(error.into()),
            }
        }
    }

    /// The peer has closed its side.
    pub fn handle_eof(&mut self) {
        if self.state == State::AwaitGreeting {
            let detail = match self.splitter.partial() {
                [] => "it closed the connection without a word".to_owned(),
                partial => format!("it said `{}` and closed the connection", excerpt(partial)),
            };
            return self.close(CloseReason::NotQmp(detail));
        }
        self.close(CloseReason::PeerClosed);
    }

    /// Reading or writing failed.
    pub fn handle_io_error(&mut self, error: &std::io::Error) {
        self.close(CloseReason::Io(error.to_string()));
    }

    /// The buffer that [`poll_transmit`](Self::poll_transmit) gave last is written whole.
    pub fn handle_transmitted(&mut self) {
        self.timers.remove(&Timer::Write);
    }

    /// Time has passed: acts on every deadline that is not after `now`.
    pub fn handle_timeout(&mut self, now: u64) {
        let due: Vec<Timer> = self
            .timers
            .iter()
            .filter(|(_, at)| **at <= now)
            .map(|(timer, _)| *timer)
            .collect();
        for timer in due {
            // An earlier one may have closed the session and so stopped the others.
            if self.timers.remove(&timer).is_none() {
                continue;
            }
            match timer {
                Timer::Greeting => {
                    let after = self.config.greeting_deadline;
                    self.close(match self.splitter.partial() {
                        [] => CloseReason::GreetingTimeout { after },
                        partial => CloseReason::NotQmp(format!("it said `{}`", excerpt(partial))),
                    });
                }
                Timer::Negotiation => {
                    let after = self.config.negotiation_deadline;
                    self.close(CloseReason::NegotiationTimeout { after });
                }
                Timer::Write => {
                    let after = self.config.write_deadline;
                    self.close(CloseReason::WriteTimeout { after });
                }
                Timer::Command(id) => self.expire(id),
            }
        }
    }

    /// Closes the connection from our side.
    pub fn close_local(&mut self) {
        self.close(CloseReason::Local);
    }

    /// The next bytes to write; `None` if there are none now. Arms the write deadline.
    #[must_use]
    pub fn poll_transmit(&mut self, now: u64) -> Option<Vec<u8>> {
        let line = self.transmit.pop_front()?;
        self.timers
            .insert(Timer::Write, after(now, self.config.write_deadline));
        Some(line)
    }

    /// The next outcome.
    #[must_use]
    pub fn poll_outcome(&mut self) -> Option<Outcome> {
        let outcome = self.outcomes.pop_front()?;
        if let Outcome::Event { event, line_bytes } = &outcome {
            self.budget(is_critical(&event.name)).release(*line_bytes);
        }
        Some(outcome)
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), nanoseconds; `None` if nothing waits.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.timers.values().copied().min()
    }

    /// Where the connection stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// What the peer said first.
    #[must_use]
    pub fn greeting(&self) -> Option<&Greeting> {
        self.greeting.as_ref()
    }

    /// Whether commands can be run out of band.
    #[must_use]
    pub fn has_oob(&self) -> bool {
        self.state == State::Ready && self.oob
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    fn handle_message(&mut self, now: u64, message: Message, bytes: usize) {
        match (self.state, message) {
            (State::AwaitGreeting, Message::Greeting(greeting)) => {
                self.timers.remove(&Timer::Greeting);
                self.oob = self.config.want_oob && greeting.offers_oob();
                self.greeting = Some(greeting);
                self.state = State::Negotiating;
                self.negotiate(now);
            }
            (State::AwaitGreeting, _) => {
                self.close(CloseReason::NotQmp(
                    "its first message is no greeting".to_owned(),
                ));
            }
            (_, Message::Greeting(_)) => self.close(CloseReason::SecondGreeting),
            (_, Message::Event(event)) => self.handle_event(event, bytes),
            (_, Message::Return { id, value }) => self.handle_reply(now, id.as_ref(), Ok(value)),
            (_, Message::Error { id, error }) => self.handle_reply(now, id.as_ref(), Err(error)),
        }
    }

    fn negotiate(&mut self, now: u64) {
        let arguments = if self.oob {
            serde_json::json!({"enable": ["oob"]})
        } else {
            Value::Null
        };
        let allowed = self.config.negotiation_deadline;
        let id = self.new_id();
        self.transmit
            .push_back(command_line("qmp_capabilities", &arguments, id, false));
        self.in_flight.insert(
            id,
            InFlight {
                owner: Owner::Session,
                allowed,
                oob: false,
            },
        );
        self.timers.insert(Timer::Negotiation, after(now, allowed));
    }

    fn handle_reply(
        &mut self,
        now: u64,
        id: Option<&Value>,
        result: Result<Box<RawValue>, QmpError>,
    ) {
        let id = match id {
            Some(id) => id.as_u64().map(CommandId),
            // QEMU always echoes the id of what succeeds, but cannot echo one that it could not read.
            // Whose error that is can only be told if there is no choice.
            None if result.is_err() && self.in_flight.len() == 1 => {
                self.in_flight.keys().next().copied()
            }
            None => None,
        };
        let Some((id, command)) = id.and_then(|id| self.in_flight.remove_entry(&id)) else {
            self.stats.stray_replies_count += 1;
            return;
        };
        self.timers.remove(&Timer::Command(id));
        match command.owner {
            Owner::Abandoned => self.stats.late_replies_count += 1,
            Owner::Caller => self
                .outcomes
                .push_back(Outcome::Reply(id, result.map_err(CommandError::Qemu))),
            Owner::Session => match result {
                Ok(_) => {
                    self.timers.remove(&Timer::Negotiation);
                    self.state = State::Ready;
                    if let Some(greeting) = self.greeting.clone() {
                        self.outcomes.push_back(Outcome::Ready(greeting));
                    }
                }
                // A server may offer what this monitor cannot do; we can do without.
                Err(_) if self.oob => {
                    self.oob = false;
                    self.negotiate(now);
                }
                Err(error) => self.close(CloseReason::NegotiationRefused(error)),
            },
        }
        self.fill_window();
    }

    fn handle_event(&mut self, event: Event, line_bytes: usize) {
        self.stats.events_count += 1;
        let critical = is_critical(&event.name);
        let max = if critical {
            MAX_WAITING_CRITICAL_EVENTS
        } else {
            MAX_WAITING_EVENTS
        };
        let budget = self.budget(critical);
        if budget.admit(line_bytes, max) {
            self.outcomes
                .push_back(Outcome::Event { event, line_bytes });
        } else if critical {
            let (count, bytes) = (budget.count, budget.bytes);
            self.close(CloseReason::EventFlood { count, bytes });
        } else {
            self.stats.events_dropped_count += 1;
        }
    }

    fn expire(&mut self, id: CommandId) {
        let expired = if let Some(position) = self.waiting.iter().position(|next| next.id == id) {
            self.waiting
                .remove(position)
                .map(|waiting| (Owner::Caller, waiting.allowed, false))
        } else {
            self.in_flight.get_mut(&id).map(|command| {
                (
                    std::mem::replace(&mut command.owner, Owner::Abandoned),
                    command.allowed,
                    true,
                )
            })
        };
        if let Some((Owner::Caller, after, sent)) = expired {
            self.outcomes.push_back(Outcome::Reply(
                id,
                Err(CommandError::Deadline { after, sent }),
            ));
        }
    }

    /// Sends what waits, as far as the window allows.
    fn fill_window(&mut self) {
        if self.state != State::Ready {
            return;
        }
        let mut in_band = self
            .in_flight
            .values()
            .filter(|command| !command.oob)
            .count();
        while in_band < IN_BAND_WINDOW
            && let Some(Waiting { id, line, allowed }) = self.waiting.pop_front()
        {
            self.in_flight.insert(
                id,
                InFlight {
                    owner: Owner::Caller,
                    allowed,
                    oob: false,
                },
            );
            self.transmit.push_back(line);
            in_band += 1;
        }
    }

    fn close(&mut self, reason: CloseReason) {
        if self.state == State::Closed {
            return;
        }
        self.state = State::Closed;
        self.closed = Some(reason.clone());
        self.timers.clear();
        self.transmit.clear();
        let waiting = std::mem::take(&mut self.waiting)
            .into_iter()
            .map(|next| (next.id, Owner::Caller));
        let in_flight = std::mem::take(&mut self.in_flight);
        let in_flight = in_flight
            .into_iter()
            .map(|(id, command)| (id, command.owner));
        for (id, owner) in in_flight.chain(waiting) {
            if owner == Owner::Caller {
                let result = Err(CommandError::Closed(reason.clone()));
                self.outcomes.push_back(Outcome::Reply(id, result));
            }
        }
        self.outcomes.push_back(Outcome::Closed(reason));
    }

    fn budget(&mut self, critical: bool) -> &mut Budget {
        if critical {
            &mut self.critical_events
        } else {
            &mut self.events
        }
    }

    fn new_id(&mut self) -> CommandId {
        let id = CommandId(self.next_id);
        self.next_id += 1;
        id
    }
}

fn after(now: u64, duration: Duration) -> u64 {
    now.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

fn command_line(name: &str, arguments: &Value, id: CommandId, oob: bool) -> Vec<u8> {
    let mut command = serde_json::Map::new();
    command.insert(
        if oob { "exec-oob" } else { "execute" }.to_owned(),
        name.into(),
    );
    // QEMU refuses `"arguments": null`.
    if !arguments.is_null() {
        command.insert("arguments".to_owned(), arguments.clone());
    }
    command.insert("id".to_owned(), id.0.into());
    let mut line = Value::Object(command).to_string().into_bytes();
    line.push(b'\n');
    line
}
