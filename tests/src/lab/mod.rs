//! The lab: real kernels in real QEMUs, moved between two of them on one machine.
//!
//! # Design constraints
//!
//! - **Only [`setup`] may need root**, and only to install QEMU. Kernel and busybox are downloaded into the lab's own
//!   directory with an apt configuration of its own, so the machine's sources, its installed kernels and its
//!   `busybox` package stay as they are.
//! - **TCG, never KVM by itself.** The lab has to run inside other people's virtual machines and CI runners, where
//!   `/dev/kvm` is absent or, worse, opens and then hangs the guest. `--accel kvm` is there for who knows better.
//! - **A guest cannot outlive the lab.** Every QEMU dies with the thread that started it, and is ended by its pid.
//! - **Waiting is bounded, wall time is not asserted.** Two emulated guests on two shared cores are slow in ways that
//!   no test may depend on; a bound is there to end a hang with a console log, not to measure.
//!
//! What is where under the lab's directory (`.lab` of the repository, or `VMTRAIL_LAB_DIR`):
//!
//! ```text
//! apt/          private package lists          kernel/6.1/   vmlinuz and modules, unpacked, not installed
//! busybox/      the static busybox             guest/        workload, initramfs images by content
//! logs/         what the steps printed         target-agent/ cargo's directory of the static agent
//! demo/         trails and consoles of demos
//! ```

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context as _, Result};
use nix::fcntl::{Flock, FlockArg};

pub mod bench;
pub mod build;
pub mod cpio;
pub mod demo;
pub mod guest;
pub mod initramfs;
pub mod kernel;
pub mod naive;
pub mod process;
pub mod qmp;
pub mod setup;
pub mod vmtrail;

/// The lab's directory and what belongs into it.
#[derive(Debug, Clone)]
pub struct Lab {
    root: PathBuf,
}

impl Lab {
    /// Opens the lab's directory, creating it if it is missing.
    ///
    /// # Errors
    ///
    /// If the directory cannot be created.
    pub fn open() -> Result<Self> {
        let root = match env::var_os("VMTRAIL_LAB_DIR") {
            Some(dir) if !dir.is_empty() => PathBuf::from(dir),
            _ => repository().join(".lab"),
        };
        fs::create_dir_all(&root)
            .with_context(|| format!("failed to create the lab's directory {}", root.display()))?;
        let root = root
            .canonicalize()
            .with_context(|| format!("failed to resolve the lab's directory {}", root.display()))?;
        Ok(Self { root })
    }

    /// The lab's directory, absolute.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A directory of the lab, created if it is missing.
    ///
    /// # Errors
    ///
    /// If the directory cannot be created.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(name);
        fs::create_dir_all(&dir)
            .with_context(|| format!("failed to create the lab's directory {}", dir.display()))?;
        Ok(dir)
    }

    /// Holds `name` against other lab processes until the guard is dropped.
    ///
    /// `cargo test` runs tests in several processes and threads, and all of them find out at the same time that the
    /// kernel is missing.
    ///
    /// # Errors
    ///
    /// If the lock file cannot be opened or locked.
    pub fn lock(&self, name: &str) -> Result<Flock<fs::File>> {
        let path = self.dir("locks")?.join(name);
        let file = fs::File::create(&path)
            .with_context(|| format!("failed to open the lock {}", path.display()))?;
        Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, errno)| errno)
            .with_context(|| format!("failed to lock {}", path.display()))
    }
}

/// The repository that this lab was built from.
#[must_use]
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the package vmtrail-tests lies in a directory of the repository")
}
