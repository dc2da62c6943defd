//! Typed commands, with answers that tolerate a newer QEMU.
//!
//! Every command of [`qapi`](crate::qapi) is a [`Command`] through a blanket implementation, and the
//! functions at the end build those that we use. The types of this module's own exist where the
//! *answer* of the generated type holds a closed enumeration (one new state would make it fail), or
//! where the generated *arguments* would not let us name a capability that is newer than the crate.
//!
//! Answers of ours keep the JSON they came from (`raw`), so that a field nobody has heard of yet can
//! be logged, stored and asked for.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

pub use qapi_qmp::{
    chardev_add as ChardevAdd, chardev_remove as ChardevRemove, cont as Cont,
    device_add as DeviceAdd, device_del as DeviceDel, migrate as Migrate,
    migrate_cancel as MigrateCancel, migrate_incoming as MigrateIncoming,
    migrate_start_postcopy as MigrateStartPostcopy, quit as Quit, stop as Stop,
    system_powerdown as SystemPowerdown, system_reset as SystemReset,
};
pub use qapi_spec::Empty;

/// A QMP command: its arguments are the value, its answer is [`Return`](Self::Return).
pub trait Command: Serialize + Send + Sync {
    /// What the answer is read as.
    type Return: DeserializeOwned;
    /// The command's name on the wire.
    const NAME: &'static str;
    /// Whether QEMU runs it out of band, beside a main loop that stands still.
    const ALLOW_OOB: bool = false;
}

impl<C: qapi_spec::Command> Command for C {
    type Return = C::Ok;
    const NAME: &'static str = <C as qapi_spec::Command>::NAME;
    const ALLOW_OOB: bool = <C as qapi_spec::Command>::ALLOW_OOB;
}

/// An enumeration of QEMU's with room for what comes after us.
macro_rules! open_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$variant_meta])* $variant,)*
            /// A value that this version of the crate has not heard of. Hold on to what is known,
            /// log it, and ask again.
            Other(String),
        }

        impl $name {
            /// The name on the wire.
            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $text,)*
                    Self::Other(name) => name,
                }
            }
        }

        impl From<&str> for $name {
            fn from(name: &str) -> Self {
                match name {
                    $($text => Self::$variant,)*
                    other => Self::Other(other.to_owned()),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Ok(Self::from(String::deserialize(deserializer)?.as_str()))
            }
        }
    };
}

open_enum! {
    /// The state of a migration: QEMU's `MigrationStatus` (`qapi/migration.json`, up to 11.0).
    MigrationStatus {
        /// No migration was ever tried (only in `query-migrate` of old versions).
        None = "none",
        /// Being set up; a destination waits here for the stream.
        Setup = "setup",
        /// Being cancelled.
        Cancelling = "cancelling",
        /// Cancelled; the source runs on.
        Cancelled = "cancelled",
        /// Copying memory while the guest runs.
        Active = "active",
        /// The destination runs and fetches memory on demand.
        PostcopyActive = "postcopy-active",
        /// Postcopy lost its connection; both sides wait.
        PostcopyPaused = "postcopy-paused",
        /// Postcopy's recovery is being set up (9.1).
        PostcopyRecoverSetup = "postcopy-recover-setup",
        /// Postcopy is being taken up again.
        PostcopyRecover = "postcopy-recover",
        /// Done.
        Completed = "completed",
        /// Failed; the source runs on, unless postcopy had begun.
        Failed = "failed",
        /// COLO replication.
        Colo = "colo",
        /// Stopped, not yet saved: waits for `migrate-continue`.
        PreSwitchover = "pre-switchover",
        /// Device state is being saved. Every migration passes here from 10.0 on.
        Device = "device",
        /// Waits for the guest to let a failover device go.
        WaitUnplug = "wait-unplug",
        /// Postcopy's device state is being loaded; the source can still resume (10.2).
        PostcopyDevice = "postcopy-device",
        /// About to fail (11.0).
        Failing = "failing",
    }
}

impl MigrationStatus {
    /// Whether the attempt is over, one way or the other. A state we do not know is not.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::None | Self::Cancelled | Self::Completed | Self::Failed
        )
    }
}

open_enum! {
    /// What the vCPUs do: QEMU's `RunState` (`qapi/run-state.json`).
    RunState {
        /// A debugger stopped it.
        Debug = "debug",
        /// Waits for an incoming migration.
        InMigrate = "inmigrate",
        /// An internal error stopped it.
        InternalError = "internal-error",
        /// Stopped by an I/O error (`werror`, `rerror`).
        IoError = "io-error",
        /// Stopped with `stop`.
        Paused = "paused",
        /// The source of a migration that has completed.
        PostMigrate = "postmigrate",
        /// Started with `-S`, and not run yet.
        Prelaunch = "prelaunch",
        /// The source at the end of a migration: stopped, being saved.
        FinishMigrate = "finish-migrate",
        /// Restoring a snapshot.
        RestoreVm = "restore-vm",
        /// Running.
        Running = "running",
        /// Saving a snapshot.
        SaveVm = "save-vm",
        /// Shut down, with `-no-shutdown`.
        Shutdown = "shutdown",
        /// Suspended by the guest (ACPI S3).
        Suspended = "suspended",
        /// The watchdog stopped it.
        Watchdog = "watchdog",
        /// The guest panicked.
        GuestPanicked = "guest-panicked",
        /// COLO.
        Colo = "colo",
    }
}

/// `query-status`: do the vCPUs run?
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryStatus {}

impl Command for QueryStatus {
    type Return = StatusInfo;
    const NAME: &'static str = "query-status";
}

/// The answer to [`QueryStatus`].
#[derive(Debug, Clone, PartialEq)]
pub struct StatusInfo {
    /// Whether the vCPUs run.
    pub running: bool,
    /// Why they do or do not.
    pub status: RunState,
    /// The answer as it came.
    pub raw: Value,
}

impl<'de> Deserialize<'de> for StatusInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Wire {
            running: bool,
            status: RunState,
        }
        let (Wire { running, status }, raw) = with_raw(deserializer)?;
        Ok(Self {
            running,
            status,
            raw,
        })
    }
}

/// `query-migrate`: how far is the migration, seen from this QEMU?
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryMigrate {}

impl Command for QueryMigrate {
    type Return = MigrationInfo;
    const NAME: &'static str = "query-migrate";
}

/// The answer to [`QueryMigrate`].
///
/// Each field is `None` where QEMU did not tell it or told it as another type: a destination tells
/// its status and little else. A source that has never migrated tells nothing at all.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MigrationInfo {
    /// The state; `None` if this QEMU has never migrated.
    pub status: Option<MigrationStatus>,
    /// Since the migration began, milliseconds.
    pub total_time_ms: Option<u64>,
    /// How long the guest stood, milliseconds; told when completed. It counts from the stop, so it
    /// includes the time that anybody held `pre-switchover`.
    pub downtime_ms: Option<u64>,
    /// How long QEMU expects the guest to stand, milliseconds; told while active.
    pub expected_downtime_ms: Option<u64>,
    /// How long the set-up took, milliseconds.
    pub setup_time_ms: Option<u64>,
    /// What memory's copy does.
    pub ram: Option<MigrationRam>,
    /// Why it failed.
    pub error_desc: Option<String>,
    /// Why it could not begin: devices that do not migrate.
    pub blocked_reasons: Vec<String>,
    /// The answer as it came.
    pub raw: Value,
}

/// The memory of a migration, in bytes where nothing else is said.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MigrationRam {
    /// Sent so far.
    pub transferred_bytes: u64,
    /// Still to be sent.
    pub remaining_bytes: u64,
    /// All of the guest's memory.
    pub total_bytes: u64,
    /// Passes over memory begun.
    pub dirty_sync_count: u64,
    /// Pages dirtied a second.
    pub dirty_pages_per_second: u64,
    /// Throughput, 10^6 bits a second.
    pub mbps: f64,
}

impl<'de> Deserialize<'de> for MigrationInfo {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Value::Object(Map::deserialize(deserializer)?);
        let number = |key: &str| raw.get(key).and_then(Value::as_u64);
        let text = |key: &str| raw.get(key).and_then(Value::as_str);
        let ram = raw.get("ram").map(|ram| {
            let number = |key: &str| ram.get(key).and_then(Value::as_u64).unwrap_or_default();
            MigrationRam {
                transferred_bytes: number("transferred"),
                remaining_bytes: number("remaining"),
                total_bytes: number("total"),
                dirty_sync_count: number("dirty-sync-count"),
                dirty_pages_per_second: number("dirty-pages-rate"),
                mbps: ram.get("mbps").and_then(Value::as_f64).unwrap_or_default(),
            }
        });
        let blocked = raw.get("blocked-reasons").and_then(Value::as_array);
        Ok(Self {
            status: text("status").map(MigrationStatus::from),
            total_time_ms: number("total-time"),
            downtime_ms: number("downtime"),
            expected_downtime_ms: number("expected-downtime"),
            setup_time_ms: number("setup-time"),
            ram,
            error_desc: text("error-desc").map(str::to_owned),
            blocked_reasons: blocked
                .into_iter()
                .flatten()
                .filter_map(|reason| Some(reason.as_str()?.to_owned()))
                .collect(),
            raw,
        })
    }
}

/// `query-migrate-capabilities`: what this QEMU has, and what is on. The way to learn whether a
/// capability exists.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryMigrateCapabilities {}

impl Command for QueryMigrateCapabilities {
    type Return = MigrationCapabilities;
    const NAME: &'static str = "query-migrate-capabilities";
}

/// One migration capability, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilityState {
    /// Its name, such as `pause-before-switchover`.
    pub capability: String,
    /// Whether it is on.
    pub state: bool,
}

/// The answer to [`QueryMigrateCapabilities`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(transparent)]
pub struct MigrationCapabilities {
    /// All that this QEMU knows, on or off.
    pub all: Vec<CapabilityState>,
}

impl MigrationCapabilities {
    /// Whether the capability is on; `None` if this QEMU has never heard of it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<bool> {
        self.all
            .iter()
            .find(|entry| entry.capability == name)
            .map(|entry| entry.state)
    }
}

/// `migrate-set-capabilities`. Refused while a migration runs. Never for a VM that a manager owns:
/// it would change the manager's next migration.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MigrateSetCapabilities {
    /// Those to change; the others stay.
    pub capabilities: Vec<CapabilityState>,
}

impl MigrateSetCapabilities {
    /// From name and state.
    #[must_use]
    pub fn new<'a>(capabilities: impl IntoIterator<Item = (&'a str, bool)>) -> Self {
        let capabilities = capabilities
            .into_iter()
            .map(|(name, state)| CapabilityState {
                capability: name.to_owned(),
                state,
            })
            .collect();
        Self { capabilities }
    }
}

impl Command for MigrateSetCapabilities {
    type Return = Empty;
    const NAME: &'static str = "migrate-set-capabilities";
}

/// `migrate-set-parameters`: any subset, by name.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(transparent)]
pub struct MigrateSetParameters {
    /// Parameter to value, as QEMU's schema has them.
    pub parameters: Map<String, Value>,
}

impl MigrateSetParameters {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets one parameter.
    #[must_use]
    pub fn set(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.parameters.insert(name.to_owned(), value.into());
        self
    }

    /// `downtime-limit`: the longest the guest may stand, milliseconds, as QEMU estimates it.
    #[must_use]
    pub fn downtime_limit_ms(self, limit: u64) -> Self {
        self.set("downtime-limit", limit)
    }

    /// `max-bandwidth`, bytes a second; 0 is no limit.
    #[must_use]
    pub fn max_bandwidth(self, bytes_per_second: u64) -> Self {
        self.set("max-bandwidth", bytes_per_second)
    }
}

impl Command for MigrateSetParameters {
    type Return = Empty;
    const NAME: &'static str = "migrate-set-parameters";
}

/// `query-migrate-parameters`: by name, as QEMU's schema has them.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryMigrateParameters {}

impl Command for QueryMigrateParameters {
    type Return = Map<String, Value>;
    const NAME: &'static str = "query-migrate-parameters";
}

/// `migrate-continue`: let a migration go on that waits in a state. An error if it is in another.
#[derive(Debug, Clone, Serialize)]
pub struct MigrateContinue {
    /// The state it waits in: [`MigrationStatus::PreSwitchover`].
    pub state: MigrationStatus,
}

impl Command for MigrateContinue {
    type Return = Empty;
    const NAME: &'static str = "migrate-continue";
}

/// `query-chardev`: all character devices.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryChardev {}

impl Command for QueryChardev {
    type Return = Vec<ChardevInfo>;
    const NAME: &'static str = "query-chardev";
}

/// One character device.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ChardevInfo {
    /// Its id.
    pub label: String,
    /// What it is joined to, such as `unix:/path,server=on`, `disconnected:unix:/path,server=on` or
    /// `pipe`. Made for people; see [`Self::is_disconnected`].
    pub filename: String,
    /// Whether the device in front (for a port: the guest) has it open. It does not tell whether
    /// anybody is connected on the host.
    #[serde(rename = "frontend-open", default)]
    pub frontend_open: bool,
}

impl ChardevInfo {
    /// Whether it is a socket with nobody connected (`chardev/char-socket.c` writes the prefix).
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        self.filename.starts_with("disconnected:")
    }
}

/// `x-query-virtio-queue-status`: one virtqueue's indexes (from 7.2). Unstable by QEMU's own word,
/// hence the `x-`.
#[derive(Debug, Clone, Serialize)]
pub struct XQueryVirtioQueueStatus {
    /// The virtio device's QOM path, such as `/machine/peripheral/vser0/virtio-backend`.
    pub path: String,
    /// The queue's index.
    pub queue: u16,
}

impl Command for XQueryVirtioQueueStatus {
    type Return = VirtQueueStatus;
    const NAME: &'static str = "x-query-virtio-queue-status";
}

/// The answer to [`XQueryVirtioQueueStatus`]: `VirtQueueStatus` of `qapi/virtio.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct VirtQueueStatus {
    /// The device's kind, such as `virtio-serial`.
    pub name: String,
    /// Elements that the device has taken and not given back.
    pub inuse: u32,
    /// The size of the ring.
    pub vring_num: u32,
    /// The guest-physical address of the descriptors; 0 where the driver has not set the queue up.
    pub vring_desc: u64,
    /// The index of the next element the device will take; `None` under vhost.
    pub last_avail_idx: Option<u16>,
    /// The device's last look at the driver's `avail->idx`; `None` under vhost. It is a *cache*:
    /// ask for the queue's element to make sure nothing came since.
    pub shadow_avail_idx: Option<u16>,
    /// The index of the next element the device will give back.
    pub used_idx: Option<u16>,
    /// The answer as it came.
    pub raw: Value,
}

impl<'de> Deserialize<'de> for VirtQueueStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Wire {
            #[serde(default)]
            name: String,
            inuse: u32,
            vring_num: u32,
            vring_desc: u64,
            last_avail_idx: Option<u16>,
            shadow_avail_idx: Option<u16>,
            used_idx: Option<u16>,
        }
        let (wire, raw): (Wire, _) = with_raw(deserializer)?;
        let Wire {
            name,
            inuse,
            vring_num,
            vring_desc,
            last_avail_idx,
            shadow_avail_idx,
            used_idx,
        } = wire;
        Ok(Self {
            name,
            inuse,
            vring_num,
            vring_desc,
            last_avail_idx,
            shadow_avail_idx,
            used_idx,
            raw,
        })
    }
}

/// `x-query-virtio-queue-element`: what lies at the head of a virtqueue (from 7.2).
#[derive(Debug, Clone, Serialize)]
pub struct XQueryVirtioQueueElement {
    /// The virtio device's QOM path.
    pub path: String,
    /// The queue's index.
    pub queue: u16,
    /// The place in the ring to read; `None` is the next one the device would take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u16>,
}

impl Command for XQueryVirtioQueueElement {
    type Return = VirtQueueElement;
    const NAME: &'static str = "x-query-virtio-queue-element";
}

/// The answer to [`XQueryVirtioQueueElement`].
#[derive(Debug, Clone, PartialEq)]
pub struct VirtQueueElement {
    /// The head descriptor's index.
    pub index: u32,
    /// The buffers.
    pub descs: Vec<VirtQueueDesc>,
    /// The driver's `avail->idx`, read from the guest's memory at this moment.
    pub avail_idx: Option<u16>,
    /// The device's `used->idx`, read from the guest's memory at this moment.
    pub used_idx: Option<u16>,
    /// The answer as it came.
    pub raw: Value,
}

/// One buffer of a [`VirtQueueElement`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VirtQueueDesc {
    /// Guest-physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Flags by name, such as `write`; empty for a buffer that the guest sends.
    #[serde(default)]
    pub flags: Vec<String>,
}

impl<'de> Deserialize<'de> for VirtQueueElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Ring {
            idx: Option<u16>,
        }
        #[derive(Deserialize)]
        struct Wire {
            index: u32,
            #[serde(default)]
            descs: Vec<VirtQueueDesc>,
            avail: Option<Ring>,
            used: Option<Ring>,
        }
        let (
            Wire {
                index,
                descs,
                avail,
                used,
            },
            raw,
        ) = with_raw(deserializer)?;
        Ok(Self {
            index,
            descs,
            avail_idx: avail.and_then(|ring| ring.idx),
            used_idx: used.and_then(|ring| ring.idx),
            raw,
        })
    }
}

/// `x-query-virtio`: all realised virtio devices (from 7.2).
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct XQueryVirtio {}

impl Command for XQueryVirtio {
    type Return = Vec<VirtioDevice>;
    const NAME: &'static str = "x-query-virtio";
}

/// One virtio device.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VirtioDevice {
    /// Its QOM path, as the queue queries want it.
    pub path: String,
    /// Its kind, such as `virtio-serial`.
    pub name: String,
}

/// `qom-list`: the properties (and children) of a QOM object.
#[derive(Debug, Clone, Serialize)]
pub struct QomList {
    /// The object's path.
    pub path: String,
}

impl QomList {
    /// Of the object at `path`.
    #[must_use]
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into() }
    }
}

impl Command for QomList {
    type Return = Vec<QomProperty>;
    const NAME: &'static str = "qom-list";
}

/// One property of a QOM object.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct QomProperty {
    /// Its name.
    pub name: String,
    /// Its type, such as `string`, `child<virtserialport>` or `link<bus>`.
    #[serde(rename = "type")]
    pub kind: String,
}

impl QomProperty {
    /// The type of the child it is, such as `virtserialport`; `None` for other properties.
    #[must_use]
    pub fn child_type(&self) -> Option<&str> {
        self.kind.strip_prefix("child<")?.strip_suffix('>')
    }
}

/// `qom-get`: one property of a QOM object.
#[derive(Debug, Clone, Serialize)]
pub struct QomGet {
    /// The object's path.
    pub path: String,
    /// The property's name.
    pub property: String,
}

impl QomGet {
    /// The `property` of the object at `path`.
    #[must_use]
    pub fn new(path: impl Into<String>, property: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            property: property.into(),
        }
    }
}

impl Command for QomGet {
    type Return = Value;
    const NAME: &'static str = "qom-get";
}

/// `query-name`: the VM's name (`-name`).
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryName {}

impl Command for QueryName {
    type Return = NameInfo;
    const NAME: &'static str = "query-name";
}

/// The answer to [`QueryName`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct NameInfo {
    /// The name; `None` if it has none.
    #[serde(default)]
    pub name: Option<String>,
}

/// `query-uuid`: the VM's UUID (`-uuid`); all zero if it was given none.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryUuid {}

impl Command for QueryUuid {
    type Return = UuidInfo;
    const NAME: &'static str = "query-uuid";
}

/// The answer to [`QueryUuid`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct UuidInfo {
    /// In hexadecimal with hyphens.
    #[serde(rename = "UUID")]
    pub uuid: String,
}

/// `query-version`: for logs; see [`Greeting::version`](crate::Greeting::version).
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryVersion {}

impl Command for QueryVersion {
    type Return = VersionInfo;
    const NAME: &'static str = "query-version";
}

/// The answer to [`QueryVersion`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct VersionInfo {
    /// QEMU's own.
    pub qemu: VersionTriple,
    /// The package's; may be empty.
    #[serde(default)]
    pub package: String,
}

/// Three numbers of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct VersionTriple {
    /// Major.
    pub major: u64,
    /// Minor.
    pub minor: u64,
    /// Micro.
    pub micro: u64,
}

/// `query-commands`: all commands of this QEMU.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryCommands {}

impl Command for QueryCommands {
    type Return = Vec<CommandInfo>;
    const NAME: &'static str = "query-commands";
}

/// One command's name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CommandInfo {
    /// The name.
    pub name: String,
}

/// `query-pci`: all PCI buses and devices; to find a root port that is free.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryPci {}

impl Command for QueryPci {
    type Return = Vec<PciBus>;
    const NAME: &'static str = "query-pci";
}

/// One PCI bus.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PciBus {
    /// Its number.
    pub bus: u64,
    /// The devices on it.
    #[serde(default)]
    pub devices: Vec<PciDevice>,
}

/// One PCI device.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PciDevice {
    /// The bus it is on.
    pub bus: u64,
    /// Its slot.
    pub slot: u64,
    /// Its function.
    pub function: u64,
    /// Its id in QEMU; empty if it has none.
    #[serde(default)]
    pub qdev_id: String,
    /// Vendor and device.
    pub id: PciId,
    /// For a bridge (a root port is one): what lies behind.
    #[serde(default)]
    pub pci_bridge: Option<PciBridge>,
}

/// Vendor and device of a PCI device. virtio-serial is 1af4:1003 or 1af4:1043.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct PciId {
    /// The vendor.
    pub vendor: u64,
    /// The device.
    pub device: u64,
}

/// What lies behind a PCI bridge.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct PciBridge {
    /// The devices behind it; empty is room to plug one.
    #[serde(default)]
    pub devices: Vec<PciDevice>,
}

/// `query-qmp-schema`: the whole schema of this QEMU, as JSON (some 200 KiB).
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct QueryQmpSchema {}

impl Command for QueryQmpSchema {
    type Return = Value;
    const NAME: &'static str = "query-qmp-schema";
}

/// `yank`: cut the connections of a migration that hangs. Runs out of band.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Yank {
    /// What to cut, as QEMU's schema has it.
    pub instances: Vec<Value>,
}

impl Yank {
    /// Of the migration.
    #[must_use]
    pub fn migration() -> Self {
        Self {
            instances: vec![json!({"type": "migration"})],
        }
    }
}

impl Command for Yank {
    type Return = Empty;
    const NAME: &'static str = "yank";
    const ALLOW_OOB: bool = true;
}

/// `migrate` to a URI such as `unix:/path` or `tcp:host:port`. It returns at once; events and
/// [`QueryMigrate`] tell the rest.
#[must_use]
pub fn migrate(uri: impl Into<String>) -> Migrate {
    Migrate {
        uri: Some(uri.into()),
        channels: None,
        detach: None,
        resume: None,
    }
}

/// `migrate-incoming` for a QEMU that was started with `-incoming defer`.
#[must_use]
pub fn migrate_incoming(uri: impl Into<String>) -> MigrateIncoming {
    MigrateIncoming {
        uri: Some(uri.into()),
        channels: None,
        exit_on_error: None,
    }
}

/// `migrate-continue` out of `pre-switchover`.
#[must_use]
pub fn migrate_continue_pre_switchover() -> MigrateContinue {
    MigrateContinue {
        state: MigrationStatus::PreSwitchover,
    }
}

/// `chardev-add` of a FIFO pair: QEMU opens `<path>.in` (to read) and `<path>.out` (to write), or
/// the one file `path` for both if `<path>.in` cannot be opened (`chardev/char-pipe.c`).
///
/// QEMU opens both for reading and writing, so it never waits for a peer and the chardev is always
/// connected.
#[must_use]
pub fn chardev_add_pipe(id: impl Into<String>, path: impl Into<String>) -> ChardevAdd {
    let data = qapi_qmp::ChardevHostdev {
        base: no_log(),
        device: path.into(),
    };
    ChardevAdd {
        id: id.into(),
        backend: qapi_qmp::ChardevBackend::pipe(qapi_qmp::ChardevHostdevWrapper { data }),
    }
}

/// `chardev-add` of a unix socket that QEMU listens on, without waiting for a client.
#[must_use]
pub fn chardev_add_unix_server(id: impl Into<String>, path: impl Into<String>) -> ChardevAdd {
    // Through JSON, because the generated structure wants each of its many options by name, and
    // gains some with each version.
    let backend = json!({"type": "socket", "data": {
        "addr": {"type": "unix", "data": {"path": path.into()}},
        "server": true,
        "wait": false,
    }});
    ChardevAdd {
        id: id.into(),
        backend: serde_json::from_value(backend)
            // The unit test `chardevs_on_the_wire` runs this very path.
            .expect("the literal above is a backend in the generated schema"),
    }
}

/// `chardev-remove`. Refused ("busy") while a device has it.
#[must_use]
pub fn chardev_remove(id: impl Into<String>) -> ChardevRemove {
    ChardevRemove { id: id.into() }
}

/// `device_add` of `driver`, with its properties.
#[must_use]
pub fn device_add<'a>(
    driver: impl Into<String>,
    id: impl Into<String>,
    properties: impl IntoIterator<Item = (&'a str, Value)>,
) -> DeviceAdd {
    DeviceAdd {
        driver: driver.into(),
        id: Some(id.into()),
        bus: None,
        arguments: properties
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    }
}

/// `device_add` of a virtio-serial port on the bus of the device `bus` (such as `vser0.0`), called
/// `name` in the guest, with `chardev` behind it. Its number is the lowest that is free.
#[must_use]
pub fn device_add_port(id: &str, bus: &str, name: &str, chardev: &str) -> DeviceAdd {
    let properties = [("name", json!(name)), ("chardev", json!(chardev))];
    DeviceAdd {
        bus: Some(bus.to_owned()),
        ..device_add("virtserialport", id, properties)
    }
}

/// `device_del`. For a port it is done when it returns; for a PCI device, when the guest agrees and
/// `DEVICE_DELETED` comes.
#[must_use]
pub fn device_del(id: impl Into<String>) -> DeviceDel {
    DeviceDel { id: id.into() }
}

fn no_log() -> qapi_qmp::ChardevCommon {
    qapi_qmp::ChardevCommon {
        logappend: None,
        logfile: None,
    }
}

/// Reads a value as `T` and keeps it as JSON too.
fn with_raw<'de, T: DeserializeOwned, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<(T, Value), D::Error> {
    let raw = Value::deserialize(deserializer)?;
    let typed = T::deserialize(&raw).map_err(serde::de::Error::custom)?;
    Ok((typed, raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire<C: Command>(command: &C) -> Value {
        serde_json::to_value(command).expect("commands are plain JSON")
    }

    fn read<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("a shape that QEMU sends")
    }

    #[test]
    fn names_come_from_the_schema() {
        fn name<C: Command>(_: &C) -> (&'static str, bool) {
            (C::NAME, C::ALLOW_OOB)
        }
        assert_eq!(name(&migrate("unix:/m")), ("migrate", false));
        assert_eq!(
            name(&crate::qapi::migrate_pause {}),
            ("migrate-pause", true)
        );
        assert_eq!(name(&QueryMigrate {}), ("query-migrate", false));
        assert_eq!(name(&Yank::migration()), ("yank", true));
    }

    #[test]
    fn chardevs_on_the_wire() {
        assert_eq!(
            wire(&chardev_add_pipe("c0", "/run/x/p0")),
            json!({"id": "c0", "backend": {"type": "pipe", "data": {"device": "/run/x/p0"}}})
        );
        assert_eq!(
            wire(&chardev_add_unix_server("c1", "/run/x/s0")),
            json!({"id": "c1", "backend": {"type": "socket", "data": {
                "addr": {"type": "unix", "data": {"path": "/run/x/s0"}},
                "server": true, "wait": false}}})
        );
    }

    #[test]
    fn devices_on_the_wire() {
        assert_eq!(
            wire(&device_add_port("p0", "vser0.0", "vmtrail.0", "c0")),
            json!({"driver": "virtserialport", "id": "p0", "bus": "vser0.0",
                   "name": "vmtrail.0", "chardev": "c0"})
        );
        assert_eq!(wire(&device_del("p0")), json!({"id": "p0"}));
    }

    #[test]
    fn migration_commands_on_the_wire() {
        assert_eq!(wire(&migrate("unix:/m")), json!({"uri": "unix:/m"}));
        assert_eq!(
            wire(&migrate_incoming("unix:/m")),
            json!({"uri": "unix:/m"})
        );
        assert_eq!(
            wire(&migrate_continue_pre_switchover()),
            json!({"state": "pre-switchover"})
        );
        assert_eq!(
            wire(&MigrateSetCapabilities::new([("events", true)])),
            json!({"capabilities": [{"capability": "events", "state": true}]})
        );
        assert_eq!(
            wire(
                &MigrateSetParameters::new()
                    .downtime_limit_ms(300)
                    .set("x-new", "y")
            ),
            json!({"downtime-limit": 300, "x-new": "y"})
        );
        assert_eq!(wire(&QueryMigrate {}), json!({}));
    }

    #[test]
    fn a_migration_of_the_future_is_read() {
        let info: MigrationInfo = read(json!({
            "status": "postcopy-teleport", "total-time": "long", "downtime": 12,
            "ram": {"transferred": 5, "remaining": 6, "total": 7, "mbps": 8, "new": {}},
            "blocked-reasons": ["a", 3], "teleport": [1]
        }));
        assert_eq!(
            info.status,
            Some(MigrationStatus::Other("postcopy-teleport".to_owned()))
        );
        assert!(!info.status.is_some_and(|status| status.is_final()));
        assert_eq!((info.total_time_ms, info.downtime_ms), (None, Some(12)));
        assert_eq!(
            info.ram.map(|ram| (ram.remaining_bytes, ram.mbps)),
            Some((6, 8.0))
        );
        assert_eq!(info.blocked_reasons, ["a"]);
        assert_eq!(info.raw["teleport"], json!([1]));
        assert_eq!(read::<MigrationInfo>(json!({})).status, None);
    }

    #[test]
    fn a_status_of_the_future_is_read() {
        let info: StatusInfo = read(json!({"running": false, "status": "dreaming", "x": 1}));
        assert_eq!((info.running, info.status.as_str()), (false, "dreaming"));
        assert_eq!(info.raw["x"], 1);
    }

    #[test]
    fn queues_are_read() {
        let status: VirtQueueStatus = read(json!({
            "name": "virtio-serial", "queue-index": 1, "inuse": 0, "vring-num": 128,
            "vring-num-default": 128, "vring-align": 4096, "vring-desc": 4096, "vring-avail": 6144,
            "vring-used": 8192, "used-idx": 65535, "signalled-used": 0,
            "signalled-used-valid": true, "last-avail-idx": 65535, "shadow-avail-idx": 0}));
        assert_eq!(
            (status.last_avail_idx, status.shadow_avail_idx),
            (Some(65535), Some(0))
        );
        let element: VirtQueueElement = read(json!({
            "name": "virtio-serial", "index": 3, "ndescs": 1,
            "descs": [{"addr": 1, "len": 4096, "flags": ["indirect"]}],
            "avail": {"flags": 0, "idx": 9, "ring": 3}, "used": {"flags": 0, "idx": 8}}));
        assert_eq!((element.avail_idx, element.used_idx), (Some(9), Some(8)));
        assert_eq!(element.descs[0].len, 4096);
    }

    #[test]
    fn names_and_their_meaning_agree() {
        for name in [
            "pre-switchover",
            "device",
            "completed",
            "wait-unplug",
            "no-such",
        ] {
            assert_eq!(MigrationStatus::from(name).to_string(), name);
        }
        assert_eq!(RunState::from("postmigrate"), RunState::PostMigrate);
        assert!(MigrationStatus::Completed.is_final() && !MigrationStatus::Device.is_final());
    }

    #[test]
    fn children_are_told_from_other_properties() {
        let property = |kind: &str| QomProperty {
            name: String::new(),
            kind: kind.to_owned(),
        };
        assert_eq!(
            property("child<virtserialport>").child_type(),
            Some("virtserialport")
        );
        assert_eq!(property("link<bus>").child_type(), None);
    }
}
