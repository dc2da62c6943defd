//! What the agent says: bodies and payloads by kind.
//!
//! All of a session's own messages describe state, not steps (counters are cumulative, tables are whole), so they are
//! neither retained nor replayed: the newest one is the truth, and a missing one costs nothing.

use alloc::string::String;
use alloc::vec::Vec;

use crate::bytes::{BodyError, Reader, put_text, put_u16, put_u32, put_u64};
use crate::frame::{FrameHeader, Kind, flags};
use crate::{MAX_CPUS, Sequence, StreamId, crc32c};

/// Bytes of one piece of metadata at most: header page and payload then fit one `write()` of 32 KiB, which is all
/// that virtio_console takes in one go (drivers/char/virtio_console.c, `port_fops_write`).
pub const MAX_METADATA_CHUNK: usize = 24 << 10;

/// Bytes of a metadata item's name at most.
pub const MAX_METADATA_NAME: u16 = 512;

/// Items of metadata in a session at most. A kernel has some 2,500 event formats.
pub const MAX_METADATA_ITEMS: u32 = 65_536;

/// A message of the agent, decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentMessage {
    /// Who the agent is.
    Hello(AgentHello),
    /// A piece of metadata.
    Metadata(MetadataChunk),
    /// Counters of every CPU.
    Lost(Vec<CpuCounters>),
    /// Clocks.
    Pong(Pong),
    /// Everything before these sequences has been sent.
    Quiesced(Quiesced),
    /// Signs of life.
    Heartbeat(Heartbeat),
    /// A refusal.
    Error(AgentError),
}

/// How far a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamState {
    /// The stream.
    pub stream: StreamId,
    /// The oldest frame that can still be sent. Above what the host asked for, the difference is lost for good.
    pub first: Sequence,
    /// The number that the next new frame will have.
    pub next: Sequence,
    /// Pages of the stream before frame `first`.
    pub first_page: u64,
}

/// The answer to a host's Hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentHello {
    /// `/proc/sys/kernel/random/boot_id` of the guest.
    pub boot_id: [u8; 16],
    /// Oldest protocol version that the agent speaks.
    pub version_min: u16,
    /// Newest protocol version that the agent speaks.
    pub version_max: u16,
    /// Version of the agent, for people.
    pub agent_version: String,
    /// `uname -r` of the guest.
    pub kernel: String,
    /// The trace clock in force.
    pub clock: String,
    /// Bytes of a sub-buffer.
    pub page_size: u32,
    /// Bytes of the guest kernel's `long`: 4 or 8.
    pub long_size: u8,
    /// Whether the guest is big-endian (the pages are; the protocol never is).
    pub big_endian: bool,
    /// Whether events are being recorded now.
    pub started: bool,
    /// CPUs that may have a stream.
    pub cpus: u32,
    /// Ports that the agent has open.
    pub ports: u32,
    /// Bytes that one stream may keep unacknowledged.
    pub window: u64,
    /// Changes whenever the metadata does.
    pub metadata_generation: u32,
    /// The streams that this port carries. In the payload.
    pub streams: Vec<StreamState>,
}

/// A piece of one metadata item. The payload of the frame is the piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataChunk {
    /// The generation that the item belongs to.
    pub generation: u32,
    /// Number of the item.
    pub item: u32,
    /// Items of the generation.
    pub items: u32,
    /// Offset of the piece in its item.
    pub offset: u64,
    /// Whether the item ends with this piece.
    pub last: bool,
    /// Name of the item: its path below tracefs, or `proc/kallsyms`, `proc/modules`, `vmtrail/…`.
    pub name: String,
}

/// The kernel's counters of one CPU, cumulative since the instance was made (`per_cpu/cpuN/stats`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuCounters {
    /// The CPU.
    pub cpu: u32,
    /// Events overwritten before they were read (`overrun`).
    pub overrun: u64,
    /// Events lost because a writer was interrupted too deeply (`commit overrun`).
    pub commit_overrun: u64,
    /// Events dropped because the ring was full and not overwriting (`dropped events`).
    pub dropped: u64,
    /// Events read out (`read events`).
    pub read: u64,
}

/// The answer to a Ping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pong {
    /// The id of the Ping.
    pub id: u64,
    /// The host's time in the Ping.
    pub host_ns: u64,
    /// Guest `CLOCK_MONOTONIC`.
    pub monotonic_ns: u64,
    /// Guest `CLOCK_BOOTTIME`.
    pub boottime_ns: u64,
    /// Guest `CLOCK_REALTIME`.
    pub realtime_ns: u64,
}

/// The answer to Flush, Quiesce, Start, Stop or Configure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quiesced {
    /// The id of the message that asked.
    pub id: u64,
    /// Whether events are being recorded now.
    pub started: bool,
    /// How far each stream of this port is: a host that holds everything below `next` holds everything. In the payload.
    pub streams: Vec<StreamState>,
}

/// The agent lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// As in [`AgentHello`].
    pub metadata_generation: u32,
    /// Whether events are being recorded now.
    pub started: bool,
}

/// Why the agent could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentError {
    /// The id of the message that asked, 0 if none did.
    pub id: u64,
    /// The reason.
    pub code: ErrorCode,
    /// With [`ErrorCode::StaleEpoch`]: the epoch that the agent obeys now.
    pub epoch: u64,
    /// For people.
    pub text: String,
}

/// Reasons of an [`AgentError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorCode {
    /// A Hello came with an epoch that is not newer than the one in force.
    StaleEpoch,
    /// An event, filter, clock or size was refused by the guest's kernel.
    Configure,
    /// A message could not be read.
    BadMessage,
    /// A message is of a version or kind that the agent does not know.
    Unsupported,
    /// The guest's tracefs failed.
    Trace,
    /// A reason of a later agent.
    Other(u16),
}

impl AgentMessage {
    /// Reads the message of a frame; `None` for pages frames and for kinds of later agents.
    ///
    /// # Errors
    ///
    /// The body or the payload does not have the form of its kind. The frame as a whole was sound.
    pub fn decode(
        header: &FrameHeader,
        body: &[u8],
        payload: &[u8],
    ) -> Result<Option<Self>, BodyError> {
        if header.flags & flags::PAYLOAD_CRC != 0 && crc32c(payload) != header.payload_crc {
            return Err(BodyError::Unknown {
                field: "payload checksum",
                value: u64::from(header.payload_crc),
            });
        }
        let mut body = Reader::new(body);
        let mut payload = Reader::new(payload);
        Ok(Some(match header.kind {
            Kind::Pages | Kind::Unknown(_) => return Ok(None),
            Kind::Hello => Self::Hello(AgentHello::decode(&mut body, &mut payload)?),
            Kind::Metadata => Self::Metadata(MetadataChunk::decode(&mut body)?),
            Kind::Lost => Self::Lost(decode_counters(&mut payload)?),
            Kind::Pong => Self::Pong(Pong::decode(&mut body)?),
            Kind::Quiesced => Self::Quiesced(Quiesced::decode(&mut body, &mut payload)?),
            Kind::Heartbeat => Self::Heartbeat(Heartbeat {
                metadata_generation: body.u32("metadata_generation")?,
                started: body.u8("started")? != 0,
            }),
            Kind::Error => Self::Error(AgentError {
                id: body.u64("id")?,
                code: ErrorCode::from_wire(body.u16("code")?),
                epoch: body.u64("epoch")?,
                text: body.text("text")?,
            }),
        }))
    }

    /// The kind, body and payload that say this. A [`MetadataChunk`]'s payload is the piece itself, which the caller holds.
    #[must_use]
    pub fn encode(&self) -> (Kind, Vec<u8>, Vec<u8>) {
        let mut body = Vec::new();
        let mut payload = Vec::new();
        let kind = match self {
            Self::Hello(hello) => {
                hello.encode(&mut body, &mut payload);
                Kind::Hello
            }
            Self::Metadata(chunk) => {
                put_u32(&mut body, chunk.generation);
                put_u32(&mut body, chunk.item);
                put_u32(&mut body, chunk.items);
                put_u64(&mut body, chunk.offset);
                body.push(u8::from(chunk.last));
                put_text(&mut body, &chunk.name, MAX_METADATA_NAME);
                Kind::Metadata
            }
            Self::Lost(counters) => {
                put_u32(
                    &mut payload,
                    u32::try_from(counters.len()).unwrap_or(u32::MAX),
                );
                for cpu in counters {
                    put_u32(&mut payload, cpu.cpu);
                    put_u64(&mut payload, cpu.overrun);
                    put_u64(&mut payload, cpu.commit_overrun);
                    put_u64(&mut payload, cpu.dropped);
                    put_u64(&mut payload, cpu.read);
                }
                Kind::Lost
            }
            Self::Pong(pong) => {
                put_u64(&mut body, pong.id);
                put_u64(&mut body, pong.host_ns);
                put_u64(&mut body, pong.monotonic_ns);
                put_u64(&mut body, pong.boottime_ns);
                put_u64(&mut body, pong.realtime_ns);
                Kind::Pong
            }
            Self::Quiesced(quiesced) => {
                put_u64(&mut body, quiesced.id);
                body.push(u8::from(quiesced.started));
                encode_streams(&quiesced.streams, &mut payload);
                Kind::Quiesced
            }
            Self::Heartbeat(heartbeat) => {
                put_u32(&mut body, heartbeat.metadata_generation);
                body.push(u8::from(heartbeat.started));
                Kind::Heartbeat
            }
            Self::Error(error) => {
                put_u64(&mut body, error.id);
                put_u16(&mut body, error.code.to_wire());
                put_u64(&mut body, error.epoch);
                put_text(&mut body, &error.text, 2048);
                Kind::Error
            }
        };
        (kind, body, payload)
    }
}

impl AgentHello {
    fn decode(body: &mut Reader<'_>, payload: &mut Reader<'_>) -> Result<Self, BodyError> {
        Ok(Self {
            boot_id: body.array("boot_id")?,
            version_min: body.u16("version_min")?,
            version_max: body.u16("version_max")?,
            page_size: body.u32("page_size")?,
            long_size: match body.u8("long_size")? {
                size @ (4 | 8) => size,
                other => {
                    return Err(BodyError::Unknown {
                        field: "long_size",
                        value: u64::from(other),
                    });
                }
            },
            big_endian: body.u8("big_endian")? != 0,
            started: body.u8("started")? != 0,
            cpus: body.count("cpus", MAX_CPUS)?,
            ports: body.count("ports", MAX_CPUS)?,
            window: body.u64("window")?,
            metadata_generation: body.u32("metadata_generation")?,
            agent_version: body.text("agent_version")?,
            kernel: body.text("kernel")?,
            clock: body.text("clock")?,
            streams: decode_streams(payload)?,
        })
    }

    fn encode(&self, body: &mut Vec<u8>, payload: &mut Vec<u8>) {
        body.extend_from_slice(&self.boot_id);
        put_u16(body, self.version_min);
        put_u16(body, self.version_max);
        put_u32(body, self.page_size);
        body.push(self.long_size);
        body.push(u8::from(self.big_endian));
        body.push(u8::from(self.started));
        put_u32(body, self.cpus);
        put_u32(body, self.ports);
        put_u64(body, self.window);
        put_u32(body, self.metadata_generation);
        put_text(body, &self.agent_version, 64);
        put_text(body, &self.kernel, 128);
        put_text(body, &self.clock, 64);
        encode_streams(&self.streams, payload);
    }
}

impl MetadataChunk {
    fn decode(body: &mut Reader<'_>) -> Result<Self, BodyError> {
        let chunk = Self {
            generation: body.u32("generation")?,
            item: body.count("item", MAX_METADATA_ITEMS)?,
            items: body.count("items", MAX_METADATA_ITEMS)?,
            offset: body.u64("offset")?,
            last: body.u8("last")? != 0,
            name: body.text("name")?,
        };
        if chunk.name.len() > usize::from(MAX_METADATA_NAME) {
            return Err(BodyError::TooMany {
                field: "name length",
                value: chunk.name.len() as u64,
                bound: u64::from(MAX_METADATA_NAME),
            });
        }
        Ok(chunk)
    }
}

impl Pong {
    fn decode(body: &mut Reader<'_>) -> Result<Self, BodyError> {
        Ok(Self {
            id: body.u64("id")?,
            host_ns: body.u64("host_ns")?,
            monotonic_ns: body.u64("monotonic_ns")?,
            boottime_ns: body.u64("boottime_ns")?,
            realtime_ns: body.u64("realtime_ns")?,
        })
    }
}

impl Quiesced {
    fn decode(body: &mut Reader<'_>, payload: &mut Reader<'_>) -> Result<Self, BodyError> {
        Ok(Self {
            id: body.u64("id")?,
            started: body.u8("started")? != 0,
            streams: decode_streams(payload)?,
        })
    }
}

impl ErrorCode {
    fn to_wire(self) -> u16 {
        match self {
            Self::StaleEpoch => 1,
            Self::Configure => 2,
            Self::BadMessage => 3,
            Self::Unsupported => 4,
            Self::Trace => 5,
            Self::Other(code) => code,
        }
    }

    fn from_wire(code: u16) -> Self {
        match code {
            1 => Self::StaleEpoch,
            2 => Self::Configure,
            3 => Self::BadMessage,
            4 => Self::Unsupported,
            5 => Self::Trace,
            other => Self::Other(other),
        }
    }
}

fn encode_streams(streams: &[StreamState], out: &mut Vec<u8>) {
    put_u32(out, u32::try_from(streams.len()).unwrap_or(u32::MAX));
    for state in streams {
        put_u32(out, state.stream.0);
        put_u64(out, state.first.0);
        put_u64(out, state.next.0);
        put_u64(out, state.first_page);
    }
}

fn decode_streams(payload: &mut Reader<'_>) -> Result<Vec<StreamState>, BodyError> {
    let count = payload.count("streams", MAX_CPUS)?;
    // Not with_capacity(count): the count is the guest's word, the bytes behind it are the proof.
    let mut streams = Vec::new();
    for _ in 0..count {
        streams.push(StreamState {
            stream: StreamId(payload.u32("stream")?),
            first: Sequence(payload.u64("first")?),
            next: Sequence(payload.u64("next")?),
            first_page: payload.u64("first_page")?,
        });
    }
    Ok(streams)
}

fn decode_counters(payload: &mut Reader<'_>) -> Result<Vec<CpuCounters>, BodyError> {
    let count = payload.count("cpus", MAX_CPUS)?;
    let mut counters = Vec::new();
    for _ in 0..count {
        counters.push(CpuCounters {
            cpu: payload.count("cpu", MAX_CPUS)?,
            overrun: payload.u64("overrun")?,
            commit_overrun: payload.u64("commit_overrun")?,
            dropped: payload.u64("dropped")?,
            read: payload.u64("read")?,
        });
    }
    Ok(counters)
}
