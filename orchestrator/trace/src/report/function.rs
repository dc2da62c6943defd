//! The function tracer's lines: calls indented by their callers, and the function graph.

use crate::event_format::{EventFormat, Field};
use crate::metadata::SymbolCache;
use crate::text::{push_decimal, push_decimal_zeroed, push_hex, push_repeated};

use super::Entry;

/// Deepest call stack kept for indentation; the kernel's own stacks are far shallower.
const MAX_STACK: usize = 1000;

/// Most CPUs with a call stack of their own.
const MAX_CPUS: usize = 8192;

/// For each CPU, the functions on its stack as far as caller and callee names tell.
#[derive(Debug, Default)]
pub(super) struct CallStacks<'a> {
    stacks: Vec<Vec<Option<&'a [u8]>>>,
}

impl<'a> CallStacks<'a> {
    /// The depth of `function` when called by `parent` on `cpu`.
    ///
    /// This is the guess of libtraceevent's function plugin, kept as it is, with its memory of deeper entries that are
    /// long gone: the indentation is part of what a report is compared by.
    pub(super) fn depth(
        &mut self,
        cpu: u32,
        parent: &'a [u8],
        function: Option<&'a [u8]>,
    ) -> usize {
        const BLOCK: usize = 10;
        let cpu = cpu as usize;
        if cpu >= MAX_CPUS {
            return 0;
        }
        if self.stacks.len() <= cpu {
            self.stacks.resize_with(cpu + 1, Vec::new);
        }
        let Some(stack) = self.stacks.get_mut(cpu) else {
            return 0;
        };
        let put = |stack: &mut Vec<Option<&'a [u8]>>, at: usize, name: Option<&'a [u8]>| {
            let Some(name) = name else { return };
            if at >= stack.len() && stack.len() < MAX_STACK {
                stack.resize(stack.len() + BLOCK, None);
            }
            if let Some(slot) = stack.get_mut(at) {
                *slot = Some(name);
            }
        };
        let found = stack
            .iter()
            .take_while(|name| name.is_some())
            .position(|name| *name == Some(parent));
        match found {
            Some(index) => {
                put(stack, index + 1, function);
                index
            }
            None => {
                put(stack, 0, Some(parent));
                put(stack, 1, function);
                0
            }
        }
    }
}

/// Fields of `funcgraph_entry`.
#[derive(Clone, Debug)]
pub(super) struct GraphEntryFields {
    pub(super) function: Field,
    pub(super) depth: Field,
}

/// Fields of `funcgraph_exit`.
#[derive(Clone, Debug)]
pub(super) struct GraphExitFields {
    pub(super) function: Field,
    pub(super) depth: Field,
    pub(super) calltime: Field,
    pub(super) rettime: Field,
}

impl GraphExitFields {
    /// `None` for a record that ends before its times: no duration is made up.
    fn duration(&self, event: &EventFormat, payload: &[u8]) -> Option<u64> {
        let endian = event.endian();
        let (call, ret) = (
            self.calltime.number(endian, payload)?,
            self.rettime.number(endian, payload)?,
        );
        Some(ret.wrapping_sub(call))
    }
}

/// A call whose line is written but for what follows the event's name.
#[derive(Debug)]
pub(super) struct GraphCall {
    function: u64,
    depth: u64,
    pid: i32,
}

impl GraphCall {
    pub(super) fn new(
        fields: &GraphEntryFields,
        event: &EventFormat,
        entry: &Entry<'_>,
        pid: i32,
    ) -> Option<Self> {
        Some(Self {
            function: fields.function.number(event.endian(), entry.payload)?,
            depth: fields.depth.number(event.endian(), entry.payload)?,
            pid,
        })
    }

    /// The time the call took, if `entry` is its return: same function, same task.
    pub(super) fn returned_by(
        &self,
        fields: &GraphExitFields,
        event: &EventFormat,
        pid_offset: usize,
        entry: &Entry<'_>,
    ) -> Option<u64> {
        let endian = event.endian();
        let pid = endian.u32(entry.payload, pid_offset)?.cast_signed();
        let function = fields.function.number(endian, entry.payload)?;
        if pid != self.pid || function != self.function {
            return None;
        }
        fields.duration(event, entry.payload)
    }

    pub(super) fn write_leaf(&self, symbols: &SymbolCache<'_>, duration: u64, out: &mut Vec<u8>) {
        write_duration(duration, out);
        self.write_function(symbols, out);
        out.extend_from_slice(b"();");
    }

    pub(super) fn write_nested(&self, symbols: &SymbolCache<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"             |  ");
        self.write_function(symbols, out);
        out.extend_from_slice(b"() {");
    }

    fn write_function(&self, symbols: &SymbolCache<'_>, out: &mut Vec<u8>) {
        write_indent(self.depth, out);
        match symbols.find(self.function) {
            Some(symbol) => out.extend_from_slice(symbol.name),
            None => push_hex(out, self.function),
        }
    }
}

/// `funcgraph_exit` on its own: the end of a call that called others.
pub(super) fn write_exit(
    fields: &GraphExitFields,
    event: &EventFormat,
    entry: &Entry<'_>,
    out: &mut Vec<u8>,
) -> bool {
    let Some(duration) = fields.duration(event, entry.payload) else {
        return false;
    };
    let Some(depth) = fields.depth.number(event.endian(), entry.payload) else {
        return false;
    };
    write_duration(duration, out);
    write_indent(depth, out);
    out.push(b'}');
    true
}

/// Two blanks a level; a depth that no stack can have is a lie and is cut.
fn write_indent(depth: u64, out: &mut Vec<u8>) {
    let depth = usize::try_from(depth).unwrap_or(usize::MAX).min(MAX_STACK);
    push_repeated(out, b' ', depth * 2);
}

/// The overhead sign and the duration column, to the bar.
fn write_duration(duration: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(match duration {
        1_000_000_001.. => b"$ ",
        1_000_001.. => b"# ",
        100_001.. => b"! ",
        10_001.. => b"+ ",
        _ => b"  ",
    });
    let start = out.len();
    push_decimal(out, duration / 1000);
    let digits = out.len() - start;
    if digits < 7 {
        out.push(b'.');
        push_decimal_zeroed(out, duration % 1000, 3);
        // Seven digits in all.
        out.truncate((start + 8).min(out.len()));
    }
    let length = out.len() - start;
    out.extend_from_slice(b" us ");
    push_repeated(out, b' ', 7_usize.saturating_sub(length));
    out.extend_from_slice(b"|  ");
}
