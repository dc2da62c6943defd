//! `cargo lab demo`: one guest, one trail, several live migrations under load, and a judge; then the same guest moved the
//! usual way, for contrast.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::guest::{Accel, Backend, Guest, Naming, Ports, VmSpec};
use super::initramfs::{self, Exporter, Userland};
use super::kernel::Release;
use super::naive::{self, Naive};
use super::setup::{Ready, say};
use super::vmtrail::{Verified, Vmtrail};
use super::{Lab, build, setup};
use crate::check::marks::{Evidence, Finding, judge};

/// What is recorded: scheduling, interrupts, timers, memory and system calls.
pub const EVENTS: [&str; 5] = ["sched", "irq", "timer", "kmem", "raw_syscalls"];

/// What the agent is started with: nothing that would have to be changed later, which would clear the rings and with them
/// the first marks.
pub const AGENT_ARGUMENTS: [&str; 4] = ["--clock", "mono", "--buffer-size-kb", "8192"];

/// What to do.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The guest's kernel.
    pub kernel: Release,
    /// How guests run.
    pub accel: Accel,
    /// How often the VM moves.
    pub moves: u32,
    /// How long it runs between moves.
    pub between: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            kernel: Release::V6_1,
            accel: Accel::Tcg,
            moves: 3,
            between: Duration::from_secs(5),
        }
    }
}

/// What vmtrail recorded, and what was found in it.
#[derive(Debug)]
pub struct Recorded {
    /// The trail.
    pub trail: PathBuf,
    /// The reports of the migrations.
    pub migrations: Vec<Value>,
    /// What the judge found.
    pub evidence: Evidence,
    /// What the judge says.
    pub finding: Finding,
    /// What vmtrail says.
    pub verified: Verified,
    /// Guest's kernel.
    pub kernel: String,
    /// How long it was recorded.
    pub recorded_for: Duration,
}

impl Recorded {
    /// The judge found every number, and vmtrail says continuous.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.finding.is_whole() && self.verified.is_continuous()
    }
}

/// What guests and programs are made of.
#[derive(Debug, Clone)]
pub struct Parts {
    /// Kernel and busybox.
    pub ready: Ready,
    /// The agent.
    pub agent: PathBuf,
    /// The workload.
    pub workload: PathBuf,
    /// The host's program.
    pub vmtrail: Vmtrail,
}

impl Parts {
    /// Sets up and builds what is missing.
    ///
    /// # Errors
    ///
    /// If a step fails.
    pub fn get(lab: &Lab, kernel: Release) -> Result<Self> {
        Ok(Self {
            ready: setup::setup(lab, kernel)?,
            agent: build::agent(lab)?,
            workload: build::workload(lab)?,
            vmtrail: Vmtrail::at(&build::vmtrail()?),
        })
    }

    /// A guest with the agent, one FIFO port a vCPU, and whatever else `userland` says.
    ///
    /// # Errors
    ///
    /// If its image cannot be written.
    pub fn spec(&self, lab: &Lab, name: &str, userland: &Userland) -> Result<VmSpec> {
        let agent = matches!(userland.exporter, Exporter::Agent(_)).then_some(&*self.agent);
        let image = initramfs::image(lab, &self.ready, agent, &self.workload, userland)?;
        let mut spec = VmSpec::new(name, &self.ready.kernel.image, &image);
        if agent.is_none() {
            spec.ports = Ports::Absent;
        }
        Ok(spec)
    }
}

/// A userland with the agent as the demo starts it.
#[must_use]
pub fn traced_userland() -> Userland {
    Userland {
        exporter: Exporter::Agent(AGENT_ARGUMENTS.map(str::to_owned).to_vec()),
        ..Userland::default()
    }
}

/// A directory for this run's files.
///
/// # Errors
///
/// If it cannot be made.
pub fn run_dir(lab: &Lab, kind: &str) -> Result<PathBuf> {
    let base = lab.dir(kind)?;
    for number in 1.. {
        let dir = base.join(format!("{number:04}"));
        match fs::create_dir(&dir) {
            Ok(()) => return Ok(dir),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                return Err(error).with_context(|| format!("failed to create {}", dir.display()));
            }
        }
    }
    bail!("failed to find a free name in {}", base.display())
}

/// Records a guest with vmtrail through the plan's moves, and judges.
///
/// # Errors
///
/// If the lab or a command fails; a bad trace is a result.
pub fn record(lab: &Lab, parts: &Parts, plan: &Plan, dir: &Path) -> Result<Recorded> {
    let events: Vec<String> = EVENTS.map(str::to_owned).to_vec();
    let mut spec = parts.spec(lab, "demo", &traced_userland())?;
    spec.accel = plan.accel;
    spec.ports = Ports::Present {
        count: spec.vcpus,
        naming: Naming::Vmtrail,
        backend: Backend::Pipe,
    };
    let trail = dir.join("trail");

    say(&format!(
        "lab: booting a guest with {} vCPUs and a busy workload",
        spec.vcpus
    ));
    let mut guest = spec.boot()?;
    guest.wait_ready()?;
    let kernel = guest.shell("uname -r")?.trim().to_owned();
    say(&format!(
        "lab: recording {} into {}",
        EVENTS.join(", "),
        trail.display()
    ));
    let mut recorder =
        parts
            .vmtrail
            .record(&guest, &trail, &dir.join("record.log"), &events, &[])?;
    let begun = Instant::now();
    let mut migrations = Vec::new();
    for number in 1..=plan.moves {
        thread::sleep(plan.between);
        let next = spec.incoming()?;
        let ended = recorder.migrate(&guest, &next, &[])?;
        let report = ended
            .reports()
            .into_iter()
            .rfind(|report| report["report"] == "migrated")
            .unwrap_or_default();
        if !ended.status.success() {
            bail!(
                "failed to migrate (attempt {number}): vmtrail migrate says {}; the recorder {}\n{}{}",
                ended.status,
                recorder.state(),
                ended.stderr,
                ended.stdout
            );
        }
        say(&format!("lab: migration {number}: {}", blackout(&report)));
        migrations.push(report);
        keep_console(&guest, dir, number - 1);
        guest.stop()?;
        guest = next;
    }
    thread::sleep(plan.between);
    let last = guest.stop_marks()?;
    say("lab: the guest has written its last marks; stopping the recording");
    let recorded_for = begun.elapsed();
    let status = recorder.stop()?;
    keep_console(&guest, dir, plan.moves);
    guest.stop()?;
    if !status.success() {
        say(&format!("lab: the recorder ended with {status}"));
    }

    say("lab: vmtrail verifies, and the judge counts the guest's marks");
    let verified = parts.vmtrail.verify(&trail)?;
    let evidence = Evidence::of_trail(&trail)?;
    let finding = judge(&evidence, &last, &verified.losses());
    write(
        &dir.join("verify.json"),
        &format!("{:#}\n", verified.report),
    )?;
    write(&dir.join("judge.txt"), &finding.to_string())?;
    Ok(Recorded {
        trail,
        migrations,
        evidence,
        finding,
        verified,
        kernel,
        recorded_for,
    })
}

/// Moves a guest the usual way, as often.
///
/// # Errors
///
/// If the lab fails; a bad trace is a result.
pub fn usual_way(lab: &Lab, parts: &Parts, plan: &Plan, dir: &Path) -> Result<Naive> {
    say(
        "lab: for contrast, the same guest moved the usual way: copied ports, a new reader after each migration",
    );
    let events: Vec<String> = EVENTS.map(str::to_owned).to_vec();
    let naive = naive::run(lab, &parts.ready, &dir.join("usual-way"), &events, plan)?;
    write(&dir.join("usual-way/judge.txt"), &naive.finding.to_string())?;
    Ok(naive)
}

/// The table that a newcomer reads.
#[must_use]
pub fn table(recorded: Option<&Recorded>, naive: Option<&Naive>, dir: &Path) -> String {
    let mut lines = vec![String::new()];
    if let Some(recorded) = recorded {
        lines.push(format!(
            "One kernel trace of a VM (kernel {}) through {} live migrations",
            recorded.kernel,
            recorded.migrations.len()
        ));
        lines.push(String::new());
        lines.push(format!(
            "  recorded    {} events of {} in {:.0} s: {} pages, {:.1} MiB",
            grouped(recorded.evidence.events),
            EVENTS.join(", "),
            recorded.recorded_for.as_secs_f64(),
            grouped(recorded.evidence.pages),
            mib(recorded.evidence.bytes),
        ));
        lines.push(String::new());
        lines.push(format!(
            "  {:<11} {:>9} {:>14} {:>9} {:>10} {:>11} {:>12}",
            "migration", "blackout", "QEMU downtime", "drain", "drained", "replayed", "duplicates"
        ));
        for (number, report) in recorded.migrations.iter().enumerate() {
            let (from, to) = if number % 2 == 0 {
                ("A", "B")
            } else {
                ("B", "A")
            };
            lines.push(format!(
                "  {:<11} {:>9} {:>14} {:>9} {:>10} {:>11} {:>12}",
                format!("{} {from} -> {to}", number + 1),
                ms(&report["blackout_ns"], 1e6),
                ms(&report["qemu_downtime_ms"], 1.0),
                ms(&report["drain_ns"], 1e6),
                report["drained_bytes"].as_u64().map_or_else(
                    || "?".to_owned(),
                    |bytes| format!("{:.0} KiB", bytes_f64(bytes) / 1024.0)
                ),
                count(&report["replayed"], "frames"),
                count(&report["duplicates"], "dropped"),
            ));
        }
        lines.push(String::new());
    }
    lines.push(
        "  The guest numbers marks on each vCPU, about 1000 a second. What the judge found of them:".to_owned(),
    );
    lines.push(format!(
        "  {:<15} {:>10} {:>10} {:>10} {:>10} {:>13} {:>18}",
        "", "written", "found", "missing", "doubled", "out of order", "damaged places"
    ));
    let mut row = |name: &str, finding: &Finding| {
        let silent = finding.silent.len();
        lines.push(format!(
            "  {:<15} {:>10} {:>10} {:>10} {:>10} {:>13} {:>18}",
            name,
            grouped(finding.found() + finding.missing()),
            grouped(finding.found()),
            grouped(finding.missing()),
            grouped(finding.doubled()),
            grouped(finding.out_of_order()),
            finding.damage.len() + silent,
        ));
    };
    if let Some(recorded) = recorded {
        row("vmtrail", &recorded.finding);
    }
    if let Some(naive) = naive {
        row("the usual way", &naive.finding);
    }
    lines.push(String::new());
    if let Some(recorded) = recorded {
        lines.push(format!(
            "  verdict     vmtrail verify: {}; the judge: {}",
            recorded.verified.verdict(),
            if recorded.finding.is_whole() {
                "every number exactly once and in order"
            } else {
                "NOT every number exactly once and in order"
            }
        ));
    }
    lines.push(format!("  files       {}", dir.display()));
    lines.push(String::new());
    lines.join("\n")
}

fn blackout(report: &Value) -> String {
    format!(
        "blackout {}, QEMU's downtime {}",
        ms(&report["blackout_ns"], 1e6),
        ms(&report["qemu_downtime_ms"], 1.0)
    )
}

fn ms(value: &Value, per_ms: f64) -> String {
    value.as_f64().map_or_else(
        || "?".to_owned(),
        |value| format!("{:.1} ms", value / per_ms),
    )
}

fn count(value: &Value, what: &str) -> String {
    value
        .as_u64()
        .map_or_else(|| "?".to_owned(), |value| format!("{value} {what}"))
}

fn mib(bytes: u64) -> f64 {
    bytes_f64(bytes) / f64::from(1 << 20)
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn bytes_f64(bytes: u64) -> f64 {
    bytes as f64
}

/// 1234567 as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn keep_console(guest: &Guest, dir: &Path, number: u32) {
    // For who wonders what the guest said; its own directory goes.
    let _ = fs::copy(
        guest.console_path(),
        dir.join(format!("console-{number}.log")),
    );
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("failed to write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
    }
}
