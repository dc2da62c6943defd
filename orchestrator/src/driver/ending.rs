//! The recorder's end: the agent stops, everything it still has is fetched, the trail is closed.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use vmtrail_wire::HostMessage;

use super::ports::Port;
use super::{Recorder, STORE_RETRY};
use crate::status::Report;
use crate::trail::event::Event;

/// How long the last frames may take after a stop.
const STOP_DEADLINE: Duration = Duration::from_secs(10);

impl Recorder {
    pub(super) async fn finish(mut self, reason: String) -> Result<Report> {
        let complete = if self.qemu_ended.is_some() {
            // What QEMU wrote before it ended still stands in the FIFOs and sockets.
            self.read_dry(None);
            false
        } else {
            match self.stop_agent().await {
                Ok(complete) => complete,
                Err(error) => {
                    self.core
                        .warn(format!("the trail may lack its last pages: {error:#}"));
                    false
                }
            }
        };
        self.settle_store().await;
        if complete && let Some(session) = self.session() {
            let streams = self.core.boundaries(Some(session));
            self.core.trail.log(Event::Stopped {
                session: session.to_string(),
                streams,
            });
            self.core.collect_acks(session);
            self.send_acks();
            self.settle_ports().await;
        }
        if let (Some(session), Some(attachment)) = (self.session(), &self.source.attachment) {
            let epoch = attachment.epoch();
            self.core.log_drops(session, epoch);
        }
        let residency = self.source.number;
        self.core.trail.log(Event::ResidencyEnded {
            residency,
            reason: if self.qemu_ended.is_some() {
                "qemu ended"
            } else {
                "detached"
            }
            .into(),
        });
        let added = std::mem::take(&mut self.source.added);
        self.source.ports.clear();
        if self.qemu_ended.is_some() {
            added.remove_files();
        } else if !self.options.keep_ports {
            added.remove(&self.source.monitor).await;
        }
        let totals = self.core.totals();
        let report = Report::Stopped {
            reason,
            complete,
            bytes: totals.bytes,
            pages: totals.pages,
        };
        self.core.report(report.clone());
        self.core
            .trail
            .close()
            .context("failed to end the trail in order")?;
        Ok(report)
    }

    /// Stops the agent's recording and takes all that it still has.
    async fn stop_agent(&mut self) -> Result<bool> {
        if !self.is_live() {
            bail!("the agent does not answer");
        }
        if self
            .source
            .attachment
            .as_ref()
            .is_some_and(|attachment| !attachment.is_running())
        {
            bail!("the VM stands still, so its agent cannot send what it still holds");
        }
        let answer = self.ask(HostMessage::Stop, true).await?;
        let session = self
            .session()
            .ok_or_else(|| anyhow!("the agent's session is not known"))?;
        let deadline = self.core.clock.now().after(STOP_DEADLINE);
        while !self.core.ledger.holds(session, &answer.streams) {
            if self.core.clock.now() >= deadline {
                bail!(
                    "the agent's last frames did not come within {} s",
                    STOP_DEADLINE.as_secs()
                );
            }
            self.step(Some(self.core.clock.deadline(deadline))).await?;
        }
        Ok(true)
    }

    /// Waits until the disk has taken all, as long as it makes progress at all.
    async fn settle_store(&mut self) {
        let deadline = self.core.clock.now().after(STOP_DEADLINE);
        loop {
            self.kick_store(self.core.clock.now(), true);
            let Some(commit) = &mut self.commit else {
                break;
            };
            let Ok(outcome) = commit.await else { break };
            self.commit = None;
            let (batch, outcome) = outcome;
            let failed = outcome.is_err();
            self.take_commit(batch, outcome);
            if failed {
                if self.core.clock.now() >= deadline {
                    break;
                }
                tokio::time::sleep(STORE_RETRY).await;
            }
        }
    }

    /// Gives QEMU a moment to take the last Acks, so that the agent frees its memory.
    async fn settle_ports(&mut self) {
        for _ in 0..20 {
            for port in &mut self.source.ports {
                port.flush();
            }
            if self.source.ports.iter().all(Port::is_flushed) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
