//! QMP for the lab's own hands: the same client as vmtrail's, waited for instead of awaited.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use vmtrail_qmp::command::{MigrationInfo, QueryMigrate, QueryStatus};
use vmtrail_qmp::{Client, ConnectOptions};

use super::guest::Guest;

/// QEMU makes its sockets before it starts the machine, but not before `fork` returns.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// A migration of the lab's guests takes seconds.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);

/// A connection to a guest's QEMU.
///
/// Its task only runs within a call: good enough for asking, not for listening to events.
#[derive(Debug)]
pub struct Qmp {
    runtime: tokio::runtime::Runtime,
    client: Client,
}

impl Qmp {
    /// Connects to the lab's own socket of `guest`, waiting for QEMU to make it.
    ///
    /// # Errors
    ///
    /// If there is no answer within 20 s.
    pub fn of(guest: &Guest) -> Result<Self> {
        Self::connect(&guest.lab_qmp())
    }

    fn connect(path: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("failed to start a runtime for QMP")?;
        let begun = Instant::now();
        loop {
            let options = ConnectOptions {
                resync: false,
                ..ConnectOptions::default()
            };
            match runtime.block_on(Client::connect(path, options)) {
                Ok(client) => return Ok(Self { runtime, client }),
                Err(_) if begun.elapsed() < CONNECT_TIMEOUT => thread::sleep(POLL),
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("failed to reach QEMU at {}", path.display()));
                }
            }
        }
    }

    /// Runs any command.
    ///
    /// # Errors
    ///
    /// If QEMU refuses it or does not answer.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        self.runtime
            .block_on(self.client.execute_raw(command, arguments))
            .with_context(|| format!("failed to have QEMU do {command}"))
    }

    /// Where a migration stands.
    ///
    /// # Errors
    ///
    /// If QEMU does not answer.
    pub fn migration(&self) -> Result<MigrationInfo> {
        self.runtime
            .block_on(self.client.execute(QueryMigrate {}))
            .context("failed to ask QEMU about its migration")
    }

    /// Whether the guest's CPUs run.
    ///
    /// # Errors
    ///
    /// If QEMU does not answer.
    pub fn is_running(&self) -> Result<bool> {
        let status = self
            .runtime
            .block_on(self.client.execute(QueryStatus {}))
            .context("failed to ask QEMU for its status")?;
        Ok(status.running)
    }
}

/// What QEMU says of a finished migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Migrated {
    /// QEMU's `downtime`.
    pub downtime_ms: u64,
    /// QEMU's `total-time`.
    pub total_ms: u64,
}

/// Moves a VM as anybody would, without vmtrail, and returns when the destination runs it.
///
/// # Errors
///
/// If QEMU refuses or fails, or it takes too long.
pub fn migrate_plainly(from: &Guest, to: &Guest) -> Result<Migrated> {
    let source = Qmp::of(from)?;
    let destination = Qmp::of(to)?;
    let uri = migration_uri(to);
    destination.execute("migrate-incoming", json!({ "uri": uri }))?;
    source.execute("migrate", json!({ "uri": uri }))?;
    let begun = Instant::now();
    let done = loop {
        let info = source.migration()?;
        match info.status.as_ref().map(|status| status.as_str()) {
            Some("completed") => break info,
            Some(status @ ("failed" | "cancelled")) => bail!(
                "failed to migrate: QEMU says {status}: {}",
                info.error_desc.as_deref().unwrap_or("no reason given")
            ),
            _ if begun.elapsed() > MIGRATION_TIMEOUT => {
                bail!("failed to migrate within {} s", MIGRATION_TIMEOUT.as_secs())
            }
            _ => thread::sleep(POLL),
        }
    };
    while !destination.is_running()? {
        if begun.elapsed() > MIGRATION_TIMEOUT {
            bail!(
                "failed to see the destination run within {} s",
                MIGRATION_TIMEOUT.as_secs()
            );
        }
        thread::sleep(POLL);
    }
    Ok(Migrated {
        downtime_ms: done.downtime_ms.context("failed to hear QEMU's downtime")?,
        total_ms: done
            .total_time_ms
            .context("failed to hear QEMU's total time")?,
    })
}

/// A migration address that no other guest can have.
#[must_use]
pub fn migration_uri(to: &Guest) -> String {
    format!("unix:{}", to.dir().join("migration.sock").display())
}
