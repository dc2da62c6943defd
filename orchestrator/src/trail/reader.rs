//! Reading a trail: one that is closed, one that is being written, one with a torn tail, one on a read-only disk.
//!
//! Nothing here writes, and memory is bounded by one frame and one line of the log.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use vmtrail_wire::{FrameHeader, HEADER_SIZE, SessionId, StreamId};

use super::event::LogLine;
use super::format::{
    self, BatchPage, EVENT_LOG, MAX_EVENT_LINE, MAX_INDEX, MAX_TRAIL_JSON, PAGE, STREAMS,
    SegmentHeader, SegmentIndex, StreamSpan, TRAIL_JSON, TrailFile, TrailFileVersion, TrailId,
    UncheckedBatchPage, UncheckedSegmentHeader, index_name, segment_name, segment_number,
};
use super::metadata::{self, Manifest};
use super::storage::{Access, DirStorage, Holder, Storage, StoredFile, read_bounded};
use super::{TrailError, io_error};

const PAGE_BYTES: u64 = PAGE as u64;

/// A trail, opened for reading.
#[derive(Debug, Clone)]
pub struct TrailReader {
    storage: Arc<dyn Storage>,
    file: TrailFile,
}

/// A segment's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentFile {
    /// Its number.
    pub number: u64,
    /// Its length now.
    pub bytes: u64,
}

impl TrailReader {
    /// Opens the trail in a directory.
    ///
    /// # Errors
    ///
    /// There is none, or it is of a version that cannot be read.
    pub fn open(dir: &Path) -> Result<Self, TrailError> {
        Self::open_in(Arc::new(DirStorage::new(dir)))
    }

    /// Opens the trail in a storage.
    ///
    /// # Errors
    ///
    /// There is none, or it is of a version that cannot be read.
    pub fn open_in(storage: Arc<dyn Storage>) -> Result<Self, TrailError> {
        let file = read_trail_file(&*storage)?;
        Ok(Self { storage, file })
    }

    /// `trail.json`.
    #[must_use]
    pub fn file(&self) -> &TrailFile {
        &self.file
    }

    /// The place of the trail, for messages.
    #[must_use]
    pub fn place(&self) -> std::path::PathBuf {
        self.storage.place("")
    }

    /// Who is writing to the trail now, if somebody is.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    pub fn writer(&self) -> Result<Option<Holder>, TrailError> {
        self.storage
            .lock_holder()
            .map_err(io_error(&*self.storage, "look at", "lock"))
    }

    /// The event log, line by line.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    pub fn events(&self) -> Result<EventLines, TrailError> {
        EventLines::open(&self.storage)
    }

    /// The segments that are there, in order.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    pub fn segments(&self) -> Result<Vec<SegmentFile>, TrailError> {
        list_segments(&*self.storage)
    }

    /// All frames, from the oldest segment on.
    #[must_use]
    pub fn frames(&self) -> Frames {
        Frames::new(Arc::clone(&self.storage), self.file.trail)
    }

    /// Frames from a place on where a batch begins: one of [`SegmentIndex::positions`], or [`Frames::position`].
    #[must_use]
    pub fn frames_from(&self, place: Place) -> Frames {
        let mut frames = self.frames();
        frames.start_at(place);
        frames
    }

    /// What a segment holds: from its index if that is sound, else from the segment's headers.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    pub fn index(&self, segment: u64) -> Result<SegmentIndex, TrailError> {
        index_of(&self.storage, self.file.trail, segment).map(|(index, _)| index)
    }

    /// Sessions and generations that have complete metadata, in order, and the bytes of all of it.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    pub fn manifests(&self) -> Result<(Vec<(SessionId, u32)>, u64), TrailError> {
        metadata::list(&*self.storage).map_err(io_error(&*self.storage, "list", format::META))
    }

    /// The manifest of a generation.
    ///
    /// # Errors
    ///
    /// There is none, or it is damaged.
    pub fn manifest(&self, session: SessionId, generation: u32) -> Result<Manifest, TrailError> {
        metadata::manifest(&*self.storage, session, generation).map_err(io_error(
            &*self.storage,
            "read a manifest in",
            format::META,
        ))
    }

    /// All items of a generation, by name. At most [`metadata::MAX_GENERATION`] bytes.
    ///
    /// # Errors
    ///
    /// An object is missing or damaged.
    pub fn items(&self, manifest: &Manifest) -> Result<BTreeMap<String, Vec<u8>>, TrailError> {
        let damaged = |what: &str| TrailError::Damaged {
            path: self.storage.place(format::META),
            what: what.to_owned(),
        };
        let mut objects = Vec::with_capacity(manifest.objects.len().min(1024));
        for hash in &manifest.objects {
            objects.push(metadata::object(&*self.storage, hash).map_err(io_error(
                &*self.storage,
                "read an object in",
                format::META,
            ))?);
        }
        let mut items = BTreeMap::new();
        let mut total: usize = 0;
        for (name, place) in &manifest.items {
            let range = usize::try_from(place.offset)
                .ok()
                .zip(usize::try_from(place.bytes).ok())
                .and_then(|(offset, bytes)| Some(offset..offset.checked_add(bytes)?));
            let bytes = range
                .and_then(|range| objects.get(place.object)?.get(range))
                .ok_or_else(|| damaged("a manifest names bytes that its object does not have"))?;
            total += bytes.len();
            if total > metadata::MAX_GENERATION {
                return Err(damaged("a manifest's items overlap"));
            }
            items.insert(name.clone(), bytes.to_vec());
        }
        Ok(items)
    }
}

/// A place in the segments where a batch begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Segment.
    pub segment: u64,
    /// Offset in it.
    pub offset: u64,
}

/// What [`Frames`] finds.
#[derive(Debug)]
pub enum Entry<'a> {
    /// A segment begins.
    Segment(SegmentHeader),
    /// A batch begins: the frames that follow were made durable together.
    Batch(BatchPage),
    /// A frame.
    Frame(StoredFrame<'a>),
    /// Something that was written is not there as it was written.
    Damage(Damage),
}

/// A frame as it was received: its header is checked, its payload is the guest's word.
#[derive(Debug, Clone, Copy)]
pub struct StoredFrame<'a> {
    /// Where it is.
    pub place: Place,
    /// Its header.
    pub header: FrameHeader,
    /// Header page and payload; only the header page where [`Frames::headers_only`] was asked for.
    pub bytes: &'a [u8],
}

impl<'a> StoredFrame<'a> {
    /// The sub-buffers, one by one. None where only headers were asked for.
    pub fn pages(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        // A checked pages frame has page_size of at least 64.
        let size = (self.header.page_size as usize).max(1);
        self.bytes
            .get(HEADER_SIZE..)
            .unwrap_or_default()
            .chunks_exact(size)
    }
}

/// Damage in the segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// In which segment.
    pub segment: u64,
    /// Where.
    pub offset: u64,
    /// Bytes concerned, where known.
    pub bytes: u64,
    /// What.
    pub kind: DamageKind,
    /// In words.
    pub text: String,
}

/// Kinds of damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DamageKind {
    /// Segments are missing between two that are there.
    MissingSegments,
    /// A segment is shorter than its successor says.
    Shortened,
    /// A segment's first page is not one.
    SegmentHeader,
    /// Where a batch must begin there is none.
    Unreadable,
    /// Numbers of batches are missing.
    MissingBatches,
    /// A frame's header is not one; the rest of its batch cannot be cut into frames.
    FrameHeader,
    /// A batch's frames do not have its checksum: at least one bit of them changed.
    Content,
}

/// What stands behind the last whole batch: bytes of a batch that is being written, or that a crash tore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Torn {
    /// Where it begins.
    pub place: Place,
    /// Its bytes.
    pub bytes: u64,
}

/// Goes through the segments in order.
///
/// [`Frames::next`] answers `None` at the end of what is there. It can be called again later: a trail that is being
/// written is followed that way.
#[derive(Debug)]
pub struct Frames {
    storage: Arc<dyn Storage>,
    trail: TrailId,
    headers_only: bool,
    /// The only stream whose payloads are read.
    only_stream: Option<(SessionId, StreamId)>,
    /// Whether the last batch's content is checked although only headers are read.
    check_tail: bool,
    only_segment: Option<u64>,
    segment: Option<OpenSegment>,
    /// Where to begin in the first segment.
    start: Option<Place>,
    /// Number of the last segment seen and its length, to check the next one against.
    previous: Option<SegmentFile>,
    expected_batch: Option<u64>,
    buffer: Vec<u8>,
    torn: Option<Torn>,
}

#[derive(Debug)]
struct OpenSegment {
    number: u64,
    file: Box<dyn StoredFile>,
    /// Where the next batch begins.
    offset: u64,
    batch: Option<OpenBatch>,
    /// Whether the end was compared with what the index says.
    end_was_checked: bool,
}

#[derive(Debug)]
struct OpenBatch {
    page: BatchPage,
    /// Bytes of content that were handed out.
    taken: u64,
    frames: u32,
    crc: u32,
}

impl Frames {
    pub(super) fn new(storage: Arc<dyn Storage>, trail: TrailId) -> Self {
        Self {
            storage,
            trail,
            headers_only: false,
            only_stream: None,
            check_tail: false,
            only_segment: None,
            segment: None,
            start: None,
            previous: None,
            expected_batch: None,
            buffer: Vec::new(),
            torn: None,
        }
    }

    /// Reads frames' headers and passes over their payloads. Content is not checked then.
    #[must_use]
    pub fn headers_only(mut self) -> Self {
        self.headers_only = true;
        self
    }

    /// Passes over the payloads of all streams but one, as [`Frames::headers_only`] does over all: several readers go through a trail
    /// side by side, one a CPU, without each reading everything.
    #[must_use]
    pub fn only_stream(mut self, session: SessionId, stream: StreamId) -> Self {
        self.only_stream = Some((session, stream));
        self
    }

    /// Checks the content of the last batch in any case: it is the one that a crash may have torn.
    #[must_use]
    pub(super) fn check_tail(mut self) -> Self {
        self.check_tail = true;
        self
    }

    /// Stays in one segment.
    #[must_use]
    pub(super) fn only_segment(mut self, segment: u64) -> Self {
        self.only_segment = Some(segment);
        self
    }

    fn start_at(&mut self, place: Place) {
        self.start = Some(place);
    }

    /// Where the batch begins that is being read, or that would be read next.
    #[must_use]
    pub fn position(&self) -> Option<Place> {
        self.segment.as_ref().map(|segment| Place {
            segment: segment.number,
            offset: segment
                .batch
                .as_ref()
                .map_or(segment.offset, |batch| batch.page.offset),
        })
    }

    /// What stands behind the last whole batch. Meaningful when [`Frames::next`] answered `None`.
    #[must_use]
    pub fn torn(&self) -> Option<Torn> {
        self.torn
    }

    /// The next thing, or `None` at the end of what is there now.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    #[expect(
        clippy::should_implement_trait,
        reason = "the frame borrows the buffer, so this cannot be an Iterator"
    )]
    pub fn next(&mut self) -> Result<Option<Entry<'_>>, TrailError> {
        self.torn = None;
        let Some(segment) = &mut self.segment else {
            return self.open_next_segment();
        };
        match &segment.batch {
            None => self.begin_batch(),
            Some(batch) if batch.taken == batch.page.content_len => self.end_batch(),
            Some(_) => self.read_frame(),
        }
    }

    fn open_next_segment(&mut self) -> Result<Option<Entry<'_>>, TrailError> {
        let segments = list_segments(&*self.storage)?;
        let wanted = match (self.only_segment, self.previous, self.start) {
            (Some(_), Some(_), _) => return Ok(None),
            (Some(only), None, _) => segments.iter().find(|file| file.number == only),
            (None, Some(previous), _) => segments.iter().find(|file| file.number > previous.number),
            (None, None, Some(start)) => segments.iter().find(|file| file.number >= start.segment),
            (None, None, None) => segments.first(),
        };
        let Some(&SegmentFile { number, bytes }) = wanted else {
            return Ok(None);
        };
        let is_last = segments.last().is_some_and(|last| last.number == number);
        if let Some(previous) = self.previous
            && number > previous.number + 1
        {
            let missing = number - previous.number - 1;
            self.previous = Some(SegmentFile {
                number: number - 1,
                bytes: u64::MAX,
            });
            // Said once is enough: their batches are missing with them.
            self.expected_batch = None;
            return Ok(Some(Entry::Damage(Damage {
                segment: previous.number + 1,
                offset: 0,
                bytes: 0,
                kind: DamageKind::MissingSegments,
                text: format!(
                    "{missing} segment{} missing, from {} on",
                    if missing == 1 { " is" } else { "s are" },
                    segment_name(previous.number + 1),
                ),
            })));
        }
        let name = segment_name(number);
        let file = match self.storage.open(&name, Access::Read) {
            Ok(file) => file,
            // Retention removed it between the listing and now.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_last => {
                self.previous = Some(SegmentFile {
                    number,
                    bytes: u64::MAX,
                });
                return self.open_next_segment();
            }
            Err(error) => return Err(io_error(&*self.storage, "open", &name)(error)),
        };
        let page = read_page(&*file, 0).map_err(io_error(&*self.storage, "read", &name))?;
        let header = match &page {
            Some(page) => UncheckedSegmentHeader(page).check(self.trail, number),
            None => Err(format::FormatError::Bound {
                field: "length",
                found: bytes,
            }),
        };
        if header.is_err() && is_last && !was_sealed(&*self.storage, self.trail, number, 0) {
            // A crash (or this moment) caught it while it was being made.
            self.torn = Some(Torn {
                place: Place {
                    segment: number,
                    offset: 0,
                },
                bytes,
            });
            return Ok(None);
        }
        let offset = match self.start.take() {
            Some(start) if start.segment == number => start.offset.max(PAGE_BYTES),
            _ => PAGE_BYTES,
        };
        let begins_inside = offset != PAGE_BYTES;
        self.segment = Some(OpenSegment {
            number,
            file,
            offset,
            batch: None,
            end_was_checked: false,
        });
        let previous = self.previous.replace(SegmentFile { number, bytes });
        let header = match header {
            Ok(header) => header,
            Err(error) => {
                self.expected_batch = None;
                return Ok(Some(Entry::Damage(Damage {
                    segment: number,
                    offset: 0,
                    bytes: PAGE_BYTES,
                    kind: DamageKind::SegmentHeader,
                    text: format!("the first page of {name} is damaged: {error}"),
                })));
            }
        };
        if begins_inside {
            self.expected_batch = None;
        } else if self.expected_batch.is_none() {
            self.expected_batch = Some(header.first_batch);
        }
        // Its own batches tell what is missing; the length tells it also when the missing ones are the last.
        if let Some(previous) = previous
            && previous.bytes < header.previous_len
            && self.expected_batch != Some(header.first_batch)
        {
            self.expected_batch = Some(header.first_batch);
            return Ok(Some(Entry::Damage(shortened(
                previous.number,
                previous.bytes,
                header.previous_len,
            ))));
        }
        Ok(Some(Entry::Segment(header)))
    }

    fn begin_batch(&mut self) -> Result<Option<Entry<'_>>, TrailError> {
        // next() looked: there is a segment.
        let Some(segment) = &mut self.segment else {
            return Ok(None);
        };
        let (number, offset) = (segment.number, segment.offset);
        let name = segment_name(number);
        let storage = &*self.storage;
        let failed = |error| io_error(storage, "read", &name)(error);
        let mut len = segment.file.len().map_err(failed)?;
        if offset >= len {
            if !std::mem::replace(&mut segment.end_was_checked, true)
                && let Some(index) = stored_index(storage, self.trail, number)
                && index.len > len
                && !has_successor(storage, number)?
            {
                // A successor would say it too.
                return Ok(Some(Entry::Damage(shortened(number, len, index.len))));
            }
            if self.only_segment.is_some() || !has_successor(storage, number)? {
                return Ok(None);
            }
            // A batch may have come between the look at the length and the look at the directory; but there is a
            // successor now, so the length is final.
            len = segment.file.len().map_err(failed)?;
            if offset >= len {
                self.previous = Some(SegmentFile { number, bytes: len });
                self.segment = None;
                return self.open_next_segment();
            }
        }
        let page = read_page(&*segment.file, offset).map_err(failed)?;
        let checked = match &page {
            Some(page) => UncheckedBatchPage(page).check(self.trail, number, offset),
            None => Err(format::FormatError::Bound {
                field: "length",
                found: len - offset,
            }),
        };
        // Only the last batch of the last segment can be torn: the next one is not begun before it is synced.
        let found = match checked {
            Ok(batch) if batch.end() < len => Ok(batch),
            Ok(batch) if batch.end() == len => {
                if (self.headers_only && !self.check_tail)
                    || content_crc(&*segment.file, &batch).map_err(failed)? == batch.content_crc
                    || is_final(storage, self.trail, number, len)?
                {
                    Ok(batch)
                } else {
                    Err("the checksum of its frames is wrong".to_owned())
                }
            }
            Ok(batch) => Err(format!(
                "it ends {} bytes before its batch does",
                batch.end() - len
            )),
            Err(error) => Err(format!("where a batch must begin, {error}")),
        };
        let why = match found {
            Ok(batch) => {
                let expected = self.expected_batch.replace(batch.number);
                if let Some(expected) = expected
                    && expected != batch.number
                {
                    return Ok(Some(Entry::Damage(Damage {
                        segment: number,
                        offset,
                        bytes: 0,
                        kind: DamageKind::MissingBatches,
                        text: format!(
                            "{name} goes on with batch {} where batch {expected} must follow",
                            batch.number
                        ),
                    })));
                }
                self.expected_batch = Some(batch.number + 1);
                segment.offset = batch.end();
                segment.batch = Some(OpenBatch {
                    page: batch,
                    taken: 0,
                    frames: 0,
                    crc: 0,
                });
                return Ok(Some(Entry::Batch(batch)));
            }
            Err(why) => why,
        };
        let behind = find_batch(&*segment.file, self.trail, number, offset + PAGE_BYTES, len)
            .map_err(failed)?;
        if behind.is_none() && !is_final(storage, self.trail, number, len)? {
            self.torn = Some(Torn {
                place: Place {
                    segment: number,
                    offset,
                },
                bytes: len - offset,
            });
            return Ok(None);
        }
        let to = behind.unwrap_or(len);
        segment.offset = to;
        // What is missing is said once, by this; the number of the next batch is taken as it comes.
        self.expected_batch = None;
        Ok(Some(Entry::Damage(Damage {
            segment: number,
            offset,
            bytes: to - offset,
            kind: DamageKind::Unreadable,
            text: format!("{name} is damaged at offset {offset}: {why}"),
        })))
    }

    fn end_batch(&mut self) -> Result<Option<Entry<'_>>, TrailError> {
        let Some(segment) = &mut self.segment else {
            return Ok(None);
        };
        let Some(batch) = segment.batch.take() else {
            return Ok(None);
        };
        let was_read = !self.headers_only && self.only_stream.is_none();
        if was_read && batch.crc != batch.page.content_crc {
            let name = segment_name(segment.number);
            return Ok(Some(Entry::Damage(Damage {
                segment: segment.number,
                offset: batch.page.content_offset(),
                bytes: batch.page.content_len,
                kind: DamageKind::Content,
                text: format!(
                    "{name} is damaged between offsets {} and {}: {} frames, checksum {:08x}, computed {:08x}",
                    batch.page.content_offset(),
                    batch.page.end(),
                    batch.frames,
                    batch.page.content_crc,
                    batch.crc,
                ),
            })));
        }
        self.begin_batch()
    }

    fn read_frame(&mut self) -> Result<Option<Entry<'_>>, TrailError> {
        let Some(segment) = &mut self.segment else {
            return Ok(None);
        };
        let Some(batch) = &mut segment.batch else {
            return Ok(None);
        };
        let offset = batch.page.content_offset() + batch.taken;
        let left = batch.page.content_len - batch.taken;
        let name = segment_name(segment.number);
        let failed = |error| io_error(&*self.storage, "read", &name)(error);
        let page = read_page(&*segment.file, offset).map_err(failed)?;
        let checked = match &page {
            Some(page) if left >= PAGE_BYTES => {
                FrameHeader::check(page).map_err(|error| error.to_string())
            }
            _ => Err("the batch ends inside a frame".to_owned()),
        };
        let checked = checked.and_then(|header| {
            if header.frame_len() as u64 <= left {
                Ok(header)
            } else {
                Err("the batch ends inside a frame".to_owned())
            }
        });
        let (header, page) = match (checked, page) {
            (Ok(header), Some(page)) => (header, page),
            (checked, _) => {
                let why = checked.err().unwrap_or_default();
                let frames_left = batch.page.frames.saturating_sub(batch.frames);
                segment.batch = None;
                return Ok(Some(Entry::Damage(Damage {
                    segment: segment.number,
                    offset,
                    bytes: left,
                    kind: DamageKind::FrameHeader,
                    text: format!(
                        "{name} is damaged at offset {offset}: {why}; {frames_left} frame{} cannot be read",
                        if frames_left == 1 { "" } else { "s" }
                    ),
                })));
            }
        };
        self.buffer.clear();
        self.buffer.extend_from_slice(&page);
        let wanted = self
            .only_stream
            .is_none_or(|only| only == (header.session, header.stream));
        if !self.headers_only && wanted {
            self.buffer.resize(header.frame_len(), 0);
            let read = segment
                .file
                .read_at(&mut self.buffer[PAGE..], offset + PAGE_BYTES)
                .map_err(failed)?;
            // The file was cut under our hands (a writer that rolled back); what is not there is not handed out.
            if read + PAGE != header.frame_len() {
                segment.offset = batch.page.offset;
                segment.batch = None;
                return Ok(None);
            }
            batch.crc = crc32c::crc32c_append(batch.crc, &self.buffer);
        }
        batch.taken += header.frame_len() as u64;
        batch.frames += 1;
        Ok(Some(Entry::Frame(StoredFrame {
            place: Place {
                segment: segment.number,
                offset,
            },
            header,
            bytes: &self.buffer,
        })))
    }
}

/// The event log, line by line.
#[derive(Debug)]
pub struct EventLines {
    file: Option<Box<dyn StoredFile>>,
    place: std::path::PathBuf,
    buffer: Vec<u8>,
    /// Offset of the buffer's first byte.
    offset: u64,
    start: usize,
    line: u64,
}

/// A line of the log.
#[derive(Debug)]
pub struct EventLine {
    /// Its number, from 1.
    pub line: u64,
    /// Offset behind its newline.
    pub end: u64,
    /// What it says, or why that cannot be read.
    pub content: Result<LogLine, String>,
}

impl EventLines {
    pub(super) fn open(storage: &Arc<dyn Storage>) -> Result<Self, TrailError> {
        let file = match storage.open(EVENT_LOG, Access::Read) {
            Ok(file) => Some(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(io_error(&**storage, "open", EVENT_LOG)(error)),
        };
        Ok(Self {
            file,
            place: storage.place(EVENT_LOG),
            buffer: Vec::new(),
            offset: 0,
            start: 0,
            line: 0,
        })
    }

    /// The next whole line; `None` at the end of what is there now.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    #[expect(
        clippy::should_implement_trait,
        reason = "it answers None now and more later, which an Iterator must not"
    )]
    pub fn next(&mut self) -> Result<Option<EventLine>, TrailError> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let mut searched = self.start;
        let end = loop {
            let newline = self.buffer[searched..]
                .iter()
                .position(|&byte| byte == b'\n');
            if let Some(at) = newline {
                break searched + at;
            }
            searched = self.buffer.len();
            if searched - self.start > MAX_EVENT_LINE {
                // No line of ours; what follows it still counts.
                break searched - 1;
            }
            self.buffer.drain(..self.start);
            self.offset += self.start as u64;
            searched -= self.start;
            self.start = 0;
            let old = self.buffer.len();
            self.buffer.resize(old + (64 << 10), 0);
            let read = file
                .read_at(&mut self.buffer[old..], self.offset + old as u64)
                .map_err(|source| TrailError::Io {
                    operation: "read",
                    path: self.place.clone(),
                    source,
                })?;
            self.buffer.truncate(old + read);
            if read == 0 {
                return Ok(None);
            }
        };
        let content = serde_json::from_slice(&self.buffer[self.start..end])
            .map_err(|error| error.to_string());
        self.start = end + 1;
        self.line += 1;
        Ok(Some(EventLine {
            line: self.line,
            end: self.offset + self.start as u64,
            content,
        }))
    }
}

pub(super) fn read_trail_file(storage: &dyn Storage) -> Result<TrailFile, TrailError> {
    let dir = storage.place("");
    let bytes = match read_bounded(storage, TRAIL_JSON, MAX_TRAIL_JSON) {
        Ok(Some(bytes)) => bytes,
        Ok(None) => {
            return Err(TrailError::Damaged {
                path: storage.place(TRAIL_JSON),
                what: format!("it is longer than {MAX_TRAIL_JSON} bytes"),
            });
        }
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Err(TrailError::NotATrail { dir });
        }
        Err(error) => return Err(io_error(storage, "read", TRAIL_JSON)(error)),
    };
    let damaged = |error: serde_json::Error| TrailError::Damaged {
        path: storage.place(TRAIL_JSON),
        what: error.to_string(),
    };
    let version: TrailFileVersion = serde_json::from_slice(&bytes).map_err(damaged)?;
    if !(format::version::MIN..=format::version::CURRENT).contains(&version.version) {
        return Err(TrailError::Version {
            dir,
            found: version.version,
            written_by: version.vmtrail,
        });
    }
    serde_json::from_slice(&bytes).map_err(damaged)
}

pub(super) fn list_segments(storage: &dyn Storage) -> Result<Vec<SegmentFile>, TrailError> {
    let names = match storage.list(STREAMS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names.map_err(io_error(storage, "list", STREAMS))?,
    };
    let mut segments = Vec::new();
    for number in names.iter().filter_map(|name| segment_number(name)) {
        let name = segment_name(number);
        match storage
            .open(&name, Access::Read)
            .and_then(|file| file.len())
        {
            Ok(bytes) => segments.push(SegmentFile { number, bytes }),
            // Retention removed it since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error(storage, "open", &name)(error)),
        }
    }
    segments.sort_unstable_by_key(|segment| segment.number);
    Ok(segments)
}

/// The index of a segment, and whether it came from its file.
pub(super) fn index_of(
    storage: &Arc<dyn Storage>,
    trail: TrailId,
    segment: u64,
) -> Result<(SegmentIndex, bool), TrailError> {
    let name = segment_name(segment);
    let len = storage
        .open(&name, Access::Read)
        .and_then(|file| file.len())
        .map_err(io_error(&**storage, "open", &name))?;
    if let Some(index) = stored_index(&**storage, trail, segment)
        && index.len == len
    {
        return Ok((index, true));
    }
    let scan = scan(storage, trail, segment)?;
    Ok((scan.index, false))
}

/// A segment, read by its headers.
#[derive(Debug)]
pub(super) struct Scan {
    /// What it holds.
    pub(super) index: SegmentIndex,
    /// Its first page, if that is sound.
    pub(super) header: Option<SegmentHeader>,
    /// Its last whole batch.
    pub(super) last_batch: Option<BatchPage>,
    /// What a crash tore at its end.
    pub(super) torn: Option<Torn>,
    /// What is wrong with it otherwise.
    pub(super) damage: Vec<Damage>,
}

/// Reads a segment's headers and checks the content of its last batch.
pub(super) fn scan(
    storage: &Arc<dyn Storage>,
    trail: TrailId,
    segment: u64,
) -> Result<Scan, TrailError> {
    let mut frames = Frames::new(Arc::clone(storage), trail)
        .headers_only()
        .check_tail()
        .only_segment(segment);
    let mut scan = Scan {
        index: SegmentIndex {
            segment,
            len: PAGE_BYTES,
            ..SegmentIndex::default()
        },
        header: None,
        last_batch: None,
        torn: None,
        damage: Vec::new(),
    };
    let mut batch: Option<BatchPage> = None;
    let mut spans = format::Spans::new();
    loop {
        match frames.next()? {
            None => break,
            Some(Entry::Segment(header)) => {
                scan.index = SegmentIndex::new(&header);
                scan.header = Some(header);
            }
            Some(Entry::Batch(page)) => {
                if let Some(batch) = batch.replace(page) {
                    scan.index.push(&batch, &spans);
                    spans.clear();
                }
            }
            Some(Entry::Frame(frame)) => {
                format::extend_spans(
                    &mut spans,
                    frame.header.session,
                    frame.header.stream,
                    &StreamSpan::of(&frame.header),
                );
            }
            Some(Entry::Damage(damage)) => {
                // Somebody may have written rubbish for gigabytes; the first few say it.
                if scan.damage.len() < 100 {
                    scan.damage.push(damage);
                }
            }
        }
    }
    if let Some(batch) = &batch {
        scan.index.push(batch, &spans);
    }
    scan.last_batch = batch;
    scan.torn = frames.torn();
    Ok(scan)
}

fn stored_index(storage: &dyn Storage, trail: TrailId, segment: u64) -> Option<SegmentIndex> {
    let file = read_bounded(storage, &index_name(segment), MAX_INDEX).ok()??;
    SegmentIndex::decode(&file, trail, segment).ok()
}

fn shortened(segment: u64, len: u64, was: u64) -> Damage {
    let missing = was - len;
    Damage {
        segment,
        offset: len,
        bytes: missing,
        kind: DamageKind::Shortened,
        text: format!("{} lacks its last {missing} bytes", segment_name(segment)),
    }
}

/// Whether everything of a segment up to `len` was synced once: it has a successor, or an index that reaches that far.
fn is_final(
    storage: &dyn Storage,
    trail: TrailId,
    segment: u64,
    len: u64,
) -> Result<bool, TrailError> {
    Ok(was_sealed(storage, trail, segment, len) || has_successor(storage, segment)?)
}

fn has_successor(storage: &dyn Storage, segment: u64) -> Result<bool, TrailError> {
    let names = storage
        .list(STREAMS)
        .map_err(io_error(storage, "list", STREAMS))?;
    Ok(names
        .iter()
        .filter_map(|name| segment_number(name))
        .any(|number| number > segment))
}

/// Whether the segment's index says that it was whole, and synced, up to `len`.
fn was_sealed(storage: &dyn Storage, trail: TrailId, segment: u64, len: u64) -> bool {
    stored_index(storage, trail, segment).is_some_and(|index| index.len >= len)
}

fn read_page(file: &dyn StoredFile, offset: u64) -> io::Result<Option<[u8; PAGE]>> {
    let mut page = [0; PAGE];
    let read = file.read_at(&mut page, offset)?;
    Ok((read == PAGE).then_some(page))
}

fn content_crc(file: &dyn StoredFile, batch: &BatchPage) -> io::Result<u32> {
    let mut buffer = vec![0; 128 << 10];
    let mut crc = 0;
    let mut offset = batch.content_offset();
    let mut left = batch.content_len;
    while left > 0 {
        let len = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = file.read_at(&mut buffer[..len], offset)?;
        if read == 0 {
            break;
        }
        crc = crc32c::crc32c_append(crc, &buffer[..read]);
        offset += read as u64;
        left -= read as u64;
    }
    Ok(crc)
}

/// The next page of a batch at or behind an offset.
fn find_batch(
    file: &dyn StoredFile,
    trail: TrailId,
    segment: u64,
    from: u64,
    len: u64,
) -> io::Result<Option<u64>> {
    let mut buffer = vec![0; 64 * PAGE];
    let mut offset = from;
    while offset + PAGE_BYTES <= len {
        let read = file.read_at(&mut buffer, offset)?;
        for page in buffer[..read].chunks_exact(PAGE) {
            // chunks_exact gave it this length.
            if let Ok(page) = page.try_into()
                && UncheckedBatchPage(page)
                    .check(trail, segment, offset)
                    .is_ok()
            {
                return Ok(Some(offset));
            }
            offset += PAGE_BYTES;
        }
        if read < PAGE {
            break;
        }
    }
    Ok(None)
}
