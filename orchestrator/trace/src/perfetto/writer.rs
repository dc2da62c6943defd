//! Writing packets as events come, in time order.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::packet::Message;
use super::typed::{Kind, Typed};
use crate::event_format::{EventFormat, Field, Value};
use crate::metadata::Metadata;
use crate::report::Entry;
use crate::ring_buffer::Missed;
use crate::timeline::{Note, NoteKind};

/// A bundle is written when it is this long; perfetto's own are of one ring-buffer page.
const BUNDLE_BYTES: usize = 32 << 10;

/// Most CPUs perfetto accepts (`kMaxCpus` in trace_processor).
const MAX_CPUS: u32 = 1024;

/// Most bytes of one text or array of an event.
const MAX_FIELD: usize = 4096;

/// Our packets' sequence. Any number but zero.
const SEQUENCE: u64 = 1;

/// Boot time, in `BuiltinClock`.
const CLOCK_BOOTTIME: u64 = 6;
const CLOCK_REALTIME: u64 = 1;

// Track ids: the machine's own life, and the losses of each CPU.
const TRACK_ROOT: u64 = 0x766d_7472_6169_6c00;
const TRACK_RESIDENCY: u64 = TRACK_ROOT + 1;
const TRACK_MIGRATION: u64 = TRACK_ROOT + 2;
const TRACK_MARKS: u64 = TRACK_ROOT + 3;
const TRACK_LOSS: u64 = TRACK_ROOT + 4;
const TRACK_CPU_LOSS: u64 = TRACK_ROOT + 0x1_0000;

const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;

/// Writes a perfetto trace.
#[derive(Debug)]
pub struct PerfettoWriter<'a, W> {
    out: W,
    metadata: &'a Metadata,
    plans: Vec<Plan>,
    cpus: BTreeMap<u32, Cpu>,
    packet: Message,
    // Slices that are open, by track.
    open: BTreeMap<u64, u32>,
    last: u64,
    begun: bool,
    machine: String,
    uname: Option<String>,
    realtime_ns: Option<(u64, u64)>,
}

#[derive(Debug)]
enum Plan {
    Typed(Typed),
    Generic,
}

#[derive(Debug, Default)]
struct Cpu {
    events: Message,
    lost: bool,
    last: Option<u64>,
    missed: u64,
    written: u64,
}

impl<'a, W: Write> PerfettoWriter<'a, W> {
    /// A trace of the kernel that `metadata` describes.
    #[must_use]
    pub fn new(out: W, metadata: &'a Metadata, machine: &str) -> Self {
        let plans = metadata
            .events
            .events()
            .iter()
            .map(|event| Typed::of(event).map_or(Plan::Generic, Plan::Typed))
            .collect();
        Self {
            out,
            metadata,
            plans,
            cpus: BTreeMap::new(),
            packet: Message::default(),
            open: BTreeMap::new(),
            last: 0,
            begun: false,
            machine: machine.to_owned(),
            uname: None,
            realtime_ns: None,
        }
    }

    /// The traced machine's `uname -a`-like line: perfetto reads task states by the kernel's release in it.
    #[must_use]
    pub fn with_uname(mut self, uname: &str) -> Self {
        self.uname = Some(uname.to_owned());
        self
    }

    /// What time of day a time of the trace was: (trace, nanoseconds since 1970).
    #[must_use]
    pub fn with_realtime(mut self, trace_ns: u64, unix_ns: u64) -> Self {
        self.realtime_ns = Some((trace_ns, unix_ns));
        self
    }

    /// Writes one event.
    pub fn event(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        self.begin(entry.timestamp)?;
        self.last = self.last.max(entry.timestamp);
        if entry.cpu >= MAX_CPUS {
            return Ok(());
        }
        if entry.missed != Missed::None {
            self.loss(entry)?;
        }
        let index = self.metadata.events.index(entry.type_id);
        let event = index.and_then(|index| self.metadata.events.events().get(index));
        let plan = index.and_then(|index| self.plans.get(index));
        let cpu = self.cpus.entry(entry.cpu).or_default();
        cpu.last = Some(entry.timestamp);
        cpu.written += 1;
        let message = &mut cpu.events;
        let nested = message.begin(2);
        message.uint(1, entry.timestamp);
        let pid = event
            .and_then(|event| {
                event
                    .field("common_pid")?
                    .number(event.endian(), entry.payload)
            })
            .unwrap_or(0);
        message.uint(2, pid & 0xffff_ffff);
        match (event, plan) {
            (Some(event), Some(Plan::Typed(typed))) => {
                write_typed(message, event, typed, entry.payload)
            }
            (Some(event), _) => write_generic(message, event, entry.payload),
            (None, _) => {
                let generic = message.begin(327);
                message.text(1, format!("unknown_{}", entry.type_id).as_bytes());
                message.end(generic);
            }
        }
        message.end(nested);
        if message.len() >= BUNDLE_BYTES {
            self.flush_cpu(entry.cpu)?;
        }
        Ok(())
    }

    /// Writes what happened to the machine.
    pub fn note(&mut self, note: &Note) -> io::Result<()> {
        self.begin(note.timestamp)?;
        self.last = self.last.max(note.timestamp);
        let at = note.timestamp;
        match &note.kind {
            NoteKind::ResidencyBegin { host, cause } => {
                // One host at a time: a residency that nobody ended ends where the next begins.
                self.close(TRACK_RESIDENCY, at)?;
                self.slice(TRACK_RESIDENCY, SLICE_BEGIN, at, host, &[("cause", cause)])
            }
            NoteKind::ResidencyEnd { .. } => self.close(TRACK_RESIDENCY, at),
            NoteKind::MigrationBegin { from, to } => {
                let name = format!("migration {from} -> {to}");
                self.slice(
                    TRACK_MIGRATION,
                    SLICE_BEGIN,
                    at,
                    &name,
                    &[("from", from), ("to", to)],
                )
            }
            NoteKind::MigrationEnd { outcome } => {
                self.slice(TRACK_MIGRATION, INSTANT, at, outcome, &[])?;
                self.close(TRACK_MIGRATION, at)
            }
            NoteKind::BlackoutBegin => {
                self.slice(TRACK_MIGRATION, SLICE_BEGIN, at, "blackout", &[])
            }
            NoteKind::BlackoutEnd { .. } => {
                self.close_one(TRACK_MIGRATION, at)?;
                self.slice(
                    TRACK_MIGRATION,
                    INSTANT,
                    at,
                    &format!("running again: {}", note.kind.text()),
                    &[],
                )
            }
            NoteKind::Mark { text } => self.slice(TRACK_MARKS, INSTANT, at, text, &[]),
            NoteKind::Loss { cause, .. } => self.slice(
                TRACK_LOSS,
                INSTANT,
                at,
                &format!("loss: {}", note.kind.text()),
                &[("cause", cause)],
            ),
        }
    }

    /// Ends the trace and gives the output back.
    pub fn finish(mut self) -> io::Result<W> {
        self.begin(self.last)?;
        let cpus: Vec<u32> = self.cpus.keys().copied().collect();
        for cpu in cpus {
            self.flush_cpu(cpu)?;
        }
        let open: Vec<u64> = self.open.keys().copied().collect();
        for track in open {
            self.close(track, self.last)?;
        }
        self.stats(2)?;
        self.out.flush()?;
        Ok(self.out)
    }

    /// The packets that come first.
    fn begin(&mut self, timestamp: u64) -> io::Result<()> {
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        self.last = timestamp;
        // The clock: everything is boot time.
        self.packet.uint(10, SEQUENCE);
        let snapshot = self.packet.begin(6);
        let (trace, unix) = self.realtime_ns.unwrap_or((timestamp, 0));
        for (clock, time) in [(CLOCK_BOOTTIME, trace), (CLOCK_REALTIME, unix)] {
            if clock == CLOCK_REALTIME && unix == 0 {
                continue;
            }
            let nested = self.packet.begin(1);
            self.packet.uint(1, clock);
            self.packet.uint(2, time);
            self.packet.end(nested);
        }
        self.packet.uint(2, CLOCK_BOOTTIME);
        self.packet.end(snapshot);
        self.flush_packet()?;

        let info = self.packet.begin(45);
        if let Some(uname) = self.uname.take() {
            let mut words = uname.split_whitespace();
            let utsname = self.packet.begin(1);
            self.packet
                .text(1, words.next().unwrap_or("Linux").as_bytes());
            let second = words.next().unwrap_or_default();
            // `uname -a` has the node name second; trace-cmd's line too.
            let release = words.next().unwrap_or(second);
            self.packet.text(3, release.as_bytes());
            if let Some(machine) = words.next_back() {
                self.packet.text(4, machine.as_bytes());
            }
            self.packet.end(utsname);
        }
        let machine = std::mem::take(&mut self.machine);
        self.packet.text(17, machine.as_bytes());
        self.packet.end(info);
        self.flush_packet()?;

        self.process_tree(timestamp)?;
        for (track, name) in [
            (TRACK_ROOT, "vmtrail"),
            (TRACK_RESIDENCY, "residency"),
            (TRACK_MIGRATION, "migration"),
            (TRACK_MARKS, "marks"),
            (TRACK_LOSS, "losses"),
        ] {
            self.track(track, name)?;
        }
        self.stats(1)
    }

    fn process_tree(&mut self, timestamp: u64) -> io::Result<()> {
        self.packet.uint(8, timestamp);
        self.packet.uint(10, SEQUENCE);
        let tree = self.packet.begin(2);
        let metadata = self.metadata;
        for (pid, name) in metadata.comms.iter() {
            let group = metadata.tgids.get(pid).unwrap_or(pid);
            if group == pid {
                let process = self.packet.begin(1);
                self.packet.int(1, pid.into());
                self.packet.text(3, name);
                self.packet.end(process);
            } else {
                let thread = self.packet.begin(2);
                self.packet.int(1, pid.into());
                self.packet.text(2, name);
                self.packet.int(3, group.into());
                self.packet.end(thread);
            }
        }
        self.packet.end(tree);
        self.flush_packet()
    }

    fn track(&mut self, track: u64, name: &str) -> io::Result<()> {
        self.packet.uint(10, SEQUENCE);
        let descriptor = self.packet.begin(60);
        self.packet.uint(1, track);
        self.packet.text(2, name.as_bytes());
        if track != TRACK_ROOT {
            self.packet.uint(5, TRACK_ROOT);
        }
        self.packet.end(descriptor);
        self.flush_packet()
    }

    /// Totals of each CPU; perfetto compares the first with the last.
    fn stats(&mut self, phase: u64) -> io::Result<()> {
        let stats = self.packet.begin(34);
        self.packet.uint(1, phase);
        for (cpu, state) in &self.cpus {
            let nested = self.packet.begin(2);
            self.packet.uint(1, u64::from(*cpu));
            self.packet.uint(3, state.missed);
            self.packet.uint(9, state.written);
            self.packet.end(nested);
        }
        self.packet.end(stats);
        self.flush_packet()
    }

    /// Events were lost before `entry`: the gap is drawn from the event before it, and the number stands in it.
    fn loss(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        let track = TRACK_CPU_LOSS + u64::from(entry.cpu);
        self.flush_cpu(entry.cpu)?;
        let known = self
            .cpus
            .get(&entry.cpu)
            .is_some_and(|cpu| cpu.missed > 0 || cpu.lost);
        if !known {
            self.track(track, &format!("lost events, CPU {}", entry.cpu))?;
        }
        let cpu = self.cpus.entry(entry.cpu).or_default();
        cpu.lost = true;
        let name = match entry.missed {
            Missed::Count(count) => {
                cpu.missed = cpu.missed.saturating_add(count);
                format!("{count} events lost")
            }
            _ => "events lost, number unknown".to_owned(),
        };
        let from = cpu.last.unwrap_or(entry.timestamp).min(entry.timestamp);
        self.slice(track, SLICE_BEGIN, from, &name, &[])?;
        self.close(track, entry.timestamp)
    }

    fn slice(
        &mut self,
        track: u64,
        kind: u64,
        timestamp: u64,
        name: &str,
        annotations: &[(&str, &str)],
    ) -> io::Result<()> {
        if kind == SLICE_BEGIN {
            *self.open.entry(track).or_default() += 1;
        }
        self.packet.uint(8, timestamp);
        self.packet.uint(10, SEQUENCE);
        let event = self.packet.begin(11);
        self.packet.uint(9, kind);
        self.packet.uint(11, track);
        self.packet.text(22, b"vmtrail");
        if !name.is_empty() {
            self.packet.text(23, name.as_bytes());
        }
        for (key, value) in annotations {
            let annotation = self.packet.begin(4);
            self.packet.text(10, key.as_bytes());
            self.packet.text(6, value.as_bytes());
            self.packet.end(annotation);
        }
        self.packet.end(event);
        self.flush_packet()
    }

    /// Ends the innermost open slice of a track; nothing if none is open, for an end without a beginning would end
    /// somebody else's slice.
    fn close_one(&mut self, track: u64, timestamp: u64) -> io::Result<()> {
        match self.open.get_mut(&track) {
            Some(open) if *open > 0 => {
                *open -= 1;
                self.slice(track, SLICE_END, timestamp, "", &[])
            }
            _ => Ok(()),
        }
    }

    fn close(&mut self, track: u64, timestamp: u64) -> io::Result<()> {
        while self.open.get(&track).is_some_and(|open| *open > 0) {
            self.close_one(track, timestamp)?;
        }
        Ok(())
    }

    /// Writes the bundle of a CPU.
    fn flush_cpu(&mut self, number: u32) -> io::Result<()> {
        let Some(cpu) = self.cpus.get_mut(&number) else {
            return Ok(());
        };
        if cpu.events.is_empty() {
            return Ok(());
        }
        let mut head = Message::default();
        head.uint(1, u64::from(number));
        if std::mem::take(&mut cpu.lost) {
            head.uint(3, 1);
        }
        let bundle = head.len() + cpu.events.len();
        let mut packet = Message::default();
        packet.uint(10, SEQUENCE);
        packet.varint(1 << 3 | 2);
        packet.varint(u64::try_from(bundle).unwrap_or(0));
        let mut outer = Message::default();
        outer.varint(1 << 3 | 2);
        outer.varint(u64::try_from(packet.len() + bundle).unwrap_or(0));
        for part in [
            outer.bytes(),
            packet.bytes(),
            head.bytes(),
            cpu.events.bytes(),
        ] {
            self.out.write_all(part)?;
        }
        cpu.events.clear();
        Ok(())
    }

    fn flush_packet(&mut self) -> io::Result<()> {
        let mut outer = Message::default();
        outer.varint(1 << 3 | 2);
        outer.varint(u64::try_from(self.packet.len()).unwrap_or(0));
        self.out.write_all(outer.bytes())?;
        self.out.write_all(self.packet.bytes())?;
        self.packet.clear();
        Ok(())
    }
}

fn write_typed(message: &mut Message, event: &EventFormat, typed: &Typed, payload: &[u8]) {
    let nested = message.begin(typed.message);
    for (field, number, kind) in &typed.fields {
        match (kind, field.value(event.endian(), payload)) {
            (_, Value::Missing) => {}
            (Kind::Text, Value::Text(text)) => {
                message.text(*number, text.get(..MAX_FIELD).unwrap_or(text));
            }
            (Kind::Words, Value::Array(elements)) => {
                for value in elements.iter().take(64) {
                    let value = u64::try_from(value & i128::from(u64::MAX)).unwrap_or(0);
                    message.uint(*number, value);
                }
            }
            (_, value) => {
                if let Some(value) = number_of(value) {
                    message.uint(*number, value);
                }
            }
        }
    }
    message.end(nested);
}

/// Events perfetto has no message for: name and fields.
fn write_generic(message: &mut Message, event: &EventFormat, payload: &[u8]) {
    let nested = message.begin(327);
    message.text(1, event.name().as_bytes());
    for field in event.fields() {
        write_generic_field(message, event, field, payload);
    }
    message.end(nested);
}

fn write_generic_field(message: &mut Message, event: &EventFormat, field: &Field, payload: &[u8]) {
    let nested = message.begin(2);
    message.text(1, field.name.as_bytes());
    match field.value(event.endian(), payload) {
        Value::Text(text) => message.text(3, text.get(..MAX_FIELD).unwrap_or(text)),
        Value::Signed(value) => message.int(4, value),
        Value::Unsigned(value) | Value::Pointer(value) => message.uint(5, value),
        Value::Array(elements) => {
            let mut text = Vec::new();
            for (index, value) in elements.iter().take(MAX_FIELD / 8).enumerate() {
                if index > 0 {
                    text.push(b' ');
                }
                text.extend_from_slice(value.to_string().as_bytes());
            }
            message.text(3, &text);
        }
        Value::Missing => message.text(3, b"<not in the record>"),
    }
    message.end(nested);
}

fn number_of(value: Value<'_>) -> Option<u64> {
    match value {
        Value::Unsigned(value) | Value::Pointer(value) => Some(value),
        Value::Signed(value) => Some(value.cast_unsigned()),
        _ => None,
    }
}
