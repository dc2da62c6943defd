//! The recorder: the real ledger, attachment and migration machine, called in the order in which the driver calls them
//! (orchestrator/src/driver): frames into a batch, the batch to the disk, what is synced to the ledger, then the Ack; a Hello asks
//! for what is not durable; a destination is not read before the commit.

use std::collections::BTreeMap;
use std::time::Duration;

use vmtrail_continuity::attach::{self, Attachment};
use vmtrail_continuity::ledger::{Disposition, Ledger, Revelation};
use vmtrail_continuity::migration::{Action, Migration, Options as Attempted, Outcome};
use vmtrail_continuity::vmm::{Command, Event as Said, Side, Status};
use vmtrail_continuity::{Instant, migration::admission::Plan};
use vmtrail_wire::agent_to_host::{AgentHello, AgentMessage};
use vmtrail_wire::decode::Expectation;
use vmtrail_wire::host_to_agent::{Envelope, HostHello};
use vmtrail_wire::{
    Decoded, Decoder, Epoch, FrameHeader, HostMessage, Kind, Sequence, SessionId, StreamId, version,
};

use super::mutation::Mutation;
use super::options::{MICROSECOND, MILLISECOND};
use super::world::{Event, World};
use crate::check::{Entry, Judge, Violation, acked, false_loss, held, provisional};

/// As in the driver, but for the sizes: a simulated page is 64 times smaller.
const BATCH_BYTES: usize = 8 << 10;
const BATCH_AGE: u64 = 20 * MILLISECOND;
const MAX_WAITING_BYTES: usize = 64 << 10;
const STORE_RETRY: u64 = 500 * MILLISECOND;
const TICK: u64 = 1000 * MILLISECOND;
/// Bytes of messages that wait for a port.
const MAX_OUTGOING: usize = 64 << 10;
/// Bytes that one FIFO or socket takes from the host.
const INPUT_BYTES: usize = 4 << 10;
/// The recorder is woken at its deadline; this is its own work.
const HELD_TOLERANCE: u64 = 100 * MICROSECOND;

/// What a monitor, or the look at the queues, tells the recorder.
#[derive(Debug, Clone)]
pub(super) enum Fact {
    Said(Said),
    Reply(Command, Result<Option<Said>, String>),
    Queues(Option<bool>),
}

#[derive(Debug, Default)]
struct Port {
    decoder: Decoder,
    outgoing: Vec<u8>,
}

/// A residency: a QEMU and what is read of it.
#[derive(Debug)]
pub(super) struct Residency {
    pub(super) qemu: usize,
    attachment: Option<Attachment>,
    ports: Vec<Port>,
}

impl Residency {
    fn new(qemu: usize, ports: usize) -> Self {
        Self {
            qemu,
            attachment: None,
            ports: (0..ports).map(|_| Port::default()).collect(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) number: u64,
    pub(super) machine: Migration,
    pub(super) other: Residency,
    committed: bool,
    /// When the recorder heard that the source waits, less the time for which it was not let run since.
    held_since: Option<u64>,
}

/// The recorder.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) source: Residency,
    pub(super) attempt: Option<Attempt>,
    ledger: Ledger,
    batch: Vec<Entry>,
    waiting_bytes: usize,
    dirty_since: Option<u64>,
    retry_at: Option<u64>,
    committing: bool,
    acks: BTreeMap<StreamId, Sequence>,
    port_of: BTreeMap<StreamId, usize>,
    metadata: BTreeMap<SessionId, u32>,
    newest_epoch: Epoch,
    next_id: u64,
    tick_at: u64,
    turn: usize,
    deaf: bool,
    hello_said: BTreeMap<(usize, Epoch), u32>,
    /// Frames to be dropped, for the mutation that counts.
    count: BTreeMap<StreamId, u64>,
    /// Where each stream was by the first Hello that this recorder heard.
    pub(super) first_told: BTreeMap<(SessionId, StreamId), Sequence>,
}

impl World {
    fn instant(&self) -> Instant {
        Instant(self.now)
    }

    /// A recorder begins on a QEMU whose VM runs, with what the disk holds.
    pub(super) fn start_host(&mut self, qemu: usize) {
        let (points, last_epoch) = self.disk.resume();
        let mut ledger = Ledger::new();
        for ((session, stream), point) in points {
            ledger.remember(session, stream, point);
        }
        let mut host = Host {
            source: Residency::new(qemu, self.options.ports),
            attempt: None,
            ledger,
            batch: Vec::new(),
            waiting_bytes: 0,
            dirty_since: None,
            retry_at: None,
            committing: false,
            acks: BTreeMap::new(),
            port_of: BTreeMap::new(),
            metadata: BTreeMap::new(),
            newest_epoch: last_epoch,
            next_id: 0,
            tick_at: self.now + TICK,
            turn: 0,
            deaf: false,
            hello_said: BTreeMap::new(),
            count: BTreeMap::new(),
            first_told: BTreeMap::new(),
        };
        for port in 0..self.options.ports {
            self.connect(qemu, port);
        }
        self.attach(&mut host);
        self.log(|| format!("recorder on qemu{qemu}"));
        self.host = Some(host);
        self.wake_host(self.now);
    }

    fn new_epoch(&mut self, host: &mut Host) -> Epoch {
        if self.mutation == Some(Mutation::EpochNotIncreased) {
            host.newest_epoch = Epoch(1 << 30);
            return host.newest_epoch;
        }
        let behind = if self.options.clock_behind && self.rng.chance(500) {
            self.rng.within(0, 2000)
        } else {
            0
        };
        let ms = (self.now / MILLISECOND).saturating_sub(behind);
        let random = self.rng.any() & 0xf_ffff;
        let by_time = (ms << 20) | random;
        // With chance also above what the trail remembers: a recorder that died before its epoch was synced took one of these, and an
        // agent does not hear a Hello of the epoch that it obeys.
        let by_trail = if self.mutation == Some(Mutation::EpochWithoutChance) {
            host.newest_epoch.0 + 1
        } else {
            host.newest_epoch.0 + 1 + random
        };
        host.newest_epoch = Epoch(by_time.max(by_trail));
        host.newest_epoch
    }

    fn attach(&mut self, host: &mut Host) {
        let epoch = self.new_epoch(host);
        let kinds = vec![self.options.kind; self.options.ports];
        host.source.attachment = Some(Attachment::new(self.instant(), epoch, &kinds, true));
        host.port_of.clear();
        host.batch.push(Entry::Attached(epoch));
    }

    /// The recorder's turn: reads a port, then lets the machines act.
    pub(super) fn host_turn(&mut self) -> Result<(), Violation> {
        let Some(mut host) = self.host.take() else {
            return Ok(());
        };
        let result = self.turn_of(&mut host);
        self.host = Some(host);
        result
    }

    fn turn_of(&mut self, host: &mut Host) -> Result<(), Violation> {
        if host.waiting_bytes < MAX_WAITING_BYTES && !host.deaf {
            let port = host.turn % self.options.ports;
            host.turn += 1;
            let most = self.rng.len(1, 12_000);
            self.read_port(host, port, most)?;
        }
        if self.mutation == Some(Mutation::ReadDestinationEarly)
            && let Some(attempt) = host.attempt.as_mut().filter(|attempt| !attempt.committed)
        {
            let qemu = attempt.other.qemu;
            let bytes: usize = (self.qemus[qemu].ports.iter_mut())
                .map(|port| port.out.drain(..).len())
                .sum();
            if bytes > 0 {
                provisional::judge("bytes were taken from", qemu, self.qemus[qemu].ran)?;
            }
        }
        self.follow_up(host)?;
        let mut wake = host.tick_at;
        let mut sooner = |at: Option<u64>| wake = at.map_or(wake, |at| wake.min(at));
        let due = |at: Option<Instant>| at.map(|at| at.0);
        sooner(due(host
            .source
            .attachment
            .as_ref()
            .and_then(Attachment::poll_timeout)));
        sooner(due(host
            .attempt
            .as_ref()
            .and_then(|attempt| attempt.machine.poll_timeout())));
        if !host.committing {
            sooner(
                host.retry_at
                    .or_else(|| host.dirty_since.map(|at| at + BATCH_AGE)),
            );
        }
        let readable = self.qemus[host.source.qemu]
            .ports
            .iter()
            .any(|port| port.open && !port.out.is_empty());
        if readable && host.waiting_bytes < MAX_WAITING_BYTES && !host.deaf {
            sooner(Some(
                self.now + self.rng.within(10 * MICROSECOND, 400 * MICROSECOND),
            ));
        }
        self.wake_host(wake.max(self.now + MICROSECOND));
        Ok(())
    }

    fn read_port(
        &mut self,
        host: &mut Host,
        index: usize,
        most: usize,
    ) -> Result<usize, Violation> {
        let qemu = host.source.qemu;
        let port = &mut self.qemus[qemu].ports[index];
        if !port.open || port.out.is_empty() {
            return Ok(0);
        }
        let count = port.out.len().min(most);
        let bytes: Vec<u8> = port.out.drain(..count).collect();
        provisional::judge("bytes were taken from", qemu, self.qemus[qemu].ran)?;
        self.after_read(qemu, index);
        let Some(mut attachment) = host.source.attachment.take() else {
            return Ok(count);
        };
        let mut decoder = std::mem::take(&mut host.source.ports[index].decoder);
        // Before our Hello is answered a newer epoch may be in force: a decoder that does not believe in it never hears the refusal
        // that says so.
        let answered =
            attachment.is_answered(index) || self.mutation == Some(Mutation::RefusalUnheard);
        decoder.expect(Expectation {
            session: None,
            newest: answered.then(|| attachment.epoch()),
        });
        let mut rest = &bytes[..];
        let mut result = Ok(());
        while !rest.is_empty() {
            let taken = decoder.push(rest);
            rest = &rest[taken..];
            while let Some(decoded) = decoder.poll() {
                if let Decoded::Frame { header, bytes } = decoded
                    && let Err(violation) =
                        self.take_frame(host, &mut attachment, index, header, bytes)
                {
                    result = Err(violation);
                }
            }
        }
        host.source.ports[index].decoder = decoder;
        host.source.attachment = Some(attachment);
        result.map(|()| count)
    }

    fn take_frame(
        &mut self,
        host: &mut Host,
        attachment: &mut Attachment,
        port: usize,
        mut header: FrameHeader,
        bytes: &[u8],
    ) -> Result<(), Violation> {
        let now = self.instant();
        if header.kind == Kind::Pages {
            attachment.handle_frame(now, port, &header, None);
            if self.mutation == Some(Mutation::AheadIsLoss) && header.epoch < attachment.epoch() {
                header.epoch = attachment.epoch();
            }
            let mut disposition = host.ledger.handle_frame(attachment.epoch(), &header);
            if self.mutation == Some(Mutation::NoDedup) && disposition == Disposition::Duplicate {
                disposition = Disposition::Store;
            }
            if self.mutation == Some(Mutation::DedupByCount)
                && matches!(disposition, Disposition::Duplicate | Disposition::Store)
            {
                let count = host.count.entry(header.stream).or_default();
                disposition = if *count > 0 {
                    *count -= 1;
                    Disposition::Duplicate
                } else {
                    Disposition::Store
                };
            }
            match disposition {
                Disposition::Store => {}
                Disposition::StoreAfterGap(gap) => {
                    false_loss::judge(&gap, &self.freed)?;
                    host.batch.push(Entry::Gap(gap));
                }
                Disposition::Ahead if self.mutation == Some(Mutation::GapSilent) => {}
                Disposition::Duplicate | Disposition::Ahead | Disposition::Foreign => return Ok(()),
            }
            let pages = bytes[vmtrail_wire::HEADER_SIZE..].to_vec();
            host.waiting_bytes += pages.len();
            host.batch.push(Entry::Frame { header, pages });
            if self.mutation == Some(Mutation::BatchSwapped) && self.rng.chance(20) {
                let len = host.batch.len();
                if len > 1 {
                    host.batch.swap(len - 1, len - 2);
                }
            }
            return Ok(());
        }
        let (body, payload) = Decoded::parts(&header, bytes);
        let Ok(Some(message)) = AgentMessage::decode(&header, body, payload) else {
            return Err(Violation::of(
                Judge::Machine,
                "the agent sent a frame that cannot be read",
            ));
        };
        attachment.handle_frame(now, port, &header, Some(&message));
        match message {
            AgentMessage::Hello(hello) if header.epoch == attachment.epoch() => {
                self.take_hello(host, header.session, port, &hello)?;
            }
            AgentMessage::Metadata(chunk) if chunk.last && chunk.item + 1 == chunk.items => {
                host.metadata.insert(header.session, chunk.generation);
            }
            AgentMessage::Lost(counters) => {
                let by_cpu = counters.iter().map(|cpu| (cpu.cpu, cpu.overrun)).collect();
                host.batch.push(Entry::Overrun {
                    session: header.session,
                    by_cpu,
                });
            }
            _ => {}
        }
        Ok(())
    }

    fn take_hello(
        &mut self,
        host: &mut Host,
        session: SessionId,
        port: usize,
        hello: &AgentHello,
    ) -> Result<(), Violation> {
        for revelation in host.ledger.handle_hello(session, &hello.streams) {
            match revelation {
                Revelation::Began { .. } => {}
                Revelation::Gap(gap) => {
                    false_loss::judge(&gap, &self.freed)?;
                    host.batch.push(Entry::Gap(gap));
                }
                Revelation::Fork {
                    session,
                    stream,
                    have,
                    next,
                } if self.mutation != Some(Mutation::ForkSilent) => {
                    host.batch.push(Entry::Fork {
                        stream: (session, stream),
                        have,
                        next,
                    });
                }
                Revelation::Fork { .. } => {}
            }
        }
        for state in &hello.streams {
            host.port_of.insert(state.stream, port);
            host.first_told
                .entry((session, state.stream))
                .or_insert(state.next);
            host.count
                .insert(state.stream, state.next.0.saturating_sub(state.first.0));
        }
        if self.mutation == Some(Mutation::FreeWhatIsSent) {
            for state in &hello.streams {
                host.acks.insert(state.stream, state.next);
            }
        }
        Ok(())
    }

    fn follow_up(&mut self, host: &mut Host) -> Result<(), Violation> {
        self.follow_attachment(host)?;
        self.follow_attempt(host)?;
        if host.dirty_since.is_none() && !host.batch.is_empty() {
            host.dirty_since = Some(self.now);
        }
        self.kick_store(host);
        if self.now >= host.tick_at {
            host.tick_at = self.now + TICK;
            for port in 0..self.options.ports {
                self.flush_port(host, port);
            }
        }
        self.send_acks(host)
    }

    fn follow_attachment(&mut self, host: &mut Host) -> Result<(), Violation> {
        let now = self.instant();
        let Some(attachment) = &mut host.source.attachment else {
            return Ok(());
        };
        if attachment.poll_timeout().is_some_and(|at| at <= now) {
            attachment.handle_timeout(now);
        }
        let epoch = attachment.epoch();
        if epoch > host.newest_epoch {
            host.newest_epoch = epoch;
            host.batch.push(Entry::Attached(epoch));
        }
        while let Some(action) = host
            .source
            .attachment
            .as_mut()
            .and_then(Attachment::poll_action)
        {
            match action {
                attach::Action::SendHello { port, epoch } => {
                    let said = host
                        .hello_said
                        .entry((host.source.qemu * 64 + port, epoch))
                        .or_default();
                    *said += 1;
                    if self.mutation == Some(Mutation::HelloNotRepeated) && *said > 1 {
                        continue;
                    }
                    self.send_hello(host, port, epoch)?;
                }
                attach::Action::Reconnect { port }
                    if self.mutation != Some(Mutation::WedgeIgnored) =>
                {
                    self.log(|| format!("reconnect port {port}"));
                    let qemu = host.source.qemu;
                    self.disconnect(qemu, port);
                    self.connect(qemu, port);
                    host.source.ports[port] = Port::default();
                    let epoch = self.new_epoch(host);
                    if let Some(attachment) = &mut host.source.attachment {
                        attachment.handle_reconnected(now, port, epoch);
                    }
                    host.batch.push(Entry::Attached(epoch));
                }
                attach::Action::Reconnect { .. } | attach::Action::AgentAbsent => {}
            }
        }
        Ok(())
    }

    fn send_hello(&mut self, host: &mut Host, port: usize, epoch: Epoch) -> Result<(), Violation> {
        let session = host
            .source
            .attachment
            .as_ref()
            .and_then(Attachment::session)
            .or_else(|| host.ledger.sessions().last().copied());
        let resume_from = session
            .map(|session| {
                if self.mutation == Some(Mutation::ResumeFromReceived) {
                    host.ledger.next(session)
                } else {
                    host.ledger.resume_from(session)
                }
            })
            .unwrap_or_default();
        for &(stream, next) in &resume_from {
            let stream = (session.unwrap_or_default(), stream);
            acked::judge("a Hello", stream, next, &self.disk.durable)?;
        }
        let have_metadata = session
            .and_then(|session| host.metadata.get(&session).copied())
            .unwrap_or(0);
        self.log(|| format!("Hello {epoch} on port {port}, resume from {resume_from:?}"));
        host.next_id += 1;
        let envelope = Envelope {
            session: session.unwrap_or_default(),
            epoch,
            id: host.next_id,
            message: HostMessage::Hello(HostHello {
                version_min: version::MIN,
                version_max: version::CURRENT,
                have_metadata,
                resume_from,
            }),
        };
        self.send(host, port, &envelope);
        Ok(())
    }

    fn send(&mut self, host: &mut Host, port: usize, envelope: &Envelope) {
        self.flush_port(host, port);
        let bytes = envelope.encode();
        let outgoing = &mut host.source.ports[port].outgoing;
        if outgoing.len() + bytes.len() <= MAX_OUTGOING {
            outgoing.extend(bytes);
        }
        self.flush_port(host, port);
    }

    fn flush_port(&mut self, host: &mut Host, port: usize) {
        let qemu = host.source.qemu;
        let outgoing = &mut host.source.ports[port].outgoing;
        let alive = self.qemus[qemu].alive;
        let line = &mut self.qemus[qemu].ports[port];
        if outgoing.is_empty() || !line.open || !alive {
            return;
        }
        let count = INPUT_BYTES
            .saturating_sub(line.input.len())
            .min(outgoing.len());
        line.input.extend(outgoing.drain(..count));
        self.kick_input(qemu, port);
    }

    fn send_acks(&mut self, host: &mut Host) -> Result<(), Violation> {
        if host.acks.is_empty() {
            return Ok(());
        }
        let Some((epoch, Some(session))) = host
            .source
            .attachment
            .as_ref()
            .map(|attachment| (attachment.epoch(), attachment.session()))
        else {
            return Ok(());
        };
        let mut by_port: BTreeMap<usize, Vec<_>> = BTreeMap::new();
        for (&stream, &next) in &host.acks {
            let answered = |port: &usize| {
                host.source
                    .attachment
                    .as_ref()
                    .is_some_and(|attachment| attachment.is_answered(*port))
            };
            if let Some(&port) = host.port_of.get(&stream).filter(|port| answered(port)) {
                by_port.entry(port).or_default().push((stream, next));
            }
        }
        for (port, acks) in by_port {
            self.flush_port(host, port);
            if !host.source.ports[port].outgoing.is_empty() {
                continue;
            }
            for &(stream, next) in &acks {
                host.acks.remove(&stream);
                acked::judge("an Ack", (session, stream), next, &self.disk.durable)?;
            }
            host.next_id += 1;
            let envelope = Envelope {
                session,
                epoch,
                id: host.next_id,
                message: HostMessage::Ack(acks),
            };
            self.send(host, port, &envelope);
        }
        Ok(())
    }

    // ---- the store ----

    fn kick_store(&mut self, host: &mut Host) {
        if host.committing || host.retry_at.is_some_and(|at| at > self.now) {
            return;
        }
        let due = host.retry_at.take().is_some()
            || host.waiting_bytes >= BATCH_BYTES
            || host
                .dirty_since
                .is_some_and(|since| self.now - since >= BATCH_AGE);
        if !due || host.batch.is_empty() {
            return;
        }
        host.dirty_since = None;
        host.committing = true;
        let takes = self.rng.within(100 * MICROSECOND, self.options.sync_max);
        if self.mutation == Some(Mutation::AckBeforeSync) {
            Self::collect_acks(host, true);
        }
        // A full disk takes nothing of the batch: the store cuts what it had begun, and tries all of it again.
        let full = self.now < self.disk_full_until;
        let until = if full {
            None
        } else {
            self.disk.entries.append(&mut host.batch);
            host.waiting_bytes = 0;
            Some(self.disk.entries.len())
        };
        let life = self.host_life;
        self.at(self.now + takes, Event::Synced { life, until });
    }

    /// The disk answered.
    pub(super) fn synced(&mut self, until: Option<usize>) {
        let Some(mut host) = self.host.take() else {
            return;
        };
        host.committing = false;
        if let Some(until) = until {
            let from = self.disk.synced;
            self.disk.sync(until);
            for entry in &self.disk.entries[from..until] {
                if let Entry::Frame { header, .. } = entry {
                    let next = header.sequence.next();
                    host.ledger
                        .handle_durable(header.session, header.stream, next);
                }
            }
            Self::collect_acks(&mut host, false);
        } else if self.mutation == Some(Mutation::RefusedIsStored) {
            host.batch.clear();
            host.waiting_bytes = 0;
            Self::collect_acks(&mut host, true);
        } else {
            host.retry_at = Some(self.now + STORE_RETRY);
        }
        self.host = Some(host);
        self.wake_host_within(MICROSECOND, 200 * MICROSECOND);
    }

    fn collect_acks(host: &mut Host, received: bool) {
        let Some(session) = host
            .source
            .attachment
            .as_ref()
            .and_then(Attachment::session)
        else {
            return;
        };
        let points = if received {
            host.ledger.next(session)
        } else {
            host.ledger.resume_from(session)
        };
        host.acks.extend(points);
    }

    // ---- migration ----

    /// The user asks for a migration to a QEMU that waits.
    pub(super) fn begin_attempt(&mut self, to: usize) {
        let Some(mut host) = self.host.take() else {
            return;
        };
        for port in 0..self.options.ports {
            self.connect(to, port);
        }
        self.attempts += 1;
        let budget = if self.mutation == Some(Mutation::DrainWithoutBudget) {
            3600 * 1000 * MILLISECOND
        } else {
            self.options.drain_budget
        };
        let options = Attempted {
            uri: "sim:".into(),
            drain_budget: Duration::from_nanos(budget),
        };
        let plan = Plan {
            missing_ports: Vec::new(),
            pause_before_switchover: self.options.pause,
            return_path: true,
            events: self.options.events,
        };
        host.attempt = Some(Attempt {
            number: self.attempts,
            machine: Migration::new(self.instant(), options, plan),
            other: Residency::new(to, self.options.ports),
            committed: false,
            held_since: None,
        });
        self.host = Some(host);
        self.wake_host(self.now);
    }

    /// The user wants out.
    pub(super) fn cancel_attempt(&mut self) {
        let now = self.instant();
        if let Some(attempt) = self.host.as_mut().and_then(|host| host.attempt.as_mut()) {
            let _ = attempt.machine.handle_cancel(now);
            self.wake_host(self.now);
        }
    }

    /// Something was said on a monitor that the recorder watches.
    pub(super) fn host_hears(&mut self, qemu: usize, fact: Fact) -> Result<(), Violation> {
        let now = self.instant();
        let Some(mut host) = self.host.take() else {
            return Ok(());
        };
        let is_source = qemu == host.source.qemu;
        if is_source && let Some(attachment) = &mut host.source.attachment {
            match &fact {
                Fact::Said(Said::Stopped { .. }) => attachment.handle_running(now, false),
                Fact::Said(Said::Resumed { .. }) => attachment.handle_running(now, true),
                _ => {}
            }
        }
        if let Some(attempt) = host
            .attempt
            .as_mut()
            .filter(|attempt| !attempt.committed && (is_source || attempt.other.qemu == qemu))
        {
            let side = if is_source {
                Side::Source
            } else {
                Side::Destination
            };
            let machine = &mut attempt.machine;
            match fact {
                Fact::Said(said) => {
                    let completed = side == Side::Source && said == Said::Status(Status::Completed);
                    machine.handle_event(now, side, &said);
                    if completed && self.mutation == Some(Mutation::CommitOnCompleted) {
                        machine.handle_event(now, Side::Destination, &Said::Running(true));
                    }
                }
                Fact::Reply(command, result) => {
                    if let Ok(Some(said)) = &result {
                        machine.handle_event(now, side, said);
                    }
                    machine.handle_reply(now, side, &command, result.map(|_| ()));
                }
                Fact::Queues(empty) => machine.handle_queues(now, empty),
            }
            if attempt.held_since.is_none() && attempt.machine.held_until().is_some() {
                attempt.held_since = Some(self.now - self.stalled_ns);
            }
        }
        let result = self.follow_up(&mut host);
        self.host = Some(host);
        self.wake_host(self.now + MICROSECOND);
        result
    }

    fn follow_attempt(&mut self, host: &mut Host) -> Result<(), Violation> {
        let now = self.instant();
        loop {
            let Some(attempt) = &mut host.attempt else {
                return Ok(());
            };
            if attempt.machine.poll_timeout().is_some_and(|at| at <= now) {
                attempt.machine.handle_timeout(now);
            }
            // Still held, or let go just now: both within the budget.
            if let Some(since) = attempt.held_since {
                let held = self.now - self.stalled_ns - since;
                held::judge(held, self.options.drain_budget + HELD_TOLERANCE)?;
                if attempt.machine.held_until().is_none() {
                    attempt.held_since = None;
                }
            }
            let Some(action) = attempt.machine.poll_action() else {
                break;
            };
            self.do_action(host, action)?;
        }
        let live = host
            .source
            .attachment
            .as_ref()
            .is_some_and(Attachment::is_live);
        if live
            && host
                .attempt
                .as_ref()
                .is_some_and(|attempt| attempt.committed)
        {
            // Verified.
            host.attempt = None;
        }
        Ok(())
    }

    fn do_action(&mut self, host: &mut Host, action: Action) -> Result<(), Violation> {
        let Some(attempt) = &mut host.attempt else {
            return Ok(());
        };
        self.log(|| format!("attempt: {action:?}"));
        match action {
            Action::Tell(side, command) => {
                let qemu = match side {
                    Side::Source => host.source.qemu,
                    Side::Destination => attempt.other.qemu,
                };
                let to = attempt.other.qemu;
                self.tell(qemu, to, attempt.number, command);
            }
            Action::Enter(_) | Action::RecordBoundary => {}
            Action::ProbeQueues => {
                let qemu = host.source.qemu;
                let after = self.rng.within(100 * MICROSECOND, 2 * MILLISECOND);
                self.at(self.now + after, Event::Probe(qemu));
            }
            Action::ReadDry => {
                for port in 0..self.options.ports {
                    while self.read_port(host, port, usize::MAX)? > 0 {}
                }
                if let Some(attempt) = &mut host.attempt {
                    attempt.machine.handle_dry(Instant(self.now));
                }
            }
            Action::Commit => {
                std::mem::swap(&mut host.source, &mut attempt.other);
                attempt.committed = true;
                attempt.other.attachment = None;
                let (left, taken) = (attempt.other.qemu, host.source.qemu);
                if self.mutation == Some(Mutation::DecoderAcrossHosts) {
                    for (new, old) in host.source.ports.iter_mut().zip(&mut attempt.other.ports) {
                        std::mem::swap(&mut new.decoder, &mut old.decoder);
                    }
                }
                provisional::judge("the commit went to", taken, self.qemus[taken].ran)?;
                for port in 0..self.options.ports {
                    self.disconnect(left, port);
                }
                self.attach(host);
            }
            Action::End(outcome) => self.end_attempt(host, &outcome),
        }
        Ok(())
    }

    fn end_attempt(&mut self, host: &mut Host, outcome: &Outcome) {
        let committed = *outcome == Outcome::Committed;
        self.log(|| format!("attempt ended: {outcome:?}"));
        self.outcomes.push((self.attempts, outcome.clone()));
        if committed {
            self.last_failed = None;
            return;
        }
        let Some(attempt) = host.attempt.take() else {
            return;
        };
        let to = attempt.other.qemu;
        for port in 0..self.options.ports {
            self.disconnect(to, port);
        }
        if !self.qemus[to].ran {
            self.kill(to);
        }
        self.last_failed = Some(attempt.number);
        host.deaf = self.mutation == Some(Mutation::WayBackForgotten);
    }
}
