//! Where batches go: the files that a writer has open, and the only code that changes them.
//!
//! The sink travels: it is inside the [`super::Batch`] while that is out on a thread that may block, and inside the
//! writer otherwise. So nothing here is shared and nothing is locked.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use vmtrail_wire::{SessionId, StreamId};

use super::event::{Event, LogLine, RetiredStream};
use super::format::{
    BatchPage, EVENT_LOG, PAGE, STREAMS, SegmentHeader, SegmentIndex, Spans, TrailId, index_name,
    padded, segment_name,
};
use super::metadata::Generation;
use super::reader::index_of;
use super::storage::{Access, Storage, StoredFile, write_atomically};
use super::{StoreError, WriterOptions};

const PAGE_BYTES: u64 = PAGE as u64;

/// Bytes of the event log that one sync covers at most, and so the most that a crash can tear.
pub(super) const MAX_LOG_PIECE: usize = 256 << 10;

/// What waits in memory, or is on its way to the disk.
#[derive(Debug, Default)]
pub(super) struct Content {
    /// Room for the batch page, then the frames. Empty if there are none.
    frames: Vec<u8>,
    /// Bytes of `frames` that are frames; behind them is padding once a commit was tried.
    frames_len: usize,
    frame_count: u32,
    crc: u32,
    spans: Spans,
    events: Vec<u8>,
    /// Bytes of `events` that are durable already.
    events_done: usize,
    generations: Vec<(SessionId, u32, Generation)>,
    /// Generations that are durable already.
    generations_done: usize,
    /// Bytes of metadata that were new to the disk.
    pub(super) metadata_bytes: u64,
}

impl Content {
    pub(super) fn push_frame(&mut self, header: &vmtrail_wire::FrameHeader, frame: &[u8]) {
        if self.frames.is_empty() {
            self.frames.resize(PAGE, 0);
        }
        self.frames.extend_from_slice(frame);
        self.frames_len += frame.len();
        self.frame_count += 1;
        self.crc = crc32c::crc32c_append(self.crc, frame);
        super::format::extend_spans(
            &mut self.spans,
            header.session,
            header.stream,
            &super::format::StreamSpan::of(header),
        );
    }

    pub(super) fn push_event(&mut self, line: &LogLine) {
        push_line(&mut self.events, line);
    }

    pub(super) fn push_generation(
        &mut self,
        session: SessionId,
        generation: u32,
        items: Generation,
    ) {
        self.generations.push((session, generation, items));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frame_count == 0 && self.events.is_empty() && self.generations.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        let generations: usize = self
            .generations
            .iter()
            .map(|(_, _, items)| items.bytes())
            .sum();
        self.frames_len + self.events.len() + generations
    }

    pub(super) fn spans(&self) -> &Spans {
        &self.spans
    }

    pub(super) fn generations(&self) -> impl Iterator<Item = (SessionId, u32)> {
        self.generations
            .iter()
            .map(|&(session, generation, _)| (session, generation))
    }

    /// Bytes of its two buffers that were needed.
    pub(super) fn needed(&self) -> (usize, usize) {
        (self.frames.len(), self.events.len())
    }

    /// Bytes that its two buffers could take.
    pub(super) fn capacity(&self) -> usize {
        self.frames.capacity() + self.events.capacity()
    }

    /// Empty again, with its memory.
    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.frames_len = 0;
        self.frame_count = 0;
        self.crc = 0;
        self.spans.clear();
        self.events.clear();
        self.events_done = 0;
        self.generations.clear();
        self.generations_done = 0;
        self.metadata_bytes = 0;
    }

    /// Lets memory go that is far beyond what was needed lately.
    pub(super) fn shrink(&mut self, frames: usize, events: usize) {
        shrink(&mut self.frames, frames);
        shrink(&mut self.events, events);
    }
}

fn shrink(buffer: &mut Vec<u8>, needed: usize) {
    if buffer.capacity() > needed.saturating_mul(4) {
        buffer.shrink_to(needed.saturating_mul(2));
    }
}

fn push_line(out: &mut Vec<u8>, line: &LogLine) {
    let start = out.len();
    match serde_json::to_writer(&mut *out, line) {
        Ok(()) => out.push(b'\n'),
        // Only a map with keys that are no strings, or a failing writer, fails; an Event has neither and a Vec does
        // not. Should a later event break that, its half line must not spoil its neighbours.
        Err(error) => {
            out.truncate(start);
            tracing::error!(%error, "an event could not be written as JSON");
        }
    }
}

/// The files of a trail, open for writing.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) trail: TrailId,
    limits: Limits,
    sealed: VecDeque<Sealed>,
    current: Option<Current>,
    next_segment: u64,
    next_batch: u64,
    /// Length of segment `next_segment - 1`.
    previous_len: u64,
    log: Log,
}

#[derive(Debug, Clone)]
struct Limits {
    segment_bytes: u64,
    segment_age: Duration,
    retain_bytes: Option<u64>,
    retain_age: Option<Duration>,
    now_ns: fn() -> u64,
}

/// A segment that is written no more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sealed {
    pub(super) number: u64,
    pub(super) len: u64,
    pub(super) last_written_ns: u64,
}

#[derive(Debug)]
struct Current {
    file: Box<dyn StoredFile>,
    header: SegmentHeader,
    /// What is durable of it.
    index: SegmentIndex,
    /// Bytes that are durable: 0 before the first batch, then the index's length.
    len: u64,
    /// Whether bytes may stand behind `len` that a failed commit left.
    spoiled: bool,
}

#[derive(Debug)]
struct Log {
    file: Box<dyn StoredFile>,
    len: u64,
    spoiled: bool,
}

/// The trail's end, where a writer goes on.
#[derive(Debug)]
pub(super) struct End {
    pub(super) sealed: VecDeque<Sealed>,
    /// The last segment, if it goes on.
    pub(super) current: Option<(SegmentHeader, SegmentIndex)>,
    pub(super) next_segment: u64,
    pub(super) next_batch: u64,
    pub(super) previous_len: u64,
    pub(super) log_len: u64,
}

impl Sink {
    pub(super) fn open(
        storage: Arc<dyn Storage>,
        trail: TrailId,
        options: &WriterOptions,
        end: End,
    ) -> Result<Self, StoreError> {
        let open = |name: &str, access| {
            storage
                .open(name, access)
                .map_err(store_error(&*storage, "open", name))
        };
        let log = Log {
            file: open(EVENT_LOG, Access::Write)?,
            len: end.log_len,
            spoiled: false,
        };
        let current = match end.current {
            Some((header, index)) => Some(Current {
                file: open(&segment_name(header.number), Access::Write)?,
                header,
                len: index.len,
                index,
                spoiled: false,
            }),
            None => None,
        };
        Ok(Self {
            trail,
            limits: Limits {
                segment_bytes: options.segment_bytes,
                segment_age: options.segment_age,
                retain_bytes: options.retain_bytes,
                retain_age: options.retain_age,
                now_ns: options.now_ns,
            },
            sealed: end.sealed,
            current,
            next_segment: end.next_segment,
            next_batch: end.next_batch,
            previous_len: end.previous_len,
            log,
            storage,
        })
    }

    /// Makes everything of `content` durable, or nothing of its frames.
    pub(super) fn commit(&mut self, content: &mut Content) -> Result<(), StoreError> {
        self.roll_back()?;
        while let Some((session, generation, items)) =
            content.generations.get(content.generations_done)
        {
            content.metadata_bytes += items.store(&*self.storage, *session, *generation)?;
            content.generations_done += 1;
        }
        self.retire(&mut content.events);
        let committed = self.write(content);
        if let Err(error) = &committed {
            tracing::debug!(%error, path = %error.path.display(), "commit failed, rolling back");
            // If this fails too, the next commit begins with it.
            let _ = self.roll_back();
        }
        committed
    }

    /// Writes the index of the open segment and closes it.
    pub(super) fn seal(&mut self) {
        let Some(current) = self.current.take() else {
            return;
        };
        self.next_segment = current.header.number + 1;
        if current.len == 0 {
            // Nothing durable ever was in it; its successor takes its number.
            self.next_segment = current.header.number;
            return;
        }
        self.previous_len = current.len;
        self.sealed.push_back(Sealed {
            number: current.header.number,
            len: current.len,
            last_written_ns: current.index.last_written_ns,
        });
        write_index(&*self.storage, self.trail, &current.index);
    }

    /// As [`Sink::seal`], but the segment can go on: a closed trail may be continued.
    pub(super) fn write_current_index(&self) {
        if let Some(current) = &self.current
            && current.len > 0
        {
            write_index(&*self.storage, self.trail, &current.index);
        }
    }

    fn write(&mut self, content: &mut Content) -> Result<(), StoreError> {
        // Events are durable before the frames of their batch are written. Frames that landed in a crash without the lines
        // that explain them (whose session, where their stream began) would be kept by recovery and never be explained:
        // the agent says who it is to the next attachment, but a stream begins only once.
        self.write_events(content)?;
        if content.frame_count == 0 {
            return Ok(());
        }
        let batch = self.write_frames(content)?;
        if let Some(current) = &mut self.current {
            let name = segment_name(current.header.number);
            current
                .file
                .sync()
                .map_err(store_error(&*self.storage, "sync", &name))?;
            if current.len == 0 {
                self.storage.sync_dir(STREAMS).map_err(store_error(
                    &*self.storage,
                    "sync directory",
                    STREAMS,
                ))?;
            }
            // Everything is durable. From here on nothing fails.
            current.index.push(&batch, &content.spans);
            current.len = batch.end();
            current.spoiled = false;
            self.next_batch = batch.number + 1;
        }
        Ok(())
    }

    /// Makes what events there are durable, piece by piece; those that are stay so if a later piece fails.
    fn write_events(&mut self, content: &mut Content) -> Result<(), StoreError> {
        loop {
            let left = &content.events[content.events_done..];
            if left.is_empty() {
                return Ok(());
            }
            let piece = if left.len() <= MAX_LOG_PIECE {
                left
            } else {
                // Whole lines; a line that is longer than a piece goes alone.
                let newline = left[..MAX_LOG_PIECE]
                    .iter()
                    .rposition(|&byte| byte == b'\n')
                    .or_else(|| left.iter().position(|&byte| byte == b'\n'));
                &left[..newline.map_or(left.len(), |at| at + 1)]
            };
            self.log.spoiled = true;
            self.log
                .file
                .write_all_at(piece, self.log.len)
                .map_err(store_error(&*self.storage, "write", EVENT_LOG))?;
            self.log
                .file
                .sync()
                .map_err(store_error(&*self.storage, "sync", EVENT_LOG))?;
            self.log.len += piece.len() as u64;
            self.log.spoiled = false;
            content.events_done += piece.len();
        }
    }

    fn write_frames(&mut self, content: &mut Content) -> Result<BatchPage, StoreError> {
        let now_ns = (self.limits.now_ns)();
        let content_len = content.frames_len as u64;
        if self.rotation_is_due(now_ns, PAGE_BYTES + padded(content_len)) {
            self.seal();
        }
        if self.current.is_none() {
            self.begin_segment(now_ns)?;
        }
        let Some(current) = &mut self.current else {
            unreachable!("a segment was just begun");
        };
        let batch = BatchPage {
            segment: current.header.number,
            offset: current.len.max(PAGE_BYTES),
            number: self.next_batch,
            written_ns: now_ns,
            content_len,
            frames: content.frame_count,
            content_crc: content.crc,
        };
        content.frames[..PAGE].copy_from_slice(&batch.encode(self.trail));
        let padded_len = (PAGE + content.frames_len).next_multiple_of(PAGE);
        content.frames.resize(padded_len, 0);
        let name = segment_name(current.header.number);
        current.spoiled = true;
        if current.len == 0 {
            current
                .file
                .write_all_at(&current.header.encode(self.trail), 0)
                .map_err(store_error(&*self.storage, "write", &name))?;
        }
        current
            .file
            .write_all_at(&content.frames, batch.offset)
            .map_err(store_error(&*self.storage, "write", &name))?;
        Ok(batch)
    }

    fn rotation_is_due(&self, now_ns: u64, more: u64) -> bool {
        let Some(current) = &self.current else {
            return false;
        };
        let age = Duration::from_nanos(now_ns.saturating_sub(current.header.created_ns));
        current.len > PAGE_BYTES
            && (current.len + more > self.limits.segment_bytes || age >= self.limits.segment_age)
    }

    fn begin_segment(&mut self, now_ns: u64) -> Result<(), StoreError> {
        let header = SegmentHeader {
            number: self.next_segment,
            created_ns: now_ns,
            first_batch: self.next_batch,
            previous_len: self.previous_len,
        };
        let name = segment_name(header.number);
        let file = self
            .storage
            .open(&name, Access::Create)
            .map_err(store_error(&*self.storage, "create", &name))?;
        self.current = Some(Current {
            file,
            header,
            index: SegmentIndex::new(&header),
            len: 0,
            spoiled: false,
        });
        Ok(())
    }

    /// Back to the durable lengths.
    ///
    /// After a failed sync Linux marks the pages clean: a second sync succeeds without having written them. So a commit
    /// that failed is never synced again; it is cut off and written again, which makes the pages dirty again.
    fn roll_back(&mut self) -> Result<(), StoreError> {
        if let Some(current) = &mut self.current
            && current.spoiled
        {
            let name = segment_name(current.header.number);
            current
                .file
                .set_len(current.len)
                .map_err(store_error(&*self.storage, "cut", &name))?;
            current.spoiled = false;
        }
        if self.log.spoiled {
            self.log.file.set_len(self.log.len).map_err(store_error(
                &*self.storage,
                "cut",
                EVENT_LOG,
            ))?;
            self.log.spoiled = false;
        }
        Ok(())
    }

    /// Removes segments that the trail may not keep. Nothing here fails a commit: too much history is no reason to
    /// lose the present.
    fn retire(&mut self, events: &mut Vec<u8>) {
        let now_ns = (self.limits.now_ns)();
        loop {
            let Some(&oldest) = self.sealed.front() else {
                return;
            };
            let total: u64 = self.sealed.iter().map(|sealed| sealed.len).sum::<u64>()
                + self.current.as_ref().map_or(0, |current| current.len);
            let age = Duration::from_nanos(now_ns.saturating_sub(oldest.last_written_ns));
            let limit = if self.limits.retain_bytes.is_some_and(|max| total > max) {
                "bytes"
            } else if self.limits.retain_age.is_some_and(|max| age > max) {
                "age"
            } else {
                return;
            };
            if let Err(error) = self.retire_segment(oldest, limit, now_ns, events) {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    segment = oldest.number,
                    "an old segment could not be removed"
                );
                return;
            }
            self.sealed.pop_front();
        }
    }

    fn retire_segment(
        &mut self,
        oldest: Sealed,
        limit: &str,
        now_ns: u64,
        events: &mut Vec<u8>,
    ) -> Result<(), super::TrailError> {
        let (index, _) = index_of(&self.storage, self.trail, oldest.number)?;
        let mut line = Vec::new();
        push_line(
            &mut line,
            &LogLine {
                at_ns: now_ns,
                event: Event::Retired {
                    segment: oldest.number,
                    bytes: oldest.len,
                    limit: limit.to_owned(),
                    streams: index.streams.iter().map(retired).collect(),
                },
            },
        );
        // The log says it first: a segment that is gone without a word is a loss.
        self.log.spoiled = true;
        let logged = self
            .log
            .file
            .write_all_at(&line, self.log.len)
            .and_then(|()| self.log.file.sync());
        match logged {
            Ok(()) => {
                self.log.len += line.len() as u64;
                self.log.spoiled = false;
            }
            // No room for a line: then room must be made first, and the line goes with this batch.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                self.roll_back()?;
                events.extend_from_slice(&line);
            }
            Err(error) => {
                self.roll_back()?;
                return Err(super::io_error(&*self.storage, "write", EVENT_LOG)(error));
            }
        }
        let name = segment_name(oldest.number);
        self.storage
            .remove(&name)
            .map_err(super::io_error(&*self.storage, "remove", &name))?;
        // Without its segment it means nothing; recovery sweeps what stays.
        let _ = self.storage.remove(&index_name(oldest.number));
        Ok(())
    }
}

fn retired(
    (&(session, stream), span): (&(SessionId, StreamId), &super::format::StreamSpan),
) -> RetiredStream {
    RetiredStream {
        session: session.to_string(),
        cpu: stream.0,
        from: span.from.0,
        to: span.to.0,
        frames: span.frames,
        pages: span.pages,
        first_page: span.first_page,
        next_page: span.next_page,
    }
}

fn write_index(storage: &dyn Storage, trail: TrailId, index: &SegmentIndex) {
    let name = index_name(index.segment);
    let file = name.trim_start_matches(STREAMS).trim_start_matches('/');
    if let Err((operation, error)) = write_atomically(storage, STREAMS, file, &index.encode(trail))
    {
        // It can be made again from the segment; a full disk is the usual reason.
        tracing::warn!(%error, operation, index = name, "an index could not be written");
    }
}

pub(super) fn store_error(
    storage: &dyn Storage,
    operation: &'static str,
    name: &str,
) -> impl FnOnce(io::Error) -> StoreError {
    let path = storage.place(name);
    move |source| StoreError {
        operation,
        path,
        source,
    }
}
