//! Where the parts of a page are, from `events/header_page`.

use crate::{Endian, LongSize};

/// Largest sub-buffer a kernel can be told to use: its write counter has 20 bits (`RB_WRITE_MASK` in
/// `kernel/trace/ring_buffer.c`; `ring_buffer_subbuf_order_set` refuses more).
pub const MAX_PAGE_SIZE: u32 = 1 << 20;

/// Layout of one ring-buffer page (sub-buffer) of one traced kernel: a small value, copied freely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageLayout {
    endian: Endian,
    long_size: LongSize,
    timestamp_offset: u32,
    commit_offset: u32,
    data_offset: u32,
    page_size: u32,
}

/// Why a `header_page` text or a page size was not accepted. Finishes "failed to …".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A field that every kernel since 2.6.30 writes is not there.
    #[error("find the field `{field}` in header_page")]
    MissingField {
        /// Name of the field.
        field: &'static str,
    },
    /// `commit` is neither 4 nor 8 bytes.
    #[error("believe header_page: commit has {size} bytes, not 4 or 8")]
    CommitSize {
        /// What the text says.
        size: u32,
    },
    /// `timestamp` is not 8 bytes.
    #[error("believe header_page: timestamp has {size} bytes, not 8")]
    TimestampSize {
        /// What the text says.
        size: u32,
    },
    /// Fields overlap, or the page would be larger than [`MAX_PAGE_SIZE`] or have no data.
    #[error(
        "believe header_page: timestamp at {timestamp}, commit at {commit}, {data_size} bytes of data at {data} do not make a page of at most {MAX_PAGE_SIZE} bytes"
    )]
    Geometry {
        /// Offset of the time stamp.
        timestamp: u32,
        /// Offset of the commit word.
        commit: u32,
        /// Offset of the data.
        data: u32,
        /// Size of the data.
        data_size: u32,
    },
}

impl PageLayout {
    /// The layout of a 64-bit little-endian kernel whose sub-buffers have `page_size` bytes (4096 unless
    /// `buffer_subbuf_size_kb` was written).
    pub fn native64_le(page_size: u32) -> Result<Self, LayoutError> {
        Self::checked(
            Endian::Little,
            LongSize::Eight,
            0,
            8,
            16,
            page_size.saturating_sub(16),
        )
    }

    /// The layout that the text of `events/header_page` (or of an instance's own copy of it) describes.
    ///
    /// The text does not say the byte order; it is known from the machine that sent it.
    ///
    /// Whoever reads the file: with one `read` into a buffer of some kilobytes. It gives its text to the first read only
    /// (`show_header_page_file` in `kernel/trace/trace_events.c` returns nothing at a later position), and
    /// `std::fs::read_to_string` begins with a read of 32 bytes.
    pub fn parse(header_page: &str, endian: Endian) -> Result<Self, LayoutError> {
        let timestamp = HeaderField::find(header_page, "timestamp")?;
        let commit = HeaderField::find(header_page, "commit")?;
        let data = HeaderField::find(header_page, "data")?;
        if timestamp.size != 8 {
            return Err(LayoutError::TimestampSize {
                size: timestamp.size,
            });
        }
        let long_size = usize::try_from(commit.size)
            .ok()
            .and_then(LongSize::from_bytes)
            .ok_or(LayoutError::CommitSize { size: commit.size })?;
        Self::checked(
            endian,
            long_size,
            timestamp.offset,
            commit.offset,
            data.offset,
            data.size,
        )
    }

    fn checked(
        endian: Endian,
        long_size: LongSize,
        timestamp_offset: u32,
        commit_offset: u32,
        data_offset: u32,
        data_size: u32,
    ) -> Result<Self, LayoutError> {
        let geometry = LayoutError::Geometry {
            timestamp: timestamp_offset,
            commit: commit_offset,
            data: data_offset,
            data_size,
        };
        let long: u32 = match long_size {
            LongSize::Four => 4,
            LongSize::Eight => 8,
        };
        let timestamp_end = timestamp_offset.checked_add(8);
        let commit_end = commit_offset.checked_add(long);
        let page_size = data_offset.checked_add(data_size);
        match (timestamp_end, commit_end, page_size) {
            (Some(timestamp_end), Some(commit_end), Some(page_size))
                if timestamp_end <= commit_offset
                    && commit_end <= data_offset
                    && data_size >= 8
                    && page_size <= MAX_PAGE_SIZE =>
            {
                Ok(Self {
                    endian,
                    long_size,
                    timestamp_offset,
                    commit_offset,
                    data_offset,
                    page_size,
                })
            }
            _ => Err(geometry),
        }
    }

    /// The same kernel with another size of sub-buffer (each tracefs instance has its own).
    pub fn with_page_size(self, page_size: u32) -> Result<Self, LayoutError> {
        Self::checked(
            self.endian,
            self.long_size,
            self.timestamp_offset,
            self.commit_offset,
            self.data_offset,
            page_size.saturating_sub(self.data_offset),
        )
    }

    /// Byte order of the traced kernel.
    #[must_use]
    pub const fn endian(&self) -> Endian {
        self.endian
    }

    /// Size of the traced kernel's `long`.
    #[must_use]
    pub const fn long_size(&self) -> LongSize {
        self.long_size
    }

    /// Bytes of one page, header and data.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        self.page_size as usize
    }

    /// Offset of the first record.
    #[must_use]
    pub const fn data_offset(&self) -> usize {
        self.data_offset as usize
    }

    pub(super) const fn timestamp_offset(&self) -> usize {
        self.timestamp_offset as usize
    }

    pub(super) const fn commit_offset(&self) -> usize {
        self.commit_offset as usize
    }

    /// The text a kernel with this layout shows as `events/header_page` (`ring_buffer_print_page_header`).
    #[must_use]
    pub fn header_page_text(&self) -> String {
        let long = self.long_size.bytes();
        format!(
            "\tfield: u64 timestamp;\toffset:{};\tsize:8;\tsigned:0;\n\
             \tfield: local_t commit;\toffset:{};\tsize:{long};\tsigned:1;\n\
             \tfield: int overwrite;\toffset:{};\tsize:1;\tsigned:1;\n\
             \tfield: char data;\toffset:{};\tsize:{};\tsigned:0;\n",
            self.timestamp_offset,
            self.commit_offset,
            self.commit_offset,
            self.data_offset,
            self.page_size - self.data_offset,
        )
    }
}

/// One line of `header_page`: `field: u64 timestamp; offset:0; size:8; signed:0;`.
struct HeaderField {
    offset: u32,
    size: u32,
}

impl HeaderField {
    fn find(text: &str, name: &'static str) -> Result<Self, LayoutError> {
        text.lines()
            .find_map(|line| Self::parse_line(line, name))
            .ok_or(LayoutError::MissingField { field: name })
    }

    fn parse_line(line: &str, name: &str) -> Option<Self> {
        let mut parts = line.split(';');
        let declaration = parts.next()?.trim().strip_prefix("field:")?;
        if declaration.split_whitespace().next_back()? != name {
            return None;
        }
        let (mut offset, mut size) = (None, None);
        for part in parts {
            match part.trim().split_once(':') {
                Some(("offset", value)) => offset = value.trim().parse().ok(),
                Some(("size", value)) => size = value.trim().parse().ok(),
                _ => {}
            }
        }
        Some(Self {
            offset: offset?,
            size: size?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const X86_64: &str = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
        \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
        \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\
        \tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";

    #[test]
    fn the_text_of_a_64_bit_kernel() {
        let layout = PageLayout::parse(X86_64, Endian::Little).unwrap();
        assert_eq!(layout, PageLayout::native64_le(4096).unwrap());
        assert_eq!(layout.header_page_text(), X86_64);
    }

    #[test]
    fn the_text_of_a_32_bit_kernel() {
        let text = X86_64
            .replace("offset:8;\tsize:8", "offset:8;\tsize:4")
            .replace("offset:16;\tsize:4080", "offset:12;\tsize:4084");
        let layout = PageLayout::parse(&text, Endian::Big).unwrap();
        assert_eq!(layout.long_size(), LongSize::Four);
        assert_eq!(layout.data_offset(), 12);
        assert_eq!(layout.page_size(), 4096);
    }

    #[test]
    fn big_sub_buffers() {
        let text = X86_64.replace("4080", "16368");
        assert_eq!(
            PageLayout::parse(&text, Endian::Little)
                .unwrap()
                .page_size(),
            16384
        );
    }

    #[test]
    fn lies_are_refused() {
        for (from, to) in [
            ("size:4080", "size:4294967295"),
            ("size:4080", "size:1"),
            ("offset:16", "offset:9"),
            ("offset:8;\tsize:8", "offset:4;\tsize:8"),
            ("offset:8;\tsize:8", "offset:8;\tsize:3"),
            ("commit", "comit"),
            ("offset:0", "offset:x"),
        ] {
            let text = X86_64.replacen(from, to, 1);
            assert!(
                PageLayout::parse(&text, Endian::Little).is_err(),
                "{from} -> {to}"
            );
        }
        assert!(PageLayout::native64_le(0).is_err());
        assert!(PageLayout::native64_le(MAX_PAGE_SIZE * 2).is_err());
    }
}
