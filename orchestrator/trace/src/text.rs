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

#[inline]
pub(crate) fn push_decimal(out: &mut Vec<u8>, value: u64) {
    if value < 10 {
        out.push(DIGIT_PAIRS[usize::try_from(value).unwrap_or(0) * 2 + 1]);
    } else {
        out.extend_from_slice(Digits::decimal(value).as_bytes());
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
    out.extend_from_slice(Digits::hex(value, false).as_bytes());
}

/// `%0{width}x`, width at most 22.
#[inline]
pub(crate) fn push_hex_padded(out: &mut Vec<u8>, value: u64, width: usize) {
    let digits = Digits::hex(value, false);
    push_repeated(out, b'0', width.saturating_sub(digits.as_bytes().len()));
    out.extend_from_slice(digits.as_bytes());
}

/// `%0{width}u`.
#[inline]
pub(crate) fn push_decimal_zeroed(out: &mut Vec<u8>, value: u64, width: usize) {
    let digits = Digits::decimal(value);
    push_repeated(out, b'0', width.saturating_sub(digits.as_bytes().len()));
    out.extend_from_slice(digits.as_bytes());
}

/// `%{width}u`.
#[inline]
pub(crate) fn push_decimal_right(out: &mut Vec<u8>, value: u64, width: usize) {
    let digits = Digits::decimal(value);
    push_repeated(out, b' ', width.saturating_sub(digits.as_bytes().len()));
    out.extend_from_slice(digits.as_bytes());
}

const SPACES: &[u8; 64] = &[b' '; 64];

#[inline]
pub(crate) fn push_repeated(out: &mut Vec<u8>, byte: u8, count: usize) {
    if byte == b' ' && count <= SPACES.len() {
        out.extend_from_slice(&SPACES[..count]);
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
    }
}
