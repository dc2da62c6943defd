//! One page: from raw bytes to a checked header.

use super::{PageLayout, Records};

/// Bits of the commit word that are a length. The kernel uses bits 30 and 31 for flags and 20 bits for a length;
/// libtraceevent masks with 27 bits (`COMMIT_MASK`), and so do we. The flags are added as a *signed* int: on 64-bit
/// kernels the upper half of the word becomes ones (seen: `0xffffffffc0003fc0`), so a test of the whole word for
/// equality or for "too large" would throw away exactly the pages that tell of a loss.
const COMMIT_LENGTH_MASK: u32 = (1 << 27) - 1;

/// `RB_MISSED_EVENTS`: events were lost between the page before and this one.
const COMMIT_MISSED_EVENTS: u32 = 1 << 31;

/// `RB_MISSED_STORED`: how many is stored behind the data. Absent if there was no room for it.
const COMMIT_MISSED_STORED: u32 = 1 << 30;

/// What a page says about events that were lost right before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Missed {
    /// Nothing was lost.
    #[default]
    None,
    /// Something was lost; the page had no room for the number.
    Unknown,
    /// Exactly this many events were lost.
    Count(u64),
}

impl Missed {
    /// Both losses together: what is unknown stays unknown.
    #[must_use]
    pub const fn and_then(self, later: Self) -> Self {
        match (self, later) {
            (Self::None, other) | (other, Self::None) => other,
            (Self::Count(one), Self::Count(two)) => Self::Count(one.saturating_add(two)),
            _ => Self::Unknown,
        }
    }
}

/// A page whose header has been checked: the committed bytes lie within the page.
///
/// The records inside are still the guest's word; [`Page::records`] checks each as it comes.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    layout: PageLayout,
    timestamp: u64,
    missed: Missed,
    data: &'a [u8],
}

/// Why bytes are not a page. Finishes "failed to …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// Fewer bytes than a page header.
    #[error("read a page header from {length} bytes")]
    Truncated {
        /// Bytes given.
        length: usize,
    },
    /// More data committed than the page holds.
    #[error("believe a page that commits {commit} bytes where {room} fit")]
    CommitBeyondPage {
        /// Committed bytes according to the header.
        commit: u32,
        /// Bytes of data there are.
        room: usize,
    },
}

impl<'a> Page<'a> {
    /// Checks the header of the page in `bytes` (bytes beyond the layout's page size are ignored; fewer are accepted
    /// as long as all that is committed is there, so that the last page of a cut file is not lost).
    #[inline]
    pub fn parse(layout: PageLayout, bytes: &'a [u8]) -> Result<Self, PageError> {
        let bytes = bytes.get(..layout.page_size()).unwrap_or(bytes);
        let truncated = PageError::Truncated {
            length: bytes.len(),
        };
        let endian = layout.endian();
        let timestamp = endian
            .u64(bytes, layout.timestamp_offset())
            .ok_or(truncated)?;
        let commit_word = endian
            .long(layout.long_size(), bytes, layout.commit_offset())
            .ok_or(truncated)?;
        let body = bytes.get(layout.data_offset()..).ok_or(truncated)?;

        // The low half carries length and flags, whatever sign extension did to the high half.
        let commit_word = u32::try_from(commit_word & u64::from(u32::MAX)).unwrap_or(0);
        let commit = commit_word & COMMIT_LENGTH_MASK;
        let beyond = PageError::CommitBeyondPage {
            commit,
            room: body.len(),
        };
        let length = usize::try_from(commit).map_err(|_| beyond)?;
        let data = body.get(..length).ok_or(beyond)?;

        let missed = if commit_word & COMMIT_MISSED_EVENTS == 0 {
            Missed::None
        } else if commit_word & COMMIT_MISSED_STORED == 0 {
            Missed::Unknown
        } else {
            // A page that promises a number and has no room for it still says that something was lost.
            endian
                .long(layout.long_size(), body, length)
                .map_or(Missed::Unknown, Missed::Count)
        };
        Ok(Self {
            layout,
            timestamp,
            missed,
            data,
        })
    }

    /// The layout it was read with.
    #[must_use]
    pub const fn layout(&self) -> PageLayout {
        self.layout
    }

    /// Base time of the page, in units of the trace clock (nanoseconds, or ticks for `x86-tsc` and `counter`).
    #[must_use]
    pub const fn timestamp(&self) -> u64 {
        self.timestamp
    }

    /// Events lost between the page before and this one.
    #[must_use]
    pub const fn missed(&self) -> Missed {
        self.missed
    }

    /// The committed bytes: records, one behind the other.
    #[must_use]
    pub const fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Whether some record of the page carries an absolute time.
    #[must_use]
    pub fn has_absolute_times(&self) -> bool {
        let mut records = self.records();
        while records.next().is_some() {}
        records.met_absolute_time()
    }

    /// The records, without allocation.
    #[inline]
    #[must_use]
    pub fn records(&self) -> Records<'a> {
        Records::new(self.layout.endian(), self.timestamp, self.data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endian;

    fn page(commit: u64, tail: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&77_u64.to_le_bytes());
        bytes.extend_from_slice(&commit.to_le_bytes());
        bytes.extend_from_slice(tail);
        bytes.resize(4096, 0);
        bytes
    }

    #[test]
    fn sign_extended_flags_and_stored_count() {
        let layout = PageLayout::native64_le(4096).unwrap();
        let mut tail = vec![0_u8; 8];
        tail.extend_from_slice(&5_978_880_u64.to_le_bytes());
        let bytes = page(0xffff_ffff_c000_0008, &tail);
        let parsed = Page::parse(layout, &bytes).unwrap();
        assert_eq!(parsed.missed(), Missed::Count(5_978_880));
        assert_eq!(parsed.data().len(), 8);
        assert_eq!(parsed.timestamp(), 77);
    }

    #[test]
    fn missed_without_count() {
        let layout = PageLayout::native64_le(4096).unwrap();
        let bytes = page(0xffff_ffff_8000_0ff0, &[]);
        assert_eq!(
            Page::parse(layout, &bytes).unwrap().missed(),
            Missed::Unknown
        );
        // Promises a count where the page is full: unknown, never zero.
        let bytes = page(0xffff_ffff_c000_0ff0, &[]);
        assert_eq!(
            Page::parse(layout, &bytes).unwrap().missed(),
            Missed::Unknown
        );
    }

    #[test]
    fn missed_count_of_a_32_bit_big_endian_kernel() {
        let header = PageLayout::native64_le(4096)
            .unwrap()
            .header_page_text()
            .replace("offset:8;\tsize:8", "offset:8;\tsize:4")
            .replace("offset:16;\tsize:4080", "offset:12;\tsize:4084");
        let layout = PageLayout::parse(&header, Endian::Big).unwrap();
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&99_u64.to_be_bytes());
        bytes.extend_from_slice(&0xc000_0004_u32.to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&327_u32.to_be_bytes());
        bytes.resize(4096, 0);
        let parsed = Page::parse(layout, &bytes).unwrap();
        assert_eq!(
            (parsed.timestamp(), parsed.missed()),
            (99, Missed::Count(327))
        );
    }

    #[test]
    fn a_commit_beyond_the_page_is_refused() {
        let layout = PageLayout::native64_le(4096).unwrap();
        let bytes = page(4081, &[]);
        assert_eq!(
            Page::parse(layout, &bytes).unwrap_err(),
            PageError::CommitBeyondPage {
                commit: 4081,
                room: 4080
            }
        );
        assert_eq!(
            Page::parse(layout, &bytes[..15]).unwrap_err(),
            PageError::Truncated { length: 15 }
        );
    }

    #[test]
    fn a_cut_page_with_all_its_data_is_read() {
        let layout = PageLayout::native64_le(4096).unwrap();
        let bytes = page(8, &[0; 8]);
        assert!(Page::parse(layout, &bytes[..24]).is_ok());
        assert!(Page::parse(layout, &bytes[..23]).is_err());
    }
}
