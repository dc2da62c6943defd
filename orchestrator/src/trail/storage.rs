//! Where a trail's files live: a directory of a filesystem, or a disk that tests can crash.
//!
//! The trait says only what the store's promise needs, and says apart what a filesystem has apart: a write is not a
//! sync, and a new name is not durable before its directory is synced.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// The files of one trail. Names are relative to it, at most one directory deep, and never come from a guest.
pub trait Storage: fmt::Debug + Send + Sync {
    /// The place of a name, for messages.
    fn place(&self, name: &str) -> PathBuf;

    /// Takes the writer's lock.
    ///
    /// # Errors
    ///
    /// The filesystem refused; a lock that somebody else holds is an answer, not an error.
    fn lock(&self) -> io::Result<LockOutcome>;

    /// Whether somebody holds the writer's lock, and who. Never takes it: a reader that looks must not turn a writer away.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn lock_holder(&self) -> io::Result<Option<Holder>>;

    /// Makes a directory (the root for an empty name); one that exists is fine.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn make_dir(&self, name: &str) -> io::Result<()>;

    /// Names in a directory (the root for an empty name), in order.
    ///
    /// # Errors
    ///
    /// The filesystem refused; `NotFound` if there is no such directory.
    fn list(&self, dir: &str) -> io::Result<Vec<String>>;

    /// Opens a file.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn StoredFile>>;

    /// Gives a file another name, replacing what had it. Both names are in the same directory.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Removes an empty directory (the root for an empty name).
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn remove_dir(&self, name: &str) -> io::Result<()>;

    /// Makes the names in a directory durable (the root for an empty name, and the root's own name with it).
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn sync_dir(&self, dir: &str) -> io::Result<()>;

    /// Bytes that can still be written, where that is known.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn free_bytes(&self) -> io::Result<Option<u64>>;
}

/// An open file.
#[expect(
    clippy::len_without_is_empty,
    reason = "the length of a file is asked for, and may fail; emptiness is nobody's question"
)]
pub trait StoredFile: fmt::Debug + Send + Sync {
    /// Reads at an offset; short only at the file's end.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all bytes. On an error any prefix may have been written.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes what was written durable, and the length with it.
    ///
    /// # Errors
    ///
    /// The filesystem refused. What was written since the last success may be lost **although it can still be read**,
    /// and a second sync that succeeds proves nothing: it has to be written again.
    fn sync(&self) -> io::Result<()>;

    /// Cuts or extends.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Length now.
    ///
    /// # Errors
    ///
    /// The filesystem refused.
    fn len(&self) -> io::Result<u64>;
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading only; it must exist.
    Read,
    /// Writing; it must exist.
    Write,
    /// Writing; it is made, or emptied if it exists.
    Create,
}

/// What became of an attempt to lock.
#[derive(Debug)]
pub enum LockOutcome {
    /// The lock is held until this is dropped.
    Held(Box<dyn LockGuard>),
    /// Somebody else has it.
    Busy(Holder),
}

/// Somebody who holds the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// The process, where the lock file tells.
    pub pid: Option<u32>,
}

/// A lock that ends with its value.
pub trait LockGuard: fmt::Debug + Send + Sync {}

/// A directory of a filesystem.
#[derive(Debug, Clone)]
pub struct DirStorage {
    root: PathBuf,
}

const LOCK: &str = "lock";

impl DirStorage {
    /// The trail in this directory.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    fn holder(file: &File) -> Holder {
        let mut text = [0; 16];
        let len = file.read_at(&mut text, 0).unwrap_or(0);
        Holder {
            pid: std::str::from_utf8(&text[..len])
                .ok()
                .and_then(|text| text.trim().parse().ok()),
        }
    }
}

impl Storage for DirStorage {
    fn place(&self, name: &str) -> PathBuf {
        if name.is_empty() {
            self.root.clone()
        } else {
            self.root.join(name)
        }
    }

    fn lock(&self) -> io::Result<LockOutcome> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .open(self.place(LOCK))?;
        match fcntl(
            &file,
            FcntlArg::F_OFD_SETLK(&whole_file_lock(libc::F_WRLCK)),
        ) {
            Ok(_) => {}
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => {
                return Ok(LockOutcome::Busy(Self::holder(&file)));
            }
            Err(error) => return Err(error.into()),
        }
        // For messages only; a full disk must not keep a recorder from coming back.
        let pid = format!("{:<15}\n", std::process::id());
        let _ = file.write_all_at(pid.as_bytes(), 0);
        Ok(LockOutcome::Held(Box::new(HeldLock { _file: file })))
    }

    fn lock_holder(&self) -> io::Result<Option<Holder>> {
        let file = match File::open(self.place(LOCK)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        // Asking for a read lock: it conflicts with the writer's and needs no more than a readable file.
        let mut query = whole_file_lock(libc::F_RDLCK);
        fcntl(&file, FcntlArg::F_OFD_GETLK(&mut query))?;
        let is_free = i32::from(query.l_type) == libc::F_UNLCK;
        Ok((!is_free).then(|| Self::holder(&file)))
    }

    fn make_dir(&self, name: &str) -> io::Result<()> {
        match fs::create_dir(self.place(name)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result,
        }
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.place(dir))? {
            // A name that is not UTF-8 is none of ours, but it must make a directory "not empty".
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort_unstable();
        Ok(names)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn StoredFile>> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NOFOLLOW);
        match access {
            Access::Read => {}
            Access::Write => {
                options.write(true);
            }
            Access::Create => {
                options.write(true).create(true).truncate(true);
            }
        }
        Ok(Box::new(DirFile(options.open(self.place(name))?)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.place(from), self.place(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.place(name))
    }

    fn remove_dir(&self, name: &str) -> io::Result<()> {
        fs::remove_dir(self.place(name))
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        let path = self.place(dir);
        File::open(&path)?.sync_all()?;
        if dir.is_empty() {
            let parent = match path.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
            // A parent that may be searched but not read cannot be synced; that is not worth refusing a trail for.
            if let Ok(parent) = File::open(parent) {
                parent.sync_all()?;
            }
        }
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        let stat = nix::sys::statvfs::statvfs(&self.root)?;
        Ok(Some(
            stat.blocks_available().saturating_mul(stat.fragment_size()),
        ))
    }
}

#[derive(Debug)]
struct HeldLock {
    _file: File,
}

impl LockGuard for HeldLock {}

/// Open-file-description locks rather than `flock`: they conflict within one process too, are let go with the last
/// descriptor, and can be asked about without being taken.
fn whole_file_lock(kind: i32) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: 0, // SEEK_SET
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

#[derive(Debug)]
struct DirFile(File);

impl StoredFile for DirFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match self.0.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}

/// Writes a small file so that its name shows the old content or the new, never a part.
///
/// # Errors
///
/// What was being done, and what the filesystem said. The temporary file is removed.
pub(super) fn write_atomically(
    storage: &dyn Storage,
    dir: &str,
    name: &str,
    bytes: &[u8],
) -> Result<(), (&'static str, io::Error)> {
    let path = |name: &str| {
        if dir.is_empty() {
            name.to_owned()
        } else {
            format!("{dir}/{name}")
        }
    };
    let temporary = path(&format!("{name}.tmp"));
    let written = (|| {
        let file = storage
            .open(&temporary, Access::Create)
            .map_err(|error| ("create", error))?;
        file.write_all_at(bytes, 0)
            .map_err(|error| ("write", error))?;
        file.sync().map_err(|error| ("sync", error))?;
        drop(file);
        storage
            .rename(&temporary, &path(name))
            .map_err(|error| ("rename", error))?;
        storage
            .sync_dir(dir)
            .map_err(|error| ("sync directory of", error))
    })();
    if written.is_err() {
        let _ = storage.remove(&temporary);
    }
    written
}

/// Reads a whole file of at most `max` bytes; `None` if it is longer.
///
/// # Errors
///
/// What the filesystem said.
pub(super) fn read_bounded(
    storage: &dyn Storage,
    name: &str,
    max: usize,
) -> io::Result<Option<Vec<u8>>> {
    let file = storage.open(name, Access::Read)?;
    let len = file.len()?;
    let Some(len) = usize::try_from(len).ok().filter(|&len| len <= max) else {
        return Ok(None);
    };
    let mut bytes = vec![0; len];
    let read = file.read_at(&mut bytes, 0)?;
    bytes.truncate(read);
    Ok(Some(bytes))
}
