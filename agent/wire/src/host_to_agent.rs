//! What the host says: small messages that the agent reads from its port.

use alloc::string::String;
use alloc::vec::Vec;

use crate::bytes::{BodyError, Reader, put_text, put_u16, put_u32, put_u64};
use crate::{
    Epoch, MAX_CPUS, MAX_MESSAGE_BODY, Sequence, SessionId, StreamId, crc32c_parts, version,
};

/// First bytes of every message.
pub const MAGIC: [u8; 4] = *b"VMTH";

/// Bytes of a message before its body.
pub const MESSAGE_HEADER: usize = 40;

/// Settings in one Configure at most.
pub const MAX_SETTINGS: u32 = 4096;

/// Bytes of a Mark at most: what one write to `trace_marker` takes whatever the kernel.
pub const MAX_MARK: u16 = 1024;

/// What a host wants of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostMessage {
    /// A reader is attached: obey this epoch, forget what is half sent, replay what it lacks, go on.
    Hello(HostHello),
    /// Everything below these sequences is durable; the agent may let it go.
    Ack(Vec<(StreamId, Sequence)>),
    /// Change what is recorded. All of it or nothing.
    Configure(Vec<Setting>),
    /// Record (`tracing_on`).
    Start,
    /// Stop recording, send all that the rings hold, and say so.
    Stop,
    /// Send what is cut, cut no more until Start or a Hello, and say so. The trace waits in the guest's rings.
    Quiesce,
    /// Send all that the rings hold now, also pages that are not full, and say so. Recording goes on.
    Flush,
    /// Tell the clocks.
    Ping {
        /// Host time, echoed.
        host_ns: u64,
    },
    /// Write a line into the trace itself.
    Mark(String),
    /// A kind of a later host.
    Unknown(u16),
}

/// The first message of an attached reader.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostHello {
    /// Oldest protocol version that the host reads.
    pub version_min: u16,
    /// Newest protocol version that the host reads.
    pub version_max: u16,
    /// The metadata generation that the host already holds of this session; 0 for none.
    pub have_metadata: u32,
    /// What the host wants next of each stream; meant only for the session named in the message. A stream that is not
    /// listed is replayed from its last acknowledged frame.
    pub resume_from: Vec<(StreamId, Sequence)>,
}

/// One thing to configure. A key that the agent does not know makes it refuse the whole Configure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Setting {
    /// Forget all events and filters first.
    ClearEvents,
    /// Enable `SYSTEM` or `SYSTEM:EVENT` (globs as tracefs takes them).
    Event(String),
    /// `SYSTEM:EVENT=EXPRESSION`, as `events/SYSTEM/EVENT/filter` takes it.
    Filter(String),
    /// The trace clock. Another clock than the one in force clears the rings (tracing_set_clock, kernel/trace/trace.c).
    Clock(String),
    /// KiB of ring per CPU. Another size than the one in force clears the rings.
    BufferSizeKb(u64),
    /// CPUs to record, as a hexadecimal mask like `tracing_cpumask`.
    CpuMask(String),
    /// A trace option: `NAME` or `noNAME`.
    Option(String),
    /// A tracer for `current_tracer`.
    Tracer(String),
}

/// A message with its envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The session meant; 0 for any.
    pub session: SessionId,
    /// The attachment that speaks.
    pub epoch: Epoch,
    /// Echoed in the answer.
    pub id: u64,
    /// What it says.
    pub message: HostMessage,
}

/// Why bytes are not a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The magic is not there.
    #[error("no message begins here (magic is missing)")]
    Magic,
    /// More body than any message has.
    #[error("message body of {0} bytes is more than the bound {max}", max = MAX_MESSAGE_BODY)]
    TooLong(u32),
    /// The checksum does not match.
    #[error("message checksum is {found:08x}, computed {computed:08x}")]
    Checksum {
        /// As on the wire.
        found: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// A version that this side cannot read.
    #[error("message of protocol version {found}; this side reads {min} to {current}", min = version::MIN, current = version::CURRENT)]
    Version {
        /// The version on the wire.
        found: u16,
        /// Its id, so that the refusal can name it.
        id: u64,
    },
    /// A sound message whose body does not have the form of its kind.
    #[error("message {id}: {error}")]
    Body {
        /// Its id.
        id: u64,
        /// What is wrong with it.
        error: BodyError,
    },
}

impl Envelope {
    /// The bytes of the message. Lists beyond their bounds are cut at the bound.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (kind, body) = self.message.encode();
        let mut out = Vec::with_capacity(MESSAGE_HEADER + body.len());
        out.extend_from_slice(&MAGIC);
        put_u16(&mut out, version::CURRENT);
        put_u16(&mut out, kind);
        put_u32(&mut out, u32::try_from(body.len()).unwrap_or(u32::MAX));
        put_u32(&mut out, 0);
        put_u64(&mut out, self.session.0);
        put_u64(&mut out, self.epoch.0);
        put_u64(&mut out, self.id);
        let crc = crc32c_parts(&[&out, &body]);
        out[12..16].copy_from_slice(&crc.to_le_bytes());
        out.extend_from_slice(&body);
        out
    }

    /// Reads one message from the start of `bytes`: the message and how long it was, or `None` while it is incomplete.
    ///
    /// # Errors
    ///
    /// See [`MessageError`]. For [`MessageError::Version`] and [`MessageError::Body`] the message is whole and
    /// `skip` of the pair is its length; otherwise skip one byte and search on.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, (MessageError, usize)> {
        let magic_seen = bytes.len().min(MAGIC.len());
        if bytes[..magic_seen] != MAGIC[..magic_seen] {
            return Err((MessageError::Magic, 1));
        }
        let Some(header) = bytes.first_chunk::<MESSAGE_HEADER>() else {
            return Ok(None);
        };
        let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | (u64::from(u32_at(at + 4)) << 32);
        let body_len = u32_at(8);
        if body_len as usize > MAX_MESSAGE_BODY {
            return Err((MessageError::TooLong(body_len), 1));
        }
        let len = MESSAGE_HEADER + body_len as usize;
        let Some(body) = bytes.get(MESSAGE_HEADER..len) else {
            return Ok(None);
        };
        let found = u32_at(12);
        let computed = crc32c_parts(&[&header[..12], &[0; 4], &header[16..], body]);
        if found != computed {
            return Err((MessageError::Checksum { found, computed }, 1));
        }
        let id = u64_at(32);
        let found = u16_at(4);
        if !(version::MIN..=version::CURRENT).contains(&found) {
            return Err((MessageError::Version { found, id }, len));
        }
        let message = HostMessage::decode(u16_at(6), body)
            .map_err(|error| (MessageError::Body { id, error }, len))?;
        Ok(Some((
            Self {
                session: SessionId(u64_at(16)),
                epoch: Epoch(u64_at(24)),
                id,
                message,
            },
            len,
        )))
    }
}

impl HostMessage {
    fn encode(&self) -> (u16, Vec<u8>) {
        let mut body = Vec::new();
        let kind = match self {
            Self::Hello(hello) => {
                put_u16(&mut body, hello.version_min);
                put_u16(&mut body, hello.version_max);
                put_u32(&mut body, hello.have_metadata);
                encode_sequences(&hello.resume_from, &mut body);
                1
            }
            Self::Ack(sequences) => {
                encode_sequences(sequences, &mut body);
                2
            }
            Self::Configure(settings) => {
                let settings = &settings[..settings.len().min(MAX_SETTINGS as usize)];
                put_u32(&mut body, u32::try_from(settings.len()).unwrap_or(u32::MAX));
                for setting in settings {
                    setting.encode(&mut body);
                }
                3
            }
            Self::Start => 4,
            Self::Stop => 5,
            Self::Quiesce => 6,
            Self::Flush => 7,
            Self::Ping { host_ns } => {
                put_u64(&mut body, *host_ns);
                8
            }
            Self::Mark(text) => {
                put_text(&mut body, text, MAX_MARK);
                9
            }
            Self::Unknown(kind) => *kind,
        };
        (kind, body)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, BodyError> {
        let mut body = Reader::new(body);
        Ok(match kind {
            1 => Self::Hello(HostHello {
                version_min: body.u16("version_min")?,
                version_max: body.u16("version_max")?,
                have_metadata: body.u32("have_metadata")?,
                resume_from: decode_sequences(&mut body)?,
            }),
            2 => Self::Ack(decode_sequences(&mut body)?),
            3 => {
                let count = body.count("settings", MAX_SETTINGS)?;
                let mut settings = Vec::new();
                for _ in 0..count {
                    settings.push(Setting::decode(&mut body)?);
                }
                Self::Configure(settings)
            }
            4 => Self::Start,
            5 => Self::Stop,
            6 => Self::Quiesce,
            7 => Self::Flush,
            8 => Self::Ping {
                host_ns: body.u64("host_ns")?,
            },
            9 => Self::Mark(body.text("mark")?),
            other => Self::Unknown(other),
        })
    }
}

impl Setting {
    fn encode(&self, out: &mut Vec<u8>) {
        let (key, text) = match self {
            Self::ClearEvents => (1, None),
            Self::Event(text) => (2, Some(text)),
            Self::Filter(text) => (3, Some(text)),
            Self::Clock(text) => (4, Some(text)),
            Self::BufferSizeKb(_) => (5, None),
            Self::CpuMask(text) => (6, Some(text)),
            Self::Option(text) => (7, Some(text)),
            Self::Tracer(text) => (8, Some(text)),
        };
        put_u16(out, key);
        if let Some(text) = text {
            put_text(out, text, u16::MAX);
        }
        if let Self::BufferSizeKb(size) = self {
            put_u64(out, *size);
        }
    }

    fn decode(body: &mut Reader<'_>) -> Result<Self, BodyError> {
        Ok(match body.u16("setting")? {
            1 => Self::ClearEvents,
            2 => Self::Event(body.text("event")?),
            3 => Self::Filter(body.text("filter")?),
            4 => Self::Clock(body.text("clock")?),
            5 => Self::BufferSizeKb(body.u64("buffer size")?),
            6 => Self::CpuMask(body.text("cpu mask")?),
            7 => Self::Option(body.text("option")?),
            8 => Self::Tracer(body.text("tracer")?),
            other => {
                return Err(BodyError::Unknown {
                    field: "setting",
                    value: u64::from(other),
                });
            }
        })
    }
}

/// Streams that fit into one message; a host with more CPUs than that sends several Acks.
pub const MAX_SEQUENCES: u32 = 5000;
const _: () = assert!(MAX_SEQUENCES as usize * 12 + 16 <= MAX_MESSAGE_BODY);

fn encode_sequences(sequences: &[(StreamId, Sequence)], out: &mut Vec<u8>) {
    let sequences = &sequences[..sequences.len().min(MAX_SEQUENCES as usize)];
    put_u32(out, u32::try_from(sequences.len()).unwrap_or(u32::MAX));
    for (stream, sequence) in sequences {
        put_u32(out, stream.0);
        put_u64(out, sequence.0);
    }
}

fn decode_sequences(body: &mut Reader<'_>) -> Result<Vec<(StreamId, Sequence)>, BodyError> {
    let count = body.count("streams", MAX_CPUS)?;
    let mut sequences = Vec::new();
    for _ in 0..count {
        sequences.push((
            StreamId(body.u32("stream")?),
            Sequence(body.u64("sequence")?),
        ));
    }
    Ok(sequences)
}
