//! `vmtrail record`, `migrate`, `stop` and `mark`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{broadcast, mpsc};
use vmtrail_continuity::migration::Options;
use vmtrail_wire::host_to_agent::Setting;

use super::args::{KeepArgs, MarkArgs, MigrateArgs, RecordArgs, StopArgs, WhatArgs};
use super::exit;
use super::progress::Shown;
use crate::driver::control::{self, Control, Question};
use crate::driver::{RecordOptions, Recorder, Request};
use crate::status::Report;
use crate::trail::WriterOptions;

pub(super) async fn record(args: RecordArgs) -> Result<ExitCode> {
    let options = RecordOptions {
        qmp: args.qmp,
        trail: args.output,
        append: args.append,
        settings: settings(&args.what),
        port_paths: args.ports.paths.iter().cloned().collect(),
        add_ports: !args.ports.no_add_ports,
        keep_ports: args.ports.keep_ports,
        duration: args.duration,
        max_bytes: args.max_size,
        writer: writer_options(&args.keep),
    };
    let mut shown = Shown::new(args.json);
    let mut running = Running::start(options, &mut shown).await?;
    let mut signals = Signals::new()?;
    loop {
        tokio::select! {
            report = running.reports.recv() => show(&mut shown, report),
            () = signals.next() => running.stop_on_signal(),
            outcome = &mut running.task => return running.end(&mut shown, outcome).await,
        }
    }
}

pub(super) async fn migrate(args: MigrateArgs) -> Result<ExitCode> {
    let question = Question::Migrate {
        to_qmp: absolute(&args.to_qmp)?,
        from_qmp: Some(absolute(&args.from_qmp)?),
        uri: args.uri.clone(),
        drain_budget_ns: vmtrail_continuity::time::nanos(args.drain_budget),
        port_paths: args.to_ports.iter().cloned().collect(),
    };
    if control::is_recorded(&args.output) {
        return migrate_by_recorder(&args.output, &question, args.json).await;
    }
    migrate_here(args).await
}

/// Another process records: it moves the VM and goes on recording.
async fn migrate_by_recorder(trail: &Path, question: &Question, json: bool) -> Result<ExitCode> {
    let mut shown = Shown::new(json);
    let mut signals = Signals::new()?;
    let answer = {
        let asked = control::ask(trail, question, |report| shown.show(report));
        tokio::pin!(asked);
        loop {
            tokio::select! {
                answer = &mut asked => break answer?,
                () = signals.next() => {
                    // The answer to the cancel is of less interest than the migration's own.
                    let answer = control::ask(trail, &Question::Cancel, |_| {}).await?;
                    if let Report::Refused { reason } = answer {
                        eprintln!("vmtrail: {reason}");
                    }
                }
            }
        }
    };
    shown.show(&answer);
    Ok(migration_code(&answer))
}

/// Nobody records: this process does, and moves the VM.
async fn migrate_here(args: MigrateArgs) -> Result<ExitCode> {
    let options = RecordOptions {
        qmp: args.from_qmp,
        trail: args.output,
        append: true,
        settings: settings(&args.what),
        port_paths: args.ports.paths.iter().cloned().collect(),
        add_ports: !args.ports.no_add_ports,
        keep_ports: args.ports.keep_ports,
        duration: None,
        max_bytes: None,
        writer: writer_options(&args.keep),
    };
    let mut shown = Shown::new(args.json);
    let mut running = Running::start(options, &mut shown).await?;
    let mut signals = Signals::new()?;
    let (reply, mut answers) = mpsc::unbounded_channel();
    let request = Request::Migrate {
        to_qmp: args.to_qmp,
        from_qmp: None,
        options: Options {
            uri: args.uri,
            drain_budget: args.drain_budget,
        },
        port_paths: args.to_ports.iter().cloned().collect::<BTreeMap<_, _>>(),
        reply,
    };
    running
        .requests
        .send(request)
        .await
        .context("failed to ask for the migration")?;
    let mut answer = None;
    loop {
        tokio::select! {
            report = running.reports.recv() => show(&mut shown, report),
            Some(report) = answers.recv(), if answer.is_none() => {
                if let Report::Refused { .. } = &report {
                    shown.show(&report);
                }
                if migration_code(&report) != ExitCode::SUCCESS {
                    // The VM stays where it is, but this command was to move it: end the recording that it began.
                    running.stop_on_signal();
                }
                answer = Some(report);
            }
            () = signals.next() => {
                if answer.is_some() {
                    running.stop_on_signal();
                } else {
                    let (reply, _) = mpsc::unbounded_channel();
                    running.requests.send(Request::Cancel { reply }).await.ok();
                }
            }
            outcome = &mut running.task => {
                let recorded = running.end(&mut shown, outcome).await?;
                return Ok(match &answer {
                    Some(answer) if migration_code(answer) != ExitCode::SUCCESS => migration_code(answer),
                    _ => recorded,
                });
            }
        }
    }
}

pub(super) async fn stop(args: &StopArgs) -> Result<ExitCode> {
    let mut shown = Shown::new(args.json);
    let answer = control::ask(&args.trail, &Question::Stop, |_| {}).await?;
    shown.show(&answer);
    match answer {
        Report::Stopped { complete: true, .. } => Ok(ExitCode::SUCCESS),
        Report::Stopped { .. } => Ok(ExitCode::from(exit::INCOMPLETE)),
        Report::Refused { reason } => bail!("{reason}"),
        other => bail!("the recorder answered something else: {other:?}"),
    }
}

pub(super) async fn mark(args: &MarkArgs) -> Result<ExitCode> {
    let question = Question::Mark {
        text: args.text.clone(),
    };
    match control::ask(&args.trail, &question, |_| {}).await? {
        Report::Done => Ok(ExitCode::SUCCESS),
        Report::Refused { reason } => bail!("{reason}"),
        other => bail!("the recorder answered something else: {other:?}"),
    }
}

/// A recorder that runs in this process.
struct Running {
    requests: mpsc::Sender<Request>,
    reports: broadcast::Receiver<Arc<Report>>,
    task: tokio::task::JoinHandle<Result<Report>>,
    control: Control,
}

impl Running {
    async fn start(options: RecordOptions, shown: &mut Shown) -> Result<Self> {
        let (requests_in, requests) = mpsc::channel(16);
        let (reports_in, mut reports) = broadcast::channel(1024);
        let trail = options.trail.clone();
        let mut signals = Signals::new()?;
        let start = Recorder::start(options, reports_in.clone(), requests);
        tokio::pin!(start);
        let recorder = loop {
            tokio::select! {
                recorder = &mut start => break recorder?,
                report = reports.recv() => show(shown, report),
                () = signals.next() => bail!("interrupted before anything was recorded"),
            }
        };
        let control = Control::listen(&trail, requests_in.clone(), reports_in)?;
        recorder.announce();
        let task = tokio::spawn(recorder.run());
        Ok(Self {
            requests: requests_in,
            reports,
            task,
            control,
        })
    }

    fn stop_on_signal(&self) {
        let request = Request::Stop {
            reason: "interrupted".into(),
            reply: None,
        };
        // A full queue means that it was said often enough.
        let _ = self.requests.try_send(request);
    }

    async fn end(
        mut self,
        shown: &mut Shown,
        outcome: Result<Result<Report>, tokio::task::JoinError>,
    ) -> Result<ExitCode> {
        while let Ok(report) = self.reports.try_recv() {
            shown.show(&report);
        }
        self.control.end().await;
        let report = outcome.context("the recorder ended unexpectedly")??;
        Ok(match report {
            Report::Stopped { complete: true, .. } => ExitCode::SUCCESS,
            _ => ExitCode::from(exit::INCOMPLETE),
        })
    }
}

/// Ctrl-C and SIGTERM.
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).context("failed to listen for signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

fn show(shown: &mut Shown, report: Result<Arc<Report>, broadcast::error::RecvError>) {
    // Reports that were missed because the terminal is slow are about what is over.
    if let Ok(report) = report {
        shown.show(&report);
    }
}

fn migration_code(answer: &Report) -> ExitCode {
    match answer {
        Report::Migrated(report) if report.ended.outcome == "committed" => ExitCode::SUCCESS,
        Report::Migrated(report) if report.ended.outcome == "unknown" => {
            ExitCode::from(exit::UNKNOWN_PLACE)
        }
        _ => ExitCode::from(exit::NOT_MIGRATED),
    }
}

fn settings(what: &WhatArgs) -> Vec<Setting> {
    let mut settings = Vec::new();
    // What clears the rings comes first, so that nothing recorded by the new settings is cleared.
    settings.extend(
        what.buffer_size
            .map(|bytes| Setting::BufferSizeKb(bytes.div_ceil(1024))),
    );
    settings.extend(what.clock.clone().map(Setting::Clock));
    settings.extend(what.trace_options.iter().cloned().map(Setting::Option));
    if !what.events.is_empty() || !what.filters.is_empty() {
        settings.push(Setting::ClearEvents);
    }
    settings.extend(what.filters.iter().cloned().map(Setting::Filter));
    settings.extend(what.events.iter().cloned().map(Setting::Event));
    settings.extend(what.tracer.clone().map(Setting::Tracer));
    settings
}

fn writer_options(keep: &KeepArgs) -> WriterOptions {
    WriterOptions {
        retain_bytes: keep.retain_size,
        retain_age: keep.retain_time,
        ..WriterOptions::default()
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path)
        .with_context(|| format!("failed to make {} an absolute path", path.display()))
}
