//! Whether a migration may be tried: facts about both ends in, a plan or a refusal out.
//!
//! A refusal names what is wrong and how to mend it, and comes before anything was changed.

use std::collections::BTreeMap;

/// What is known of one end before anything is done.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndFacts {
    /// The state of the vCPUs by the monitor's word: `running`, `paused`, `inmigrate`, `postmigrate`…
    pub run_state: String,
    /// Ports: (virtio-serial device, number) to name. Both ends must agree or QEMU refuses the state
    /// (`fetch_active_ports_list`, hw/char/virtio-serial-bus.c).
    pub ports: BTreeMap<(String, u32), String>,
    /// virtio-serial devices with their `max_ports`.
    pub devices: BTreeMap<String, u32>,
    /// Capabilities that the monitor knows.
    pub capabilities: Vec<String>,
    /// The manager that owns the VM, if one does.
    pub manager: Option<String>,
    /// A migration that is under way by somebody's hand.
    pub migrating: bool,
}

/// What must be done before migrating.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Ports that must be added to the destination.
    pub missing_ports: Vec<(String, u32, String)>,
    /// Whether the source can be held before the switchover.
    pub pause_before_switchover: bool,
    /// Whether the destination can confirm.
    pub return_path: bool,
    /// Whether migration events can be had at both ends.
    pub events: bool,
}

/// Why a migration was not begun.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A manager drives this VM.
    #[error(
        "{0} manages this VM: migrate it with {0}, vmtrail rides along (see docs/migration.md)"
    )]
    Managed(String),
    /// Somebody migrates it already.
    #[error("a migration of this VM is already under way: wait for it or cancel it")]
    Busy,
    /// The VM does not run at the source.
    #[error("the VM at the source is \"{0}\", not running: resume it (QMP `cont`) and try again")]
    SourceNotRunning(String),
    /// The destination does not wait.
    #[error(
        "the destination is \"{0}\", not waiting for a migration: start it with `-incoming defer`"
    )]
    DestinationNotIncoming(String),
    /// The destination lacks a device that ports hang on.
    #[error(
        "the destination has no virtio-serial device \"{0}\": start it with the same devices as the source"
    )]
    DeviceMissing(String),
    /// A device differs.
    #[error(
        "virtio-serial device \"{device}\" has max_ports={source_max} at the source and {destination_max} at the destination: start the destination with the same value"
    )]
    MaxPorts {
        /// The device.
        device: String,
        /// At the source.
        source_max: u32,
        /// At the destination.
        destination_max: u32,
    },
    /// The destination has a port that the source has not, or of another name.
    #[error(
        "the destination has port {number} \"{name}\" on \"{device}\", which at the source is {at_source}: port topologies must be equal, start the destination with the source's ports"
    )]
    PortDiffers {
        /// The device.
        device: String,
        /// The port's number.
        number: u32,
        /// Its name at the destination.
        name: String,
        /// What the source has there.
        at_source: String,
    },
}

/// Judges both ends.
///
/// # Errors
///
/// The first thing that forbids the migration.
pub fn admit(source: &EndFacts, destination: &EndFacts) -> Result<Plan, Refusal> {
    if let Some(manager) = source.manager.as_ref().or(destination.manager.as_ref()) {
        return Err(Refusal::Managed(manager.clone()));
    }
    if source.migrating {
        return Err(Refusal::Busy);
    }
    if source.run_state != "running" {
        return Err(Refusal::SourceNotRunning(source.run_state.clone()));
    }
    if destination.run_state != "inmigrate" {
        return Err(Refusal::DestinationNotIncoming(
            destination.run_state.clone(),
        ));
    }
    for (device, &source_max) in &source.devices {
        match destination.devices.get(device) {
            None => return Err(Refusal::DeviceMissing(device.clone())),
            Some(&destination_max) if destination_max != source_max => {
                return Err(Refusal::MaxPorts {
                    device: device.clone(),
                    source_max,
                    destination_max,
                });
            }
            Some(_) => {}
        }
    }
    for ((device, number), name) in &destination.ports {
        let at_source = source.ports.get(&(device.clone(), *number));
        if at_source != Some(name) {
            return Err(Refusal::PortDiffers {
                device: device.clone(),
                number: *number,
                name: name.clone(),
                at_source: at_source
                    .map_or_else(|| "absent".to_owned(), |name| format!("\"{name}\"")),
            });
        }
    }
    let missing_ports = (source.ports.iter())
        .filter(|(at, _)| !destination.ports.contains_key(*at))
        .map(|((device, number), name)| (device.clone(), *number, name.clone()))
        .collect();
    let both = |capability: &str| {
        [source, destination]
            .iter()
            .all(|end| end.capabilities.iter().any(|c| c == capability))
    };
    Ok(Plan {
        missing_ports,
        pause_before_switchover: source
            .capabilities
            .iter()
            .any(|capability| capability == "pause-before-switchover"),
        return_path: both("return-path"),
        events: both("events"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(run_state: &str, ports: &[(&str, u32, &str)]) -> EndFacts {
        EndFacts {
            run_state: run_state.into(),
            ports: ports
                .iter()
                .map(|(device, number, name)| (((*device).into(), *number), (*name).into()))
                .collect(),
            devices: [("vs0".to_owned(), 31)].into(),
            capabilities: ["events", "return-path", "pause-before-switchover"]
                .map(Into::into)
                .into(),
            manager: None,
            migrating: false,
        }
    }

    fn source() -> EndFacts {
        end(
            "running",
            &[("vs0", 1, "vmtrail.0"), ("vs0", 2, "vmtrail.1")],
        )
    }

    #[test]
    fn ports_missing_at_the_destination_are_planned() {
        let destination = end("inmigrate", &[("vs0", 1, "vmtrail.0")]);
        let plan = admit(&source(), &destination).unwrap();
        assert_eq!(plan.missing_ports, [("vs0".into(), 2, "vmtrail.1".into())]);
        assert!(plan.pause_before_switchover && plan.return_path && plan.events);
    }

    #[test]
    fn each_wrong_end_is_refused_by_name() {
        let good = end("inmigrate", &[]);
        let cases: [(EndFacts, EndFacts, &str); 8] = [
            (end("paused", &[]), good.clone(), "\"paused\", not running"),
            (source(), end("running", &[]), "-incoming defer"),
            (source(), end("inmigrate", &[("vs0", 3, "other")]), "absent"),
            (
                source(),
                end("inmigrate", &[("vs0", 1, "other")]),
                "\"vmtrail.0\"",
            ),
            (
                source(),
                EndFacts {
                    devices: BTreeMap::new(),
                    ..good.clone()
                },
                "no virtio-serial",
            ),
            (
                source(),
                EndFacts {
                    devices: [("vs0".to_owned(), 16)].into(),
                    ..good.clone()
                },
                "max_ports=31",
            ),
            (
                EndFacts {
                    migrating: true,
                    ..source()
                },
                good.clone(),
                "already under way",
            ),
            (
                EndFacts {
                    manager: Some("libvirt".into()),
                    ..source()
                },
                good,
                "libvirt manages",
            ),
        ];
        for (source, destination, expected) in cases {
            let refusal = admit(&source, &destination).unwrap_err().to_string();
            assert!(refusal.contains(expected), "{refusal}");
        }
    }
}
