//! The bytes of a trail, shared by writer and reader. `docs/trail.md` draws them; `tests/fixtures` pins them.
//!
//! Everything that was only read is an `Unchecked…`; its `check` gives the type that may be believed. Integers are
//! little-endian. Every page carries the trail's id, which is random and never leaves the host: a guest that writes
//! bytes of this format into its own trace cannot forge a page of it.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vmtrail_wire::{Epoch, FrameHeader, Sequence, SessionId, StreamId};

/// Store versions that this crate reads and writes.
pub mod version {
    /// The oldest that is read.
    pub const MIN: u32 = 1;
    /// The one that is written.
    pub const CURRENT: u32 = 1;
}

/// Every structure of a segment begins at a multiple of this.
pub const PAGE: usize = 4096;
const PAGE_BYTES: u64 = PAGE as u64;

/// First bytes of a segment.
pub const SEGMENT_MAGIC: [u8; 8] = *b"\x89VMTRSEG";
/// First bytes of a batch.
pub const BATCH_MAGIC: [u8; 8] = *b"\x89VMTRBAT";
/// First bytes of an index.
pub const INDEX_MAGIC: [u8; 8] = *b"\x89VMTRIDX";

/// Bytes of an index at most: the streams of 8192 CPUs over many sessions, and a position a MiB of a 64 GiB segment.
pub const MAX_INDEX: usize = 16 << 20;
/// Bytes of a line of the event log at most.
pub const MAX_EVENT_LINE: usize = 1 << 20;
/// Bytes of `trail.json` at most.
pub const MAX_TRAIL_JSON: usize = 64 << 10;

/// Name of the file that makes a directory a trail.
pub const TRAIL_JSON: &str = "trail.json";
/// Directory of the segments.
pub const STREAMS: &str = "streams";
/// Directory of the log.
pub const EVENTS: &str = "events";
/// The log.
pub const EVENT_LOG: &str = "events/log.jsonl";
/// Directory of the metadata.
pub const META: &str = "meta";

// The fields that the three binary structures share, then each one's own. Each offset from the one before.
const VERSION: usize = 8;
const CRC: usize = VERSION + 4;
const TRAIL: usize = CRC + 4;
const SEGMENT: usize = TRAIL + 16;

const SEGMENT_CREATED: usize = SEGMENT + 8;
const SEGMENT_FIRST_BATCH: usize = SEGMENT_CREATED + 8;
const SEGMENT_PREVIOUS_LEN: usize = SEGMENT_FIRST_BATCH + 8;

const BATCH_OFFSET: usize = SEGMENT + 8;
const BATCH_NUMBER: usize = BATCH_OFFSET + 8;
const BATCH_WRITTEN: usize = BATCH_NUMBER + 8;
const BATCH_CONTENT_LEN: usize = BATCH_WRITTEN + 8;
const BATCH_FRAMES: usize = BATCH_CONTENT_LEN + 8;
const BATCH_CONTENT_CRC: usize = BATCH_FRAMES + 4;

const INDEX_LEN: usize = SEGMENT + 8;
const INDEX_FIRST_BATCH: usize = INDEX_LEN + 8;
const INDEX_NEXT_BATCH: usize = INDEX_FIRST_BATCH + 8;
const INDEX_FIRST_WRITTEN: usize = INDEX_NEXT_BATCH + 8;
const INDEX_LAST_WRITTEN: usize = INDEX_FIRST_WRITTEN + 8;
const INDEX_STREAMS: usize = INDEX_LAST_WRITTEN + 8;
const INDEX_POSITIONS: usize = INDEX_STREAMS + 4;
const INDEX_HEADER: usize = INDEX_POSITIONS + 4;
const INDEX_STREAM: usize = 96;
const INDEX_POSITION: usize = 24;

/// Content of a batch at most. A writer's pending bytes are bounded far below.
pub const MAX_BATCH_CONTENT: u64 = 1 << 32;

/// An index has a position for every so many bytes of its segment.
pub const POSITION_EVERY: u64 = 1 << 20;

/// A trail's name for itself: random.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TrailId(pub [u8; 16]);

impl fmt::Display for TrailId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TrailId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TrailId({self})")
    }
}

impl Serialize for TrailId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TrailId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = is_hex
            .then(|| u128::from_str_radix(&text, 16).ok())
            .flatten();
        let number = number.ok_or_else(|| serde::de::Error::custom("not 32 hexadecimal digits"))?;
        Ok(Self(number.to_be_bytes()))
    }
}

/// Which VM a trail belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct VmIdentity {
    /// QEMU's `-name`, where it has one.
    pub name: Option<String>,
    /// QEMU's `-uuid`, where it has one.
    pub uuid: Option<String>,
}

/// `trail.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrailFile {
    /// Store version.
    pub version: u32,
    /// vmtrail that made the trail.
    pub vmtrail: String,
    /// The trail's id.
    pub trail: TrailId,
    /// The VM.
    pub vm: VmIdentity,
    /// When it was made: nanoseconds since the Unix epoch.
    pub created_ns: u64,
}

/// The part of `trail.json` that every version keeps: enough to say who can read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrailFileVersion {
    /// Store version.
    pub version: u32,
    /// vmtrail that made the trail.
    pub vmtrail: String,
}

/// Name of a segment.
#[must_use]
pub fn segment_name(number: u64) -> String {
    format!("{STREAMS}/{number:08}.seg")
}

/// Name of a segment's index.
#[must_use]
pub fn index_name(number: u64) -> String {
    format!("{STREAMS}/{number:08}.idx")
}

/// The number in a segment's file name (without the directory); `None` if it is not one.
#[must_use]
pub fn segment_number(file: &str) -> Option<u64> {
    let digits = file.strip_suffix(".seg")?;
    let is_ours = digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_ours.then(|| digits.parse().ok()).flatten()
}

/// `len` up to the next page.
#[must_use]
pub fn padded(len: u64) -> u64 {
    len.next_multiple_of(PAGE_BYTES)
}

/// Why bytes are not the structure that must stand there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The magic is missing.
    #[error("its magic is missing")]
    Magic,
    /// The checksum does not match.
    #[error("its checksum is {found:08x}, computed {computed:08x}")]
    Checksum {
        /// As stored.
        found: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// A later version.
    #[error("it is of store version {0}, which this vmtrail does not read")]
    Version(u32),
    /// It belongs to another trail.
    #[error("it belongs to trail {0}")]
    Foreign(TrailId),
    /// It stands where it does not belong.
    #[error("its {field} is {found}, not {expected}")]
    Misplaced {
        /// Which field.
        field: &'static str,
        /// As stored.
        found: u64,
        /// What it must be.
        expected: u64,
    },
    /// A length is out of bounds.
    #[error("its {field} of {found} is out of bounds")]
    Bound {
        /// Which field.
        field: &'static str,
        /// As stored.
        found: u64,
    },
}

/// The first page of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The segment's number, from 1.
    pub number: u64,
    /// When it was begun.
    pub created_ns: u64,
    /// Number of its first batch.
    pub first_batch: u64,
    /// Length of the segment before it; 0 if there is none. A shortened one is found by this.
    pub previous_len: u64,
}

/// A segment's first page as it was read.
#[derive(Debug)]
pub struct UncheckedSegmentHeader<'a>(pub &'a [u8; PAGE]);

impl SegmentHeader {
    /// The page.
    #[must_use]
    pub fn encode(&self, trail: TrailId) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        put_common(&mut page, SEGMENT_MAGIC, trail, self.number);
        put(&mut page, SEGMENT_CREATED, self.created_ns.to_le_bytes());
        put(
            &mut page,
            SEGMENT_FIRST_BATCH,
            self.first_batch.to_le_bytes(),
        );
        put(
            &mut page,
            SEGMENT_PREVIOUS_LEN,
            self.previous_len.to_le_bytes(),
        );
        put_crc(&mut page);
        page
    }
}

impl UncheckedSegmentHeader<'_> {
    /// Believes it, or says why not.
    ///
    /// # Errors
    ///
    /// See [`FormatError`].
    pub fn check(&self, trail: TrailId, number: u64) -> Result<SegmentHeader, FormatError> {
        check_common(self.0, SEGMENT_MAGIC, trail, number)?;
        Ok(SegmentHeader {
            number,
            created_ns: get_u64(self.0, SEGMENT_CREATED),
            first_batch: get_u64(self.0, SEGMENT_FIRST_BATCH),
            previous_len: get_u64(self.0, SEGMENT_PREVIOUS_LEN),
        })
    }
}

/// The page before a batch's frames. It was written in one go with them and one sync made all durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPage {
    /// The segment it is in.
    pub segment: u64,
    /// Where the page is in its segment.
    pub offset: u64,
    /// Its number in the trail, from 0, without holes.
    pub number: u64,
    /// When it was written.
    pub written_ns: u64,
    /// Bytes of frames behind the page.
    pub content_len: u64,
    /// Frames behind the page.
    pub frames: u32,
    /// CRC-32C of the frames.
    pub content_crc: u32,
}

/// A batch's page as it was read.
#[derive(Debug)]
pub struct UncheckedBatchPage<'a>(pub &'a [u8; PAGE]);

impl BatchPage {
    /// The page.
    #[must_use]
    pub fn encode(&self, trail: TrailId) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        put_common(&mut page, BATCH_MAGIC, trail, self.segment);
        put(&mut page, BATCH_OFFSET, self.offset.to_le_bytes());
        put(&mut page, BATCH_NUMBER, self.number.to_le_bytes());
        put(&mut page, BATCH_WRITTEN, self.written_ns.to_le_bytes());
        put(&mut page, BATCH_CONTENT_LEN, self.content_len.to_le_bytes());
        put(&mut page, BATCH_FRAMES, self.frames.to_le_bytes());
        put(&mut page, BATCH_CONTENT_CRC, self.content_crc.to_le_bytes());
        put_crc(&mut page);
        page
    }

    /// Where the frames begin.
    #[must_use]
    pub fn content_offset(&self) -> u64 {
        self.offset + PAGE_BYTES
    }

    /// Where the next batch begins.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.content_offset() + padded(self.content_len)
    }
}

impl UncheckedBatchPage<'_> {
    /// Believes it, or says why not.
    ///
    /// # Errors
    ///
    /// See [`FormatError`].
    pub fn check(
        &self,
        trail: TrailId,
        segment: u64,
        offset: u64,
    ) -> Result<BatchPage, FormatError> {
        check_common(self.0, BATCH_MAGIC, trail, segment)?;
        let batch = BatchPage {
            segment,
            offset: get_u64(self.0, BATCH_OFFSET),
            number: get_u64(self.0, BATCH_NUMBER),
            written_ns: get_u64(self.0, BATCH_WRITTEN),
            content_len: get_u64(self.0, BATCH_CONTENT_LEN),
            frames: get_u32(self.0, BATCH_FRAMES),
            content_crc: get_u32(self.0, BATCH_CONTENT_CRC),
        };
        if batch.offset != offset {
            return Err(FormatError::Misplaced {
                field: "offset",
                found: batch.offset,
                expected: offset,
            });
        }
        if batch.content_len > MAX_BATCH_CONTENT {
            return Err(FormatError::Bound {
                field: "content length",
                found: batch.content_len,
            });
        }
        Ok(batch)
    }
}

/// What a segment, or a batch, holds of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamSpan {
    /// Sequence of its first frame there.
    pub from: Sequence,
    /// Sequence behind its last frame there.
    pub to: Sequence,
    /// Frames.
    pub frames: u64,
    /// Pages.
    pub pages: u64,
    /// Bytes of pages.
    pub bytes: u64,
    /// Pages of the stream before `from`.
    pub first_page: u64,
    /// Pages of the stream before `to`.
    pub next_page: u64,
    /// Guest time of the first frame.
    pub first_sent_ns: u64,
    /// Guest time of the last frame.
    pub last_sent_ns: u64,
    /// Newest epoch.
    pub last_epoch: Epoch,
}

/// Spans by stream, in order.
pub type Spans = BTreeMap<(SessionId, StreamId), StreamSpan>;

impl StreamSpan {
    /// The span of one frame.
    #[must_use]
    pub fn of(header: &FrameHeader) -> Self {
        Self {
            from: header.sequence,
            to: header.sequence.next(),
            frames: 1,
            pages: u64::from(header.page_count),
            bytes: u64::from(header.payload_len),
            first_page: header.first_page,
            next_page: header
                .first_page
                .saturating_add(u64::from(header.page_count)),
            first_sent_ns: header.sent_ns,
            last_sent_ns: header.sent_ns,
            last_epoch: header.epoch,
        }
    }

    /// Takes what comes behind it in the trail.
    pub fn extend(&mut self, behind: &Self) {
        self.to = behind.to;
        self.frames += behind.frames;
        self.pages += behind.pages;
        self.bytes += behind.bytes;
        self.next_page = behind.next_page;
        self.last_sent_ns = behind.last_sent_ns;
        self.last_epoch = self.last_epoch.max(behind.last_epoch);
    }
}

/// Adds what comes behind to spans.
pub fn extend_spans(spans: &mut Spans, session: SessionId, stream: StreamId, behind: &StreamSpan) {
    spans
        .entry((session, stream))
        .and_modify(|span| span.extend(behind))
        .or_insert(*behind);
}

/// A place in a segment where a batch begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexPosition {
    /// Offset of the batch's page.
    pub offset: u64,
    /// The batch.
    pub batch: u64,
    /// When it was written.
    pub written_ns: u64,
}

/// What is known of a segment without reading it. Never believed over the segment: it can be made again from it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SegmentIndex {
    /// The segment.
    pub segment: u64,
    /// Its length.
    pub len: u64,
    /// Its first batch.
    pub first_batch: u64,
    /// The number behind its last batch.
    pub next_batch: u64,
    /// When the first batch was written.
    pub first_written_ns: u64,
    /// When the last batch was written.
    pub last_written_ns: u64,
    /// What it holds.
    pub streams: Spans,
    /// Some batches, in order: one for every [`POSITION_EVERY`] bytes.
    pub positions: Vec<IndexPosition>,
}

impl SegmentIndex {
    /// The index of a segment that has only its header.
    #[must_use]
    pub fn new(header: &SegmentHeader) -> Self {
        Self {
            segment: header.number,
            len: PAGE_BYTES,
            first_batch: header.first_batch,
            next_batch: header.first_batch,
            ..Self::default()
        }
    }

    /// Takes the next batch.
    pub fn push(&mut self, batch: &BatchPage, streams: &Spans) {
        if self.positions.is_empty() {
            self.first_written_ns = batch.written_ns;
        }
        self.last_written_ns = batch.written_ns;
        self.next_batch = batch.number + 1;
        self.len = batch.end();
        let is_due = self
            .positions
            .last()
            .is_none_or(|last| batch.offset - last.offset >= POSITION_EVERY);
        if is_due {
            self.positions.push(IndexPosition {
                offset: batch.offset,
                batch: batch.number,
                written_ns: batch.written_ns,
            });
        }
        for (&(session, stream), span) in streams {
            extend_spans(&mut self.streams, session, stream, span);
        }
    }

    /// The file.
    #[must_use]
    pub fn encode(&self, trail: TrailId) -> Vec<u8> {
        let mut file = vec![0; INDEX_HEADER];
        put_common(&mut file, INDEX_MAGIC, trail, self.segment);
        put(&mut file, INDEX_LEN, self.len.to_le_bytes());
        put(&mut file, INDEX_FIRST_BATCH, self.first_batch.to_le_bytes());
        put(&mut file, INDEX_NEXT_BATCH, self.next_batch.to_le_bytes());
        put(
            &mut file,
            INDEX_FIRST_WRITTEN,
            self.first_written_ns.to_le_bytes(),
        );
        put(
            &mut file,
            INDEX_LAST_WRITTEN,
            self.last_written_ns.to_le_bytes(),
        );
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes();
        put(&mut file, INDEX_STREAMS, count(self.streams.len()));
        put(&mut file, INDEX_POSITIONS, count(self.positions.len()));
        for ((session, stream), span) in &self.streams {
            file.extend(session.0.to_le_bytes());
            file.extend(stream.0.to_le_bytes());
            file.extend([0; 4]);
            for field in [
                span.from.0,
                span.to.0,
                span.frames,
                span.pages,
                span.bytes,
                span.first_page,
                span.next_page,
                span.first_sent_ns,
                span.last_sent_ns,
                span.last_epoch.0,
            ] {
                file.extend(field.to_le_bytes());
            }
        }
        for position in &self.positions {
            for field in [position.offset, position.batch, position.written_ns] {
                file.extend(field.to_le_bytes());
            }
        }
        put_crc(&mut file);
        file
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// See [`FormatError`]; the index is to be made again then.
    pub fn decode(file: &[u8], trail: TrailId, segment: u64) -> Result<Self, FormatError> {
        if file.len() < INDEX_HEADER {
            return Err(FormatError::Bound {
                field: "length",
                found: file.len() as u64,
            });
        }
        check_common(file, INDEX_MAGIC, trail, segment)?;
        let streams = get_u32(file, INDEX_STREAMS) as usize;
        let positions = get_u32(file, INDEX_POSITIONS) as usize;
        let expected = streams
            .saturating_mul(INDEX_STREAM)
            .saturating_add(positions.saturating_mul(INDEX_POSITION))
            .saturating_add(INDEX_HEADER);
        if expected != file.len() {
            return Err(FormatError::Misplaced {
                field: "length",
                found: file.len() as u64,
                expected: expected as u64,
            });
        }
        let (stream_bytes, position_bytes) = file[INDEX_HEADER..].split_at(streams * INDEX_STREAM);
        let streams = stream_bytes.chunks_exact(INDEX_STREAM).map(|entry| {
            let field = |index: usize| get_u64(entry, 16 + 8 * index);
            let key = (SessionId(get_u64(entry, 0)), StreamId(get_u32(entry, 8)));
            let span = StreamSpan {
                from: Sequence(field(0)),
                to: Sequence(field(1)),
                frames: field(2),
                pages: field(3),
                bytes: field(4),
                first_page: field(5),
                next_page: field(6),
                first_sent_ns: field(7),
                last_sent_ns: field(8),
                last_epoch: Epoch(field(9)),
            };
            (key, span)
        });
        let positions = position_bytes
            .chunks_exact(INDEX_POSITION)
            .map(|entry| IndexPosition {
                offset: get_u64(entry, 0),
                batch: get_u64(entry, 8),
                written_ns: get_u64(entry, 16),
            });
        Ok(Self {
            segment,
            len: get_u64(file, INDEX_LEN),
            first_batch: get_u64(file, INDEX_FIRST_BATCH),
            next_batch: get_u64(file, INDEX_NEXT_BATCH),
            first_written_ns: get_u64(file, INDEX_FIRST_WRITTEN),
            last_written_ns: get_u64(file, INDEX_LAST_WRITTEN),
            streams: streams.collect(),
            positions: positions.collect(),
        })
    }
}

fn put_common(bytes: &mut [u8], magic: [u8; 8], trail: TrailId, segment: u64) {
    put(bytes, 0, magic);
    put(bytes, VERSION, version::CURRENT.to_le_bytes());
    put(bytes, TRAIL, trail.0);
    put(bytes, SEGMENT, segment.to_le_bytes());
}

fn check_common(
    bytes: &[u8],
    magic: [u8; 8],
    trail: TrailId,
    segment: u64,
) -> Result<(), FormatError> {
    if get::<8>(bytes, 0) != magic {
        return Err(FormatError::Magic);
    }
    let found = get_u32(bytes, CRC);
    let computed = crc_of(bytes);
    if found != computed {
        return Err(FormatError::Checksum { found, computed });
    }
    let found = get_u32(bytes, VERSION);
    if !(version::MIN..=version::CURRENT).contains(&found) {
        return Err(FormatError::Version(found));
    }
    let found = TrailId(get(bytes, TRAIL));
    if found != trail {
        return Err(FormatError::Foreign(found));
    }
    let found = get_u64(bytes, SEGMENT);
    if found != segment {
        return Err(FormatError::Misplaced {
            field: "segment number",
            found,
            expected: segment,
        });
    }
    Ok(())
}

fn put_crc(bytes: &mut [u8]) {
    let crc = crc_of(bytes);
    put(bytes, CRC, crc.to_le_bytes());
}

/// CRC-32C with its own field taken as zero.
fn crc_of(bytes: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&bytes[..CRC]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[TRAIL..])
}

fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get(bytes, at))
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRAIL_ID: TrailId = TrailId(*b"0123456789abcdef");

    fn batch() -> BatchPage {
        BatchPage {
            segment: 3,
            offset: 4096,
            number: 17,
            written_ns: 5,
            content_len: 8192,
            frames: 1,
            content_crc: 0xdead_beef,
        }
    }

    #[test]
    fn pages_survive() {
        let page = batch().encode(TRAIL_ID);
        assert_eq!(
            UncheckedBatchPage(&page).check(TRAIL_ID, 3, 4096),
            Ok(batch())
        );
        let header = SegmentHeader {
            number: 3,
            created_ns: 1,
            first_batch: 17,
            previous_len: 9 << 20,
        };
        let page = header.encode(TRAIL_ID);
        assert_eq!(UncheckedSegmentHeader(&page).check(TRAIL_ID, 3), Ok(header));
    }

    #[test]
    fn every_flipped_bit_of_a_batch_page_is_seen() {
        let page = batch().encode(TRAIL_ID);
        for bit in 0..PAGE * 8 {
            let mut flipped = page;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(
                UncheckedBatchPage(&flipped)
                    .check(TRAIL_ID, 3, 4096)
                    .is_err(),
                "bit {bit} went unnoticed"
            );
        }
    }

    #[test]
    fn a_page_of_another_place_or_trail_is_not_believed() {
        let page = batch().encode(TRAIL_ID);
        let check =
            |trail, segment, offset| UncheckedBatchPage(&page).check(trail, segment, offset);
        assert!(matches!(
            check(TrailId([0; 16]), 3, 4096),
            Err(FormatError::Foreign(TRAIL_ID))
        ));
        assert!(matches!(
            check(TRAIL_ID, 4, 4096),
            Err(FormatError::Misplaced { .. })
        ));
        assert!(matches!(
            check(TRAIL_ID, 3, 8192),
            Err(FormatError::Misplaced { .. })
        ));
    }

    #[test]
    fn an_index_survives_and_a_broken_one_is_refused() {
        let header = SegmentHeader {
            number: 3,
            created_ns: 1,
            first_batch: 17,
            previous_len: 0,
        };
        let mut index = SegmentIndex::new(&header);
        let span = StreamSpan {
            from: Sequence(4),
            to: Sequence(5),
            frames: 1,
            pages: 2,
            bytes: 8192,
            first_page: 8,
            next_page: 10,
            first_sent_ns: 1,
            last_sent_ns: 2,
            last_epoch: Epoch(3),
        };
        let spans = Spans::from([((SessionId(7), StreamId(0)), span)]);
        index.push(&batch(), &spans);
        let mut second = batch();
        second.offset = index.len;
        second.number = 18;
        index.push(&second, &spans);
        assert_eq!(index.positions.len(), 1, "one position a MiB");
        let file = index.encode(TRAIL_ID);
        assert_eq!(SegmentIndex::decode(&file, TRAIL_ID, 3), Ok(index));
        for len in 0..file.len() {
            assert!(SegmentIndex::decode(&file[..len], TRAIL_ID, 3).is_err());
        }
        for bit in 0..file.len() * 8 {
            let mut flipped = file.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentIndex::decode(&flipped, TRAIL_ID, 3).is_err());
        }
    }

    #[test]
    fn our_checksum_is_the_wires() {
        // Two implementations of one polynomial: the hardware's here, the table's in the protocol.
        let bytes: Vec<u8> = (0..10_000u32).map(|n| n.to_le_bytes()[0]).collect();
        assert_eq!(crc32c::crc32c(&bytes), vmtrail_wire::crc32c(&bytes));
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn names_are_recognised() {
        assert_eq!(segment_number("00000042.seg"), Some(42));
        assert_eq!(segment_number("00000042.idx"), None);
        assert_eq!(segment_number("0000+042.seg"), None);
        assert_eq!(segment_number("42.seg"), None);
        assert_eq!(segment_name(123_456_789), "streams/123456789.seg");
        assert_eq!(segment_number("123456789.seg"), Some(123_456_789));
    }
}
