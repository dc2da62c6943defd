//! From a byte stream to frames, and to messages.

use alloc::vec::Vec;

use crate::frame::{self, FrameHeader, HeaderError};
use crate::host_to_agent::{Envelope, MESSAGE_HEADER, MessageError};
use crate::{Epoch, HEADER_SIZE, MAX_MESSAGE_BODY, MAX_PAYLOAD, SessionId};

/// Bytes that one port's decoder holds at most: the longest frame, and as much again so that reads stay long.
pub const MAX_BUFFERED: usize = 2 * (HEADER_SIZE + MAX_PAYLOAD);

/// What a host will believe while it has no footing. Trace data is made by anybody in the guest and can contain a
/// forged header, checksum and all; nobody but root in the guest knows the session, and no header older than an
/// attachment can name its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Expectation {
    /// The session, where it is known.
    pub session: Option<SessionId>,
    /// The newest epoch that was given out.
    pub newest: Option<Epoch>,
}

/// What [`Decoder::poll`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// A frame whose header is sound.
    Frame {
        /// The checked header.
        header: FrameHeader,
        /// The whole frame as it came: header page and payload.
        bytes: &'a [u8],
    },
    /// A whole frame of a protocol version that cannot be read. It was skipped.
    Unsupported {
        /// The version.
        version: u16,
    },
    /// Where a header had to stand there was none: bytes are missing or foreign. Searching goes on by itself.
    Desynchronised {
        /// What stood there.
        error: HeaderError,
    },
}

impl<'a> Decoded<'a> {
    /// The body and the payload of a frame.
    #[must_use]
    pub fn parts(header: &FrameHeader, bytes: &'a [u8]) -> (&'a [u8], &'a [u8]) {
        let (page, payload) = bytes.split_at_checked(HEADER_SIZE).unwrap_or((bytes, &[]));
        (frame::body(header, page), payload)
    }
}

/// Cuts a port's bytes into frames, however they arrive.
///
/// ```text
///            header sound and expected
///   Hunting ---------------------------> Locked ---+ header sound: hand out, stay
///      ^                                   |  ^----+
///      +-----------------------------------+
///            no header where one must stand (reported once)
/// ```
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Start of what is not yet handed out.
    start: usize,
    locked: bool,
    expectation: Expectation,
    skipped: u64,
    taken: u64,
    /// Length of the frame handed out last, to be let go at the next call.
    lent: usize,
}

impl Decoder {
    /// A decoder that has no footing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Says what to believe while searching.
    pub fn expect(&mut self, expectation: Expectation) {
        self.expectation = expectation;
    }

    /// Forgets what is half read: the bytes that follow are not the continuation of those before.
    pub fn restart(&mut self) {
        self.release();
        self.skipped += (self.buffer.len() - self.start) as u64;
        self.buffer.clear();
        self.start = 0;
        self.locked = false;
    }

    /// Bytes that were skipped while searching, in all.
    #[must_use]
    pub fn skipped_bytes(&self) -> u64 {
        self.skipped
    }

    /// Bytes that were handed in, in all.
    #[must_use]
    pub fn taken_bytes(&self) -> u64 {
        self.taken
    }

    /// Bytes that wait for the rest of their frame.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.buffer.len() - self.start - self.lent
    }

    /// Memory held.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.buffer.capacity()
    }

    /// How many more bytes [`Decoder::push`] takes now. Zero only before the frames at hand were polled.
    #[must_use]
    pub fn room(&self) -> usize {
        MAX_BUFFERED.saturating_sub(self.pending_bytes())
    }

    /// Takes bytes as they came; returns how many (all of them unless [`Decoder::room`] is smaller).
    #[must_use]
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        self.release();
        let taken = bytes.len().min(self.room());
        if self.start > 0 && self.buffer.len() + taken > self.buffer.capacity() {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(&bytes[..taken]);
        self.taken += taken as u64;
        taken
    }

    /// Lets the buffer's memory go if nothing is in it: a thousand idle ports must cost nothing.
    pub fn shrink(&mut self) {
        self.release();
        if self.start == self.buffer.len() {
            self.buffer = Vec::new();
            self.start = 0;
        }
    }

    /// The next thing in the bytes at hand, or `None` if more are needed.
    #[must_use]
    pub fn poll(&mut self) -> Option<Decoded<'_>> {
        self.release();
        loop {
            if !self.locked {
                self.seek_magic();
            }
            let page = self.buffer[self.start..].first_chunk::<HEADER_SIZE>()?;
            match FrameHeader::check(page) {
                Ok(header) if self.locked || self.is_expected(&header) => {
                    let len = header.frame_len();
                    if self.buffer.len() - self.start < len {
                        return None;
                    }
                    self.locked = true;
                    self.lent = len;
                    let bytes = &self.buffer[self.start..self.start + len];
                    return Some(Decoded::Frame { header, bytes });
                }
                Err(HeaderError::Version { found, payload_len }) => {
                    let len = HEADER_SIZE + payload_len as usize;
                    if self.buffer.len() - self.start < len {
                        return None;
                    }
                    self.lent = len;
                    return Some(Decoded::Unsupported { version: found });
                }
                Err(error) if self.locked => {
                    self.locked = false;
                    return Some(Decoded::Desynchronised { error });
                }
                Ok(_) | Err(_) => {
                    self.start += 1;
                    self.skipped += 1;
                }
            }
        }
    }

    fn is_expected(&self, header: &FrameHeader) -> bool {
        let Expectation { session, newest } = self.expectation;
        session.is_none_or(|session| session == header.session)
            && newest.is_none_or(|newest| header.epoch <= newest)
    }

    /// Moves to the next place where a magic stands or might begin.
    fn seek_magic(&mut self) {
        let pending = &self.buffer[self.start..];
        let mut at = 0;
        while let Some(found) = pending[at..]
            .iter()
            .position(|&byte| byte == frame::MAGIC[0])
        {
            at += found;
            let seen = (pending.len() - at).min(frame::MAGIC.len());
            if pending[at..at + seen] == frame::MAGIC[..seen] {
                self.start += at;
                self.skipped += at as u64;
                return;
            }
            at += 1;
        }
        self.skipped += pending.len() as u64;
        self.buffer.clear();
        self.start = 0;
    }

    fn release(&mut self) {
        self.start += self.lent;
        self.lent = 0;
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
        }
    }
}

/// Cuts a host's bytes into messages. Bytes of a dead host's half-written message may come first.
#[derive(Debug, Default)]
pub struct MessageDecoder {
    buffer: Vec<u8>,
    skipped: u64,
}

impl MessageDecoder {
    /// A decoder with nothing in it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes skipped while searching, in all.
    #[must_use]
    pub fn skipped_bytes(&self) -> u64 {
        self.skipped
    }

    /// Takes bytes; returns how many (all unless the buffer holds a longest message already: poll first).
    #[must_use]
    pub fn push(&mut self, bytes: &[u8]) -> usize {
        let room = (2 * (MESSAGE_HEADER + MAX_MESSAGE_BODY)).saturating_sub(self.buffer.len());
        let taken = bytes.len().min(room);
        self.buffer.extend_from_slice(&bytes[..taken]);
        taken
    }

    /// The next message, the next refusal, or `None` if more bytes are needed.
    ///
    /// A half-written message of a host that died is followed by the next host's Hello: its length would swallow
    /// that Hello and its checksum then fail, so a failed checksum costs one byte and the search goes on inside.
    #[must_use]
    pub fn poll(&mut self) -> Option<Result<Envelope, MessageError>> {
        let mut at = 0;
        let found = loop {
            if at == self.buffer.len() {
                break None;
            }
            match Envelope::decode(&self.buffer[at..]) {
                Ok(None) => {
                    // It may be a torn message that waits for ever: if a whole one stands behind it, take that.
                    match self.whole_message_behind(at) {
                        Some(behind) => at = behind,
                        None => break None,
                    }
                }
                Ok(Some((envelope, len))) => {
                    self.skipped += at as u64;
                    self.buffer.drain(..at + len);
                    return Some(Ok(envelope));
                }
                Err((error @ (MessageError::Version { .. } | MessageError::Body { .. }), len)) => {
                    self.skipped += at as u64;
                    self.buffer.drain(..at + len);
                    return Some(Err(error));
                }
                Err((_, skip)) => at += skip,
            }
        };
        self.skipped += at as u64;
        self.buffer.drain(..at);
        found
    }

    fn whole_message_behind(&self, at: usize) -> Option<usize> {
        (at + 1..self.buffer.len()).find(|&behind| {
            self.buffer[behind] == crate::host_to_agent::MAGIC[0]
                && matches!(Envelope::decode(&self.buffer[behind..]), Ok(Some(_)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_to_agent::HostMessage;
    use crate::{Kind, Sequence, StreamId};
    use alloc::vec;

    fn frame(sequence: u64, pages: u32, fill: u8) -> Vec<u8> {
        let header = FrameHeader {
            sequence: Sequence(sequence),
            page_size: 4096,
            page_count: pages,
            payload_len: pages * 4096,
            ..FrameHeader::new(Kind::Pages, SessionId(7), Epoch(9), StreamId(1))
        };
        let mut bytes = header.encode(&[]).to_vec();
        bytes.resize(header.frame_len(), fill);
        bytes
    }

    /// Every sequence that came out, and every desynchronisation as u64::MAX.
    fn drain(decoder: &mut Decoder) -> Vec<u64> {
        let mut out = vec![];
        while let Some(decoded) = decoder.poll() {
            out.push(match decoded {
                Decoded::Frame { header, bytes } => {
                    assert_eq!(bytes.len(), header.frame_len());
                    header.sequence.0
                }
                Decoded::Unsupported { version } => u64::from(version) << 32,
                Decoded::Desynchronised { .. } => u64::MAX,
            });
        }
        out
    }

    #[test]
    fn frames_come_out_whatever_the_split() {
        let stream: Vec<u8> = (0..3).flat_map(|n| frame(n, 1, 0xaa)).collect();
        for step in [1, 7, 4095, 4096, 4097, 8192, stream.len()] {
            let mut decoder = Decoder::new();
            let mut seen = vec![];
            for chunk in stream.chunks(step) {
                assert_eq!(decoder.push(chunk), chunk.len());
                seen.extend(drain(&mut decoder));
            }
            assert_eq!(seen, [0, 1, 2], "split every {step} bytes");
            assert_eq!(decoder.pending_bytes(), 0);
        }
    }

    #[test]
    fn the_rest_of_an_element_cut_on_another_host_is_skipped() {
        let mut stream = frame(4, 2, 0x55)[5000..].to_vec();
        let skipped = stream.len() as u64;
        stream.extend(frame(5, 1, 0x55));
        let mut decoder = Decoder::new();
        assert_eq!(decoder.push(&stream), stream.len());
        assert_eq!(drain(&mut decoder), [5]);
        assert_eq!(decoder.skipped_bytes(), skipped);
    }

    #[test]
    fn a_header_inside_trace_data_is_not_taken_for_a_frame() {
        // Somebody in the guest writes a frame of ours into trace_marker: same bytes, checksum and all.
        let forged = frame(99, 1, 0);
        let mut real = frame(0, 2, 0);
        real[HEADER_SIZE..].copy_from_slice(&forged);
        let mut decoder = Decoder::new();
        let stream: Vec<u8> = [real.clone(), frame(1, 1, 0)].concat();
        assert_eq!(decoder.push(&stream), stream.len());
        assert_eq!(drain(&mut decoder), [0, 1]);

        // Without a footing, the expectation keeps it out unless it knows the session and an epoch.
        let mut decoder = Decoder::new();
        decoder.expect(Expectation {
            session: Some(SessionId(8)),
            newest: Some(Epoch(9)),
        });
        let tail = &real[HEADER_SIZE - 100..];
        assert_eq!(decoder.push(tail), tail.len());
        assert_eq!(drain(&mut decoder), []);
    }

    #[test]
    fn missing_bytes_are_reported_once_and_the_next_frame_is_found() {
        let mut stream = frame(0, 1, 0x11);
        stream.truncate(6000);
        stream.extend(frame(1, 1, 0x11));
        stream.extend(frame(2, 1, 0x11));
        let mut decoder = Decoder::new();
        assert_eq!(decoder.push(&stream), stream.len());
        // The torn frame swallows the start of its successor, so that one is gone as well: replay brings both back.
        assert_eq!(drain(&mut decoder), [0, u64::MAX, 2]);
    }

    #[test]
    fn a_future_version_is_named_and_skipped() {
        let mut page: [u8; HEADER_SIZE] = frame(0, 1, 0)[..HEADER_SIZE].try_into().unwrap();
        page[8] = 2;
        let crc = crate::crc32c_parts(&[&page[..12], &[0; 4], &page[16..128]]);
        page[12..16].copy_from_slice(&crc.to_le_bytes());
        let mut stream = page.to_vec();
        stream.extend([0; 4096]);
        stream.extend(frame(1, 1, 0));
        let mut decoder = Decoder::new();
        assert_eq!(decoder.push(&stream), stream.len());
        assert_eq!(drain(&mut decoder), [2 << 32, 1]);
    }

    #[test]
    fn a_torn_message_does_not_hide_the_next_hosts() {
        let envelope = |id| Envelope {
            session: SessionId(0),
            epoch: Epoch(3),
            id,
            message: HostMessage::Ack(vec![(StreamId(0), Sequence(1)), (StreamId(1), Sequence(2))]),
        };
        let mut bytes = envelope(1).encode();
        bytes.truncate(50);
        bytes.extend(envelope(2).encode());
        for step in [1, 3, bytes.len()] {
            let mut decoder = MessageDecoder::new();
            let mut seen = vec![];
            for chunk in bytes.chunks(step) {
                assert_eq!(decoder.push(chunk), chunk.len());
                while let Some(message) = decoder.poll() {
                    seen.push(message.unwrap().id);
                }
            }
            assert_eq!(seen, [2], "split every {step} bytes");
        }
    }

    proptest::proptest! {
        // Each case is some hundred kilobytes of bytes; made one by one, they are what takes the time.
        #![proptest_config(proptest::prelude::ProptestConfig { cases: 32, ..Default::default() })]

        #[test]
        fn any_bytes_are_survived_and_bounded(chunks in proptest::collection::vec(proptest::collection::vec(0u8..=255, 0..9000), 0..20), seed in 0u8..4) {
            let mut decoder = Decoder::new();
            let mut messages = MessageDecoder::new();
            let genuine = frame(u64::from(seed), 2, seed);
            for chunk in &chunks {
                for bytes in [&chunk[..], &genuine[..chunk.len().min(genuine.len())]] {
                    let _ = decoder.push(bytes);
                    let _ = messages.push(bytes);
                    while decoder.poll().is_some() {}
                    while messages.poll().is_some() {}
                    assert!(decoder.pending_bytes() <= MAX_BUFFERED);
                }
            }
        }
    }
}
