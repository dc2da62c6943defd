//! Writing a trail.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use vmtrail_wire::{FrameHeader, Sequence, SessionId, StreamId};

use super::{Event, MetadataError, Recovery, StoreError, TrailError, TrailId, VmIdentity};

/// How a writer behaves.
#[derive(Debug, Clone)]
pub struct WriterOptions {
    /// A segment is sealed when it is longer than this.
    pub segment_bytes: u64,
    /// A segment is sealed when it is older than this.
    pub segment_age: Duration,
    /// Oldest segments are removed while the sealed ones are longer than this together.
    pub retain_bytes: Option<u64>,
    /// Segments whose last batch is older than this are removed.
    pub retain_age: Option<Duration>,
    /// Metadata that the trail holds at most.
    pub metadata_bytes: u64,
    /// Wall clock, nanoseconds since the Unix epoch.
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
            now_ns: || 0,
            trail_id: None,
        }
    }
}

/// The one writer of a trail. Holds its lock.
#[derive(Debug)]
pub struct TrailWriter {}

/// What a batch made durable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Durable {
    /// Per stream the sequence behind the last durable one. Streams of this batch only.
    pub streams: BTreeMap<(SessionId, StreamId), Sequence>,
    /// Generations of metadata that are complete and durable now.
    pub metadata: Vec<(SessionId, u32)>,
    /// Bytes that the batch wrote.
    pub bytes: u64,
}

/// What was taken out to be written.
#[derive(Debug)]
pub struct Batch {}

impl TrailWriter {
    /// Makes a new trail in `dir`, which must be absent or empty.
    ///
    /// # Errors
    ///
    /// [`TrailError::Exists`], [`TrailError::Full`], or what the filesystem said. Nothing is left half-written.
    pub fn create(dir: &Path, options: WriterOptions, vm: VmIdentity) -> Result<Self, TrailError> {
        let _ = (dir, options, vm);
        todo!()
    }

    /// Opens an existing trail to continue it. A torn tail is cut.
    ///
    /// # Errors
    ///
    /// [`TrailError::NotATrail`], [`TrailError::Locked`], [`TrailError::Version`], or what the filesystem said.
    pub fn open(dir: &Path, options: WriterOptions) -> Result<(Self, Recovery), TrailError> {
        let _ = (dir, options);
        todo!()
    }

    /// Takes a pages frame: `frame` is header page and payload as received. Memory only.
    pub fn append(&mut self, header: &FrameHeader, frame: &[u8]) {
        let _ = (header, frame);
        todo!()
    }

    /// Takes an event, stamped now. Memory only.
    pub fn log(&mut self, event: Event) {
        let _ = event;
        todo!()
    }

    /// Takes an event with a time of its own (a merge keeps the times of its sources). Memory only.
    pub fn log_at(&mut self, at_ns: u64, event: Event) {
        let _ = (at_ns, event);
        todo!()
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
        let _ = (session, generation, name, bytes);
        todo!()
    }

    /// Says that the generation is complete: it goes with the next batch.
    pub fn finish_metadata(&mut self, session: SessionId, generation: u32) {
        let _ = (session, generation);
        todo!()
    }

    /// Bytes that wait in memory for [`TrailWriter::take_batch`]; the caller bounds them by not reading its ports.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        todo!()
    }

    /// Whether a batch is out.
    #[must_use]
    pub fn in_flight(&self) -> bool {
        todo!()
    }

    /// Takes out what waits, to be committed on a thread that may block. `None` if nothing waits or a batch is out.
    #[must_use]
    pub fn take_batch(&mut self) -> Option<Batch> {
        todo!()
    }

    /// Takes the batch back. If it was not committed, the next [`TrailWriter::take_batch`] gives it out again.
    pub fn finish_batch(&mut self, batch: Batch) -> Durable {
        let _ = batch;
        todo!()
    }

    /// Lets go of buffers that an idle trail does not need.
    pub fn release_memory(&mut self) {
        todo!()
    }

    /// Writes what waits, logs [`Event::WriterClosed`] and seals the segment.
    ///
    /// # Errors
    ///
    /// A batch is still out, or the filesystem refused; the trail is then as after a crash.
    pub fn close(self) -> Result<(), TrailError> {
        todo!()
    }
}

impl Batch {
    /// Writes and syncs. Blocks.
    ///
    /// # Errors
    ///
    /// The filesystem refused. What was written is rolled back, the batch is kept: call again, or hand it back.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        todo!()
    }
}
