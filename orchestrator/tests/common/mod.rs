//! What the tests of the trail share: frames as an agent sends them, and trails on a disk that can crash.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::{
    Durable, Entry, Event, LogLine, Recovery, TrailError, TrailId, TrailReader, TrailWriter,
    VmIdentity, WriterOptions,
};
use vmtrail_wire::{Epoch, FrameHeader, Kind, Sequence, SessionId, StreamId};

pub(crate) const SESSION: SessionId = SessionId(0x5e55_1000_0000_0001);
pub(crate) const TRAIL: TrailId = TrailId(*b"golden trail id!");

static NOW: AtomicU64 = AtomicU64::new(1_700_000_000_000_000_000);

/// A clock that goes on by a microsecond at every look.
pub(crate) fn ticking() -> u64 {
    NOW.fetch_add(1000, Ordering::Relaxed)
}

pub(crate) fn frozen() -> u64 {
    1_700_000_000_000_000_000
}

pub(crate) fn options() -> WriterOptions {
    WriterOptions {
        now_ns: ticking,
        trail_id: Some(TRAIL),
        ..WriterOptions::default()
    }
}

pub(crate) fn vm() -> VmIdentity {
    VmIdentity {
        name: Some("web-1".to_owned()),
        uuid: Some("6d6c7c1e-0f5c-4b8e-9a59-0d6ef5a3c001".to_owned()),
    }
}

/// A stream as an agent makes it.
#[derive(Debug, Clone)]
pub(crate) struct Agent {
    pub(crate) session: SessionId,
    pub(crate) cpu: u32,
    pub(crate) epoch: u64,
    pub(crate) sequence: u64,
    pub(crate) page: u64,
    pub(crate) timestamp: u64,
}

impl Agent {
    pub(crate) fn new(cpu: u32) -> Self {
        Self {
            session: SESSION,
            cpu,
            epoch: 1,
            sequence: 0,
            page: 0,
            timestamp: 1_000_000,
        }
    }

    /// The next frame, of so many pages of 4 KiB.
    pub(crate) fn frame(&mut self, pages: u32) -> (FrameHeader, Vec<u8>) {
        self.frame_with(pages, |_, _| {})
    }

    /// The next frame; `change` may edit its pages.
    pub(crate) fn frame_with(
        &mut self,
        pages: u32,
        mut change: impl FnMut(u32, &mut [u8]),
    ) -> (FrameHeader, Vec<u8>) {
        let header = FrameHeader {
            sequence: Sequence(self.sequence),
            first_page: self.page,
            sent_ns: self.timestamp,
            page_size: 4096,
            page_count: pages,
            payload_len: pages * 4096,
            ..FrameHeader::new(
                Kind::Pages,
                self.session,
                Epoch(self.epoch),
                StreamId(self.cpu),
            )
        };
        let mut bytes = header.encode(&[]).to_vec();
        for page in 0..pages {
            let mut content = page_of(self.timestamp, self.cpu);
            change(page, &mut content);
            bytes.extend_from_slice(&content);
            self.timestamp += 10_000;
            self.page += 1;
        }
        self.sequence += 1;
        (header, bytes)
    }
}

/// A ring-buffer page with one event of 8 bytes of data: timestamp, commit, event (linux/ring_buffer.h: type_len 2 is
/// two words of data; the upper 27 bits are the time since the page's).
pub(crate) fn page_of(timestamp: u64, cpu: u32) -> Vec<u8> {
    let mut page = vec![0; 4096];
    page[..8].copy_from_slice(&timestamp.to_le_bytes());
    page[8..16].copy_from_slice(&12u64.to_le_bytes());
    page[16..20].copy_from_slice(&(2u32 | (100 << 5)).to_le_bytes());
    page[20..24].copy_from_slice(&cpu.to_le_bytes());
    page[24..28].copy_from_slice(&7u32.to_le_bytes());
    page
}

/// The missed-events flags of include/linux/ring_buffer.h, with the count behind the data.
pub(crate) fn miss(page: &mut [u8], count: Option<u64>) {
    const MISSED: u64 = 1 << 31;
    const STORED: u64 = 1 << 30;
    let commit = 12 | MISSED | if count.is_some() { STORED } else { 0 };
    page[8..16].copy_from_slice(&commit.to_le_bytes());
    if let Some(count) = count {
        page[16 + 12..16 + 20].copy_from_slice(&count.to_le_bytes());
    }
}

pub(crate) fn create(disk: &CrashDisk, options: WriterOptions) -> TrailWriter {
    TrailWriter::create_in(Arc::new(disk.clone()), options, vm()).expect("an empty disk")
}

pub(crate) fn open(
    disk: &CrashDisk,
    options: WriterOptions,
) -> Result<(TrailWriter, Recovery), TrailError> {
    TrailWriter::open_in(Arc::new(disk.clone()), options)
}

pub(crate) fn reader(disk: &CrashDisk) -> TrailReader {
    TrailReader::open_in(Arc::new(disk.clone())).expect("a trail")
}

/// Takes, commits and hands back.
pub(crate) fn flush(writer: &mut TrailWriter) -> Durable {
    let Some(mut batch) = writer.take_batch() else {
        return Durable::default();
    };
    batch.commit().expect("a sound disk");
    writer.finish_batch(batch)
}

/// What a trail says, for comparing: `(cpu, sequence)` of every frame, and every damage.
pub(crate) fn contents(disk: &CrashDisk) -> (Vec<(u32, u64)>, Vec<String>) {
    let mut frames = reader(disk).frames();
    let mut found = vec![];
    let mut damage = vec![];
    while let Some(entry) = frames.next().expect("readable") {
        match entry {
            Entry::Frame(frame) => {
                found.push((frame.header.stream.0, frame.header.sequence.0));
            }
            Entry::Damage(found) => damage.push(found.text),
            Entry::Segment(_) | Entry::Batch(_) => {}
        }
    }
    (found, damage)
}

pub(crate) fn events(disk: &CrashDisk) -> Vec<LogLine> {
    let mut lines = reader(disk).events().expect("a log");
    let mut found = vec![];
    while let Some(line) = lines.next().expect("readable") {
        found.push(line.content.expect("a sound line"));
    }
    found
}

pub(crate) fn note(text: &str) -> Event {
    Event::Note {
        text: text.to_owned(),
    }
}
