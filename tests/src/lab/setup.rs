//! `cargo lab setup`: from a bare Debian machine to one that can boot the lab's guests.
//!
//! Each step says what it is about to do, does nothing when its result is there, and leaves its result complete or not at
//! all (unpacked beside its place, then renamed), so an interrupted setup is mended by running it again.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context as _, Result, bail};
use nix::unistd::Uid;

use super::kernel::{Archive, Kernel, Release};
use super::process::{in_path, output_of, run_logged};
use super::{Lab, guest};

/// Named `.gpg` up to bookworm and `.pgp` from trixie on; each has the keys of the releases before it.
const KEYRINGS: [&str; 2] = [
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
];
const QEMU_PACKAGE: &str = "qemu-system-x86";

/// Mirrors have bad minutes; a setup that gives up in the first of them wastes somebody's quarter of an hour.
const APT_ATTEMPTS: u32 = 4;
const APT_PAUSE: Duration = Duration::from_secs(4);

/// What a ready lab consists of.
#[derive(Debug, Clone)]
pub struct Ready {
    /// The guest kernel.
    pub kernel: Kernel,
    /// The static busybox.
    pub busybox: PathBuf,
}

/// Makes the lab able to boot guests of `release`.
///
/// # Errors
///
/// If a step fails, with what it printed last.
pub fn setup(lab: &Lab, release: Release) -> Result<Ready> {
    let _alone = lab.lock("setup")?;
    ensure_qemu(lab)?;
    let busybox = ensure_busybox(lab)?;
    let kernel = ensure_kernel(lab, release)?;
    Ok(Ready { kernel, busybox })
}

/// Whether [`setup`] would have nothing to do.
///
/// # Errors
///
/// If the lab's directory is there and broken.
pub fn is_ready(lab: &Lab, release: Release) -> Result<bool> {
    Ok(qemu_is_there() && busybox_path(lab).is_file() && Kernel::find(lab, release)?.is_some())
}

fn qemu_is_there() -> bool {
    env::var_os(guest::QEMU_VARIABLE).is_some() || in_path(guest::QEMU)
}

fn ensure_qemu(lab: &Lab) -> Result<()> {
    if qemu_is_there() {
        return Ok(());
    }
    if !in_path("apt-get") {
        bail!(
            "failed to find {} in PATH: the lab installs it on Debian only; install QEMU for x86-64 by hand",
            guest::QEMU
        );
    }
    let step = Step::begin(&format!(
        "installing the package {QEMU_PACKAGE} (needs root)"
    ));
    let log = lab.dir("logs")?.join("apt-install.log");
    let install = [
        "install",
        "-y",
        "--no-install-recommends",
        "-o",
        "DPkg::Lock::Timeout=120",
        QEMU_PACKAGE,
    ];
    let mut last = None;
    for attempt in 0..APT_ATTEMPTS {
        match attempt {
            0 => {}
            // Lists are missing on a fresh image and stale on an old one. Repositories of others that cannot be reached
            // make `update` fail without harm to us, so its failure is only told if the installation fails too.
            1 => step.note("the package lists are missing or old: apt-get update"),
            n => {
                step.note(&format!("trying again ({} of {APT_ATTEMPTS})", n + 1));
                thread::sleep(APT_PAUSE * n);
            }
        }
        if attempt > 0 {
            let update_log = lab.dir("logs")?.join("apt-update.log");
            if let Err(error) = run_logged(&mut as_root("apt-get", &["update"])?, &update_log) {
                step.note(&format!("{error:#}"));
            }
        }
        match run_logged(&mut as_root("apt-get", &install)?, &log) {
            Ok(()) => {
                step.end();
                return Ok(());
            }
            Err(error) => last = Some(error),
        }
    }
    Err(last.expect("there is more than one attempt and each leaves its error"))
        .with_context(|| format!("failed to install {QEMU_PACKAGE}"))
}

/// A command that runs as root: by itself if we are, else through sudo.
fn as_root(program: &str, arguments: &[&str]) -> Result<Command> {
    let mut command = if Uid::effective().is_root() {
        Command::new(program)
    } else if in_path("sudo") {
        let mut sudo = Command::new("sudo");
        sudo.arg("DEBIAN_FRONTEND=noninteractive").arg(program);
        sudo
    } else {
        bail!(
            "failed to become root: there is no sudo here. Run this as root once: {program} {}",
            arguments.join(" ")
        );
    };
    command
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive");
    Ok(command)
}

fn busybox_path(lab: &Lab) -> PathBuf {
    lab.root().join("busybox/bin/busybox")
}

/// Unpacked rather than installed: the package conflicts with the dynamic `busybox` that the machine's own initramfs uses.
fn ensure_busybox(lab: &Lab) -> Result<PathBuf> {
    let path = busybox_path(lab);
    if path.is_file() {
        return Ok(path);
    }
    let step = Step::begin("downloading busybox-static (unpacked into the lab, not installed)");
    let apt = PrivateApt::open(lab, Release::V6_1)?;
    apt.unpack("busybox-static", &lab.root().join("busybox"))
        .context("failed to unpack busybox-static")?;
    if !path.is_file() {
        bail!("failed to find bin/busybox in the package busybox-static");
    }
    step.end();
    Ok(path)
}

fn ensure_kernel(lab: &Lab, release: Release) -> Result<Kernel> {
    if let Some(kernel) = Kernel::find(lab, release)? {
        return Ok(kernel);
    }
    let step = Step::begin(&format!(
        "downloading the guest kernel {release}, what linux-image-cloud-amd64 depends on (unpacked into the lab, not installed)"
    ));
    let apt = PrivateApt::open(lab, release)?;
    let package = apt.kernel_package(release)?;
    step.note(&package);
    lab.dir("kernel")?;
    apt.unpack(&package, &Kernel::tree(lab, release))
        .with_context(|| format!("failed to unpack {package}"))?;
    let kernel = Kernel::find(lab, release)?
        .with_context(|| format!("failed to find a kernel in the package {package}"))?;
    step.end();
    Ok(kernel)
}

/// An apt that knows one Debian release and nothing of this machine.
///
/// The system's apt would need root for its lists, and offers whatever kernel the machine's own release has; the lab wants
/// the same guest on bookworm and on trixie.
#[derive(Debug)]
struct PrivateApt<'a> {
    lab: &'a Lab,
    dir: PathBuf,
}

impl<'a> PrivateApt<'a> {
    /// Writes its configuration and fetches its lists.
    fn open(lab: &'a Lab, release: Release) -> Result<Self> {
        for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
            if !in_path(tool) {
                bail!("failed to find {tool} in PATH: the lab needs a Debian machine");
            }
        }
        let dir = lab.dir("apt")?.join(release.to_string());
        for sub in ["lists/partial", "cache/archives/partial"] {
            let sub = dir.join(sub);
            fs::create_dir_all(&sub)
                .with_context(|| format!("failed to create {}", sub.display()))?;
        }
        let keyring = KEYRINGS
            .into_iter()
            .find(|path| Path::new(path).is_file())
            .with_context(|| format!("failed to find Debian's archive keys at {}", KEYRINGS[0]))?;
        let mut sources = String::new();
        for (archive, suite) in release.suites() {
            let mirror = mirror_of(*archive);
            sources.push_str("deb [arch=amd64 signed-by=");
            sources.push_str(keyring);
            sources.push_str("] ");
            sources.push_str(&mirror);
            sources.push(' ');
            sources.push_str(suite);
            sources.push_str(" main\n");
        }
        write(&dir.join("sources.list"), &sources)?;
        write(&dir.join("status"), "")?;
        let apt = Self { lab, dir };
        retrying(|| {
            run_logged(
                apt.command("apt-get")
                    .args(["update", "-o", "APT::Update::Error-Mode=any"]),
                &lab.dir("logs")?.join("apt-lists.log"),
            )
        })
        .context("failed to fetch Debian's package lists")?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (key, value) in [
            ("Dir::State::lists", self.dir.join("lists")),
            ("Dir::State::status", self.dir.join("status")),
            ("Dir::Cache", self.dir.join("cache")),
            ("Dir::Etc::sourcelist", self.dir.join("sources.list")),
            ("Dir::Etc::sourceparts", PathBuf::from("/dev/null")),
            ("Dir::Etc::preferencesparts", PathBuf::from("/dev/null")),
        ] {
            command.arg("-o").arg(format!("{key}={}", value.display()));
        }
        // As root, apt would download as `_apt`, who may not enter a checkout in somebody's home.
        command.args([
            "-o",
            "APT::Sandbox::User=root",
            "-o",
            "Acquire::Languages=none",
        ]);
        command.args([
            "-o",
            "Acquire::Retries=3",
            "-o",
            "Acquire::http::Timeout=30",
        ]);
        command
    }

    /// The package behind `linux-image-cloud-amd64`, whose name changes with every ABI of the kernel.
    fn kernel_package(&self, release: Release) -> Result<String> {
        let records = output_of(
            self.command("apt-cache")
                .args(["show", "linux-image-cloud-amd64"]),
        )?;
        // Records come newest first; a suite and its security updates each have one.
        records
            .lines()
            .filter_map(|line| line.strip_prefix("Depends: "))
            .filter_map(|depends| depends.split([' ', ',']).next())
            .find(|package| {
                package
                    .strip_prefix("linux-image-")
                    .is_some_and(|version| version.starts_with(&format!("{release}.")))
            })
            .map(str::to_owned)
            .with_context(|| {
                format!("failed to find a {release} kernel behind linux-image-cloud-amd64 in Debian's lists")
            })
    }

    /// Downloads `package` and unpacks it as the directory `to`, which appears complete or not at all.
    fn unpack(&self, package: &str, to: &Path) -> Result<()> {
        let work = tempfile::tempdir_in(self.lab.root())
            .context("failed to create a directory to unpack in")?;
        let log = self.lab.dir("logs")?.join("apt-download.log");
        retrying(|| {
            run_logged(
                self.command("apt-get")
                    .arg("download")
                    .arg(package)
                    .current_dir(work.path()),
                &log,
            )
        })?;
        let deb = fs::read_dir(work.path())
            .context("failed to look for the downloaded package")?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .with_context(|| format!("failed to find the package {package} that apt downloaded"))?;
        let tree = work.path().join("tree");
        output_of(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&tree))?;
        if to.exists() {
            fs::remove_dir_all(to)
                .with_context(|| format!("failed to remove the incomplete {}", to.display()))?;
        }
        fs::rename(&tree, to).with_context(|| format!("failed to put {} in place", to.display()))
    }
}

/// The mirror this machine is configured to use, else Debian's own.
fn mirror_of(archive: Archive) -> String {
    let (name, default) = match archive {
        Archive::Main => ("/debian/", "http://deb.debian.org/debian/"),
        Archive::Security => (
            "/debian-security/",
            "http://deb.debian.org/debian-security/",
        ),
    };
    let configured = Command::new("apt-get")
        .args([
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Created-By: Packages",
        ])
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    configured
        .lines()
        .find(|uri| uri.starts_with("http") && uri.ends_with(name))
        .map_or_else(|| default.to_owned(), str::to_owned)
}

fn retrying(mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    for n in 1..APT_ATTEMPTS {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(error) => {
                say(&format!(
                    "    apt failed ({} of {APT_ATTEMPTS}), trying again: {error:#}",
                    n
                ));
                thread::sleep(APT_PAUSE * n);
            }
        }
    }
    attempt()
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
}

/// Progress goes to standard error: standard output belongs to the tables.
pub(super) fn say(line: &str) {
    eprintln!("{line}");
}

/// One announced step.
#[derive(Debug)]
pub(super) struct Step {
    begun: Instant,
}

impl Step {
    pub(super) fn begin(what: &str) -> Self {
        say(&format!("lab: {what}"));
        Self {
            begun: Instant::now(),
        }
    }

    pub(super) fn note(&self, what: &str) {
        say(&format!("     {what}"));
    }

    pub(super) fn end(self) {
        say(&format!(
            "     done in {:.1} s",
            self.begun.elapsed().as_secs_f64()
        ));
    }
}
