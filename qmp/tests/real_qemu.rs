//! Against a real QEMU: guests without a disk or a kernel, TCG only, a few seconds in all.
//!
//! They need `qemu-system-x86_64` in PATH (`cargo lab setup` installs it) and fail without it. Set
//! `VMTRAIL_QEMU` to a command line to try another, such as
//! `VMTRAIL_QEMU="/opt/qemu-10/bin/qemu-system-x86_64 -L /opt/qemu-10/share/qemu"`.

use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use vmtrail_qmp::command::{self, MigrationStatus, RunState};
use vmtrail_qmp::event::EventKind;
use vmtrail_qmp::{Client, CloseReason, ConnectError, ConnectOptions, EventReceiver};

/// Longer than anything here takes on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(60);

struct Qemu {
    child: Child,
    dir: TempDir,
}

impl Qemu {
    fn start(arguments: &[&str]) -> Self {
        let configured = std::env::var("VMTRAIL_QEMU").ok();
        let mut words = configured
            .as_deref()
            .unwrap_or("qemu-system-x86_64")
            .split_whitespace();
        let program = words.next().expect("VMTRAIL_QEMU names a program");
        let dir = TempDir::new().expect("a temporary directory");
        let child = std::process::Command::new(program)
            .args(words)
            .args([
                "-nodefaults",
                "-display",
                "none",
                "-m",
                "32",
                "-accel",
                "tcg",
            ])
            .arg("-qmp")
            .arg(format!(
                "unix:{},server=on,wait=off",
                dir.path().join("qmp").display()
            ))
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| {
                panic!(
                    "failed to start `{program}`: {error}. These tests need a real QEMU: \
                     `cargo lab setup` (or `apt-get install qemu-system-x86`) installs it."
                )
            });
        let qemu = Self { child, dir };
        let begun = std::time::Instant::now();
        while !qemu.path().exists() {
            assert!(begun.elapsed() < PATIENCE, "QEMU made no QMP socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        qemu
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    async fn connect(&self) -> Client {
        let mut options = ConnectOptions {
            command_deadline: PATIENCE,
            ..Default::default()
        };
        options.session.greeting_deadline = PATIENCE;
        // The file appears at bind(2), a moment before listen(2).
        loop {
            match Client::connect(self.path(), options.clone()).await {
                Err(ConnectError::Stale { .. }) => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                result => return result.expect("QEMU speaks QMP"),
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Our own child, by its handle; it may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Takes events until one is wanted; gives the names of all, the wanted one's last.
async fn until(events: &mut EventReceiver, wanted: impl Fn(EventKind<'_>) -> bool) -> Vec<String> {
    let mut seen = Vec::new();
    loop {
        let event = tokio::time::timeout(PATIENCE, events.recv())
            .await
            .unwrap_or_else(|_| panic!("the event did not come; seen: {seen:?}"))
            .unwrap_or_else(|ended| panic!("{ended}; seen: {seen:?}"));
        let kind = event.kind();
        seen.push(match &kind {
            EventKind::Migration(status) => format!("MIGRATION {status}"),
            _ => event.name.clone(),
        });
        if wanted(kind) {
            return seen;
        }
    }
}

fn reached(status: MigrationStatus) -> impl Fn(EventKind<'_>) -> bool {
    move |kind| kind == EventKind::Migration(status.clone())
}

#[tokio::test]
async fn every_query_is_understood() {
    let qemu = Qemu::start(&[
        "-machine",
        "q35",
        "-S",
        "-name",
        "guest=one",
        "-device",
        "virtio-serial-pci,id=vser0",
        "-device",
        "pcie-root-port,id=rp0,slot=1",
    ]);
    let client = qemu.connect().await;
    assert_eq!(client.peer_pid(), Some(qemu.child.id()));
    assert!(
        client
            .greeting()
            .version
            .is_some_and(|version| version >= (7, 2, 0))
    );
    assert!(client.greeting().offers_oob() && client.has_oob());
    let initial = client.initial().expect("asked for");
    assert_eq!(
        (initial.status.running, &initial.status.status),
        (false, &RunState::Prelaunch)
    );
    assert_eq!(initial.migration.status, None);

    let name = client
        .execute(command::QueryName {})
        .await
        .expect("query-name");
    assert_eq!(name.name.as_deref(), Some("one"));
    let uuid = client
        .execute(command::QueryUuid {})
        .await
        .expect("query-uuid");
    assert_eq!(uuid.uuid, "00000000-0000-0000-0000-000000000000");
    let version = client
        .execute(command::QueryVersion {})
        .await
        .expect("query-version");
    assert_eq!(
        client.greeting().version,
        Some((version.qemu.major, version.qemu.minor, version.qemu.micro))
    );
    let commands = client
        .execute(command::QueryCommands {})
        .await
        .expect("query-commands");
    assert!(
        commands
            .iter()
            .any(|command| command.name == "x-query-virtio-queue-status")
    );
    let capabilities = client
        .execute(command::QueryMigrateCapabilities {})
        .await
        .expect("capabilities");
    assert_eq!(capabilities.get("pause-before-switchover"), Some(false));
    assert_eq!(capabilities.get("no-such-capability"), None);
    let parameters = client
        .execute(command::QueryMigrateParameters {})
        .await
        .expect("parameters");
    assert!(parameters.contains_key("downtime-limit"));
    let schema = client
        .execute(command::QueryQmpSchema {})
        .await
        .expect("schema");
    assert!(schema.as_array().is_some_and(|entries| entries.len() > 500));

    let buses = client
        .execute(command::QueryPci {})
        .await
        .expect("query-pci");
    let root_port = buses[0]
        .devices
        .iter()
        .find(|device| device.qdev_id == "rp0")
        .expect("rp0");
    assert!(
        root_port
            .pci_bridge
            .as_ref()
            .is_some_and(|bridge| bridge.devices.is_empty())
    );
    let serial = buses[0]
        .devices
        .iter()
        .find(|device| device.qdev_id == "vser0")
        .expect("vser0");
    assert_eq!((serial.id.vendor, serial.id.device), (0x1af4, 0x1003));

    let peripherals = client
        .execute(command::QomList::new("/machine/peripheral"))
        .await
        .expect("qom-list");
    let child = peripherals
        .iter()
        .find(|entry| entry.name == "vser0")
        .expect("vser0");
    assert_eq!(child.child_type(), Some("virtio-serial-pci"));
    let max_ports = client
        .execute(command::QomGet::new(
            "/machine/peripheral/vser0",
            "max_ports",
        ))
        .await
        .expect("qom-get");
    assert_eq!(max_ports, json!(31));
}

#[tokio::test]
async fn errors_and_unknown_commands_cost_only_themselves() {
    let qemu = Qemu::start(&["-machine", "none"]);
    let client = qemu.connect().await;
    let error = client
        .execute_raw("no-such-command", Value::Null)
        .await
        .expect_err("unknown");
    assert!(error.is_command_not_found(), "{error}");
    let error = client
        .execute(command::device_del("nobody"))
        .await
        .expect_err("no device");
    assert!(
        error
            .qemu()
            .is_some_and(|error| error.desc.contains("nobody")),
        "{error}"
    );
    let error = client
        .execute(command::migrate_continue_pre_switchover())
        .await
        .expect_err("nothing migrates");
    assert!(error.qemu().is_some(), "{error}");
    client
        .execute(command::QueryStatus {})
        .await
        .expect("the connection goes on");
    assert_eq!(client.stats().stray_replies_count, 0);
}

#[tokio::test]
async fn a_second_client_is_told_why_it_waits() {
    let qemu = Qemu::start(&["-machine", "none"]);
    let _holder = qemu.connect().await;
    let mut options = ConnectOptions::default();
    options.session.greeting_deadline = Duration::from_millis(300);
    let error = Client::connect(qemu.path(), options)
        .await
        .expect_err("it is held");
    assert!(matches!(error, ConnectError::Busy { .. }), "{error}");
    assert!(
        error.to_string().contains("serves one client at a time"),
        "{error}"
    );
}

#[tokio::test]
async fn the_human_monitor_is_recognised() {
    let dir = TempDir::new().expect("a temporary directory");
    let path = dir.path().join("hmp");
    let qemu = Qemu::start(&[
        "-machine",
        "none",
        "-monitor",
        &format!("unix:{},server=on,wait=off", path.display()),
    ]);
    let _ready = qemu.connect().await;
    let error = Client::connect(&path, ConnectOptions::default())
        .await
        .expect_err("HMP");
    assert!(
        matches!(
            error,
            ConnectError::NotQmp {
                human_monitor: true,
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn a_pretty_monitor_is_recognised() {
    let dir = TempDir::new().expect("a temporary directory");
    let path = dir.path().join("pretty");
    let qemu = Qemu::start(&[
        "-machine",
        "none",
        "-chardev",
        &format!("socket,id=c,path={},server=on,wait=off", path.display()),
        "-mon",
        "chardev=c,mode=control,pretty=on",
    ]);
    let _ready = qemu.connect().await;
    let error = Client::connect(&path, ConnectOptions::default())
        .await
        .expect_err("pretty");
    assert!(error.to_string().contains("pretty=on"), "{error}");
}

#[tokio::test]
async fn quit_is_told_to_everybody() {
    let mut qemu = Qemu::start(&["-machine", "none"]);
    let client = qemu.connect().await;
    let mut events = client.subscribe();
    client
        .execute(command::Quit {})
        .await
        .expect("quit is answered before QEMU exits");
    until(&mut events, |kind| {
        matches!(kind, EventKind::Shutdown { guest: false, .. })
    })
    .await;
    assert_eq!(client.closed().await, CloseReason::PeerClosed);
    let error = client
        .execute(command::QueryStatus {})
        .await
        .expect_err("it is gone");
    assert_eq!(error.closed(), Some(&CloseReason::PeerClosed));
    qemu.child.wait().expect("our own child");
    let error = Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .expect_err("it is gone");
    assert!(
        matches!(
            error,
            ConnectError::Missing { .. } | ConnectError::Stale { .. }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn a_port_is_plugged_and_unplugged() {
    let qemu = Qemu::start(&["-machine", "q35", "-device", "virtio-serial-pci,id=vser0"]);
    let client = qemu.connect().await;
    let mut events = client.subscribe();
    let fifo = qemu.dir.path().join("port");
    for end in ["in", "out"] {
        let made = std::process::Command::new("mkfifo")
            .arg(fifo.with_extension(end))
            .status();
        assert!(made.is_ok_and(|status| status.success()), "mkfifo");
    }
    client
        .execute(command::chardev_add_pipe("c0", fifo.display().to_string()))
        .await
        .expect("chardev-add");
    client
        .execute(command::device_add_port("p0", "vser0.0", "vmtrail.0", "c0"))
        .await
        .expect("device_add");
    let chardevs = client
        .execute(command::QueryChardev {})
        .await
        .expect("query-chardev");
    let chardev = chardevs
        .iter()
        .find(|chardev| chardev.label == "c0")
        .expect("c0");
    assert!(
        !chardev.frontend_open && !chardev.is_disconnected(),
        "{chardev:?}"
    );
    let error = client
        .execute(command::chardev_remove("c0"))
        .await
        .expect_err("in use");
    assert!(
        error
            .qemu()
            .is_some_and(|error| error.desc.contains("busy")),
        "{error}"
    );

    client
        .execute(command::chardev_add_unix_server(
            "c1",
            qemu.dir.path().join("socket").display().to_string(),
        ))
        .await
        .expect("chardev-add socket");
    let chardevs = client
        .execute(command::QueryChardev {})
        .await
        .expect("query-chardev");
    assert!(
        chardevs
            .iter()
            .any(|chardev| chardev.label == "c1" && chardev.is_disconnected())
    );

    // SeaBIOS has no virtio-serial driver: no queue is set up, and QEMU says so or shows it.
    let queue = client
        .execute(command::XQueryVirtioQueueStatus {
            path: "/machine/peripheral/vser0/virtio-backend".to_owned(),
            queue: 1,
        })
        .await
        .expect("queue status");
    assert_eq!((queue.vring_desc, queue.last_avail_idx), (0, Some(0)));

    client
        .execute(command::device_del("p0"))
        .await
        .expect("device_del");
    until(&mut events, |kind| {
        matches!(
            kind,
            EventKind::DeviceDeleted {
                device: Some("p0"),
                ..
            }
        )
    })
    .await;
    client
        .execute(command::chardev_remove("c0"))
        .await
        .expect("free now");
}

async fn enable(client: &Client, capabilities: &[(&str, bool)]) {
    client
        .execute(command::MigrateSetCapabilities::new(
            capabilities.iter().copied(),
        ))
        .await
        .expect("capabilities");
}

#[tokio::test]
async fn a_migration_is_cancelled_and_then_succeeds() {
    let source = Qemu::start(&["-machine", "q35"]);
    let destination = Qemu::start(&["-machine", "q35", "-incoming", "defer"]);
    let (from, to) = (source.connect().await, destination.connect().await);
    let (mut left, mut right) = (from.subscribe(), to.subscribe());
    assert_eq!(
        to.initial().map(|state| &state.status.status),
        Some(&RunState::InMigrate)
    );
    enable(
        &from,
        &[("events", true), ("pause-before-switchover", true)],
    )
    .await;
    enable(&to, &[("events", true)]).await;
    let uri = format!("unix:{}", source.dir.path().join("stream").display());

    to.execute(command::migrate_incoming(&uri))
        .await
        .expect("incoming");
    from.execute(command::migrate(&uri)).await.expect("migrate");
    let seen = until(&mut left, reached(MigrationStatus::PreSwitchover)).await;
    assert!(seen.contains(&"STOP".to_owned()), "{seen:?}");
    let info = from
        .execute(command::QueryMigrate {})
        .await
        .expect("query-migrate");
    assert_eq!(info.status, Some(MigrationStatus::PreSwitchover));
    assert!(info.ram.is_some_and(|ram| ram.total_bytes > 32 << 20));
    from.execute(command::MigrateCancel {})
        .await
        .expect("cancel");
    let mut seen = until(&mut left, reached(MigrationStatus::Cancelled)).await;
    if !seen.contains(&"RESUME".to_owned()) {
        seen.extend(until(&mut left, |kind| kind == EventKind::Resume).await);
    }
    assert!(
        from.execute(command::QueryStatus {})
            .await
            .expect("query-status")
            .running
    );

    // The destination exits with a failed migration; a second attempt needs a second one.
    drop((to, destination));
    let destination = Qemu::start(&["-machine", "q35", "-incoming", "defer"]);
    let to = destination.connect().await;
    right = {
        drop(right);
        to.subscribe()
    };
    enable(&to, &[("events", true)]).await;
    to.execute(command::migrate_incoming(&uri))
        .await
        .expect("incoming");
    from.execute(command::migrate(&uri)).await.expect("migrate");
    until(&mut left, reached(MigrationStatus::PreSwitchover)).await;
    from.execute(command::migrate_continue_pre_switchover())
        .await
        .expect("continue");
    until(&mut left, reached(MigrationStatus::Completed)).await;
    let seen = until(&mut right, reached(MigrationStatus::Completed)).await;
    assert!(seen.contains(&"RESUME".to_owned()), "the commit: {seen:?}");
    let info = from
        .execute(command::QueryMigrate {})
        .await
        .expect("query-migrate");
    assert!(
        info.downtime_ms.is_some() && info.total_time_ms.is_some(),
        "{info:?}"
    );
    let status = from
        .execute(command::QueryStatus {})
        .await
        .expect("query-status");
    assert_eq!(status.status, RunState::PostMigrate);
    assert!(
        to.execute(command::QueryStatus {})
            .await
            .expect("query-status")
            .running
    );
}

#[tokio::test]
async fn out_of_band_works_beside_a_full_window() {
    let qemu = Qemu::start(&["-machine", "none"]);
    let client = qemu.connect().await;
    // More than QEMU queues at once: without the window its monitor would stop reading.
    let queries = (0..40).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { client.execute(command::QueryQmpSchema {}).await })
    });
    let queries: Vec<_> = queries.collect();
    let error = client
        .execute_oob(command::Yank::migration(), PATIENCE)
        .await
        .expect_err("there is no migration to cut");
    assert!(error.qemu().is_some(), "{error}");
    for query in queries {
        query.await.expect("no panic").expect("schema");
    }
}

#[tokio::test]
async fn a_dropped_future_and_a_passed_deadline_cost_nothing_else() {
    let qemu = Qemu::start(&["-machine", "none"]);
    let client = qemu.connect().await;
    for _ in 0..20 {
        // The schema takes QEMU milliseconds, so this is dropped while it is under way.
        let query = client.execute(command::QueryQmpSchema {});
        let _ = tokio::time::timeout(Duration::from_micros(300), query).await;
        let hurried = client
            .execute_within(command::QueryQmpSchema {}, Duration::from_micros(1))
            .await;
        assert!(hurried.is_err_and(|error| error.is_deadline()));
        client
            .execute(command::QueryStatus {})
            .await
            .expect("the next command is unharmed");
    }
    assert_eq!(client.stats().stray_replies_count, 0);
}
