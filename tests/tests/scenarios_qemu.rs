//! Scenarios with real kernels in real QEMUs. Never skipped: what they need, they set up.
//!
//! They print what they do, bound every wait, and assert no wall time. Each ends as the demo does: the guest says what it wrote
//! last, `vmtrail verify` gives its verdict, and the judge counts the marks on the disk.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use vmtrail_tests::check::marks::{Evidence, Finding, judge};
use vmtrail_tests::lab::demo::{EVENTS, Parts, traced_userland};
use vmtrail_tests::lab::guest::{Backend, Guest, Naming, Ports, VmSpec};
use vmtrail_tests::lab::initramfs::{self, Exporter, Load, Userland};
use vmtrail_tests::lab::kernel::Release;
use vmtrail_tests::lab::qmp::Qmp;
use vmtrail_tests::lab::vmtrail::{Ended, Recorder, Verified};
use vmtrail_tests::lab::{Lab, build, setup};

/// Long enough that frames have been acknowledged, replays would be needed, and every CPU has written.
const WHILE: Duration = Duration::from_secs(2);
/// A bound for what takes a moment.
const SOON: Duration = Duration::from_secs(60);
/// So slow that a migration is certainly still at it: a tenth of what the busy workload dirties.
const CRAWL_BYTES_PER_S: u64 = 1 << 20;

#[test]
fn a_guest_of_6_1_boots_and_counts() -> Result<()> {
    boots_and_counts(Release::V6_1)
}

#[test]
fn a_guest_of_6_12_boots_and_counts() -> Result<()> {
    boots_and_counts(Release::V6_12)
}

#[test]
fn a_guest_of_6_12_moves_there_and_back() -> Result<()> {
    let scene = Scene::new(Release::V6_12)?;
    let spec = scene.spec("moves", &traced_userland())?;
    let (guest, recorder) = scene.record(&spec, &EVENTS, &[])?;
    let guest = scene.move_to(&spec, &recorder, guest)?;
    let guest = scene.move_to(&spec, &recorder, guest)?;
    scene.end_whole(guest, recorder)
}

/// Queues are full then, frames lie half in the FIFO and half in the guest, and the agent's window is closed.
#[test]
fn a_stalled_source_reader_loses_nothing() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let spec = scene.spec("stall", &traced_userland())?;
    let (guest, recorder) = scene.record(&spec, &EVENTS, &[])?;
    thread::sleep(WHILE);
    told("the recorder is stopped for 3 s, then the VM moves at once");
    recorder.signal(Signal::SIGSTOP)?;
    thread::sleep(Duration::from_secs(3));
    let next = spec.incoming()?;
    recorder.signal(Signal::SIGCONT)?;
    committed(&recorder.migrate(&guest, &next, &[])?)?;
    guest.stop()?;
    scene.end_whole(next, recorder)
}

#[test]
fn cancelled_in_precopy_the_vm_and_its_trace_go_on_and_the_next_attempt_succeeds() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let spec = scene.spec("cancel", &traced_userland())?;
    let (guest, recorder) = scene.record(&spec, &EVENTS, &[])?;
    let next = spec.incoming()?;
    let source = Qmp::of(&guest)?;
    limit_bandwidth(&source, CRAWL_BYTES_PER_S)?;
    told("a migration crawls, and Ctrl-C cancels it");
    let migrating = recorder.start_migrating(&guest, &next, &[])?;
    wait_for_status(&source, "active")?;
    migrating.signal(Signal::SIGINT)?;
    let ended = migrating.finish()?;
    ensure!(
        ended.code() == Some(3),
        "cancelled, vmtrail migrate ends with {}",
        ended.status
    );
    ensure!(source.is_running()?, "the VM runs at the source");
    drop_destination(next)?;
    limit_bandwidth(&source, 1 << 30)?;
    thread::sleep(WHILE);
    told("the second attempt");
    let guest = scene.move_to(&spec, &recorder, guest)?;
    scene.end_whole(guest, recorder)
}

/// Nobody is there to continue while the recorder is stopped, so QEMU stays in pre-switchover and the cancel meets it there.
#[test]
fn cancelled_at_pre_switchover_the_vm_and_its_trace_go_on_and_the_next_attempt_succeeds()
-> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let spec = scene.spec("switch", &traced_userland())?;
    let (guest, recorder) = scene.record(&spec, &EVENTS, &[])?;
    let next = spec.incoming()?;
    let source = Qmp::of(&guest)?;
    limit_bandwidth(&source, CRAWL_BYTES_PER_S)?;
    let migrating = recorder.start_migrating(&guest, &next, &[])?;
    wait_for_status(&source, "active")?;
    told("the recorder is stopped, QEMU comes to pre-switchover, and somebody cancels");
    recorder.signal(Signal::SIGSTOP)?;
    limit_bandwidth(&source, 1 << 30)?;
    wait_for_status(&source, "pre-switchover")?;
    source.execute("migrate_cancel", json!({}))?;
    recorder.signal(Signal::SIGCONT)?;
    let ended = migrating.finish()?;
    ensure!(
        ended.code() == Some(3),
        "cancelled, vmtrail migrate ends with {}",
        ended.status
    );
    wait_until("the VM runs at the source", || source.is_running())?;
    drop_destination(next)?;
    thread::sleep(WHILE);
    told("the second attempt");
    let guest = scene.move_to(&spec, &recorder, guest)?;
    scene.end_whole(guest, recorder)
}

#[test]
fn a_killed_recorder_is_continued_without_a_hole() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let spec = scene.spec("killed", &traced_userland())?;
    let (guest, recorder) = scene.record(&spec, &EVENTS, &[])?;
    thread::sleep(WHILE);
    told("the recorder is killed, and another continues its trail a moment later");
    recorder.signal(Signal::SIGKILL)?;
    drop(recorder);
    thread::sleep(Duration::from_millis(700));
    let recorder = scene.recorder(&guest, &EVENTS, &["--append"])?;
    thread::sleep(WHILE);
    let guest = scene.move_to(&spec, &recorder, guest)?;
    scene.end_whole(guest, recorder)
}

/// What is lost is said, with the right number: the guest's ring holds nothing but marks here, so the kernel's count of what it
/// overwrote has to be the judge's count of what is missing.
#[test]
fn an_overrun_ring_is_declared_to_the_event() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let userland = Userland {
        exporter: agent(&[
            "--clock",
            "mono",
            "--buffer-size-kb",
            "64",
            "--retain-kb",
            "64",
        ]),
        load: Load::Quiet,
        ..Userland::default()
    };
    let spec = scene.spec("overrun", &userland)?;
    let (guest, recorder) = scene.record(&spec, &[], &[])?;
    thread::sleep(WHILE);
    told("the recorder is stopped until the guest's small ring has run over");
    recorder.signal(Signal::SIGSTOP)?;
    let overwritten = || -> Result<bool> {
        let stats = guest.shell(
            "cat /sys/kernel/tracing/instances/vmtrail/per_cpu/cpu*/stats | grep ^overrun | grep -vc ' 0$' || true",
        )?;
        Ok(stats.trim() == "2")
    };
    wait_until("both rings have run over", overwritten)?;
    recorder.signal(Signal::SIGCONT)?;
    thread::sleep(WHILE);
    let end = scene.end(guest, recorder)?;
    ensure!(
        end.finding.missing() > 0,
        "the scenario must lose something:\n{}",
        end.finding
    );
    ensure!(
        end.finding.is_honest(),
        "all of it is declared:\n{}",
        end.finding
    );
    ensure!(
        end.verified.verdict() == "overrun" && end.verified.code == Some(10),
        "verify says {} ({:?})",
        end.verified.verdict(),
        end.verified.code
    );
    for (cpu, finding) in &end.finding.cpus {
        let declared: u64 = end
            .verified
            .losses()
            .iter()
            .filter(|loss| loss.cpu == *cpu)
            .map(|loss| loss.events.unwrap_or_default())
            .sum();
        told(&format!(
            "cpu{cpu}: {} marks missing, {declared} events declared",
            finding.missing()
        ));
        ensure!(finding.missing() == declared, "cpu{cpu}: the right number");
    }
    scene.done.set(true);
    Ok(())
}

#[test]
fn ports_are_added_where_there_are_none_and_move_with_the_vm() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let mut spec = scene.spec("hot-add", &traced_userland())?;
    spec.ports = Ports::DeviceOnly;
    let (guest, recorder) = scene.record(&spec, &EVENTS, &[])?;
    let guest = scene.move_to(&spec, &recorder, guest)?;
    scene.end_whole(guest, recorder)
}

#[test]
fn three_cpus_share_one_port() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let mut spec = scene.spec("shared", &traced_userland())?;
    spec.vcpus = 3;
    spec.ports = Ports::Present {
        count: 1,
        naming: Naming::Vmtrail,
        backend: Backend::Pipe,
    };
    let (guest, recorder) = scene.record(&spec, &["sched"], &[])?;
    let guest = scene.move_to(&spec, &recorder, guest)?;
    scene.end_whole(guest, recorder)
}

/// As libvirt makes them.
#[test]
fn unix_sockets_carry_the_trace_as_well() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let mut spec = scene.spec("sockets", &traced_userland())?;
    spec.ports = Ports::Present {
        count: 2,
        naming: Naming::Vmtrail,
        backend: Backend::Socket,
    };
    let (guest, recorder) = scene.record(&spec, &EVENTS, &[])?;
    let guest = scene.move_to(&spec, &recorder, guest)?;
    scene.end_whole(guest, recorder)
}

#[test]
fn a_guest_without_an_agent_is_told_of_in_one_line() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    let userland = Userland {
        exporter: Exporter::Nobody,
        ..Userland::default()
    };
    let mut spec = scene.spec("agentless", &userland)?;
    spec.ports = Ports::Present {
        count: 2,
        naming: Naming::Vmtrail,
        backend: Backend::Pipe,
    };
    let mut guest = spec.boot()?;
    guest.wait_ready()?;
    told("recording a guest that has no agent");
    let ended = scene.parts.vmtrail.run([
        "record".into(),
        "--qmp".into(),
        guest.qmp(),
        "-o".into(),
        scene.trail(),
    ])?;
    ensure!(!ended.status.success(), "it fails");
    let says: Vec<&str> = ended
        .stderr
        .lines()
        .filter(|line| line.starts_with("vmtrail: "))
        .collect();
    ensure!(says.len() == 1, "it says one line:\n{}", ended.stderr);
    ensure!(
        says[0].contains("vmtrail-agent"),
        "it says what is missing: {}",
        says[0]
    );
    ensure!(!scene.trail().exists(), "nothing is left half-written");
    scene.done.set(true);
    guest.stop()
}

#[test]
fn what_a_running_recording_refuses_costs_it_nothing() -> Result<()> {
    let scene = Scene::new(Release::V6_1)?;
    for _ in 1..GUESTS {
        match refusals(&scene) {
            Err(error) if format!("{error:#}").contains("did not answer") => {
                told(&format!("{error:#}\nonce more, with a fresh guest"));
            }
            outcome => return outcome,
        }
    }
    refusals(&scene)
}

fn refusals(scene: &Scene) -> Result<()> {
    let spec = scene.spec("refused", &traced_userland())?;
    told("an unknown event is named, and leaves no trail");
    let mut guest = spec.boot()?;
    guest.wait_ready()?;
    let unknown = scene.parts.vmtrail.run([
        "record".into(),
        "-e".into(),
        "sched:no_such_event".into(),
        "--qmp".into(),
        guest.qmp(),
        "-o".into(),
        scene.trail(),
    ])?;
    refused(&unknown, "no_such_event")?;
    ensure!(!scene.trail().exists(), "a trail was left half-written");

    let recorder = scene.recorder(&guest, &["sched"], &[])?;
    told("a second recorder of the same trail, and of the same VM");
    for trail in [scene.trail(), scene.dir.join("second")] {
        let second = scene.parts.vmtrail.run([
            "record".into(),
            "--qmp".into(),
            guest.lab_qmp(),
            "-o".into(),
            trail,
        ])?;
        refused(&second, "")?;
    }
    told("a destination that does not wait");
    let running = spec.boot()?;
    refused(&recorder.migrate(&guest, &running, &[])?, "-incoming defer")?;
    running.stop()?;
    told("a destination with another port");
    let mut other = spec.clone();
    other.ports = Ports::Present {
        count: 2,
        naming: Naming::TracePath,
        backend: Backend::Pipe,
    };
    let destination = other.incoming()?;
    refused(
        &recorder.migrate(&guest, &destination, &[])?,
        "port topologies",
    )?;
    destination.stop()?;
    told("none of it touched the recording");
    scene.end_whole(guest, recorder)
}

/// It failed, with one line that says why.
fn refused(ended: &Ended, why: &str) -> Result<()> {
    ensure!(!ended.status.success(), "it was not refused");
    let reports = ended.reports();
    let reasons = reports
        .iter()
        .filter_map(|report| report["reason"].as_str());
    let lines: Vec<&str> = (ended.stderr.lines())
        .filter_map(|line| line.strip_prefix("vmtrail: "))
        .chain(reasons)
        .collect();
    ensure!(
        lines.len() == 1,
        "not one line: {lines:?}\n{}",
        ended.stderr
    );
    ensure!(lines[0].contains(why), "{why:?} is not in {:?}", lines[0]);
    told(&format!("refused: {}", lines[0]));
    Ok(())
}

fn boots_and_counts(release: Release) -> Result<()> {
    let _alone = alone();
    let lab = Lab::open()?;
    let ready = setup::setup(&lab, release)?;
    // Marks only: reading the kernel's text of a million other events takes an emulated guest longer than the ring lasts.
    let userland = Userland {
        exporter: Exporter::Nobody,
        ..Userland::default()
    };
    let image = initramfs::image(&lab, &ready, None, &build::workload(&lab)?, &userland)?;
    let spec = VmSpec {
        ports: Ports::DeviceOnly,
        ..VmSpec::new("boots", &ready.kernel.image, &image)
    };
    told(&format!(
        "boot a guest with kernel {release} and let its CPUs count"
    ));
    let mut guest = spec.boot()?;
    guest.wait_ready()?;
    let version = guest.shell("uname -r")?;
    assert!(
        version.starts_with(&format!("{release}.")),
        "the guest runs {version}"
    );
    let device = guest.shell("ls /sys/bus/virtio/drivers/virtio_console | grep virtio")?;
    told(&format!(
        "it has {} and runs {}",
        device.trim(),
        version.trim()
    ));
    let last = guest.stop_marks()?;
    told(&format!("last marks: {last:?}"));
    assert_eq!(last.iter().map(|(cpu, _)| *cpu).collect::<Vec<_>>(), [0, 1]);
    // The kernel's own trace of them: what the guest says it wrote last is the last that is there.
    for (cpu, seq) in last {
        let trace = guest.shell(&format!(
            "grep -o 'vmtrail-mark cpu={cpu} seq=.*' /sys/kernel/tracing/instances/vmtrail/per_cpu/cpu{cpu}/trace | tail -n 1"
        ))?;
        assert_eq!(trace.trim(), format!("vmtrail-mark cpu={cpu} seq={seq}"));
    }
    assert!(
        guest.stop_marks()?.is_empty(),
        "a second stop finds no marks to end"
    );
    guest.stop()
}

/// Guests that a scenario may boot until one answers.
const GUESTS: u32 = 4;

/// What every scenario has.
struct Scene {
    lab: Lab,
    parts: Parts,
    dir: PathBuf,
    /// Ended well: nobody needs the trail.
    done: Cell<bool>,
    /// One scenario at a time: two emulated guests already fill two cores, and four would starve each other into timeouts.
    _alone: MutexGuard<'static, ()>,
}

/// How a scenario ended.
struct End {
    finding: Finding,
    verified: Verified,
}

impl Scene {
    fn new(kernel: Release) -> Result<Self> {
        let alone = alone();
        let lab = Lab::open()?;
        let parts = Parts::get(&lab, kernel)?;
        let dir = tempfile::Builder::new()
            .prefix("vmtrail-scene-")
            .tempdir()
            .context("failed to create the scenario's directory")?
            .keep();
        Ok(Self {
            lab,
            parts,
            dir,
            done: Cell::new(false),
            _alone: alone,
        })
    }

    fn trail(&self) -> PathBuf {
        self.dir.join("trail")
    }

    fn spec(&self, name: &str, userland: &Userland) -> Result<VmSpec> {
        self.parts.spec(&self.lab, name, userland)
    }

    fn record(&self, spec: &VmSpec, events: &[&str], more: &[&str]) -> Result<(Guest, Recorder)> {
        told(&format!("boot guest {} and record it", spec.name));
        // Seen in a few of a hundred guests: an emulated guest stood still for good while its kernel switched tracepoints on. The
        // recorder said so and left nothing; the scenario is about what comes after, so it has more guests.
        for _ in 1..GUESTS {
            match self.boot_and_record(spec, events, more) {
                Err(error) if format!("{error:#}").contains("did not answer") => {
                    told(&format!("{error:#}\nonce more, with a fresh guest"));
                }
                outcome => return outcome,
            }
        }
        self.boot_and_record(spec, events, more)
    }

    fn boot_and_record(
        &self,
        spec: &VmSpec,
        events: &[&str],
        more: &[&str],
    ) -> Result<(Guest, Recorder)> {
        let mut guest = spec.boot()?;
        guest.wait_ready()?;
        let recorder = self.recorder(&guest, events, more)?;
        Ok((guest, recorder))
    }

    fn recorder(&self, guest: &Guest, events: &[&str], more: &[&str]) -> Result<Recorder> {
        let events: Vec<String> = events.iter().map(|event| (*event).to_owned()).collect();
        let log = self.dir.join("record.log");
        self.parts
            .vmtrail
            .record(guest, &self.trail(), &log, &events, more)
    }

    /// Moves the VM and returns it where it is now.
    fn move_to(&self, spec: &VmSpec, recorder: &Recorder, from: Guest) -> Result<Guest> {
        thread::sleep(WHILE);
        let to = spec.incoming()?;
        committed(&recorder.migrate(&from, &to, &[])?)?;
        told("the VM has moved");
        from.stop()?;
        Ok(to)
    }

    /// Ends the recording, and asks vmtrail and the judge.
    fn end(&self, guest: Guest, recorder: Recorder) -> Result<End> {
        thread::sleep(WHILE);
        let last = guest.stop_marks()?;
        let status = recorder.stop()?;
        ensure!(status.success(), "the recorder ended with {status}");
        guest.stop()?;
        let verified = self.parts.vmtrail.verify(&self.trail())?;
        let finding = judge(
            &Evidence::of_trail(&self.trail())?,
            &last,
            &verified.losses(),
        );
        told(&format!(
            "verify: {}; judge: {} marks found, {} missing, {} doubled",
            verified.verdict(),
            finding.found(),
            finding.missing(),
            finding.doubled()
        ));
        Ok(End { finding, verified })
    }

    fn end_whole(&self, guest: Guest, recorder: Recorder) -> Result<()> {
        let end = self.end(guest, recorder)?;
        ensure!(end.finding.is_whole(), "the judge:\n{}", end.finding);
        ensure!(
            end.verified.is_continuous(),
            "verify says {} ({:?}): {}",
            end.verified.verdict(),
            end.verified.code,
            end.verified.report["reasons"]
        );
        self.done.set(true);
        Ok(())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if self.done.get() {
            let _ = fs::remove_dir_all(&self.dir);
        } else {
            told(&format!(
                "its trail and logs are kept in {}",
                self.dir.display()
            ));
        }
    }
}

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn told(what: &str) {
    eprintln!("scenario: {what}");
}

fn agent(arguments: &[&str]) -> Exporter {
    Exporter::Agent(
        arguments
            .iter()
            .map(|argument| (*argument).to_owned())
            .collect(),
    )
}

fn committed(ended: &Ended) -> Result<()> {
    ensure!(
        ended.status.success(),
        "vmtrail migrate ends with {}:\n{}{}",
        ended.status,
        ended.stderr,
        ended.stdout
    );
    Ok(())
}

fn limit_bandwidth(source: &Qmp, bytes_per_s: u64) -> Result<()> {
    source.execute(
        "migrate-set-parameters",
        json!({ "max-bandwidth": bytes_per_s }),
    )?;
    Ok(())
}

fn wait_for_status(source: &Qmp, wanted: &str) -> Result<()> {
    wait_until(wanted, || {
        let info = source.migration()?;
        Ok(info.status.is_some_and(|status| status.as_str() == wanted))
    })
}

fn wait_until(what: &str, mut reached: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !reached()? {
        ensure!(
            begun.elapsed() < SOON,
            "not within {} s: {what}",
            SOON.as_secs()
        );
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A destination whose migration was cancelled ends by itself or has to be ended; both are as they should be.
fn drop_destination(guest: Guest) -> Result<()> {
    guest.stop()
}
