//! The ports: where they are found, and what they are on a build machine.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::session::PortId;
use crate::sys;

/// Where the kernel lists virtio-serial ports (drivers/char/virtio_console.c, class `virtio-ports`).
const CLASS: &str = "/sys/class/virtio-ports";

/// Our ports.
const NAME: &str = "vmtrail.";

/// Ports of the historical trace agent, taken where there are none of ours.
const HISTORICAL_NAME: &str = "trace-path-cpu";

/// Ports of one guest at most.
const MAX_PORTS: usize = 8192;

/// Where to look for ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// `/sys/class/virtio-ports`.
    Guest,
    /// A directory of devices, sockets or FIFO pairs with the names of ports.
    Directory(PathBuf),
    /// These, in this order.
    Paths(Vec<PathBuf>),
}

/// A port that is there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    /// Its number.
    pub id: PortId,
    /// Its name, for people.
    pub name: String,
    /// What to open.
    pub path: PathBuf,
    /// Device number, where the node may be missing.
    device: Option<(u64, u64)>,
}

/// An open port.
#[derive(Debug)]
pub struct Line {
    input: OwnedFd,
    /// Where bytes go if not back where they come from.
    output: Option<OwnedFd>,
    socket: bool,
}

/// Why a port cannot be opened.
#[derive(Debug)]
pub struct OpenError {
    port: String,
    source: io::Error,
}

/// The kernel's announcements of devices (`NETLINK_KOBJECT_UEVENT`).
#[derive(Debug)]
pub struct Uevents {
    socket: OwnedFd,
}

impl Source {
    /// The ports that are there now, by number.
    #[must_use]
    pub fn scan(&self) -> Vec<Found> {
        let mut found = match self {
            Self::Guest => scan_class(Path::new(CLASS)),
            Self::Directory(dir) => scan_directory(dir),
            Self::Paths(paths) => (0..)
                .zip(paths)
                .filter(|(_, path)| path.exists() || with_suffix(path, ".in").exists())
                .map(|(id, path)| Found {
                    id: PortId(id),
                    name: path.display().to_string(),
                    path: path.clone(),
                    device: None,
                })
                .collect(),
        };
        found.sort_unstable();
        found.dedup_by_key(|port| port.id);
        found.truncate(MAX_PORTS);
        found
    }
}

impl Found {
    /// Opens the port, never to block.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn open(&self) -> Result<Line, OpenError> {
        self.try_open().map_err(|source| OpenError {
            port: self.name.clone(),
            source,
        })
    }

    /// Whether the kernel lists it, so that it is gone when it is not listed.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.device.is_some()
    }

    fn try_open(&self) -> io::Result<Line> {
        let host_to_guest = with_suffix(&self.path, ".in");
        if !self.path.exists() && host_to_guest.exists() {
            // As QEMU opens them (chardev/char-pipe.c): both ends for reading and writing, so that neither ever ends.
            return Ok(Line {
                input: sys::open_nonblocking(&host_to_guest, OFlag::O_RDWR)?,
                output: Some(sys::open_nonblocking(
                    &with_suffix(&self.path, ".out"),
                    OFlag::O_RDWR,
                )?),
                socket: false,
            });
        }
        let is_socket =
            fs::metadata(&self.path).is_ok_and(|metadata| metadata.file_type().is_socket());
        if is_socket {
            let stream = UnixStream::connect(&self.path)?;
            stream.set_nonblocking(true)?;
            return Ok(Line {
                input: stream.into(),
                output: None,
                socket: true,
            });
        }
        if !self.path.exists()
            && let Some((major, minor)) = self.device
        {
            // A guest without udev and devtmpfs: make the node ourselves.
            mknod(
                &self.path,
                SFlag::S_IFCHR,
                Mode::S_IRUSR | Mode::S_IWUSR,
                makedev(major, minor),
            )?;
        }
        Ok(Line {
            input: sys::open_nonblocking(&self.path, OFlag::O_RDWR)?,
            output: None,
            socket: false,
        })
    }
}

impl Line {
    /// Where the host's bytes come from.
    #[must_use]
    pub fn input(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }

    /// Where our bytes go.
    #[must_use]
    pub fn output(&self) -> BorrowedFd<'_> {
        self.output.as_ref().unwrap_or(&self.input).as_fd()
    }

    /// Whether it is a socket of ours: one that ends for good when its peer goes.
    #[must_use]
    pub fn is_socket(&self) -> bool {
        self.socket
    }

    /// Whether both directions are one descriptor.
    #[must_use]
    pub fn is_one(&self) -> bool {
        self.output.is_none()
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "failed to open the port {}: {}", self.port, self.source)?;
        match self.source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EBUSY) => {
                f.write_str(" (another program in the guest has it open: stop that)")
            }
            Some(Errno::EACCES | Errno::EPERM) => {
                f.write_str(" (run the agent as root, or give its user the device)")
            }
            _ => Ok(()),
        }
    }
}

impl std::error::Error for OpenError {}

impl Uevents {
    /// Listens, where the kernel lets us (user namespaces may not).
    ///
    /// # Errors
    ///
    /// Of `socket(2)` and `bind(2)`.
    pub fn listen() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Datagram,
            SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkKObjectUEvent,
        )?;
        // Group 1 is the kernel's own announcements, before udev has made anything of them.
        bind(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            &NetlinkAddr::new(0, 1),
        )?;
        Ok(Self { socket })
    }

    /// What to wait for.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads all that was announced; whether a port came or went. Missed announcements count as one that did.
    #[must_use]
    pub fn drain(&self) -> bool {
        let mut concerned = false;
        let mut buffer = [0; 4096];
        loop {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&self.socket);
            match recv(fd, &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(len) if len > 0 => {
                    let needle = b"virtio-ports";
                    concerned |= buffer[..len]
                        .windows(needle.len())
                        .any(|window| window == needle);
                }
                Err(Errno::ENOBUFS) => concerned = true,
                Ok(_) | Err(_) => return concerned,
            }
        }
    }
}

fn scan_class(class: &Path) -> Vec<Found> {
    let mut ours = Vec::new();
    let mut historical = Vec::new();
    for entry in fs::read_dir(class).into_iter().flatten().flatten() {
        let Ok(name) = fs::read_to_string(entry.path().join("name")) else {
            continue;
        };
        let name = name.trim();
        let Some((id, is_ours)) = number_of(name) else {
            continue;
        };
        let device = fs::read_to_string(entry.path().join("dev")).ok();
        let found = Found {
            id,
            name: name.to_owned(),
            path: Path::new("/dev").join(entry.file_name()),
            device: device.as_deref().and_then(parse_device),
        };
        if is_ours { &mut ours } else { &mut historical }.push(found);
    }
    if ours.is_empty() { historical } else { ours }
}

fn scan_directory(dir: &Path) -> Vec<Found> {
    let mut ours = Vec::new();
    let mut historical = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let Some(file) = file.to_str() else {
            continue;
        };
        let name = file.strip_suffix(".in").unwrap_or(file);
        let Some((id, is_ours)) = number_of(name) else {
            continue;
        };
        let found = Found {
            id,
            name: name.to_owned(),
            path: dir.join(name),
            device: None,
        };
        if is_ours { &mut ours } else { &mut historical }.push(found);
    }
    if ours.is_empty() { historical } else { ours }
}

/// The number of a port of that name, and whether it is one of ours.
fn number_of(name: &str) -> Option<(PortId, bool)> {
    let number = |digits: &str| digits.parse().ok().map(PortId);
    if let Some(digits) = name.strip_prefix(NAME) {
        return Some((number(digits)?, true));
    }
    Some((number(name.strip_prefix(HISTORICAL_NAME)?)?, false))
}

fn parse_device(text: &str) -> Option<(u64, u64)> {
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ports() {
        assert_eq!(number_of("vmtrail.0"), Some((PortId(0), true)));
        assert_eq!(number_of("vmtrail.17"), Some((PortId(17), true)));
        assert_eq!(number_of("trace-path-cpu3"), Some((PortId(3), false)));
        assert_eq!(number_of("vmtrail.x"), None);
        assert_eq!(number_of("vmtrail."), None);
        assert_eq!(number_of("org.qemu.guest_agent.0"), None);
        assert_eq!(number_of("agent-ctl-path"), None);
    }

    #[test]
    fn historical_ports_are_taken_only_where_there_are_none_of_ours() {
        let class = tempfile::tempdir().unwrap();
        let add = |device: &str, name: &str| {
            let dir = class.path().join(device);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("name"), format!("{name}\n")).unwrap();
            fs::write(dir.join("dev"), "246:3\n").unwrap();
        };
        add("vport1p1", "trace-path-cpu1");
        add("vport1p2", "org.qemu.guest_agent.0");
        let found = scan_class(class.path());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, Path::new("/dev/vport1p1"));
        assert_eq!(found[0].device, Some((246, 3)));

        add("vport2p1", "vmtrail.1");
        add("vport2p2", "vmtrail.0");
        let mut found = scan_class(class.path());
        found.sort_unstable();
        let names: Vec<&str> = found.iter().map(|port| port.name.as_str()).collect();
        assert_eq!(names, ["vmtrail.0", "vmtrail.1"]);
    }
}
