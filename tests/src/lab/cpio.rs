//! A writer of `newc` cpio archives, the format of an initramfs.
//!
//! Source of the format: Linux, Documentation/driver-api/early-userspace/buffer-format.rst. Every number is eight
//! hexadecimal digits, names end with a zero byte, header-with-name and data are each padded to four bytes.
//! Everything is owned by root and dated 0, so that the same input is the same archive, and its hash a name for it.

use anyhow::{Result, bail};

/// An archive in memory.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const MAGIC: &str = "070701";
const TRAILER: &str = "TRAILER!!!";

impl Archive {
    /// An archive of nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory. Parents must have been added before: the kernel does not make them.
    ///
    /// # Errors
    ///
    /// If there are too many entries.
    pub fn directory(&mut self, path: &str) -> Result<()> {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a file.
    ///
    /// # Errors
    ///
    /// If it has 4 GiB or more.
    pub fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.entry(path, REGULAR | (mode & 0o7777), (0, 0), data)
    }

    /// Adds a character device.
    ///
    /// # Errors
    ///
    /// If there are too many entries.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) -> Result<()> {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[])
    }

    /// The whole archive.
    ///
    /// # Errors
    ///
    /// If there are too many entries.
    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.entries = 0;
        self.header(TRAILER, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])?;
        Ok(self.bytes)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) -> Result<()> {
        let path = path.trim_start_matches('/');
        if path.is_empty() || path.contains('\0') {
            bail!("failed to add {path:?} to the initramfs: not a name");
        }
        let Ok(size) = u32::try_from(data.len()) else {
            bail!("failed to add {path} to the initramfs: a file must be below 4 GiB");
        };
        self.entries += 1;
        let inode = self.entries;
        self.header(
            path,
            [inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1],
        )?;
        self.bytes.extend_from_slice(data);
        self.pad();
        Ok(())
    }

    /// `fields`: inode, mode, uid, gid, links, mtime, size, device (major, minor), rdev (major, minor).
    fn header(&mut self, name: &str, fields: [u32; 11]) -> Result<()> {
        let Ok(name_size) = u32::try_from(name.len() + 1) else {
            bail!("failed to add a file to the initramfs: its name is too long");
        };
        self.bytes.extend_from_slice(MAGIC.as_bytes());
        // The checksum at the end is only used by the `070702` variant.
        for number in fields.into_iter().chain([name_size, 0]) {
            self.bytes
                .extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written out by hand from the kernel's description, so that the writer does not check itself.
    #[test]
    fn one_small_file_is_these_bytes() {
        let mut archive = Archive::new();
        archive.file("/hi", 0o644, b"abcde").unwrap();
        let golden = concat!(
            "070701",
            "00000001",
            "000081a4",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000005",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000003",
            "00000000",
            "hi\0",
            "\0\0\0",
            "abcde",
            "\0\0\0",
            "070701",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "0000000b",
            "00000000",
            "TRAILER!!!\0",
            "\0\0\0",
        );
        assert_eq!(
            String::from_utf8(archive.finish().unwrap()).unwrap(),
            golden
        );
    }

    #[test]
    fn nothing_can_be_added_without_a_name() {
        assert!(Archive::new().directory("/").is_err());
        assert!(Archive::new().file("a\0b", 0o644, &[]).is_err());
    }
}
