//! Each wrong input gives one clear line and a non-zero exit; nothing hangs, nothing is half-written.
//!
//! Against real QEMUs, without a guest: a machine whose firmware finds nothing to boot is "running", and its ports' FIFOs take the
//! bytes of whoever plays the agent.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use vmtrail_wire::{Epoch, FrameHeader, Kind, SessionId, StreamId, crc32c};

/// Far beyond what any case takes; only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

/// A QEMU without a guest, with `ports` FIFO ports, in a directory of its own.
struct Qemu {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    fn start(ports: &[&str], extra: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-nodefaults",
            "-display",
            "none",
            "-m",
            "32",
            "-accel",
            "tcg",
            "-M",
            "pc",
        ]);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", path("qmp"))]);
        command.args(["-device", "virtio-serial-pci,id=vs0,max_ports=31"]);
        for (index, port) in ports.iter().enumerate() {
            for side in ["in", "out"] {
                let fifo = dir.path().join(format!("{port}.{side}"));
                nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
            }
            let chardev = format!("pipe,id=c{index},path={}", path(port));
            let device =
                format!("virtserialport,bus=vs0.0,chardev=c{index},name={port},id=p{index}");
            command.args(["-chardev", &chardev, "-device", &device]);
        }
        command
            .args(extra)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        let child = command
            .spawn()
            .expect("qemu-system-x86_64 must be installed: `cargo lab setup` does that");
        let qemu = Self { child, dir };
        let start = Instant::now();
        while UnixStream::connect(qemu.qmp()).is_err() {
            assert!(start.elapsed() < HANG, "QEMU did not open its monitor");
            thread::sleep(Duration::from_millis(20));
        }
        qemu
    }

    fn qmp(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn vmtrail(args: &[&str]) -> Output {
    finish(Command::new(env!("CARGO_BIN_EXE_vmtrail")).args(args))
}

/// Runs to the end, and fails if that does not come.
fn finish(command: &mut Command) -> Output {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .env("RUST_LOG", "error")
        .spawn()
        .unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > HANG {
            let _ = child.kill();
            panic!("{command:?} hangs: {:?}", child.wait_with_output());
        }
        thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// One line, not an exit of success, and all of `needles` in it.
fn assert_refused(output: &Output, needles: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "succeeded: {text}");
    let refusals: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("vmtrail: ") || line.starts_with("refused: "))
        .collect();
    assert_eq!(refusals.len(), 1, "not one line: {text}");
    assert!(!text.contains("panicked"), "{text}");
    for needle in needles {
        assert!(
            refusals[0].contains(needle),
            "{needle:?} is not in {:?}",
            refusals[0]
        );
    }
}

fn record(qmp: &Path, trail: &Path) -> Output {
    vmtrail(&[
        "record",
        "--qmp",
        qmp.to_str().unwrap(),
        "-o",
        trail.to_str().unwrap(),
    ])
}

#[test]
fn the_monitor_is_missing_no_socket_stale_busy_or_something_else() {
    let dir = tempfile::tempdir().unwrap();
    let trail = dir.path().join("trail");
    assert_refused(
        &record(&dir.path().join("nothing"), &trail),
        &["no such file", "-qmp unix:"],
    );

    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert_refused(&record(&file, &trail), &["not a unix socket"]);

    let stale = dir.path().join("stale");
    drop(UnixListener::bind(&stale).unwrap());
    assert_refused(&record(&stale, &trail), &["nobody listens"]);

    let busy = dir.path().join("busy");
    let _listener = UnixListener::bind(&busy).unwrap();
    assert_refused(
        &record(&busy, &trail),
        &["no greeting", "one client", "-qmp unix:"],
    );

    let other = dir.path().join("other");
    let listener = UnixListener::bind(&other).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
        }
    });
    assert_refused(&record(&other, &trail), &["does not speak QMP"]);
    assert!(!trail.exists(), "nothing is half-written");
}

#[test]
fn a_vm_that_is_paused_is_not_recorded() {
    let qemu = Qemu::start(&["vmtrail.0"], &["-S"]);
    let trail = qemu.path("trail");
    assert_refused(&record(&qemu.qmp(), &trail), &["not running", "cont"]);
    assert!(!trail.exists());
}

#[test]
fn a_directory_that_is_no_place_for_a_trail_is_refused_before_the_vm_is_touched() {
    let qemu = Qemu::start(&[], &[]);
    let full = qemu.path("occupied");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("thesis.tex"), "x").unwrap();
    assert_refused(&record(&qemu.qmp(), &full), &["exists and is not empty"]);
    assert_eq!(
        fs::read_dir(&full).unwrap().count(),
        1,
        "nothing was put there"
    );

    let file = qemu.path("file");
    fs::write(&file, "x").unwrap();
    assert_refused(&record(&qemu.qmp(), &file), &[]);
    assert_refused(
        &record(&qemu.qmp(), Path::new("/proc/trail")),
        &["/proc/trail"],
    );

    for (options, needle) in [("ro", "ead-only"), ("size=16k", "free")] {
        let place = qemu.path("place");
        fs::create_dir_all(&place).unwrap();
        let script = format!(
            "mount -t tmpfs -o {options} none {0} && exec {1} record --qmp {2} -o {0}/trail",
            place.display(),
            env!("CARGO_BIN_EXE_vmtrail"),
            qemu.qmp().display()
        );
        let output = finish(Command::new("unshare").args(["-rm", "sh", "-c", &script]));
        assert_refused(&output, &[needle]);
    }
    // No port was added to the VM by any of these.
    let listed = qom_children(&qemu.qmp());
    assert!(!listed.contains("virtserialport"), "{listed}");
}

#[test]
fn an_absent_agent_is_told_with_what_to_do_and_all_is_undone() {
    // Without ports, so that they are added, and taken away again.
    let qemu = Qemu::start(&[], &[]);
    let trail = qemu.path("trail");
    assert_refused(
        &record(&qemu.qmp(), &trail),
        &["no agent answered", "vmtrail-agent"],
    );
    assert!(!trail.exists());
    let listed = qom_children(&qemu.qmp());
    assert!(
        !listed.contains("virtserialport"),
        "ports were left: {listed}"
    );
}

#[test]
fn an_agent_of_a_future_version_is_named() {
    let qemu = Qemu::start(&["vmtrail.0"], &[]);
    let mut page =
        FrameHeader::new(Kind::Hello, SessionId(1), Epoch(1), StreamId::SESSION).encode(&[]);
    page[8] = 9;
    let length = u32::from_le_bytes(page[16..20].try_into().unwrap()) as usize;
    page[12..16].fill(0);
    let crc = crc32c(&page[..length]);
    page[12..16].copy_from_slice(&crc.to_le_bytes());
    let mut out = fs::OpenOptions::new()
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(qemu.path("vmtrail.0.out"))
        .unwrap();
    out.write_all(&page).unwrap();
    let trail = qemu.path("trail");
    assert_refused(
        &record(&qemu.qmp(), &trail),
        &["version 9", "newer vmtrail"],
    );
    assert!(!trail.exists());
}

#[test]
fn a_port_that_somebody_reads_is_not_read_by_two() {
    let qemu = Qemu::start(&["vmtrail.0"], &[]);
    let reader = fs::OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(qemu.path("vmtrail.0.out"))
        .unwrap();
    let _lock = nix::fcntl::Flock::lock(reader, nix::fcntl::FlockArg::LockExclusive).unwrap();
    let trail = qemu.path("trail");
    assert_refused(
        &record(&qemu.qmp(), &trail),
        &["another process reads the port"],
    );
    assert!(!trail.exists());
}

#[test]
fn wrong_words_on_the_command_line_are_usage() {
    for args in [
        &["record"][..],
        &["record", "--qmp", "x", "-o", "t", "--duration", "soon"],
        &["migrate", "--from-qmp", "a", "--to-qmp", "b", "-o", "t"],
        &["fly"],
    ] {
        let output = vmtrail(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn reading_what_is_no_trail_and_asking_where_nobody_records() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().to_str().unwrap();
    for command in ["verify", "info"] {
        assert_refused(&vmtrail(&[command, text]), &["is not a trail"]);
        assert_refused(
            &vmtrail(&[command, "/nowhere/at/all"]),
            &["/nowhere/at/all"],
        );
    }
    assert_refused(&vmtrail(&["stop", text]), &["failed to reach a recorder"]);
    assert_refused(
        &vmtrail(&["mark", text, "x"]),
        &["failed to reach a recorder"],
    );
}

/// What hangs below `/machine/peripheral`, as QEMU prints it.
fn qom_children(qmp: &Path) -> String {
    let mut stream = UnixStream::connect(qmp).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(500)))
        .unwrap();
    stream.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"qom-list\",\"arguments\":{\"path\":\"/machine/peripheral\"}}").unwrap();
    let mut text = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(count @ 1..) = stream.read(&mut chunk) {
        text.extend_from_slice(&chunk[..count]);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(
        text.contains("virtio-serial-pci"),
        "the monitor did not answer: {text}"
    );
    text
}
