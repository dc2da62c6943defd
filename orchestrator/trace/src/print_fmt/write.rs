//! Running a compiled print format, and `trace_printk`'s binary records.

use super::expr::{Expr, Function, Place, Table};
use super::pointer::{Pointee, write_pointer};
use super::printf::{self, Amount, Conversion, MAX_WIDTH, Piece, Shape, Spec};
use super::{Environment, Part, Program};
use crate::event_format::read_unsigned;
use crate::text::{
    push_decimal, push_hex, push_hex_padded, push_short, push_signed, push_text, until_nul,
};

/// Stands where a value reaches beyond its record or cannot be worked out: visible, and never taken for a number.
const NOT_THERE: &[u8] = b"<not in the record>";

/// Most bytes shown of one `%s`, hex dump or array. Nothing in a record is longer than a page.
const MAX_ELEMENTS: usize = 1 << 16;

impl Program {
    /// Appends the event's text to `out`.
    pub(crate) fn write(
        &self,
        environment: &Environment<'_, '_>,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) {
        for part in &self.parts {
            match part {
                Part::Short { text, length } => push_short(out, text, usize::from(*length)),
                Part::Literal(text) => out.extend_from_slice(text),
                Part::Conversion {
                    spec,
                    plain: true,
                    value,
                    ..
                } => {
                    write_plain(environment, payload, spec, value, out);
                }
                Part::Conversion {
                    spec,
                    value,
                    width,
                    precision,
                    ..
                } => {
                    let number = |expr: &Option<Expr>| {
                        expr.as_ref()
                            .and_then(|expr| expr.evaluate(environment.endian, payload))
                    };
                    let shape = shape(spec, number(width), number(precision));
                    write_shaped(environment, payload, spec, value, shape, out);
                }
            }
        }
    }
}

/// Width and precision with the arguments for `*` put in.
fn shape(spec: &Spec, width: Option<u64>, precision: Option<u64>) -> Shape {
    let int = |value: u64| {
        let value = u32::try_from(value & 0xffff_ffff)
            .unwrap_or(0)
            .cast_signed();
        i64::from(value)
    };
    let bounded = |value: u64| usize::try_from(value.min(u64::from(MAX_WIDTH))).unwrap_or(0);
    let mut shape = Shape {
        left: spec.left,
        ..Shape::default()
    };
    match spec.width {
        Some(Amount::Given(width)) => shape.width = bounded(u64::from(width)),
        Some(Amount::Argument) => {
            let width = width.map_or(0, int);
            shape.left |= width < 0;
            shape.width = bounded(width.unsigned_abs());
        }
        None => {}
    }
    shape.precision = match spec.precision {
        Some(Amount::Given(precision)) => Some(bounded(u64::from(precision))),
        Some(Amount::Argument) => {
            // Not bounded by MAX_WIDTH: as the precision of a string it only ever shortens.
            precision
                .map(int)
                .and_then(|precision| usize::try_from(precision).ok())
        }
        None => None,
    };
    shape
}

#[inline]
fn write_plain(
    environment: &Environment<'_, '_>,
    payload: &[u8],
    spec: &Spec,
    value: &Expr,
    out: &mut Vec<u8>,
) {
    match spec.conversion {
        Conversion::Signed | Conversion::Unsigned | Conversion::Hex { upper: false } => {
            let Some(number) = value.evaluate(environment.endian, payload) else {
                return write_unprintable(environment, payload, value, out);
            };
            let (magnitude, negative) =
                spec.cut(number, environment.long_size == crate::LongSize::Four);
            match spec.conversion {
                Conversion::Hex { .. } => push_hex(out, magnitude),
                _ => {
                    if negative {
                        out.push(b'-');
                    }
                    push_decimal(out, magnitude);
                }
            }
        }
        Conversion::Str => write_text(environment, payload, value, out),
        _ => write_shaped(environment, payload, spec, value, Shape::default(), out),
    }
}

fn write_shaped(
    environment: &Environment<'_, '_>,
    payload: &[u8],
    spec: &Spec,
    value: &Expr,
    shape: Shape,
    out: &mut Vec<u8>,
) {
    let start = out.len();
    match &spec.conversion {
        Conversion::Str => {
            write_text(environment, payload, value, out);
            printf::shape_written(out, start, shape);
        }
        Conversion::Char => {
            match value.evaluate(environment.endian, payload) {
                Some(number) => out.push(u8::try_from(number & 0xff).unwrap_or(0)),
                None => out.extend_from_slice(NOT_THERE),
            }
            printf::shape_written(
                out,
                start,
                Shape {
                    precision: None,
                    ..shape
                },
            );
        }
        Conversion::Pointer(extension) => {
            let pointee = pointee(environment, payload, value);
            write_pointer(environment, extension, shape, pointee, out);
        }
        _ => {
            let Some(number) = value.evaluate(environment.endian, payload) else {
                return write_unprintable(environment, payload, value, out);
            };
            let (magnitude, negative) =
                spec.cut(number, environment.long_size == crate::LongSize::Four);
            let shape = Shape {
                precision: shape
                    .precision
                    .map(|precision| precision.min(MAX_WIDTH as usize)),
                ..shape
            };
            printf::write_integer(out, spec, shape, magnitude, negative);
        }
    }
}

/// Where a number was wanted and none can be had: the text if it is one, else the notice.
#[cold]
fn write_unprintable(
    environment: &Environment<'_, '_>,
    payload: &[u8],
    value: &Expr,
    out: &mut Vec<u8>,
) {
    if value.number_type().is_some() {
        out.extend_from_slice(NOT_THERE);
    } else {
        write_text(environment, payload, value, out);
    }
}

/// What `%p…` is given: bytes of the record where the argument points into it, else an address.
fn pointee<'a>(environment: &Environment<'_, '_>, payload: &'a [u8], value: &Expr) -> Pointee<'a> {
    match value {
        Expr::Address { place, .. }
        | Expr::Str(place)
        | Expr::Bitmask(place)
        | Expr::CpuMask(place) => place
            .bytes(environment.endian, payload)
            .map_or(Pointee::Missing, Pointee::Bytes),
        Expr::Choice { condition, yes, no } => {
            match condition.evaluate(environment.endian, payload) {
                Some(0) => pointee(environment, payload, no),
                Some(_) => pointee(environment, payload, yes),
                None => Pointee::Missing,
            }
        }
        _ => value
            .evaluate(environment.endian, payload)
            .map_or(Pointee::Missing, Pointee::Address),
    }
}

/// An argument of `%s`.
pub(super) fn write_text(
    environment: &Environment<'_, '_>,
    payload: &[u8],
    value: &Expr,
    out: &mut Vec<u8>,
) {
    let endian = environment.endian;
    match value {
        Expr::Text(text) => push_text(out, text),
        Expr::Str(place) | Expr::Address { place, .. } => match place.bytes(endian, payload) {
            Some(bytes) => push_text(out, until_nul(bytes)),
            None => out.extend_from_slice(NOT_THERE),
        },
        Expr::Choice { condition, yes, no } => match condition.evaluate(endian, payload) {
            Some(0) => write_text(environment, payload, no, out),
            Some(_) => write_text(environment, payload, yes, out),
            None => out.extend_from_slice(NOT_THERE),
        },
        Expr::Flags(table) => write_flags(environment, payload, table, out),
        Expr::Symbolic(table) => write_symbolic(environment, payload, table, out),
        Expr::Hex {
            place,
            length,
            spaced,
        } => {
            let Some(bytes) = sized(environment, payload, place, length, 1) else {
                return out.extend_from_slice(NOT_THERE);
            };
            for (index, byte) in bytes.iter().enumerate() {
                if index > 0 && *spaced {
                    out.push(b' ');
                }
                push_hex_padded(out, u64::from(*byte), 2);
            }
        }
        Expr::Array {
            place,
            count,
            element_size,
        } => {
            let size = element_size
                .evaluate(endian, payload)
                .and_then(|size| match size {
                    1 => Some(1),
                    2 => Some(2),
                    4 => Some(4),
                    8 => Some(8),
                    _ => None,
                });
            let bytes = size.and_then(|size| sized(environment, payload, place, count, size));
            let (Some(size), Some(bytes)) = (size, bytes) else {
                return out.extend_from_slice(NOT_THERE);
            };
            out.push(b'{');
            for (index, chunk) in bytes.chunks_exact(size).enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                out.extend_from_slice(b"0x");
                push_hex(out, read_unsigned(endian, chunk, 0, size).unwrap_or(0));
            }
            out.push(b'}');
        }
        Expr::Bitmask(place) => match place.bytes(endian, payload) {
            Some(bytes) => super::pointer::write_bitmask(endian, bytes, out),
            None => out.extend_from_slice(NOT_THERE),
        },
        Expr::CpuMask(place) => match place.bytes(endian, payload) {
            Some(bytes) => super::pointer::write_bit_list(endian, bytes, out),
            None => out.extend_from_slice(NOT_THERE),
        },
        Expr::Call {
            function: Function::DeviceName,
            argument,
        } => {
            match argument.evaluate(endian, payload) {
                Some(device) => {
                    // Linux's dev_t: 12 bits of major number above 20 of minor (`MINORBITS`).
                    push_decimal(out, (device & 0xffff_ffff) >> 20);
                    out.push(b':');
                    push_decimal(out, device & 0xf_ffff);
                }
                None => out.extend_from_slice(NOT_THERE),
            }
        }
        Expr::Load { pointer, .. } => match value.evaluate(endian, payload) {
            Some(address) => match environment.printk.text(address) {
                Some(text) if *pointer => out.extend_from_slice(text),
                _ => push_hex(out, address),
            },
            None => out.extend_from_slice(NOT_THERE),
        },
        Expr::Cast { operand, .. } => write_text(environment, payload, operand, out),
        _ => match value.evaluate(endian, payload) {
            Some(number) => match value.number_type() {
                Some(of) if of.signed => push_signed(out, number.cast_signed()),
                _ => push_decimal(out, number),
            },
            None => out.extend_from_slice(NOT_THERE),
        },
    }
}

/// `count` elements of `size` bytes at `place`; fewer if the record ends before.
fn sized<'a>(
    environment: &Environment<'_, '_>,
    payload: &'a [u8],
    place: &Place,
    count: &Expr,
    size: usize,
) -> Option<&'a [u8]> {
    let bytes = place.bytes(environment.endian, payload)?;
    let count = usize::try_from(count.evaluate(environment.endian, payload)?).ok()?;
    let wanted = count.min(MAX_ELEMENTS).checked_mul(size)?;
    Some(bytes.get(..wanted).unwrap_or(bytes))
}

/// `trace_print_flags_seq` in `kernel/trace/trace_output.c`.
fn write_flags(
    environment: &Environment<'_, '_>,
    payload: &[u8],
    table: &Table,
    out: &mut Vec<u8>,
) {
    let Some(mut flags) = table.value.evaluate(environment.endian, payload) else {
        return out.extend_from_slice(NOT_THERE);
    };
    let mut first = true;
    for (mask, name) in &table.entries {
        if flags & mask != *mask || (*mask == 0 && flags != 0) {
            continue;
        }
        flags &= !mask;
        if !first {
            out.extend_from_slice(&table.delimiter);
        }
        first = false;
        push_text(out, name);
    }
    if flags != 0 {
        if !first {
            out.extend_from_slice(&table.delimiter);
        }
        out.extend_from_slice(b"0x");
        push_hex(out, flags);
    }
}

/// `trace_print_symbols_seq` in `kernel/trace/trace_output.c`.
fn write_symbolic(
    environment: &Environment<'_, '_>,
    payload: &[u8],
    table: &Table,
    out: &mut Vec<u8>,
) {
    let Some(value) = table.value.evaluate(environment.endian, payload) else {
        return out.extend_from_slice(NOT_THERE);
    };
    match table.entries.iter().find(|(known, _)| *known == value) {
        Some((_, name)) => push_text(out, name),
        None => {
            out.extend_from_slice(b"0x");
            push_hex(out, value);
        }
    }
}

/// A `bprint` record: `format` from printk_formats and the arguments as `vbin_printf` packed them: 32-bit words,
/// longs and long longs as two of them, strings in place (`lib/vsprintf.c`).
pub(crate) fn write_bprint(
    environment: &Environment<'_, '_>,
    mut format: &[u8],
    arguments: &[u8],
    out: &mut Vec<u8>,
) {
    let mut reader = Arguments {
        environment,
        bytes: arguments,
        at: 0,
    };
    while let Some((piece, rest)) = printf::next_piece(format) {
        format = rest;
        let spec = match piece {
            Piece::Literal(text) => {
                out.extend_from_slice(text);
                continue;
            }
            Piece::Conversion(spec) => spec,
        };
        let width = matches!(spec.width, Some(Amount::Argument))
            .then(|| reader.number(4))
            .flatten();
        let precision = matches!(spec.precision, Some(Amount::Argument))
            .then(|| reader.number(4))
            .flatten();
        let shape = shape(&spec, width, precision);
        let start = out.len();
        match &spec.conversion {
            Conversion::Str => {
                match reader.text() {
                    Some(text) => out.extend_from_slice(text),
                    None => out.extend_from_slice(NOT_THERE),
                }
                printf::shape_written(out, start, shape);
            }
            Conversion::Char => {
                match reader.number(4) {
                    Some(number) => out.push(u8::try_from(number & 0xff).unwrap_or(0)),
                    None => out.extend_from_slice(NOT_THERE),
                }
                printf::shape_written(
                    out,
                    start,
                    Shape {
                        precision: None,
                        ..shape
                    },
                );
            }
            Conversion::Pointer(extension) => {
                // Symbols and plain pointers are stored as such; what a pointer leads to is printed into the record by
                // the kernel, as a string (since Linux 5.2, "vsprintf: Do not break early boot with probing addresses").
                let deferred = matches!(
                    extension.first(),
                    None | Some(b's' | b'S' | b'f' | b'F' | b'B' | b'x' | b'K')
                );
                if !deferred && reader.looks_like_text() {
                    match reader.text() {
                        Some(text) => out.extend_from_slice(text),
                        None => out.extend_from_slice(NOT_THERE),
                    }
                    printf::shape_written(out, start, shape);
                } else {
                    let long = environment.long_size.bytes();
                    let pointee = reader
                        .number(long)
                        .map_or(Pointee::Missing, Pointee::Address);
                    write_pointer(environment, extension, shape, pointee, out);
                }
            }
            _ => {
                let long = environment.long_size.bytes();
                let size = match spec.length {
                    printf::Length::Long => long,
                    printf::Length::LongLong => 8,
                    _ => 4,
                };
                match reader.number(size) {
                    Some(number) => {
                        let (magnitude, negative) = spec.cut(number, long == 4);
                        printf::write_integer(out, &spec, shape, magnitude, negative);
                    }
                    None => out.extend_from_slice(NOT_THERE),
                }
            }
        }
    }
}

struct Arguments<'a, 'm> {
    environment: &'a Environment<'a, 'm>,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Arguments<'a, '_> {
    fn number(&mut self, size: usize) -> Option<u64> {
        let at = self.at.checked_add(3)? & !3;
        let value = read_unsigned(self.environment.endian, self.bytes, at, size)?;
        self.at = at + size;
        Some(value)
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let rest = self.bytes.get(self.at..).filter(|rest| !rest.is_empty())?;
        let text = until_nul(rest);
        self.at += text.len() + 1;
        Some(text)
    }

    fn looks_like_text(&self) -> bool {
        self.bytes
            .get(self.at)
            .is_some_and(|byte| (0x20..0x7f).contains(byte))
    }
}
