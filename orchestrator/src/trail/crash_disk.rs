//! A disk for tests: it knows what is live, what is durable, and what a crash may leave.
//!
//! It models the failures that a store must survive, not only the success:
//! - unsynced sectors land or do not land, each by itself, and the length lies anywhere between;
//! - a new, renamed or removed name is lost unless its directory was synced (in the order of the operations);
//! - after a sync that failed the pages are *clean*: they can be read, and the next sync succeeds without having written
//!   them (what Linux does: `fsync` reports an error once and drops the dirty bits);
//! - a full disk takes a part of a write and then refuses.
//!
//! Used by the trail's own tests and by the simulator.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::storage::{Access, Holder, LockGuard, LockOutcome, Storage, StoredFile};

/// What lands whole or not at all.
pub const SECTOR: usize = 512;

/// A disk in memory.
#[derive(Debug, Clone, Default)]
pub struct CrashDisk {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    files: Vec<FileState>,
    /// What a process sees.
    live: BTreeMap<String, usize>,
    /// What a crash leaves for sure.
    durable: BTreeMap<String, usize>,
    dirs: BTreeSet<String>,
    /// Operations on names that no sync of their directory has made durable, oldest first.
    pending: Vec<NameOperation>,
    locked: bool,
    capacity: Option<u64>,
    failing_syncs: u32,
    syncs: u64,
    operations: u64,
    /// Operations after which everything fails: the process is as good as dead.
    dies_at: Option<u64>,
}

#[derive(Debug, Default, Clone)]
struct FileState {
    live: Vec<u8>,
    durable: Vec<u8>,
    dirty: BTreeSet<usize>,
    /// The shortest that the file was since its last sync, if it was cut.
    cut_to: Option<usize>,
}

#[derive(Debug, Clone)]
enum NameOperation {
    Link { name: String, file: usize },
    Unlink { name: String },
    Rename { from: String, to: String },
}

impl CrashDisk {
    /// An empty disk without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that fit, over all files; `None` is no limit.
    pub fn set_capacity(&self, capacity: Option<u64>) {
        self.state().capacity = capacity;
    }

    /// Makes the next syncs fail with `EIO`.
    pub fn fail_syncs(&self, count: u32) {
        self.state().failing_syncs = count;
    }

    /// Lets so many more operations through; every one after them fails.
    pub fn die_after(&self, operations: u64) {
        let mut state = self.state();
        state.dies_at = Some(state.operations + operations);
    }

    /// Syncs of files that succeeded.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.state().syncs
    }

    /// Operations so far.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// The live content of a file.
    #[must_use]
    pub fn content(&self, name: &str) -> Option<Vec<u8>> {
        let state = self.state();
        state
            .live
            .get(name)
            .map(|&file| state.files[file].live.clone())
    }

    /// Names of all live files, in order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.state().live.keys().cloned().collect()
    }

    /// Changes a file behind everybody's back, durable and live alike.
    ///
    /// # Panics
    ///
    /// There is no such file.
    pub fn tamper(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state();
        let file = state.live[name];
        let file = &mut state.files[file];
        change(&mut file.live);
        file.durable.clone_from(&file.live);
        file.dirty.clear();
    }

    /// Takes a file away behind everybody's back.
    pub fn lose(&self, name: &str) {
        let mut state = self.state();
        state.live.remove(name);
        state.durable.remove(name);
    }

    /// The disk as a crash leaves it. `choose(n)` answers a number below `n` and decides what landed; the same answers
    /// give the same disk.
    ///
    /// # Panics
    ///
    /// `choose` answered out of range.
    #[must_use]
    pub fn crash(&self, mut choose: impl FnMut(usize) -> usize) -> Self {
        let state = self.state();
        let mut names = state.durable.clone();
        let landed = choose(state.pending.len() + 1);
        for operation in &state.pending[..landed] {
            apply(&mut names, operation);
        }
        let mut files = Vec::with_capacity(state.files.len());
        for file in &state.files {
            files.push(file.after_crash(&mut choose));
        }
        Self {
            state: Arc::new(Mutex::new(State {
                files,
                live: names.clone(),
                durable: names,
                dirs: state.dirs.clone(),
                ..State::default()
            })),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A test that panicked with the lock held has failed anyway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileState {
    fn after_crash(&self, choose: &mut impl FnMut(usize) -> usize) -> Self {
        let mut content = self.durable.clone();
        let (short, long) = if self.live.len() < content.len() {
            (self.live.len(), content.len())
        } else {
            (content.len(), self.live.len())
        };
        // Lengths between two sectors are as likely as whole ones: the length is metadata.
        content.resize(short + choose(long - short + 1), 0);
        for &sector in &self.dirty {
            if choose(2) == 1 {
                let from = sector * SECTOR;
                let to = (from + SECTOR).min(content.len()).min(self.live.len());
                if from < to {
                    content[from..to].copy_from_slice(&self.live[from..to]);
                }
            }
        }
        Self {
            live: content.clone(),
            durable: content,
            dirty: BTreeSet::new(),
            cut_to: None,
        }
    }

    fn mark_dirty(&mut self, from: usize, to: usize) {
        self.dirty.extend(from / SECTOR..to.div_ceil(SECTOR));
    }

    fn cut(&mut self, len: usize) {
        self.cut_to = Some(self.cut_to.map_or(len, |cut_to| cut_to.min(len)));
        self.live.truncate(len);
        self.dirty.retain(|&sector| sector * SECTOR < len);
        if !len.is_multiple_of(SECTOR) {
            // The rest of the last sector is zeroed.
            self.mark_dirty(len - 1, len);
        }
    }

    fn sync(&mut self) {
        if let Some(len) = self.cut_to.take() {
            self.durable.truncate(len);
        }
        self.durable.resize(self.live.len(), 0);
        for sector in std::mem::take(&mut self.dirty) {
            let from = sector * SECTOR;
            let to = (from + SECTOR).min(self.live.len());
            if from < to {
                self.durable[from..to].copy_from_slice(&self.live[from..to]);
            }
        }
    }
}

impl State {
    fn operate(&mut self) -> io::Result<()> {
        if self.dies_at.is_some_and(|at| self.operations >= at) {
            return Err(io::Error::other("the process is dead"));
        }
        self.operations += 1;
        Ok(())
    }

    fn used(&self) -> u64 {
        self.live
            .values()
            .map(|&file| self.files[file].live.len() as u64)
            .sum()
    }

    fn rename_live(&mut self, operation: NameOperation) {
        apply(&mut self.live, &operation);
        self.pending.push(operation);
    }
}

fn apply(names: &mut BTreeMap<String, usize>, operation: &NameOperation) {
    match operation {
        NameOperation::Link { name, file } => {
            names.insert(name.clone(), *file);
        }
        NameOperation::Unlink { name } => {
            names.remove(name);
        }
        NameOperation::Rename { from, to } => {
            if let Some(file) = names.remove(from) {
                names.insert(to.clone(), file);
            }
        }
    }
}

fn dir_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(dir, _)| dir)
}

fn not_found() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Storage for CrashDisk {
    fn place(&self, name: &str) -> PathBuf {
        PathBuf::from("crash-disk").join(name)
    }

    fn lock(&self) -> io::Result<LockOutcome> {
        let mut state = self.state();
        state.operate()?;
        if state.locked {
            return Ok(LockOutcome::Busy(Holder { pid: None }));
        }
        state.locked = true;
        if !state.live.contains_key("lock") {
            let file = state.files.len();
            state.files.push(FileState::default());
            state.rename_live(NameOperation::Link {
                name: "lock".to_owned(),
                file,
            });
        }
        Ok(LockOutcome::Held(Box::new(DiskLock(self.clone()))))
    }

    fn lock_holder(&self) -> io::Result<Option<Holder>> {
        Ok(self.state().locked.then_some(Holder { pid: None }))
    }

    fn make_dir(&self, name: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        state.dirs.insert(name.to_owned());
        Ok(())
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let state = self.state();
        if !state.dirs.contains(dir) {
            return Err(not_found());
        }
        let files = state.live.keys().map(String::as_str);
        let dirs = state.dirs.iter().map(String::as_str);
        let mut names: Vec<_> = files
            .chain(dirs.filter(|name| !name.is_empty()))
            .filter(|name| dir_of(name) == dir)
            .map(|name| name.rsplit_once('/').map_or(name, |(_, name)| name))
            .map(str::to_owned)
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    fn open(&self, name: &str, access: Access) -> io::Result<Box<dyn StoredFile>> {
        let mut state = self.state();
        if access != Access::Read {
            state.operate()?;
        }
        let file = match (state.live.get(name).copied(), access) {
            (Some(file), Access::Create) => {
                state.files[file].cut(0);
                file
            }
            (Some(file), _) => file,
            (None, Access::Create) => {
                if !state.dirs.contains(dir_of(name)) {
                    return Err(not_found());
                }
                let file = state.files.len();
                state.files.push(FileState::default());
                state.rename_live(NameOperation::Link {
                    name: name.to_owned(),
                    file,
                });
                file
            }
            (None, _) => return Err(not_found()),
        };
        Ok(Box::new(DiskFile {
            disk: self.clone(),
            file,
        }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        if !state.live.contains_key(from) {
            return Err(not_found());
        }
        state.rename_live(NameOperation::Rename {
            from: from.to_owned(),
            to: to.to_owned(),
        });
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        if !state.live.contains_key(name) {
            return Err(not_found());
        }
        state.rename_live(NameOperation::Unlink {
            name: name.to_owned(),
        });
        Ok(())
    }

    fn remove_dir(&self, name: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        state.dirs.remove(name);
        Ok(())
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        let pending = std::mem::take(&mut state.pending);
        for operation in pending {
            let name = match &operation {
                NameOperation::Link { name, .. } | NameOperation::Unlink { name } => name,
                NameOperation::Rename { to, .. } => to,
            };
            if dir_of(name) == dir {
                apply(&mut state.durable, &operation);
            } else {
                state.pending.push(operation);
            }
        }
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        let state = self.state();
        Ok(state
            .capacity
            .map(|capacity| capacity.saturating_sub(state.used())))
    }
}

#[derive(Debug)]
struct DiskLock(CrashDisk);

impl LockGuard for DiskLock {}

impl Drop for DiskLock {
    fn drop(&mut self) {
        self.0.state().locked = false;
    }
}

#[derive(Debug)]
struct DiskFile {
    disk: CrashDisk,
    file: usize,
}

impl StoredFile for DiskFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let state = self.disk.state();
        let content = &state.files[self.file].live;
        let from = usize::try_from(offset).map_or(content.len(), |at| at.min(content.len()));
        let len = buffer.len().min(content.len() - from);
        buffer[..len].copy_from_slice(&content[from..from + len]);
        Ok(len)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.operate()?;
        let from = usize::try_from(offset).map_err(io::Error::other)?;
        let old_len = state.files[self.file].live.len();
        let growth = (from + bytes.len()).saturating_sub(old_len);
        let room = state
            .capacity
            .map_or(u64::MAX, |capacity| capacity.saturating_sub(state.used()));
        let missing = usize::try_from((growth as u64).saturating_sub(room))
            .unwrap_or(bytes.len())
            .min(bytes.len());
        let taken = &bytes[..bytes.len() - missing];
        let file = &mut state.files[self.file];
        if file.live.len() < from + taken.len() {
            file.live.resize(from + taken.len(), 0);
        }
        file.live[from..from + taken.len()].copy_from_slice(taken);
        file.mark_dirty(from, from + taken.len());
        if missing > 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        state.operate()?;
        if state.failing_syncs > 0 {
            state.failing_syncs -= 1;
            // The pages are clean now, and not on the disk.
            state.files[self.file].dirty.clear();
            return Err(io::Error::from_raw_os_error(nix::libc::EIO));
        }
        state.syncs += 1;
        state.files[self.file].sync();
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.operate()?;
        let len = usize::try_from(len).map_err(io::Error::other)?;
        let file = &mut state.files[self.file];
        if len < file.live.len() {
            file.cut(len);
        } else {
            file.live.resize(len, 0);
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.file].live.len() as u64)
    }
}
