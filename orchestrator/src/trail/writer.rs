//! The one writer of a trail.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vmtrail_wire::{FrameHeader, Kind, Sequence, SessionId, StreamId};

use super::format::{
    EVENT_LOG, EVENTS, META, STREAMS, TRAIL_JSON, TrailFile, TrailId, VmIdentity, version,
};
use super::metadata::{self, Generation};
use super::reader::read_trail_file;
use super::recovery::recover;
use super::sink::{Content, End, Sink};
use super::storage::{Access, DirStorage, LockGuard, LockOutcome, Storage, write_atomically};
use super::{Event, LogLine, MetadataError, Recovery, StoreError, TrailError, io_error};

/// Bytes that must be free before a trail is begun: enough for a first batch of some CPUs, so that a full disk is said
/// at once and not after the guest was asked to trace.
pub const MIN_FREE_BYTES: u64 = 4 << 20;

/// Below this, buffers are not worth letting go: 1,000 idle trails keep 32 MiB so.
const SMALL_BUFFER: usize = 16 << 10;

/// How a writer behaves.
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// A segment is sealed before it would become longer than this.
    pub segment_bytes: u64,
    /// A segment is sealed when it is older than this.
    pub segment_age: Duration,
    /// The oldest sealed segments are removed while all segments are longer than this together.
    pub retain_bytes: Option<u64>,
    /// Sealed segments whose last batch is older than this are removed.
    pub retain_age: Option<Duration>,
    /// Bytes of metadata that the trail holds at most.
    pub metadata_bytes: u64,
    /// Wall clock: nanoseconds since the Unix epoch.
    pub now_ns: fn() -> u64,
    /// The id of a new trail; random where `None`.
    pub trail_id: Option<TrailId>,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 256 << 20,
            segment_age: Duration::from_secs(3600),
            retain_bytes: None,
            retain_age: None,
            metadata_bytes: 1 << 30,
            now_ns: wall_clock_ns,
            trail_id: None,
        }
    }
}

/// The one writer of a trail. Holds its lock until it is dropped.
#[derive(Debug)]
pub struct TrailWriter {
    /// Absent while a batch is out.
    sink: Option<Box<Sink>>,
    pending: Content,
    /// The other buffer, empty; absent while a batch is out.
    spare: Option<Content>,
    /// A batch that came back without having been committed.
    returned: Option<Batch>,
    /// Generations that are being collected.
    generations: BTreeMap<(SessionId, u32), Generation>,
    metadata_bytes: u64,
    metadata_bytes_max: u64,
    /// What the last batches needed, halved with every batch that needed less.
    frames_needed: usize,
    events_needed: usize,
    now_ns: fn() -> u64,
    _lock: Box<dyn LockGuard>,
}

/// What a batch made durable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Durable {
    /// Per stream of the batch the sequence behind its last durable frame: what may be acknowledged.
    pub streams: BTreeMap<(SessionId, StreamId), Sequence>,
    /// Generations of metadata that are complete and durable now.
    pub metadata: Vec<(SessionId, u32)>,
    /// Bytes of frames, events and metadata in the batch.
    pub bytes: u64,
}

/// What was taken out of a writer to be written.
#[derive(Debug)]
pub struct Batch {
    sink: Box<Sink>,
    content: Content,
    committed: bool,
}

impl TrailWriter {
    /// Makes a new trail in `dir`, which must be absent or empty, on a filesystem with at least [`MIN_FREE_BYTES`].
    ///
    /// # Errors
    ///
    /// [`TrailError::Exists`], [`TrailError::Full`], or what the filesystem said. Nothing is left half-written then.
    pub fn create(dir: &Path, options: WriterOptions, vm: VmIdentity) -> Result<Self, TrailError> {
        Self::create_in(Arc::new(DirStorage::new(dir)), options, vm)
    }

    /// As [`TrailWriter::create`], in any storage.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn create_in(
        storage: Arc<dyn Storage>,
        options: WriterOptions,
        vm: VmIdentity,
    ) -> Result<Self, TrailError> {
        let found = survey(&*storage)?;
        if found == Found::Something {
            return Err(TrailError::Exists {
                dir: storage.place(""),
            });
        }
        if found == Found::Nothing {
            storage
                .make_dir("")
                .map_err(io_error(&*storage, "create", ""))?;
        }
        let made = make(&storage, &options, vm);
        // Whoever holds the lock is making this trail: what is there is his.
        if made.is_err() && !matches!(made, Err(TrailError::Locked { .. })) {
            unmake(&*storage, found);
        }
        made
    }

    /// Opens an existing trail to continue it. A torn tail is cut.
    ///
    /// # Errors
    ///
    /// [`TrailError::NotATrail`], [`TrailError::Locked`], [`TrailError::Version`], or what the filesystem said.
    pub fn open(dir: &Path, options: WriterOptions) -> Result<(Self, Recovery), TrailError> {
        Self::open_in(Arc::new(DirStorage::new(dir)), options)
    }

    /// As [`TrailWriter::open`], in any storage.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn open_in(
        storage: Arc<dyn Storage>,
        options: WriterOptions,
    ) -> Result<(Self, Recovery), TrailError> {
        // Before the lock, whose taking makes a file: a directory that is no trail stays as it is.
        read_trail_file(&*storage)?;
        let lock = take_lock(&*storage)?;
        let file = read_trail_file(&*storage)?;
        let (recovery, end) = recover(&storage, file.trail)?;
        let (_, metadata_bytes) =
            metadata::list(&*storage).map_err(io_error(&*storage, "list", META))?;
        let sink = Sink::open(storage, file.trail, &options, end)?;
        let mut writer = Self::new(sink, lock, &options, metadata_bytes);
        writer.log(Event::WriterOpened {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            cut_bytes: recovery.cut_bytes,
        });
        for sentence in recovery.cuts.iter().chain(&recovery.damage) {
            writer.log(Event::Note {
                text: format!("recovery: {sentence}"),
            });
        }
        Ok((writer, recovery))
    }

    fn new(
        sink: Sink,
        lock: Box<dyn LockGuard>,
        options: &WriterOptions,
        metadata_bytes: u64,
    ) -> Self {
        Self {
            sink: Some(Box::new(sink)),
            pending: Content::default(),
            spare: Some(Content::default()),
            returned: None,
            generations: BTreeMap::new(),
            metadata_bytes,
            metadata_bytes_max: options.metadata_bytes,
            frames_needed: 0,
            events_needed: 0,
            now_ns: options.now_ns,
            _lock: lock,
        }
    }

    /// Takes a pages frame: `frame` is header page and payload as they were received. Memory only.
    ///
    /// # Panics
    ///
    /// `header` is not the header of `frame`, or not that of a pages frame. A decoder gives both at once; storing
    /// anything else would make the rest of the batch unreadable.
    pub fn append(&mut self, header: &FrameHeader, frame: &[u8]) {
        assert_eq!(header.frame_len(), frame.len(), "not the header's frame");
        assert_eq!(header.kind, Kind::Pages, "only pages are stored as frames");
        self.pending.push_frame(header, frame);
    }

    /// Takes an event, stamped now. Memory only.
    pub fn log(&mut self, event: Event) {
        self.log_at((self.now_ns)(), event);
    }

    /// Takes an event with a time of its own (a merge keeps the times of its sources). Memory only.
    pub fn log_at(&mut self, at_ns: u64, event: Event) {
        self.pending.push_event(&LogLine { at_ns, event });
    }

    /// Takes an item of metadata. Memory only; it becomes durable with its generation.
    ///
    /// # Errors
    ///
    /// A bound was reached; the item was not taken.
    pub fn put_metadata(
        &mut self,
        session: SessionId,
        generation: u32,
        name: &str,
        bytes: Vec<u8>,
    ) -> Result<(), MetadataError> {
        let collected: usize = self.generations.values().map(Generation::bytes).sum();
        let held = self.metadata_bytes + collected as u64;
        if held + bytes.len() as u64 > self.metadata_bytes_max {
            return Err(MetadataError::TrailFull {
                held,
                max: self.metadata_bytes_max,
            });
        }
        // Of a session one generation is collected at a time: an unfinished older one never will be finished.
        self.generations
            .retain(|&(other, number), _| other != session || number == generation);
        self.generations
            .entry((session, generation))
            .or_default()
            .put(name, bytes)
    }

    /// Says that the generation is complete: it goes with the next batch.
    pub fn finish_metadata(&mut self, session: SessionId, generation: u32) {
        if let Some(items) = self.generations.remove(&(session, generation)) {
            self.pending.push_generation(session, generation, items);
        }
    }

    /// Bytes that wait in memory for [`TrailWriter::take_batch`]. The caller bounds them by not reading its ports.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.pending.bytes()
    }

    /// Whether a batch is out.
    #[must_use]
    pub fn in_flight(&self) -> bool {
        self.sink.is_none() && self.returned.is_none()
    }

    /// Takes out what waits, to be committed on a thread that may block. `None` if nothing waits or a batch is out.
    #[must_use]
    pub fn take_batch(&mut self) -> Option<Batch> {
        if let Some(batch) = self.returned.take() {
            return Some(batch);
        }
        if self.pending.is_empty() {
            return None;
        }
        let sink = self.sink.take()?;
        // The spare is here whenever the sink is.
        let content = std::mem::replace(&mut self.pending, self.spare.take().unwrap_or_default());
        Some(Batch {
            sink,
            content,
            committed: false,
        })
    }

    /// Takes the batch back and says what is durable now. A batch that was not committed says nothing, and is given out
    /// again by the next [`TrailWriter::take_batch`].
    pub fn finish_batch(&mut self, batch: Batch) -> Durable {
        if !batch.committed {
            self.returned = Some(batch);
            return Durable::default();
        }
        let mut content = batch.content;
        let durable = Durable {
            streams: content
                .spans()
                .iter()
                .map(|(&stream, span)| (stream, span.to))
                .collect(),
            metadata: content.generations().collect(),
            bytes: content.bytes() as u64,
        };
        self.metadata_bytes += content.metadata_bytes;
        let (frames, events) = content.needed();
        self.frames_needed = frames.max(self.frames_needed / 2);
        self.events_needed = events.max(self.events_needed / 2);
        content.clear();
        content.shrink(
            self.frames_needed.max(SMALL_BUFFER / 2),
            self.events_needed.max(SMALL_BUFFER / 8),
        );
        self.spare = Some(content);
        self.sink = Some(batch.sink);
        durable
    }

    /// Memory that the buffers hold, full or empty.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        self.pending.capacity() + self.spare.as_ref().map_or(0, Content::capacity)
    }

    /// Lets go of the buffers: for a trail that has been idle for a while.
    pub fn release_memory(&mut self) {
        self.frames_needed = 0;
        self.events_needed = 0;
        if self.pending.is_empty() {
            self.pending = Content::default();
        }
        if let Some(spare) = &mut self.spare {
            *spare = Content::default();
        }
    }

    /// Writes what waits, logs [`Event::WriterClosed`] and writes the index of the last segment.
    ///
    /// # Errors
    ///
    /// A batch is still out, or the filesystem refused; the trail is then as after a crash.
    pub fn close(mut self) -> Result<(), TrailError> {
        if self.in_flight() {
            return Err(TrailError::InFlight);
        }
        if let Some(mut batch) = self.returned.take() {
            batch.commit()?;
            self.finish_batch(batch);
        }
        self.log(Event::WriterClosed);
        if let Some(mut batch) = self.take_batch() {
            batch.commit()?;
            self.finish_batch(batch);
        }
        if let Some(sink) = &self.sink {
            sink.write_current_index();
        }
        Ok(())
    }
}

impl Batch {
    /// Writes and syncs; blocks while the disk does. Once it was `Ok`, it stays so.
    ///
    /// # Errors
    ///
    /// The filesystem refused. What was written is rolled back and the batch keeps everything: call again later
    /// ([`StoreError::is_full`]: when space was made), or hand it back.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        if !self.committed {
            self.sink.commit(&mut self.content)?;
            self.committed = true;
        }
        Ok(())
    }

    /// Bytes that it holds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.content.bytes()
    }
}

/// What is where a trail is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    EmptyDirectory,
    Something,
}

fn survey(storage: &dyn Storage) -> Result<Found, TrailError> {
    let names = match storage.list("") {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Ok(Found::Something);
        }
        Err(error) => return Err(io_error(storage, "list", "")(error)),
    };
    // trail.json is made last. A writer that was killed before left its directories, and nothing in them that counts.
    let is_remnant = names.iter().all(|name| {
        let is_ours = ["lock", STREAMS, EVENTS, META].contains(&name.as_str());
        let is_empty = || storage.list(name).is_ok_and(|names| names.is_empty());
        is_ours && (![STREAMS, META].contains(&name.as_str()) || is_empty())
            || *name == format!("{TRAIL_JSON}.tmp")
    });
    Ok(if is_remnant {
        Found::EmptyDirectory
    } else {
        Found::Something
    })
}

fn take_lock(storage: &dyn Storage) -> Result<Box<dyn LockGuard>, TrailError> {
    match storage.lock().map_err(io_error(storage, "lock", ""))? {
        LockOutcome::Held(lock) => Ok(lock),
        LockOutcome::Busy(holder) => Err(TrailError::Locked {
            dir: storage.place(""),
            pid: holder.pid,
        }),
    }
}

fn make(
    storage: &Arc<dyn Storage>,
    options: &WriterOptions,
    vm: VmIdentity,
) -> Result<TrailWriter, TrailError> {
    let free = storage
        .free_bytes()
        .map_err(io_error(&**storage, "look at", ""))?;
    if let Some(free) = free.filter(|&free| free < MIN_FREE_BYTES) {
        return Err(TrailError::Full {
            dir: storage.place(""),
            free,
            needed: MIN_FREE_BYTES,
        });
    }
    let lock = take_lock(&**storage)?;
    // Somebody may have been quicker than our look at the directory.
    if storage.open(TRAIL_JSON, Access::Read).is_ok() {
        return Err(TrailError::Locked {
            dir: storage.place(""),
            pid: None,
        });
    }
    for dir in [STREAMS, EVENTS, META] {
        storage
            .make_dir(dir)
            .map_err(io_error(&**storage, "create", dir))?;
    }
    storage
        .open(EVENT_LOG, Access::Create)
        .map_err(io_error(&**storage, "create", EVENT_LOG))?;
    let trail = match options.trail_id {
        Some(id) => id,
        None => random_id().map_err(|source| TrailError::Io {
            operation: "read random bytes from",
            path: "/dev/urandom".into(),
            source,
        })?,
    };
    let end = End {
        sealed: [].into(),
        current: None,
        next_segment: 1,
        next_batch: 0,
        previous_len: 0,
        log_len: 0,
    };
    let sink = Sink::open(Arc::clone(storage), trail, options, end)?;
    let mut writer = TrailWriter::new(sink, lock, options, 0);
    writer.log(Event::WriterOpened {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cut_bytes: 0,
    });
    if let Some(mut batch) = writer.take_batch() {
        batch.commit()?;
        writer.finish_batch(batch);
    }
    for dir in [EVENTS, STREAMS, META] {
        storage
            .sync_dir(dir)
            .map_err(io_error(&**storage, "sync directory", dir))?;
    }
    let file = TrailFile {
        version: version::CURRENT,
        vmtrail: env!("CARGO_PKG_VERSION").to_owned(),
        trail,
        vm,
        created_ns: (options.now_ns)(),
    };
    let mut json = serde_json::to_vec_pretty(&file).map_err(|error| TrailError::Io {
        operation: "encode",
        path: storage.place(TRAIL_JSON),
        source: error.into(),
    })?;
    json.push(b'\n');
    // From here on it is a trail.
    write_atomically(&**storage, "", TRAIL_JSON, &json).map_err(|(operation, source)| {
        TrailError::Io {
            operation,
            path: storage.place(TRAIL_JSON),
            source,
        }
    })?;
    Ok(writer)
}

/// Takes back what [`make`] did before it failed.
fn unmake(storage: &dyn Storage, found: Found) {
    for file in [TRAIL_JSON, EVENT_LOG, "lock"] {
        let _ = storage.remove(file);
    }
    for dir in [STREAMS, EVENTS, META] {
        let _ = storage.remove_dir(dir);
    }
    if found == Found::Nothing {
        let _ = storage.remove_dir("");
    }
}

fn random_id() -> io::Result<TrailId> {
    let mut id = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut id)?;
    Ok(TrailId(id))
}

fn wall_clock_ns() -> u64 {
    // A clock before 1970 or after 2554 is no reason to stop recording.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| u64::try_from(since.as_nanos()).ok())
        .unwrap_or_default()
}
