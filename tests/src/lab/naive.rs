//! The usual way, to measure what it costs: `trace_pipe_raw` copied into a port, a reader that copies the port to a file, and after a
//! migration another reader on the other side, attached once the guest runs there. No handover, no replay.
//!
//! Nothing is made worse than it would be: the source's reader keeps reading until QEMU ends, as it would; the destination's
//! comes [`ATTACH_DELAY`] after the guest runs, which is quick for a script that a management hook starts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, Result, bail};

use super::demo::Plan;
use super::guest::{Backend, Guest, Naming, Ports, VmSpec};
use super::initramfs::{self, Exporter, Userland};
use super::qmp::{Migrated, migrate_plainly};
use super::setup::{Ready, say};
use super::{Lab, build};
use crate::check::marks::{Evidence, Finding, judge};

/// When the destination's reader comes after the guest runs there.
pub const ATTACH_DELAY: Duration = Duration::from_millis(500);

/// At the end, readers are given until nothing has come for so long.
const SETTLED: Duration = Duration::from_millis(1500);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pages of the lab's kernels.
const PAGE: u32 = 4096;

/// What the usual way brought home.
#[derive(Debug)]
pub struct Naive {
    /// What the judge says of it.
    pub finding: Finding,
    /// What was found.
    pub evidence: Evidence,
    /// What QEMU says of each migration.
    pub migrations: Vec<Migrated>,
}

/// Boots a guest, records it the usual way through the plan's migrations, and judges.
///
/// The raw files are left in `dir`.
///
/// # Errors
///
/// If the lab fails; a bad trace is a result.
pub fn run(lab: &Lab, ready: &Ready, dir: &Path, events: &[String], plan: &Plan) -> Result<Naive> {
    fs::create_dir_all(dir).with_context(|| format!("failed to create {}", dir.display()))?;
    let userland = Userland {
        exporter: Exporter::Copy,
        events: events.to_vec(),
        ..Userland::default()
    };
    let image = initramfs::image(lab, ready, None, &build::workload(lab)?, &userland)?;
    let mut spec = VmSpec::new("usual", &ready.kernel.image, &image);
    spec.ports = Ports::Present {
        count: spec.vcpus,
        naming: Naming::TracePath,
        backend: Backend::Socket,
    };

    spec.accel = plan.accel;
    let mut guest = spec.boot()?;
    // Before the guest has booted: what it writes while nobody is connected is thrown away.
    let mut readers = vec![Readers::attach(&guest, &dir.join("host-0"))?];
    guest.wait_ready()?;
    let mut left = Vec::new();
    let mut migrations = Vec::new();
    for number in 1..=plan.moves {
        thread::sleep(plan.between);
        let next = spec.incoming()?;
        let migrated = migrate_plainly(&guest, &next)?;
        say(&format!(
            "lab: the usual way: migration {number}, downtime {} ms",
            migrated.downtime_ms
        ));
        migrations.push(migrated);
        thread::sleep(ATTACH_DELAY);
        readers.push(Readers::attach(&next, &dir.join(format!("host-{number}")))?);
        left.push(guest);
        guest = next;
    }
    thread::sleep(plan.between);
    let last = guest.stop_marks()?;
    guest.shell("echo 0 > /sys/kernel/tracing/instances/vmtrail/tracing_on")?;
    readers.iter().try_for_each(Readers::settle)?;
    let mut files: BTreeMap<u32, Vec<PathBuf>> = BTreeMap::new();
    for reader in readers {
        for (cpu, file) in reader.detach()? {
            files.entry(cpu).or_default().push(file);
        }
    }
    guest.stop()?;
    left.into_iter().try_for_each(Guest::stop)?;

    let mut evidence = Evidence::default();
    for (cpu, files) in files {
        for file in files {
            let bytes =
                fs::read(&file).with_context(|| format!("failed to read {}", file.display()))?;
            evidence.add_raw(cpu, &bytes, PAGE);
        }
    }
    let finding = judge(&evidence, &last, &[]);
    Ok(Naive {
        finding,
        evidence,
        migrations,
    })
}

/// `cat` on each port of one QEMU.
#[derive(Debug)]
struct Readers {
    readers: Vec<Reader>,
}

#[derive(Debug)]
struct Reader {
    cpu: u32,
    file: PathBuf,
    stream: UnixStream,
    copying: JoinHandle<io::Result<()>>,
}

impl Readers {
    fn attach(guest: &Guest, dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("failed to create {}", dir.display()))?;
        let mut readers = Vec::new();
        for (cpu, (_, path)) in (0..).zip(guest.ports()) {
            let stream = connect(&path)?;
            let file = dir.join(format!("cpu{cpu}.raw"));
            let mut from = stream
                .try_clone()
                .context("failed to share a port's socket")?;
            let mut to = File::create(&file)
                .with_context(|| format!("failed to create {}", file.display()))?;
            let copying = thread::spawn(move || {
                let mut buffer = vec![0; 64 << 10];
                loop {
                    match from.read(&mut buffer) {
                        Ok(0) => return Ok(()),
                        Ok(n) => to.write_all(&buffer[..n])?,
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        // QEMU was ended with bytes unread.
                        Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
                        Err(error) => return Err(error),
                    }
                }
            });
            readers.push(Reader {
                cpu,
                file,
                stream,
                copying,
            });
        }
        Ok(Self { readers })
    }

    /// Waits until nothing comes any more.
    fn settle(&self) -> Result<()> {
        let size = || -> u64 {
            self.readers
                .iter()
                .filter_map(|reader| fs::metadata(&reader.file).ok())
                .map(|metadata| metadata.len())
                .sum()
        };
        let begun = Instant::now();
        let mut last = size();
        let mut since = Instant::now();
        while since.elapsed() < SETTLED {
            if begun.elapsed() > SETTLE_TIMEOUT {
                bail!(
                    "failed to see a port fall silent within {} s",
                    SETTLE_TIMEOUT.as_secs()
                );
            }
            thread::sleep(Duration::from_millis(100));
            let now = size();
            if now != last {
                last = now;
                since = Instant::now();
            }
        }
        Ok(())
    }

    fn detach(self) -> Result<Vec<(u32, PathBuf)>> {
        let mut files = Vec::new();
        for reader in self.readers {
            // Its QEMU may have gone.
            let _ = reader.stream.shutdown(Shutdown::Both);
            match reader.copying.join() {
                Ok(result) => result.with_context(|| {
                    format!("failed to copy a port to {}", reader.file.display())
                })?,
                Err(_) => bail!("failed to copy a port: its thread ended badly"),
            }
            files.push((reader.cpu, reader.file));
        }
        Ok(files)
    }
}

fn connect(path: &Path) -> Result<UnixStream> {
    let begun = Instant::now();
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(_) if begun.elapsed() < Duration::from_secs(20) => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("failed to connect to the port {}", path.display()));
            }
        }
    }
}
