//! The language of the port: what a guest agent and a host say to each other over virtio-serial.
//!
//! # Design constraints
//!
//! - **The payload is never touched.** The agent splices ring-buffer sub-buffers from tracefs to the port; they do
//!   not pass through its memory. So a frame is a header that is written and a payload that follows it by splice,
//!   and only the header carries a checksum.
//! - **The header fills a whole page** ([`HEADER_SIZE`]). virtio_console's `pipe_to_sg` copies each spliced page to
//!   the offset at which the previous one ended; behind a 64-byte header every page would need two scatterlist
//!   entries, one splice would take half the frame, and an interruption between the halves would tear it silently.
//!   Behind a page, one splice is one virtqueue element: all or nothing.
//! - **The port is a byte stream.** Frames are cut anywhere: across reads, and across hosts (a FIFO destination
//!   starts in the middle of an element). [`decode::Decoder`] takes any split, and finds its feet again by magic,
//!   header checksum and expectation. Trace data can contain the magic, so the magic alone is never believed.
//! - **An agent inside a long-lived guest is old.** The first 24 bytes of a frame header and the first 16 bytes of
//!   a message header keep their meaning in every version, so that a reader of any age can name the version it
//!   cannot read. Each version's bytes are pinned by `tests/versioning/`.
//! - **Both sides distrust.** The guest is the adversary of the host, and a host's bytes may be left over from
//!   another life of the VM. Every length is bounded by a named constant before it is used.
//!
//! # A frame (guest to host), version 1, little-endian
//!
//! ```text
//!  offset size
//!  0      8    magic            89 56 4d 54 52 41 49 4c  ("\x89VMTRAIL")      fixed in every version
//!  8      2    version          1                                            fixed in every version
//!  10     2    kind             see Kind; zero is invalid                    fixed in every version
//!  12     4    header_crc       CRC-32C of header_len bytes, this field zero fixed in every version
//!  16     4    header_len       128 + body_len, at most 4096                 fixed in every version
//!  20     4    payload_len      bytes behind the header page                 fixed in every version
//!  24     8    session          one run of the agent, random, never zero
//!  32     8    epoch            the attachment this frame was sent to
//!  40     8    sequence         number of the frame in its stream, from 0 in each session
//!  48     4    stream           CPU number, or ffffffff for the session stream
//!  52     4    flags            see flags
//!  56     8    sent_ns          guest CLOCK_MONOTONIC when the frame was cut
//!  64     8    first_page       pages of this stream before this frame (pages frames)
//!  72     4    page_size        bytes of one sub-buffer (pages frames)
//!  76     4    page_count       sub-buffers in the payload (pages frames)
//!  80     4    payload_crc      CRC-32C of the payload; only where flags say so (never behind spliced pages)
//!  84     44   reserved         zero
//!  128    n    body             by kind, see agent_to_host
//!  4096   m    payload
//! ```
//!
//! # A message (host to guest), version 1, little-endian
//!
//! ```text
//!  offset size
//!  0      4    magic            "VMTH"                                       fixed in every version
//!  4      2    version          1                                            fixed in every version
//!  6      2    kind             see host_to_agent                            fixed in every version
//!  8      4    body_len         at most 65536                                fixed in every version
//!  12     4    crc              CRC-32C of header and body, this field zero  fixed in every version
//!  16     8    session          the session meant, 0 for any
//!  24     8    epoch            the attachment that speaks
//!  32     8    id               echoed in the answer
//!  40     n    body
//! ```

#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

pub mod agent_to_host;
mod bytes;
pub mod decode;
pub mod frame;
pub mod host_to_agent;
mod ids;

pub use agent_to_host::AgentMessage;
pub use bytes::BodyError;
pub use decode::{Decoded, Decoder, MessageDecoder};
pub use frame::{FrameHeader, HeaderError, Kind, flags};
pub use host_to_agent::HostMessage;
pub use ids::{Epoch, Sequence, SessionId, StreamId};

/// Bytes of a frame header on the port: one guest page, whatever it needs of it.
pub const HEADER_SIZE: usize = 4096;

/// Sub-buffers in one frame at most. More gains nothing (throughput levels off at 32 to 64), and a frame is the
/// unit of retention, of replay and of loss.
pub const MAX_FRAME_PAGES: u32 = 64;

/// Payload bytes of one frame at most: 64 sub-buffers of 16 KiB, or two of the kernel's largest (512 KiB,
/// `buffer_subbuf_size_write` in kernel/trace/trace.c admits 128 system pages).
pub const MAX_PAYLOAD: usize = 1 << 20;

/// The largest sub-buffer that the kernel makes (kernel/trace/trace.c, `buffer_subbuf_size_write`).
pub const MAX_SUBBUF_SIZE: u32 = 512 << 10;

/// Body bytes of a host's message at most.
pub const MAX_MESSAGE_BODY: usize = 64 << 10;

/// CPUs that one VM may have for us. Linux itself is built for at most 8192.
pub const MAX_CPUS: u32 = 8192;

/// Protocol versions that this crate reads and writes.
pub mod version {
    /// The oldest version that is understood.
    pub const MIN: u16 = 1;
    /// The version that is written.
    pub const CURRENT: u16 = 1;
}

const CASTAGNOLI: crc::Crc<u32, crc::Table<16>> =
    crc::Crc::<u32, crc::Table<16>>::new(&crc::CRC_32_ISCSI);

/// CRC-32C (Castagnoli) of `bytes`, as in every checksum of the protocol and of the trail.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    CASTAGNOLI.checksum(bytes)
}

/// CRC-32C of two stretches as if they stood behind each other.
#[must_use]
pub(crate) fn crc32c_parts(parts: &[&[u8]]) -> u32 {
    let mut digest = CASTAGNOLI.digest();
    for part in parts {
        digest.update(part);
    }
    digest.finalize()
}
