//! The conversions of `printk`: numbers and strings as C prints them, and the shape of a conversion specification.

use crate::text::{Digits, push_repeated};

/// Widest field and longest precision obeyed. A width comes from the guest and is allocated; the kernel's own limit is
/// 24 bits (`FIELD_WIDTH_MAX` in `lib/vsprintf.c`), but a line of trace has no use for more than this.
pub(crate) const MAX_WIDTH: u32 = 1024;

/// A number given in the format, or taken from the arguments (`*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amount {
    Given(u32),
    Argument,
}

/// How wide an integer argument is: the C promotions of `%hhd` … `%lld`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Char,
    Short,
    Int,
    Long,
    LongLong,
}

/// What is to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Conversion {
    Signed,
    Unsigned,
    Hex {
        upper: bool,
    },
    Octal,
    Char,
    Str,
    /// `%p`; the letters and digits that follow it say what it points to.
    Pointer(Box<[u8]>),
}

/// One conversion specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) left: bool,
    pub(crate) zero: bool,
    pub(crate) plus: bool,
    pub(crate) space: bool,
    pub(crate) alternate: bool,
    pub(crate) width: Option<Amount>,
    pub(crate) precision: Option<Amount>,
    pub(crate) length: Length,
    pub(crate) conversion: Conversion,
}

/// A piece of a format string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// Literal bytes (may be part of a longer literal).
    Literal(&'a [u8]),
    /// `%…`.
    Conversion(Spec),
}

impl Spec {
    /// Nothing but the letter: no flags, width or precision.
    pub(crate) fn is_plain(&self) -> bool {
        !(self.left || self.zero || self.plus || self.space || self.alternate)
            && self.width.is_none()
            && self.precision.is_none()
    }

    /// `value` cut to the argument's size and extended again, as C's varargs do.
    #[inline]
    pub(crate) fn cut(&self, value: u64, long_is_4: bool) -> (u64, bool) {
        let bits = match self.length {
            Length::Char => 8,
            Length::Short => 16,
            Length::Int => 32,
            Length::Long if long_is_4 => 32,
            Length::Long | Length::LongLong => 64,
        };
        cut(value, bits, matches!(self.conversion, Conversion::Signed))
    }
}

/// The low `bits` of `value`: magnitude, and whether it is negative.
#[inline]
pub(crate) fn cut(value: u64, bits: u32, signed: bool) -> (u64, bool) {
    let shift = 64 - bits;
    let top = value << shift;
    if signed && top >> 63 == 1 {
        let negative = top.cast_signed() >> shift;
        (negative.unsigned_abs(), true)
    } else {
        (top >> shift, false)
    }
}

/// Splits a format string into pieces. Each call consumes at least one byte, so the walk is bounded by its length.
pub(crate) fn next_piece(format: &[u8]) -> Option<(Piece<'_>, &[u8])> {
    match format.first()? {
        b'%' if format.get(1) == Some(&b'%') => Some((Piece::Literal(&format[..1]), &format[2..])),
        b'%' => match parse_spec(&format[1..]) {
            Some((spec, rest)) => Some((Piece::Conversion(spec), rest)),
            // A letter nobody knows: shown as it stands rather than eaten.
            None => Some((Piece::Literal(&format[..1]), &format[1..])),
        },
        _ => {
            let end = format
                .iter()
                .position(|byte| *byte == b'%')
                .unwrap_or(format.len());
            Some((Piece::Literal(&format[..end]), &format[end..]))
        }
    }
}

/// A specification from behind its `%`, and what follows it.
fn parse_spec(mut text: &[u8]) -> Option<(Spec, &[u8])> {
    let mut spec = Spec {
        left: false,
        zero: false,
        plus: false,
        space: false,
        alternate: false,
        width: None,
        precision: None,
        length: Length::Int,
        conversion: Conversion::Signed,
    };
    loop {
        match text.first()? {
            b'-' => spec.left = true,
            b'0' => spec.zero = true,
            b'+' => spec.plus = true,
            b' ' => spec.space = true,
            b'#' => spec.alternate = true,
            _ => break,
        }
        text = &text[1..];
    }
    (spec.width, text) = parse_amount(text);
    if text.first() == Some(&b'.') {
        let (precision, rest) = parse_amount(&text[1..]);
        spec.precision = Some(precision.unwrap_or(Amount::Given(0)));
        text = rest;
    }
    let mut length = 0_i32;
    loop {
        match text.first()? {
            b'h' => length -= 1,
            b'l' => length += 1,
            b'L' | b'q' | b'j' => length = 2,
            b'z' | b'Z' | b't' => length = 1,
            _ => break,
        }
        text = &text[1..];
    }
    spec.length = match length {
        ..=-2 => Length::Char,
        -1 => Length::Short,
        0 => Length::Int,
        1 => Length::Long,
        2.. => Length::LongLong,
    };
    let (letter, mut rest) = text.split_first()?;
    spec.conversion = match letter {
        b'd' | b'i' => Conversion::Signed,
        b'u' => Conversion::Unsigned,
        b'x' => Conversion::Hex { upper: false },
        b'X' => Conversion::Hex { upper: true },
        b'o' => Conversion::Octal,
        b'c' => Conversion::Char,
        b's' => Conversion::Str,
        b'p' => {
            let extension = pointer_extension(rest);
            let name = rest.get(..extension).unwrap_or_default();
            rest = rest.get(extension..).unwrap_or_default();
            Conversion::Pointer(name.into())
        }
        _ => return None,
    };
    Some((spec, rest))
}

fn parse_amount(text: &[u8]) -> (Option<Amount>, &[u8]) {
    if let Some((b'*', rest)) = text.split_first() {
        return (Some(Amount::Argument), rest);
    }
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if digits == 0 {
        return (None, text);
    }
    let value = text[..digits].iter().fold(0_u32, |value, digit| {
        (value * 10 + u32::from(digit - b'0')).min(MAX_WIDTH)
    });
    (Some(Amount::Given(value)), &text[digits..])
}

/// How many bytes behind `%p` belong to it. The kernel skips all alphanumerics (`pointer()` in `lib/vsprintf.c`), but
/// formats are written as `%psfoo` nowhere and as `%ps:` everywhere; known extensions are taken at their known length
/// so that a letter which is meant literally stays.
fn pointer_extension(text: &[u8]) -> usize {
    let second = text.get(1).copied().unwrap_or(0);
    match text.first().copied().unwrap_or(0) {
        b'S' | b's' | b'F' | b'f' | b'B' => match second {
            b'R' | b'b' => 2,
            _ => 1,
        },
        b'M' | b'm' => 1 + usize::from(matches!(second, b'R' | b'F')),
        b'I' | b'i' => match second {
            b'4' => 2 + usize::from(matches!(text.get(2), Some(b'h' | b'n' | b'b' | b'l'))),
            b'6' => 2 + usize::from(text.get(2) == Some(&b'c')),
            b'S' => {
                2 + text[2..]
                    .iter()
                    .take_while(|byte| {
                        matches!(byte, b'p' | b'f' | b's' | b'c' | b'h' | b'n' | b'b' | b'l')
                    })
                    .count()
            }
            _ => 0,
        },
        b'U' => 1 + usize::from(matches!(second, b'b' | b'B' | b'l' | b'L')),
        b'h' => 1 + usize::from(matches!(second, b'C' | b'D' | b'N')),
        b'b' => 1 + usize::from(second == b'l'),
        b'K' | b'x' | b'V' | b'e' | b'a' | b'r' | b'R' | b'd' | b'D' | b'g' | b'G' | b'O'
        | b't' | b'C' | b'E' | b'N' => text
            .iter()
            .take_while(|byte| byte.is_ascii_alphanumeric())
            .count(),
        _ => 0,
    }
}

/// Width and precision of one conversion, `*` already looked up. A negative `*` width means left-aligned, a negative
/// precision means none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    pub(crate) width: usize,
    pub(crate) precision: Option<usize>,
    pub(crate) left: bool,
}

/// An integer with flags, width and precision.
pub(crate) fn write_integer(
    out: &mut Vec<u8>,
    spec: &Spec,
    shape: Shape,
    value: u64,
    negative: bool,
) {
    let digits = match spec.conversion {
        Conversion::Hex { upper } => Digits::hex(value, upper),
        Conversion::Octal => Digits::octal(value),
        _ => Digits::decimal(value),
    };
    // C prints nothing for zero with precision zero; the kernel does too.
    let digits = if value == 0 && shape.precision == Some(0) {
        &[]
    } else {
        digits.as_bytes()
    };
    let prefix: &[u8] = match spec.conversion {
        Conversion::Hex { upper } if spec.alternate && value != 0 => {
            if upper {
                b"0X"
            } else {
                b"0x"
            }
        }
        Conversion::Octal if spec.alternate && value != 0 => b"0",
        Conversion::Signed if negative => b"-",
        Conversion::Signed if spec.plus => b"+",
        Conversion::Signed if spec.space => b" ",
        _ => b"",
    };
    let zeros_by_precision = shape.precision.unwrap_or(0).saturating_sub(digits.len());
    let length = prefix.len() + zeros_by_precision + digits.len();
    let padding = shape.width.saturating_sub(length);
    let zero_padded = spec.zero && !shape.left && shape.precision.is_none();
    if !shape.left && !zero_padded {
        push_repeated(out, b' ', padding);
    }
    out.extend_from_slice(prefix);
    push_repeated(
        out,
        b'0',
        zeros_by_precision + if zero_padded { padding } else { 0 },
    );
    out.extend_from_slice(digits);
    if shape.left {
        push_repeated(out, b' ', padding);
    }
}

/// Pads what was written to `out` since `start` to the width, and cuts it to the precision.
pub(crate) fn shape_written(out: &mut Vec<u8>, start: usize, shape: Shape) {
    if let Some(precision) = shape.precision {
        out.truncate(start.saturating_add(precision).max(start).min(out.len()));
    }
    let length = out.len() - start;
    let padding = shape.width.saturating_sub(length);
    if padding == 0 {
        return;
    }
    push_repeated(out, b' ', padding);
    if !shape.left {
        // Rotate the padding to the front: rare enough not to write the text twice.
        out[start..].rotate_right(padding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> Spec {
        match next_piece(text.as_bytes()) {
            Some((Piece::Conversion(spec), [])) => spec,
            other => panic!("{text}: {other:?}"),
        }
    }

    fn print(text: &str, value: i64) -> String {
        let spec = spec(text);
        let amount = |amount| match amount {
            Some(Amount::Given(value)) => Some(usize::try_from(value).unwrap()),
            _ => None,
        };
        let shape = Shape {
            width: amount(spec.width).unwrap_or(0),
            precision: amount(spec.precision),
            left: spec.left,
        };
        let (magnitude, negative) = spec.cut(value.cast_unsigned(), false);
        let mut out = Vec::new();
        write_integer(&mut out, &spec, shape, magnitude, negative);
        String::from_utf8(out).unwrap()
    }

    /// Expected values from printf(3) of glibc.
    #[test]
    fn integers_as_c_prints_them() {
        for (format, value, expected) in [
            ("%d", -1, "-1"),
            ("%u", -1, "4294967295"),
            ("%lu", -1, "18446744073709551615"),
            ("%hhu", 511, "255"),
            ("%hd", 65535, "-1"),
            ("%5d", 42, "   42"),
            ("%-5d|", 42, "42   "),
            ("%05d", -42, "-0042"),
            ("%+d", 42, "+42"),
            ("% d", 42, " 42"),
            ("%#x", 255, "0xff"),
            ("%#x", 0, "0"),
            ("%#08x", 255, "0x0000ff"),
            ("%#X", 255, "0XFF"),
            ("%08lx", 255, "000000ff"),
            ("%.4d", 42, "0042"),
            ("%8.4d", 42, "    0042"),
            ("%08.4d", 42, "    0042"),
            ("%.0d", 0, ""),
            ("%o", 8, "10"),
            ("%#o", 8, "010"),
            ("%zd", -5, "-5"),
            ("%Lu", 5, "5"),
        ] {
            let format = format.trim_end_matches('|');
            assert_eq!(print(format, value), expected, "{format} {value}");
        }
    }

    #[test]
    fn pointer_extensions_end_where_they_end() {
        for (text, extension, rest) in [
            ("%pS;", "S", ";"),
            ("%psb", "sb", ""),
            ("%pI4:%d", "I4", ":%d"),
            ("%pI6c\n", "I6c", "\n"),
            ("%pISpc>", "ISpc", ">"),
            ("%pUbx", "Ub", "x"),
            ("%*pbl,", "bl", ","),
            ("%p flags", "", " flags"),
            ("%pMF-", "MF", "-"),
        ] {
            let Some((Piece::Conversion(spec), tail)) = next_piece(text.as_bytes()) else {
                panic!("{text}");
            };
            assert_eq!(
                spec.conversion,
                Conversion::Pointer(extension.as_bytes().into()),
                "{text}"
            );
            assert_eq!(tail, rest.as_bytes(), "{text}");
        }
    }

    #[test]
    fn widths_are_bounded() {
        assert_eq!(
            spec("%99999999999999999999d").width,
            Some(Amount::Given(MAX_WIDTH))
        );
    }

    #[test]
    fn unknown_letters_stay() {
        assert_eq!(next_piece(b"%y"), Some((Piece::Literal(b"%"), &b"y"[..])));
        assert_eq!(next_piece(b"%"), Some((Piece::Literal(b"%"), &b""[..])));
        assert_eq!(next_piece(b"%%d"), Some((Piece::Literal(b"%"), &b"d"[..])));
    }

    #[test]
    fn shaping_what_was_written() {
        let mut out = b"x".to_vec();
        out.extend_from_slice(b"abc");
        shape_written(
            &mut out,
            1,
            Shape {
                width: 5,
                precision: Some(2),
                left: false,
            },
        );
        assert_eq!(out, b"x   ab");
    }
}
