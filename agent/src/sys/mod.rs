//! The system calls of the pump, one small safe function each.
//!
//! This is the only place of the agent where `unsafe` may stand. It needs none at present: nix wraps every call that
//! moves pages (splice, tee, pipe2, poll), and what is left is reading and writing of files.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, open, splice, tee};
use nix::sys::stat::Mode;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{pipe2, read, write};

/// A pipe as a place to keep pages: nothing in the kernel waits on it, and both ends are ours.
#[derive(Debug)]
pub struct Pipe {
    input: OwnedFd,
    output: OwnedFd,
}

/// How a move of bytes ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    /// So many bytes; zero means that the source is at its end.
    Bytes(usize),
    /// Nothing now: the source is empty or the sink is full.
    Blocked,
}

impl Pipe {
    /// A pipe with room for at least `bytes` in whole pages.
    ///
    /// A pipe is an array of slots of 40 bytes, one page each; the array is all it costs while empty. Beyond
    /// `/proc/sys/fs/pipe-max-size` the kernel wants `CAP_SYS_RESOURCE` (fs/pipe.c, `pipe_set_size`).
    ///
    /// # Errors
    ///
    /// Of `pipe2(2)` and `fcntl(F_SETPIPE_SZ)`.
    pub fn with_room(bytes: usize) -> io::Result<Self> {
        let (output, input) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let size = i32::try_from(bytes)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "pipe of more than 2 GiB"))?;
        fcntl(&input, FcntlArg::F_SETPIPE_SZ(size))?;
        Ok(Self { input, output })
    }

    /// Moves up to `len` bytes from `source` into the pipe, by reference where the kernel can.
    ///
    /// # Errors
    ///
    /// Of `splice(2)`, except "would block".
    pub fn fill_from(&self, source: impl AsFd, len: usize) -> io::Result<Moved> {
        moved(splice(source, None, &self.input, None, len, flags()))
    }

    /// Moves up to `len` bytes from the pipe to `sink`.
    ///
    /// # Errors
    ///
    /// Of `splice(2)`, except "would block".
    pub fn drain_to(&self, sink: impl AsFd, len: usize) -> io::Result<Moved> {
        moved(splice(&self.output, None, sink, None, len, flags()))
    }

    /// Moves up to `len` bytes to another pipe.
    ///
    /// # Errors
    ///
    /// Of `splice(2)`, except "would block".
    pub fn move_to(&self, other: &Self, len: usize) -> io::Result<Moved> {
        self.drain_to(&other.input, len)
    }

    /// Makes `other` refer to the first `len` bytes as well. A tee always begins at the oldest byte.
    ///
    /// # Errors
    ///
    /// Of `tee(2)`, except "would block".
    pub fn share_with(&self, other: &Self, len: usize) -> io::Result<Moved> {
        moved(tee(&self.output, &other.input, len, flags()))
    }

    /// Copies bytes in.
    ///
    /// # Errors
    ///
    /// Of `write(2)`, except "would block".
    pub fn write(&self, bytes: &[u8]) -> io::Result<Moved> {
        moved(write(&self.input, bytes))
    }

    /// Copies bytes out.
    ///
    /// # Errors
    ///
    /// Of `read(2)`, except "would block".
    pub fn read(&self, bytes: &mut [u8]) -> io::Result<Moved> {
        moved(read(&self.output, bytes))
    }

    /// Lets `len` of the oldest bytes go; returns how many there were.
    ///
    /// # Errors
    ///
    /// Of `splice(2)`.
    pub fn discard(&self, void: &File, len: usize) -> io::Result<usize> {
        let mut gone = 0;
        while gone < len {
            match self.drain_to(void, len - gone)? {
                Moved::Bytes(0) | Moved::Blocked => break,
                Moved::Bytes(n) => gone += n,
            }
        }
        Ok(gone)
    }
}

/// Opens without blocking, now or later.
///
/// # Errors
///
/// Of `open(2)`.
pub fn open_nonblocking(path: &Path, access: OFlag) -> io::Result<OwnedFd> {
    Ok(open(
        path,
        access | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_NOCTTY,
        Mode::empty(),
    )?)
}

/// Reads what is there.
///
/// # Errors
///
/// Of `read(2)`, except "would block".
pub fn read_some(source: impl AsFd, buffer: &mut [u8]) -> io::Result<Moved> {
    moved(read(source, buffer))
}

/// Writes what is taken.
///
/// # Errors
///
/// Of `write(2)`, except "would block".
pub fn write_some(sink: impl AsFd, bytes: &[u8]) -> io::Result<Moved> {
    moved(write(sink, bytes))
}

/// The guest's clocks in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub enum Clock {
    /// Since boot, without suspend: the agent's `now`.
    Monotonic,
    /// Since boot.
    Boottime,
    /// Since 1970.
    Realtime,
}

impl Clock {
    /// What the clock shows. The three clocks of Linux cannot fail; a clock before its zero reads as zero.
    #[must_use]
    pub fn now_ns(self) -> u64 {
        let id = match self {
            Self::Monotonic => ClockId::CLOCK_MONOTONIC,
            Self::Boottime => ClockId::CLOCK_BOOTTIME,
            Self::Realtime => ClockId::CLOCK_REALTIME,
        };
        let Ok(time) = clock_gettime(id) else {
            return 0;
        };
        let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec()).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
    }
}

fn flags() -> SpliceFFlags {
    SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE
}

fn moved(result: Result<usize, Errno>) -> io::Result<Moved> {
    match result {
        Ok(bytes) => Ok(Moved::Bytes(bytes)),
        // A signal is handled through a signalfd, so an interrupted call only means "later".
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(Moved::Blocked),
        Err(errno) => Err(errno.into()),
    }
}
