//! One QEMU process that carries the VM, or waits for it: its monitor and its ports.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};

use anyhow::{Result, bail};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use vmtrail_continuity::attach::{Attachment, PortKind};
use vmtrail_continuity::migration::admission::{Plan, admit as judge};
use vmtrail_continuity::vmm::{Command, Event};

use super::ports::{Port, PortAddress};
use super::topology::{self, Added, Topology, VmPort};
use super::vmm::{self, MigrationFigures, Monitor};

/// Something that a monitor said, of itself or because it was asked.
#[derive(Debug)]
pub(super) struct Fact {
    /// The residency whose monitor it was.
    pub(super) residency: u64,
    /// What.
    pub(super) kind: FactKind,
}

/// See [`Fact`].
#[derive(Debug)]
pub(super) enum FactKind {
    Event(Event),
    Reply(Command, Result<Option<Event>, String>),
    Queues(Option<bool>),
    Figures(MigrationFigures),
    Closed(String),
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Residency {
    /// Number in the trail; 0 before it has one.
    pub(super) number: u64,
    pub(super) monitor: Monitor,
    pub(super) topology: Topology,
    pub(super) ports: Vec<Port>,
    pub(super) attachment: Option<Attachment>,
    /// What we added to this VM.
    pub(super) added: Added,
    port_paths: BTreeMap<String, PathBuf>,
    vm_ports: Vec<VmPort>,
    watcher: Option<AbortHandle>,
}

impl Drop for Residency {
    fn drop(&mut self) {
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
    }
}

impl Residency {
    pub(super) async fn connect(
        qmp: &Path,
        port_paths: &BTreeMap<String, PathBuf>,
    ) -> Result<Self> {
        let monitor = Monitor::connect(qmp).await?;
        let topology = Topology::read(&monitor).await?;
        Ok(Self {
            number: 0,
            monitor,
            topology,
            ports: Vec::new(),
            attachment: None,
            added: Added::default(),
            port_paths: port_paths.clone(),
            vm_ports: Vec::new(),
            watcher: None,
        })
    }

    /// Says whether there are ports, or may be added. Nothing is changed yet.
    pub(super) fn choose_ports(&self, may_add: bool) -> Result<()> {
        if self.topology.ours().next().is_some() {
            return Ok(());
        }
        let path = self.monitor.path().display();
        match self.topology.manager(self.monitor.pid()) {
            Some("libvirt") => bail!(
                "the VM at {path} has no trace port, and libvirt manages it: a port added behind its back would make the next \
                 migration fail. Add `<channel type='unix'><target type='virtio' name='vmtrail.0'/></channel>` with \
                 `virsh attach-device --live --config`, then record again"
            ),
            Some(manager) => bail!(
                "the VM at {path} has no trace port, and {manager} manages it: a port added behind its back would make the next \
                 migration fail. Add `-chardev pipe` and `-device virtserialport,name=vmtrail.0` to the VM's extra arguments (`args`), \
                 then record again"
            ),
            None if !may_add => bail!(
                "the VM at {path} has no port named vmtrail.N, and --no-add-ports forbids adding one"
            ),
            None => Ok(()),
        }
    }

    /// Opens the ports that the agent serves, adding some first if there are none and that is allowed.
    pub(super) async fn open_ports(&mut self, may_add: bool) -> Result<()> {
        if may_add && self.topology.ours().next().is_none() {
            topology::add_ports(&self.monitor, &self.topology, &mut self.added).await?;
            self.topology = Topology::read(&self.monitor).await?;
        }
        self.vm_ports = self.topology.ours().cloned().collect();
        if self.vm_ports.is_empty() {
            bail!(
                "the VM at {} has no port named vmtrail.N",
                self.monitor.path().display()
            );
        }
        for port in &self.vm_ports {
            let address = match self.port_paths.get(&port.name) {
                Some(path) => {
                    let kind = match std::fs::metadata(path) {
                        Ok(_) => PortKind::Socket,
                        Err(_) => PortKind::Fifo,
                    };
                    PortAddress {
                        name: port.name.clone(),
                        path: path.clone(),
                        kind,
                    }
                }
                None => self.topology.address(port, self.monitor.pid())?,
            };
            self.ports.push(Port::open(address)?);
        }
        Ok(())
    }

    /// Carries what the monitor says to the recorder until one of them ends.
    pub(super) fn watch(&mut self, facts: mpsc::UnboundedSender<Fact>) {
        let (residency, monitor, mut events) =
            (self.number, self.monitor.clone(), self.monitor.events());
        let task = tokio::spawn(async move {
            while let Ok(event) = events.recv().await {
                if let Some(event) = vmm::event(&event)
                    && facts
                        .send(Fact {
                            residency,
                            kind: FactKind::Event(event),
                        })
                        .is_err()
                {
                    return;
                }
            }
            let reason = monitor.closed().await;
            let _ = facts.send(Fact {
                residency,
                kind: FactKind::Closed(reason),
            });
        });
        if let Some(before) = self.watcher.replace(task.abort_handle()) {
            before.abort();
        }
    }

    /// Bytes read from all ports.
    pub(super) fn bytes(&self) -> u64 {
        self.ports.iter().map(Port::bytes).sum()
    }

    /// The next port that has something, beginning at `turn` so that none starves.
    pub(super) fn poll_readable(&self, cx: &mut Context<'_>, turn: usize) -> Poll<usize> {
        let count = self.ports.len();
        for index in (0..count).map(|offset| (turn + offset) % count) {
            if self.ports[index].poll_readable(cx).is_ready() {
                return Poll::Ready(index);
            }
        }
        Poll::Pending
    }

    pub(super) fn tell(&self, facts: mpsc::UnboundedSender<Fact>, command: Command) {
        let (residency, monitor) = (self.number, self.monitor.clone());
        tokio::spawn(async move {
            let result = monitor.tell(&command).await;
            let _ = facts.send(Fact {
                residency,
                kind: FactKind::Reply(command, result),
            });
        });
    }

    pub(super) fn probe_queues(&self, facts: mpsc::UnboundedSender<Fact>) {
        let (residency, monitor) = (self.number, self.monitor.clone());
        let (topology, ports) = (self.topology.clone(), self.vm_ports.clone());
        tokio::spawn(async move {
            let empty = monitor.queues_empty(&topology, &ports).await;
            let _ = facts.send(Fact {
                residency,
                kind: FactKind::Queues(empty),
            });
        });
    }

    pub(super) fn ask_figures(&self, facts: mpsc::UnboundedSender<Fact>) {
        let (residency, monitor) = (self.number, self.monitor.clone());
        tokio::spawn(async move {
            if let Ok(figures) = monitor.migration().await {
                let _ = facts.send(Fact {
                    residency,
                    kind: FactKind::Figures(figures),
                });
            }
        });
    }
}

/// Judges both ends, and makes the destination's ports equal to the source's.
pub(super) async fn admit(source: &Residency, destination: &mut Residency) -> Result<Plan> {
    let source_facts = vmm::end_facts(&source.monitor, &source.topology).await?;
    let mut destination_facts = vmm::end_facts(&destination.monitor, &destination.topology).await?;
    let lacks_ours = (source_facts.devices.keys())
        .any(|id| topology::is_our_device(id) && !destination_facts.devices.contains_key(id));
    if lacks_ours && destination_facts.run_state == "inmigrate" {
        let added = &mut destination.added;
        topology::mirror_our_device(&source.monitor, &destination.monitor, added).await?;
        destination.topology = Topology::read(&destination.monitor).await?;
        destination_facts = vmm::end_facts(&destination.monitor, &destination.topology).await?;
    }
    let plan = judge(&source_facts, &destination_facts)?;
    topology::add_missing_ports(
        &destination.monitor,
        &destination.topology,
        &plan.missing_ports,
        &mut destination.added,
    )
    .await?;
    destination.topology = Topology::read(&destination.monitor).await?;
    Ok(plan)
}
