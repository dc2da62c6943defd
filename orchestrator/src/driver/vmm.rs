//! QMP in the words of `continuity`: the only place that knows both.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use vmtrail_continuity::vmm::{Command, Event, Status};
use vmtrail_qmp::{Client, ConnectOptions, EventReceiver};

use super::topology::{Topology, VmPort};

/// A QEMU that we may ask and tell.
#[derive(Debug, Clone)]
pub struct Monitor {
    client: Client,
    path: PathBuf,
    pid: Option<i32>,
}

/// What a VM is called.
#[derive(Debug, Clone, Default)]
pub struct Identity {
    /// `-name`.
    pub name: Option<String>,
    /// `-uuid`; QEMU's all-zero default counts as none.
    pub uuid: Option<String>,
    /// QEMU's version.
    pub qemu: String,
}

/// Figures of a migration that is under way or over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigrationFigures {
    /// The state.
    pub status: Option<String>,
    /// RAM bytes sent.
    pub transferred: Option<u64>,
    /// RAM bytes to go.
    pub remaining: Option<u64>,
    /// RAM bytes of the VM.
    pub total: Option<u64>,
    /// Megabits a second.
    pub megabits: Option<u64>,
    /// Passes over RAM.
    pub passes: Option<u64>,
    /// Expected downtime in milliseconds.
    pub expected_downtime_ms: Option<u64>,
    /// Downtime in milliseconds, once completed.
    pub downtime_ms: Option<u64>,
    /// Milliseconds in all.
    pub total_ms: Option<u64>,
    /// Why it failed.
    pub error: Option<String>,
}

impl Monitor {
    /// Connects to the QMP socket at `path`.
    ///
    /// # Errors
    ///
    /// There is no QEMU that answers; the text says what there is instead.
    pub async fn connect(path: &Path) -> Result<Self> {
        let client = Client::connect(path, ConnectOptions::default()).await?;
        let pid = client.peer_pid().and_then(|pid| i32::try_from(pid).ok());
        Ok(Self {
            client,
            path: path.to_owned(),
            pid,
        })
    }

    /// The socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// QEMU's process, where it is on this host and listens itself.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// All events from now on.
    #[must_use]
    pub fn events(&self) -> EventReceiver {
        self.client.subscribe()
    }

    /// Ends when the monitor is gone, and says why.
    pub async fn closed(&self) -> String {
        self.client.closed().await.to_string()
    }

    /// Executes a command.
    ///
    /// # Errors
    ///
    /// QEMU refused, did not answer in time, or is gone.
    pub async fn run(&self, command: &str, arguments: Value) -> Result<Value> {
        Ok(self.client.execute_raw(command, arguments).await?)
    }

    /// `query-chardev`: label to description.
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn chardevs(&self) -> Result<BTreeMap<String, String>> {
        let reply = self.run("query-chardev", json!({})).await?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let chardevs = reply.as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(chardevs
            .iter()
            .map(|c| (text(&c["label"]), text(&c["filename"])))
            .collect())
    }

    /// Children of an object: name and type.
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn children(&self, path: &str) -> Result<Vec<(String, String)>> {
        let reply = self.run("qom-list", json!({ "path": path })).await?;
        let children = reply.as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(children
            .iter()
            .filter_map(|child| {
                let kind = child["type"]
                    .as_str()?
                    .strip_prefix("child<")?
                    .strip_suffix('>')?;
                Some((child["name"].as_str()?.to_owned(), kind.to_owned()))
            })
            .collect())
    }

    /// A property of an object.
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn property(&self, path: &str, property: &str) -> Result<Value> {
        self.run("qom-get", json!({ "path": path, "property": property }))
            .await
    }

    /// Number of vCPUs.
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn cpus(&self) -> Result<u32> {
        let reply = self.run("query-cpus-fast", json!({})).await?;
        Ok(u32::try_from(reply.as_array().map_or(1, Vec::len)).unwrap_or(u32::MAX))
    }

    /// The run state (`running`, `paused`, `inmigrate`, …).
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn run_state(&self) -> Result<String> {
        let reply = self.run("query-status", json!({})).await?;
        let state = reply["status"]
            .as_str()
            .context("failed to read query-status: no status")?;
        Ok(state.to_owned())
    }

    /// What the VM is called.
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn identity(&self) -> Result<Identity> {
        let name = self.run("query-name", json!({})).await?;
        let uuid = self.run("query-uuid", json!({})).await?;
        let version = self.run("query-version", json!({})).await?;
        let number = |key: &str| version["qemu"][key].as_u64().unwrap_or(0);
        Ok(Identity {
            name: name["name"].as_str().map(Into::into),
            uuid: (uuid["UUID"].as_str())
                .filter(|uuid| uuid.bytes().any(|byte| !matches!(byte, b'0' | b'-')))
                .map(Into::into),
            qemu: format!(
                "{}.{}.{}",
                number("major"),
                number("minor"),
                number("micro")
            ),
        })
    }

    /// Figures of the migration.
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn migration(&self) -> Result<MigrationFigures> {
        let reply = self.run("query-migrate", json!({})).await?;
        Ok(figures(&reply))
    }

    /// Names of the migration capabilities that this QEMU knows.
    ///
    /// # Errors
    ///
    /// As [`Monitor::run`].
    pub async fn capabilities(&self) -> Result<Vec<String>> {
        let reply = self.run("query-migrate-capabilities", json!({})).await?;
        let capabilities = reply.as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(capabilities
            .iter()
            .filter_map(|capability| capability["capability"].as_str().map(Into::into))
            .collect())
    }

    /// Says what the machine wants said; an answer that is a fact comes back as one.
    ///
    /// # Errors
    ///
    /// QEMU refused; as one line.
    pub async fn tell(&self, command: &Command) -> Result<Option<Event>, String> {
        let capability = |name: &str, state: bool| json!({ "capabilities": [{ "capability": name, "state": state }] });
        let told = match command {
            Command::EnableEvents => {
                self.run("migrate-set-capabilities", capability("events", true))
                    .await
            }
            Command::EnableReturnPath => {
                self.run("migrate-set-capabilities", capability("return-path", true))
                    .await
            }
            Command::PauseBeforeSwitchover(state) => {
                let arguments = capability("pause-before-switchover", *state);
                self.run("migrate-set-capabilities", arguments).await
            }
            Command::Incoming(uri) => self.run("migrate-incoming", json!({ "uri": uri })).await,
            Command::Migrate(uri) => self.run("migrate", json!({ "uri": uri })).await,
            Command::Continue => {
                self.run("migrate-continue", json!({ "state": "pre-switchover" }))
                    .await
            }
            Command::Cancel => self.run("migrate_cancel", json!({})).await,
            Command::QueryStatus => {
                let figures = self.migration().await.map_err(one_line)?;
                return Ok(Some(Event::Status(status(
                    figures.status.as_deref().unwrap_or("none"),
                ))));
            }
            Command::QueryRunning => {
                let state = self.run_state().await.map_err(one_line)?;
                return Ok(Some(Event::Running(state == "running")));
            }
        };
        told.map(|_| None).map_err(one_line)
    }

    /// Whether all queues from the guest to these ports are empty: `None` where this QEMU cannot tell.
    ///
    /// Empty is: nothing popped and unfinished (`inuse`), and nothing made available that was not used. What was made
    /// available stands in the ring itself; `shadow-avail-idx` is a cache and was seen at 6 when the ring said 133.
    ///
    /// It is read from guest memory with the monitor's `xp`, and never with `x-query-virtio-queue-element`: on an empty
    /// queue that command walks a descriptor which the guest has long freed, and on what it finds there calls
    /// virtio_error() ("Desc next is 13"), which marks the device as broken. It then never serves a port again, and the mark
    /// migrates with the VM. Seen with QEMU 7.2 at the second migration of a guest.
    pub async fn queues_empty(&self, topology: &Topology, ports: &[VmPort]) -> Option<bool> {
        for port in ports {
            let backend = &topology.devices.get(port.device)?.backend;
            let arguments = json!({ "path": backend, "queue": port.out_queue() });
            let status = self
                .run("x-query-virtio-queue-status", arguments)
                .await
                .ok()?;
            let field = |name: &str| status[name].as_u64();
            let (last_avail, used) = (field("last-avail-idx")?, field("used-idx")?);
            let avail = self
                .read_u16(field("vring-avail")?.checked_add(AVAIL_IDX)?)
                .await?;
            // The ring cannot be further ahead than it is long: else this is not the ring (an IOMMU stands before it).
            let ahead = avail.wrapping_sub(u16::try_from(last_avail).ok()?);
            if u64::from(ahead) > field("vring-num")? {
                return None;
            }
            if field("inuse")? != 0 || ahead != 0 || last_avail != used {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Two bytes of guest-physical memory, little-endian.
    async fn read_u16(&self, address: u64) -> Option<u16> {
        let line = format!("xp /1hx {address:#x}");
        let reply = self
            .run("human-monitor-command", json!({ "command-line": line }))
            .await
            .ok()?;
        parse_xp(reply.as_str()?)
    }
}

/// Offset of `idx` in `struct vring_avail` (virtio specification 2.7.6).
const AVAIL_IDX: u64 = 2;

/// The value in the monitor's answer to `xp /1hx` (`0000000029ee802: 0x022e`).
fn parse_xp(text: &str) -> Option<u16> {
    let value = text.trim().rsplit_once(": 0x")?.1;
    u16::from_str_radix(value.trim(), 16).ok()
}

/// Translates an event; `None` for those that say nothing about where the VM runs.
#[must_use]
pub fn event(event: &vmtrail_qmp::Event) -> Option<Event> {
    let wall_ns = event
        .timestamp
        .map_or_else(super::time::wall_ns, |at| at.as_unix_ns());
    match event.name.as_str() {
        "MIGRATION" => Some(Event::Status(status(event.data.get("status")?.as_str()?))),
        "STOP" => Some(Event::Stopped { wall_ns }),
        "RESUME" => Some(Event::Resumed { wall_ns }),
        "RESET" => Some(Event::Reset),
        _ => None,
    }
}

/// Translates a `MigrationStatus` (qapi/migration.json).
#[must_use]
pub fn status(name: &str) -> Status {
    match name {
        "none" => Status::None,
        "setup" => Status::Setup,
        "active" => Status::Active,
        "pre-switchover" => Status::PreSwitchover,
        "device" => Status::Device,
        "postcopy-active" => Status::PostcopyActive,
        "completed" => Status::Completed,
        "cancelling" => Status::Cancelling,
        "cancelled" => Status::Cancelled,
        "failed" => Status::Failed,
        other => Status::Other(other.to_owned()),
    }
}

fn figures(reply: &Value) -> MigrationFigures {
    let number = |value: &Value| value.as_u64();
    let ram = &reply["ram"];
    MigrationFigures {
        status: reply["status"].as_str().map(Into::into),
        transferred: number(&ram["transferred"]),
        remaining: number(&ram["remaining"]),
        total: number(&ram["total"]),
        // The rate is a fraction, and a person wants the whole of it.
        megabits: ram["mbps"].as_f64().map(|mbps| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a float cast saturates, and a negative rate would be shown as 0"
            )]
            let whole = mbps as u64;
            whole
        }),
        passes: number(&ram["dirty-sync-count"]),
        expected_downtime_ms: number(&reply["expected-downtime"]),
        downtime_ms: number(&reply["downtime"]),
        total_ms: number(&reply["total-time"]),
        error: reply["error-desc"].as_str().map(Into::into),
    }
}

fn one_line(error: anyhow::Error) -> String {
    format!("{error:#}")
}

/// Asks both the monitor and the object tree for all that admission wants to know.
///
/// # Errors
///
/// QEMU does not answer.
pub async fn end_facts(
    monitor: &Monitor,
    topology: &Topology,
) -> Result<vmtrail_continuity::migration::admission::EndFacts> {
    let migrating = matches!(
        monitor.migration().await?.status.as_deref().map(status),
        Some(
            Status::Setup
                | Status::Active
                | Status::PreSwitchover
                | Status::Device
                | Status::PostcopyActive
                | Status::Cancelling
        )
    );
    let run_state = monitor.run_state().await?;
    Ok(vmtrail_continuity::migration::admission::EndFacts {
        manager: topology.manager(monitor.pid()).map(Into::into),
        capabilities: monitor.capabilities().await.map_err(|error| {
            anyhow!(
                "failed to ask {} for its capabilities: {error:#}",
                monitor.path().display()
            )
        })?,
        // A waiting destination reports itself as migrating once it listens; its run state says that it waits.
        migrating: migrating && run_state != "inmigrate",
        run_state,
        ..topology.facts()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_real_reply_and_of_one_with_nothing_in_it() {
        let reply = json!({
            "status": "completed", "total-time": 812, "downtime": 17, "setup-time": 3,
            "ram": { "transferred": 1000, "remaining": 0, "total": 4000, "mbps": 812.7, "dirty-sync-count": 4, "new-field": [] },
            "invented-later": {}
        });
        let figures = figures(&reply);
        assert_eq!(figures.downtime_ms, Some(17));
        assert_eq!(figures.megabits, Some(812));
        assert_eq!(figures.passes, Some(4));
        assert_eq!(super::figures(&json!({})), MigrationFigures::default());
    }

    #[test]
    fn guest_memory_is_read_from_the_monitors_text() {
        assert_eq!(parse_xp("0000000029ee802: 0x022e\r\n"), Some(0x22e));
        assert_eq!(parse_xp("Cannot access memory"), None);
    }

    #[test]
    fn every_state_has_a_translation_and_new_ones_are_kept() {
        for (name, expected) in [
            ("pre-switchover", Status::PreSwitchover),
            ("completed", Status::Completed),
            ("postcopy-device", Status::Other("postcopy-device".into())),
        ] {
            assert_eq!(status(name), expected);
        }
    }
}
