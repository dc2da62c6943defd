//! The header of a frame: bytes that were only read, and the header that was checked.

use crate::{
    Epoch, HEADER_SIZE, MAX_FRAME_PAGES, MAX_PAYLOAD, MAX_SUBBUF_SIZE, Sequence, SessionId,
    StreamId, crc32c_parts, version,
};

/// First bytes of every frame.
pub const MAGIC: [u8; 8] = *b"\x89VMTRAIL";

/// Where the kind's own body begins in the header page.
pub const BODY_OFFSET: usize = 128;

/// Body bytes that fit into the header page.
pub const MAX_BODY: usize = HEADER_SIZE - BODY_OFFSET;

// Offsets, each from the one before, so that the drawing in the crate doc has one place to be wrong against.
const VERSION: usize = MAGIC.len();
const KIND: usize = VERSION + 2;
const HEADER_CRC: usize = KIND + 2;
const HEADER_LEN: usize = HEADER_CRC + 4;
const PAYLOAD_LEN: usize = HEADER_LEN + 4;
const SESSION: usize = PAYLOAD_LEN + 4;
const EPOCH: usize = SESSION + 8;
const SEQUENCE: usize = EPOCH + 8;
const STREAM: usize = SEQUENCE + 8;
const FLAGS: usize = STREAM + 4;
const SENT_NS: usize = FLAGS + 4;
const FIRST_PAGE: usize = SENT_NS + 8;
const PAGE_SIZE: usize = FIRST_PAGE + 8;
const PAGE_COUNT: usize = PAGE_SIZE + 4;
const PAYLOAD_CRC: usize = PAGE_COUNT + 4;
const RESERVED: usize = PAYLOAD_CRC + 4;
const _: () = assert!(RESERVED <= BODY_OFFSET);

/// Flags of a frame. Unknown flags are ignored: a later agent may tell more.
pub mod flags {
    /// The last sub-buffer was copied out by `read()` before it was full, so that a quiet guest is not silent.
    pub const PARTIAL: u32 = 1 << 0;
    /// The frame was sent before, to an earlier epoch, and was not acknowledged then.
    pub const REPLAY: u32 = 1 << 1;
    /// `payload_crc` is meant. Never set on spliced pages.
    pub const PAYLOAD_CRC: u32 = 1 << 2;
}

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Who the agent is and which frames it can still send. The answer to a host's Hello.
    Hello,
    /// Whole ring-buffer sub-buffers of one CPU.
    Pages,
    /// A piece of what is needed to decode without the guest's kernel.
    Metadata,
    /// The kernel's own counters of what its ring dropped, cumulative per CPU.
    Lost,
    /// The answer to a Ping, with the guest's clocks.
    Pong,
    /// The answer to Quiesce, Flush or Stop: nothing of these streams comes before the named sequences but what was sent.
    Quiesced,
    /// The agent lives and has nothing to say.
    Heartbeat,
    /// The agent could not do what was asked.
    Error,
    /// A kind of a later minor agent; the frame is whole and can be skipped.
    Unknown(u16),
}

impl Kind {
    /// The number on the wire.
    #[must_use]
    pub fn to_wire(self) -> u16 {
        match self {
            Self::Hello => 1,
            Self::Pages => 2,
            Self::Metadata => 3,
            Self::Lost => 4,
            Self::Pong => 5,
            Self::Quiesced => 6,
            Self::Heartbeat => 7,
            Self::Error => 8,
            Self::Unknown(kind) => kind,
        }
    }

    fn from_wire(kind: u16) -> Option<Self> {
        Some(match kind {
            0 => return None,
            1 => Self::Hello,
            2 => Self::Pages,
            3 => Self::Metadata,
            4 => Self::Lost,
            5 => Self::Pong,
            6 => Self::Quiesced,
            7 => Self::Heartbeat,
            8 => Self::Error,
            other => Self::Unknown(other),
        })
    }
}

/// A checked frame header: magic, checksum and every bound hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the frame is.
    pub kind: Kind,
    /// The run of the agent that made it.
    pub session: SessionId,
    /// The attachment it was sent to.
    pub epoch: Epoch,
    /// Its number in its stream.
    pub sequence: Sequence,
    /// Its stream.
    pub stream: StreamId,
    /// See [`flags`].
    pub flags: u32,
    /// Guest `CLOCK_MONOTONIC` in nanoseconds when the frame was cut.
    pub sent_ns: u64,
    /// Sub-buffers of this stream and session before this frame.
    pub first_page: u64,
    /// Bytes of one sub-buffer; 0 where the frame carries none.
    pub page_size: u32,
    /// Sub-buffers in the payload.
    pub page_count: u32,
    /// CRC-32C of the payload, where [`flags::PAYLOAD_CRC`] is set.
    pub payload_crc: u32,
    /// Bytes of the body in the header page.
    pub body_len: u32,
    /// Bytes behind the header page.
    pub payload_len: u32,
}

/// Why bytes are not a frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The magic is not there.
    #[error("no frame begins here (magic is missing)")]
    Magic,
    /// The length of the header is impossible.
    #[error("header length {0} is outside 128..=4096")]
    HeaderLength(u32),
    /// The checksum does not match.
    #[error("header checksum is {found:08x}, computed {computed:08x}")]
    Checksum {
        /// As on the wire.
        found: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// The frame is whole, but of a version that this crate cannot read.
    #[error("frame of protocol version {found}; this side reads {min} to {current}", min = version::MIN, current = version::CURRENT)]
    Version {
        /// The version on the wire.
        found: u16,
        /// Bytes behind the header page, so that the frame can be skipped.
        payload_len: u32,
    },
    /// The kind is zero.
    #[error("frame kind 0 is invalid")]
    Kind,
    /// The payload is longer than any frame's.
    #[error("payload of {0} bytes is more than the bound {max}", max = MAX_PAYLOAD)]
    Payload(u32),
    /// The session is zero.
    #[error("session 0 is invalid")]
    Session,
    /// A pages frame whose counts contradict each other or its stream.
    #[error(
        "pages frame of {page_count} pages of {page_size} bytes does not fit its payload of {payload_len} bytes"
    )]
    Pages {
        /// Pages that it claims.
        page_count: u32,
        /// Size that it claims for each.
        page_size: u32,
        /// Bytes that it carries.
        payload_len: u32,
    },
}

impl FrameHeader {
    /// A header for a frame without pages; the caller fills in what its kind needs.
    #[must_use]
    pub fn new(kind: Kind, session: SessionId, epoch: Epoch, stream: StreamId) -> Self {
        Self {
            kind,
            session,
            epoch,
            sequence: Sequence(0),
            stream,
            flags: 0,
            sent_ns: 0,
            first_page: 0,
            page_size: 0,
            page_count: 0,
            payload_crc: 0,
            body_len: 0,
            payload_len: 0,
        }
    }

    /// Bytes of the whole frame on the port.
    #[must_use]
    pub fn frame_len(&self) -> usize {
        // A u32 always fits a usize on the targets that run this (32 bits and up).
        HEADER_SIZE + self.payload_len as usize
    }

    /// The header page with `body` in it. `body` longer than [`MAX_BODY`] is cut: callers put long data into the payload.
    #[must_use]
    pub fn encode(&self, body: &[u8]) -> [u8; HEADER_SIZE] {
        let body = &body[..body.len().min(MAX_BODY)];
        let mut page = [0; HEADER_SIZE];
        let header_len = BODY_OFFSET + body.len();
        put(&mut page, 0, MAGIC);
        put(&mut page, VERSION, version::CURRENT.to_le_bytes());
        put(&mut page, KIND, self.kind.to_wire().to_le_bytes());
        // header_len is at most 4096.
        put(
            &mut page,
            HEADER_LEN,
            u32::try_from(header_len).unwrap_or(0).to_le_bytes(),
        );
        put(&mut page, PAYLOAD_LEN, self.payload_len.to_le_bytes());
        put(&mut page, SESSION, self.session.0.to_le_bytes());
        put(&mut page, EPOCH, self.epoch.0.to_le_bytes());
        put(&mut page, SEQUENCE, self.sequence.0.to_le_bytes());
        put(&mut page, STREAM, self.stream.0.to_le_bytes());
        put(&mut page, FLAGS, self.flags.to_le_bytes());
        put(&mut page, SENT_NS, self.sent_ns.to_le_bytes());
        put(&mut page, FIRST_PAGE, self.first_page.to_le_bytes());
        put(&mut page, PAGE_SIZE, self.page_size.to_le_bytes());
        put(&mut page, PAGE_COUNT, self.page_count.to_le_bytes());
        put(&mut page, PAYLOAD_CRC, self.payload_crc.to_le_bytes());
        page[BODY_OFFSET..header_len].copy_from_slice(body);
        let crc = header_crc(&page[..header_len]);
        put(&mut page, HEADER_CRC, crc.to_le_bytes());
        page
    }

    /// Checks a header page: magic, length, checksum, version, then every field against its bound.
    ///
    /// # Errors
    ///
    /// See [`HeaderError`]. Nothing about the bytes may be believed then, except where it says otherwise.
    pub fn check(page: &[u8; HEADER_SIZE]) -> Result<Self, HeaderError> {
        if get::<8>(page, 0) != MAGIC {
            return Err(HeaderError::Magic);
        }
        let header_len = get_u32(page, HEADER_LEN);
        let len = header_len as usize;
        if !(BODY_OFFSET..=HEADER_SIZE).contains(&len) {
            return Err(HeaderError::HeaderLength(header_len));
        }
        let found = get_u32(page, HEADER_CRC);
        let computed = header_crc(&page[..len]);
        if found != computed {
            return Err(HeaderError::Checksum { found, computed });
        }
        let payload_len = get_u32(page, PAYLOAD_LEN);
        if payload_len as usize > MAX_PAYLOAD {
            return Err(HeaderError::Payload(payload_len));
        }
        let version = u16::from_le_bytes(get(page, VERSION));
        if !(version::MIN..=version::CURRENT).contains(&version) {
            return Err(HeaderError::Version {
                found: version,
                payload_len,
            });
        }
        let header = Self {
            kind: Kind::from_wire(u16::from_le_bytes(get(page, KIND))).ok_or(HeaderError::Kind)?,
            session: SessionId(get_u64(page, SESSION)),
            epoch: Epoch(get_u64(page, EPOCH)),
            sequence: Sequence(get_u64(page, SEQUENCE)),
            stream: StreamId(get_u32(page, STREAM)),
            flags: get_u32(page, FLAGS),
            sent_ns: get_u64(page, SENT_NS),
            first_page: get_u64(page, FIRST_PAGE),
            page_size: get_u32(page, PAGE_SIZE),
            page_count: get_u32(page, PAGE_COUNT),
            payload_crc: get_u32(page, PAYLOAD_CRC),
            body_len: u32::try_from(len - BODY_OFFSET).unwrap_or(0),
            payload_len,
        };
        if header.session.0 == 0 {
            return Err(HeaderError::Session);
        }
        if header.kind == Kind::Pages && !header.pages_are_sound() {
            return Err(HeaderError::Pages {
                page_count: header.page_count,
                page_size: header.page_size,
                payload_len,
            });
        }
        Ok(header)
    }

    fn pages_are_sound(&self) -> bool {
        let cpu_is_sound = self.stream.cpu().is_some_and(|cpu| cpu < crate::MAX_CPUS);
        cpu_is_sound
            && (1..=MAX_FRAME_PAGES).contains(&self.page_count)
            && self.page_size.is_power_of_two()
            && (64..=MAX_SUBBUF_SIZE).contains(&self.page_size)
            && u64::from(self.page_count) * u64::from(self.page_size) == u64::from(self.payload_len)
    }
}

/// The body inside a header page that [`FrameHeader::check`] passed.
#[must_use]
pub fn body<'a>(header: &FrameHeader, page: &'a [u8]) -> &'a [u8] {
    page.get(BODY_OFFSET..BODY_OFFSET + header.body_len as usize)
        .unwrap_or_default()
}

fn header_crc(header: &[u8]) -> u32 {
    crc32c_parts(&[&header[..HEADER_CRC], &[0; 4], &header[HEADER_LEN..]])
}

fn put<const N: usize>(page: &mut [u8; HEADER_SIZE], at: usize, bytes: [u8; N]) {
    page[at..at + N].copy_from_slice(&bytes);
}

fn get<const N: usize>(page: &[u8; HEADER_SIZE], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&page[at..at + N]);
    out
}

fn get_u32(page: &[u8; HEADER_SIZE], at: usize) -> u32 {
    u32::from_le_bytes(get(page, at))
}

fn get_u64(page: &[u8; HEADER_SIZE], at: usize) -> u64 {
    u64::from_le_bytes(get(page, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages() -> FrameHeader {
        FrameHeader {
            page_size: 4096,
            page_count: 3,
            payload_len: 3 * 4096,
            ..FrameHeader::new(Kind::Pages, SessionId(7), Epoch(9), StreamId(1))
        }
    }

    #[test]
    fn a_header_survives_its_page() {
        let header = FrameHeader {
            body_len: 5,
            ..pages()
        };
        let page = header.encode(b"hello");
        assert_eq!(FrameHeader::check(&page), Ok(header));
        assert_eq!(body(&header, &page), b"hello");
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_seen() {
        let page = pages().encode(b"body");
        for bit in 0..(BODY_OFFSET + 4) * 8 {
            let mut flipped = page;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(
                FrameHeader::check(&flipped).is_err(),
                "bit {bit} went unnoticed"
            );
        }
    }

    #[test]
    fn lying_counts_are_refused_although_the_checksum_is_right() {
        for lie in [
            FrameHeader {
                page_count: 4,
                ..pages()
            },
            FrameHeader {
                page_count: 0,
                payload_len: 0,
                ..pages()
            },
            FrameHeader {
                page_size: 0,
                ..pages()
            },
            FrameHeader {
                page_size: 1 << 20,
                page_count: 1,
                payload_len: 1 << 20,
                ..pages()
            },
            FrameHeader {
                stream: StreamId::SESSION,
                ..pages()
            },
            FrameHeader {
                stream: StreamId(crate::MAX_CPUS),
                ..pages()
            },
            FrameHeader {
                page_count: 65,
                payload_len: 65 * 4096,
                ..pages()
            },
        ] {
            assert!(
                matches!(
                    FrameHeader::check(&lie.encode(&[])),
                    Err(HeaderError::Pages { .. })
                ),
                "{lie:?}"
            );
        }
        let huge = FrameHeader {
            payload_len: u32::MAX,
            ..FrameHeader::new(Kind::Metadata, SessionId(1), Epoch(1), StreamId::SESSION)
        };
        assert_eq!(
            FrameHeader::check(&huge.encode(&[])),
            Err(HeaderError::Payload(u32::MAX))
        );
    }
}
