//! Packets.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::metadata::{self, Shape};
use crate::event_format::{EventFormat, Field, FieldKind};
use crate::metadata::Metadata;
use crate::report::Entry;
use crate::ring_buffer::Missed;
use crate::text::until_nul;
use crate::timeline::{Note, NoteKind};
use crate::{Endian, LongSize};

const MAGIC: u32 = 0xc1fc_1fc1;

/// A packet is closed when its events take this many bytes.
const PACKET_BYTES: usize = 64 << 10;

/// Most elements of a sequence or bytes of a text; a record is never longer than this.
const MAX_ELEMENTS: usize = 1 << 16;

/// Most CPUs, each with a file.
const MAX_CPUS: usize = 8192;

/// Where the files of a trace go.
pub trait CtfOutput {
    /// What a file is written to.
    type File: Write;

    /// Creates the file of this name in the trace's directory.
    fn create(&mut self, name: &str) -> io::Result<Self::File>;
}

/// What a finished trace holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtfTotals {
    /// Events written.
    pub events: u64,
    /// Events reported as discarded: exact losses.
    pub discarded: u64,
    /// Losses without a number; each counts as one discarded event on top of `discarded`.
    pub discarded_unknown: u64,
    /// Packets reported as discarded: pages known to be missing.
    pub packets_discarded: u64,
    /// Records whose event is not described; they are in no file.
    pub unknown: u64,
}

/// Writes a CTF trace.
#[derive(Debug)]
pub struct CtfWriter<'a, O: CtfOutput> {
    output: O,
    metadata: &'a Metadata,
    uuid: [u8; 16],
    streams: BTreeMap<u32, Stream<O::File>>,
    notes: Stream<O::File>,
    totals: CtfTotals,
}

#[derive(Debug)]
struct Stream<F> {
    file: F,
    id: u32,
    cpu: Option<u32>,
    content: Vec<u8>,
    first: u64,
    last: u64,
    sequence: u64,
    discarded: u64,
    // The loss belongs to a packet of its own even if no event follows.
    pending_loss: bool,
}

impl<'a, O: CtfOutput> CtfWriter<'a, O> {
    /// Begins a trace: writes its `metadata`. `uuid` is any number that tells this trace from others; `unix_offset_ns`
    /// is what to add to the trace's times to get nanoseconds since 1970 (0 if not known).
    pub fn create(
        mut output: O,
        metadata: &'a Metadata,
        uuid: [u8; 16],
        unix_offset_ns: u64,
        host: &str,
    ) -> io::Result<Self> {
        let text = metadata::text(metadata, uuid, 1_000_000_000, unix_offset_ns, host);
        output.create("metadata")?.write_all(text.as_bytes())?;
        let notes = Stream::new(output.create("vmtrail")?, 1, None);
        Ok(Self {
            output,
            metadata,
            uuid,
            streams: BTreeMap::new(),
            notes,
            totals: CtfTotals::default(),
        })
    }

    /// Writes one event; those of a CPU in time order.
    pub fn event(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let endian = self.metadata.layout.endian();
        let long_size = self.metadata.layout.long_size();
        if !self.streams.contains_key(&entry.cpu) {
            if self.streams.len() >= MAX_CPUS {
                return Err(io::Error::other("more CPUs than a trace can have"));
            }
            let file = self.output.create(&format!("cpu{}", entry.cpu))?;
            self.streams
                .insert(entry.cpu, Stream::new(file, 0, Some(entry.cpu)));
        }
        let Some(stream) = self.streams.get_mut(&entry.cpu) else {
            return Ok(());
        };
        match entry.missed {
            Missed::None => {}
            Missed::Count(count) => {
                stream.close(endian, &self.uuid)?;
                stream.lose(endian, &self.uuid, count, entry.timestamp)?;
                self.totals.discarded = self.totals.discarded.saturating_add(count);
            }
            Missed::Unknown => {
                stream.close(endian, &self.uuid)?;
                stream.lose(endian, &self.uuid, 1, entry.timestamp)?;
                self.totals.discarded_unknown += 1;
            }
        }
        let Some(event) = self.metadata.events.get(entry.type_id) else {
            self.totals.unknown += 1;
            return Ok(());
        };
        stream.header(endian, entry.type_id, entry.timestamp);
        let number = |name| {
            event
                .field(name)
                .and_then(|field| field.number(endian, entry.payload))
                .unwrap_or(0)
        };
        let content = &mut stream.content;
        content.push(u8::try_from(number("common_flags") & 0xff).unwrap_or(0));
        content.push(u8::try_from(number("common_preempt_count") & 0xff).unwrap_or(0));
        put_u32(
            endian,
            content,
            u32::try_from(number("common_pid") & 0xffff_ffff).unwrap_or(0),
        );
        for field in event.fields() {
            put_field(endian, long_size, event, field, entry.payload, content);
        }
        self.totals.events += 1;
        if stream.content.len() >= PACKET_BYTES {
            stream.close(endian, &self.uuid)?;
        }
        Ok(())
    }

    /// Writes what happened to the machine: an event of a stream of its own; and pages that are missing, as packets that
    /// are.
    pub fn note(&mut self, note: &Note) -> io::Result<()> {
        let endian = self.metadata.layout.endian();
        if let NoteKind::Loss {
            cpu: Some(cpu),
            pages: Missed::Count(pages),
            ..
        } = &note.kind
            && let Some(stream) = self.streams.get_mut(cpu)
        {
            stream.close(endian, &self.uuid)?;
            stream.sequence = stream.sequence.saturating_add(*pages);
            self.totals.packets_discarded = self.totals.packets_discarded.saturating_add(*pages);
        }
        self.notes.header(endian, 0, note.timestamp);
        put_text(note.kind.name().as_bytes(), &mut self.notes.content);
        put_text(note.kind.text().as_bytes(), &mut self.notes.content);
        if self.notes.content.len() >= PACKET_BYTES {
            self.notes.close(endian, &self.uuid)?;
        }
        Ok(())
    }

    /// Ends the trace.
    pub fn finish(mut self) -> io::Result<(O, CtfTotals)> {
        let endian = self.metadata.layout.endian();
        for stream in self.streams.values_mut() {
            stream.close(endian, &self.uuid)?;
            stream.file.flush()?;
        }
        self.notes.close(endian, &self.uuid)?;
        self.notes.file.flush()?;
        Ok((self.output, self.totals))
    }
}

impl<F: Write> Stream<F> {
    fn new(file: F, id: u32, cpu: Option<u32>) -> Self {
        Self {
            file,
            id,
            cpu,
            content: Vec::new(),
            first: 0,
            last: 0,
            sequence: 0,
            discarded: 0,
            pending_loss: false,
        }
    }

    fn lose(
        &mut self,
        endian: Endian,
        uuid: &[u8; 16],
        count: u64,
        timestamp: u64,
    ) -> io::Result<()> {
        self.first = timestamp;
        self.last = self.last.max(timestamp);
        self.pending_loss = true;
        if self.sequence == 0 {
            // Readers compare with the packet before; a loss before the first event needs one, or it is not told.
            self.close(endian, uuid)?;
            self.pending_loss = true;
        }
        self.discarded = self.discarded.saturating_add(count);
        Ok(())
    }

    fn header(&mut self, endian: Endian, id: u16, timestamp: u64) {
        // Readers take a clock that runs back within a stream for a broken trace; a CPU's clock may, over a restore.
        let timestamp = timestamp.max(self.last);
        if self.content.is_empty() {
            self.first = timestamp;
        }
        self.last = timestamp;
        match endian {
            Endian::Little => self.content.extend_from_slice(&id.to_le_bytes()),
            Endian::Big => self.content.extend_from_slice(&id.to_be_bytes()),
        }
        put_u64(endian, &mut self.content, timestamp);
    }

    /// Writes the packet, if there is anything to say.
    fn close(&mut self, endian: Endian, uuid: &[u8; 16]) -> io::Result<()> {
        if self.content.is_empty() && !self.pending_loss {
            return Ok(());
        }
        let mut head = Vec::with_capacity(96);
        put_u32(endian, &mut head, MAGIC);
        head.extend_from_slice(uuid);
        put_u32(endian, &mut head, self.id);
        put_u64(endian, &mut head, self.first);
        put_u64(endian, &mut head, self.last);
        let tail = 4 * 8 + if self.cpu.is_some() { 4 } else { 0 };
        let bits = 8 * u64::try_from(head.len() + tail + self.content.len()).unwrap_or(0);
        put_u64(endian, &mut head, bits);
        put_u64(endian, &mut head, bits);
        put_u64(endian, &mut head, self.sequence);
        put_u64(endian, &mut head, self.discarded);
        if let Some(cpu) = self.cpu {
            put_u32(endian, &mut head, cpu);
        }
        self.file.write_all(&head)?;
        self.file.write_all(&self.content)?;
        self.content.clear();
        self.sequence += 1;
        self.pending_loss = false;
        Ok(())
    }
}

/// A field as the metadata says; zeros and nothing where the record ends before it, so that what follows stays readable.
fn put_field(
    endian: Endian,
    long_size: LongSize,
    event: &EventFormat,
    field: &Field,
    payload: &[u8],
    out: &mut Vec<u8>,
) {
    debug_assert_eq!(event.endian(), endian);
    let bytes = field.bytes(endian, payload);
    match Shape::of(field) {
        Shape::Integer => {
            // The metadata knows one size of address.
            let size = match (field.kind, field.size, long_size) {
                (FieldKind::Pointer, 4 | 8, long) => long.bytes(),
                _ => field.size as usize,
            };
            put_sized(bytes.unwrap_or_default(), size, out);
        }
        Shape::Text => {
            let text = until_nul(bytes.unwrap_or_default());
            put_text(text.get(..MAX_ELEMENTS).unwrap_or(text), out);
        }
        Shape::Array { count, element } => {
            put_sized(bytes.unwrap_or_default(), (count * element) as usize, out);
        }
        Shape::Sequence { element } => {
            let element = element as usize;
            let bytes = bytes.unwrap_or_default();
            let count = (bytes.len() / element).min(MAX_ELEMENTS);
            put_u32(endian, out, u32::try_from(count).unwrap_or(0));
            out.extend_from_slice(bytes.get(..count * element).unwrap_or_default());
        }
    }
}

fn put_sized(bytes: &[u8], size: usize, out: &mut Vec<u8>) {
    let size = size.min(MAX_ELEMENTS);
    let bytes = bytes.get(..size).unwrap_or(bytes);
    out.extend_from_slice(bytes);
    out.resize(out.len() + size - bytes.len(), 0);
}

/// Text and its NUL; a NUL inside would end it early, so there is none.
fn put_text(text: &[u8], out: &mut Vec<u8>) {
    match std::str::from_utf8(text) {
        Ok(_) => out.extend_from_slice(text),
        Err(_) => out.extend_from_slice(String::from_utf8_lossy(text).as_bytes()),
    }
    out.push(0);
}

fn put_u32(endian: Endian, out: &mut Vec<u8>, value: u32) {
    match endian {
        Endian::Little => out.extend_from_slice(&value.to_le_bytes()),
        Endian::Big => out.extend_from_slice(&value.to_be_bytes()),
    }
}

fn put_u64(endian: Endian, out: &mut Vec<u8>, value: u64) {
    match endian {
        Endian::Little => out.extend_from_slice(&value.to_le_bytes()),
        Endian::Big => out.extend_from_slice(&value.to_be_bytes()),
    }
}
