//! Directed dialogues, and a small world with a seed whose judge knows nothing of sequences.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;

/// A ring's page, by its place in the order in which the guest made it.
type Page = u64;

/// What the judges allow a stream to lose: nothing but what the ring overwrote.
const RING_PAGES: usize = 40;
const WINDOW: u64 = 24;
const PAGE_SIZE: u32 = 4096;

fn about() -> About {
    About {
        session: SessionId(0xfeed),
        boot_id: [7; 16],
        agent_version: "0".into(),
        kernel: "k".into(),
        clock: "local".into(),
        page_size: PAGE_SIZE,
        long_size: 8,
        big_endian: false,
        ring_pages: RING_PAGES as u64,
        window_pages: WINDOW,
        idle_flush_ns: 200 * MILLISECOND,
    }
}

/// A frame on its way. Each travels in two halves, so that it can be torn.
#[derive(Debug, Clone)]
struct Frame {
    header: FrameHeader,
    body: Vec<u8>,
    bytes: Vec<u8>,
    pages: Vec<Page>,
}

#[derive(Debug)]
enum Half {
    First,
    Second(Box<Frame>),
}

#[derive(Debug, Default)]
struct Line {
    /// Halves that the host has not read yet.
    bytes: VecDeque<Half>,
    /// The frame in the agent's hand, and whether its first half is on the line.
    in_hand: Option<(Frame, bool)>,
    replay: VecDeque<Page>,
    /// Halves that the line takes before it blocks.
    room: usize,
    /// Whether the host read a first half and waits for the second.
    host_waits: bool,
    host: Option<u64>,
    /// Whether the agent answered this epoch.
    answered: bool,
    quiesced: Option<u64>,
    /// The newest epoch seen in a frame.
    newest: u64,
}

#[derive(Debug, Default)]
struct Guest {
    ring: VecDeque<Page>,
    made: Page,
    overwritten: BTreeSet<Page>,
    retained: VecDeque<Page>,
}

/// What the host keeps: frames in order. Only what was synced survives its death.
#[derive(Debug, Default)]
struct Kept {
    frames: Vec<(FrameHeader, Vec<Page>)>,
    synced: usize,
}

#[derive(Debug)]
struct World {
    session: Session,
    now: u64,
    guests: BTreeMap<u32, Guest>,
    lines: BTreeMap<PortId, Line>,
    fresh: Vec<Page>,
    kept: BTreeMap<u32, Kept>,
    epoch: u64,
    next_id: u64,
    metadata: BTreeSet<(u32, u32)>,
    swallow: bool,
}

impl World {
    fn new(cpus: u32) -> Self {
        let mut session = Session::new(0, about());
        let cpus: Vec<u32> = (0..cpus).collect();
        session.handle_cpus(0, &cpus);
        session.handle_inventory(
            0,
            Inventory {
                items: 5,
                volatile: vec![3],
                changed: true,
            },
        );
        session.handle_tracing(0, None, Ok(true));
        Self {
            session,
            now: 0,
            guests: cpus.iter().map(|&cpu| (cpu, Guest::default())).collect(),
            lines: BTreeMap::new(),
            fresh: Vec::new(),
            kept: cpus.iter().map(|&cpu| (cpu, Kept::default())).collect(),
            epoch: 0,
            next_id: 1,
            metadata: BTreeSet::new(),
            swallow: false,
        }
    }

    fn make_pages(&mut self, cpu: u32, count: u64) {
        let Some(guest) = self.guests.get_mut(&cpu) else {
            return;
        };
        for _ in 0..count {
            guest.ring.push_back(guest.made);
            guest.made += 1;
            if guest.ring.len() > RING_PAGES
                && let Some(oldest) = guest.ring.pop_front()
            {
                guest.overwritten.insert(oldest);
            }
        }
    }

    fn work(&mut self) {
        let mut actions = 0;
        while let Some(action) = self.session.poll_action() {
            actions += 1;
            assert!(actions < 100_000, "the session never comes to rest");
            self.execute(action);
        }
        let window: u64 = self
            .guests
            .values()
            .map(|guest| guest.retained.len() as u64)
            .sum();
        assert_eq!(window, self.session.retained_pages());
        assert!(
            self.guests
                .values()
                .all(|guest| guest.retained.len() as u64 <= WINDOW)
        );
    }

    fn execute(&mut self, action: Action) {
        match action {
            Action::Harvest {
                cpu,
                max_pages,
                partial,
            } => {
                let guest = self.guests.get_mut(&cpu).unwrap();
                // The newest page is the one that is being written: taken only if a partial one is wanted.
                let full = guest.ring.len().saturating_sub(1).min(max_pages as usize);
                self.fresh.extend(guest.ring.drain(..full));
                let mut read = false;
                if partial
                    && self.fresh.len() < max_pages as usize
                    && let Some(page) = guest.ring.pop_front()
                {
                    self.fresh.push(page);
                    read = true;
                }
                guest.retained.extend(&self.fresh);
                let got = Harvest {
                    pages: u32::try_from(self.fresh.len()).unwrap(),
                    partial: read,
                };
                self.session
                    .handle_harvest(self.now, cpu, (max_pages, partial), got);
            }
            Action::Send {
                port,
                header,
                body,
                payload,
            } => {
                let line = self.lines.get_mut(&port).unwrap();
                assert!(line.in_hand.is_none(), "two frames in one hand");
                let (bytes, pages) = match payload {
                    Payload::Bytes(bytes) => (bytes, Vec::new()),
                    Payload::Fresh { pages, .. } => {
                        assert_eq!(self.fresh.len(), pages as usize);
                        (Vec::new(), std::mem::take(&mut self.fresh))
                    }
                    Payload::Replay { pages, .. } => {
                        (Vec::new(), line.replay.drain(..pages as usize).collect())
                    }
                };
                let frame = Frame {
                    header,
                    body,
                    bytes,
                    pages,
                };
                line.in_hand = Some((frame, false));
                self.push(port);
            }
            Action::DropUnsent { port } => {
                if let Some(line) = self.lines.get_mut(&port) {
                    line.in_hand = None;
                }
            }
            Action::BeginReplay { port, cpu } => {
                let pages = self.guests[&cpu].retained.clone();
                self.lines.get_mut(&port).unwrap().replay = pages;
            }
            Action::SkipReplay { port, pages } => {
                let line = self.lines.get_mut(&port).unwrap();
                line.replay.drain(..usize::try_from(pages).unwrap());
            }
            Action::EndReplay { port } => {
                if let Some(line) = self.lines.get_mut(&port) {
                    line.replay.clear();
                }
            }
            Action::Free { cpu, pages } => {
                let durable: BTreeSet<Page> = self.kept[&cpu].frames[..self.kept[&cpu].synced]
                    .iter()
                    .flat_map(|(_, pages)| pages.iter().copied())
                    .collect();
                let guest = self.guests.get_mut(&cpu).unwrap();
                for page in guest.retained.drain(..usize::try_from(pages).unwrap()) {
                    assert!(
                        durable.contains(&page),
                        "cpu{cpu}: page {page} was let go but is not durable"
                    );
                }
            }
            Action::ReadCounters => {
                let counters: Vec<CpuCounters> = self
                    .guests
                    .iter()
                    .map(|(&cpu, guest)| CpuCounters {
                        cpu,
                        overrun: guest.overwritten.len() as u64,
                        ..CpuCounters::default()
                    })
                    .collect();
                self.session.handle_counters(self.now, &counters);
            }
            Action::ReadClocks { port, id, host_ns } => {
                let pong = Pong {
                    id,
                    host_ns,
                    monotonic_ns: self.now,
                    boottime_ns: self.now,
                    realtime_ns: self.now,
                };
                self.session.handle_clocks(self.now, port, pong);
            }
            Action::TakeInventory => {
                let inventory = Inventory {
                    items: 5,
                    volatile: vec![3],
                    changed: false,
                };
                self.session.handle_inventory(self.now, inventory);
            }
            Action::ReadMetadata { item, offset } => {
                let piece = MetadataPiece {
                    name: format!("item{item}"),
                    bytes: vec![1; 10],
                    last: offset == 20,
                };
                self.session.handle_metadata(self.now, piece);
            }
            Action::SetTracing { port, id, on } => {
                self.session
                    .handle_tracing(self.now, Some((port, id)), Ok(on));
            }
            Action::Configure { .. } | Action::Mark { .. } => {}
        }
    }

    /// Moves as many halves as the line takes.
    fn push(&mut self, port: PortId) {
        let Some(line) = self.lines.get_mut(&port) else {
            return;
        };
        let Some((frame, torn)) = line.in_hand.take() else {
            return;
        };
        if self.swallow && line.room > 0 && !torn {
            self.swallow = false;
            self.session.handle_sent(self.now, port, Sent::Swallowed);
            return;
        }
        let mut torn = torn;
        if !torn && line.room > 0 {
            line.room -= 1;
            line.bytes.push_back(Half::First);
            torn = true;
        }
        if torn && line.room > 0 {
            line.room -= 1;
            line.bytes.push_back(Half::Second(Box::new(frame)));
            self.session.handle_sent(self.now, port, Sent::Whole);
            return;
        }
        line.in_hand = Some((frame, torn));
        self.session
            .handle_sent(self.now, port, Sent::Blocked { torn });
    }

    fn unblock(&mut self, port: PortId, room: usize) {
        if let Some(line) = self.lines.get_mut(&port) {
            line.room = room;
            self.push(port);
        }
        self.work();
    }

    /// The host reads `halves` of a line.
    fn read(&mut self, port: PortId, halves: usize) {
        for _ in 0..halves {
            let Some(line) = self.lines.get_mut(&port) else {
                return;
            };
            let Some(half) = line.bytes.pop_front() else {
                return;
            };
            match half {
                Half::First => {
                    assert!(
                        !line.host_waits,
                        "a frame was cut short and another one follows"
                    );
                    line.host_waits = true;
                }
                Half::Second(frame) => {
                    // A second half without its first is what a reader in the middle of the stream skips.
                    if std::mem::take(&mut line.host_waits) && line.host.is_some() {
                        self.take(port, *frame);
                    }
                }
            }
        }
    }

    /// The host's rules (design.md, "Epochs").
    fn take(&mut self, port: PortId, frame: Frame) {
        let line = self.lines.get_mut(&port).unwrap();
        assert!(
            frame.header.epoch.0 >= line.newest,
            "epochs of a port went back"
        );
        line.newest = frame.header.epoch.0;
        let own_epoch = line.host == Some(frame.header.epoch.0);
        if frame.header.kind != Kind::Pages {
            let message = AgentMessage::decode(&frame.header, &frame.body, &frame.bytes);
            match message.unwrap().unwrap() {
                AgentMessage::Hello(_) => line.answered |= own_epoch,
                AgentMessage::Quiesced(quiesced) if own_epoch => line.quiesced = Some(quiesced.id),
                AgentMessage::Metadata(chunk) if chunk.last => {
                    self.metadata.insert((chunk.generation, chunk.item));
                }
                _ => {}
            }
            return;
        }
        assert!(
            !own_epoch || line.answered,
            "pages came before the answer to Hello"
        );
        let cpu = frame.header.stream.cpu().unwrap();
        let kept = self.kept.get_mut(&cpu).unwrap();
        let sequence = usize::try_from(frame.header.sequence.0).unwrap();
        let next = kept.frames.len();
        if sequence == next {
            kept.frames.push((frame.header, frame.pages));
        } else if sequence < next {
            let (header, pages) = &kept.frames[sequence];
            assert_eq!(*pages, frame.pages, "a replayed frame differs");
            assert_eq!(header.first_page, frame.header.first_page);
            assert_eq!(header.sent_ns, frame.header.sent_ns);
        } else {
            assert!(
                !own_epoch,
                "cpu{cpu}: frame {sequence} of the own epoch came, {next} was expected: that is loss"
            );
        }
    }

    fn say(&mut self, port: PortId, epoch: u64, message: HostMessage) -> u64 {
        self.next_id += 1;
        let envelope = Envelope {
            session: SessionId(0xfeed),
            epoch: Epoch(epoch),
            id: self.next_id,
            message,
        };
        self.session.handle_message(self.now, port, envelope);
        self.work();
        self.next_id
    }

    fn hello(&mut self, port: PortId) {
        self.epoch += 1;
        let epoch = self.epoch;
        let Some(line) = self.lines.get_mut(&port) else {
            return;
        };
        line.host = Some(epoch);
        line.answered = false;
        line.quiesced = None;
        let resume_from = self
            .kept
            .iter()
            .map(|(&cpu, kept)| (StreamId(cpu), Sequence(kept.synced as u64)))
            .collect();
        let hello = HostHello {
            version_min: 1,
            version_max: 1,
            have_metadata: 0,
            resume_from,
        };
        self.say(port, epoch, HostMessage::Hello(hello));
    }

    fn sync_and_ack(&mut self, port: PortId) {
        for kept in self.kept.values_mut() {
            kept.synced = kept.frames.len();
        }
        let acks = self
            .kept
            .iter()
            .map(|(&cpu, kept)| (StreamId(cpu), Sequence(kept.synced as u64)))
            .collect();
        if let Some(epoch) = self.lines.get(&port).and_then(|line| line.host) {
            self.say(port, epoch, HostMessage::Ack(acks));
        }
    }

    /// The reader dies and takes with it what it had not synced; a new one attaches everywhere.
    fn host_dies(&mut self) {
        for kept in self.kept.values_mut() {
            kept.frames.truncate(kept.synced);
        }
        let ports: Vec<PortId> = self.lines.keys().copied().collect();
        for &port in &ports {
            // The new reader's first bytes may be the middle of a frame, which it skips.
            self.lines.get_mut(&port).unwrap().host_waits = false;
            self.lines.get_mut(&port).unwrap().host = None;
        }
        for port in ports {
            self.hello(port);
        }
    }

    /// A socket's reader hangs up: what is on the line is gone.
    fn hang_up(&mut self, port: PortId) {
        if let Some(line) = self.lines.get_mut(&port) {
            line.bytes.clear();
            line.host_waits = false;
            line.host = None;
        }
        self.session.handle_host_gone(self.now, port);
        self.work();
    }

    fn plug(&mut self, port: PortId, there: bool) {
        if there {
            self.lines.entry(port).or_default();
        } else {
            self.lines.remove(&port);
        }
        let open: Vec<PortId> = self.lines.keys().copied().collect();
        self.session.handle_ports(self.now, &open);
        self.work();
    }

    fn pass(&mut self, time: u64) {
        self.now += time;
        self.session.handle_timeout(self.now);
        self.work();
    }

    /// Everything is well again: within a bound the host has all pages but those that the rings overwrote.
    fn settle(&mut self) {
        if self.lines.is_empty() {
            self.plug(PortId(0), true);
        }
        self.swallow = false;
        let ports: Vec<PortId> = self.lines.keys().copied().collect();
        for &port in &ports {
            self.lines.get_mut(&port).unwrap().host_waits = false;
            self.hello(port);
        }
        let mut flushes = BTreeMap::new();
        for &port in &ports {
            let epoch = self.lines[&port].host.unwrap();
            flushes.insert(port, self.say(port, epoch, HostMessage::Stop));
        }
        for round in 0.. {
            assert!(round < 400, "no end: {:?}", self.session);
            for &port in &ports {
                self.unblock(port, 64);
                self.read(port, 1000);
                self.sync_and_ack(port);
            }
            self.pass(10 * MILLISECOND);
            if flushes
                .iter()
                .all(|(port, &id)| self.lines[port].quiesced == Some(id))
            {
                break;
            }
        }
        for (&cpu, guest) in &self.guests {
            assert!(guest.ring.is_empty(), "cpu{cpu} was not emptied");
            let stored: Vec<Page> = self.kept[&cpu]
                .frames
                .iter()
                .flat_map(|(_, pages)| pages.clone())
                .collect();
            let due: Vec<Page> = (0..guest.made)
                .filter(|page| !guest.overwritten.contains(page))
                .collect();
            assert_eq!(stored, due, "cpu{cpu}");
            let mut page = 0;
            for (header, pages) in &self.kept[&cpu].frames {
                assert_eq!(header.first_page, page);
                page += pages.len() as u64;
            }
        }
        let whole: BTreeSet<(u32, u32)> = (0..5).map(|item| (1, item)).collect();
        assert_eq!(self.metadata, whole, "metadata");
        assert_eq!(self.session.retained_pages(), 0);
        assert!(self.session.is_idle());
    }
}

/// What happens in the world, one thing after the other.
#[derive(Debug, Clone)]
enum Event {
    Make(u32, u64),
    Pass(u64),
    Unblock(u32, usize),
    Read(u32, usize),
    Ack(u32),
    Hello(u32),
    StaleHello(u32),
    HostDies,
    HangUp(u32),
    Plug(u32, bool),
    Flush(u32),
    Ping(u32),
    RingReady(u32),
    Swallow,
}

fn event() -> impl Strategy<Value = Event> {
    let port = 0..3u32;
    let cpu = 0..4u32;
    prop_oneof![
        6 => (cpu.clone(), 1..30u64).prop_map(|(cpu, count)| Event::Make(cpu, count)),
        6 => (1..400u64).prop_map(|ms| Event::Pass(ms * MILLISECOND)),
        6 => (port.clone(), 0..9usize).prop_map(|(port, room)| Event::Unblock(port, room)),
        6 => (port.clone(), 1..20usize).prop_map(|(port, halves)| Event::Read(port, halves)),
        4 => port.clone().prop_map(Event::Ack),
        3 => port.clone().prop_map(Event::Hello),
        1 => port.clone().prop_map(Event::StaleHello),
        1 => Just(Event::HostDies),
        1 => port.clone().prop_map(Event::HangUp),
        2 => (port.clone(), any::<bool>()).prop_map(|(port, there)| Event::Plug(port, there)),
        1 => port.clone().prop_map(Event::Flush),
        1 => port.prop_map(Event::Ping),
        1 => cpu.prop_map(Event::RingReady),
        1 => Just(Event::Swallow),
    ]
}

fn happen(world: &mut World, event: &Event) {
    match *event {
        Event::Make(cpu, count) => world.make_pages(cpu, count),
        Event::Pass(time) => world.pass(time),
        Event::Unblock(port, room) => world.unblock(PortId(port), room),
        Event::Read(port, halves) => world.read(PortId(port), halves),
        Event::Ack(port) => world.sync_and_ack(PortId(port)),
        Event::Hello(port) => world.hello(PortId(port)),
        Event::StaleHello(port) => {
            let hello = HostHello {
                version_min: 1,
                version_max: 1,
                ..HostHello::default()
            };
            let epoch = world.epoch.saturating_sub(1);
            let newest = world.lines.get(&PortId(port)).and_then(|line| line.host);
            if newest.is_some_and(|newest| epoch < newest) {
                world.say(PortId(port), epoch, HostMessage::Hello(hello));
            }
        }
        Event::HostDies => world.host_dies(),
        Event::HangUp(port) => world.hang_up(PortId(port)),
        Event::Plug(port, there) => world.plug(PortId(port), there),
        Event::Flush(port) => {
            if let Some(epoch) = world.lines.get(&PortId(port)).and_then(|line| line.host) {
                world.say(PortId(port), epoch, HostMessage::Flush);
            }
        }
        Event::Ping(port) => {
            if let Some(epoch) = world.lines.get(&PortId(port)).and_then(|line| line.host) {
                world.say(PortId(port), epoch, HostMessage::Ping { host_ns: 1 });
            }
        }
        Event::RingReady(cpu) => {
            world.session.handle_ring_ready(world.now, cpu);
            world.work();
        }
        Event::Swallow => world.swallow = true,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_host_ends_up_with_every_page_once(
        cpus in 1..5u32,
        events in proptest::collection::vec(event(), 0..200),
    ) {
        let mut world = World::new(cpus);
        world.plug(PortId(0), true);
        for event in &events {
            happen(&mut world, event);
        }
        world.settle();
    }
}

fn attached_world() -> World {
    let mut world = World::new(1);
    world.plug(PortId(0), true);
    world.unblock(PortId(0), 1000);
    world.hello(PortId(0));
    world.pass(BUSY_TICK);
    world.read(PortId(0), 1000);
    world
}

#[test]
fn nothing_is_said_before_a_host_speaks() {
    let mut world = World::new(2);
    world.plug(PortId(0), true);
    world.unblock(PortId(0), 1000);
    world.make_pages(0, 10);
    for _ in 0..100 {
        world.pass(100 * MILLISECOND);
    }
    assert!(world.lines[&PortId(0)].bytes.is_empty());
    assert_eq!(
        world.session.poll_timeout(),
        None,
        "and nothing is waited for"
    );
}

#[test]
fn a_torn_frame_is_finished_before_the_answer_to_a_new_hello() {
    let mut world = attached_world();
    world.unblock(PortId(0), 1);
    world.make_pages(0, 10);
    world.pass(SECOND);
    assert!(matches!(world.lines[&PortId(0)].in_hand, Some((_, true))));
    world.hello(PortId(0));
    assert!(
        matches!(world.lines[&PortId(0)].in_hand, Some((_, true))),
        "the torn frame was dropped"
    );
    world.settle();
}

#[test]
fn an_untorn_frame_gives_way_to_the_answer() {
    let mut world = attached_world();
    world.unblock(PortId(0), 0);
    world.make_pages(0, 10);
    world.pass(SECOND);
    assert!(
        matches!(&world.lines[&PortId(0)].in_hand, Some((frame, false)) if frame.header.kind == Kind::Pages)
    );
    world.hello(PortId(0));
    assert!(
        matches!(&world.lines[&PortId(0)].in_hand, Some((frame, false)) if frame.header.kind == Kind::Hello)
    );
    world.settle();
}

#[test]
fn acks_beyond_what_was_sent_free_nothing() {
    let mut world = attached_world();
    world.unblock(PortId(0), 0);
    world.make_pages(0, 10);
    world.pass(SECOND);
    let held = world.session.retained_pages();
    assert!(held > 0);
    let epoch = world.epoch;
    world.say(
        PortId(0),
        epoch,
        HostMessage::Ack(vec![(StreamId(0), Sequence(u64::MAX))]),
    );
    assert_eq!(world.session.retained_pages(), held);
}

#[test]
fn hellos_of_another_session_do_not_free_what_this_one_keeps() {
    let mut world = attached_world();
    world.make_pages(0, 10);
    world.pass(SECOND);
    let held = world.session.retained_pages();
    assert!(held > 0);
    let envelope = Envelope {
        session: SessionId(0xdead),
        epoch: Epoch(99),
        id: 1,
        message: HostMessage::Hello(HostHello {
            version_min: 1,
            version_max: 1,
            have_metadata: 1,
            resume_from: vec![(StreamId(0), Sequence(1000))],
        }),
    };
    world.session.handle_message(world.now, PortId(0), envelope);
    assert_eq!(world.session.retained_pages(), held);
}

#[test]
fn a_stream_that_moves_is_replayed_where_it_goes() {
    let mut world = World::new(2);
    let ports = [PortId(0), PortId(1)];
    for port in ports {
        world.plug(port, true);
    }
    for port in ports {
        world.unblock(port, 1000);
        world.hello(port);
        world.read(port, 1000);
    }
    world.make_pages(1, 5);
    world.pass(SECOND);
    assert!(!world.lines[&PortId(1)].bytes.is_empty());
    // Gone before it was read, and the other port's reader must not see a gap.
    world.plug(PortId(1), false);
    world.make_pages(1, 5);
    world.pass(SECOND);
    world.read(PortId(0), 1000);
    let pages: usize = world.kept[&1]
        .frames
        .iter()
        .map(|(_, pages)| pages.len())
        .sum();
    assert_eq!(pages, 10);
    world.settle();
}

#[test]
fn a_future_host_is_refused_in_words() {
    let mut world = attached_world();
    let hello = HostHello {
        version_min: 2,
        version_max: 9,
        ..HostHello::default()
    };
    world.say(PortId(0), 50, HostMessage::Hello(hello));
    let Some(Half::Second(frame)) = world.lines.get_mut(&PortId(0)).unwrap().bytes.pop_back()
    else {
        panic!("no answer");
    };
    let message = AgentMessage::decode(&frame.header, &frame.body, &frame.bytes).unwrap();
    let Some(AgentMessage::Error(error)) = message else {
        panic!("{message:?}");
    };
    assert_eq!(error.code, ErrorCode::Unsupported);
    assert!(error.text.contains("protocol 2 to 9"), "{}", error.text);
}

#[test]
fn a_quiet_session_wakes_seldom() {
    let mut world = attached_world();
    world.sync_and_ack(PortId(0));
    let mut wakes = 0;
    let end = world.now + 10 * SECOND;
    while let Some(at) = world.session.poll_timeout()
        && at < end
    {
        wakes += 1;
        let wait = at.saturating_sub(world.now);
        world.pass(wait);
        world.unblock(PortId(0), 1000);
    }
    // Five looks a second, one at the counters, and the heartbeat.
    assert!(wakes <= 10 * 7, "{wakes} wakes in 10 s");
}

#[test]
fn one_event_in_a_quiet_guest_is_sent_within_the_idle_flush_time() {
    let mut world = attached_world();
    for _ in 0..50 {
        let at = world.session.poll_timeout().unwrap();
        world.pass(at.saturating_sub(world.now));
        world.unblock(PortId(0), 1000);
    }
    let begin = world.now;
    world.make_pages(0, 1);
    while world.guests[&0].retained.is_empty() {
        let at = world.session.poll_timeout().unwrap();
        world.pass(at.saturating_sub(world.now).max(1));
        assert!(world.now - begin <= 200 * MILLISECOND);
    }
}

#[test]
fn metadata_and_pages_take_turns() {
    let mut world = World::new(1);
    world.plug(PortId(0), true);
    world.make_pages(0, 30);
    world.hello(PortId(0));
    world.unblock(PortId(0), 1000);
    let kinds: Vec<Kind> = world.lines[&PortId(0)]
        .bytes
        .iter()
        .filter_map(|half| match half {
            Half::First => None,
            Half::Second(frame) => Some(frame.header.kind),
        })
        .collect();
    assert_eq!(kinds[..2], [Kind::Hello, Kind::Lost]);
    let first_pages = kinds.iter().position(|&kind| kind == Kind::Pages).unwrap();
    let last_pages = kinds.iter().rposition(|&kind| kind == Kind::Pages).unwrap();
    let between = &kinds[first_pages..last_pages];
    assert!(between.contains(&Kind::Metadata), "{kinds:?}");
}
