//! Reading a file that may lie about every length in it.

use std::io::{self, Read, Seek, SeekFrom};

use crate::event_format::FormatError;
use crate::ring_buffer::LayoutError;
use crate::{Endian, LongSize};

/// Why a `trace.dat` cannot be read. Finishes "failed to …".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file itself.
    #[error("read the trace file")]
    Io(#[from] io::Error),
    /// It ends within something.
    #[error("read {what}: the file ends within it")]
    Truncated {
        /// What was being read.
        what: &'static str,
    },
    /// It is no `trace.dat`.
    #[error("recognise a trace.dat: its first bytes are another file's")]
    Magic,
    /// A version other than 6 and 7 (trace-cmd wrote 6 from 2010, 7 from 3.1 on).
    #[error("read a trace.dat of version {version}; versions 6 and 7 are known")]
    Version {
        /// What it says.
        version: String,
    },
    /// A size of `long` that is neither 4 nor 8.
    #[error("believe a kernel whose long has {size} bytes")]
    LongSize {
        /// What it says.
        size: u8,
    },
    /// A compression other than zstd and zlib.
    #[error("unpack a file compressed with `{name}`")]
    Compression {
        /// Its name.
        name: String,
    },
    /// A compressed block that does not unpack to the size it promises.
    #[error("unpack a {compression} block")]
    BadBlock {
        /// How it is compressed.
        compression: &'static str,
    },
    /// Something larger than it can sensibly be.
    #[error("accept {what} of {size} bytes, more than {limit}")]
    TooLarge {
        /// What.
        what: &'static str,
        /// The size the file gives.
        size: u64,
        /// The bound.
        limit: u64,
    },
    /// Another word than the format has at this place.
    #[error("find `{wanted}` where the format has it")]
    Expected {
        /// The word.
        wanted: &'static str,
    },
    /// A section that is needed is not there.
    #[error("find {what} in the file")]
    Missing {
        /// What.
        what: &'static str,
    },
    /// The page header description.
    #[error("use its description of pages")]
    Layout(#[from] LayoutError),
    /// An event format.
    #[error("use an event format of it")]
    Format(#[from] FormatError),
}

/// Bounds of what is read into memory at once.
pub(super) mod limit {
    pub(in super::super) const SMALL: u64 = 1 << 16;
    pub(in super::super) const FORMATS: u64 = 48 << 20;
    pub(in super::super) const SYMBOLS: u64 = 64 << 20;
    pub(in super::super) const CMDLINES: u64 = 32 << 20;
    pub(in super::super) const OPTIONS: u64 = 16 << 20;
    /// One block of compressed pages: trace-cmd packs ten, of at most 64 KiB each on any machine it has run on.
    pub(in super::super) const BLOCK: u64 = 16 << 20;
}

/// A reader with the file's byte order.
#[derive(Debug)]
pub(super) struct Input<R> {
    pub(super) source: R,
    pub(super) endian: Endian,
    pub(super) long_size: LongSize,
}

impl<R: Read> Input<R> {
    pub(super) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], ReadError> {
        let mut bytes = [0; N];
        match self.source.read_exact(&mut bytes) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(ReadError::Truncated { what })
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, ReadError> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, ReadError> {
        let bytes = self.array::<2>(what)?;
        Ok(self.endian.u16(&bytes, 0).unwrap_or(0))
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, ReadError> {
        let bytes = self.array::<4>(what)?;
        Ok(self.endian.u32(&bytes, 0).unwrap_or(0))
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, ReadError> {
        let bytes = self.array::<8>(what)?;
        Ok(self.endian.u64(&bytes, 0).unwrap_or(0))
    }

    /// `size` bytes. The buffer grows with what is really there, so a length that lies costs nothing.
    pub(super) fn bytes(
        &mut self,
        what: &'static str,
        size: u64,
        limit: u64,
    ) -> Result<Vec<u8>, ReadError> {
        if size > limit {
            return Err(ReadError::TooLarge { what, size, limit });
        }
        let mut bytes = Vec::new();
        self.source.by_ref().take(size).read_to_end(&mut bytes)?;
        if u64::try_from(bytes.len()).unwrap_or(u64::MAX) < size {
            return Err(ReadError::Truncated { what });
        }
        Ok(bytes)
    }

    /// Text up to its NUL.
    pub(super) fn string(&mut self, what: &'static str) -> Result<String, ReadError> {
        let mut bytes = Vec::new();
        loop {
            match self.u8(what)? {
                0 => return Ok(String::from_utf8_lossy(&bytes).into_owned()),
                byte => bytes.push(byte),
            }
            if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > limit::SMALL {
                return Err(ReadError::TooLarge {
                    what,
                    size: limit::SMALL + 1,
                    limit: limit::SMALL,
                });
            }
        }
    }

    pub(super) fn expect(&mut self, wanted: &'static str) -> Result<(), ReadError> {
        let found = self.bytes(
            wanted,
            u64::try_from(wanted.len()).unwrap_or(0),
            limit::SMALL,
        )?;
        if found == wanted.as_bytes() {
            Ok(())
        } else {
            Err(ReadError::Expected { wanted })
        }
    }

    pub(super) fn text(
        &mut self,
        what: &'static str,
        size: u64,
        limit: u64,
    ) -> Result<String, ReadError> {
        let bytes = self.bytes(what, size, limit)?;
        Ok(String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}

impl<R: Seek> Input<R> {
    pub(super) fn seek(&mut self, offset: u64) -> Result<(), ReadError> {
        self.source.seek(SeekFrom::Start(offset))?;
        Ok(())
    }
}

impl<'a> Input<&'a [u8]> {
    pub(super) const fn over(bytes: &'a [u8], endian: Endian, long_size: LongSize) -> Self {
        Self {
            source: bytes,
            endian,
            long_size,
        }
    }
}
