//! What runs in the lab's guests: numbered marks on every CPU, something to trace, and an ear for the lab.
//!
//! Only the standard library: rustc alone builds it (see `lab/build.rs`). Pinning is done by starting this program
//! again under `taskset`, which the guest has and the standard library has not.
//!
//! ```text
//! serve --rate N --load busy|quiet    the parent: starts the others, then answers commands on standard input
//! marks --cpu C --rate N              writes `vmtrail-mark cpu=C seq=K` to trace_marker until standard input ends,
//!                                     then prints `LAST cpu=C seq=K`
//! load KIND                           pipe | sleep | memory | file, until it is killed
//! copy FROM TO                        pages of a trace_pipe_raw into a port, for ever: the usual way, at its best
//! ```
//!
//! A command is a line `ID WORD [REST]`; its answer is lines `ID> TEXT` and one line `ID! STATUS`. Words: `sh REST` runs REST in
//! a shell, `stop` ends the marks and tells the last number of each CPU, `ping`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, Read, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const INSTANCE: &str = "/sys/kernel/tracing/instances/vmtrail";
const CONSOLE: &str = "/dev/console";
const LOADS: [&str; 4] = ["pipe", "sleep", "memory", "file"];

/// The agent makes the instance. It is there in a second; a guest without one should say so rather than wait for ever.
const INSTANCE_WAIT: Duration = Duration::from_secs(60);

/// After a blackout the writer is behind its schedule; it catches up in bursts of this many marks, so that the burst does
/// not itself overwrite the ring.
const BURST: u64 = 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["serve", "--rate", rate, "--load", load] => serve(rate, load),
        ["marks", "--cpu", cpu, "--rate", rate] => marks(cpu, rate),
        ["load", kind] => load(kind),
        ["copy", from, to] => copy(from, to),
        _ => Err(format!("unknown arguments {words:?}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console(&format!("guest-workload: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn serve(rate: &str, load: &str) -> Result<(), String> {
    let mut writers = Vec::new();
    if rate != "0" {
        wait_for_instance()?;
        for cpu in online_cpus()? {
            writers.push(start_writer(&cpu.to_string(), rate)?);
        }
    }
    let mut loads = Vec::new();
    if load == "busy" {
        for kind in LOADS {
            let child = Command::new("/bin/guest-workload")
                .args(["load", kind])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .map_err(|error| format!("failed to start the load {kind}: {error}"))?;
            loads.push(child);
        }
    }
    console("READY");
    for line in io::stdin().lock().lines() {
        let line = line.map_err(|error| format!("failed to read a command: {error}"))?;
        let mut words = line.splitn(3, ' ');
        let (Some(id), Some(word)) = (words.next(), words.next()) else {
            continue;
        };
        let rest = words.next().unwrap_or("");
        let (text, status) = match word {
            "ping" => (String::new(), 0),
            "stop" => (stop(&mut writers), 0),
            "sh" => shell(rest),
            other => (format!("unknown command {other}"), 127),
        };
        answer(id, &text, status).map_err(|error| format!("failed to answer: {error}"))?;
    }
    Ok(())
}

fn start_writer(cpu: &str, rate: &str) -> Result<Child, String> {
    let mut child = Command::new("/bin/busybox")
        .args([
            "taskset",
            "-c",
            cpu,
            "/bin/guest-workload",
            "marks",
            "--cpu",
            cpu,
            "--rate",
            rate,
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("failed to start the marks of CPU {cpu}: {error}"))?;
    // The first byte says that the first mark is written: READY must mean that every CPU has begun.
    let mut first = [0];
    child
        .stdout
        .as_mut()
        .ok_or("failed to hear the marks' writer")?
        .read_exact(&mut first)
        .map_err(|_| format!("failed to write the first mark of CPU {cpu}"))?;
    Ok(child)
}

/// Ends the writers and returns their last words; a second stop returns nothing.
fn stop(writers: &mut Vec<Child>) -> String {
    let mut text = String::new();
    for mut writer in writers.drain(..) {
        drop(writer.stdin.take());
        if let Some(mut stdout) = writer.stdout.take() {
            let _ = stdout.read_to_string(&mut text);
        }
        let _ = writer.wait();
    }
    for line in text.lines() {
        console(line);
    }
    text
}

fn shell(command: &str) -> (String, i32) {
    match Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .output()
    {
        Ok(output) => {
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.push_str(&String::from_utf8_lossy(&output.stderr));
            (text, output.status.code().unwrap_or(128))
        }
        Err(error) => (format!("failed to start a shell: {error}"), 127),
    }
}

fn answer(id: &str, text: &str, status: i32) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for line in text.lines() {
        writeln!(out, "{id}> {line}")?;
    }
    writeln!(out, "{id}! {status}")?;
    out.flush()
}

fn wait_for_instance() -> Result<(), String> {
    let marker = format!("{INSTANCE}/trace_marker");
    let begun = Instant::now();
    while fs::metadata(&marker).is_err() {
        if begun.elapsed() > INSTANCE_WAIT {
            return Err(format!(
                "no {marker} after {} s: is there an agent?",
                INSTANCE_WAIT.as_secs()
            ));
        }
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn online_cpus() -> Result<Vec<u32>, String> {
    let path = "/sys/devices/system/cpu/online";
    let text =
        fs::read_to_string(path).map_err(|error| format!("failed to read {path}: {error}"))?;
    let mut cpus = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let parse = |text: &str| {
            text.parse::<u32>()
                .map_err(|_| format!("{path} says {range}"))
        };
        cpus.extend(parse(first)?..=parse(last)?);
    }
    Ok(cpus)
}

/// Writes the numbers from 0 on, without a hole: a write that fails is repeated, never skipped.
fn marks(cpu: &str, rate: &str) -> Result<(), String> {
    let rate: u64 = rate
        .parse()
        .map_err(|_| format!("--rate {rate} is not a number"))?;
    let path = format!("{INSTANCE}/trace_marker");
    let mut marker = OpenOptions::new()
        .write(true)
        .open(&path)
        .map_err(|error| format!("failed to open {path}: {error}"))?;
    let (stopped, stop) = mpsc::channel();
    thread::spawn(move || {
        let _ = io::stdin().lock().read(&mut [0]);
        let _ = stopped.send(());
    });
    let interval = Duration::from_nanos(1_000_000_000 / rate.max(1));
    let begun = Instant::now();
    let mut seq: u64 = 0;
    loop {
        let due = begun.elapsed().as_nanos() / interval.as_nanos().max(1);
        let due = u64::try_from(due).unwrap_or(u64::MAX);
        let until = due.min(seq + BURST);
        while seq <= until {
            let line = format!("vmtrail-mark cpu={cpu} seq={seq}");
            match marker.write(line.as_bytes()) {
                Ok(_) => {}
                // EBADF while tracing is switched off; the number must still be written, or the judge would miss it.
                Err(_) => break,
            }
            if seq == 0 {
                println!();
            }
            seq += 1;
        }
        match stop.recv_timeout(interval) {
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            _ => break,
        }
    }
    if let Some(last) = seq.checked_sub(1) {
        println!("LAST cpu={cpu} seq={last}");
    }
    Ok(())
}

/// What `cat trace_pipe_raw >PORT` is meant to do. A plain `cat` does worse in two ways that have nothing to do with
/// migrations: it ends for good when a read returns nothing, and where system calls are traced it records little but itself,
/// because every read of a part of a page leaves events for the next one.
fn copy(from: &str, to: &str) -> Result<(), String> {
    const PAGE: usize = 4096;
    const COMMIT: std::ops::Range<usize> = 8..10;
    const HARDLY_ANYTHING: u16 = 2048;
    let mut reader = File::open(from).map_err(|error| format!("failed to open {from}: {error}"))?;
    let mut port = OpenOptions::new()
        .write(true)
        .open(to)
        .map_err(|error| format!("failed to open {to}: {error}"))?;
    let mut page = [0; PAGE];
    loop {
        let read = reader
            .read(&mut page)
            .map_err(|error| format!("failed to read {from}: {error}"))?;
        port.write_all(&page[..read])
            .map_err(|error| format!("failed to write {to}: {error}"))?;
        let committed = u16::from_le_bytes([page[COMMIT.start], page[COMMIT.start + 1]]) & 0x0fff;
        if read < PAGE || committed < HARDLY_ANYTHING {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn load(kind: &str) -> Result<(), String> {
    let error = match kind {
        "pipe" => load_pipe(),
        "sleep" => load_sleep(),
        "memory" => load_memory(),
        "file" => load_file(),
        other => return Err(format!("unknown load {other}")),
    };
    Err(format!("the load {kind} ended: {error:?}"))
}

/// Two threads that wake each other: sched_switch, sched_wakeup, reads and writes.
fn load_pipe() -> io::Result<()> {
    let (mut near_read, mut near_write) = io::pipe()?;
    let (mut far_read, mut far_write) = io::pipe()?;
    thread::spawn(move || {
        let mut byte = [0];
        while far_read.read_exact(&mut byte).is_ok() && near_write.write_all(&byte).is_ok() {}
    });
    loop {
        for byte in 0..50 {
            far_write.write_all(&[byte])?;
            near_read.read_exact(&mut [0])?;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Timers of several lengths.
fn load_sleep() -> io::Result<()> {
    for micros in [700, 1_100, 3_300] {
        thread::spawn(move || {
            loop {
                thread::sleep(Duration::from_micros(micros));
            }
        });
    }
    loop {
        thread::sleep(Duration::from_micros(10_100));
    }
}

/// Fresh memory: page allocations, page faults, and dirty pages for the migration to carry.
fn load_memory() -> io::Result<()> {
    let mut round: u8 = 0;
    loop {
        let mut memory = vec![0_u8; 1 << 20];
        for page in memory.chunks_mut(4096) {
            page[0] = round;
        }
        std::hint::black_box(&memory);
        round = round.wrapping_add(1);
        drop(memory);
        thread::sleep(Duration::from_millis(10));
    }
}

/// Small files made, written, read and removed.
fn load_file() -> io::Result<()> {
    let data = [0x5a_u8; 8192];
    loop {
        for number in 0..4 {
            let path = format!("/tmp/load-{number}");
            File::create(&path)?.write_all(&data)?;
            let mut back = Vec::new();
            File::open(&path)?.read_to_end(&mut back)?;
            fs::remove_file(&path)?;
        }
        thread::sleep(Duration::from_millis(4));
    }
}

fn console(line: &str) {
    if let Ok(mut console) = OpenOptions::new().write(true).open(CONSOLE) {
        let _ = writeln!(console, "{line}");
    }
}
