//! Little-endian reading and writing of bodies, with every length checked.

use alloc::string::String;
use alloc::vec::Vec;

/// Why a body could not be read. The frame or message around it was whole: this is a peer that lies or is newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// The body ends before a field that its kind must have.
    #[error("body ends inside {field} ({have} bytes left, {need} needed)")]
    Short {
        /// The field that was being read.
        field: &'static str,
        /// Bytes that were left.
        have: usize,
        /// Bytes that the field needs.
        need: usize,
    },
    /// A count or length exceeds its named bound.
    #[error("{field} is {value}, more than the bound {bound}")]
    TooMany {
        /// The field.
        field: &'static str,
        /// Its value on the wire.
        value: u64,
        /// The bound.
        bound: u64,
    },
    /// Text that is not UTF-8.
    #[error("{field} is not UTF-8 text")]
    NotText {
        /// The field.
        field: &'static str,
    },
    /// A value that this version gives no meaning.
    #[error("{field} has the unknown value {value}")]
    Unknown {
        /// The field.
        field: &'static str,
        /// Its value on the wire.
        value: u64,
    },
}

/// A cursor over a body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    pub(crate) fn take(&mut self, need: usize, field: &'static str) -> Result<&'a [u8], BodyError> {
        let Some((head, tail)) = self.bytes.split_at_checked(need) else {
            return Err(BodyError::Short {
                field,
                have: self.bytes.len(),
                need,
            });
        };
        self.bytes = tail;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], BodyError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, field)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, BodyError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, BodyError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, BodyError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, BodyError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A count of things, at most `bound`.
    pub(crate) fn count(&mut self, field: &'static str, bound: u32) -> Result<u32, BodyError> {
        let value = self.u32(field)?;
        if value > bound {
            return Err(BodyError::TooMany {
                field,
                value: u64::from(value),
                bound: u64::from(bound),
            });
        }
        Ok(value)
    }

    /// Text behind a u16 length.
    pub(crate) fn text(&mut self, field: &'static str) -> Result<String, BodyError> {
        let len = usize::from(self.u16(field)?);
        let bytes = self.take(len, field)?;
        match core::str::from_utf8(bytes) {
            Ok(text) => Ok(String::from(text)),
            Err(_) => Err(BodyError::NotText { field }),
        }
    }
}

pub(crate) fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// Text behind a u16 length, cut at the last character that fits: text is for people, and a name too long to send
/// must not make the frame unreadable.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str, bound: u16) {
    let mut end = text.len().min(usize::from(bound));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // `end` is at most `bound`, which is a u16.
    put_u16(out, u16::try_from(end).unwrap_or(u16::MAX));
    out.extend_from_slice(&text.as_bytes()[..end]);
}
