//! The host side of one port: a FIFO pair or a unix socket, its decoder, and what waits to be written to it.
//!
//! A FIFO pair (`chardev` `pipe`: QEMU opens `PATH.in` and `PATH.out`, each for reading and writing) is always
//! connected: a reader that comes late or again loses nothing, and nothing wedges. A socket is what managers make;
//! there QEMU discards what it holds whenever the reader leaves, and the agent's replay brings it back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};

use anyhow::{Context as _, Result, anyhow, bail};
use nix::fcntl::{FcntlArg, Flock, FlockArg, OFlag};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use vmtrail_continuity::attach::PortKind;
use vmtrail_wire::Decoder;

/// Bytes taken from one port before another gets its turn.
const TURN_BYTES: usize = 1 << 20;

/// Size that a FIFO is asked to have: fewer, longer reads, and more room for a late reader. The kernel's default limit
/// for an unprivileged user (`/proc/sys/fs/pipe-max-size`); a refusal does no harm.
const FIFO_BYTES: i32 = 1 << 20;

/// Bytes that may wait for an agent that does not read. Acks are cumulative, so more would only be stale.
const MAX_OUTGOING: usize = 128 << 10;

/// Where a port is on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortAddress {
    /// The port's name in the guest.
    pub name: String,
    /// `PATH` of a FIFO pair, or of a socket.
    pub path: PathBuf,
    /// Which of the two.
    pub kind: PortKind,
}

/// What a turn of reading came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Bytes read.
    pub bytes: usize,
    /// How it ended.
    pub end: TurnEnd,
}

/// Why a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnEnd {
    /// Nothing more is there now.
    Dry,
    /// There may be more.
    More,
    /// The other side is gone.
    Closed,
}

#[derive(Debug)]
enum HostSide {
    Fifo {
        reader: pipe::Receiver,
        writer: OwnedFd,
        /// Two readers would each get half of the bytes.
        _lock: Flock<File>,
    },
    Socket(UnixStream),
}

impl HostSide {
    fn reader(&self) -> BorrowedFd<'_> {
        match self {
            Self::Fifo { reader, .. } => reader.as_fd(),
            Self::Socket(stream) => stream.as_fd(),
        }
    }

    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Fifo { reader, .. } => reader.poll_read_ready(cx),
            Self::Socket(stream) => stream.poll_read_ready(cx),
        }
    }

    /// Reads, whatever the runtime believes: its word that nothing is there is as old as its last look, and a drain
    /// that trusted it would end too early. When nothing is there indeed, the runtime is told to look again.
    fn read(&self, scratch: &mut [u8]) -> io::Result<usize> {
        match nix::unistd::read(self.reader(), scratch) {
            Err(nix::errno::Errno::EAGAIN) => match self {
                Self::Fifo { reader, .. } => reader.try_read(scratch),
                Self::Socket(stream) => stream.try_read(scratch),
            },
            other => Ok(other?),
        }
    }

    fn write(&self, bytes: &[u8]) -> nix::Result<usize> {
        match self {
            // Rust's runtime ignores SIGPIPE, so a FIFO or socket that nobody reads answers EPIPE.
            Self::Fifo { writer, .. } => nix::unistd::write(writer, bytes),
            Self::Socket(stream) => nix::unistd::write(stream, bytes),
        }
    }
}

/// An open port.
#[derive(Debug)]
pub struct Port {
    address: PortAddress,
    host: HostSide,
    /// Cuts the bytes into frames.
    pub decoder: Decoder,
    outgoing: Vec<u8>,
    closed: bool,
    bytes: u64,
}

impl Port {
    /// Opens a port without reading from it.
    ///
    /// # Errors
    ///
    /// The path is not there, is of another kind, or is not ours to open.
    pub fn open(address: PortAddress) -> Result<Self> {
        let host = match address.kind {
            PortKind::Fifo => open_fifo_pair(&address.path)?,
            PortKind::Socket => HostSide::Socket(connect_socket(&address.path)?),
        };
        Ok(Self {
            address,
            host,
            decoder: Decoder::new(),
            outgoing: Vec::new(),
            closed: false,
            bytes: 0,
        })
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> &PortAddress {
        &self.address
    }

    /// Whether the other side is gone.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Bytes read in all.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ready when there is something to read or the other side is gone.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.closed {
            return Poll::Pending;
        }
        self.host.poll_read_ready(cx)
    }

    /// Reads what is there, up to a turn's worth, and hands each stretch to `sink` by way of the decoder.
    ///
    /// # Errors
    ///
    /// Reading failed for another reason than that nothing is there.
    pub fn read_turn(
        &mut self,
        scratch: &mut [u8],
        mut sink: impl FnMut(&mut Decoder),
    ) -> io::Result<Turn> {
        let mut bytes = 0;
        let mut end = TurnEnd::More;
        while bytes < TURN_BYTES {
            match self.host.read(scratch) {
                Ok(0) => {
                    self.closed = true;
                    end = TurnEnd::Closed;
                    break;
                }
                Ok(count) => {
                    bytes += count;
                    let mut rest = &scratch[..count];
                    while !rest.is_empty() {
                        let taken = self.decoder.push(rest);
                        rest = &rest[taken..];
                        sink(&mut self.decoder);
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => {
                        end = TurnEnd::Dry;
                        break;
                    }
                    io::ErrorKind::Interrupted => {}
                    // A socket whose QEMU was killed answers so once, then with end of file.
                    io::ErrorKind::ConnectionReset => {
                        self.closed = true;
                        end = TurnEnd::Closed;
                        break;
                    }
                    _ => return Err(error),
                },
            }
        }
        self.bytes += bytes as u64;
        Ok(Turn { bytes, end })
    }

    /// Queues a message; `false` if the agent has not read for so long that there is no room (it will be said again).
    pub fn send(&mut self, message: &[u8]) -> bool {
        self.flush();
        if self.outgoing.len() + message.len() > MAX_OUTGOING {
            return false;
        }
        self.outgoing.extend_from_slice(message);
        self.flush();
        true
    }

    /// Whether everything queued was handed to QEMU.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Writes what is queued as far as it goes without waiting.
    pub fn flush(&mut self) {
        while !self.outgoing.is_empty() {
            match self.host.write(&self.outgoing) {
                Ok(count) => {
                    self.outgoing.drain(..count);
                }
                Err(nix::errno::Errno::EINTR) => {}
                // Full: later. Gone: the reading side will say so.
                Err(_) => return,
            }
        }
    }

    /// Connects anew. What was half read or half written is forgotten.
    ///
    /// # Errors
    ///
    /// As for [`Port::open`].
    pub fn reopen(&mut self) -> Result<()> {
        let address = self.address.clone();
        // A socket server of QEMU takes one client: the old one must be gone before the new one is heard.
        if address.kind == PortKind::Socket {
            drop(std::mem::replace(self, Self::placeholder(&address)?));
        }
        *self = Self::open(address)?;
        Ok(())
    }

    fn placeholder(address: &PortAddress) -> Result<Self> {
        let (stream, _) = UnixStream::pair().context("failed to make a socket pair")?;
        Ok(Self {
            address: address.clone(),
            host: HostSide::Socket(stream),
            decoder: Decoder::new(),
            outgoing: Vec::new(),
            closed: true,
            bytes: 0,
        })
    }
}

fn open_fifo_pair(path: &Path) -> Result<HostSide> {
    let side = |suffix: &str| {
        let mut side = path.as_os_str().to_owned();
        side.push(suffix);
        PathBuf::from(side)
    };
    let open = |path: &Path, write: bool| -> Result<File> {
        let metadata = std::fs::metadata(path)
            .with_context(|| format!("failed to find the port's FIFO {}", path.display()))?;
        if !metadata.file_type().is_fifo() {
            bail!(
                "failed to open the port {}: it is not a FIFO",
                path.display()
            );
        }
        // QEMU holds both FIFOs open for reading and writing, so a reader never sees an end of file while QEMU lives,
        // and opening the other for writing never fails for want of a reader.
        std::fs::OpenOptions::new()
            .read(!write)
            .write(write)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(path)
            .with_context(|| format!("failed to open the port's FIFO {}", path.display()))
    };
    let reader = open(&side(".out"), false)?;
    let lock = reader.try_clone().context("failed to lock the port")?;
    let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|_| {
        anyhow!(
            "another process reads the port {} already (another vmtrail?)",
            path.display()
        )
    })?;
    let writer = open(&side(".in"), true)?;
    // A refusal leaves 64 KiB, which works as well.
    let _ = nix::fcntl::fcntl(&reader, FcntlArg::F_SETPIPE_SZ(FIFO_BYTES));
    let reader = pipe::Receiver::from_file(reader)
        .with_context(|| format!("failed to watch the port {}", path.display()))?;
    Ok(HostSide::Fifo {
        reader,
        writer: writer.into(),
        _lock: lock,
    })
}

fn connect_socket(path: &Path) -> Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::connect(path)
        .with_context(|| format!("failed to connect to the port's socket {}", path.display()))?;
    stream
        .set_nonblocking(true)
        .context("failed to make the port non-blocking")?;
    UnixStream::from_std(stream).context("failed to watch the port's socket")
}
