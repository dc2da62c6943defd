//! The recorder of one VM: a loop that carries facts to the machines of `continuity` and does what they say.
//!
//! ```text
//!   ports ----> decoder --> ledger --> trail (batch) --> sync --> Ack on the ports
//!   QMP  ----> events  --> migration machine --> commands, switch of ports
//!   control socket ------> migrate, cancel, stop
//! ```
//!
//! One task owns all of it, so that nothing has to be locked and every run of events has one order. What blocks (the
//! disk) or waits (QMP) is done elsewhere and comes back as a fact.

mod attempt;
pub mod control;
mod core;
mod ending;
pub mod ports;
mod residency;
pub mod time;
pub mod topology;
pub mod vmm;

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinHandle;
use vmtrail_continuity::Instant;
use vmtrail_continuity::attach::{self, Attachment};
use vmtrail_continuity::migration::Options;
use vmtrail_wire::host_to_agent::{Envelope, HostHello, MAX_SEQUENCES, Setting};
use vmtrail_wire::{Epoch, HostMessage, SessionId, decode::Expectation, version};

use self::attempt::Attempt;
use self::core::{Core, Pending};
use self::ports::TurnEnd;
use self::residency::{Fact, Residency};
use self::time::{Clock, wall_ns};
use crate::status::Report;
use crate::trail::event::Event;
use crate::trail::{Batch, Recovery, StoreError, TrailWriter, VmIdentity, WriterOptions};

/// A batch goes to the disk when it is this long …
const BATCH_BYTES: usize = 256 << 10;
/// … or this old. The agent keeps what is not synced, 1 MiB a CPU by default: the rate of a CPU is bounded by that over
/// this and the time of a sync.
const BATCH_AGE: Duration = Duration::from_millis(20);
/// Ports are not read while so much waits for the disk: the guest's ring takes over, and the agent's memory.
const MAX_WAITING_BYTES: usize = 32 << 20;
/// How long a store that refused is left alone.
const STORE_RETRY: Duration = Duration::from_millis(500);
/// How long a start waits for the agent. Behind a reader that was killed, up to the agent's whole window stands in queues first, and an
/// emulated guest on a busy host needed more than 5 s to be heard.
const START_PATIENCE: Duration = Duration::from_secs(15);
/// How often the clocks are compared.
const CLOCK_INTERVAL: Duration = Duration::from_secs(10);
/// How long the agent may take to answer a request. Switching a thousand tracepoints patches the guest's kernel code on all
/// its CPUs, which took 5 s in an emulated guest on a busy host; nobody is held meanwhile.
const AGENT_DEADLINE: Duration = Duration::from_secs(60);
/// How often a monitor that closed is tried again, while its QEMU lives …
const MONITOR_TRIES: u32 = 5;
/// … and the pause between.
const MONITOR_PAUSE: Duration = Duration::from_millis(300);

/// What to record.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// QMP socket of the VM.
    pub qmp: PathBuf,
    /// The trail.
    pub trail: PathBuf,
    /// Whether the trail may exist already, and is then continued.
    pub append: bool,
    /// What the agent is told to record; empty leaves it as it is.
    pub settings: Vec<Setting>,
    /// Where ports are that QEMU does not tell: name to path.
    pub port_paths: BTreeMap<String, PathBuf>,
    /// Whether ports may be added to a VM that has none.
    pub add_ports: bool,
    /// Whether ports that were added stay.
    pub keep_ports: bool,
    /// Recording ends after so long.
    pub duration: Option<Duration>,
    /// Recording ends after so many bytes of pages.
    pub max_bytes: Option<u64>,
    /// How the trail is kept.
    pub writer: WriterOptions,
}

/// What a recorder is asked for.
#[derive(Debug)]
pub enum Request {
    /// Move the VM.
    Migrate {
        /// QMP socket of the waiting destination.
        to_qmp: PathBuf,
        /// QMP socket that the caller believes the VM is at; refused if another one is recorded.
        from_qmp: Option<PathBuf>,
        /// URI and budget.
        options: Options,
        /// Where ports of the destination are that QEMU does not tell.
        port_paths: BTreeMap<String, PathBuf>,
        /// Answered with [`Report::Migrated`] or [`Report::Refused`].
        reply: mpsc::UnboundedSender<Report>,
    },
    /// Give the migration up.
    Cancel {
        /// Answered with [`Report::Done`] or [`Report::Refused`].
        reply: mpsc::UnboundedSender<Report>,
    },
    /// Write a line into the trace.
    Mark {
        /// The line.
        text: String,
        /// Answered with [`Report::Done`] or [`Report::Refused`].
        reply: mpsc::UnboundedSender<Report>,
    },
    /// End in order.
    Stop {
        /// Why, for people.
        reason: String,
        /// Answered with [`Report::Stopped`].
        reply: Option<mpsc::UnboundedSender<Report>>,
    },
}

/// Records one VM.
#[derive(Debug)]
pub struct Recorder {
    options: RecordOptions,
    core: Core,
    source: Residency,
    attempt: Option<Attempt>,
    facts: mpsc::UnboundedReceiver<Fact>,
    facts_in: mpsc::UnboundedSender<Fact>,
    requests: mpsc::Receiver<Request>,
    queue: VecDeque<Request>,
    commit: Option<JoinHandle<(Batch, Result<(), StoreError>)>>,
    store_retry_at: Option<Instant>,
    dirty_since: Option<Instant>,
    newest_epoch: Epoch,
    residencies: u64,
    attempts: u64,
    turn: usize,
    scratch: Vec<u8>,
    started_at: Instant,
    rate_at: Instant,
    rate_bytes: u64,
    ping_at: Instant,
    qemu_ended: Option<String>,
    vm_name: String,
}

impl Recorder {
    /// Attaches to a running VM and begins to record.
    ///
    /// # Errors
    ///
    /// Something is wrong with the VM, its ports, its agent or the trail; the VM and the disk are left as they were.
    pub async fn start(
        options: RecordOptions,
        reports: broadcast::Sender<Arc<Report>>,
        requests: mpsc::Receiver<Request>,
    ) -> Result<Self> {
        let (facts_in, facts) = mpsc::unbounded_channel();
        let clock = Clock::start();
        let source = Residency::connect(&options.qmp, &options.port_paths).await?;
        let state = source.monitor.run_state().await?;
        if state != "running" {
            bail!(
                "the VM at {} is \"{state}\", not running: start or resume it (QMP `cont`) and record again",
                options.qmp.display()
            );
        }
        let identity = source.monitor.identity().await?;
        source.choose_ports(options.add_ports)?;
        let vm = VmIdentity {
            name: identity.name.clone(),
            uuid: identity.uuid.clone(),
        };
        let exists = options.trail.join("trail.json").exists();
        let (trail, recovery) = if options.append && exists {
            TrailWriter::open(&options.trail, options.writer.clone())?
        } else {
            let trail = TrailWriter::create(&options.trail, options.writer.clone(), vm)?;
            (trail, Recovery::default())
        };
        let mut core = Core::new(clock, trail, reports);
        for (&(session, stream), point) in &recovery.resume {
            let point = vmtrail_continuity::ledger::ResumePoint {
                next: point.next,
                next_page: point.next_page,
            };
            core.ledger.remember(session, stream, point);
        }
        core.metadata = recovery.metadata.clone();
        for text in recovery.cuts.iter().chain(&recovery.damage) {
            core.warn(text.clone());
        }
        let now = clock.now();
        let mut recorder = Self {
            vm_name: (identity.name).unwrap_or_else(|| options.qmp.display().to_string()),
            core,
            source,
            attempt: None,
            facts,
            facts_in,
            requests,
            queue: VecDeque::new(),
            commit: None,
            store_retry_at: None,
            dirty_since: None,
            newest_epoch: recovery.last_epoch,
            residencies: recovery.residencies.last().map_or(0, |last| last.residency),
            attempts: recovery.last_attempt,
            turn: 0,
            scratch: vec![0; 256 << 10],
            started_at: now,
            rate_at: now,
            rate_bytes: 0,
            ping_at: now,
            qemu_ended: None,
            options,
        };
        for residency in recovery.open_residencies {
            let reason = "the recorder ended without saying so".to_owned();
            recorder
                .core
                .trail
                .log(Event::ResidencyEnded { residency, reason });
        }
        match recorder.attach_to_source(&identity.qemu).await {
            Ok(()) => Ok(recorder),
            Err(error) => {
                recorder.give_up(!exists).await;
                Err(error)
            }
        }
    }

    /// Records until it is told to stop, the VM ends, or a limit is reached. The trail is whole then.
    ///
    /// # Errors
    ///
    /// The trail could not be ended in order.
    pub async fn run(mut self) -> Result<Report> {
        let mut replies = Vec::new();
        let reason = loop {
            self.step(None).await?;
            if let Some(reason) = self.qemu_ended.take() {
                if self.find_monitor_again().await {
                    continue;
                }
                self.qemu_ended = Some(reason.clone());
                break reason;
            }
            while let Some(request) = self.queue.pop_front() {
                match request {
                    Request::Stop { reason, reply } => {
                        replies.extend(reply);
                        self.queue.push_front(Request::Stop {
                            reason,
                            reply: None,
                        });
                        break;
                    }
                    Request::Migrate {
                        to_qmp,
                        from_qmp,
                        options,
                        port_paths,
                        reply,
                    } => {
                        let begun = self
                            .begin_migration(
                                &to_qmp,
                                from_qmp.as_deref(),
                                options,
                                &port_paths,
                                &reply,
                            )
                            .await;
                        if let Err(error) = begun {
                            let _ = reply.send(Report::Refused {
                                reason: format!("{error:#}"),
                            });
                        }
                    }
                    Request::Cancel { reply } => self.cancel(&reply),
                    Request::Mark { text, reply } => {
                        self.send(0, HostMessage::Mark(text));
                        let _ = reply.send(Report::Done);
                    }
                }
            }
            // A migration is ended first: its outcome belongs into the trail.
            if self.attempt.is_some() {
                let stopping = self.queue.front().is_some();
                if let (true, Some(attempt)) = (stopping, &mut self.attempt) {
                    attempt.machine.handle_cancel(self.core.clock.now());
                }
                continue;
            }
            if let Some(Request::Stop { reason, .. }) = self.queue.pop_front() {
                break reason;
            }
            if let Some(limit) = self.reached_limit() {
                break limit;
            }
        };
        let report = self.finish(reason).await?;
        for reply in replies {
            let _ = reply.send(report.clone());
        }
        Ok(report)
    }

    /// The monitor closed. A QEMU that lives is found again at the same path: somebody took its client away (a `chardev`
    /// change, a kernel limit), and the ports go on all the time.
    async fn find_monitor_again(&mut self) -> bool {
        let path = self.source.monitor.path().to_owned();
        let lives = self
            .source
            .monitor
            .pid()
            .is_some_and(|pid| std::path::Path::new(&format!("/proc/{pid}")).exists());
        if !lives {
            return false;
        }
        for _ in 0..MONITOR_TRIES {
            match vmm::Monitor::connect(&path).await {
                Ok(monitor) if monitor.pid() == self.source.monitor.pid() => {
                    self.core.warn(format!(
                        "the monitor {} had closed the connection; connected again",
                        path.display()
                    ));
                    self.source.monitor = monitor;
                    self.source.watch(self.facts_in.clone());
                    return true;
                }
                _ => tokio::time::sleep(MONITOR_PAUSE).await,
            }
        }
        false
    }

    async fn attach_to_source(&mut self, qemu: &str) -> Result<()> {
        self.source.open_ports(self.options.add_ports).await?;
        let number = self.enter_residency(qemu, None, "attach");
        self.source.number = number;
        self.source.watch(self.facts_in.clone());
        self.core.residency = number;
        self.attach(true);
        let names: Vec<_> = self
            .source
            .ports
            .iter()
            .map(|port| port.address().name.clone())
            .collect();
        let names = names.join(", ");
        let deadline = self.core.clock.now().after(START_PATIENCE);
        while !self.is_live() {
            let left = self.core.clock.deadline(deadline);
            self.step(Some(left)).await?;
            self.refuse_strangers()?;
            if self.core.clock.now() >= deadline {
                bail!(
                    "no agent answered on the VM's ports ({names}) within {} s: start vmtrail-agent in the guest \
                     (`systemctl start vmtrail-agent`, or by hand as root; its log says what it lacks), then record again",
                    START_PATIENCE.as_secs()
                );
            }
        }
        if !self.options.settings.is_empty() {
            let settings = HostMessage::Configure(self.options.settings.clone());
            self.ask(settings, false)
                .await
                .context("failed to configure the agent")?;
        }
        self.ask(HostMessage::Start, false)
            .await
            .context("failed to start the agent's recording")?;
        self.started_at = self.core.clock.now();
        Ok(())
    }

    /// Tells that it records: once whoever hears it can also ask.
    pub fn announce(&self) {
        let session = self.session().unwrap_or_default();
        let about = self.core.sessions.get(&session);
        self.core.report(Report::Recording {
            trail: self.options.trail.display().to_string(),
            vm: self.vm_name.clone(),
            ports: self.source.ports.len(),
            session: session.to_string(),
            kernel: about.map(|hello| hello.kernel.clone()).unwrap_or_default(),
            pid: std::process::id(),
        });
    }

    fn refuse_strangers(&self) -> Result<()> {
        if let Some(found) = self.core.unsupported {
            bail!(
                "the agent in the guest speaks protocol version {found}, this vmtrail versions {} to {}: \
                 use a newer vmtrail on this host, or the agent of this one in the guest",
                version::MIN,
                version::CURRENT
            );
        }
        if let Some(reason) = &self.qemu_ended {
            bail!("the VM ended while vmtrail attached to it: {reason}");
        }
        Ok(())
    }

    /// Undoes a start that failed.
    async fn give_up(mut self, created: bool) {
        let added = std::mem::take(&mut self.source.added);
        self.source.ports.clear();
        added.remove(&self.source.monitor).await;
        if let Some(commit) = self.commit.take() {
            let _ = commit.await;
        }
        drop(self.core);
        // Only what this call made, and only while nobody was told that it records.
        if created && let Err(error) = std::fs::remove_dir_all(&self.options.trail) {
            tracing::warn!("failed to remove {}: {error}", self.options.trail.display());
        }
    }

    fn enter_residency(&mut self, qemu: &str, parent: Option<u64>, cause: &str) -> u64 {
        self.residencies += 1;
        let monitor = match (&self.attempt, parent) {
            (Some(attempt), Some(_)) => &attempt.other.monitor,
            _ => &self.source.monitor,
        };
        self.core
            .trail
            .log(Event::Residency(crate::trail::event::Residency {
                residency: self.residencies,
                host: nix::unistd::gethostname()
                    .map(|name| name.to_string_lossy().into_owned())
                    .unwrap_or_default(),
                pid: monitor.pid(),
                qemu: qemu.to_owned(),
                qmp: monitor.path().display().to_string(),
                parent,
                cause: cause.to_owned(),
            }));
        self.residencies
    }

    /// Calls the agent on the ports of the residency that runs.
    fn attach(&mut self, running: bool) {
        let epoch = self.new_epoch();
        let kinds: Vec<_> = self
            .source
            .ports
            .iter()
            .map(|port| port.address().kind)
            .collect();
        let now = self.core.clock.now();
        self.source.attachment = Some(Attachment::new(now, epoch, &kinds, running));
        self.core.port_streams.clear();
        self.log_attachment(epoch);
    }

    fn log_attachment(&mut self, epoch: Epoch) {
        self.core.trail.log(Event::Attached {
            epoch: epoch.0,
            residency: self.source.number,
            ports: self
                .source
                .ports
                .iter()
                .map(|port| port.address().name.clone())
                .collect(),
        });
    }

    /// An epoch newer than all before, also those of recorders that we know nothing of (their clocks were about right),
    /// and one that nobody in the guest can guess.
    fn new_epoch(&mut self) -> Epoch {
        let random = std::hash::RandomState::new().build_hasher().finish() & 0xf_ffff;
        let by_time = ((wall_ns() / 1_000_000) << 20) | random;
        // The step is random, too: behind a clock that was set back, a recorder that was killed before it synced its epoch
        // and the next one would choose the same, and the agent obeys an epoch only once.
        let by_step = self.newest_epoch.0.saturating_add(1 + random);
        self.newest_epoch = Epoch(by_time.max(by_step));
        self.newest_epoch
    }

    fn session(&self) -> Option<SessionId> {
        self.source.attachment.as_ref()?.session()
    }

    fn is_live(&self) -> bool {
        self.source
            .attachment
            .as_ref()
            .is_some_and(Attachment::is_live)
    }

    fn reached_limit(&self) -> Option<String> {
        let running = self.core.clock.now().since(self.started_at);
        if self.options.duration.is_some_and(|limit| running >= limit) {
            return Some("the duration is over".into());
        }
        let bytes = self.core.totals().bytes;
        self.options
            .max_bytes
            .filter(|&limit| bytes >= limit)
            .map(|_| "the size is reached".into())
    }

    /// Waits for one thing to happen, at most until `until`, and does what follows from it.
    async fn step(&mut self, until: Option<tokio::time::Instant>) -> Result<()> {
        let wake = self.next_wake();
        let wake = self.core.clock.deadline(wake);
        let wake = until.map_or(wake, |until| wake.min(until));
        let reads = self.may_read();
        let (source, turn) = (&self.source, self.turn);
        tokio::select! {
            port = std::future::poll_fn(|cx| {
                if !reads {
                    return Poll::Pending;
                }
                source.poll_readable(cx, turn)
            }) => self.read_turn(port),
            outcome = async { self.commit.as_mut().expect("guarded").await }, if self.commit.is_some() => {
                self.commit = None;
                let (batch, outcome) = outcome.context("failed to store a batch: the thread ended")?;
                self.take_commit(batch, outcome);
            }
            Some(fact) = self.facts.recv() => self.take_fact(fact).await,
            Some(request) = self.requests.recv() => self.queue.push_back(request),
            () = tokio::time::sleep_until(wake) => {}
        }
        self.follow_up().await;
        Ok(())
    }

    fn may_read(&self) -> bool {
        self.core.trail.pending_bytes() < MAX_WAITING_BYTES
    }

    fn next_wake(&self) -> Instant {
        let mut wake = self.rate_at.after(Duration::from_secs(1));
        let mut sooner = |at: Option<Instant>| wake = at.map_or(wake, |at| wake.min(at));
        sooner(
            self.source
                .attachment
                .as_ref()
                .and_then(Attachment::poll_timeout),
        );
        sooner(
            self.attempt
                .as_ref()
                .and_then(|attempt| attempt.machine.poll_timeout()),
        );
        if self.commit.is_none() {
            sooner(
                self.store_retry_at
                    .or_else(|| self.dirty_since.map(|at| at.after(BATCH_AGE))),
            );
        }
        wake
    }

    fn read_turn(&mut self, index: usize) {
        self.turn = index + 1;
        let Some(port) = self.source.ports.get_mut(index) else {
            return;
        };
        let Some(attachment) = &mut self.source.attachment else {
            return;
        };
        // Before the agent has answered, its refusal of a stale epoch is what we wait for, and that carries a newer one.
        let newest = attachment.is_answered(index).then(|| attachment.epoch());
        port.decoder.expect(Expectation {
            session: None,
            newest,
        });
        let core = &mut self.core;
        let turn = port.read_turn(&mut self.scratch, |decoder| {
            core.take(attachment, index, decoder)
        });
        match turn {
            Ok(turn) if turn.end == TurnEnd::Closed => self.take_closed_port(index),
            Ok(_) => {}
            Err(error) => {
                let name = port.address().name.clone();
                self.core
                    .warn(format!("failed to read port {name}: {error}"));
            }
        }
    }

    fn take_closed_port(&mut self, index: usize) {
        // QEMU is gone, or (socket) the port was unplugged. The monitor says which; until then the port is just silent.
        tracing::info!(port = %self.source.ports[index].address().name, "the port was closed by QEMU");
    }

    /// Lets the machines act after whatever happened.
    async fn follow_up(&mut self) {
        let now = self.core.clock.now();
        self.follow_attachment(now);
        self.follow_attempt(now).await;
        if self.dirty_since.is_none() && self.core.trail.pending_bytes() > 0 {
            self.dirty_since = Some(now);
        }
        self.kick_store(now, false);
        self.send_acks();
        if now.since(self.rate_at) >= Duration::from_secs(1) {
            self.tick(now);
        }
    }

    fn follow_attachment(&mut self, now: Instant) {
        let Some(attachment) = &mut self.source.attachment else {
            return;
        };
        if std::mem::take(&mut self.core.agent_ends) {
            attachment.handle_agent_gone(now);
        }
        if attachment.poll_timeout().is_some_and(|at| at <= now) {
            attachment.handle_timeout(now);
        }
        let epoch = attachment.epoch();
        if epoch > self.newest_epoch {
            // The agent had obeyed a newer one and ours was raised above it.
            self.newest_epoch = epoch;
            self.log_attachment(epoch);
        }
        while let Some(action) = self
            .source
            .attachment
            .as_mut()
            .and_then(Attachment::poll_action)
        {
            match action {
                attach::Action::SendHello { port, epoch } => self.send_hello(port, epoch),
                attach::Action::Reconnect { port } => self.reconnect(now, port),
                attach::Action::AgentAbsent => {
                    self.core.warn("the agent in the guest does not answer");
                }
            }
        }
    }

    fn reconnect(&mut self, now: Instant, index: usize) {
        let port = &mut self.source.ports[index];
        let name = port.address().name.clone();
        let outcome = port.reopen();
        match outcome {
            Ok(()) => self.core.warn(format!(
                "port {name} of a running VM was silent: QEMU had stopped serving it; connected anew, what it held comes by replay"
            )),
            Err(error) => self.core.warn(format!("failed to reconnect port {name}: {error:#}")),
        }
        let epoch = self.new_epoch();
        if let Some(attachment) = &mut self.source.attachment {
            attachment.handle_reconnected(now, index, epoch);
        }
        self.log_attachment(epoch);
    }

    fn send_hello(&mut self, port: usize, epoch: Epoch) {
        // The session is not known before it answers, so the newest one is named; another one ignores `resume_from`.
        let session = self
            .session()
            .or_else(|| self.core.ledger.sessions().last().copied());
        let mut resume_from = session
            .map(|session| self.core.ledger.resume_from(session))
            .unwrap_or_default();
        resume_from.truncate(MAX_SEQUENCES as usize);
        let have_metadata = session
            .and_then(|session| self.core.metadata.get(&session).copied())
            .unwrap_or(0);
        let envelope = Envelope {
            session: session.unwrap_or_default(),
            epoch,
            id: self.core.next_id(),
            message: HostMessage::Hello(HostHello {
                version_min: version::MIN,
                version_max: version::CURRENT,
                have_metadata,
                resume_from,
            }),
        };
        tracing::debug!(port, %epoch, have_metadata, "say Hello");
        if let Some(port) = self.source.ports.get_mut(port) {
            port.send(&envelope.encode());
        }
    }

    fn send(&mut self, port: usize, message: HostMessage) -> Option<u64> {
        let id = self.core.next_id();
        self.send_as(port, id, message).then_some(id)
    }

    fn send_as(&mut self, port: usize, id: u64, message: HostMessage) -> bool {
        let Some(attachment) = &self.source.attachment else {
            return false;
        };
        let envelope = Envelope {
            session: attachment.session().unwrap_or_default(),
            epoch: attachment.epoch(),
            id,
            message,
        };
        self.source
            .ports
            .get_mut(port)
            .is_some_and(|port| port.send(&envelope.encode()))
    }

    /// Asks the agent on one port or on all, and waits for the answers.
    async fn ask(&mut self, message: HostMessage, all: bool) -> Result<Pending> {
        let ports = if all { self.source.ports.len() } else { 1 };
        let id = self.core.next_id();
        self.core.pending.insert(
            id,
            Pending {
                ports: (0..ports).collect(),
                ..Pending::default()
            },
        );
        for port in 0..ports {
            if !self.send_as(port, id, message.clone()) {
                self.core.pending.remove(&id);
                bail!("the agent does not read its port");
            }
        }
        let deadline = self.core.clock.now().after(AGENT_DEADLINE);
        loop {
            let answered = self
                .core
                .pending
                .get(&id)
                .is_none_or(|pending| pending.ports.is_empty());
            if answered {
                let pending = self.core.pending.remove(&id).unwrap_or_default();
                return match pending.error {
                    Some(error) => Err(anyhow!("the agent refused: {error}")),
                    None => Ok(pending),
                };
            }
            let told_to_stop = self
                .queue
                .iter()
                .any(|request| matches!(request, Request::Stop { .. }));
            if told_to_stop {
                self.core.pending.remove(&id);
                bail!("interrupted while the agent was asked");
            }
            if self.core.clock.now() >= deadline {
                self.core.pending.remove(&id);
                bail!(
                    "the agent did not answer within {} s",
                    AGENT_DEADLINE.as_secs()
                );
            }
            self.step(Some(self.core.clock.deadline(deadline))).await?;
            self.refuse_strangers()?;
        }
    }

    fn kick_store(&mut self, now: Instant, force: bool) {
        if self.commit.is_some() || self.store_retry_at.is_some_and(|at| at > now) {
            return;
        }
        let due = self.store_retry_at.take().is_some()
            || force
            || self.core.trail.pending_bytes() >= BATCH_BYTES
            || self
                .dirty_since
                .is_some_and(|since| now.since(since) >= BATCH_AGE);
        if !due {
            return;
        }
        self.dirty_since = None;
        if let Some(mut batch) = self.core.trail.take_batch() {
            self.commit = Some(tokio::task::spawn_blocking(move || {
                let outcome = batch.commit();
                (batch, outcome)
            }));
        }
    }

    fn take_commit(&mut self, batch: Batch, outcome: Result<(), StoreError>) {
        let durable = self.core.trail.finish_batch(batch);
        match outcome {
            Ok(()) => {
                self.core.take_durable(&durable);
                if let Some(session) = self.session() {
                    self.core.collect_acks(session);
                }
            }
            Err(error) => {
                let hint = if error.is_full() {
                    "free some space; recording goes on by itself then"
                } else {
                    "it is tried again"
                };
                self.core
                    .warn(format!("failed to store: {:#}; {hint}", anyhow!(error)));
                self.store_retry_at = Some(self.core.clock.now().after(STORE_RETRY));
            }
        }
    }

    fn send_acks(&mut self) {
        if self.core.acks.is_empty() || self.source.attachment.is_none() {
            return;
        }
        let mut by_port: BTreeMap<usize, Vec<_>> = BTreeMap::new();
        for (&stream, &next) in &self.core.acks {
            let Some(&port) = self.core.port_streams.get(&stream) else {
                continue;
            };
            let answered = self
                .source
                .attachment
                .as_ref()
                .is_some_and(|attachment| attachment.is_answered(port));
            if answered {
                by_port.entry(port).or_default().push((stream, next));
            }
        }
        for (index, acks) in by_port {
            let port = &mut self.source.ports[index];
            port.flush();
            // Acks are cumulative: behind an agent that does not read, one is as good as ten.
            if !port.is_flushed() {
                continue;
            }
            for (stream, _) in &acks {
                self.core.acks.remove(stream);
            }
            for chunk in acks.chunks(MAX_SEQUENCES as usize) {
                self.send(index, HostMessage::Ack(chunk.to_vec()));
            }
        }
    }

    fn tick(&mut self, now: Instant) {
        let totals = self.core.totals();
        let elapsed_ms = u64::try_from(now.since(self.rate_at).as_millis())
            .unwrap_or(u64::MAX)
            .max(1);
        let bytes_per_s = totals.bytes.saturating_sub(self.rate_bytes) * 1000 / elapsed_ms;
        self.core.report(Report::Rate {
            seconds: now.since(self.started_at).as_secs(),
            bytes: totals.bytes,
            pages: totals.pages,
            bytes_per_s,
            lag_bytes: self.core.trail.pending_bytes() as u64,
            missing_frames: totals.missing,
            overrun_events: totals.overrun,
            held_back: !self.may_read() || self.store_retry_at.is_some(),
        });
        self.rate_at = now;
        self.rate_bytes = totals.bytes;
        for port in &mut self.source.ports {
            port.flush();
        }
        if self.is_live() && now >= self.ping_at {
            self.ping_at = now.after(CLOCK_INTERVAL);
            let (id, ping) = self.core.ping();
            self.send_as(0, id, ping);
            if let (Some(session), Some(attachment)) = (self.session(), &self.source.attachment) {
                self.core.log_drops(session, attachment.epoch());
            }
        }
        if let Some(attempt) = &self.attempt {
            let figures = &attempt.figures;
            if let Some(status) = figures.status.clone() {
                self.core.report(Report::Progress {
                    attempt: attempt.number,
                    status,
                    transferred_bytes: figures.transferred.unwrap_or(0),
                    remaining_bytes: figures.remaining.unwrap_or(0),
                    megabits: figures.megabits.unwrap_or(0),
                    passes: figures.passes.unwrap_or(0),
                    expected_downtime_ms: figures.expected_downtime_ms.unwrap_or(0),
                    lag_bytes: self.core.trail.pending_bytes() as u64,
                });
            }
            self.source.ask_figures(self.facts_in.clone());
        }
    }
}
