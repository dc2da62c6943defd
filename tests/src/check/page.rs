//! Pages that say who made them: every byte of a page follows from its name, so a page that is not exactly what the guest made is seen.

use vmtrail_wire::{SessionId, StreamId};

use crate::sim::rng::mix;

/// Bytes of a page: the smallest that the protocol admits, because the simulator pays for each.
pub const PAGE_SIZE: usize = 64;

/// A page's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Page {
    /// Its place in the order in which its ring made pages.
    pub number: u64,
    /// The line of history it was made in: another one after the VM was put back to a snapshot.
    pub line: u32,
}

impl Page {
    /// Appends the page's bytes.
    pub fn write(self, session: SessionId, cpu: u32, into: &mut Vec<u8>) {
        let mut word = mix(session.0 ^ u64::from(cpu).rotate_left(48))
            ^ mix(self.number ^ u64::from(self.line).rotate_left(40));
        into.extend_from_slice(&self.number.to_le_bytes());
        into.extend_from_slice(&u64::from(self.line).to_le_bytes());
        for _ in 2..PAGE_SIZE / 8 {
            word = mix(word.wrapping_add(1));
            into.extend_from_slice(&word.to_le_bytes());
        }
    }

    /// The name in a page's bytes, if all of them are what its guest made.
    #[must_use]
    pub fn read(session: SessionId, stream: StreamId, bytes: &[u8]) -> Option<Self> {
        let (number, rest) = bytes.split_first_chunk::<8>()?;
        let (line, _) = rest.split_first_chunk::<8>()?;
        let page = Self {
            number: u64::from_le_bytes(*number),
            line: u32::try_from(u64::from_le_bytes(*line)).ok()?,
        };
        let mut genuine = Vec::with_capacity(PAGE_SIZE);
        page.write(session, stream.cpu()?, &mut genuine);
        (genuine == bytes).then_some(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_bit_is_seen() {
        let (session, cpu) = (SessionId(9), 3);
        let page = Page {
            number: 77,
            line: 1,
        };
        let mut bytes = Vec::new();
        page.write(session, cpu, &mut bytes);
        assert_eq!(bytes.len(), PAGE_SIZE);
        assert_eq!(Page::read(session, StreamId(cpu), &bytes), Some(page));
        assert_eq!(Page::read(session, StreamId(cpu + 1), &bytes), None);
        for bit in [0, 70, 130, 511] {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                Page::read(session, StreamId(cpu), &wrong),
                None,
                "bit {bit}"
            );
        }
    }
}
