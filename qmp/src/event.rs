//! The events that mean something to a tracer, and which of them are never dropped.

use serde_json::Value;

use crate::command::MigrationStatus;
use crate::message::Event;

/// What an [`Event`] means. Made by [`Event::kind`]; the event itself stays whole beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind<'a> {
    /// `MIGRATION`: the migration entered a state. Needs the capability `events`, which is set per
    /// QEMU and on both sides: without it a destination tells only `setup`.
    Migration(MigrationStatus),
    /// `MIGRATION_PASS`: the source began another pass over memory, counted from 1.
    MigrationPass(u64),
    /// `STOP`: the vCPUs stopped.
    Stop,
    /// `RESUME`: the vCPUs run. On a destination this is the commit of a precopy migration.
    Resume,
    /// `SHUTDOWN`: the guest ended, or somebody asked for it.
    Shutdown {
        /// Whether the guest did it.
        guest: bool,
        /// QEMU's reason, such as `guest-shutdown`; empty if not told.
        reason: &'a str,
    },
    /// `RESET`: the machine was reset; a new boot follows.
    Reset,
    /// `SUSPEND`, `SUSPEND_DISK`, `WAKEUP`: the guest's own power states.
    GuestPower,
    /// `VSERPORT_CHANGE`: the guest opened or closed a port. QEMU sends at most one a second for
    /// each port (the last state, late), and only for a port that has an `id`.
    PortChange {
        /// The port's device id.
        id: &'a str,
        /// Whether the guest has it open.
        open: bool,
    },
    /// `DEVICE_DELETED`: a device is gone.
    DeviceDeleted {
        /// Its id; `None` for one that had none.
        device: Option<&'a str>,
        /// Its QOM path.
        path: &'a str,
    },
    /// `DEVICE_UNPLUG_GUEST_ERROR`: the guest refused to let a device go.
    DeviceUnplugRefused {
        /// The device's id.
        device: Option<&'a str>,
    },
    /// `JOB_STATUS_CHANGE`: a job (snapshot, block) entered a state.
    Job {
        /// The job's id.
        id: &'a str,
        /// Its new state.
        status: &'a str,
    },
    /// Everything else, and an event above whose data has another shape.
    Other,
}

impl Event {
    /// What the event means to us.
    #[must_use]
    pub fn kind(&self) -> EventKind<'_> {
        self.known_kind().unwrap_or(EventKind::Other)
    }

    /// Whether this event is never dropped; see [`is_critical`].
    #[must_use]
    pub fn is_critical(&self) -> bool {
        is_critical(&self.name)
    }

    fn known_kind(&self) -> Option<EventKind<'_>> {
        let text = |key: &str| self.data.get(key).and_then(Value::as_str);
        let flag = |key: &str| self.data.get(key).and_then(Value::as_bool);
        Some(match self.name.as_str() {
            "MIGRATION" => EventKind::Migration(MigrationStatus::from(text("status")?)),
            "MIGRATION_PASS" => EventKind::MigrationPass(self.data.get("pass")?.as_u64()?),
            "STOP" => EventKind::Stop,
            "RESUME" => EventKind::Resume,
            "SHUTDOWN" => EventKind::Shutdown {
                guest: flag("guest").unwrap_or(false),
                reason: text("reason").unwrap_or_default(),
            },
            "RESET" => EventKind::Reset,
            "SUSPEND" | "SUSPEND_DISK" | "WAKEUP" => EventKind::GuestPower,
            "VSERPORT_CHANGE" => EventKind::PortChange {
                id: text("id")?,
                open: flag("open")?,
            },
            "DEVICE_DELETED" => EventKind::DeviceDeleted {
                device: text("device"),
                path: text("path")?,
            },
            "DEVICE_UNPLUG_GUEST_ERROR" => EventKind::DeviceUnplugRefused {
                device: text("device"),
            },
            "JOB_STATUS_CHANGE" => EventKind::Job {
                id: text("id")?,
                status: text("status")?,
            },
            _ => return None,
        })
    }
}

/// Whether events of this name are never dropped: those that change who runs, where, and through
/// which port or device. QEMU tells each of them once, so a lost one is a wrong belief for ever.
///
/// All others (balloon, block errors, RTC, …) are kept up to a bound and then counted.
#[must_use]
pub fn is_critical(name: &str) -> bool {
    matches!(
        name,
        "MIGRATION"
            | "STOP"
            | "RESUME"
            | "SHUTDOWN"
            | "RESET"
            | "POWERDOWN"
            | "SUSPEND"
            | "SUSPEND_DISK"
            | "WAKEUP"
            | "VSERPORT_CHANGE"
            | "DEVICE_DELETED"
            | "DEVICE_UNPLUG_GUEST_ERROR"
            | "UNPLUG_PRIMARY"
            | "GUEST_PANICKED"
            | "GUEST_CRASHLOADED"
            | "COLO_EXIT"
            | "JOB_STATUS_CHANGE"
            | "BLOCK_JOB_COMPLETED"
            | "BLOCK_JOB_CANCELLED"
            | "BLOCK_JOB_ERROR"
            | "BLOCK_JOB_READY"
            | "BLOCK_JOB_PENDING"
    )
}

/// Most bytes of events (as lines) in one queue, for each of the two kinds; parsed, they may take
/// thirty times that.
pub const MAX_QUEUED_BYTES: usize = 8 << 20;

/// How many events of one kind wait in a queue, and how many bytes their lines had.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    pub(crate) count: usize,
    pub(crate) bytes: usize,
}

impl Budget {
    /// Counts an event in, if there is room for it.
    pub(crate) fn admit(&mut self, bytes: usize, max_count: usize) -> bool {
        let fits = self.count < max_count && self.bytes + bytes <= MAX_QUEUED_BYTES;
        if fits {
            self.count += 1;
            self.bytes += bytes;
        }
        fits
    }

    /// Counts out an event that was admitted.
    pub(crate) fn release(&mut self, bytes: usize) {
        self.count -= 1;
        self.bytes -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(name: &str, data: Value) -> Event {
        Event {
            name: name.to_owned(),
            data,
            timestamp: None,
        }
    }

    #[test]
    fn known_events_have_a_meaning() {
        let kind = |name: &str, data: Value| format!("{:?}", event(name, data).kind());
        assert_eq!(
            kind("MIGRATION", json!({"status": "pre-switchover"})),
            "Migration(PreSwitchover)"
        );
        assert_eq!(
            kind("MIGRATION_PASS", json!({"pass": 2})),
            "MigrationPass(2)"
        );
        assert_eq!(kind("STOP", Value::Null), "Stop");
        assert_eq!(
            kind("VSERPORT_CHANGE", json!({"open": true, "id": "port0"})),
            r#"PortChange { id: "port0", open: true }"#
        );
        assert_eq!(
            kind(
                "DEVICE_DELETED",
                json!({"path": "/machine/peripheral-anon/device[0]"})
            ),
            r#"DeviceDeleted { device: None, path: "/machine/peripheral-anon/device[0]" }"#
        );
    }

    #[test]
    fn a_new_state_is_told_by_its_name() {
        let event = event(
            "MIGRATION",
            json!({"status": "postcopy-teleport", "more": 1}),
        );
        assert_eq!(
            event.kind(),
            EventKind::Migration(MigrationStatus::Other("postcopy-teleport".to_owned()))
        );
    }

    #[test]
    fn what_decides_something_is_never_dropped() {
        for name in [
            "MIGRATION",
            "STOP",
            "RESUME",
            "SHUTDOWN",
            "RESET",
            "VSERPORT_CHANGE",
            "DEVICE_DELETED",
            "JOB_STATUS_CHANGE",
            "GUEST_PANICKED",
        ] {
            assert!(is_critical(name), "{name}");
        }
        // One a pass over memory, and repeated by `query-migrate`: it may go.
        assert!(!is_critical("MIGRATION_PASS"));
    }

    #[test]
    fn another_shape_is_other_and_stays_critical() {
        for data in [Value::Null, json!([]), json!({"status": 7})] {
            let event = event("MIGRATION", data);
            assert_eq!(event.kind(), EventKind::Other);
            assert!(event.is_critical());
        }
        assert!(!event("RTC_CHANGE", json!({"offset": 1})).is_critical());
    }
}
