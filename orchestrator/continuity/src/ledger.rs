//! What of each stream is here, what is durable, and what is missing.
//!
//! The agent numbers the frames of each stream from 0; a frame is taken once, in order, whoever delivers it: the source
//! before the switchover, the source's leftovers after it, the destination, a replay. That makes "exactly once" a
//! matter of counting and not of timing.
//!
//! ```text
//!   sequence < next                    doubled (a replay, or what a stopped source still flushed): dropped
//!   sequence = next                    taken, whatever epoch it was sent to
//!   sequence > next, older epoch       stale traffic that stood in a queue: dropped, its replay is on the way
//!   sequence > next, own epoch         a gap: the agent answered our Hello and yet skips: declared lost, then taken
//!   newer epoch                        somebody else's reader: dropped
//! ```

use std::collections::BTreeMap;

use vmtrail_wire::agent_to_host::StreamState;
use vmtrail_wire::{Epoch, FrameHeader, Sequence, SessionId, StreamId};

/// Sessions of one VM that a ledger keeps. A guest that invents sessions cannot make the host's memory grow: the
/// oldest is forgotten first (it is on disk all the same).
pub const MAX_SESSIONS: usize = 64;

/// Where to go on with a stream, as found in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumePoint {
    /// The sequence that comes next.
    pub next: Sequence,
    /// Pages of the stream before it.
    pub next_page: u64,
}

/// What to do with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disposition {
    /// Store it.
    Store,
    /// Store it, and declare what is missing before it.
    StoreAfterGap(Gap),
    /// Drop it: it is here already.
    Duplicate,
    /// Drop it: stale, its replay is on the way.
    Ahead,
    /// Drop it: its stream has not been introduced by a Hello, or it was sent to a reader that is not ours.
    Foreign,
}

/// Frames that will not come any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// The session.
    pub session: SessionId,
    /// The stream.
    pub stream: StreamId,
    /// First missing.
    pub from: Sequence,
    /// First present again.
    pub to: Sequence,
    /// Missing pages, where the headers on both sides agree enough to tell.
    pub pages: Option<u64>,
    /// Why.
    pub cause: GapCause,
}

/// Why frames are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GapCause {
    /// The agent no longer held them when we asked: they were acknowledged to another reader, or a reader lied.
    NotRetained,
    /// The agent skipped them within our own epoch: the kernel or the port lost what was already spliced.
    Skipped,
}

/// Something that a Hello revealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revelation {
    /// A stream is seen for the first time; this trail holds it from here.
    Began {
        /// The session.
        session: SessionId,
        /// The stream.
        stream: StreamId,
        /// First sequence.
        sequence: Sequence,
        /// Pages before it.
        first_page: u64,
    },
    /// Frames are gone.
    Gap(Gap),
    /// The guest is at an earlier point of its history than we are: a restored snapshot, a split brain.
    Fork {
        /// The session.
        session: SessionId,
        /// The stream.
        stream: StreamId,
        /// What we expected next.
        have: Sequence,
        /// What the guest will make next.
        next: Sequence,
    },
}

/// Counts of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamCounts {
    /// Frames taken.
    pub frames: u64,
    /// Pages taken.
    pub pages: u64,
    /// Payload bytes taken.
    pub bytes: u64,
    /// Frames dropped because they were here.
    pub duplicates: u64,
    /// Frames taken from a replay.
    pub replayed: u64,
    /// Frames dropped because their replay was on the way.
    pub ahead: u64,
    /// Frames declared missing.
    pub missing: u64,
}

/// One stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stream {
    next: Sequence,
    next_page: u64,
    durable: Sequence,
    counts: StreamCounts,
}

/// All streams of one VM.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    sessions: BTreeMap<SessionId, BTreeMap<StreamId, Stream>>,
    /// Sessions in the order in which they appeared.
    order: Vec<SessionId>,
    foreign: u64,
}

impl Ledger {
    /// A ledger that knows nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Remembers what a store holds durably.
    pub fn remember(&mut self, session: SessionId, stream: StreamId, point: ResumePoint) {
        self.stream_entry(session, stream, point);
    }

    /// The agent says how far its streams are, in answer to our Hello.
    pub fn handle_hello(&mut self, session: SessionId, streams: &[StreamState]) -> Vec<Revelation> {
        let mut revelations = Vec::new();
        for state in streams {
            if state.stream.cpu().is_none() || state.first > state.next {
                continue;
            }
            let point = ResumePoint {
                next: state.first,
                next_page: state.first_page,
            };
            let (stream, began) = self.stream_entry(session, state.stream, point);
            if began {
                revelations.push(Revelation::Began {
                    session,
                    stream: state.stream,
                    sequence: state.first,
                    first_page: state.first_page,
                });
            } else if state.next < stream.durable {
                // Less than what is durable: frames that we took, but had not synced, are made again by a guest that
                // was never saved; frames that we acknowledged are not.
                revelations.push(Revelation::Fork {
                    session,
                    stream: state.stream,
                    have: stream.next,
                    next: state.next,
                });
            } else if state.first > stream.next {
                let gap = Gap {
                    session,
                    stream: state.stream,
                    from: stream.next,
                    to: state.first,
                    pages: state.first_page.checked_sub(stream.next_page),
                    cause: GapCause::NotRetained,
                };
                stream.counts.missing += state.first.0 - stream.next.0;
                stream.next = state.first;
                stream.next_page = state.first_page;
                revelations.push(Revelation::Gap(gap));
            }
        }
        revelations
    }

    /// A pages frame arrived on an attachment with epoch `attached`.
    pub fn handle_frame(&mut self, attached: Epoch, header: &FrameHeader) -> Disposition {
        let stream = (self.sessions.get_mut(&header.session))
            .and_then(|streams| streams.get_mut(&header.stream));
        let Some(stream) = stream.filter(|_| header.epoch <= attached) else {
            self.foreign += 1;
            return Disposition::Foreign;
        };
        if header.sequence < stream.next {
            stream.counts.duplicates += 1;
            return Disposition::Duplicate;
        }
        if header.sequence > stream.next && header.epoch < attached {
            stream.counts.ahead += 1;
            return Disposition::Ahead;
        }
        let gap = (header.sequence > stream.next).then(|| Gap {
            session: header.session,
            stream: header.stream,
            from: stream.next,
            to: header.sequence,
            pages: header.first_page.checked_sub(stream.next_page),
            cause: GapCause::Skipped,
        });
        if let Some(gap) = gap {
            stream.counts.missing += gap.to.0 - gap.from.0;
        }
        stream.next = header.sequence.next();
        stream.next_page = header
            .first_page
            .saturating_add(u64::from(header.page_count));
        stream.counts.frames += 1;
        stream.counts.pages += u64::from(header.page_count);
        stream.counts.bytes += u64::from(header.payload_len);
        if header.flags & vmtrail_wire::flags::REPLAY != 0 {
            stream.counts.replayed += 1;
        }
        gap.map_or(Disposition::Store, Disposition::StoreAfterGap)
    }

    /// The store synced everything of a stream below `next`.
    pub fn handle_durable(&mut self, session: SessionId, stream: StreamId, next: Sequence) {
        if let Some(stream) = self
            .sessions
            .get_mut(&session)
            .and_then(|streams| streams.get_mut(&stream))
        {
            // A store cannot sync what was never taken; a lie here would make the agent forget too much.
            stream.durable = stream.durable.max(next.min(stream.next));
        }
    }

    /// What a Hello asks for: the first frame of each stream that is not durable. Not the first that is not here: the
    /// agent lets go of everything below, and what is here may still be lost with this process.
    #[must_use]
    pub fn resume_from(&self, session: SessionId) -> Vec<(StreamId, Sequence)> {
        self.streams(session)
            .map(|(id, stream)| (id, stream.durable))
            .collect()
    }

    /// The sequence that comes next in each stream of a session.
    #[must_use]
    pub fn next(&self, session: SessionId) -> Vec<(StreamId, Sequence)> {
        self.streams(session)
            .map(|(id, stream)| (id, stream.next))
            .collect()
    }

    /// Whether everything below `states` is here.
    #[must_use]
    pub fn holds(&self, session: SessionId, states: &[StreamState]) -> bool {
        let next: BTreeMap<_, _> = self.next(session).into_iter().collect();
        states.iter().all(|state| {
            state.next == state.first && state.next == Sequence(0)
                || next
                    .get(&state.stream)
                    .is_some_and(|next| *next >= state.next)
        })
    }

    /// Counts of each stream of a session.
    #[must_use]
    pub fn counts(&self, session: SessionId) -> Vec<(StreamId, StreamCounts)> {
        self.streams(session)
            .map(|(id, stream)| (id, stream.counts))
            .collect()
    }

    /// Sessions known, oldest first.
    #[must_use]
    pub fn sessions(&self) -> &[SessionId] {
        &self.order
    }

    /// Frames dropped because nobody had introduced them.
    #[must_use]
    pub fn foreign_frames(&self) -> u64 {
        self.foreign
    }

    fn streams(&self, session: SessionId) -> impl Iterator<Item = (StreamId, &Stream)> {
        self.sessions
            .get(&session)
            .into_iter()
            .flatten()
            .map(|(id, stream)| (*id, stream))
    }

    fn stream_entry(
        &mut self,
        session: SessionId,
        stream: StreamId,
        point: ResumePoint,
    ) -> (&mut Stream, bool) {
        if !self.sessions.contains_key(&session) {
            if self.order.len() == MAX_SESSIONS {
                let oldest = self.order.remove(0);
                self.sessions.remove(&oldest);
            }
            self.order.push(session);
        }
        let mut began = false;
        let stream = self
            .sessions
            .entry(session)
            .or_default()
            .entry(stream)
            .or_insert_with(|| {
                began = true;
                Stream {
                    next: point.next,
                    next_page: point.next_page,
                    durable: point.next,
                    counts: StreamCounts::default(),
                }
            });
        (stream, began)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use vmtrail_wire::Kind;

    const SESSION: SessionId = SessionId(5);
    const CPU: StreamId = StreamId(0);

    fn frame(epoch: u64, sequence: u64) -> FrameHeader {
        FrameHeader {
            sequence: Sequence(sequence),
            first_page: sequence * 2,
            page_size: 4096,
            page_count: 2,
            payload_len: 8192,
            ..FrameHeader::new(Kind::Pages, SESSION, Epoch(epoch), CPU)
        }
    }

    fn state(first: u64, next: u64) -> StreamState {
        StreamState {
            stream: CPU,
            first: Sequence(first),
            next: Sequence(next),
            first_page: first * 2,
        }
    }

    fn attached() -> Ledger {
        let mut ledger = Ledger::new();
        assert!(matches!(
            ledger.handle_hello(SESSION, &[state(0, 0)])[..],
            [Revelation::Began { .. }]
        ));
        ledger
    }

    #[test]
    fn leftovers_of_a_stopped_source_are_dropped_as_doubled() {
        let mut ledger = attached();
        for sequence in 0..4 {
            assert_eq!(
                ledger.handle_frame(Epoch(1), &frame(1, sequence)),
                Disposition::Store
            );
        }
        // The destination, newer epoch, replays from the last durable frame.
        assert_eq!(
            ledger.handle_frame(Epoch(2), &frame(2, 2)),
            Disposition::Duplicate
        );
        assert_eq!(
            ledger.handle_frame(Epoch(2), &frame(2, 3)),
            Disposition::Duplicate
        );
        assert_eq!(
            ledger.handle_frame(Epoch(2), &frame(2, 4)),
            Disposition::Store
        );
        // The source flushes its queue after its state was saved.
        assert_eq!(
            ledger.handle_frame(Epoch(1), &frame(1, 4)),
            Disposition::Duplicate
        );
        assert_eq!(
            ledger.handle_frame(Epoch(1), &frame(1, 6)),
            Disposition::StoreAfterGap(gap(5, 6, Some(2)))
        );
    }

    fn gap(from: u64, to: u64, pages: Option<u64>) -> Gap {
        Gap {
            session: SESSION,
            stream: CPU,
            from: Sequence(from),
            to: Sequence(to),
            pages,
            cause: GapCause::Skipped,
        }
    }

    #[test]
    fn stale_traffic_ahead_of_its_replay_is_no_loss() {
        let mut ledger = attached();
        assert_eq!(
            ledger.handle_frame(Epoch(2), &frame(1, 3)),
            Disposition::Ahead
        );
        assert_eq!(
            ledger.handle_frame(Epoch(2), &frame(2, 0)),
            Disposition::Store
        );
    }

    #[test]
    fn what_the_agent_no_longer_holds_is_a_gap_with_its_pages() {
        let mut ledger = attached();
        assert_eq!(
            ledger.handle_frame(Epoch(1), &frame(1, 0)),
            Disposition::Store
        );
        let revelations = ledger.handle_hello(SESSION, &[state(3, 9)]);
        let expected = Gap {
            cause: GapCause::NotRetained,
            ..gap(1, 3, Some(4))
        };
        assert_eq!(revelations, [Revelation::Gap(expected)]);
        assert_eq!(
            ledger.handle_frame(Epoch(1), &frame(1, 3)),
            Disposition::Store
        );
    }

    #[test]
    fn a_restored_snapshot_is_a_fork() {
        let mut ledger = attached();
        for sequence in 0..4 {
            assert_eq!(
                ledger.handle_frame(Epoch(1), &frame(1, sequence)),
                Disposition::Store
            );
        }
        ledger.handle_durable(SESSION, CPU, Sequence(4));
        assert!(matches!(
            ledger.handle_hello(SESSION, &[state(0, 2)])[..],
            [Revelation::Fork {
                have: Sequence(4),
                next: Sequence(2),
                ..
            }]
        ));
    }

    #[test]
    fn frames_of_nobody_and_of_a_newer_reader_are_not_believed() {
        let mut ledger = attached();
        let unknown = FrameHeader {
            session: SessionId(9),
            ..frame(1, 0)
        };
        assert_eq!(
            ledger.handle_frame(Epoch(1), &unknown),
            Disposition::Foreign
        );
        assert_eq!(
            ledger.handle_frame(Epoch(1), &frame(2, 0)),
            Disposition::Foreign
        );
        assert_eq!(ledger.foreign_frames(), 2);
    }

    #[test]
    fn a_hello_asks_for_what_is_not_durable() {
        let mut ledger = attached();
        for sequence in 0..3 {
            assert_eq!(
                ledger.handle_frame(Epoch(1), &frame(1, sequence)),
                Disposition::Store
            );
        }
        ledger.handle_durable(SESSION, CPU, Sequence(2));
        assert_eq!(ledger.resume_from(SESSION), [(CPU, Sequence(2))]);
        ledger.handle_durable(SESSION, CPU, Sequence(99));
        assert_eq!(
            ledger.resume_from(SESSION),
            [(CPU, Sequence(3))],
            "never more than was taken"
        );
    }

    #[test]
    fn invented_sessions_do_not_make_memory_grow() {
        let mut ledger = Ledger::new();
        for session in 1..=1000 {
            let _ = ledger.handle_hello(SessionId(session), &[state(0, 0)]);
        }
        assert_eq!(ledger.sessions().len(), MAX_SESSIONS);
    }

    proptest! {
        /// An agent that retains what is not durable, readers that die at any moment: whatever is stored is 0, 1, 2, …
        #[test]
        fn stored_once_and_in_order(steps in proptest::collection::vec((0u8..4, 0u64..6), 1..200)) {
            let mut ledger = attached();
            let (mut epoch, mut made, mut sent, mut acked) = (1, 0, 0, 0);
            let mut stored = Vec::new();
            let mut queued = Vec::new();
            for (step, amount) in steps {
                match step {
                    0 => made += amount,
                    1 => for _ in 0..amount {
                        if sent < made { queued.push(frame(epoch, sent)); sent += 1; }
                    },
                    2 => for header in queued.drain(..usize::try_from(amount).unwrap().min(queued.len())) {
                        match ledger.handle_frame(Epoch(epoch), &header) {
                            Disposition::Store => stored.push(header.sequence.0),
                            Disposition::StoreAfterGap(gap) => panic!("{gap:?}"),
                            _ => {}
                        }
                    },
                    // A new reader; part of what was stored is durable, what is queued stays queued.
                    _ => {
                        let next = ledger.next(SESSION)[0].1.0;
                        ledger.handle_durable(SESSION, CPU, Sequence(next.saturating_sub(amount)));
                        acked = acked.max(ledger.resume_from(SESSION)[0].1.0);
                        epoch += 1;
                        sent = acked;
                        prop_assert_eq!(ledger.handle_hello(SESSION, &[state(acked, made)]), []);
                    }
                }
            }
            prop_assert_eq!(&stored, &(0..stored.len() as u64).collect::<Vec<_>>());
        }
    }
}
