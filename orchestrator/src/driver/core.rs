//! What is done with the bytes of ports, wherever they come from: ledger, store, metadata, answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::broadcast;
use vmtrail_continuity::attach::Attachment;
use vmtrail_continuity::ledger::{Disposition, Gap, GapCause, Ledger, Revelation, StreamCounts};
use vmtrail_wire::agent_to_host::{
    AgentHello, AgentMessage, CpuCounters, MetadataChunk, Pong, Quiesced, StreamState,
};
use vmtrail_wire::{
    Decoded, Decoder, Epoch, FrameHeader, HostMessage, Kind, Sequence, SessionId, StreamId,
};

use super::time::Clock;
use crate::status::Report;
use crate::trail::event::{Counters, Event, Session, StreamDrops, StreamEnd};
use crate::trail::{Durable, TrailWriter};

/// Bytes of one metadata item at most: a kernel's kallsyms has some 10 MB.
const MAX_ITEM_BYTES: usize = 64 << 20;

/// Bytes of an item that is being put together, over all sessions: one at a time comes on a port.
const MAX_ASSEMBLED_BYTES: usize = 128 << 20;

/// A request to the agent that waits for its answer on some ports.
#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Ports whose answer is missing.
    pub(super) ports: BTreeSet<usize>,
    /// What the answers said of the streams.
    pub(super) streams: Vec<StreamState>,
    /// A refusal.
    pub(super) error: Option<String>,
}

/// What outlives residencies.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) clock: Clock,
    pub(super) ledger: Ledger,
    pub(super) trail: TrailWriter,
    pub(super) reports: broadcast::Sender<Arc<Report>>,
    /// Residency whose ports are read.
    pub(super) residency: u64,
    /// What the agent said of itself last, per session.
    pub(super) sessions: BTreeMap<SessionId, AgentHello>,
    /// Newest metadata generation that is in the store's hands, per session.
    pub(super) metadata: BTreeMap<SessionId, u32>,
    /// Requests that wait.
    pub(super) pending: BTreeMap<u64, Pending>,
    /// The version of an agent that cannot be understood.
    pub(super) unsupported: Option<u16>,
    /// Streams introduced on each port.
    pub(super) port_streams: BTreeMap<StreamId, usize>,
    /// Acks that no port took yet.
    pub(super) acks: BTreeMap<StreamId, Sequence>,
    /// The agent said that it ends; the driver calls whoever comes next.
    pub(super) agent_ends: bool,
    /// Gaps declared so far.
    pub(super) gaps: u64,
    /// First sequence stored of each stream since a commit; `None` while nobody asks.
    pub(super) resumed_at: Option<BTreeMap<StreamId, Sequence>>,
    assembling: BTreeMap<SessionId, Assembly>,
    counters: BTreeMap<SessionId, Vec<CpuCounters>>,
    drops_logged: BTreeMap<(SessionId, StreamId), StreamCounts>,
    next_id: u64,
    /// Pings under way: id to host wall time.
    pings: BTreeMap<u64, u64>,
    desynchronised: u64,
}

#[derive(Debug, Default)]
struct Assembly {
    name: String,
    bytes: Vec<u8>,
}

impl Core {
    pub(super) fn new(
        clock: Clock,
        trail: TrailWriter,
        reports: broadcast::Sender<Arc<Report>>,
    ) -> Self {
        Self {
            clock,
            ledger: Ledger::new(),
            trail,
            reports,
            residency: 0,
            sessions: BTreeMap::new(),
            metadata: BTreeMap::new(),
            pending: BTreeMap::new(),
            unsupported: None,
            port_streams: BTreeMap::new(),
            acks: BTreeMap::new(),
            agent_ends: false,
            gaps: 0,
            resumed_at: None,
            assembling: BTreeMap::new(),
            counters: BTreeMap::new(),
            drops_logged: BTreeMap::new(),
            next_id: 1,
            pings: BTreeMap::new(),
            desynchronised: 0,
        }
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn report(&self, report: Report) {
        // Nobody listening is no error.
        let _ = self.reports.send(Arc::new(report));
    }

    pub(super) fn warn(&self, text: impl Into<String>) {
        let text = text.into();
        tracing::warn!("{text}");
        self.report(Report::Warning { text });
    }

    /// Takes all frames that a port's decoder has.
    pub(super) fn take(&mut self, attachment: &mut Attachment, port: usize, decoder: &mut Decoder) {
        while let Some(decoded) = decoder.poll() {
            match decoded {
                Decoded::Frame { header, bytes } => {
                    self.take_frame(attachment, port, &header, bytes);
                }
                Decoded::Unsupported { version } => self.unsupported = Some(version),
                Decoded::Desynchronised { error } => {
                    // What is missing comes by replay; how often it happens is worth knowing.
                    self.desynchronised += 1;
                    tracing::info!(
                        port,
                        "lost the frame boundary and search for the next: {error}"
                    );
                }
            }
        }
    }

    fn take_frame(
        &mut self,
        attachment: &mut Attachment,
        port: usize,
        header: &FrameHeader,
        bytes: &[u8],
    ) {
        let now = self.clock.now();
        if header.kind == Kind::Pages {
            attachment.handle_frame(now, port, header, None);
            self.take_pages(attachment, header, bytes);
            return;
        }
        let (body, payload) = Decoded::parts(header, bytes);
        let message = match AgentMessage::decode(header, body, payload) {
            Ok(Some(message)) => message,
            Ok(None) => return,
            Err(error) => {
                self.warn(format!(
                    "the agent sent a {:?} frame that cannot be read: {error}",
                    header.kind
                ));
                return;
            }
        };
        attachment.handle_frame(now, port, header, Some(&message));
        match message {
            // State of the agent is the truth only if it was said to us: an older Hello may have stood in a queue.
            AgentMessage::Hello(hello) if header.epoch == attachment.epoch() => {
                self.take_hello(header.session, port, hello);
            }
            AgentMessage::Metadata(chunk) => self.take_metadata(header.session, &chunk, payload),
            AgentMessage::Lost(counters) => self.take_counters(header.session, counters),
            AgentMessage::Pong(pong) => self.take_pong(header.session, &pong),
            // Id 0 answers nothing: the agent was told to end and has sent what it had.
            AgentMessage::Quiesced(quiesced) if quiesced.id == 0 && !quiesced.started => {
                tracing::info!(port, "the agent ends");
                self.agent_ends = true;
            }
            AgentMessage::Quiesced(quiesced) => self.take_quiesced(port, quiesced),
            AgentMessage::Error(error) => {
                if let Some(pending) = self.pending.get_mut(&error.id) {
                    pending.ports.clear();
                    pending.error = Some(error.text);
                } else if error.code != vmtrail_wire::agent_to_host::ErrorCode::StaleEpoch {
                    self.warn(format!("the agent reports: {}", error.text));
                }
            }
            AgentMessage::Hello(_) | AgentMessage::Heartbeat(_) => {}
        }
    }

    fn take_pages(&mut self, attachment: &Attachment, header: &FrameHeader, bytes: &[u8]) {
        match self.ledger.handle_frame(attachment.epoch(), header) {
            Disposition::Store => {}
            Disposition::StoreAfterGap(gap) => self.take_gap(&gap),
            Disposition::Duplicate | Disposition::Ahead | Disposition::Foreign => return,
        }
        if let Some(resumed_at) = &mut self.resumed_at {
            resumed_at.entry(header.stream).or_insert(header.sequence);
        }
        self.trail.append(header, bytes);
    }

    fn take_gap(&mut self, gap: &Gap) {
        self.gaps += 1;
        let cause = match gap.cause {
            GapCause::NotRetained => "the agent held them no longer",
            GapCause::Skipped => "the agent went on without them",
        };
        self.warn(format!(
            "{} of session {}: frames {} to {} are lost: {cause}",
            gap.stream,
            gap.session,
            gap.from,
            gap.to.0.saturating_sub(1)
        ));
        self.trail.log(Event::Gap {
            session: gap.session.to_string(),
            cpu: gap.stream.0,
            from: gap.from.0,
            to: gap.to.0,
            pages: gap.pages,
            cause: cause.to_owned(),
        });
    }

    fn take_hello(&mut self, session: SessionId, port: usize, hello: AgentHello) {
        tracing::debug!(port, %session, streams = ?hello.streams, "heard Hello");
        let known = self
            .sessions
            .get(&session)
            .is_some_and(|known| known.clock == hello.clock);
        if !known {
            self.trail.log(Event::Session(Session {
                session: session.to_string(),
                boot_id: hello
                    .boot_id
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect(),
                agent: hello.agent_version.clone(),
                kernel: hello.kernel.clone(),
                clock: hello.clock.clone(),
                page_size: hello.page_size,
                long_size: hello.long_size,
                big_endian: hello.big_endian,
                cpus: hello.cpus,
            }));
        }
        for revelation in self.ledger.handle_hello(session, &hello.streams) {
            match revelation {
                Revelation::Began {
                    session,
                    stream,
                    sequence,
                    first_page,
                } => {
                    self.trail.log(Event::StreamBegan {
                        session: session.to_string(),
                        cpu: stream.0,
                        sequence: sequence.0,
                        first_page,
                    });
                }
                Revelation::Gap(gap) => self.take_gap(&gap),
                Revelation::Fork {
                    session,
                    stream,
                    have,
                    next,
                } => {
                    self.warn(format!(
                        "{stream} of session {session}: the guest is at frame {next}, this trail at {have}: the VM was \
                         put back to an earlier state; record it into a trail of its own"
                    ));
                    self.trail.log(Event::Fork {
                        session: session.to_string(),
                        cpu: stream.0,
                        have: have.0,
                        next: next.0,
                    });
                }
            }
        }
        for state in &hello.streams {
            self.port_streams.insert(state.stream, port);
        }
        self.sessions.insert(session, hello);
    }

    fn take_metadata(&mut self, session: SessionId, chunk: &MetadataChunk, piece: &[u8]) {
        let assembled: usize = self
            .assembling
            .values()
            .map(|assembly| assembly.bytes.len())
            .sum();
        let assembly = self.assembling.entry(session).or_default();
        if chunk.offset == 0 {
            assembly.name.clone_from(&chunk.name);
            assembly.bytes.clear();
        }
        let fits = assembly.name == chunk.name
            && assembly.bytes.len() as u64 == chunk.offset
            && assembly.bytes.len() + piece.len() <= MAX_ITEM_BYTES
            && assembled + piece.len() <= MAX_ASSEMBLED_BYTES;
        if !fits {
            // A piece went missing between two attachments; the agent sends all of it again to the next Hello.
            tracing::debug!(
                name = chunk.name,
                offset = chunk.offset,
                "metadata out of order"
            );
            return;
        }
        assembly.bytes.extend_from_slice(piece);
        if !chunk.last {
            return;
        }
        let bytes = std::mem::take(&mut assembly.bytes);
        if let Err(error) = self
            .trail
            .put_metadata(session, chunk.generation, &chunk.name, bytes)
        {
            self.warn(format!(
                "metadata item {:?} was not kept: {error}",
                chunk.name
            ));
        }
        if chunk.item + 1 == chunk.items {
            self.trail.finish_metadata(session, chunk.generation);
            self.metadata.insert(session, chunk.generation);
            self.assembling.remove(&session);
        }
    }

    fn take_counters(&mut self, session: SessionId, counters: Vec<CpuCounters>) {
        if self.counters.get(&session) == Some(&counters) {
            return;
        }
        self.trail.log(Event::Lost {
            session: session.to_string(),
            counters: counters
                .iter()
                .map(|cpu| Counters {
                    cpu: cpu.cpu,
                    overrun: cpu.overrun,
                    commit_overrun: cpu.commit_overrun,
                    dropped: cpu.dropped,
                    read: cpu.read,
                })
                .collect(),
        });
        self.counters.insert(session, counters);
    }

    pub(super) fn ping(&mut self) -> (u64, HostMessage) {
        // An answer that never came is forgotten with the next question but three.
        while self.pings.len() > 3 {
            self.pings.pop_first();
        }
        let id = self.next_id();
        let host_ns = super::time::wall_ns();
        self.pings.insert(id, host_ns);
        (id, HostMessage::Ping { host_ns })
    }

    fn take_pong(&mut self, session: SessionId, pong: &Pong) {
        let Some(asked_ns) = self.pings.remove(&pong.id) else {
            return;
        };
        let round_trip = super::time::wall_ns().saturating_sub(asked_ns);
        self.trail.log(Event::Clock {
            session: session.to_string(),
            residency: self.residency,
            host_ns: asked_ns + round_trip / 2,
            error_ns: round_trip.div_ceil(2),
            monotonic_ns: pong.monotonic_ns,
            boottime_ns: pong.boottime_ns,
            realtime_ns: pong.realtime_ns,
        });
    }

    fn take_quiesced(&mut self, port: usize, quiesced: Quiesced) {
        if let Some(pending) = self.pending.get_mut(&quiesced.id)
            && pending.ports.remove(&port)
        {
            pending.streams.extend(quiesced.streams);
        }
    }

    /// The store synced something: the agent may let go of it.
    pub(super) fn take_durable(&mut self, durable: &Durable) {
        for (&(session, stream), &next) in &durable.streams {
            self.ledger.handle_durable(session, stream, next);
        }
    }

    /// Acks that are due for the streams of a session, by port.
    pub(super) fn collect_acks(&mut self, session: SessionId) {
        for (stream, next) in self.ledger.resume_from(session) {
            self.acks.insert(stream, next);
        }
    }

    /// Writes what was received and not stored since the last call into the log.
    pub(super) fn log_drops(&mut self, session: SessionId, epoch: Epoch) {
        let mut streams = Vec::new();
        for (stream, counts) in self.ledger.counts(session) {
            let logged = self.drops_logged.entry((session, stream)).or_default();
            let drops = StreamDrops {
                cpu: stream.0,
                duplicates: counts.duplicates - logged.duplicates,
                ahead: counts.ahead - logged.ahead,
            };
            if drops.duplicates + drops.ahead > 0 {
                streams.push(drops);
            }
            *logged = counts;
        }
        if !streams.is_empty() {
            let session = session.to_string();
            self.trail.log(Event::Dropped {
                session,
                epoch: epoch.0,
                streams,
            });
        }
    }

    /// Sums over all streams: (pages, bytes, missing frames, duplicates, replayed).
    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for &session in self.ledger.sessions() {
            for (_, counts) in self.ledger.counts(session) {
                totals.pages += counts.pages;
                totals.bytes += counts.bytes;
                totals.missing += counts.missing;
                totals.duplicates += counts.duplicates;
                totals.replayed += counts.replayed;
            }
        }
        for counters in self.counters.values() {
            totals.overrun += counters.iter().map(|cpu| cpu.overrun).sum::<u64>();
        }
        totals
    }

    /// Where each stream of a session stands.
    pub(super) fn boundaries(&self, session: Option<SessionId>) -> Vec<StreamEnd> {
        let Some(session) = session else {
            return Vec::new();
        };
        (self.ledger.next(session).into_iter())
            .map(|(stream, next)| StreamEnd {
                cpu: stream.0,
                next: next.0,
            })
            .collect()
    }
}

/// Sums over all streams of a recorder's life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) pages: u64,
    pub(super) bytes: u64,
    pub(super) missing: u64,
    pub(super) duplicates: u64,
    pub(super) replayed: u64,
    pub(super) overrun: u64,
}
