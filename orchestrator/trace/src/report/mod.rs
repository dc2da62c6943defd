//! The text report: one event a line, in the layout of `trace-cmd report`.
//!
//! ```text
//!  qemu-system-x86-4242  [001]  2526.619427: sched_wakeup:         CPU 0/KVM:4250 [120] CPU:001
//! |<- task, 16 ---->|pid  cpu   seconds      name, 20 and more     what the event says
//! ```
//!
//! People have scripts and eyes trained on this layout, so it is followed to the blank: how trace-cmd 3.1.6 with the
//! plugins of libtraceevent prints a record, that is what [`Reporter`] writes. Where the two of them read a record
//! wrongly (signed fields as unsigned numbers, mostly) the kernel's own reading is printed instead; `tests/peer.rs` lists
//! each.

mod function;
mod handlers;
mod raw;

use std::collections::BTreeMap;

use crate::event_format::{EventFormat, Field};
use crate::metadata::{Comms, Metadata, SymbolCache};
use crate::print_fmt::Environment;
use crate::ring_buffer::Missed;
use crate::text::{
    push_decimal, push_decimal_right, push_decimal_zeroed, push_hex_padded, push_repeated,
    push_short, push_signed, push_text,
};

use self::function::{CallStacks, GraphCall};
use self::handlers::Handler;

/// One record of a CPU, as a report or an export takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The CPU.
    pub cpu: u32,
    /// Time, in units of the trace clock.
    pub timestamp: u64,
    /// The event's `common_type`.
    pub type_id: u16,
    /// The record.
    pub payload: &'a [u8],
    /// Events lost on this CPU right before this one.
    pub missed: Missed,
}

/// How time stamps are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeFormat {
    /// Seconds with six digits, rounded; for clocks that do not count nanoseconds, the bare number.
    #[default]
    Microseconds,
    /// Seconds with nine digits (`trace-cmd report -t`).
    Nanoseconds,
}

/// What is written besides the plain line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportOptions {
    /// Time stamps.
    pub time: TimeFormat,
    /// Fields as numbers instead of the event's own text (`trace-cmd report -R`).
    pub raw: bool,
    /// Interrupt and preemption state behind the CPU (`trace-cmd report -l`, that column only).
    pub latency: bool,
}

/// Turns records into lines.
///
/// It keeps what trace-cmd keeps between lines: names of tasks that `sched_switch` and `sched_wakeup` brought up, the
/// call stack of the function tracer, and an entry of the function graph until it is known whether it is a leaf.
#[derive(Debug)]
pub struct Reporter<'a> {
    metadata: &'a Metadata,
    symbols: SymbolCache<'a>,
    options: ReportOptions,
    events: Vec<EventPlan>,
    learned: Comms,
    tasks: TaskColumn,
    seconds: SecondsColumn,
    stacks: CallStacks<'a>,
    pending: Option<GraphCall>,
}

/// Worked out once for each event: the middle of its lines, where its pid is, and who writes the rest.
#[derive(Debug)]
struct EventPlan {
    heading: Box<[u8]>,
    pid_offset: usize,
    handler: Handler,
}

impl<'a> Reporter<'a> {
    /// A reporter for records of the kernel that `metadata` describes.
    #[must_use]
    pub fn new(metadata: &'a Metadata, options: ReportOptions) -> Self {
        let events = metadata
            .events
            .events()
            .iter()
            .map(|event| EventPlan::new(event, options.raw))
            .collect();
        Self {
            metadata,
            symbols: SymbolCache::new(&metadata.symbols),
            options,
            events,
            learned: Comms::default(),
            tasks: TaskColumn::default(),
            seconds: SecondsColumn::default(),
            stacks: CallStacks::default(),
            pending: None,
        }
    }

    /// Appends the line or lines of one record. Records come in time order over all CPUs.
    ///
    /// An entry of the function graph is held back until the next record (or [`Reporter::finish`]) tells whether the
    /// function called others.
    #[inline]
    pub fn write(&mut self, entry: &Entry<'_>, out: &mut Vec<u8>) {
        if self.pending.is_some() && self.finish_call(entry, out) {
            return;
        }
        write_missed(entry.cpu, entry.missed, out);
        let Some(index) = self.metadata.events.index(entry.type_id) else {
            return self.write_unknown(entry, out);
        };
        let metadata = self.metadata;
        let (Some(event), Some(plan)) =
            (metadata.events.events().get(index), self.events.get(index))
        else {
            return;
        };
        let endian = event.endian();
        let pid = endian
            .u32(entry.payload, plan.pid_offset)
            .unwrap_or(0)
            .cast_signed();
        self.tasks.write(pid, &metadata.comms, &self.learned, out);
        out.extend_from_slice(b" [");
        push_decimal_zeroed(out, u64::from(entry.cpu), 3);
        out.push(b']');
        if self.options.latency {
            write_latency(event, entry.payload, out);
        }
        self.seconds
            .write(metadata, self.options.time, entry.timestamp, out);
        push_text(out, &plan.heading);

        let environment = Environment {
            endian,
            long_size: event.long_size(),
            symbols: &self.symbols,
            printk: &metadata.printk,
        };
        let start = out.len();
        match &plan.handler {
            Handler::Print => match event.program() {
                Ok(program) => program.write(&environment, entry.payload, out),
                Err(_) => raw::write_failed(event, entry.payload, out),
            },
            Handler::GraphEntry(fields) => {
                // The line is complete but for the call itself, which waits for the next record.
                self.pending = GraphCall::new(fields, event, entry, pid);
                if self.pending.is_some() {
                    return;
                }
                raw::write_failed(event, entry.payload, out);
            }
            handler => handler.write(
                &mut handlers::Task {
                    event,
                    environment: &environment,
                    entry,
                    stacks: &mut self.stacks,
                    learned: &mut self.learned,
                    tasks: &mut self.tasks,
                    known: &metadata.comms,
                },
                out,
            ),
        }
        end_line(start, out);
    }

    /// Appends what was held back.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        if let Some(call) = self.pending.take() {
            call.write_nested(&self.symbols, out);
            out.push(b'\n');
        }
    }

    /// Completes the pending call with `entry`; true if that was its return and is thereby done with.
    #[cold]
    fn finish_call(&mut self, entry: &Entry<'_>, out: &mut Vec<u8>) -> bool {
        let Some(call) = self.pending.take() else {
            return false;
        };
        let index = self.metadata.events.index(entry.type_id);
        let exit = index.and_then(|index| {
            match (
                self.events.get(index).map(|plan| &plan.handler),
                self.metadata.events.events().get(index),
            ) {
                (Some(Handler::GraphExit(fields)), Some(event)) => {
                    call.returned_by(fields, event, self.events.get(index)?.pid_offset, entry)
                }
                _ => None,
            }
        });
        match exit {
            Some(duration) => call.write_leaf(&self.symbols, duration, out),
            None => call.write_nested(&self.symbols, out),
        }
        out.push(b'\n');
        exit.is_some()
    }

    /// A record whose format is not among the metadata: its bytes, and nothing made up.
    #[cold]
    fn write_unknown(&mut self, entry: &Entry<'_>, out: &mut Vec<u8>) {
        // All formats begin with the same common fields (`trace_define_common_fields`), pid at 4.
        let endian = self.metadata.layout.endian();
        let pid = endian.u32(entry.payload, 4).unwrap_or(0).cast_signed();
        self.tasks
            .write(pid, &self.metadata.comms, &self.learned, out);
        out.extend_from_slice(b" [");
        push_decimal_zeroed(out, u64::from(entry.cpu), 3);
        out.push(b']');
        self.seconds
            .write(self.metadata, self.options.time, entry.timestamp, out);
        out.extend_from_slice(b" unknown event ");
        push_decimal(out, u64::from(entry.type_id));
        out.extend_from_slice(b": raw");
        for byte in entry.payload.iter().take(raw::MAX_RAW_BYTES) {
            out.push(b' ');
            push_hex_padded(out, u64::from(*byte), 2);
        }
        out.push(b'\n');
    }
}

impl EventPlan {
    fn new(event: &EventFormat, raw: bool) -> Self {
        let mut heading = Vec::new();
        heading.push(b' ');
        heading.extend_from_slice(event.name().as_bytes());
        heading.extend_from_slice(b": ");
        push_repeated(
            &mut heading,
            b' ',
            20_usize.saturating_sub(event.name().len()),
        );
        Self {
            heading: heading.into(),
            pid_offset: event
                .field("common_pid")
                .map_or(4, |field: &Field| field.offset as usize),
            handler: if raw {
                Handler::Raw
            } else {
                Handler::of(event)
            },
        }
    }
}

/// One newline at the end, whether or not the text brought one.
#[inline]
fn end_line(start: usize, out: &mut Vec<u8>) {
    if out.len() > start && out.last() == Some(&b'\n') {
        return;
    }
    out.push(b'\n');
}

pub(crate) fn write_missed(cpu: u32, missed: Missed, out: &mut Vec<u8>) {
    let count = match missed {
        Missed::None => return,
        Missed::Unknown => None,
        Missed::Count(count) => Some(count),
    };
    out.extend_from_slice(b"CPU:");
    push_decimal(out, u64::from(cpu));
    out.extend_from_slice(b" [");
    if let Some(count) = count {
        push_decimal(out, count);
        out.push(b' ');
    }
    out.extend_from_slice(b"EVENTS DROPPED]\n");
}

/// `TRACE_FLAG_*` of `include/linux/trace_events.h` and the preemption count, as the kernel's own column.
fn write_latency(event: &EventFormat, payload: &[u8], out: &mut Vec<u8>) {
    const IRQS_OFF: u64 = 0x01;
    const IRQS_NOSUPPORT: u64 = 0x02;
    const NEED_RESCHED: u64 = 0x04;
    const HARDIRQ: u64 = 0x08;
    const SOFTIRQ: u64 = 0x10;
    let number = |name| {
        event
            .field(name)
            .and_then(|field| field.number(event.endian(), payload))
            .unwrap_or(0)
    };
    let flags = number("common_flags");
    let preempt = number("common_preempt_count");
    out.push(match flags {
        flags if flags & IRQS_OFF != 0 => b'd',
        flags if flags & IRQS_NOSUPPORT != 0 => b'X',
        _ => b'.',
    });
    out.push(if flags & NEED_RESCHED != 0 {
        b'N'
    } else {
        b'.'
    });
    out.push(match (flags & HARDIRQ != 0, flags & SOFTIRQ != 0) {
        (true, true) => b'H',
        (true, false) => b'h',
        (false, true) => b's',
        (false, false) => b'.',
    });
    for digit in [preempt & 0xf, preempt >> 4 & 0xf] {
        if digit == 0 {
            out.push(b'.');
        } else {
            crate::text::push_hex(out, digit);
        }
    }
}

/// `%16s-%-5d`, remembered for the tasks seen last.
#[derive(Debug)]
struct TaskColumn {
    slots: Vec<TaskSlot>,
}

#[derive(Clone, Debug)]
struct TaskSlot {
    pid: i32,
    used: u8,
    text: [u8; TASK_SLOT],
}

/// A name of 15 bytes and a pid of 7 digits fit; longer ones are written anew each time.
const TASK_SLOT: usize = 40;
const TASK_SLOTS: usize = 1024;

impl Default for TaskColumn {
    fn default() -> Self {
        Self {
            slots: vec![
                TaskSlot {
                    pid: 0,
                    used: 0,
                    text: [0; TASK_SLOT]
                };
                TASK_SLOTS
            ],
        }
    }
}

impl TaskColumn {
    #[inline]
    fn write(&mut self, pid: i32, known: &Comms, learned: &Comms, out: &mut Vec<u8>) {
        let Some(slot) = self.slots.get_mut(Self::slot(pid)) else {
            return;
        };
        if slot.used == 0 || slot.pid != pid {
            let name = known
                .get(pid)
                .or_else(|| learned.get(pid))
                .unwrap_or(b"<...>");
            let start = out.len();
            push_repeated(out, b' ', 16_usize.saturating_sub(name.len()));
            out.extend_from_slice(name);
            out.push(b'-');
            let at = out.len();
            push_signed(out, i64::from(pid));
            let digits = out.len() - at;
            push_repeated(out, b' ', 5_usize.saturating_sub(digits));
            let text = out.get(start..).unwrap_or_default();
            if let (Some(copy), Ok(used)) =
                (slot.text.get_mut(..text.len()), u8::try_from(text.len()))
            {
                copy.copy_from_slice(text);
                slot.pid = pid;
                slot.used = used;
            }
            return;
        }
        push_short(out, &slot.text, usize::from(slot.used));
    }

    /// Forgets the column of a task whose name has become known.
    fn forget(&mut self, pid: i32) {
        if let Some(slot) = self.slots.get_mut(Self::slot(pid)) {
            slot.used = 0;
        }
    }

    fn slot(pid: i32) -> usize {
        pid.cast_unsigned() as usize % TASK_SLOTS
    }
}

/// The time column. Seconds change seldom; their digits are kept.
#[derive(Debug, Default)]
struct SecondsColumn {
    seconds: u64,
    text: Vec<u8>,
}

impl SecondsColumn {
    #[inline]
    fn write(
        &mut self,
        metadata: &Metadata,
        format: TimeFormat,
        timestamp: u64,
        out: &mut Vec<u8>,
    ) {
        if !metadata.clock.is_nanoseconds() {
            push_decimal_right(out, timestamp, 12);
            out.push(b':');
            return;
        }
        let (divisor, digits, value) = match format {
            TimeFormat::Microseconds => (1_000_000, 6, timestamp.saturating_add(500) / 1000),
            TimeFormat::Nanoseconds => (1_000_000_000, 9, timestamp),
        };
        let seconds = value / divisor;
        if self.text.is_empty() || seconds != self.seconds {
            self.seconds = seconds;
            self.text.clear();
            self.text.push(b' ');
            push_decimal_right(&mut self.text, seconds, 5);
            self.text.push(b'.');
        }
        push_text(out, &self.text);
        push_decimal_zeroed(out, value % divisor, digits);
        out.push(b':');
    }
}

/// How often each event occurs: name, system and count, most frequent first.
#[must_use]
pub fn count_table(metadata: &Metadata, counts: &BTreeMap<u16, u64>) -> Vec<(String, u64)> {
    let mut table: Vec<(String, u64)> = counts
        .iter()
        .map(|(id, count)| {
            let name = metadata.events.get(*id).map_or_else(
                || format!("unknown:{id}"),
                |event| format!("{}:{}", event.system(), event.name()),
            );
            (name, *count)
        })
        .collect();
    table.sort_by(|left, right| right.1.cmp(&left.1).then_with(|| left.0.cmp(&right.0)));
    table
}
