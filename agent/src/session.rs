//! What the agent decides: which frame goes to which port next, what stays retained, what is replayed.
//!
//! No file, no clock, no thread. Facts come in through `handle_*`, each with the time at which it was seen; work goes
//! out through [`Session::poll_action`], and [`Session::poll_timeout`] says when to look again. The pump executes
//! actions on pipes; the simulator executes them on vectors, against the host's own ledger.
//!
//! **One rule of use:** after each `handle_*`, call [`Session::poll_action`] until it gives `None`, or at least until
//! [`Session::is_settled`]; and where an action says "answer with", give that answer before polling on. Nothing is
//! remembered about unanswered actions.
//!
//! # A port
//!
//! ```text
//!              Hello, newer epoch
//!   Detached ---------------------> Attached <--+
//!      ^                              |   |     | Hello, newer epoch: drop what is unsent,
//!      |     host gone, port gone     |   +-----+ discard what is acknowledged, replay the rest
//!      +------------------------------+
//! ```
//!
//! While a port is detached nothing is said on it: the guest's ring holds the trace. What a port says next, in order
//! of urgency: answers; then pages (first what must be replayed) and metadata by turns; then the end of a Flush.
//!
//! # A stream
//!
//! A frame enters the ledger when its pages leave the ring, and leaves it when the host says that it is durable. The
//! pages themselves lie in a retention pipe in the same order, so the ledger is the pipe's table of contents: replay
//! cuts the pipe into the same frames, with the same numbers, as before. A stream whose ledger fills the window is
//! not harvested; the kernel's ring goes on, overwrites its oldest pages, and counts them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use vmtrail_wire::agent_to_host::{
    AgentError, AgentHello, CpuCounters, ErrorCode, Heartbeat, MetadataChunk, Pong, Quiesced,
    StreamState,
};
use vmtrail_wire::host_to_agent::{Envelope, HostHello, MessageError, Setting};
use vmtrail_wire::{
    AgentMessage, Epoch, FrameHeader, HostMessage, Kind, MAX_FRAME_PAGES, MAX_PAYLOAD,
    MAX_SUBBUF_SIZE, Sequence, SessionId, StreamId, crc32c, flags, version,
};

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;

/// How often rings are looked at while pages flow. At 50,000 events a second a CPU makes about 5 pages in this time,
/// so a frame is worth its header.
pub const BUSY_TICK: u64 = 10 * MILLISECOND;

/// How often the kernel's counters are compared with those last told.
pub const COUNTERS_EVERY: u64 = SECOND;

/// Silence after which a port says that it lives.
pub const HEARTBEAT_EVERY: u64 = 5 * SECOND;

/// Bytes of pages in one frame at most. With its header, and in whole powers of two, a frame then fits the pipe of 1 MiB
/// that the kernel grants without privileges (`/proc/sys/fs/pipe-max-size`).
pub const MAX_FRAME_BYTES: usize = 512 << 10;
const _: () =
    assert!(MAX_FRAME_BYTES <= MAX_PAYLOAD && MAX_FRAME_BYTES >= MAX_SUBBUF_SIZE as usize);

/// Answers that wait on one port at most. A host that asks faster than it reads gets no more of them.
pub const MAX_WAITING_ANSWERS: usize = 128;

/// Flush, Stop and Quiesce that wait on one port at most.
pub const MAX_WAITING_REQUESTS: usize = 16;

/// A port, by its number (`vmtrail.N`) or its place on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u32);

/// What a session says of itself, fixed for its life but for the clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct About {
    /// This run: random, not zero.
    pub session: SessionId,
    /// The guest's boot.
    pub boot_id: [u8; 16],
    /// Version of the agent.
    pub agent_version: String,
    /// `uname -r`.
    pub kernel: String,
    /// The trace clock.
    pub clock: String,
    /// Bytes of a sub-buffer.
    pub page_size: u32,
    /// Bytes of the kernel's `long`.
    pub long_size: u8,
    /// Byte order of the pages.
    pub big_endian: bool,
    /// Sub-buffers that one CPU's ring holds: what a Flush reads at most.
    pub ring_pages: u64,
    /// Sub-buffers that one stream may keep unacknowledged.
    pub window_pages: u64,
    /// After how long a page that is not full is sent as it is.
    pub idle_flush_ns: u64,
}

/// Work for the pump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Take up to `max_pages` full sub-buffers out of a ring, and if `partial` and there is room, one that is not full.
    /// What was taken is retained. Answer with [`Session::handle_harvest`].
    Harvest {
        /// Whose ring.
        cpu: u32,
        /// Sub-buffers at most.
        max_pages: u32,
        /// Whether a page that is not full is wanted.
        partial: bool,
    },
    /// Put a frame on a port. Answer with [`Session::handle_sent`], again whenever more of it went.
    Send {
        /// The port; it has no other frame in hand.
        port: PortId,
        /// The header.
        header: FrameHeader,
        /// What stands in the header page behind it.
        body: Vec<u8>,
        /// What follows.
        payload: Payload,
    },
    /// Forget the frame that a port has in hand.
    DropUnsent {
        /// The port.
        port: PortId,
    },
    /// Make all retained pages of a stream ready to be sent again by a port, oldest first; they stay retained.
    BeginReplay {
        /// The port.
        port: PortId,
        /// The stream.
        cpu: u32,
    },
    /// Leave out the oldest pages made ready: they were acknowledged meanwhile.
    SkipReplay {
        /// The port.
        port: PortId,
        /// How many.
        pages: u64,
    },
    /// Nothing more of what was made ready will be sent.
    EndReplay {
        /// The port.
        port: PortId,
    },
    /// Let the oldest retained pages go.
    Free {
        /// The stream.
        cpu: u32,
        /// How many.
        pages: u64,
    },
    /// Read the kernel's counters. Answer with [`Session::handle_counters`].
    ReadCounters,
    /// Read the clocks. Answer with [`Session::handle_clocks`].
    ReadClocks {
        /// The port on which a Ping came.
        port: PortId,
        /// Its id.
        id: u64,
        /// Its time.
        host_ns: u64,
    },
    /// See what metadata there is now. Answer with [`Session::handle_inventory`].
    TakeInventory,
    /// Read a piece of metadata. Answer with [`Session::handle_metadata`].
    ReadMetadata {
        /// Number of the item.
        item: u32,
        /// Where the piece begins.
        offset: u64,
    },
    /// Change what is recorded. Answer with [`Session::handle_configured`].
    Configure {
        /// The port that asked.
        port: PortId,
        /// The message that asked.
        id: u64,
        /// What to change.
        settings: Vec<Setting>,
    },
    /// Switch recording. Answer with [`Session::handle_tracing`].
    SetTracing {
        /// The port that asked.
        port: PortId,
        /// The message that asked.
        id: u64,
        /// On or off.
        on: bool,
    },
    /// Write a line into the trace. A failure is answered with [`Session::handle_failure`].
    Mark {
        /// The port that asked.
        port: PortId,
        /// The message that asked.
        id: u64,
        /// The line.
        text: String,
    },
}

/// What stands behind a header page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// Bytes of our own, maybe none.
    Bytes(Vec<u8>),
    /// The pages just harvested.
    Fresh {
        /// The stream.
        cpu: u32,
        /// How many.
        pages: u32,
    },
    /// The next of the pages made ready on this port.
    Replay {
        /// The stream.
        cpu: u32,
        /// How many.
        pages: u32,
    },
}

/// What came out of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Harvest {
    /// Sub-buffers taken.
    pub pages: u32,
    /// Whether the last of them was not full.
    pub partial: bool,
}

/// How far a frame got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// All of it is on the port.
    Whole,
    /// The port takes no more now.
    Blocked {
        /// Whether a part of the frame is on the port already.
        torn: bool,
    },
    /// The port swallowed it (virtio_console's `__send_to_port` returns 0 after the pages left the pipe, when an
    /// allocation fails); the rest was thrown away.
    Swallowed,
}

/// What metadata there is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inventory {
    /// Items.
    pub items: u32,
    /// The items that grow while recording (names of tasks): sent again at Flush and Stop.
    pub volatile: Vec<u32>,
    /// Whether it differs from the last inventory in more than the volatile items.
    pub changed: bool,
}

/// A piece of metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataPiece {
    /// Name of the item.
    pub name: String,
    /// The bytes; at most [`vmtrail_wire::agent_to_host::MAX_METADATA_CHUNK`].
    pub bytes: Vec<u8>,
    /// Whether the item ends here.
    pub last: bool,
}

/// What a successful Configure changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configured {
    /// The clock in force now.
    pub clock: String,
    /// Sub-buffers that one CPU's ring holds now.
    pub ring_pages: u64,
}

/// One run of the agent.
#[derive(Debug)]
pub struct Session {
    about: About,
    now: u64,
    started: bool,
    ports: BTreeMap<PortId, Port>,
    streams: BTreeMap<u32, Stream>,
    actions: VecDeque<Action>,
    /// The port served last; the next one gets the next turn.
    served: PortId,
    next_session_frame: Sequence,
    window_pages: u64,
    tick: u64,
    tick_at: u64,
    /// Whether full pages came since the last tick.
    flowed: bool,
    counters: Vec<CpuCounters>,
    counters_at: u64,
    /// Ports that get the next counters whether they changed or not.
    counters_for: BTreeSet<PortId>,
    metadata: Metadata,
}

#[derive(Debug, Default)]
struct Port {
    open: bool,
    /// The newest epoch obeyed; kept while detached, so that a late Hello of an older reader is still known as such.
    epoch: Epoch,
    attached: bool,
    quiesced: bool,
    answers: VecDeque<Answer>,
    requests: VecDeque<Request>,
    in_hand: Option<InHand>,
    replaying: Option<Replaying>,
    streams: Vec<u32>,
    /// Position in `streams` of the next stream's turn.
    turn: usize,
    metadata_is_next: bool,
    sent_at: u64,
}

/// What a port has to say besides pages and metadata. Tables are made when they are sent, so that they are true then.
#[derive(Debug)]
enum Answer {
    Hello,
    Quiesced { id: u64 },
    Pong { id: u64, host_ns: u64 },
    Message(AgentMessage),
}

/// A Flush, Stop or Quiesce that is not answered yet.
#[derive(Debug)]
struct Request {
    id: u64,
    /// Streams still to be emptied.
    left: BTreeMap<u32, Emptying>,
    /// Nothing records any more, so "empty" is a state that can be reached, and not only a moment.
    stopped: bool,
    /// Whether counters are due before the answer.
    counters: bool,
}

/// Whether rings that are being emptied are filled at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recording {
    GoesOn,
    Stopped,
}

#[derive(Debug, Clone, Copy)]
struct Emptying {
    /// Pages that may still be read for the request.
    budget: u64,
    /// Whether a page that was not full came out already.
    saw_partial: bool,
}

#[derive(Debug, Clone, Copy)]
struct InHand {
    torn: bool,
    what: Carried,
}

/// What a frame carries, as far as it matters when it is lost on the way to the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Carried {
    Pages {
        cpu: u32,
        sequence: Sequence,
    },
    Hello,
    Quiesced {
        id: u64,
    },
    Metadata,
    /// State that is told again, or an answer that is asked for again.
    Other,
}

#[derive(Debug, Clone, Copy)]
struct Replaying {
    cpu: u32,
    next: Sequence,
    end: Sequence,
    /// First page that is still ready.
    page: u64,
}

#[derive(Debug, Default)]
struct Stream {
    port: Option<PortId>,
    ledger: VecDeque<Retained>,
    next: Sequence,
    next_page: u64,
    retained_pages: u64,
    /// One above the newest frame that was wholly put on a port: no Ack beyond it is believed.
    sent_below: Sequence,
    /// The ledger must be sent again before anything new.
    replay: bool,
    /// Full pages may be waiting.
    look: bool,
    /// The kernel says that pages are waiting.
    ready: bool,
    /// The kernel said so and was wrong (a page read in part counts as waiting on some kernels): not asked again
    /// before the next tick, or the agent would spin.
    muted: bool,
    /// Replay failed or what was sent was swallowed: to be tried again at the next tick.
    replay_later: bool,
    /// The ring's oldest page was read in part. Kernels before 6.1 splice nothing until the rest of it is read, too
    /// (fixed by "ring-buffer: Allow splice to read previous partially read pages").
    read_in_part: bool,
    /// When a page that is not full is due.
    flush_at: u64,
}

#[derive(Debug, Clone, Copy)]
struct Retained {
    sequence: Sequence,
    first_page: u64,
    pages: u32,
    partial: bool,
    sent_ns: u64,
}

#[derive(Debug, Default)]
struct Metadata {
    generation: u32,
    inventory: Inventory,
    sending: Option<Sending>,
    /// Where all of the generation went last, so that the same reader's other ports do not cause it to be sent again.
    delivered: Option<(PortId, Epoch, u32)>,
}

#[derive(Debug)]
struct Sending {
    port: PortId,
    /// Items not yet begun.
    items: VecDeque<u32>,
    item: u32,
    offset: u64,
    /// Whether this is the whole inventory.
    whole: bool,
}

impl Session {
    /// A session with neither ports nor streams.
    #[must_use]
    pub fn new(now: u64, about: About) -> Self {
        Self {
            now,
            started: false,
            ports: BTreeMap::new(),
            streams: BTreeMap::new(),
            actions: VecDeque::new(),
            served: PortId(0),
            next_session_frame: Sequence(0),
            window_pages: about.window_pages.max(1),
            tick: about.idle_flush_ns,
            tick_at: now,
            flowed: false,
            counters: Vec::new(),
            counters_at: now,
            counters_for: BTreeSet::new(),
            metadata: Metadata::default(),
            about,
        }
    }

    /// The CPUs that may have a stream now. A CPU that was known stays known.
    pub fn handle_cpus(&mut self, now: u64, cpus: &[u32]) {
        self.see(now);
        let before = self.streams.len();
        for &cpu in cpus {
            self.streams.entry(cpu).or_insert_with(|| Stream {
                flush_at: now.saturating_add(self.about.idle_flush_ns),
                ..Stream::default()
            });
        }
        if self.streams.len() != before {
            self.assign_streams();
        }
    }

    /// The ports that are open now. One that closed is left out once before it may appear again.
    pub fn handle_ports(&mut self, now: u64, open: &[PortId]) {
        self.see(now);
        for (id, port) in &mut self.ports {
            if port.open && !open.contains(id) {
                // Its pipes are gone with it; only the epoch is remembered.
                *port = Port {
                    epoch: port.epoch,
                    ..Port::default()
                };
                self.counters_for.remove(id);
                self.metadata.forget_port(*id);
            }
        }
        for &id in open {
            let port = self.ports.entry(id).or_default();
            if !port.open {
                port.open = true;
                port.sent_at = now;
            }
        }
        self.assign_streams();
        self.move_metadata();
    }

    /// The reader of a port went away. What it was sent and did not acknowledge is retained; its successor says Hello.
    pub fn handle_host_gone(&mut self, now: u64, id: PortId) {
        self.see(now);
        let Some(port) = self.ports.get_mut(&id).filter(|port| port.open) else {
            return;
        };
        port.attached = false;
        port.answers.clear();
        port.requests.clear();
        // Torn or not: the next reader's bytes are not the continuation of this one's.
        if port.in_hand.take().is_some() {
            self.actions.push_back(Action::DropUnsent { port: id });
        }
        if port.replaying.take().is_some() {
            self.actions.push_back(Action::EndReplay { port: id });
        }
        self.counters_for.remove(&id);
        self.metadata.forget_port(id);
        self.move_metadata();
    }

    /// A host spoke.
    pub fn handle_message(&mut self, now: u64, id: PortId, envelope: Envelope) {
        self.see(now);
        let Some(port) = self.ports.get(&id).filter(|port| port.open) else {
            return;
        };
        let Envelope {
            session,
            epoch,
            id: message_id,
            message,
        } = envelope;
        let meant = session == self.about.session;
        let message = match message {
            HostMessage::Hello(hello) => {
                self.attach(id, epoch, message_id, meant, &hello);
                return;
            }
            // Acks repeat what is durable, so a stale or foreign one is not worth an answer; and to believe one that
            // was meant for another session would free what nobody holds.
            HostMessage::Ack(_) if !meant || !port.attached || epoch != port.epoch => return,
            HostMessage::Ack(sequences) => {
                for (stream, sequence) in sequences {
                    if let Some(cpu) = stream.cpu() {
                        self.release(cpu, sequence);
                    }
                }
                return;
            }
            message => message,
        };
        if !port.attached {
            return;
        }
        if epoch != port.epoch {
            self.refuse_epoch(id, message_id);
            return;
        }
        if session.0 != 0 && !meant {
            let text = format!(
                "message is for session {session}, this is {}",
                self.about.session
            );
            self.refuse(id, message_id, ErrorCode::BadMessage, text);
            return;
        }
        match message {
            HostMessage::Hello(_) | HostMessage::Ack(_) => {}
            HostMessage::Ping { host_ns } => self.answer(
                id,
                Answer::Pong {
                    id: message_id,
                    host_ns,
                },
            ),
            HostMessage::Mark(text) => self.actions.push_back(Action::Mark {
                port: id,
                id: message_id,
                text,
            }),
            HostMessage::Configure(settings) => self.actions.push_back(Action::Configure {
                port: id,
                id: message_id,
                settings,
            }),
            HostMessage::Start => self.actions.push_back(Action::SetTracing {
                port: id,
                id: message_id,
                on: true,
            }),
            HostMessage::Stop => self.actions.push_back(Action::SetTracing {
                port: id,
                id: message_id,
                on: false,
            }),
            HostMessage::Flush => self.begin_request(id, message_id, Some(Recording::GoesOn)),
            HostMessage::Quiesce => {
                if let Some(port) = self.ports.get_mut(&id) {
                    port.quiesced = true;
                }
                self.begin_request(id, message_id, None);
            }
            HostMessage::Unknown(kind) => {
                let text = format!(
                    "message kind {kind} is unknown to agent {}",
                    self.about.agent_version
                );
                self.refuse(id, message_id, ErrorCode::Unsupported, text);
            }
        }
    }

    /// A host's message could not be read.
    pub fn handle_bad_message(&mut self, now: u64, id: PortId, error: MessageError) {
        self.see(now);
        // Bytes that are no message come before the first Hello of a port whose last reader died while writing;
        // they are skipped. Only a whole message whose sender waits for an answer gets one.
        let (message_id, code) = match error {
            MessageError::Version { id, .. } => (id, ErrorCode::Unsupported),
            MessageError::Body { id, .. } => (id, ErrorCode::BadMessage),
            MessageError::Magic | MessageError::TooLong(_) | MessageError::Checksum { .. } => {
                return;
            }
        };
        self.refuse(id, message_id, code, error.to_string());
    }

    /// The answer to [`Action::Harvest`].
    pub fn handle_harvest(&mut self, now: u64, cpu: u32, asked: (u32, bool), got: Harvest) {
        self.see(now);
        let (asked_pages, asked_partial) = asked;
        let idle_flush = self.about.idle_flush_ns;
        let Some(stream) = self.streams.get_mut(&cpu) else {
            return;
        };
        let Some(id) = stream.port else {
            return;
        };
        let Some(port) = self.ports.get_mut(&id) else {
            return;
        };
        let was_ready = std::mem::take(&mut stream.ready);
        if got.pages == 0 {
            stream.look = false;
            stream.muted |= was_ready;
            if asked_partial {
                stream.flush_at = self.now.saturating_add(idle_flush);
                if let Some(request) = port.requests.front_mut() {
                    request.left.remove(&cpu);
                }
            }
            return;
        }
        // A harvest that was not full means that the ring holds no full page now. Looking again at once would find
        // one page at a time and spend a header on each.
        stream.look = got.pages == asked_pages;
        stream.flush_at = self.now.saturating_add(idle_flush);
        let was_read_in_part = std::mem::replace(&mut stream.read_in_part, got.partial);
        if got.pages > 1 || !got.partial {
            self.flowed = true;
            if self.tick > BUSY_TICK {
                self.tick = BUSY_TICK.min(idle_flush);
                self.tick_at = self.now.saturating_add(self.tick);
            }
        }
        if let Some(request) = port.requests.front_mut()
            && let Some(left) = request.left.get_mut(&cpu)
        {
            left.budget = left.budget.saturating_sub(u64::from(got.pages));
            // A page that is not full is the ring's last, so all is out that was there when the request came, and what
            // is made since (by this very work, too) is not chased. The exception is the rest of a page read in part,
            // behind which old kernels hide full ones.
            let was_last = got.partial && (!was_read_in_part || got.pages > 1 || left.saw_partial);
            left.saw_partial |= got.partial;
            if left.budget == 0 || (was_last && !request.stopped) {
                request.left.remove(&cpu);
            }
        }
        let retained = Retained {
            sequence: stream.next,
            first_page: stream.next_page,
            pages: got.pages,
            partial: got.partial,
            sent_ns: self.now,
        };
        stream.next = stream.next.next();
        stream.next_page += u64::from(got.pages);
        stream.retained_pages += u64::from(got.pages);
        stream.ledger.push_back(retained);
        let header = self.pages_header(id, cpu, &retained);
        let payload = Payload::Fresh {
            cpu,
            pages: got.pages,
        };
        self.send(
            id,
            header,
            Vec::new(),
            payload,
            Carried::Pages {
                cpu,
                sequence: retained.sequence,
            },
        );
    }

    /// How far the frame in a port's hand got.
    pub fn handle_sent(&mut self, now: u64, id: PortId, sent: Sent) {
        self.see(now);
        let Some(port) = self.ports.get_mut(&id) else {
            return;
        };
        let Some(in_hand) = &mut port.in_hand else {
            return;
        };
        match sent {
            Sent::Blocked { torn } => in_hand.torn |= torn,
            Sent::Whole => {
                if let Carried::Pages { cpu, sequence } = in_hand.what
                    && let Some(stream) = self.streams.get_mut(&cpu)
                {
                    stream.sent_below = stream.sent_below.max(sequence.next());
                }
                port.in_hand = None;
                port.sent_at = self.now;
            }
            Sent::Swallowed => {
                let what = in_hand.what;
                port.in_hand = None;
                match what {
                    // Within an epoch the host takes a gap for loss, so it must not see a later frame first.
                    Carried::Pages { cpu, .. } => {
                        if let Some(stream) = self.streams.get_mut(&cpu) {
                            stream.replay_later = true;
                        }
                        if port.replaying.take().is_some() {
                            self.actions.push_back(Action::EndReplay { port: id });
                        }
                    }
                    Carried::Hello => port.answers.push_front(Answer::Hello),
                    Carried::Quiesced { id } => port.answers.push_front(Answer::Quiesced { id }),
                    Carried::Metadata => self.send_all_metadata(id),
                    Carried::Other => {}
                }
            }
        }
    }

    /// The answer to [`Action::BeginReplay`], where it failed: the stream's retained pages are not to be had now.
    pub fn handle_replay_failed(&mut self, now: u64, id: PortId) {
        self.see(now);
        if let Some(port) = self.ports.get_mut(&id)
            && let Some(replaying) = port.replaying.take()
            && let Some(stream) = self.streams.get_mut(&replaying.cpu)
        {
            stream.replay_later = true;
        }
    }

    /// The kernel says that a ring has pages waiting.
    pub fn handle_ring_ready(&mut self, now: u64, cpu: u32) {
        self.see(now);
        if let Some(stream) = self.streams.get_mut(&cpu) {
            stream.ready = true;
        }
    }

    /// The kernel's counters.
    pub fn handle_counters(&mut self, now: u64, counters: &[CpuCounters]) {
        self.see(now);
        let mut told = std::mem::take(&mut self.counters_for);
        if self.counters != counters {
            self.counters = counters.to_vec();
            told.extend(self.speaker());
        }
        for id in told {
            // In front of the Quiesced that may wait for it, behind a Hello.
            self.answer(
                id,
                Answer::Message(AgentMessage::Lost(self.counters.clone())),
            );
        }
    }

    /// The answer to [`Action::ReadClocks`].
    pub fn handle_clocks(&mut self, now: u64, id: PortId, pong: Pong) {
        self.see(now);
        self.send_message(id, &AgentMessage::Pong(pong), None);
    }

    /// What metadata there is: at the start, when asked, and whenever it changed.
    pub fn handle_inventory(&mut self, now: u64, inventory: Inventory) {
        self.see(now);
        let changed = inventory.changed || self.metadata.generation == 0;
        self.metadata.inventory = inventory;
        if changed {
            self.metadata.generation = self.metadata.generation.wrapping_add(1).max(1);
            if let Some(id) = self.speaker() {
                self.send_all_metadata(id);
            }
        }
    }

    /// The answer to [`Action::ReadMetadata`].
    pub fn handle_metadata(&mut self, now: u64, piece: MetadataPiece) {
        self.see(now);
        let metadata = &mut self.metadata;
        let Some(sending) = &mut metadata.sending else {
            return;
        };
        let id = sending.port;
        let chunk = MetadataChunk {
            generation: metadata.generation,
            item: sending.item,
            items: metadata.inventory.items,
            offset: sending.offset,
            last: piece.last,
            name: piece.name,
        };
        sending.offset += piece.bytes.len() as u64;
        if piece.last {
            sending.offset = 0;
            match sending.items.pop_front() {
                Some(item) => sending.item = item,
                None => {
                    if sending.whole
                        && let Some(port) = self.ports.get(&id)
                    {
                        metadata.delivered = Some((id, port.epoch, metadata.generation));
                    }
                    metadata.sending = None;
                }
            }
        }
        self.send_message(id, &AgentMessage::Metadata(chunk), Some(piece.bytes));
    }

    /// The answer to [`Action::Configure`].
    pub fn handle_configured(
        &mut self,
        now: u64,
        id: PortId,
        message_id: u64,
        result: Result<Configured, String>,
    ) {
        self.see(now);
        match result {
            Ok(configured) => {
                self.about.clock = configured.clock;
                self.about.ring_pages = configured.ring_pages;
                self.actions.push_back(Action::TakeInventory);
                self.answer(id, Answer::Quiesced { id: message_id });
            }
            Err(text) => self.refuse(id, message_id, ErrorCode::Configure, text),
        }
    }

    /// Recording was switched: the answer to [`Action::SetTracing`], or by the agent itself when it starts or ends
    /// (then without anybody who asked).
    pub fn handle_tracing(
        &mut self,
        now: u64,
        asked: Option<(PortId, u64)>,
        result: Result<bool, String>,
    ) {
        self.see(now);
        match (result, asked) {
            (Ok(on), asked) => {
                self.started = on;
                let Some((id, message_id)) = asked else {
                    return;
                };
                if on {
                    if let Some(port) = self.ports.get_mut(&id) {
                        port.quiesced = false;
                    }
                    self.look_everywhere(id);
                    self.answer(id, Answer::Quiesced { id: message_id });
                } else {
                    self.begin_request(id, message_id, Some(Recording::Stopped));
                }
            }
            (Err(text), Some((id, message_id))) => {
                self.refuse(id, message_id, ErrorCode::Trace, text);
            }
            (Err(_), None) => {}
        }
    }

    /// Something that a host asked for failed in the guest.
    pub fn handle_failure(&mut self, now: u64, id: PortId, message_id: u64, text: String) {
        self.see(now);
        self.refuse(id, message_id, ErrorCode::Trace, text);
    }

    /// How many pages a stream may keep now: less than asked for where the guest's memory is short.
    pub fn handle_window(&mut self, now: u64, pages: u64) {
        self.see(now);
        self.window_pages = pages.clamp(1, self.about.window_pages.max(1));
    }

    /// Sends what every ring holds and then says so on every attached port: the agent is about to end.
    pub fn handle_shutdown(&mut self, now: u64) {
        self.see(now);
        let attached: Vec<PortId> = self.attached().collect();
        for id in attached {
            self.begin_request(id, 0, Some(Recording::Stopped));
        }
    }

    /// Time passed.
    pub fn handle_timeout(&mut self, now: u64) {
        self.see(now);
        if self.now >= self.tick_at {
            self.tick = if self.flowed {
                BUSY_TICK.min(self.about.idle_flush_ns)
            } else {
                self.tick.saturating_mul(2).min(self.about.idle_flush_ns)
            };
            self.flowed = false;
            self.tick_at = self.now.saturating_add(self.tick);
            for stream in self.streams.values_mut() {
                stream.look = true;
                stream.muted = false;
                stream.replay |= std::mem::take(&mut stream.replay_later);
            }
        }
        if self.now >= self.counters_at {
            self.counters_at = self.now.saturating_add(COUNTERS_EVERY);
            if self.speaker().is_some() {
                self.actions.push_back(Action::ReadCounters);
            }
        }
        let silent: Vec<PortId> = self
            .ports
            .iter()
            .filter(|(_, port)| port.heartbeat_at().is_some_and(|at| self.now >= at))
            .map(|(&id, _)| id)
            .collect();
        for id in silent {
            let heartbeat = Heartbeat {
                metadata_generation: self.metadata.generation,
                started: self.started,
            };
            self.answer(id, Answer::Message(AgentMessage::Heartbeat(heartbeat)));
        }
    }

    /// When [`Session::handle_timeout`] is due, if nothing happens before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let mut next: Option<u64> = None;
        let mut sooner = |at: u64| next = Some(next.map_or(at, |next| next.min(at)));
        for (cpu, stream) in &self.streams {
            if self.may_harvest(*cpu) {
                // When all is quiet, looking for full pages and for others comes to the same, at the same pace.
                if self.tick < self.about.idle_flush_ns {
                    sooner(self.tick_at);
                }
                sooner(stream.flush_at);
            }
            if stream.replay_later && stream.port.is_some() {
                sooner(self.tick_at.max(self.now + MILLISECOND));
            }
        }
        if self.speaker().is_some() {
            sooner(self.counters_at);
        }
        for at in self.ports.values().filter_map(Port::heartbeat_at) {
            sooner(at);
        }
        next
    }

    /// The next piece of work.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<Action> {
        loop {
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            // Each port in turn: a port that never blocks must not keep the others from speaking.
            let after = self.ports.range((
                std::ops::Bound::Excluded(self.served),
                std::ops::Bound::Unbounded,
            ));
            let order: Vec<PortId> = after
                .chain(self.ports.range(..=self.served))
                .filter(|(_, port)| port.open && port.in_hand.is_none())
                .map(|(&id, _)| id)
                .collect();
            let id = order.into_iter().find(|&id| self.serve(id))?;
            self.served = id;
        }
    }

    /// Whether the pump should wake when this CPU's ring fills up. While ticks are short it need not: they are cheaper.
    #[must_use]
    pub fn wants_ring_wakeup(&self, cpu: u32) -> bool {
        self.tick > BUSY_TICK
            && self.may_harvest(cpu)
            && self.streams.get(&cpu).is_some_and(|stream| !stream.muted)
    }

    /// Whether no action waits. Facts may be handed in now although [`Session::poll_action`] has more to give.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.actions.is_empty()
    }

    /// Whether every request is answered and every frame is on its way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.actions.is_empty()
            && self
                .ports
                .values()
                .filter(|port| port.attached)
                .all(|port| {
                    port.requests.is_empty() && port.answers.is_empty() && port.in_hand.is_none()
                })
    }

    /// Whether any reader is attached.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.speaker().is_some()
    }

    /// Pages that all streams keep unacknowledged.
    #[must_use]
    pub fn retained_pages(&self) -> u64 {
        self.streams
            .values()
            .map(|stream| stream.retained_pages)
            .sum()
    }

    /// The state of a stream, as a Hello would tell it.
    #[must_use]
    pub fn stream_state(&self, cpu: u32) -> Option<StreamState> {
        let stream = self.streams.get(&cpu)?;
        let (first, first_page) = stream
            .ledger
            .front()
            .map_or((stream.next, stream.next_page), |oldest| {
                (oldest.sequence, oldest.first_page)
            });
        Some(StreamState {
            stream: StreamId(cpu),
            first,
            next: stream.next,
            first_page,
        })
    }

    fn see(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    fn attached(&self) -> impl Iterator<Item = PortId> {
        self.ports
            .iter()
            .filter(|(_, port)| port.attached)
            .map(|(&id, _)| id)
    }

    /// The port that says what one port is enough for: the lowest that has a reader.
    fn speaker(&self) -> Option<PortId> {
        self.attached().next()
    }

    fn attach(
        &mut self,
        id: PortId,
        epoch: Epoch,
        message_id: u64,
        meant: bool,
        hello: &HostHello,
    ) {
        let Some(port) = self.ports.get_mut(&id) else {
            return;
        };
        if epoch < port.epoch {
            // Said on a detached port, too: a host that lost count would otherwise never be heard again.
            self.refuse_epoch(id, message_id);
            return;
        }
        if epoch == port.epoch && port.attached {
            // The host repeats its Hello until it sees our answer, which is on its way.
            return;
        }
        if hello.version_min > version::CURRENT || hello.version_max < version::MIN {
            let text = format!(
                "host speaks protocol {} to {}, agent {} speaks {} to {}: use a vmtrail that reads this agent's version",
                hello.version_min,
                hello.version_max,
                self.about.agent_version,
                version::MIN,
                version::CURRENT
            );
            self.refuse(id, message_id, ErrorCode::Unsupported, text);
            return;
        }
        port.epoch = epoch;
        port.attached = true;
        port.quiesced = false;
        port.answers.clear();
        port.requests.clear();
        match port.in_hand {
            // A frame of which a part is on the port is finished first: cut off, its reader would take the Hello for
            // its missing pages. Whether it was needed or not, it is replayed as well.
            Some(InHand { torn: true, .. }) | None => {}
            Some(InHand { torn: false, .. }) => {
                port.in_hand = None;
                self.actions.push_back(Action::DropUnsent { port: id });
            }
        }
        if port.replaying.take().is_some() {
            self.actions.push_back(Action::EndReplay { port: id });
        }
        let streams = port.streams.clone();
        if meant {
            for &(stream, sequence) in &hello.resume_from {
                if let Some(cpu) = stream.cpu() {
                    self.release(cpu, sequence);
                }
            }
        }
        for cpu in streams {
            if let Some(stream) = self.streams.get_mut(&cpu) {
                stream.replay = !stream.ledger.is_empty();
            }
        }
        self.look_everywhere(id);
        self.answer(id, Answer::Hello);
        self.counters_for.insert(id);
        self.actions.push_back(Action::ReadCounters);
        let has_metadata = meant && hello.have_metadata == self.metadata.generation;
        self.consider_metadata(id, has_metadata);
    }

    /// Looks into the rings of a port at once, and ticks fast until they turn out to be quiet.
    fn look_everywhere(&mut self, id: PortId) {
        for stream in self.streams.values_mut() {
            stream.look |= stream.port == Some(id);
        }
        self.tick = BUSY_TICK.min(self.about.idle_flush_ns);
        self.tick_at = self.now.saturating_add(self.tick);
    }

    fn consider_metadata(&mut self, id: PortId, has_metadata: bool) {
        if let Some(sending) = &self.metadata.sending {
            if sending.port != id {
                return;
            }
            self.metadata.sending = None;
        }
        if has_metadata {
            self.metadata.delivered = self
                .ports
                .get(&id)
                .map(|port| (id, port.epoch, self.metadata.generation));
            return;
        }
        if let Some((to, epoch, generation)) = self.metadata.delivered
            && to != id
            && generation == self.metadata.generation
            && self
                .ports
                .get(&to)
                .is_some_and(|port| port.attached && port.epoch == epoch)
        {
            return;
        }
        if let Some(speaker) = self.speaker() {
            self.send_all_metadata(speaker);
        }
    }

    fn send_all_metadata(&mut self, port: PortId) {
        self.metadata.delivered = None;
        self.metadata.sending = (self.metadata.inventory.items > 0).then(|| Sending {
            port,
            items: (1..self.metadata.inventory.items).collect(),
            item: 0,
            offset: 0,
            whole: true,
        });
    }

    /// After the port that carried the metadata went: another one takes over, from the start.
    fn move_metadata(&mut self) {
        if self.metadata.sending.is_none()
            && self.metadata.delivered.is_none()
            && let Some(speaker) = self.speaker()
        {
            self.send_all_metadata(speaker);
        }
    }

    /// Queues a request, with `empty` one for which the rings are emptied.
    fn begin_request(&mut self, id: PortId, message_id: u64, empty: Option<Recording>) {
        let speaks = self.speaker() == Some(id);
        // Full rings, one page that is not full, and one that was begun meanwhile.
        let budget = self.about.ring_pages.saturating_add(2);
        let Some(port) = self.ports.get_mut(&id).filter(|port| port.attached) else {
            return;
        };
        if port.requests.len() == MAX_WAITING_REQUESTS {
            let text = format!("{MAX_WAITING_REQUESTS} requests wait for their answer already");
            self.refuse(id, message_id, ErrorCode::BadMessage, text);
            return;
        }
        let emptying = Emptying {
            budget,
            saw_partial: false,
        };
        let emptied = port.streams.iter().filter(|_| empty.is_some());
        let left = emptied.map(|&cpu| (cpu, emptying)).collect();
        port.requests.push_back(Request {
            id: message_id,
            left,
            stopped: empty == Some(Recording::Stopped),
            counters: empty.is_some(),
        });
        if empty.is_some() && speaks {
            self.actions.push_back(Action::TakeInventory);
            self.send_volatile_metadata(id);
        }
    }

    /// Names of tasks are only complete at the end, so what was sent of them at the start is replaced.
    fn send_volatile_metadata(&mut self, id: PortId) {
        let volatile = self.metadata.inventory.volatile.iter().copied();
        if let Some(sending) = &mut self.metadata.sending {
            sending.items.extend(volatile);
            return;
        }
        let mut items: VecDeque<u32> = volatile.collect();
        self.metadata.sending = items.pop_front().map(|item| Sending {
            port: id,
            items,
            item,
            offset: 0,
            whole: false,
        });
    }

    fn release(&mut self, cpu: u32, below: Sequence) {
        let Some(stream) = self.streams.get_mut(&cpu) else {
            return;
        };
        let below = below.min(stream.sent_below);
        let mut pages = 0;
        while let Some(oldest) = stream.ledger.front()
            && oldest.sequence < below
        {
            pages += u64::from(oldest.pages);
            stream.ledger.pop_front();
        }
        if pages > 0 {
            stream.retained_pages -= pages;
            stream.look = true;
            self.actions.push_back(Action::Free { cpu, pages });
        }
    }

    /// Deals the streams to the open ports.
    ///
    /// A stream that moves is replayed on its new port from its oldest retained frame: what the old port was given may
    /// still be unread there, and a later frame that overtook it would look like loss. The host drops what it has.
    fn assign_streams(&mut self) {
        let open: Vec<PortId> = self
            .ports
            .iter()
            .filter(|(_, port)| port.open)
            .map(|(&id, _)| id)
            .collect();
        let mut touched = BTreeSet::new();
        for (&cpu, stream) in &mut self.streams {
            let port = (!open.is_empty()).then(|| open[cpu as usize % open.len()]);
            if port == stream.port {
                continue;
            }
            if let Some(old) = stream.port
                && let Some(old_port) = self.ports.get_mut(&old)
            {
                for request in &mut old_port.requests {
                    request.left.remove(&cpu);
                }
                if old_port
                    .replaying
                    .is_some_and(|replaying| replaying.cpu == cpu)
                {
                    old_port.replaying = None;
                    self.actions.push_back(Action::EndReplay { port: old });
                }
                touched.insert(old);
            }
            stream.port = port;
            stream.replay = !stream.ledger.is_empty();
            stream.look = true;
            touched.extend(port);
        }
        for (&id, port) in &mut self.ports {
            port.streams = self
                .streams
                .iter()
                .filter(|(_, stream)| stream.port == Some(id))
                .map(|(&cpu, _)| cpu)
                .collect();
        }
        for id in touched {
            if self.ports.get(&id).is_some_and(|port| port.attached) {
                self.answer(id, Answer::Hello);
            }
        }
    }

    fn may_harvest(&self, cpu: u32) -> bool {
        self.streams.get(&cpu).is_some_and(|stream| {
            stream.retained_pages < self.window_pages
                && !stream.replay_later
                && stream
                    .port
                    .and_then(|id| self.ports.get(&id))
                    .is_some_and(|port| port.attached && !port.quiesced && port.in_hand.is_none())
        })
    }

    /// Finds work for a port that has nothing in hand: true if it queued an action.
    fn serve(&mut self, id: PortId) -> bool {
        let Some(port) = self.ports.get_mut(&id) else {
            return false;
        };
        if let Some(answer) = port.answers.pop_front() {
            self.send_answer(id, answer);
            return true;
        }
        if !port.attached {
            return false;
        }
        let metadata_first = std::mem::take(&mut port.metadata_is_next);
        (metadata_first && self.serve_metadata(id))
            || self.serve_pages(id)
            || self.serve_metadata(id)
            || self.serve_request(id)
    }

    fn serve_metadata(&mut self, id: PortId) -> bool {
        let Some(sending) = &self.metadata.sending else {
            return false;
        };
        if sending.port != id || self.ports.get(&id).is_none_or(|port| port.quiesced) {
            return false;
        }
        self.actions.push_back(Action::ReadMetadata {
            item: sending.item,
            offset: sending.offset,
        });
        true
    }

    fn serve_pages(&mut self, id: PortId) -> bool {
        let Some(port) = self.ports.get(&id) else {
            return false;
        };
        if port.replaying.is_some() {
            return self.serve_replay(id);
        }
        let turn = port.turn;
        let streams = port.streams.clone();
        for step in 0..streams.len() {
            let at = (turn + step) % streams.len();
            let cpu = streams[at];
            let replay = self.streams.get(&cpu).is_some_and(|stream| stream.replay);
            let work = if replay {
                self.begin_replay(id, cpu)
            } else {
                self.begin_harvest(id, cpu)
            };
            if work {
                if let Some(port) = self.ports.get_mut(&id) {
                    port.turn = (at + 1) % streams.len();
                    port.metadata_is_next = true;
                }
                return true;
            }
        }
        false
    }

    fn begin_replay(&mut self, id: PortId, cpu: u32) -> bool {
        let (Some(stream), Some(port)) = (self.streams.get_mut(&cpu), self.ports.get_mut(&id))
        else {
            return false;
        };
        stream.replay = false;
        let Some(oldest) = stream.ledger.front() else {
            return false;
        };
        port.replaying = Some(Replaying {
            cpu,
            next: oldest.sequence,
            end: stream.next,
            page: oldest.first_page,
        });
        self.actions
            .push_back(Action::BeginReplay { port: id, cpu });
        true
    }

    fn serve_replay(&mut self, id: PortId) -> bool {
        let Some(port) = self.ports.get_mut(&id) else {
            return false;
        };
        let Some(replaying) = &mut port.replaying else {
            return false;
        };
        let cpu = replaying.cpu;
        let frame = self.streams.get(&cpu).and_then(|stream| {
            let oldest = stream.ledger.front()?.sequence;
            let wanted = replaying.next.max(oldest);
            let index = usize::try_from(wanted.0 - oldest.0).ok()?;
            stream.ledger.get(index).copied()
        });
        let Some(frame) = frame.filter(|frame| frame.sequence < replaying.end) else {
            port.replaying = None;
            self.actions.push_back(Action::EndReplay { port: id });
            return true;
        };
        let acknowledged = frame.first_page - replaying.page;
        if acknowledged > 0 {
            self.actions.push_back(Action::SkipReplay {
                port: id,
                pages: acknowledged,
            });
        }
        replaying.next = frame.sequence.next();
        replaying.page = frame.first_page + u64::from(frame.pages);
        port.metadata_is_next = true;
        let mut header = self.pages_header(id, cpu, &frame);
        header.flags |= flags::REPLAY;
        let payload = Payload::Replay {
            cpu,
            pages: frame.pages,
        };
        self.send(
            id,
            header,
            Vec::new(),
            payload,
            Carried::Pages {
                cpu,
                sequence: frame.sequence,
            },
        );
        true
    }

    fn begin_harvest(&mut self, id: PortId, cpu: u32) -> bool {
        let (Some(port), Some(stream)) = (self.ports.get(&id), self.streams.get(&cpu)) else {
            return false;
        };
        let room = self.window_pages.saturating_sub(stream.retained_pages);
        if port.quiesced || room == 0 || stream.replay_later {
            return false;
        }
        let emptying = port
            .requests
            .front()
            .is_some_and(|request| request.left.contains_key(&cpu));
        // Streams that are due soon go along, so that an idle guest of many CPUs is not woken once for each.
        let due = self.now.saturating_add(self.about.idle_flush_ns / 8) >= stream.flush_at;
        let partial = emptying || due || (stream.ready && stream.read_in_part);
        if !(stream.look || stream.ready || partial) {
            return false;
        }
        let max_pages = room.min(u64::from(self.frame_pages()));
        self.actions.push_back(Action::Harvest {
            cpu,
            max_pages: u32::try_from(max_pages).unwrap_or(1),
            partial,
        });
        true
    }

    /// Sub-buffers in a frame at most: a quarter of a small window, so that it can be filled while the last frames are
    /// not yet acknowledged.
    fn frame_pages(&self) -> u32 {
        let fit = MAX_FRAME_BYTES as u64 / u64::from(self.about.page_size.max(1));
        let quarter = self.window_pages / 4;
        let pages = u64::from(MAX_FRAME_PAGES).min(fit).min(quarter).max(1);
        u32::try_from(pages).unwrap_or(1)
    }

    /// Answers the oldest request if it is fulfilled.
    fn serve_request(&mut self, id: PortId) -> bool {
        let Some(port) = self.ports.get_mut(&id) else {
            return false;
        };
        let replaying = port.replaying.is_some()
            || port
                .streams
                .iter()
                .filter_map(|cpu| self.streams.get(cpu))
                .any(|stream| stream.replay || stream.replay_later);
        let Some(request) = port.requests.front_mut() else {
            return false;
        };
        let metadata_waits = request.counters
            && !port.quiesced
            && self
                .metadata
                .sending
                .as_ref()
                .is_some_and(|sending| sending.port == id);
        // A quiesced port cuts nothing, so a Flush behind a Quiesce has nothing to wait for.
        let empty = request.left.is_empty() || port.quiesced;
        if replaying || metadata_waits || !empty {
            return false;
        }
        if std::mem::take(&mut request.counters) {
            self.counters_for.insert(id);
            self.actions.push_back(Action::ReadCounters);
            return true;
        }
        let id_of_request = request.id;
        port.requests.pop_front();
        self.answer(id, Answer::Quiesced { id: id_of_request });
        true
    }

    fn answer(&mut self, id: PortId, answer: Answer) {
        if let Some(port) = self.ports.get_mut(&id).filter(|port| port.open)
            && port.answers.len() < MAX_WAITING_ANSWERS
        {
            port.answers.push_back(answer);
        }
    }

    fn refuse(&mut self, id: PortId, message_id: u64, code: ErrorCode, text: String) {
        let epoch = self.ports.get(&id).map_or(0, |port| port.epoch.0);
        let error = AgentError {
            id: message_id,
            code,
            epoch,
            text,
        };
        self.answer(id, Answer::Message(AgentMessage::Error(error)));
    }

    fn refuse_epoch(&mut self, id: PortId, message_id: u64) {
        let epoch = self.ports.get(&id).map_or(Epoch(0), |port| port.epoch);
        let text = format!("the agent obeys epoch {epoch}; say Hello with a newer one");
        self.refuse(id, message_id, ErrorCode::StaleEpoch, text);
    }

    fn send_answer(&mut self, id: PortId, answer: Answer) {
        let message = match answer {
            Answer::Pong { id: ping, host_ns } => {
                self.actions.push_back(Action::ReadClocks {
                    port: id,
                    id: ping,
                    host_ns,
                });
                return;
            }
            Answer::Hello => AgentMessage::Hello(self.hello(id)),
            Answer::Quiesced { id: request } => AgentMessage::Quiesced(Quiesced {
                id: request,
                started: self.started,
                streams: self.table(id),
            }),
            Answer::Message(message) => message,
        };
        self.send_message(id, &message, None);
    }

    fn hello(&self, id: PortId) -> AgentHello {
        let open = self.ports.values().filter(|port| port.open).count();
        AgentHello {
            boot_id: self.about.boot_id,
            version_min: version::MIN,
            version_max: version::CURRENT,
            agent_version: self.about.agent_version.clone(),
            kernel: self.about.kernel.clone(),
            clock: self.about.clock.clone(),
            page_size: self.about.page_size,
            long_size: self.about.long_size,
            big_endian: self.about.big_endian,
            started: self.started,
            cpus: u32::try_from(self.streams.len()).unwrap_or(u32::MAX),
            ports: u32::try_from(open).unwrap_or(u32::MAX),
            window: self.window_pages * u64::from(self.about.page_size),
            metadata_generation: self.metadata.generation,
            streams: self.table(id),
        }
    }

    fn table(&self, id: PortId) -> Vec<StreamState> {
        let streams = self.ports.get(&id).map(|port| port.streams.iter());
        streams
            .into_iter()
            .flatten()
            .filter_map(|&cpu| self.stream_state(cpu))
            .collect()
    }

    fn pages_header(&self, id: PortId, cpu: u32, frame: &Retained) -> FrameHeader {
        FrameHeader {
            sequence: frame.sequence,
            flags: if frame.partial { flags::PARTIAL } else { 0 },
            sent_ns: frame.sent_ns,
            first_page: frame.first_page,
            page_size: self.about.page_size,
            page_count: frame.pages,
            payload_len: frame.pages * self.about.page_size,
            ..FrameHeader::new(
                Kind::Pages,
                self.about.session,
                self.epoch(id),
                StreamId(cpu),
            )
        }
    }

    fn epoch(&self, id: PortId) -> Epoch {
        self.ports.get(&id).map_or(Epoch(0), |port| port.epoch)
    }

    /// Sends a message; `piece` is the payload of a metadata message, which its encoding leaves to us.
    fn send_message(&mut self, id: PortId, message: &AgentMessage, piece: Option<Vec<u8>>) {
        let (kind, body, payload) = message.encode();
        let payload = piece.unwrap_or(payload);
        let header = FrameHeader {
            sequence: self.next_session_frame,
            flags: if payload.is_empty() {
                0
            } else {
                flags::PAYLOAD_CRC
            },
            sent_ns: self.now,
            payload_crc: if payload.is_empty() {
                0
            } else {
                crc32c(&payload)
            },
            payload_len: u32::try_from(payload.len()).unwrap_or(u32::MAX),
            body_len: u32::try_from(body.len()).unwrap_or(u32::MAX),
            ..FrameHeader::new(kind, self.about.session, self.epoch(id), StreamId::SESSION)
        };
        self.next_session_frame = self.next_session_frame.next();
        let what = match message {
            AgentMessage::Hello(_) => Carried::Hello,
            AgentMessage::Quiesced(quiesced) => Carried::Quiesced { id: quiesced.id },
            AgentMessage::Metadata(_) => Carried::Metadata,
            _ => Carried::Other,
        };
        self.send(id, header, body, Payload::Bytes(payload), what);
    }

    fn send(
        &mut self,
        id: PortId,
        header: FrameHeader,
        body: Vec<u8>,
        payload: Payload,
        what: Carried,
    ) {
        if let Some(port) = self.ports.get_mut(&id) {
            port.in_hand = Some(InHand { torn: false, what });
            self.actions.push_back(Action::Send {
                port: id,
                header,
                body,
                payload,
            });
        }
    }
}

impl Port {
    fn heartbeat_at(&self) -> Option<u64> {
        (self.attached && self.in_hand.is_none() && self.answers.is_empty())
            .then(|| self.sent_at.saturating_add(HEARTBEAT_EVERY))
    }
}

impl Metadata {
    fn forget_port(&mut self, id: PortId) {
        if self
            .sending
            .as_ref()
            .is_some_and(|sending| sending.port == id)
        {
            self.sending = None;
        }
        if self.delivered.is_some_and(|(port, _, _)| port == id) {
            self.delivered = None;
        }
    }
}

#[cfg(test)]
mod tests;
