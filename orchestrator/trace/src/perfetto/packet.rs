//! Protobuf's wire format, as much of it as is written here.

/// A message under construction. Nested messages get four bytes for their length, filled in when they end: longer than
/// needed, but a valid varint, and nothing has to be moved or measured first (perfetto's own writer does the same).
#[derive(Clone, Debug, Default)]
pub(super) struct Message {
    bytes: Vec<u8>,
}

/// Where a nested message's length goes.
#[derive(Debug)]
#[must_use]
pub(super) struct Nested {
    length_at: usize,
}

/// Largest nested message: 28 bits.
pub(super) const MAX_MESSAGE: usize = (1 << 28) - 1;

impl Message {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
    }

    #[inline]
    pub(super) fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes
                .push(u8::try_from(value & 0x7f).unwrap_or(0) | 0x80);
            value >>= 7;
        }
        self.bytes.push(u8::try_from(value).unwrap_or(0));
    }

    #[inline]
    pub(super) fn uint(&mut self, field: u32, value: u64) {
        self.varint(u64::from(field) << 3);
        self.varint(value);
    }

    /// `int32` and `int64`: negative numbers take ten bytes.
    #[inline]
    pub(super) fn int(&mut self, field: u32, value: i64) {
        self.uint(field, value.cast_unsigned());
    }

    #[inline]
    pub(super) fn data(&mut self, field: u32, value: &[u8]) {
        self.varint(u64::from(field) << 3 | 2);
        self.varint(u64::try_from(value.len()).unwrap_or(0));
        self.bytes.extend_from_slice(value);
    }

    /// A string; protobuf wants UTF-8, and a guest's bytes need not be.
    pub(super) fn text(&mut self, field: u32, value: &[u8]) {
        match std::str::from_utf8(value) {
            Ok(_) => self.data(field, value),
            Err(_) => self.data(field, String::from_utf8_lossy(value).as_bytes()),
        }
    }

    #[inline]
    pub(super) fn begin(&mut self, field: u32) -> Nested {
        self.varint(u64::from(field) << 3 | 2);
        let length_at = self.bytes.len();
        self.bytes.extend_from_slice(&[0x80, 0x80, 0x80, 0]);
        Nested { length_at }
    }

    #[inline]
    pub(super) fn end(&mut self, nested: Nested) {
        let length = self.bytes.len() - nested.length_at - 4;
        debug_assert!(length <= MAX_MESSAGE);
        let length = u32::try_from(length.min(MAX_MESSAGE)).unwrap_or(0);
        if let Some(place) = self.bytes.get_mut(nested.length_at..nested.length_at + 4) {
            for (index, byte) in place.iter_mut().enumerate() {
                let bits = length >> (7 * index) & 0x7f;
                *byte = u8::try_from(bits).unwrap_or(0) | if index < 3 { 0x80 } else { 0 };
            }
        }
    }
}

/// One field of a message being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read<'a> {
    Varint(u64),
    Data(&'a [u8]),
}

/// The next field of `bytes`: number, value, and what follows.
pub(super) fn read_field(bytes: &[u8]) -> Option<(u64, Read<'_>, &[u8])> {
    let (tag, rest) = read_varint(bytes)?;
    match tag & 7 {
        0 => {
            let (value, rest) = read_varint(rest)?;
            Some((tag >> 3, Read::Varint(value), rest))
        }
        2 => {
            let (length, rest) = read_varint(rest)?;
            let length = usize::try_from(length).ok()?;
            Some((
                tag >> 3,
                Read::Data(rest.get(..length)?),
                rest.get(length..)?,
            ))
        }
        _ => None,
    }
}

fn read_varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (index, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((value, bytes.get(index + 1..)?));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_messages_read_back() {
        let mut message = Message::default();
        let outer = message.begin(1);
        message.uint(2, 300);
        message.int(3, -1);
        let inner = message.begin(4);
        message.text(1, b"a\xff");
        message.end(inner);
        message.end(outer);
        let (field, Read::Data(outer), rest) = read_field(message.bytes()).unwrap() else {
            panic!()
        };
        assert_eq!((field, rest.len()), (1, 0));
        let (field, value, outer) = read_field(outer).unwrap();
        assert_eq!((field, value), (2, Read::Varint(300)));
        let (field, value, outer) = read_field(outer).unwrap();
        assert_eq!((field, value), (3, Read::Varint(u64::MAX)));
        let (field, Read::Data(inner), outer) = read_field(outer).unwrap() else {
            panic!()
        };
        assert_eq!((field, outer.len()), (4, 0));
        assert_eq!(
            read_field(inner).unwrap().1,
            Read::Data("a\u{fffd}".as_bytes())
        );
    }
}
