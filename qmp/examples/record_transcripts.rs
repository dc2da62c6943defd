//! Records dialogues with a real QEMU for `tests/transcripts.rs`; see `tests/transcripts/README.md`.
//!
//! ```sh
//! cargo run -p vmtrail-qmp --example record_transcripts -- qmp/tests/transcripts/qemu-7.2 qemu-system-x86_64
//! ```
//!
//! It speaks QMP by itself, with blocking sockets and without a line of the crate, so that a
//! transcript is a witness and not an echo. Its ids are those that a `Session` gives (1 for
//! `qmp_capabilities`, then counting), so that a replay can compare what the session sends, too.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What stands in a transcript for the directory that the recording used.
const PLACE: &str = "/run/vm";

const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let target = PathBuf::from(
        arguments
            .next()
            .ok_or("usage: DIRECTORY QEMU [ARGUMENT…]")?,
    );
    let qemu: Vec<String> = arguments.collect();
    std::fs::create_dir_all(&target)?;
    let scratch = std::env::temp_dir().join(format!("vmtrail-record-{}", std::process::id()));
    std::fs::create_dir_all(&scratch)?;
    let lab = Lab {
        qemu,
        scratch: scratch.clone(),
        target,
    };
    let result = record(&lab);
    std::fs::remove_dir_all(scratch)?;
    result
}

fn record(lab: &Lab) -> Outcome<()> {
    queries(lab)?;
    mistakes(lab)?;
    ports(lab)?;
    power(lab)?;
    migrations(lab)
}

/// Every query, on a machine that waits with `-S`.
fn queries(lab: &Lab) -> Outcome<()> {
    let mut vm = lab.start(
        "queries",
        &[
            "-machine",
            "q35",
            "-S",
            "-name",
            "guest=one",
            "-device",
            "virtio-serial-pci,id=vser0",
            "-device",
            "pcie-root-port,id=rp0,slot=1",
        ],
    )?;
    vm.greet(true)?;
    for name in [
        "query-status",
        "query-migrate",
        "query-migrate-capabilities",
        "query-migrate-parameters",
        "query-name",
        "query-uuid",
        "query-version",
        "query-commands",
        "query-chardev",
        "query-pci",
        "x-query-virtio",
    ] {
        vm.command(name, Value::Null)?;
    }
    let backend = "/machine/peripheral/vser0/virtio-backend";
    vm.command("qom-list", json!({"path": "/machine/peripheral"}))?;
    vm.command("qom-list", json!({"path": "/machine/peripheral/vser0"}))?;
    vm.command(
        "qom-get",
        json!({"path": "/machine/peripheral/vser0", "property": "max_ports"}),
    )?;
    vm.command(
        "x-query-virtio-queue-status",
        json!({"path": backend, "queue": 1}),
    )?;
    vm.command(
        "x-query-virtio-queue-element",
        json!({"path": backend, "queue": 1}),
    )?;
    vm.command("query-migrate", Value::Null)?;
    vm.end()
}

/// All kinds of error, without out of band and with it.
fn mistakes(lab: &Lab) -> Outcome<()> {
    let mut vm = lab.start("mistakes", &["-machine", "none"])?;
    vm.greet(false)?;
    vm.command("no-such-command", Value::Null)?;
    vm.command("device_del", json!({"id": "nobody"}))?;
    vm.command("qom-get", json!({"path": "/machine"}))?;
    vm.command("query-status", json!({"surprise": 1}))?;
    vm.command("migrate-continue", json!({"state": "pre-switchover"}))?;
    vm.command(
        "migrate-set-capabilities",
        json!({"capabilities": [{"capability": "no-such-capability", "state": true}]}),
    )?;
    // What QEMU cannot read is answered without an id.
    vm.raw("{\"execute\": \"query-status\", \"id\": }\n", 1)?;
    vm.command("query-status", Value::Null)?;
    vm.end()?;

    let mut vm = lab.start("out-of-band", &["-machine", "none"])?;
    vm.greet(true)?;
    vm.command_oob("yank", json!({"instances": [{"type": "migration"}]}))?;
    vm.command_oob("query-status", Value::Null)?;
    vm.command("query-status", Value::Null)?;
    vm.end()
}

/// Hot-adding and removing ports, on FIFOs and sockets.
fn ports(lab: &Lab) -> Outcome<()> {
    let mut vm = lab.start(
        "ports",
        &["-machine", "q35", "-device", "virtio-serial-pci,id=vser0"],
    )?;
    vm.greet(true)?;
    for end in ["port0.in", "port0.out"] {
        let made = std::process::Command::new("mkfifo")
            .arg(lab.scratch.join(end))
            .status()?;
        if !made.success() {
            return Err("mkfifo failed".into());
        }
    }
    let port = |id: &str, name: &str, chardev: &str| json!({"driver": "virtserialport", "id": id, "bus": "vser0.0", "name": name, "chardev": chardev});
    vm.command(
        "chardev-add",
        json!({"id": "c0", "backend":
        {"type": "pipe", "data": {"device": format!("{PLACE}/port0")}}}),
    )?;
    vm.command(
        "chardev-add",
        json!({"id": "c0", "backend":
        {"type": "pipe", "data": {"device": format!("{PLACE}/port0")}}}),
    )?;
    vm.command(
        "chardev-add",
        json!({"id": "c1", "backend": {"type": "socket", "data": {
        "addr": {"type": "unix", "data": {"path": format!("{PLACE}/port1")}},
        "server": true, "wait": false}}}),
    )?;
    vm.command(
        "chardev-add",
        json!({"id": "c2", "backend":
        {"type": "pipe", "data": {"device": format!("{PLACE}/missing")}}}),
    )?;
    vm.command("device_add", port("p0", "vmtrail.0", "c0"))?;
    vm.command("device_add", port("p1", "vmtrail.1", "c1"))?;
    vm.command("device_add", port("p2", "vmtrail.0", "c1"))?;
    vm.command("query-chardev", Value::Null)?;
    vm.command("qom-list", json!({"path": "/machine/peripheral/p0"}))?;
    for property in ["name", "nr", "chardev", "parent_bus"] {
        vm.command(
            "qom-get",
            json!({"path": "/machine/peripheral/p0", "property": property}),
        )?;
    }
    vm.command("chardev-remove", json!({"id": "c0"}))?;
    vm.command("device_del", json!({"id": "p0"}))?;
    vm.event("DEVICE_DELETED", None)?;
    vm.command("chardev-remove", json!({"id": "c0"}))?;
    vm.end()
}

/// Running, stopping, resetting, and the end.
fn power(lab: &Lab) -> Outcome<()> {
    let mut vm = lab.start("power", &["-machine", "q35", "-S"])?;
    vm.greet(true)?;
    vm.command("cont", Value::Null)?;
    vm.event("RESUME", None)?;
    vm.command("stop", Value::Null)?;
    vm.event("STOP", None)?;
    vm.command("query-status", Value::Null)?;
    vm.command("system_reset", Value::Null)?;
    vm.event("RESET", None)?;
    vm.command("quit", Value::Null)?;
    vm.event("SHUTDOWN", None)?;
    vm.end()
}

/// One source: cancelled at pre-switchover, then moved; and the two destinations.
fn migrations(lab: &Lab) -> Outcome<()> {
    let q35 = ["-machine", "q35", "-device", "virtio-serial-pci,id=vser0"];
    let waiting = [q35[0], q35[1], q35[2], q35[3], "-incoming", "defer"];
    let uri = json!({"uri": format!("unix:{PLACE}/stream")});
    let on = |names: &[&str]| {
        let all: Vec<Value> = names
            .iter()
            .map(|name| json!({"capability": name, "state": true}))
            .collect();
        json!({"capabilities": all})
    };

    let mut source = lab.start("migration-source", &q35)?;
    source.greet(true)?;
    source.command("query-status", Value::Null)?;
    source.command("query-migrate", Value::Null)?;
    source.command(
        "migrate-set-capabilities",
        on(&["events", "pause-before-switchover"]),
    )?;
    source.command("migrate-set-parameters", json!({"downtime-limit": 300}))?;

    let mut first = lab.start("migration-destination-cancelled", &waiting)?;
    first.greet(true)?;
    first.command("query-status", Value::Null)?;
    first.command("migrate-set-capabilities", on(&["events"]))?;
    first.command("migrate-incoming", uri.clone())?;
    source.command("migrate", uri.clone())?;
    source.event("MIGRATION", Some("pre-switchover"))?;
    source.command("query-migrate", Value::Null)?;
    source.command("migrate-set-capabilities", on(&["events"]))?;
    source.command("device_del", json!({"id": "vser0"}))?;
    first.command("query-migrate", Value::Null)?;
    source.command("migrate_cancel", Value::Null)?;
    source.event("MIGRATION", Some("cancelled"))?;
    source.command("query-migrate", Value::Null)?;
    source.command("query-status", Value::Null)?;
    first.end_by_itself()?;

    let mut second = lab.start("migration-destination", &waiting)?;
    second.greet(true)?;
    second.command("migrate-set-capabilities", on(&["events"]))?;
    second.command("migrate-incoming", uri.clone())?;
    source.command("migrate", uri)?;
    source.event("MIGRATION", Some("pre-switchover"))?;
    source.command(
        "x-query-virtio-queue-status",
        json!({"path": "/machine/peripheral/vser0/virtio-backend", "queue": 3}),
    )?;
    source.command("migrate-continue", json!({"state": "pre-switchover"}))?;
    source.event("MIGRATION", Some("completed"))?;
    second.event("MIGRATION", Some("completed"))?;
    source.command("query-migrate", Value::Null)?;
    source.command("query-status", Value::Null)?;
    source.command("migrate_cancel", Value::Null)?;
    second.command("query-migrate", Value::Null)?;
    second.command("query-status", Value::Null)?;
    source.end()?;
    second.end()
}

struct Lab {
    qemu: Vec<String>,
    scratch: PathBuf,
    target: PathBuf,
}

/// One QEMU and the transcript of its monitor.
struct Vm {
    child: Child,
    stream: BufReader<UnixStream>,
    scratch: String,
    file: PathBuf,
    transcript: String,
    /// What came since the last command: an event may come before the command's own answer.
    recent: Vec<Value>,
    next_id: u64,
}

impl Lab {
    fn start(&self, name: &str, arguments: &[&str]) -> Outcome<Vm> {
        let (program, first) = self.qemu.split_first().ok_or("no QEMU was named")?;
        let socket = self.scratch.join(format!("{name}.qmp"));
        let mut child = std::process::Command::new(program)
            .args(first)
            .args([
                "-nodefaults",
                "-display",
                "none",
                "-m",
                "32",
                "-accel",
                "tcg",
                "-qmp",
            ])
            .arg(format!("unix:{},server=on,wait=off", socket.display()))
            .args(arguments)
            .stdin(Stdio::null())
            .spawn()?;
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => break stream,
                Err(error) if begun.elapsed() > PATIENCE => {
                    child.kill()?;
                    return Err(error.into());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Vm {
            child,
            stream: BufReader::new(stream),
            scratch: self.scratch.display().to_string(),
            file: self.target.join(format!("{name}.txt")),
            transcript: format!("# {}\n", arguments.join(" ")),
            recent: Vec::new(),
            next_id: 1,
        })
    }
}

impl Vm {
    fn greet(&mut self, oob: bool) -> Outcome<()> {
        self.receive()?;
        let arguments = if oob {
            json!({"enable": ["oob"]})
        } else {
            Value::Null
        };
        self.command("qmp_capabilities", arguments)
    }

    fn command(&mut self, name: &str, arguments: Value) -> Outcome<()> {
        self.execute("execute", name, arguments)
    }

    fn command_oob(&mut self, name: &str, arguments: Value) -> Outcome<()> {
        self.execute("exec-oob", name, arguments)
    }

    fn execute(&mut self, key: &str, name: &str, arguments: Value) -> Outcome<()> {
        let id = self.next_id;
        self.next_id += 1;
        let mut command = json!({ key: name, "id": id });
        if !arguments.is_null() {
            command["arguments"] = arguments;
        }
        self.send(&format!("{command}\n"))?;
        self.until(|message| message["id"] == id)
    }

    /// Sends bytes as they are, and waits for so many errors without an id.
    fn raw(&mut self, line: &str, errors: usize) -> Outcome<()> {
        self.recent.clear();
        self.stream.get_mut().write_all(line.as_bytes())?;
        write!(self.transcript, "! {line}")?;
        for _ in 0..errors {
            self.until(|message| message.get("error").is_some() && message.get("id").is_none())?;
        }
        Ok(())
    }

    fn event(&mut self, name: &str, status: Option<&str>) -> Outcome<()> {
        self.until(|message| {
            message["event"] == name
                && status.is_none_or(|status| message["data"]["status"] == status)
        })
    }

    fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Outcome<()> {
        while !self.recent.iter().any(&wanted) {
            let message = self.receive()?.ok_or("QEMU closed the connection")?;
            self.recent.push(message);
        }
        Ok(())
    }

    fn send(&mut self, line: &str) -> Outcome<()> {
        self.recent.clear();
        self.stream
            .get_mut()
            .write_all(line.replace(PLACE, &self.scratch).as_bytes())?;
        write!(self.transcript, "> {line}")?;
        Ok(())
    }

    /// One line into the transcript; `None` at the end of the stream.
    fn receive(&mut self) -> Outcome<Option<Value>> {
        let mut line = String::new();
        let ended = match self.stream.read_line(&mut line) {
            Ok(count) => count == 0,
            // QEMU acts on `quit` at its closing brace and leaves our line feed unread; the kernel
            // makes a reset of that.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => true,
            Err(error) => return Err(error.into()),
        };
        if ended {
            self.transcript.push_str("< EOF\n");
            return Ok(None);
        }
        let line = line.replace(&self.scratch, PLACE);
        let line = line
            .strip_suffix("\r\n")
            .ok_or("a line does not end as QEMU's do")?;
        writeln!(self.transcript, "< {line}")?;
        Ok(Some(serde_json::from_str(line)?))
    }

    /// Ends the QEMU, if it has not ended, and writes the transcript.
    fn end(mut self) -> Outcome<()> {
        if !self.transcript.contains("\"execute\":\"quit\"") {
            self.command("quit", Value::Null)?;
        }
        self.end_by_itself()
    }

    /// Waits for the QEMU's own end.
    fn end_by_itself(mut self) -> Outcome<()> {
        while self.receive()?.is_some() {}
        self.child.wait()?;
        self.write()
    }

    fn write(&self) -> Outcome<()> {
        std::fs::write(&self.file, &self.transcript)?;
        println!("{}", self.file.display());
        Ok(())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Nothing to end after `end_by_itself`; a recording that failed must not leave QEMUs behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
