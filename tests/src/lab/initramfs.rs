//! The guest's whole userland in one archive: busybox, the virtio modules, the agent, the workload.
//!
//! Not compressed: QEMU hands it over by DMA and the guest would unpack it under emulation, which takes longer than the
//! bytes do.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};

use super::Lab;
use super::build::short_hash;
use super::cpio::Archive;
use super::setup::Ready;

const INIT: &str = include_str!("init.sh");

/// Images that nobody used for this long are removed when a new one is made.
const IMAGE_KEPT: Duration = Duration::from_secs(24 * 3600);

/// Who takes the trace out of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exporter {
    /// `vmtrail-agent` with these arguments.
    Agent(Vec<String>),
    /// The usual way: `trace_pipe_raw` copied into a port, a process a CPU.
    Copy,
    /// Nobody: marks and events stay in the guest's ring. For guests without ports.
    Nobody,
}

/// What the workload does besides writing marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// Threads that make sched, irq, timer, kmem and syscall events.
    Busy,
    /// Nothing: the guest is quiet between marks.
    Quiet,
}

/// What is different from one guest to another, and written into its image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Userland {
    /// Who exports.
    pub exporter: Exporter,
    /// Events that init enables in the instance when no agent does, as `sched` or `sched:sched_switch`.
    pub events: Vec<String>,
    /// Kilobytes a CPU of the instance's ring when no agent makes it.
    pub ring_kib: u32,
    /// Marks a second on each CPU; 0 for none.
    pub marks_per_second: u32,
    /// What else runs.
    pub load: Load,
    /// A shell on the console, for people.
    pub shell: bool,
}

impl Default for Userland {
    fn default() -> Self {
        Self {
            exporter: Exporter::Agent(Vec::new()),
            events: Vec::new(),
            ring_kib: 4096,
            marks_per_second: 1000,
            load: Load::Busy,
            shell: false,
        }
    }
}

/// Writes the image, or finds the one that was written before from the same content.
///
/// # Errors
///
/// If a part cannot be read or the image cannot be written.
pub fn image(
    lab: &Lab,
    ready: &Ready,
    agent: Option<&Path>,
    workload: &Path,
    userland: &Userland,
) -> Result<PathBuf> {
    let mut archive = Archive::new();
    for dir in ["bin", "dev", "proc", "sys", "tmp", "run", "etc", "modules"] {
        archive.directory(dir)?;
    }
    // The kernel opens this one for init before devtmpfs is mounted.
    archive.character_device("dev/console", 5, 1)?;
    archive.file("init", 0o755, INIT.as_bytes())?;
    archive.file("etc/lab.conf", 0o644, configuration(userland)?.as_bytes())?;
    archive.file("bin/busybox", 0o755, &read(&ready.busybox)?)?;
    archive.file("bin/guest-workload", 0o755, &read(workload)?)?;
    if let Some(agent) = agent {
        archive.file("bin/vmtrail-agent", 0o755, &read(agent)?)?;
    }
    let mut order = String::new();
    for path in ready.kernel.virtio_serial_modules()? {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .with_context(|| format!("failed to name the module {}", path.display()))?
            .to_owned();
        archive.file(&format!("modules/{name}"), 0o644, &read(&path)?)?;
        order.push_str(&name);
        order.push('\n');
    }
    archive.file("modules/order", 0o644, order.as_bytes())?;
    let bytes = archive.finish()?;

    let _alone = lab.lock("initramfs")?;
    let dir = lab.dir("guest")?;
    let path = dir.join(format!("initramfs-{}.cpio", short_hash(&[&bytes])));
    if path.is_file() {
        // Its age is counted from the last use.
        let _ = fs::File::options()
            .append(true)
            .open(&path)
            .and_then(|file| file.set_modified(SystemTime::now()));
        return Ok(path);
    }
    remove_old_images(&dir);
    let unfinished = path.with_extension("unfinished");
    fs::write(&unfinished, bytes)
        .and_then(|()| fs::rename(&unfinished, &path))
        .with_context(|| format!("failed to write the initramfs {}", path.display()))?;
    Ok(path)
}

/// A file that init sources. Every value is quoted, and none of them may end the quotes.
fn configuration(userland: &Userland) -> Result<String> {
    let (exporter, arguments) = match &userland.exporter {
        Exporter::Agent(arguments) => ("agent", arguments.join(" ")),
        Exporter::Copy => ("copy", String::new()),
        Exporter::Nobody => ("nobody", String::new()),
    };
    let load = match userland.load {
        Load::Busy => "busy",
        Load::Quiet => "quiet",
    };
    let mut text = String::new();
    for (key, value) in [
        ("EXPORTER", exporter.to_owned()),
        ("AGENT_ARGUMENTS", arguments),
        ("EVENTS", userland.events.join(" ")),
        ("RING_KIB", userland.ring_kib.to_string()),
        ("MARKS_PER_SECOND", userland.marks_per_second.to_string()),
        ("LOAD", load.to_owned()),
        (
            "SHELL_WANTED",
            if userland.shell { "yes" } else { "no" }.to_owned(),
        ),
    ] {
        if value.contains(['\'', '\n']) {
            bail!("failed to configure the guest: {key} may not contain quotes or line ends");
        }
        writeln!(text, "{key}='{value}'").expect("writing to a String does not fail");
    }
    Ok(text)
}

fn remove_old_images(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        let old = entry
            .file_name()
            .to_string_lossy()
            .starts_with("initramfs-")
            && entry
                .metadata()
                .and_then(|metadata| metadata.modified())
                .is_ok_and(|when| when.elapsed().is_ok_and(|age| age > IMAGE_KEPT));
        if old {
            // Somebody else may be removing it at the same time.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("failed to read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_cannot_leave_its_quotes() {
        let hostile = Userland {
            exporter: Exporter::Agent(vec!["'; reboot; '".to_owned()]),
            ..Userland::default()
        };
        assert!(configuration(&hostile).is_err());
    }

    #[test]
    fn the_configuration_says_who_exports() {
        let copy = Userland {
            exporter: Exporter::Copy,
            ..Userland::default()
        };
        assert!(configuration(&copy).unwrap().contains("EXPORTER='copy'\n"));
    }
}
