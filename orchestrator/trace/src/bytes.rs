//! Reading integers of a foreign machine: byte order and size of `long` are data here, not properties of the host.

/// Byte order of the traced kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endian {
    /// Least significant byte first (x86, arm64 as usually built).
    Little,
    /// Most significant byte first (s390x, some powerpc and arm).
    Big,
}

/// Size of the traced kernel's `long` (and of its pointers and `local_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LongSize {
    /// 32-bit kernel.
    Four,
    /// 64-bit kernel.
    Eight,
}

impl LongSize {
    /// The size in bytes, 4 or 8.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// From a number of bytes; anything but 4 and 8 is no `long`.
    #[must_use]
    pub const fn from_bytes(bytes: usize) -> Option<Self> {
        match bytes {
            4 => Some(Self::Four),
            8 => Some(Self::Eight),
            _ => None,
        }
    }
}

impl Endian {
    /// The two bytes at `offset`, or `None` past the end.
    #[inline]
    #[must_use]
    pub fn u16(self, bytes: &[u8], offset: usize) -> Option<u16> {
        let raw = array::<2>(bytes, offset)?;
        Some(match self {
            Self::Little => u16::from_le_bytes(raw),
            Self::Big => u16::from_be_bytes(raw),
        })
    }

    /// The four bytes at `offset`, or `None` past the end.
    #[inline]
    #[must_use]
    pub fn u32(self, bytes: &[u8], offset: usize) -> Option<u32> {
        let raw = array::<4>(bytes, offset)?;
        Some(match self {
            Self::Little => u32::from_le_bytes(raw),
            Self::Big => u32::from_be_bytes(raw),
        })
    }

    /// The eight bytes at `offset`, or `None` past the end.
    #[inline]
    #[must_use]
    pub fn u64(self, bytes: &[u8], offset: usize) -> Option<u64> {
        let raw = array::<8>(bytes, offset)?;
        Some(match self {
            Self::Little => u64::from_le_bytes(raw),
            Self::Big => u64::from_be_bytes(raw),
        })
    }

    /// An `unsigned long` of the traced kernel at `offset`, or `None` past the end.
    #[inline]
    #[must_use]
    pub fn long(self, size: LongSize, bytes: &[u8], offset: usize) -> Option<u64> {
        match size {
            LongSize::Four => self.u32(bytes, offset).map(u64::from),
            LongSize::Eight => self.u64(bytes, offset),
        }
    }
}

#[inline]
fn array<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk::<N>().copied()
}
