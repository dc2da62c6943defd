//! The compressions a version 7 file may use, by the names trace-cmd gives them.

use std::io::{Read, Write};

use super::ReadError;

/// How sections and pages are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Not at all.
    None,
    /// Zstandard frames.
    Zstd,
    /// zlib streams.
    Zlib,
}

impl Compression {
    /// By the name in the file's header.
    pub(super) fn by_name(name: &str) -> Result<Self, ReadError> {
        match name {
            "none" | "" => Ok(Self::None),
            "zstd" => Ok(Self::Zstd),
            "zlib" => Ok(Self::Zlib),
            other => Err(ReadError::Compression {
                name: other.chars().take(32).collect(),
            }),
        }
    }

    /// The name in the file's header.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zstd => "zstd",
            Self::Zlib => "zlib",
        }
    }

    /// Unpacks one block into `out`, which holds exactly `size` bytes afterwards. Nothing beyond `size` is ever
    /// unpacked, whatever the block would grow to.
    pub(super) fn unpack(
        self,
        packed: &[u8],
        size: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), ReadError> {
        let bad = || ReadError::BadBlock {
            compression: self.name(),
        };
        out.clear();
        let limit = u64::try_from(size).unwrap_or(u64::MAX);
        match self {
            Self::None => out.extend_from_slice(packed.get(..size).ok_or_else(bad)?),
            Self::Zstd => {
                let decoder = ruzstd::decoding::StreamingDecoder::new(packed).map_err(|_| bad())?;
                decoder.take(limit).read_to_end(out).map_err(|_| bad())?;
            }
            Self::Zlib => {
                let decoder = flate2::read::ZlibDecoder::new(packed);
                decoder.take(limit).read_to_end(out).map_err(|_| bad())?;
            }
        }
        if out.len() == size {
            Ok(())
        } else {
            Err(bad())
        }
    }

    /// Packs one block. Speed before size: an export is written once and read for a while.
    pub(super) fn pack(self, block: &[u8]) -> Vec<u8> {
        match self {
            Self::None => block.to_vec(),
            Self::Zstd => ruzstd::encoding::compress_to_vec(
                block,
                ruzstd::encoding::CompressionLevel::Fastest,
            ),
            Self::Zlib => {
                let mut encoder =
                    flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
                // Writing to a vector cannot fail; a short write would show in the size check of whoever reads it.
                let _ = encoder.write_all(block);
                encoder.finish().unwrap_or_default()
            }
        }
    }
}
