//! The guest: rings that go on whatever happens, and the real agent session with pipes made of vectors.
//!
//! All of it is guest memory, so all of it travels with the VM.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;

use vmtrail_agent::session::{
    About, Action, Harvest, Inventory, MetadataPiece, Payload, PortId, Sent, Session,
};
use vmtrail_wire::agent_to_host::{CpuCounters, Pong};
use vmtrail_wire::{HostMessage, MessageDecoder, Sequence, SessionId, StreamId};

use super::mutation::Mutation;
use super::options::{MILLISECOND, Options};
use super::qemu::Port;
use super::rng::Rng;
use crate::check::page::{PAGE_SIZE, Page};
use crate::check::{Judge, Made, Stream, Violation, acked};

/// Actions between two rests: more is a session that never comes to rest.
const MAX_ACTIONS: u32 = 20_000;

type Fact = Rc<dyn Fn(&mut Session)>;

/// The real session, and, where the VM may be put back, all that it was ever told: a machine without clock and chance is
/// copied by telling another one the same.
struct Agent {
    session: Session,
    told: Option<Vec<Fact>>,
}

impl Agent {
    fn tell(&mut self, fact: impl Fn(&mut Session) + 'static) {
        fact(&mut self.session);
        if let Some(told) = &mut self.told {
            told.push(Rc::new(fact));
        }
    }

    fn poll(&mut self) -> Option<Action> {
        if let Some(told) = &mut self.told {
            told.push(Rc::new(|session| drop(session.poll_action())));
        }
        self.session.poll_action()
    }
}

#[derive(Clone, Default)]
struct Cpu {
    ring: VecDeque<Page>,
    retained: VecDeque<Page>,
    overwritten: u64,
    /// Frames in the retention pipe: their first page's position and the sequence, to know what a Free lets go of.
    cut: VecDeque<(Sequence, u32)>,
    next: Sequence,
}

#[derive(Clone, Default)]
struct GuestPort {
    /// The frame in hand: what is not yet on the port.
    outgoing: Vec<u8>,
    torn: bool,
    replay: VecDeque<Page>,
    hung: bool,
}

/// What the guest needs of the world around it while it works.
pub(super) struct Around<'a> {
    pub(super) now: u64,
    pub(super) rng: &'a mut Rng,
    pub(super) options: &'a Options,
    pub(super) mutation: Option<Mutation>,
    /// The ports of the QEMU it runs in.
    pub(super) ports: &'a mut [Port],
    pub(super) made: &'a mut Made,
    /// What the disk holds, for the judge of what is let go.
    pub(super) durable: &'a BTreeMap<Stream, Sequence>,
    /// The first frame that each stream's agent still holds.
    pub(super) freed: &'a mut BTreeMap<Stream, Sequence>,
}

/// The guest.
pub(super) struct Guest {
    agent: Agent,
    about: About,
    pub(super) session: SessionId,
    line: u32,
    booted_at: u64,
    cpus: Vec<Cpu>,
    numbers: Vec<u64>,
    fresh: Vec<Page>,
    ports: Vec<GuestPort>,
    decoders: Vec<MessageDecoder>,
}

impl fmt::Debug for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.agent.session)
    }
}

impl Guest {
    pub(super) fn boot(now: u64, session: SessionId, options: &Options, made: &mut Made) -> Self {
        let about = About {
            session,
            boot_id: [7; 16],
            agent_version: "sim".into(),
            kernel: "sim".into(),
            clock: "local".into(),
            page_size: u32::try_from(PAGE_SIZE).unwrap_or(64),
            long_size: 8,
            big_endian: false,
            ring_pages: options.ring_pages as u64,
            window_pages: options.window_pages,
            idle_flush_ns: 200 * MILLISECOND,
        };
        let mut agent = Agent {
            session: Session::new(now, about.clone()),
            told: options.fork.then(Vec::new),
        };
        let cpus: Vec<u32> = (0..options.cpus).collect();
        agent.tell(move |session| session.handle_cpus(now, &cpus));
        let inventory = Inventory {
            items: 2,
            volatile: vec![1],
            changed: true,
        };
        agent.tell(move |session| session.handle_inventory(now, inventory.clone()));
        agent.tell(move |session| session.handle_tracing(now, None, Ok(true)));
        let open: Vec<PortId> = (0..options.ports).map(port_id).collect();
        agent.tell(move |session| session.handle_ports(now, &open));
        for cpu in 0..options.cpus {
            made.streams.entry((session, StreamId(cpu))).or_default();
        }
        Self {
            agent,
            about,
            session,
            line: 0,
            booted_at: now,
            cpus: vec![Cpu::default(); options.cpus as usize],
            numbers: vec![0; options.cpus as usize],
            fresh: Vec::new(),
            ports: vec![GuestPort::default(); options.ports],
            decoders: (0..options.ports).map(|_| MessageDecoder::new()).collect(),
        }
    }

    /// What a snapshot keeps: everything, but for half a message (the port it came on ends with the snapshot's QEMU).
    pub(super) fn snapshot(&self) -> Self {
        let told = self.agent.told.clone().unwrap_or_default();
        let mut session = Session::new(self.booted_at, self.about.clone());
        for fact in &told {
            fact(&mut session);
        }
        Self {
            agent: Agent {
                session,
                told: Some(told),
            },
            about: self.about.clone(),
            session: self.session,
            line: self.line,
            booted_at: self.booted_at,
            cpus: self.cpus.clone(),
            numbers: self.numbers.clone(),
            fresh: self.fresh.clone(),
            ports: self.ports.clone(),
            decoders: self.ports.iter().map(|_| MessageDecoder::new()).collect(),
        }
    }

    /// The VM was put back: what is made from here is another history.
    pub(super) fn begin_line(&mut self) {
        self.line += 1;
    }

    /// The sequence that comes next in each stream.
    pub(super) fn next(&self) -> BTreeMap<Stream, Sequence> {
        (0..)
            .zip(&self.cpus)
            .map(|(cpu, state)| ((self.session, StreamId(cpu)), state.next))
            .collect()
    }

    /// The kernel writes.
    pub(super) fn produce(&mut self, cpu: usize, pages: u64, around: &mut Around<'_>) {
        let stream = (self.session, stream_of(cpu));
        let Some(made) = around.made.streams.get_mut(&stream) else {
            return;
        };
        let state = &mut self.cpus[cpu];
        for _ in 0..pages {
            state.ring.push_back(Page {
                number: self.numbers[cpu],
                line: self.line,
            });
            self.numbers[cpu] += 1;
            if state.ring.len() > around.options.ring_pages
                && let Some(oldest) = state.ring.pop_front()
            {
                state.overwritten += 1;
                made.overwritten.insert(oldest.number);
            }
        }
        made.pages = made.pages.max(self.numbers[cpu]);
        let cpu = cpu_number(cpu);
        let now = around.now;
        if self.agent.session.wants_ring_wakeup(cpu) && state.ring.len() > 1 {
            self.agent
                .tell(move |session| session.handle_ring_ready(now, cpu));
        }
    }

    /// The agent's process ends without a word, and another one starts: retained pages and the instance's rings are gone.
    pub(super) fn restart_agent(&mut self, session: SessionId, around: &mut Around<'_>) {
        for made in around
            .made
            .streams
            .iter_mut()
            .filter(|((of, _), _)| *of == self.session)
        {
            made.1.ended = true;
        }
        for port in around.ports.iter_mut() {
            // `port_fops_release` throws away what was not read.
            port.in_queue.clear();
        }
        *self = Self::boot(around.now, session, around.options, around.made);
    }

    /// The host side of a port came or went.
    pub(super) fn host_changed(&mut self, port: usize, on: bool, around: &mut Around<'_>) {
        let was_hung = std::mem::replace(&mut self.ports[port].hung, !on);
        if !on && !was_hung {
            self.decoders[port] = MessageDecoder::new();
            let now = around.now;
            self.agent
                .tell(move |session| session.handle_host_gone(now, port_id(port)));
        }
    }

    /// The agent wakes: time, input, output. Returns when it wants to wake next.
    pub(super) fn wake(&mut self, around: &mut Around<'_>) -> Result<Option<u64>, Violation> {
        let now = around.now;
        self.agent.tell(move |session| session.handle_timeout(now));
        self.work(around)?;
        for port in 0..self.ports.len() {
            while let Some(buffer) = around.ports[port].in_queue.pop_front() {
                self.take_input(port, &buffer, around)?;
            }
            self.push(port, around);
        }
        self.work(around)?;
        Ok(self.agent.session.poll_timeout())
    }

    fn take_input(
        &mut self,
        port: usize,
        mut bytes: &[u8],
        around: &mut Around<'_>,
    ) -> Result<(), Violation> {
        let now = around.now;
        while !bytes.is_empty() {
            let taken = self.decoders[port].push(bytes);
            bytes = &bytes[taken..];
            while let Some(message) = self.decoders[port].poll() {
                match message {
                    Ok(mut envelope) => {
                        if around.mutation == Some(Mutation::StaleEpochObeyed)
                            && matches!(envelope.message, HostMessage::Hello(_))
                        {
                            envelope.epoch.0 += 1 << 40;
                        }
                        self.agent.tell(move |session| {
                            session.handle_message(now, port_id(port), envelope.clone());
                        });
                    }
                    Err(error) => self.agent.tell(move |session| {
                        session.handle_bad_message(now, port_id(port), error);
                    }),
                }
                // The session's rule: all work that follows from a fact before the next fact.
                while !self.agent.session.is_settled() {
                    let Some(action) = self.agent.poll() else {
                        break;
                    };
                    self.execute(action, around)?;
                }
            }
        }
        Ok(())
    }

    fn work(&mut self, around: &mut Around<'_>) -> Result<(), Violation> {
        let mut actions = 0;
        while let Some(action) = self.agent.poll() {
            actions += 1;
            if actions > MAX_ACTIONS {
                return Err(Violation::of(
                    Judge::Machine,
                    "the agent's session never comes to rest",
                ));
            }
            self.execute(action, around)?;
        }
        Ok(())
    }

    fn execute(&mut self, action: Action, around: &mut Around<'_>) -> Result<(), Violation> {
        let now = around.now;
        match action {
            Action::Harvest {
                cpu,
                max_pages,
                partial,
            } => {
                let got = self.harvest(cpu, max_pages, partial);
                self.agent.tell(move |session| {
                    session.handle_harvest(now, cpu, (max_pages, partial), got);
                });
            }
            Action::Send {
                port,
                header,
                body,
                payload,
            } => {
                let index = port.0 as usize;
                let mut bytes = header.encode(&body).to_vec();
                let cpu = header.stream.cpu();
                let pages: Vec<Page> = match payload {
                    Payload::Bytes(payload) => {
                        bytes.extend_from_slice(&payload);
                        Vec::new()
                    }
                    Payload::Fresh { .. } => std::mem::take(&mut self.fresh),
                    Payload::Replay { pages, .. } => {
                        let replay = &mut self.ports[index].replay;
                        let count = (pages as usize).min(replay.len());
                        replay.drain(..count).collect()
                    }
                };
                for page in pages {
                    page.write(self.session, cpu.unwrap_or_default(), &mut bytes);
                }
                if bytes.len() != header.frame_len() {
                    if around.mutation != Some(Mutation::ReplayOffByOne) {
                        return Err(Violation::of(
                            Judge::Machine,
                            format!(
                                "a frame of {} bytes announces {}",
                                bytes.len(),
                                header.frame_len()
                            ),
                        ));
                    }
                    bytes.resize(header.frame_len(), 0);
                }
                if !self.ports[index].outgoing.is_empty() {
                    return Err(Violation::of(Judge::Machine, "two frames in one hand"));
                }
                self.ports[index].outgoing = bytes;
                self.ports[index].torn = false;
                self.push(index, around);
            }
            Action::DropUnsent { port } => {
                let port = &mut self.ports[port.0 as usize];
                port.outgoing.clear();
                port.torn = false;
            }
            Action::BeginReplay { port, cpu } => {
                let mut replay = self.cpus[cpu as usize].retained.clone();
                if around.mutation == Some(Mutation::ReplayOffByOne) {
                    replay.pop_front();
                }
                self.ports[port.0 as usize].replay = replay;
            }
            Action::SkipReplay { port, pages } => {
                let replay = &mut self.ports[port.0 as usize].replay;
                let pages = usize::try_from(pages).unwrap_or(usize::MAX);
                replay.drain(..pages.min(replay.len()));
            }
            Action::EndReplay { port } => self.ports[port.0 as usize].replay.clear(),
            Action::Free { cpu, pages } => self.free(cpu, pages, around)?,
            Action::ReadCounters => {
                let counters: Vec<CpuCounters> = (0..)
                    .zip(&self.cpus)
                    .map(|(cpu, state)| CpuCounters {
                        cpu,
                        overrun: state.overwritten,
                        ..CpuCounters::default()
                    })
                    .collect();
                self.agent
                    .tell(move |session| session.handle_counters(now, &counters));
            }
            Action::ReadClocks { port, id, host_ns } => {
                let pong = Pong {
                    id,
                    host_ns,
                    monotonic_ns: now,
                    boottime_ns: now,
                    realtime_ns: now,
                };
                self.agent
                    .tell(move |session| session.handle_clocks(now, port, pong));
            }
            Action::TakeInventory => self.agent.tell(move |session| {
                let inventory = Inventory {
                    items: 2,
                    volatile: vec![1],
                    changed: false,
                };
                session.handle_inventory(now, inventory);
            }),
            Action::ReadMetadata { item, offset } => self.agent.tell(move |session| {
                let piece = MetadataPiece {
                    name: format!("item{item}"),
                    bytes: vec![0x55; 100],
                    last: offset >= 100,
                };
                session.handle_metadata(now, piece);
            }),
            Action::SetTracing { port, id, on } => self
                .agent
                .tell(move |session| session.handle_tracing(now, Some((port, id)), Ok(on))),
            Action::Configure { .. } | Action::Mark { .. } => {}
        }
        Ok(())
    }

    fn harvest(&mut self, cpu: u32, max_pages: u32, partial: bool) -> Harvest {
        let state = &mut self.cpus[cpu as usize];
        // The newest page is the one that is being written: taken only if one that is not full is wanted.
        let full = state.ring.len().saturating_sub(1).min(max_pages as usize);
        self.fresh.extend(state.ring.drain(..full));
        let mut read = false;
        if partial
            && self.fresh.len() < max_pages as usize
            && let Some(page) = state.ring.pop_front()
        {
            self.fresh.push(page);
            read = true;
        }
        let pages = u32::try_from(self.fresh.len()).unwrap_or(max_pages);
        if pages > 0 {
            state.retained.extend(&self.fresh);
            state.cut.push_back((state.next, pages));
            state.next = state.next.next();
        }
        Harvest {
            pages,
            partial: read,
        }
    }

    fn free(&mut self, cpu: u32, pages: u64, around: &mut Around<'_>) -> Result<(), Violation> {
        let state = &mut self.cpus[cpu as usize];
        let stream = (self.session, StreamId(cpu));
        let mut left = pages;
        while left > 0 {
            let Some((sequence, count)) = state.cut.pop_front() else {
                return Err(Violation::of(
                    Judge::Machine,
                    "more pages are let go than are retained",
                ));
            };
            for _ in 0..count {
                state.retained.pop_front();
            }
            left = left.saturating_sub(u64::from(count));
            around.freed.insert(stream, sequence.next());
            acked::judge(
                "the agent's letting go",
                stream,
                sequence.next(),
                around.durable,
            )?;
        }
        Ok(())
    }

    /// Puts the frame in hand on the port: one element, all or nothing, but for what the driver's pipe cuts.
    fn push(&mut self, index: usize, around: &mut Around<'_>) {
        let port = &mut self.ports[index];
        if port.outgoing.is_empty() {
            return;
        }
        let now = around.now;
        let id = port_id(index);
        let line = &mut around.ports[index];
        if port.hung || line.queue.len() >= around.options.queue_elements {
            let torn = port.torn;
            self.agent
                .tell(move |session| session.handle_sent(now, id, Sent::Blocked { torn }));
            return;
        }
        if !port.torn && around.rng.chance(around.options.swallows) {
            port.outgoing.clear();
            self.agent
                .tell(move |session| session.handle_sent(now, id, Sent::Swallowed));
            return;
        }
        if !port.torn && port.outgoing.len() > 1 && around.rng.chance(around.options.tears) {
            let at = around.rng.len(1, port.outgoing.len() - 1);
            let rest = port.outgoing.split_off(at);
            line.queue
                .push_back(std::mem::replace(&mut port.outgoing, rest));
            port.torn = true;
            self.agent
                .tell(move |session| session.handle_sent(now, id, Sent::Blocked { torn: true }));
            return;
        }
        line.queue.push_back(std::mem::take(&mut port.outgoing));
        port.torn = false;
        self.agent
            .tell(move |session| session.handle_sent(now, id, Sent::Whole));
    }
}

fn port_id(index: usize) -> PortId {
    PortId(cpu_number(index))
}

fn cpu_number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn stream_of(index: usize) -> StreamId {
    StreamId(cpu_number(index))
}
