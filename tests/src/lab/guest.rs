//! Guests: one [`VmSpec`] says what the machine is, and each [`Guest`] is one QEMU process that carries it.
//!
//! Source and destination of a migration are two guests of the same spec: QEMU refuses a destination whose machine, memory
//! blocks (the kernel and initramfs are among them) or ports differ.
//!
//! Each guest has a private directory under the system's temporary directory and not under `.lab`, because a unix socket's
//! path has at most 107 bytes and checkouts lie deep. It is removed when the guest is [stopped](Guest::stop), and kept, with its console log,
//! when it is merely dropped: then something failed.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context as _, Result, bail};
use nix::sys::stat::Mode;

use super::process::last_lines;

/// The QEMU that the lab starts unless [`QEMU_VARIABLE`] names another.
pub const QEMU: &str = "qemu-system-x86_64";
/// Path of another QEMU to use.
pub const QEMU_VARIABLE: &str = "VMTRAIL_QEMU";

/// A guest boots in 3 to 6 s on an idle machine. The bound only ends hangs; other people's builds make it long.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
const MONITOR_TIMEOUT: Duration = Duration::from_secs(30);
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// `sun_path` has 108 bytes, the last of them zero.
const SOCKET_PATH_MAX: usize = 107;
/// QEMU tells a booting guest of at most 32 ports of a device: the control queue has so many buffers, and what does not fit
/// is dropped silently (`send_control_msg`). Two are left for others.
const PORTS_PER_DEVICE: u32 = 30;

/// What carries a port's bytes on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// A FIFO pair, as vmtrail makes itself.
    Pipe,
    /// A unix socket that QEMU listens on, as libvirt makes.
    Socket,
}

/// What ports are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// `vmtrail.N`.
    Vmtrail,
    /// `trace-path-cpuN`, as virtio-trace called them.
    TracePath,
}

/// The VM's virtio-serial side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ports {
    /// No virtio-serial device at all.
    Absent,
    /// A device without ports of ours, as most VMs have for their guest agent: ports can be added.
    DeviceOnly,
    /// So many ports, at most 30 on a device.
    Present {
        /// How many.
        count: u32,
        /// Their names.
        naming: Naming,
        /// Their host side.
        backend: Backend,
    },
}

/// How the guest's instructions are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accel {
    /// Emulated. Works everywhere.
    #[default]
    Tcg,
    /// By the host's KVM, for who asks for it.
    Kvm,
}

/// A virtual machine, whoever carries it.
#[derive(Debug, Clone)]
pub struct VmSpec {
    /// For directories and messages.
    pub name: String,
    /// The kernel's image.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory.
    pub memory_mib: u32,
    /// QEMU's machine type.
    pub machine: String,
    /// Its ports.
    pub ports: Ports,
    /// How it runs.
    pub accel: Accel,
    /// More words for QEMU's command line.
    pub extra: Vec<String>,
}

impl VmSpec {
    /// Two vCPUs, 256 MiB, q35, one `vmtrail.N` FIFO port a vCPU.
    #[must_use]
    pub fn new(name: &str, kernel: &Path, initramfs: &Path) -> Self {
        Self {
            name: name.to_owned(),
            kernel: kernel.to_owned(),
            initramfs: initramfs.to_owned(),
            vcpus: 2,
            memory_mib: 256,
            machine: "q35".to_owned(),
            ports: Ports::Present {
                count: 2,
                naming: Naming::Vmtrail,
                backend: Backend::Pipe,
            },
            accel: Accel::default(),
            extra: Vec::new(),
        }
    }

    /// Starts a QEMU that boots the machine, and returns without waiting for it.
    ///
    /// # Errors
    ///
    /// If QEMU cannot be started.
    pub fn boot(&self) -> Result<Guest> {
        Guest::start(self, Role::Boot)
    }

    /// Starts a QEMU that waits for the machine to be migrated to it.
    ///
    /// # Errors
    ///
    /// If QEMU cannot be started.
    pub fn incoming(&self) -> Result<Guest> {
        Guest::start(self, Role::Incoming)
    }

    /// Boots the machine with its console on this terminal, and returns when it has ended.
    ///
    /// # Errors
    ///
    /// If QEMU cannot be started.
    pub fn boot_on_terminal(&self, greet: impl FnOnce(&Guest)) -> Result<()> {
        let mut guest = Guest::start(self, Role::Terminal)?;
        greet(&guest);
        guest.child.wait().context("failed to wait for QEMU")?;
        guest.clean = true;
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Boot,
    Incoming,
    Terminal,
}

/// One QEMU process.
#[derive(Debug)]
pub struct Guest {
    name: String,
    dir: PathBuf,
    child: Child,
    port_names: Vec<String>,
    commands: AtomicU32,
    clean: bool,
}

impl Guest {
    fn start(spec: &VmSpec, role: Role) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("vmtrail-lab-")
            .tempdir()
            .context("failed to create the guest's private directory")?
            .keep();
        // Whatever fails from here on leaves a directory only if QEMU ran: an empty one helps nobody.
        let started = Self::start_in(spec, role, dir.clone());
        if started.is_err() {
            let _ = fs::remove_dir_all(&dir);
        }
        started
    }

    fn start_in(spec: &VmSpec, role: Role, dir: PathBuf) -> Result<Self> {
        let longest = dir.join("vmtrail-00.sock");
        if longest.as_os_str().len() > SOCKET_PATH_MAX {
            bail!(
                "failed to start a guest: {} is too long for a socket's path; set TMPDIR to a shorter directory",
                longest.display()
            );
        }
        let (arguments, port_names) = arguments(spec, role, &dir)?;
        let log = fs::File::create(dir.join("qemu.log"))
            .with_context(|| format!("failed to create a log in {}", dir.display()))?;
        let qemu = env::var_os(QEMU_VARIABLE).unwrap_or_else(|| QEMU.into());
        // The kernel kills QEMU when the thread that started it ends: a killed test must not leave emulated CPUs
        // spinning on a shared machine. (The signal is bound to the thread, so guests are started where they are owned.)
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(&qemu)
            .args(&arguments)
            .current_dir(&dir);
        if role == Role::Terminal {
            command.stderr(log);
        } else {
            let out = log.try_clone().context("failed to share QEMU's log")?;
            command.stdin(Stdio::null()).stdout(out).stderr(log);
        }
        let mut line = String::new();
        for word in [qemu].iter().chain(&arguments) {
            writeln!(line, "{}", word.display()).expect("writing to a String does not fail");
        }
        fs::write(dir.join("command-line"), line)
            .with_context(|| format!("failed to write into {}", dir.display()))?;
        let child = command
            .spawn()
            .context("failed to start QEMU (through setpriv)")?;
        let mut guest = Self {
            name: spec.name.clone(),
            dir,
            child,
            port_names,
            commands: AtomicU32::new(0),
            clean: false,
        };
        guest.wait_monitor()?;
        Ok(guest)
    }

    /// Waits until QEMU listens: who is handed a guest may connect to it.
    fn wait_monitor(&mut self) -> Result<()> {
        let begun = Instant::now();
        // The last socket on the command line is made last.
        while !self.lab_qmp().exists() {
            let failure =
                if let Some(status) = self.child.try_wait().context("failed to ask for QEMU")? {
                    format!("it ended: {status}")
                } else if begun.elapsed() > MONITOR_TIMEOUT {
                    format!("no monitor within {} s", MONITOR_TIMEOUT.as_secs())
                } else {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                };
            let log = fs::read_to_string(self.dir.join("qemu.log")).unwrap_or_default();
            bail!(
                "failed to start QEMU for guest {}: {failure}\n{}",
                self.name,
                last_lines(&log)
            );
        }
        Ok(())
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The guest's private directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The QMP socket for vmtrail. A QMP socket serves one client at a time, so the lab has [another](Self::lab_qmp).
    #[must_use]
    pub fn qmp(&self) -> PathBuf {
        self.dir.join("qmp.sock")
    }

    /// The QMP socket for the lab itself.
    #[must_use]
    pub fn lab_qmp(&self) -> PathBuf {
        self.dir.join("lab-qmp.sock")
    }

    /// The names of its ports and, for each, the socket, or the FIFO pair's path without `.in` and `.out`.
    pub fn ports(&self) -> impl Iterator<Item = (&str, PathBuf)> {
        self.port_names
            .iter()
            .enumerate()
            .map(|(number, name)| (name.as_str(), port_path(&self.dir, number)))
    }

    /// Where the console's words are.
    #[must_use]
    pub fn console_path(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// What the console said so far.
    #[must_use]
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.console_path()).unwrap_or_default()).into_owned()
    }

    /// Waits until the guest's workload runs on every CPU.
    ///
    /// # Errors
    ///
    /// If QEMU ends, init gives up, or [`BOOT_TIMEOUT`] passes; with the console's last words.
    pub fn wait_ready(&mut self) -> Result<()> {
        self.wait_console("READY", BOOT_TIMEOUT)
    }

    /// Waits until the console has a line that begins with `word`.
    ///
    /// # Errors
    ///
    /// If QEMU ends, init gives up, or `timeout` passes; with the console's last words.
    pub fn wait_console(&mut self, word: &str, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        loop {
            let console = self.console();
            let has = |word: &str| console.lines().any(|line| line.starts_with(word));
            if has(word) {
                return Ok(());
            }
            let failure = if has("LAB-FAILED") {
                Some("its init gave up".to_owned())
            } else if let Some(status) = self.child.try_wait().context("failed to ask for QEMU")? {
                Some(format!("QEMU ended: {status}"))
            } else if begun.elapsed() > timeout {
                Some(format!("not within {} s", timeout.as_secs()))
            } else {
                None
            };
            if let Some(failure) = failure {
                bail!(
                    "failed to see {word} from guest {}: {failure}\n  console:\n{}  QEMU:\n{}",
                    self.name,
                    last_lines(&console),
                    last_lines(&fs::read_to_string(self.dir.join("qemu.log")).unwrap_or_default())
                );
            }
            thread::sleep(POLL);
        }
    }

    /// Runs a shell command in the guest and returns what it wrote.
    ///
    /// # Errors
    ///
    /// If the guest does not answer in time or the command fails.
    pub fn shell(&self, command: &str) -> Result<String> {
        self.command(&format!("sh {command}"))
    }

    /// Ends the marks and returns the last number each CPU wrote, by CPU.
    ///
    /// # Errors
    ///
    /// If the guest does not answer in time or with something else.
    pub fn stop_marks(&self) -> Result<Vec<(u32, u64)>> {
        let text = self.command("stop")?;
        text.lines()
            .map(|line| {
                line.strip_prefix("LAST cpu=")
                    .and_then(|rest| rest.split_once(" seq="))
                    .and_then(|(cpu, seq)| Some((cpu.parse().ok()?, seq.parse().ok()?)))
                    .with_context(|| format!("failed to understand the guest's {line:?}"))
            })
            .collect()
    }

    fn command(&self, words: &str) -> Result<String> {
        if words.contains('\n') {
            bail!(
                "failed to command guest {}: a command is one line",
                self.name
            );
        }
        self.try_command(words)
            .with_context(|| format!("failed to command guest {}: `{words}`", self.name))
    }

    fn try_command(&self, words: &str) -> Result<String> {
        let id = format!("c{}", self.commands.fetch_add(1, Ordering::Relaxed));
        let mut stream = UnixStream::connect(self.dir.join("lab.sock"))
            .context("failed to connect to its serial line")?;
        stream
            .set_read_timeout(Some(COMMAND_TIMEOUT))
            .context("failed to bound the wait for its answer")?;
        stream
            .write_all(format!("{id} {words}\n").as_bytes())
            .context("failed to write to its serial line")?;
        let mut answer = String::new();
        let mut lines = BufReader::new(stream);
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        loop {
            let mut line = Vec::new();
            match lines.read_until(b'\n', &mut line) {
                Ok(0) => bail!("its serial line was closed"),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    bail!("no answer within {} s", COMMAND_TIMEOUT.as_secs())
                }
                Err(error) => return Err(error).context("failed to read from its serial line"),
            }
            let line = String::from_utf8_lossy(&line);
            let line = line.trim_end();
            if let Some(text) = line.strip_prefix(&format!("{id}> ")) {
                answer.push_str(text);
                answer.push('\n');
            } else if let Some(status) = line.strip_prefix(&format!("{id}! ")) {
                if status != "0" {
                    bail!("it ended with {status}\n{}", last_lines(&answer));
                }
                return Ok(answer);
            }
            if Instant::now() > deadline {
                bail!(
                    "no end of the answer within {} s",
                    COMMAND_TIMEOUT.as_secs()
                );
            }
        }
    }

    /// Ends QEMU and removes its directory: all is well.
    ///
    /// # Errors
    ///
    /// If it cannot be ended or removed.
    pub fn stop(mut self) -> Result<()> {
        self.kill();
        self.clean = true;
        fs::remove_dir_all(&self.dir)
            .with_context(|| format!("failed to remove {}", self.dir.display()))
    }

    /// Whether QEMU has ended.
    ///
    /// # Errors
    ///
    /// If the system cannot be asked.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self
            .child
            .try_wait()
            .context("failed to ask for QEMU")?
            .is_some())
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
        if self.clean {
            let _ = fs::remove_dir_all(&self.dir);
        } else {
            eprintln!(
                "lab: logs of guest {} are kept in {}",
                self.name,
                self.dir.display()
            );
        }
    }
}

fn port_path(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("port{number}"))
}

fn arguments(spec: &VmSpec, role: Role, dir: &Path) -> Result<(Vec<OsString>, Vec<String>)> {
    let mut arguments: Vec<OsString> = Vec::new();
    let mut add = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
    let path = |file: &str| dir.join(file).display().to_string();

    add(&[
        "-name",
        &format!("vmtrail-lab-{}", spec.name),
        "-no-user-config",
        "-nodefaults",
    ]);
    add(&["-display", "none", "-no-reboot"]);
    match spec.accel {
        // Without cmpxchg16b: QEMU 7.2 emulates it so that an interrupt right behind it saves garbage as flags, and the
        // guest dies of a double fault in kmem_cache_alloc (seen with 6.12, whose SLUB uses it on every allocation).
        Accel::Tcg => add(&["-accel", "tcg,thread=multi", "-cpu", "qemu64,-cx16"]),
        Accel::Kvm => add(&["-accel", "kvm", "-cpu", "host"]),
    }
    add(&[
        "-M",
        &spec.machine,
        "-m",
        &spec.memory_mib.to_string(),
        "-smp",
        &spec.vcpus.to_string(),
    ]);
    add(&["-kernel", &spec.kernel.display().to_string()]);
    add(&["-initrd", &spec.initramfs.display().to_string()]);
    add(&["-append", "console=ttyS0 quiet panic=-1"]);
    match role {
        Role::Terminal => add(&["-serial", "mon:stdio"]),
        // A file and not a socket: QEMU drops what a serial line says while nobody is connected.
        Role::Boot | Role::Incoming => add(&["-serial", &format!("file:{}", path("console.log"))]),
    }
    add(&[
        "-chardev",
        &format!("socket,id=lab,path={},server=on,wait=off", path("lab.sock")),
    ]);
    add(&["-serial", "chardev:lab"]);
    for socket in ["qmp.sock", "lab-qmp.sock"] {
        add(&["-qmp", &format!("unix:{},server=on,wait=off", path(socket))]);
    }
    if role == Role::Incoming {
        add(&["-incoming", "defer"]);
    }

    let mut names = Vec::new();
    match spec.ports {
        Ports::Absent => {}
        Ports::DeviceOnly => add(&["-device", "virtio-serial-pci,id=vs0,max_ports=31"]),
        Ports::Present {
            count,
            naming,
            backend,
        } => {
            for number in 0..count {
                let device = number / PORTS_PER_DEVICE;
                if number % PORTS_PER_DEVICE == 0 {
                    add(&[
                        "-device",
                        &format!("virtio-serial-pci,id=vs{device},max_ports=31"),
                    ]);
                }
                let name = match naming {
                    Naming::Vmtrail => format!("vmtrail.{number}"),
                    Naming::TracePath => format!("trace-path-cpu{number}"),
                };
                let at = port_path(dir, names.len());
                let chardev = match backend {
                    Backend::Pipe => {
                        make_fifo_pair(&at)?;
                        format!("pipe,id=char{number},path={}", at.display())
                    }
                    Backend::Socket => {
                        format!(
                            "socket,id=char{number},path={},server=on,wait=off",
                            at.display()
                        )
                    }
                };
                add(&["-chardev", &chardev]);
                add(&[
                    "-device",
                    // 0 is kept for a console.
                    &format!(
                        "virtserialport,id=port{number},bus=vs{device}.0,nr={},chardev=char{number},name={name}",
                        number % PORTS_PER_DEVICE + 1
                    ),
                ]);
                names.push(name);
            }
        }
    }
    arguments.extend(spec.extra.iter().map(OsString::from));
    Ok((arguments, names))
}

fn make_fifo_pair(at: &Path) -> Result<()> {
    for end in ["in", "out"] {
        let path = at.with_extension(end);
        nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)
            .with_context(|| format!("failed to create the FIFO {}", path.display()))?;
    }
    Ok(())
}
