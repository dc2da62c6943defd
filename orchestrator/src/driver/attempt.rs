//! The recorder while it moves its VM: what the machine of `continuity` says is done here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::sync::mpsc;
use vmtrail_continuity::Instant;
use vmtrail_continuity::attach::Attachment;
use vmtrail_continuity::migration::{
    self, Action, CancelAnswer, Migration, Options, Outcome, Phase,
};
use vmtrail_continuity::vmm::{Command, Event as VmmEvent, Side};

use super::Recorder;
use super::core::Totals;
use super::ports::TurnEnd;
use super::residency::{self, Fact, FactKind, Residency};
use super::topology::Topology;
use super::vmm::MigrationFigures;
use crate::status::{MigrationReport, Report};
use crate::trail::event::{Event, MigrationEnded, StreamEnd};

/// How long after a commit the agent may take to introduce its streams again.
const VERIFY_DEADLINE: Duration = Duration::from_secs(10);

/// A migration under way.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) number: u64,
    pub(super) machine: Migration,
    /// The residency that waits; after the commit the one that was left.
    pub(super) other: Residency,
    reply: mpsc::UnboundedSender<Report>,
    before: Totals,
    gaps_before: u64,
    boundaries: Vec<StreamEnd>,
    port_bytes_at_stop: Option<u64>,
    drained_bytes: Option<u64>,
    pub(super) figures: MigrationFigures,
    committed_at: Option<Instant>,
}

impl Recorder {
    pub(super) async fn begin_migration(
        &mut self,
        to_qmp: &Path,
        from_qmp: Option<&Path>,
        options: Options,
        port_paths: &BTreeMap<String, PathBuf>,
        reply: &mpsc::UnboundedSender<Report>,
    ) -> Result<()> {
        if self.attempt.is_some() {
            bail!("a migration of this VM is already under way");
        }
        if let Some(from) = from_qmp
            && !same_file(from, self.source.monitor.path())
        {
            bail!(
                "the recorder of this trail follows the VM at {}, not at {}",
                self.source.monitor.path().display(),
                from.display()
            );
        }
        if same_file(to_qmp, self.source.monitor.path()) {
            bail!(
                "source and destination are the same QMP socket {}",
                to_qmp.display()
            );
        }
        let number = self.attempts + 1;
        self.core.report(Report::Phase {
            attempt: number,
            phase: Phase::Admit.name().into(),
        });
        self.source.topology = Topology::read(&self.source.monitor).await?;
        let mut other = Residency::connect(to_qmp, port_paths)
            .await
            .context("the destination")?;
        let plan = match residency::admit(&self.source, &mut other).await {
            Ok(plan) => plan,
            Err(error) => {
                std::mem::take(&mut other.added)
                    .remove(&other.monitor)
                    .await;
                return Err(error);
            }
        };
        let prepared = other.open_ports(false).await;
        if let Err(error) = prepared {
            std::mem::take(&mut other.added)
                .remove(&other.monitor)
                .await;
            return Err(error.context("failed to prepare the destination's ports"));
        }
        let qemu = other.monitor.identity().await?.qemu;
        let now = self.core.clock.now();
        self.attempts = number;
        let from = self.source.number;
        let machine = Migration::new(now, options.clone(), plan);
        self.attempt = Some(Attempt {
            number,
            machine,
            other,
            reply: reply.clone(),
            before: self.core.totals(),
            gaps_before: self.core.gaps,
            boundaries: Vec::new(),
            port_bytes_at_stop: None,
            drained_bytes: None,
            figures: MigrationFigures::default(),
            committed_at: None,
        });
        let to = self.enter_residency(&qemu, Some(from), "migration");
        self.core.trail.log(Event::MigrationStarted {
            attempt: number,
            from,
            to,
            uri: options.uri,
        });
        if let Some(attempt) = &mut self.attempt {
            attempt.other.number = to;
            attempt.other.watch(self.facts_in.clone());
        }
        self.follow_attempt(now).await;
        Ok(())
    }

    pub(super) fn cancel(&mut self, reply: &mpsc::UnboundedSender<Report>) {
        let now = self.core.clock.now();
        let answer = (self.attempt.as_mut()).map_or(CancelAnswer::Nothing, |attempt| {
            attempt.machine.handle_cancel(now)
        });
        let _ = reply.send(match answer {
            CancelAnswer::Taken => Report::Done,
            CancelAnswer::TooLate => Report::Refused {
                reason: "too late to cancel: the VM's state is being handed over".into(),
            },
            CancelAnswer::Nothing => Report::Refused {
                reason: "no migration is under way".into(),
            },
        });
    }

    pub(super) async fn take_fact(&mut self, fact: Fact) {
        let now = self.core.clock.now();
        let is_source = fact.residency == self.source.number;
        if is_source {
            self.take_source_fact(now, &fact.kind);
        }
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let committed = attempt.committed_at.is_some();
        let side = match (is_source, committed) {
            (true, false) => Side::Source,
            (false, false) if fact.residency == attempt.other.number => Side::Destination,
            // After the commit only figures of the source that was left are of interest.
            (false, true) => {
                if let FactKind::Figures(figures) = fact.kind {
                    attempt.figures = figures;
                }
                return;
            }
            _ => return,
        };
        match fact.kind {
            FactKind::Event(event) => {
                if side == Side::Source && matches!(event, VmmEvent::Stopped { .. }) {
                    attempt.port_bytes_at_stop = Some(self.source.bytes());
                }
                attempt.machine.handle_event(now, side, &event);
            }
            FactKind::Reply(command, result) => {
                if let Ok(Some(event)) = &result {
                    attempt.machine.handle_event(now, side, event);
                }
                if let (Err(reason), false) = (&result, matches!(command, Command::Continue)) {
                    tracing::info!("{side:?} refused {command:?}: {reason}");
                }
                attempt
                    .machine
                    .handle_reply(now, side, &command, result.map(|_| ()));
            }
            FactKind::Queues(empty) => attempt.machine.handle_queues(now, empty),
            FactKind::Figures(figures) => attempt.figures = figures,
            FactKind::Closed(reason) => {
                attempt
                    .machine
                    .handle_event(now, side, &VmmEvent::Closed(reason));
            }
        }
    }

    fn take_source_fact(&mut self, now: Instant, kind: &FactKind) {
        match kind {
            FactKind::Event(VmmEvent::Stopped { .. }) => {
                if let Some(attachment) = &mut self.source.attachment {
                    attachment.handle_running(now, false);
                }
            }
            FactKind::Event(VmmEvent::Resumed { .. }) => {
                if let Some(attachment) = &mut self.source.attachment {
                    attachment.handle_running(now, true);
                }
            }
            FactKind::Event(VmmEvent::Reset) => {
                if let Some(attachment) = &mut self.source.attachment {
                    attachment.handle_agent_gone(now);
                }
            }
            FactKind::Closed(reason) if self.attempt.is_none() => {
                self.qemu_ended = Some(format!("QEMU ended ({reason})"));
            }
            _ => {}
        }
    }

    pub(super) async fn follow_attempt(&mut self, now: Instant) {
        loop {
            let Some(attempt) = &mut self.attempt else {
                return;
            };
            if attempt.machine.poll_timeout().is_some_and(|at| at <= now) {
                attempt.machine.handle_timeout(now);
            }
            let Some(action) = attempt.machine.poll_action() else {
                break;
            };
            self.do_action(now, action).await;
        }
        self.follow_verification(now).await;
    }

    async fn do_action(&mut self, now: Instant, action: Action) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        match action {
            Action::Tell(side, command) => {
                let residency = match side {
                    Side::Source => &self.source,
                    Side::Destination => &attempt.other,
                };
                residency.tell(self.facts_in.clone(), command);
            }
            Action::Enter(phase) => self.enter_phase(phase),
            Action::ProbeQueues => self.source.probe_queues(self.facts_in.clone()),
            Action::ReadDry => {
                let until = attempt.machine.held_until();
                self.read_dry(until);
                if let Some(attempt) = &mut self.attempt {
                    attempt.machine.handle_dry(self.core.clock.now());
                }
            }
            Action::RecordBoundary => {
                let session = self
                    .source
                    .attachment
                    .as_ref()
                    .and_then(Attachment::session);
                attempt.boundaries = self.core.boundaries(session);
                attempt.drained_bytes = attempt
                    .port_bytes_at_stop
                    .map(|before| self.source.bytes().saturating_sub(before));
            }
            Action::Commit => self.commit_migration(now),
            Action::End(outcome) => self.end_migration(outcome).await,
        }
    }

    fn enter_phase(&mut self, phase: Phase) {
        let Some(attempt) = &self.attempt else { return };
        let (attempt, phase) = (attempt.number, phase.name().to_owned());
        tracing::info!(attempt, phase, "migration phase");
        self.core.trail.log(Event::MigrationPhase {
            attempt,
            phase: phase.clone(),
        });
        self.core.report(Report::Phase { attempt, phase });
    }

    /// Reads all ports of the source until nothing is there, no longer than the guest may be held.
    pub(super) fn read_dry(&mut self, until: Option<Instant>) {
        for index in 0..self.source.ports.len() {
            let Some(attachment) = &mut self.source.attachment else {
                return;
            };
            let core = &mut self.core;
            let port = &mut self.source.ports[index];
            loop {
                let turn = port.read_turn(&mut self.scratch, |decoder| {
                    core.take(attachment, index, decoder);
                });
                let more = turn.is_ok_and(|turn| turn.end == TurnEnd::More);
                if !more || until.is_some_and(|until| core.clock.now() >= until) {
                    break;
                }
            }
        }
    }

    /// The destination runs: it is the VM now.
    fn commit_migration(&mut self, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        std::mem::swap(&mut self.source, &mut attempt.other);
        attempt.committed_at = Some(now);
        let left = &mut attempt.other;
        left.attachment = None;
        left.ports.clear();
        left.ask_figures(self.facts_in.clone());
        std::mem::take(&mut left.added).remove_files();
        let residency = left.number;
        self.core.trail.log(Event::ResidencyEnded {
            residency,
            reason: "migrated".into(),
        });
        self.core.residency = self.source.number;
        self.core.resumed_at = Some(BTreeMap::new());
        self.attach(true);
        self.ping_at = now;
    }

    /// Ends an attempt that did not commit; a committed one is ended when its streams are verified.
    async fn end_migration(&mut self, outcome: Outcome) {
        if outcome == Outcome::Committed {
            self.enter_phase(Phase::Verify);
            return;
        }
        let Some(mut attempt) = self.attempt.take() else {
            return;
        };
        let (name, reason) = match &outcome {
            Outcome::Cancelled => ("cancelled", None),
            Outcome::Failed(reason) => ("failed", Some(reason.clone())),
            Outcome::Unknown(reason) => ("unknown", Some(reason.clone())),
            Outcome::Committed => ("committed", None),
        };
        let reason = match (reason, &attempt.figures.error) {
            (Some(reason), Some(error)) => Some(format!("{reason}: {error}")),
            (reason, _) => reason,
        };
        // Its bytes were never read: a destination that did not run has nothing to say.
        attempt.other.ports.clear();
        let residency = attempt.other.number;
        self.core.trail.log(Event::ResidencyEnded {
            residency,
            reason: format!("migration {name}"),
        });
        let added = std::mem::take(&mut attempt.other.added);
        let gone = tokio::time::timeout(Duration::from_millis(200), attempt.other.monitor.closed());
        if gone.await.is_ok() {
            added.remove_files();
        } else {
            added.remove(&attempt.other.monitor).await;
        }
        let ended = self.migration_ended(&attempt, name, reason);
        self.report_migration(&attempt, ended, None, Vec::new());
    }

    /// After a commit: waits for the agent's streams to be introduced on the new ports, then reports.
    async fn follow_verification(&mut self, now: Instant) {
        let Some(attempt) = &self.attempt else { return };
        let Some(committed_at) = attempt.committed_at else {
            return;
        };
        let late = now.since(committed_at) >= VERIFY_DEADLINE;
        if !self.is_live() && !late {
            return;
        }
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let continuous = self
            .is_live()
            .then_some(self.core.gaps == attempt.gaps_before);
        let figures = match attempt.other.monitor.migration().await {
            Ok(figures) => figures,
            // A source that has ended can no longer be asked; its last figures must do.
            Err(_) => attempt.figures.clone(),
        };
        let attempt = Attempt { figures, ..attempt };
        let ended = self.migration_ended(&attempt, "committed", None);
        let resumed_at = self.core.resumed_at.take().unwrap_or_default();
        let resumed_at = resumed_at
            .into_iter()
            .map(|(stream, sequence)| StreamEnd {
                cpu: stream.0,
                next: sequence.0,
            })
            .collect();
        if !self.is_live() {
            self.core
                .warn("the VM runs at the destination, but its agent has not answered there yet");
        }
        self.report_migration(&attempt, ended, continuous, resumed_at);
    }

    fn migration_ended(
        &self,
        attempt: &Attempt,
        outcome: &str,
        reason: Option<String>,
    ) -> MigrationEnded {
        let measured: migration::Measured = attempt.machine.measured();
        MigrationEnded {
            attempt: attempt.number,
            outcome: outcome.to_owned(),
            reason,
            blackout_ns: (outcome == "committed")
                .then(|| measured.blackout_ns())
                .flatten(),
            qemu_downtime_ms: attempt.figures.downtime_ms,
            drain_ns: measured.drain_ns,
            drained: measured.drained,
            drained_bytes: attempt.drained_bytes,
            boundaries: attempt.boundaries.clone(),
            transferred_bytes: attempt.figures.transferred,
            total_ms: attempt.figures.total_ms,
        }
    }

    fn report_migration(
        &mut self,
        attempt: &Attempt,
        ended: MigrationEnded,
        continuous: Option<bool>,
        resumed_at: Vec<StreamEnd>,
    ) {
        if ended.outcome == "committed" {
            let phase = Phase::Release.name().to_owned();
            self.core.trail.log(Event::MigrationPhase {
                attempt: attempt.number,
                phase,
            });
        }
        self.core.trail.log(Event::MigrationEnded(ended.clone()));
        let totals = self.core.totals();
        let report = Report::Migrated(MigrationReport {
            ended,
            continuous,
            resumed_at,
            duplicates: totals.duplicates - attempt.before.duplicates,
            replayed: totals.replayed - attempt.before.replayed,
        });
        self.core.report(report.clone());
        let _ = attempt.reply.send(report);
    }
}

fn same_file(one: &Path, other: &Path) -> bool {
    match (std::fs::canonicalize(one), std::fs::canonicalize(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => one == other,
    }
}
