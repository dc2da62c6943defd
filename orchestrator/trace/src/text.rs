//! Numbers and padding into a byte buffer.
//!
//! The text report writes about a hundred bytes an event and is meant to keep up with millions of events a second.
//! `core::fmt` costs several times more per number than the digits themselves, so the hot path writes digits directly;
//! everything here appends to a `Vec<u8>` that the caller reuses.

const DIGIT_PAIRS: &[u8; 200] = b"00010203040506070809\
10111213141516171819\
20212223242526272829\
30313233343536373839\
40414243444546474849\
50515253545556575859\
60616263646566676869\
70717273747576777879\
80818283848586878889\
90919293949596979899";

/// Most digits of a 64-bit number: 22 in octal.
pub(crate) const MAX_DIGITS: usize = 22;

/// Digits of a number, right-aligned in a small buffer.
#[derive(Clone, Copy)]
pub(crate) struct Digits {
    buffer: [u8; MAX_DIGITS],
    start: usize,
}

impl Digits {
    #[inline]
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn decimal(mut value: u64) -> Self {
        let mut buffer = [0_u8; MAX_DIGITS];
        let mut start = MAX_DIGITS;
        while value >= 100 {
            let pair = usize::try_from(value % 100).unwrap_or(0) * 2;
            value /= 100;
            start -= 2;
            buffer[start] = DIGIT_PAIRS[pair];
            buffer[start + 1] = DIGIT_PAIRS[pair + 1];
        }
        let rest = usize::try_from(value).unwrap_or(0);
        if rest >= 10 {
            start -= 2;
            buffer[start] = DIGIT_PAIRS[rest * 2];
            buffer[start + 1] = DIGIT_PAIRS[rest * 2 + 1];
        } else {
            start -= 1;
            buffer[start] = DIGIT_PAIRS[rest * 2 + 1];
        }
        Self { buffer, start }
    }

    #[inline]
    pub(crate) fn hex(value: u64, upper: bool) -> Self {
        Self::power_of_two(
            value,
            4,
            if upper {
                b"0123456789ABCDEF"
            } else {
                b"0123456789abcdef"
            },
        )
    }

    pub(crate) fn octal(value: u64) -> Self {
        Self::power_of_two(value, 3, b"0123456789abcdef")
    }

    #[inline]
    fn power_of_two(mut value: u64, bits: u32, alphabet: &[u8; 16]) -> Self {
        let mut buffer = [0_u8; MAX_DIGITS];
        let mut start = MAX_DIGITS;
        loop {
            start -= 1;
            let digit = usize::try_from(value & ((1 << bits) - 1)).unwrap_or(0);
            buffer[start] = alphabet[digit];
            value >>= bits;
            if value == 0 {
                return Self { buffer, start };
            }
        }
    }
}

/// Appends the first `used` bytes of `bytes`.
///
/// A copy whose length the compiler knows is a few moves; one whose length it does not know is a call of `memcpy`, which
/// for the ten bytes of a word or number costs more than the copy (it was an eighth of the time of a report). So the
/// whole array is appended and the end cut off again.
#[inline(always)]
pub(crate) fn push_short<const N: usize>(out: &mut Vec<u8>, bytes: &[u8; N], used: usize) {
    let length = out.len();
    out.extend_from_slice(bytes);
    out.truncate(length + used);
}

/// Appends text that is mostly short: names, comms.
#[inline(always)]
pub(crate) fn push_text(out: &mut Vec<u8>, text: &[u8]) {
    // Word by word up to 32 bytes.
    let mut rest = text;
    if rest.len() <= 32 {
        while let Some((chunk, tail)) = rest.split_first_chunk::<8>() {
            out.extend_from_slice(chunk);
            rest = tail;
        }
        for byte in rest {
            out.push(*byte);
        }
        return;
    }
    out.extend_from_slice(text);
}

/// Digits of `value` in decimal, left-aligned, and how many.
#[inline]
fn decimal_left(mut value: u64) -> ([u8; 24], usize) {
    let mut buffer = [0_u8; 24];
    let count = value
        .checked_ilog10()
        .map_or(1, |digits| digits as usize + 1);
    let mut at = count;
    while value >= 100 {
        let pair = usize::try_from(value % 100).unwrap_or(0) * 2;
        value /= 100;
        at -= 2;
        buffer[at] = DIGIT_PAIRS[pair];
        buffer[at + 1] = DIGIT_PAIRS[pair + 1];
    }
    let pair = usize::try_from(value).unwrap_or(0) * 2;
    if value >= 10 {
        buffer[0] = DIGIT_PAIRS[pair];
    }
    buffer[count.min(at) - 1] = DIGIT_PAIRS[pair + 1];
    (buffer, count)
}

#[inline]
pub(crate) fn push_decimal(out: &mut Vec<u8>, value: u64) {
    if value < 10 {
        out.push(DIGIT_PAIRS[usize::try_from(value).unwrap_or(0) * 2 + 1]);
    } else {
        let (buffer, count) = decimal_left(value);
        push_short(out, &buffer, count);
    }
}

#[inline]
pub(crate) fn push_signed(out: &mut Vec<u8>, value: i64) {
    if value < 0 {
        out.push(b'-');
    }
    push_decimal(out, value.unsigned_abs());
}

#[inline]
pub(crate) fn push_hex(out: &mut Vec<u8>, value: u64) {
    push_hex_padded(out, value, 1);
}

/// `%0{width}x`, width from 1 to 16.
#[inline]
pub(crate) fn push_hex_padded(out: &mut Vec<u8>, value: u64, width: usize) {
    let needed = (67 - (value | 1).leading_zeros() as usize) / 4;
    let count = needed.max(width.min(16));
    let mut buffer = [0_u8; 16];
    let mut rest = value;
    for digit in buffer.iter_mut().take(count).rev() {
        *digit = b"0123456789abcdef"[usize::try_from(rest & 15).unwrap_or(0)];
        rest >>= 4;
    }
    push_short(out, &buffer, count);
}

/// `%0{width}u`.
#[inline]
pub(crate) fn push_decimal_zeroed(out: &mut Vec<u8>, value: u64, width: usize) {
    let (buffer, count) = decimal_left(value);
    for _ in count..width {
        out.push(b'0');
    }
    push_short(out, &buffer, count);
}

/// `%{width}u`.
#[inline]
pub(crate) fn push_decimal_right(out: &mut Vec<u8>, value: u64, width: usize) {
    let (buffer, count) = decimal_left(value);
    push_repeated(out, b' ', width.saturating_sub(count));
    push_short(out, &buffer, count);
}

const SPACES: &[u8; 64] = &[b' '; 64];

#[inline]
pub(crate) fn push_repeated(out: &mut Vec<u8>, byte: u8, count: usize) {
    if byte == b' ' && count <= SPACES.len() {
        push_short(out, SPACES, count);
    } else {
        out.resize(out.len() + count, byte);
    }
}

/// The bytes up to the first NUL, as C would print them.
#[inline]
pub(crate) fn until_nul(bytes: &[u8]) -> &[u8] {
    // Comms and short strings: a plain scan beats a call into memchr.
    match bytes.iter().position(|byte| *byte == 0) {
        Some(end) => &bytes[..end],
        None => bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn digits_are_those_of_core_fmt(value: u64) {
            for value in [value, value >> 40, value >> 56, 0, u64::MAX] {
                let text = |digits: Digits| String::from_utf8(digits.as_bytes().to_vec()).unwrap();
                prop_assert_eq!(text(Digits::decimal(value)), value.to_string());
                prop_assert_eq!(text(Digits::hex(value, false)), format!("{value:x}"));
                prop_assert_eq!(text(Digits::hex(value, true)), format!("{value:X}"));
                prop_assert_eq!(text(Digits::octal(value)), format!("{value:o}"));
                let mut out = Vec::new();
                push_decimal(&mut out, value);
                out.push(b' ');
                push_hex(&mut out, value);
                out.push(b' ');
                push_hex_padded(&mut out, value, 8);
                out.push(b' ');
                push_decimal_zeroed(&mut out, value, 6);
                prop_assert_eq!(
                    String::from_utf8(out).unwrap(),
                    format!("{value} {value:x} {value:08x} {value:06}")
                );
            }
        }
    }

    #[test]
    fn padding() {
        let mut out = Vec::new();
        push_hex_padded(&mut out, 0xab, 4);
        push_decimal_zeroed(&mut out, 7, 3);
        push_decimal_right(&mut out, 42, 5);
        push_signed(&mut out, i64::MIN);
        assert_eq!(out, b"00ab007   42-9223372036854775808");
        for text in [
            "",
            "a",
            "12345678",
            "a text of more than thirty-two bytes, well",
        ] {
            out.clear();
            push_text(&mut out, text.as_bytes());
            assert_eq!(out, text.as_bytes());
        }
    }
}
