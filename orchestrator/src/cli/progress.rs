//! Reports for people: a moving line on a terminal, plain lines in a log, or JSON.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

use crate::status::{MigrationReport, Report};

/// How often a log gets a line about the rate, in reports of one second each.
const RATE_LINES: u64 = 10;

/// Shows reports.
#[derive(Debug)]
pub(super) struct Shown {
    json: bool,
    bar: Option<ProgressBar>,
    rates: u64,
}

impl Shown {
    pub(super) fn new(json: bool) -> Self {
        let bar = (!json && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner();
            // The template is a constant: it is either right or seen to be wrong at once.
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self {
            json,
            bar,
            rates: 0,
        }
    }

    pub(super) fn show(&mut self, report: &Report) {
        if self.json {
            if let Ok(line) = serde_json::to_string(report) {
                let mut out = io::stdout().lock();
                // Nobody listening is no reason to stop recording.
                let _ = writeln!(out, "{line}");
                let _ = out.flush();
            }
            return;
        }
        match report {
            Report::Rate { .. } => {
                self.rates += 1;
                let due = self.bar.is_some() || self.rates % RATE_LINES == 1;
                if due {
                    self.move_line(&rate(report));
                }
            }
            Report::Progress { .. } => self.move_line(&progress(report)),
            Report::Warning { text } => self.line(&format!("warning: {text}")),
            Report::Recording {
                trail,
                vm,
                ports,
                session,
                kernel,
                ..
            } => self.line(&format!(
                "recording {vm} (Linux {kernel}, session {session}) from {ports} ports into {trail}"
            )),
            Report::Phase { attempt, phase } => {
                self.line(&format!("migration {attempt}: {}", phase_in_words(phase)));
            }
            Report::Migrated(report) => self.line(&migrated(report)),
            Report::Stopped {
                reason,
                complete,
                bytes,
                pages,
            } => self.line(&format!(
                "stopped ({reason}): {pages} pages, {}, {}",
                HumanBytes(*bytes),
                if *complete {
                    "complete"
                } else {
                    "the last pages may be missing"
                }
            )),
            Report::Refused { reason } => self.line(&format!("refused: {reason}")),
            Report::Done => {}
        }
    }

    fn move_line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => eprintln!("{text}"),
        }
    }

    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }
}

fn rate(report: &Report) -> String {
    let Report::Rate {
        seconds,
        bytes,
        pages,
        bytes_per_s,
        lag_bytes,
        missing_frames,
        overrun_events,
        held_back,
    } = report
    else {
        return String::new();
    };
    format!(
        "{seconds} s: {pages} pages, {}, {}/s, {} not yet durable, {missing_frames} frames lost, {overrun_events} events overwritten in the guest{}",
        HumanBytes(*bytes),
        HumanBytes(*bytes_per_s),
        HumanBytes(*lag_bytes),
        if *held_back {
            ", held back by the disk"
        } else {
            ""
        }
    )
}

fn progress(report: &Report) -> String {
    let Report::Progress {
        attempt,
        status,
        transferred_bytes,
        remaining_bytes,
        megabits,
        passes,
        expected_downtime_ms,
        lag_bytes,
    } = report
    else {
        return String::new();
    };
    format!(
        "migration {attempt}: {status}, {} sent, {} to go, {megabits} Mbit/s, pass {passes}, expected downtime {expected_downtime_ms} ms, trace lag {}",
        HumanBytes(*transferred_bytes),
        HumanBytes(*remaining_bytes),
        HumanBytes(*lag_bytes)
    )
}

fn phase_in_words(phase: &str) -> &str {
    match phase {
        "admit" => "asking both ends",
        "prepare" => "making the destination ready",
        "migrate" => "copying memory, the VM runs on",
        "switchover" => "the VM stands still, its ports are drained",
        "commit" => "the destination takes over",
        "verify" => "the VM runs at the destination, its streams are checked",
        "release" => "the source is let go",
        "way-back" => "going back: the VM stays at the source",
        other => other,
    }
}

fn migrated(report: &MigrationReport) -> String {
    let ended = &report.ended;
    let ms = |ns: Option<u64>| {
        ns.map_or_else(
            || "?".to_owned(),
            |ns| format!("{}.{} ms", ns / 1_000_000, ns / 100_000 % 10),
        )
    };
    if ended.outcome != "committed" {
        let reason = ended
            .reason
            .as_deref()
            .map(|reason| format!(": {reason}"))
            .unwrap_or_default();
        return format!("migration {} {}{reason}", ended.attempt, ended.outcome);
    }
    format!(
        "migration {} done: blackout {} (drain {}{}), {} doubled frames dropped, {} replayed, streams {}",
        ended.attempt,
        ms(ended.blackout_ns),
        ms(ended.drain_ns),
        match ended.drained {
            Some(true) => ", queues proven empty",
            Some(false) => ", budget spent",
            None => ", none",
        },
        report.duplicates,
        report.replayed,
        match report.continuous {
            Some(true) => "continuous",
            Some(false) => "NOT continuous",
            None => "not heard of yet",
        }
    )
}
