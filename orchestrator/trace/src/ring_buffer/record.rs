//! The records of a page: a bounded, allocation-free walk that never panics, whatever the bytes say.

use crate::Endian;

const TYPE_PADDING: u32 = 29;
const TYPE_TIME_EXTEND: u32 = 30;
const TYPE_TIME_STAMP: u32 = 31;

const TIME_DELTA_BITS: u32 = 27;
const TIME_DELTA_MASK: u32 = (1 << TIME_DELTA_BITS) - 1;

/// An absolute time stamp has 59 bits; the top five come from the time before it (`TS_MSB`, `rb_fix_abs_ts`).
const ABSOLUTE_BITS: u32 = 59;
const ABSOLUTE_MSB: u64 = !((1 << ABSOLUTE_BITS) - 1);

/// Bytes of a record's first word.
const HEADER: usize = 4;

/// One data record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Time of the record in units of the trace clock (nanoseconds, or ticks for `x86-tsc` and `counter`).
    pub timestamp: u64,
    /// The event's `common_type`: the `ID:` line of its format file.
    pub type_id: u16,
    /// The event as its format file describes it, from `common_type` on, rounded up to 4 (8 on some machines) bytes.
    pub payload: &'a [u8],
    /// Offset of the record's first word in the page's data.
    pub offset: usize,
}

/// The rest of a page cannot be read: what is wrong, and where. Finishes "failed to …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("read the record at byte {offset} of a page's data: {kind}")]
pub struct Damage {
    /// Offset in the page's data.
    pub offset: usize,
    /// What is wrong.
    pub kind: DamageKind,
}

/// What is wrong with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DamageKind {
    /// The committed data ends within the record.
    #[error("the committed data ends within it")]
    CutOff,
    /// The record says it is longer than what is left of the page.
    #[error("it claims {length} bytes where {room} are left")]
    TooLong {
        /// Claimed bytes behind the first word.
        length: u32,
        /// Bytes there are.
        room: usize,
    },
    /// A length that cannot be: a long record's length counts its own four bytes.
    #[error("it claims a length of {length}")]
    TooShort {
        /// Claimed length.
        length: u32,
    },
    /// A data record without room for `common_type`.
    #[error("it has no room for an event type")]
    NoType,
}

/// Iterator over the data records of one page.
///
/// Ends at the end of the committed data or at the first record that cannot be believed; that one is given as an
/// `Err`, once. A record has at least four bytes, so the walk is bounded by the size of the page.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    data: &'a [u8],
    cursor: Cursor,
}

impl<'a> Records<'a> {
    #[inline]
    pub(super) fn new(endian: Endian, timestamp: u64, data: &'a [u8]) -> Self {
        Self {
            data,
            cursor: Cursor::new(endian, timestamp),
        }
    }

    /// Records so far that the kernel had reserved and then discarded (an event filter that did not match, mostly).
    /// They are no events and no loss.
    #[must_use]
    pub const fn discarded(&self) -> u32 {
        self.cursor.discarded
    }

    pub(super) const fn met_absolute_time(&self) -> bool {
        self.cursor.absolute
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, Damage>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        Some(match self.cursor.next(self.data)? {
            Ok(found) => Ok(Record {
                timestamp: found.timestamp,
                type_id: found.type_id,
                payload: self.data.get(found.start..found.end).unwrap_or_default(),
                offset: found.offset,
            }),
            Err(damage) => Err(damage),
        })
    }
}

/// A place in a page's data, for those who own the page and cannot borrow from it (a merge over many CPUs).
#[derive(Clone, Debug)]
pub(crate) struct Cursor {
    endian: Endian,
    position: usize,
    timestamp: u64,
    discarded: u32,
    absolute: bool,
}

/// A data record by its place in the page's data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) timestamp: u64,
    pub(crate) type_id: u16,
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) offset: usize,
}

impl Cursor {
    #[inline]
    pub(crate) fn new(endian: Endian, timestamp: u64) -> Self {
        Self {
            endian,
            position: 0,
            timestamp,
            discarded: 0,
            absolute: false,
        }
    }

    /// Time of the last record, or of the page.
    pub(crate) const fn timestamp(&self) -> u64 {
        self.timestamp
    }

    #[cold]
    fn damage(&mut self, data: &[u8], kind: DamageKind) -> Option<Result<Found, Damage>> {
        let offset = self.position;
        self.position = data.len();
        Some(Err(Damage { offset, kind }))
    }

    /// The next data record of `data`, which is the same slice in every call.
    #[inline]
    pub(crate) fn next(&mut self, data: &[u8]) -> Option<Result<Found, Damage>> {
        loop {
            let rest = data.get(self.position..)?;
            if rest.is_empty() {
                return None;
            }
            let Some(word) = self.endian.u32(rest, 0) else {
                return self.damage(data, DamageKind::CutOff);
            };
            // Bit fields fill from the least significant bit on little-endian machines, from the most significant on
            // big-endian ones.
            let (type_len, delta) = match self.endian {
                Endian::Little => (word & 31, word >> 5),
                Endian::Big => (word >> TIME_DELTA_BITS, word & TIME_DELTA_MASK),
            };
            match type_len {
                TYPE_PADDING => {
                    if delta == 0 {
                        // A null event fills the page to its end.
                        self.position = data.len();
                        return None;
                    }
                    let Some(length) = self.endian.u32(rest, HEADER) else {
                        return self.damage(data, DamageKind::CutOff);
                    };
                    let room = rest.len() - HEADER;
                    let Some(step) = step(length, room) else {
                        return self.damage(data, DamageKind::TooLong { length, room });
                    };
                    if step < 4 {
                        return self.damage(data, DamageKind::TooShort { length });
                    }
                    // The next record's delta counts from the discarded one (`rb_event_discard` leaves the write
                    // stamp as it is), so its time passes although it is no event.
                    self.timestamp = self.timestamp.wrapping_add(u64::from(delta));
                    self.discarded = self.discarded.saturating_add(1);
                    self.position += HEADER + step;
                }
                TYPE_TIME_EXTEND | TYPE_TIME_STAMP => {
                    let Some(high) = self.endian.u32(rest, HEADER) else {
                        return self.damage(data, DamageKind::CutOff);
                    };
                    let value = (u64::from(high) << TIME_DELTA_BITS) + u64::from(delta);
                    self.timestamp = if type_len == TYPE_TIME_EXTEND {
                        self.timestamp.wrapping_add(value)
                    } else {
                        self.absolute = true;
                        absolute(value, self.timestamp)
                    };
                    self.position += HEADER + 4;
                }
                _ => {
                    let (start, length) = if type_len == 0 {
                        let Some(length) = self.endian.u32(rest, HEADER) else {
                            return self.damage(data, DamageKind::CutOff);
                        };
                        if length < 4 {
                            return self.damage(data, DamageKind::TooShort { length });
                        }
                        (HEADER + 4, length - 4)
                    } else {
                        (HEADER, type_len * 4)
                    };
                    let room = rest.len() - start;
                    let Some(step) = step(length, room) else {
                        return self.damage(data, DamageKind::TooLong { length, room });
                    };
                    let type_id = if step == 0 {
                        None
                    } else {
                        self.endian.u16(rest, start)
                    };
                    let Some(type_id) = type_id else {
                        return self.damage(data, DamageKind::NoType);
                    };
                    self.timestamp = self.timestamp.wrapping_add(u64::from(delta));
                    let offset = self.position;
                    let end = offset + start + step;
                    self.position = end;
                    return Some(Ok(Found {
                        timestamp: self.timestamp,
                        type_id,
                        start: offset + start,
                        end,
                        offset,
                    }));
                }
            }
        }
    }
}

/// `length` rounded up to the alignment of records, if so much is there.
#[inline]
fn step(length: u32, room: usize) -> Option<usize> {
    let aligned = usize::try_from(length).ok()?.checked_add(3)? & !3;
    (aligned <= room).then_some(aligned)
}

/// An absolute time stamp completed by the upper bits of the time before it, and one wrap of 59 bits allowed for.
fn absolute(value: u64, before: u64) -> u64 {
    let full = value | (before & ABSOLUTE_MSB);
    if full < before && before & ABSOLUTE_MSB != 0 {
        full.wrapping_add(1 << ABSOLUTE_BITS)
    } else {
        full
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn word(endian: Endian, type_len: u32, delta: u32) -> [u8; 4] {
        match endian {
            Endian::Little => (type_len | delta << 5).to_le_bytes(),
            Endian::Big => (type_len << 27 | delta).to_be_bytes(),
        }
    }

    fn u32_bytes(endian: Endian, value: u32) -> [u8; 4] {
        match endian {
            Endian::Little => value.to_le_bytes(),
            Endian::Big => value.to_be_bytes(),
        }
    }

    /// Every kind of record once; the expected times are worked out by hand.
    fn all_kinds(endian: Endian) -> Vec<u8> {
        let id = match endian {
            Endian::Little => [5, 0, 0, 0],
            Endian::Big => [0, 5, 0, 0],
        };
        let mut data = Vec::new();
        data.extend(word(endian, 1, 10)); // at 1010
        data.extend(id);
        data.extend(word(endian, TYPE_TIME_EXTEND, 1)); // + 2 << 27 + 1
        data.extend(u32_bytes(endian, 2));
        data.extend(word(endian, 0, 4)); // + 4, long form: 4 + 6 bytes, rounded to 8
        data.extend(u32_bytes(endian, 10));
        data.extend(id);
        data.extend([1, 2, 3, 4]);
        data.extend(word(endian, TYPE_PADDING, 3)); // discarded, + 3
        data.extend(u32_bytes(endian, 8));
        data.extend([0; 4]);
        data.extend(word(endian, 1, 0));
        data.extend(id);
        data.extend(word(endian, TYPE_TIME_STAMP, 7)); // = 4096 << 27 + 7
        data.extend(u32_bytes(endian, 4096));
        data.extend(word(endian, 1, 1));
        data.extend(id);
        data.extend(word(endian, TYPE_PADDING, 0)); // to the end of the page
        data.extend([0xff; 12]);
        data
    }

    #[test]
    fn every_kind_of_record_in_both_byte_orders() {
        for endian in [Endian::Little, Endian::Big] {
            let data = all_kinds(endian);
            let mut records = Records::new(endian, 1000, &data);
            let times: Vec<u64> = records
                .by_ref()
                .map(|record| record.unwrap())
                .map(|r| r.timestamp)
                .collect();
            let extended = 1010 + (2 << 27) + 1 + 4;
            assert_eq!(times, [1010, extended, extended + 3, (4096 << 27) + 8]);
            assert_eq!(records.discarded(), 1);
            let long = Records::new(endian, 0, &data).nth(1).unwrap().unwrap();
            assert_eq!((long.type_id, long.payload.len(), long.offset), (5, 8, 16));
            assert_eq!(long.payload[4..], [1, 2, 3, 4]);
        }
    }

    #[test]
    fn absolute_time_takes_its_top_bits_from_the_time_before() {
        assert_eq!(absolute(5, 3), 5);
        let msb = 0x1800_0000_0000_0000;
        assert_eq!(absolute(5, msb | 3), msb | 5);
        // Wrapped 59 bits since.
        assert_eq!(absolute(2, msb | 3), msb + (1 << ABSOLUTE_BITS) + 2);
    }

    #[test]
    fn damage_is_said_once_and_ends_the_page() {
        let endian = Endian::Little;
        let cases: [(Vec<u8>, DamageKind); 5] = [
            (vec![1, 0, 0], DamageKind::CutOff),
            (
                word(endian, 2, 0).to_vec(),
                DamageKind::TooLong { length: 8, room: 0 },
            ),
            (
                [word(endian, 0, 0), [3, 0, 0, 0]].concat(),
                DamageKind::TooShort { length: 3 },
            ),
            (
                [word(endian, 0, 0), [4, 0, 0, 0]].concat(),
                DamageKind::NoType,
            ),
            (
                [word(endian, 0, 0), [0xff; 4]].concat(),
                DamageKind::TooLong {
                    length: u32::MAX - 4,
                    room: 0,
                },
            ),
        ];
        for (data, kind) in cases {
            let mut records = Records::new(endian, 0, &data);
            assert_eq!(records.next(), Some(Err(Damage { offset: 0, kind })));
            assert_eq!(records.next(), None);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked_within_bounds(
            data in prop::collection::vec(any::<u8>(), 0..512), timestamp: u64, big: bool,
        ) {
            let endian = if big { Endian::Big } else { Endian::Little };
            let mut count = 0;
            for record in Records::new(endian, timestamp, &data) {
                count += 1;
                if let Ok(record) = record {
                    prop_assert!(record.offset + record.payload.len() < data.len());
                }
            }
            prop_assert!(count <= data.len() / 4 + 1);
        }
    }
}
