//! Which ports a VM has, where they are on this host, and how to add some.
//!
//! Read from QEMU's object tree (`qom-list`, `qom-get`), because no QMP command lists virtio-serial ports. The path of
//! a `pipe` chardev is not told by QEMU at all (`query-chardev` says just "pipe"), so it is taken from the name that we
//! gave it, or from QEMU's command line.

use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use vmtrail_continuity::attach::PortKind;
use vmtrail_continuity::migration::admission::EndFacts;

use super::ports::PortAddress;
use super::vmm::Monitor;

/// Ports on one device at most. The control queue holds 32 messages and QEMU drops what does not fit
/// (send_control_msg, hw/char/virtio-serial-bus.c), so a device with more than 30 ports shows the guest only some.
pub const MAX_PORTS_PER_DEVICE: u32 = 30;

/// Ports that we add to a VM at most: more vCPUs share them.
const MAX_ADDED_PORTS: u32 = 16;

/// Id of the device that we add where a VM has none.
const OUR_DEVICE: &str = "vmtrail-serial";

/// A virtio-serial device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its id, or its place among those without one.
    pub id: String,
    /// Path of the virtio device in QEMU's object tree, as `x-query-virtio-queue-status` takes it.
    pub backend: String,
    /// Name of its bus, for `device_add`.
    pub bus: String,
    /// Ports that it can have, port 0 included.
    pub max_ports: u32,
}

/// A port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmPort {
    /// Device id of the port itself, if it has one.
    pub id: Option<String>,
    /// Name in the guest.
    pub name: String,
    /// Number on its device.
    pub number: u32,
    /// Index of its device in [`Topology::devices`].
    pub device: usize,
    /// Its chardev.
    pub chardev: String,
}

impl VmPort {
    /// Index of the queue from the guest to the host (virtio specification 5.3.2: receive and transmit queues
    /// alternate, the control queues stand behind port 0's).
    #[must_use]
    pub fn out_queue(&self) -> u32 {
        if self.number == 0 {
            1
        } else {
            2 * (self.number + 1) + 1
        }
    }

    /// Whether the name is one of those that the agent serves.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        ["vmtrail.", "trace-path-cpu"].iter().any(|prefix| {
            (self.name.strip_prefix(prefix)).is_some_and(|rest| rest.parse::<u32>().is_ok())
        })
    }
}

/// All virtio-serial devices and ports of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Devices.
    pub devices: Vec<Device>,
    /// Ports, by device and number.
    pub ports: Vec<VmPort>,
    /// Chardevs: label to QEMU's description.
    pub chardevs: BTreeMap<String, String>,
}

impl Topology {
    /// Asks QEMU.
    ///
    /// # Errors
    ///
    /// QEMU does not answer.
    pub async fn read(monitor: &Monitor) -> Result<Self> {
        let mut topology = Self {
            chardevs: monitor.chardevs().await?,
            ..Self::default()
        };
        let mut found_ports = Vec::new();
        for container in ["/machine/peripheral", "/machine/peripheral-anon"] {
            for (name, kind) in monitor.children(container).await? {
                let path = format!("{container}/{name}");
                if kind == "virtserialport" || kind == "virtconsole" {
                    found_ports.push((path, name, container.ends_with("peripheral")));
                } else if kind.starts_with("virtio-serial") {
                    topology
                        .devices
                        .extend(read_device(monitor, &path, &name).await?);
                }
            }
        }
        for (path, name, has_id) in found_ports {
            let bus = monitor.property(&path, "parent_bus").await?;
            let bus = bus.as_str().unwrap_or_default();
            let Some(device) = topology
                .devices
                .iter()
                .position(|device| bus.starts_with(&format!("{}/", device.backend)))
            else {
                continue;
            };
            let text = |value: Value| value.as_str().unwrap_or_default().to_owned();
            topology.ports.push(VmPort {
                id: has_id.then_some(name),
                name: text(monitor.property(&path, "name").await?),
                number: (monitor.property(&path, "nr").await?.as_u64())
                    .and_then(|number| u32::try_from(number).ok())
                    .unwrap_or(0),
                device,
                chardev: text(monitor.property(&path, "chardev").await?),
            });
        }
        topology
            .ports
            .sort_by_key(|port| (port.device, port.number));
        Ok(topology)
    }

    /// Ports that the agent serves.
    pub fn ours(&self) -> impl Iterator<Item = &VmPort> {
        self.ports.iter().filter(|port| port.is_ours())
    }

    /// For the judgement whether two ends fit.
    #[must_use]
    pub fn facts(&self) -> EndFacts {
        let ports = self.ports.iter().map(|port| {
            (
                (self.devices[port.device].id.clone(), port.number),
                port.name.clone(),
            )
        });
        EndFacts {
            ports: ports.collect(),
            devices: self
                .devices
                .iter()
                .map(|d| (d.id.clone(), d.max_ports))
                .collect(),
            ..EndFacts::default()
        }
    }

    /// Where a port is on this host.
    ///
    /// # Errors
    ///
    /// It cannot be told; the text says how to tell it by hand.
    pub fn address(&self, port: &VmPort, pid: Option<i32>) -> Result<PortAddress> {
        let description = self.chardevs.get(&port.chardev).map_or("", String::as_str);
        if let Some((_, rest)) = description.split_once("unix:") {
            let path = rest.split(',').next().unwrap_or(rest);
            return Ok(PortAddress {
                name: port.name.clone(),
                path: path.into(),
                kind: PortKind::Socket,
            });
        }
        let path = our_fifo(&port.chardev).or_else(|| chardev_path_of_process(pid?, &port.chardev));
        match path {
            Some(path) if description == "pipe" => Ok(PortAddress {
                name: port.name.clone(),
                path,
                kind: PortKind::Fifo,
            }),
            _ => bail!(
                "failed to find where port \"{}\" is on this host: its chardev \"{}\" is \"{description}\"; \
                 vmtrail needs a `pipe` or a listening unix `socket` chardev (say where a pipe is with --port {}=PATH)",
                port.name,
                port.chardev,
                port.name
            ),
        }
    }

    /// The manager that owns this VM, by what it leaves in the monitor.
    #[must_use]
    pub fn manager(&self, pid: Option<i32>) -> Option<&'static str> {
        let of_chardevs = self.chardevs.iter().find_map(|(label, description)| {
            if label == "charmonitor" || description.contains("/libvirt/qemu/") {
                Some("libvirt")
            } else if description.contains("/qemu-server/") {
                Some("Proxmox VE")
            } else if description.contains("/incus/") || description.contains("/lxd/") {
                Some("Incus")
            } else {
                None
            }
        });
        of_chardevs.or_else(|| {
            let arguments = process_arguments(pid?)?;
            let has = |text: &str| arguments.iter().any(|argument| argument.contains(text));
            if has("/var/lib/libvirt/qemu/") {
                Some("libvirt")
            } else if has("/var/run/qemu-server/") || has("/etc/pve/") {
                Some("Proxmox VE")
            } else {
                None
            }
        })
    }
}

async fn read_device(monitor: &Monitor, path: &str, name: &str) -> Result<Option<Device>> {
    // The transport (virtio-serial-pci, -device on mmio, -ccw) holds the virtio device as a child, but for
    // virtio-serial-device, which is it.
    let backend = format!("{path}/virtio-backend");
    let Ok(children) = monitor.children(&backend).await else {
        return Ok(None);
    };
    let Some((bus, _)) = children
        .into_iter()
        .find(|(_, kind)| kind == "virtio-serial-bus")
    else {
        return Ok(None);
    };
    let max_ports = monitor.property(&backend, "max_ports").await?;
    Ok(Some(Device {
        id: name.to_owned(),
        backend,
        bus,
        max_ports: max_ports
            .as_u64()
            .and_then(|max| u32::try_from(max).ok())
            .unwrap_or(31),
    }))
}

/// What was added to a VM, so that it can be taken away again.
#[derive(Debug, Default)]
pub struct Added {
    /// Ports by device id.
    ports: Vec<String>,
    /// Chardevs.
    chardevs: Vec<String>,
    /// The virtio-serial device, if even that was added.
    device: Option<String>,
    /// The directory of the FIFOs.
    directory: Option<PathBuf>,
}

impl Added {
    /// Whether nothing was added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty() && self.device.is_none()
    }

    /// Takes ports, chardevs, device and FIFOs away. The agent must have closed the ports or sent everything: what is
    /// queued is discarded. Failures are the monitor's and are told, not raised: this is cleaning up.
    pub async fn remove(self, monitor: &Monitor) {
        for port in &self.ports {
            if let Err(error) = monitor.run("device_del", json!({ "id": port })).await {
                tracing::warn!("failed to remove port {port}: {error:#}");
            }
        }
        for chardev in &self.chardevs {
            if let Err(error) = monitor
                .run("chardev-remove", json!({ "id": chardev }))
                .await
            {
                tracing::warn!("failed to remove chardev {chardev}: {error:#}");
            }
        }
        if let Some(device) = &self.device
            && let Err(error) = monitor.run("device_del", json!({ "id": device })).await
        {
            tracing::warn!("failed to remove device {device}: {error:#}");
        }
        self.remove_files();
    }

    /// Takes the FIFOs away: QEMU holds its ends open and does not miss the names.
    pub fn remove_files(self) {
        if let Some(directory) = self.directory
            && let Err(error) = std::fs::remove_dir_all(&directory)
        {
            tracing::warn!("failed to remove {}: {error}", directory.display());
        }
    }
}

/// Adds ports to a running VM that has none.
///
/// # Errors
///
/// QEMU refused; what was added by then is in `added`.
pub async fn add_ports(monitor: &Monitor, topology: &Topology, added: &mut Added) -> Result<()> {
    let wanted = monitor.cpus().await?.clamp(1, MAX_ADDED_PORTS);
    let room = |device: &Device, index: usize| {
        let used = topology
            .ports
            .iter()
            .filter(|p| p.device == index && p.number > 0)
            .count();
        let used = u32::try_from(used).unwrap_or(u32::MAX);
        (device.max_ports - 1)
            .min(MAX_PORTS_PER_DEVICE)
            .saturating_sub(used)
    };
    let best = (topology.devices.iter().enumerate())
        .map(|(index, device)| (room(device, index), device.bus.clone()))
        .filter(|(room, _)| *room > 0)
        .max_by_key(|(room, _)| *room);
    let (room, bus) = match best {
        Some(best) => best,
        None => (MAX_PORTS_PER_DEVICE, add_device(monitor, added).await?),
    };
    for number in 0..wanted.min(room) {
        add_port(monitor, added, &bus, &format!("vmtrail.{number}"), None).await?;
    }
    Ok(())
}

/// Adds to a waiting destination what the source has and it lacks.
///
/// # Errors
///
/// As [`add_ports`].
pub async fn add_missing_ports(
    monitor: &Monitor,
    topology: &Topology,
    missing: &[(String, u32, String)],
    added: &mut Added,
) -> Result<()> {
    for (device, number, name) in missing {
        let device = (topology.devices.iter().find(|known| known.id == *device))
            .ok_or_else(|| anyhow!("failed to add port \"{name}\": no device \"{device}\""))?;
        add_port(monitor, added, &device.bus, name, Some(*number)).await?;
    }
    Ok(())
}

/// Adds to a waiting destination the virtio-serial device that we added to the source, at the same place on the bus.
///
/// # Errors
///
/// QEMU refused.
pub async fn mirror_our_device(
    source: &Monitor,
    destination: &Monitor,
    added: &mut Added,
) -> Result<()> {
    let path = format!("/machine/peripheral/{OUR_DEVICE}");
    let address = source.property(&path, "addr").await?;
    let parent = source.property(&path, "parent_bus").await?;
    let bus = parent
        .as_str()
        .and_then(|path| path.rsplit('/').next())
        .unwrap_or("pci.0");
    let arguments = json!({
        "driver": "virtio-serial-pci", "id": OUR_DEVICE, "bus": bus,
        "addr": address.as_str().unwrap_or_default(),
    });
    destination.run("device_add", arguments).await?;
    added.device = Some(OUR_DEVICE.to_owned());
    Ok(())
}

/// Whether we added this device.
#[must_use]
pub fn is_our_device(id: &str) -> bool {
    id == OUR_DEVICE
}

async fn add_device(monitor: &Monitor, added: &mut Added) -> Result<String> {
    // `pc` takes it on its bus; q35 only where a root port is free.
    let mut buses = vec![None];
    for (name, kind) in monitor.children("/machine/peripheral").await? {
        if kind == "pcie-root-port" || kind == "ioh3420" {
            buses.push(Some(name));
        }
    }
    let mut refusals = Vec::new();
    for bus in buses {
        let mut arguments = json!({ "driver": "virtio-serial-pci", "id": OUR_DEVICE });
        if let Some(bus) = &bus {
            arguments["bus"] = json!(bus);
        }
        match monitor.run("device_add", arguments).await {
            Ok(_) => {
                added.device = Some(OUR_DEVICE.to_owned());
                return Ok(format!("{OUR_DEVICE}.0"));
            }
            Err(error) => refusals.push(format!("{error:#}")),
        }
    }
    bail!(
        "the VM has no virtio-serial device with room for a port, and QEMU takes none now ({}); \
         start the VM with `-device virtio-serial-pci`, or on q35 with a free `-device pcie-root-port`",
        refusals.join("; ")
    )
}

async fn add_port(
    monitor: &Monitor,
    added: &mut Added,
    bus: &str,
    name: &str,
    number: Option<u32>,
) -> Result<()> {
    let directory = match &added.directory {
        Some(directory) => directory.clone(),
        None => {
            let directory = make_directory(monitor.pid())?;
            added.directory = Some(directory.clone());
            directory
        }
    };
    // The token is the directory's name, so that a later vmtrail finds the FIFOs of a chardev that it did not make.
    let token = directory
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let chardev = format!("vmtrail-{token}-{name}");
    let path = directory.join(name);
    let owner = qemu_owner(monitor.pid());
    for suffix in ["in", "out"] {
        let fifo = directory.join(format!("{name}.{suffix}"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600))
            .with_context(|| format!("failed to make the FIFO {}", fifo.display()))?;
        give_to(&fifo, owner)?;
    }
    let backend = json!({ "type": "pipe", "data": { "device": path } });
    monitor.run("chardev-add", json!({ "id": chardev, "backend": backend })).await.with_context(
        || format!("failed to add the chardev of port \"{name}\" (QEMU must be able to open {}.in and .out)", path.display()),
    )?;
    added.chardevs.push(chardev.clone());
    let id = format!("vmtrail-port-{}", name.replace("vmtrail.", ""));
    let mut arguments = json!({
        "driver": "virtserialport", "id": id, "bus": bus, "chardev": chardev, "name": name,
    });
    if let Some(number) = number {
        arguments["nr"] = json!(number);
    }
    monitor
        .run("device_add", arguments)
        .await
        .with_context(|| format!("failed to add port \"{name}\""))?;
    added.ports.push(id);
    Ok(())
}

/// Where FIFOs are kept: places that only their owner can enter.
fn base_directories() -> Vec<PathBuf> {
    let uid = nix::unistd::geteuid();
    let mut bases = Vec::new();
    if uid.is_root() {
        bases.push(PathBuf::from("/run/vmtrail"));
    }
    if let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR") {
        bases.push(Path::new(&runtime).join("vmtrail"));
    }
    bases.push(std::env::temp_dir().join(format!("vmtrail-{uid}")));
    bases
}

fn make_directory(pid: Option<i32>) -> Result<PathBuf> {
    let owner = qemu_owner(pid);
    let mut failures = Vec::new();
    for base in base_directories() {
        // QEMU as another user must pass through the base, but not list it.
        let mode = if owner.is_some() { 0o711 } else { 0o700 };
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(&base);
        let attempt = made.and_then(|()| {
            let metadata = std::fs::symlink_metadata(&base)?;
            if !metadata.is_dir() || metadata.uid() != nix::unistd::geteuid().as_raw() {
                return Err(std::io::Error::other("it belongs to somebody else"));
            }
            if owner.is_some() {
                std::fs::set_permissions(&base, std::fs::Permissions::from_mode(mode))?;
            }
            let directory = base.join(token());
            std::fs::DirBuilder::new().mode(0o700).create(&directory)?;
            Ok(directory)
        });
        match attempt {
            Ok(directory) => {
                give_to(&directory, owner)?;
                return Ok(directory);
            }
            Err(error) => failures.push(format!("{}: {error}", base.display())),
        }
    }
    bail!(
        "failed to make a directory for the ports' FIFOs ({})",
        failures.join("; ")
    )
}

fn token() -> String {
    let now = super::time::wall_ns();
    format!("{:x}{:x}", std::process::id(), now & 0xffff_ffff_ffff)
}

/// The user that QEMU runs as, where that is not us.
fn qemu_owner(pid: Option<i32>) -> Option<(u32, u32)> {
    let metadata = std::fs::metadata(format!("/proc/{}", pid?)).ok()?;
    (metadata.uid() != nix::unistd::geteuid().as_raw()).then(|| (metadata.uid(), metadata.gid()))
}

fn give_to(path: &Path, owner: Option<(u32, u32)>) -> Result<()> {
    let Some((uid, gid)) = owner else {
        return Ok(());
    };
    std::os::unix::fs::chown(path, Some(uid), Some(gid))
        .with_context(|| format!("failed to give {} to QEMU's user {uid}", path.display()))
}

/// The FIFO path of a chardev that a vmtrail added: its directory's name is part of the chardev's.
fn our_fifo(chardev: &str) -> Option<PathBuf> {
    let (token, name) = chardev.strip_prefix("vmtrail-")?.split_once('-')?;
    base_directories()
        .into_iter()
        .map(|base| base.join(token).join(name))
        .find(|path| {
            let mut out = path.as_os_str().to_owned();
            out.push(".out");
            Path::new(&out).exists()
        })
}

fn process_arguments(pid: i32) -> Option<Vec<String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    Some(
        bytes
            .split(|&byte| byte == 0)
            .map(|arg| String::from_utf8_lossy(arg).into())
            .collect(),
    )
}

fn chardev_path_of_process(pid: i32, chardev: &str) -> Option<PathBuf> {
    chardev_path(&process_arguments(pid)?, chardev)
}

/// The path of a chardev in QEMU's arguments (`-chardev KIND,id=…,path=…`, where `,,` is a comma).
fn chardev_path(arguments: &[String], chardev: &str) -> Option<PathBuf> {
    arguments
        .windows(2)
        .filter(|pair| pair[0] == "-chardev")
        .find_map(|pair| {
            let options = split_options(&pair[1]);
            let value = |key: &str| {
                options
                    .iter()
                    .find_map(|option| option.strip_prefix(key)?.strip_prefix('='))
            };
            (value("id") == Some(chardev))
                .then(|| value("path").map(PathBuf::from))
                .flatten()
        })
}

fn split_options(text: &str) -> Vec<String> {
    let mut options = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character != ',' {
            options
                .last_mut()
                .expect("one option is there from the start")
                .push(character);
        } else if characters.next_if_eq(&',').is_some() {
            options
                .last_mut()
                .expect("one option is there from the start")
                .push(',');
        } else {
            options.push(String::new());
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_found_on_the_command_line() {
        let arguments: Vec<String> = [
            "qemu",
            "-chardev",
            "socket,id=c0,path=/a",
            "-chardev",
            "pipe,path=/run/x,,y,id=c1",
            "-S",
        ]
        .map(Into::into)
        .into();
        assert_eq!(chardev_path(&arguments, "c1"), Some("/run/x,y".into()));
        assert_eq!(chardev_path(&arguments, "c2"), None);
    }

    #[test]
    fn queue_numbers_skip_the_control_queues() {
        let port = |number| VmPort {
            id: None,
            name: "vmtrail.0".into(),
            number,
            device: 0,
            chardev: String::new(),
        };
        assert_eq!(
            [port(0), port(1), port(2)].map(|port| port.out_queue()),
            [1, 5, 7]
        );
    }

    #[test]
    fn only_numbered_names_are_ours() {
        let port = |name: &str| VmPort {
            id: None,
            name: name.into(),
            number: 1,
            device: 0,
            chardev: String::new(),
        };
        for (name, ours) in [
            ("vmtrail.0", true),
            ("trace-path-cpu12", true),
            ("vmtrail.x", false),
            ("org.qemu.guest_agent.0", false),
            ("agent-ctl-path", false),
        ] {
            assert_eq!(port(name).is_ours(), ours, "{name}");
        }
    }

    #[test]
    fn sockets_are_read_from_qemus_description_and_managers_are_recognised() {
        let port = VmPort {
            id: None,
            name: "vmtrail.0".into(),
            number: 1,
            device: 0,
            chardev: "c0".into(),
        };
        for description in [
            "disconnected:unix:/run/a.sock,server=on",
            "unix:/run/a.sock,server=on",
        ] {
            let topology = Topology {
                chardevs: [("c0".to_owned(), description.to_owned())].into(),
                ..Topology::default()
            };
            assert_eq!(
                topology.address(&port, None).unwrap().path,
                Path::new("/run/a.sock")
            );
            assert_eq!(topology.manager(None), None);
        }
        let managed = Topology {
            chardevs: [(
                "charmonitor".to_owned(),
                "unix:/var/lib/libvirt/qemu/x".to_owned(),
            )]
            .into(),
            ..Topology::default()
        };
        assert_eq!(managed.manager(None), Some("libvirt"));
        assert!(
            managed
                .address(&port, None)
                .unwrap_err()
                .to_string()
                .contains("--port vmtrail.0=")
        );
    }
}
