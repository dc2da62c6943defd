//! Our report against trace-cmd's, line by line.
//!
//! # Accepted differences
//!
//! Each is a place where trace-cmd 3.1.6 with libtraceevent 1.7.1 prints something that the kernel does not, or that is
//! not in the trace. [`normalise`] blanks exactly these, on both sides:
//!
//! | event | trace-cmd prints | we print | why |
//! | --- | --- | --- | --- |
//! | `mm_page_*` `page=` | the page frame number, as if it were an address | `<not in the record>` | `vmemmap_base` is a variable of the kernel; its value is not recorded |
//! | `writeback_*` `age=` | a number with `jiffies` taken as 0 | `<not in the record>` | `jiffies` is a variable too |
//! | `writeback_*`, `sb_*_inode_writeback`, `state` | `I_DIRTY_SYNC` for 0 | nothing for 0 | its first flag has no known value; libtraceevent prints the name of such a flag for 0 |
//! | `timer_start` `flags=` | `D\|P\|I` for 0 | nothing for 0 | it takes `a & (b \| c)` for a sum of its own |
//! | `mm_page_alloc_extfrag` `fragmenting=` | the left side of `a < b` | 0 or 1 | it reads a comparison behind an argument as the argument alone |
//! | `sock_*_length` `length=`, `error=` | an error as a length | 0 and the error | it compares a signed field as unsigned |

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vmtrail_trace::Endian;
use vmtrail_trace::merge::Step;
use vmtrail_trace::report::{Entry, ReportOptions, Reporter};
use vmtrail_trace::ring_buffer::PageLayout;
use vmtrail_trace::trace_dat::{Compression, FileInfo, KernelTexts, TraceFile, Version, Writer};

const TRACEFS: &str = "/sys/kernel/tracing";

/// `O_NONBLOCK` of Linux on all architectures this runs on.
const O_NONBLOCK: i32 = 0o4000;

fn trace_cmd(arguments: &[&str], file: &Path) -> Option<(String, String)> {
    let output = Command::new("trace-cmd")
        .args(arguments)
        .arg(file)
        .output()
        .ok()?;
    Some((
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    ))
}

fn is_installed() -> bool {
    let installed = Command::new("trace-cmd").arg("--version").output().is_ok();
    if !installed {
        eprintln!("skipped: trace-cmd is not installed");
    }
    installed
}

fn our_report(path: &Path) -> String {
    let file = TraceFile::open(BufReader::new(File::open(path).unwrap())).unwrap();
    let mut reporter = Reporter::new(file.metadata(), ReportOptions::default());
    let mut merge = file.merge(&file.buffers()[0]);
    let mut out = format!("cpus={}\n", file.cpu_count()).into_bytes();
    while let Step::Event(entry) = merge.advance().unwrap() {
        let timestamp = file.options().correct(entry.cpu, entry.timestamp);
        reporter.write(&Entry { timestamp, ..entry }, &mut out);
    }
    reporter.finish(&mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// Blanks what is accepted to differ; see the table above.
fn normalise(line: &str) -> String {
    let Some((head, text)) = line.split_once(": ").and_then(|(head, rest)| {
        let (name, text) = rest.split_once(": ")?;
        Some((format!("{head}: {name}"), text))
    }) else {
        return line.to_owned();
    };
    let name = head.rsplit(' ').next().unwrap_or_default();
    let blank = |text: &str, key: &str, end: &str| -> String {
        let Some(start) = text.find(key).map(|at| at + key.len()) else {
            return text.to_owned();
        };
        let stop = text[start..].find(end).map_or(text.len(), |at| start + at);
        format!("{}*{}", &text[..start], &text[stop..])
    };
    let text = match name {
        _ if name.starts_with("mm_page_") || name.starts_with("mm_vmscan_write") => {
            blank(&blank(text, "page=", " pfn"), "fragmenting=", " change")
        }
        _ if name.starts_with("writeback_") => blank(&blank(text, "state=", " "), "age=", " index"),
        _ if name.starts_with("sb_") => blank(text, "state ", "mode"),
        "timer_start" => blank(text, "flags=", "\n"),
        "sock_send_length" | "sock_recv_length" => blank(text, "length = ", ", flags"),
        _ => text.to_owned(),
    };
    format!("{head}: {text}")
}

/// Lines that differ, by event.
fn differences(theirs: &str, ours: &str) -> BTreeMap<String, (String, String)> {
    let mut found = BTreeMap::new();
    let (mut left, mut right) = (theirs.lines(), ours.lines());
    loop {
        match (left.next(), right.next()) {
            (None, None) => return found,
            (left, right) => {
                let (left, right) = (left.unwrap_or("<nothing>"), right.unwrap_or("<nothing>"));
                if left != right && normalise(left) != normalise(right) {
                    let name = left.split(": ").nth(1).unwrap_or_default().to_owned();
                    found
                        .entry(name)
                        .or_insert_with(|| (left.to_owned(), right.to_owned()));
                }
            }
        }
    }
}

#[test]
fn public_samples() {
    if !is_installed() {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/samples");
    let Ok(directory) = fs::read_dir(&root) else {
        eprintln!("skipped: ../shared/samples is not there");
        return;
    };
    for entry in directory.flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "dat") {
            let (theirs, _) = trace_cmd(&["report"], &path).unwrap();
            // No normalisation: these agree to the byte.
            assert!(theirs == our_report(&path), "{}", path.display());
        }
    }
}

/// Files named in `VMTRAIL_PEER_FILES` (separated by colons): recordings of trace-cmd in a guest, big ones, other kernels.
#[test]
fn files_of_the_environment() {
    let Some(files) = std::env::var_os("VMTRAIL_PEER_FILES").filter(|_| is_installed()) else {
        return;
    };
    for path in std::env::split_paths(&files) {
        let (theirs, _) = trace_cmd(&["report"], &path).unwrap();
        let ours = our_report(&path);
        let found = differences(&theirs, &ours);
        let plain = theirs
            .lines()
            .zip(ours.lines())
            .filter(|(left, right)| left != right)
            .count();
        eprintln!(
            "{}: {} lines, {plain} differ before normalisation, {} events after",
            path.display(),
            theirs.lines().count(),
            found.len()
        );
        assert!(found.is_empty(), "{found:#?}");
    }
}

/// Removes the instance whatever happens in between.
struct Instance(PathBuf);

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("tracing_on"), "0");
        let _ = fs::write(self.0.join("events/enable"), "0");
        let _ = fs::remove_dir(&self.0);
    }
}

struct Recorded {
    cpus: Vec<Vec<u8>>,
    header_page: String,
    header_event: String,
    formats: Vec<(String, Vec<String>)>,
}

/// The whole text of `header_page` and `header_event`: these files give their text to the first read only
/// (`show_header_page_file` returns nothing at any later position), and `read_to_string` begins with a read of 32 bytes.
fn read_once(path: &Path) -> Option<String> {
    let mut text = vec![0; 16 << 10];
    let length = File::open(path).ok()?.read(&mut text).ok()?;
    text.truncate(length);
    String::from_utf8(text).ok()
}

/// A third of a second of this machine, in a tracefs instance of our own.
fn record() -> Option<Recorded> {
    let path = Path::new(TRACEFS)
        .join("instances")
        .join(format!("vmtrail-peer-{}", std::process::id()));
    fs::create_dir(&path).ok()?;
    let instance = Instance(path);
    let write = |name: &str, value: &str| fs::write(instance.0.join(name), value);
    write("buffer_size_kb", "8192").ok()?;
    for system in [
        "sched",
        "irq",
        "timer",
        "kmem",
        "raw_syscalls",
        "syscalls",
        "workqueue",
        "signal",
        "task",
    ] {
        let _ = write(&format!("events/{system}/enable"), "1");
    }
    for index in 0..5 {
        let _ = write("trace_marker", &format!("mark {index}\n"));
        std::thread::sleep(Duration::from_millis(60));
    }
    write("tracing_on", "0").ok()?;
    let layout = PageLayout::parse(
        &read_once(&instance.0.join("events/header_page"))?,
        Endian::Little,
    )
    .ok()?;
    let mut cpus = Vec::new();
    for cpu in 0.. {
        let path = instance.0.join(format!("per_cpu/cpu{cpu}/trace_pipe_raw"));
        let Ok(mut pipe) = OpenOptions::new()
            .read(true)
            .custom_flags(O_NONBLOCK)
            .open(path)
        else {
            break;
        };
        let (mut pages, mut page) = (Vec::new(), vec![0; layout.page_size()]);
        while let Ok(1..) = pipe.read(&mut page) {
            pages.extend_from_slice(&page);
            page.fill(0);
        }
        cpus.push(pages);
    }
    let mut formats = Vec::new();
    for system in fs::read_dir(instance.0.join("events")).ok()?.flatten() {
        let Ok(events) = fs::read_dir(system.path()) else {
            continue;
        };
        let texts: Vec<String> = events
            .flatten()
            .filter_map(|event| fs::read_to_string(event.path().join("format")).ok())
            .collect();
        if !texts.is_empty() {
            formats.push((system.file_name().to_string_lossy().into_owned(), texts));
        }
    }
    let top = Path::new(TRACEFS).join("events");
    if let Ok(ftrace) = fs::read_dir(top.join("ftrace")) {
        let texts = ftrace
            .flatten()
            .filter_map(|event| fs::read_to_string(event.path().join("format")).ok())
            .collect();
        formats.retain(|(system, _)| system != "ftrace");
        formats.push(("ftrace".to_owned(), texts));
    }
    Some(Recorded {
        cpus,
        header_page: read_once(&top.join("header_page"))?,
        header_event: read_once(&top.join("header_event"))?,
        formats,
    })
}

fn write_file(recorded: &Recorded, version: Version, path: &Path) {
    let layout = PageLayout::parse(&recorded.header_page, Endian::Little).unwrap();
    let kallsyms = fs::read("/proc/kallsyms").unwrap();
    let printk = fs::read(Path::new(TRACEFS).join("printk_formats")).unwrap();
    let comms = fs::read(Path::new(TRACEFS).join("saved_cmdlines")).unwrap();
    let mut texts = KernelTexts {
        header_event: &recorded.header_event,
        kallsyms: &kallsyms,
        printk_formats: &printk,
        saved_cmdlines: &comms,
        ..KernelTexts::default()
    };
    for (system, formats) in &recorded.formats {
        let formats: Vec<&str> = formats.iter().map(String::as_str).collect();
        if system == "ftrace" {
            texts.ftrace_formats = formats;
        } else {
            texts.event_formats.push((system, formats));
        }
    }
    let info = FileInfo {
        cpu_count: u32::try_from(recorded.cpus.len()).unwrap(),
        clock: "[local] global counter",
        uname: Some("Linux peer"),
        writer: Some("vmtrail"),
        trace_id: Some(1),
        ..FileInfo::default()
    };
    let out = BufWriter::new(File::create(path).unwrap());
    let mut writer = Writer::create(out, version, layout, &texts, &info).unwrap();
    writer.begin_buffer("", "local", layout).unwrap();
    for (cpu, pages) in recorded.cpus.iter().enumerate() {
        writer.begin_cpu(u32::try_from(cpu).unwrap()).unwrap();
        for page in pages.chunks(layout.page_size()) {
            writer.page(page).unwrap();
        }
    }
    writer.finish().unwrap().flush().unwrap();
}

#[test]
fn this_kernel() {
    if !is_installed() {
        return;
    }
    let Some(recorded) = record() else {
        eprintln!("skipped: no tracefs instance can be made here");
        return;
    };
    let directory =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("peer-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    for version in [
        Version::V6,
        Version::V7(Compression::None),
        Version::V7(Compression::Zstd),
    ] {
        let path = directory.join("trace.dat");
        write_file(&recorded, version, &path);
        let (theirs, warnings) = trace_cmd(&["report"], &path).unwrap();
        // Formats that libtraceevent cannot read are its own affair; they are named by it and shown raw by both.
        let about_the_file: Vec<&str> = warnings
            .lines()
            .filter(|line| {
                let known = [
                    "function ",
                    "[",
                    "Error: expected",
                    "bad op",
                    "unknown op",
                    "  ",
                ];
                !line.trim().is_empty()
                    && !known
                        .iter()
                        .any(|start| line.starts_with(start) || line.contains("->"))
            })
            .collect();
        assert!(about_the_file.is_empty(), "{version:?}: {about_the_file:?}");
        let ours = our_report(&path);
        let lines = theirs.lines().count();
        let found = differences(&theirs, &ours);
        eprintln!("{version:?}: {lines} lines, {} events differ", found.len());
        assert!(lines > 100, "{lines} lines only");
        assert!(found.is_empty(), "{version:?}: {found:#?}");
        let (summary, _) = trace_cmd(&["dump", "--summary", "-i"], &path).unwrap();
        assert!(summary.contains("[Kallsyms"), "{summary}");
    }
    fs::remove_dir_all(directory).unwrap();
}
