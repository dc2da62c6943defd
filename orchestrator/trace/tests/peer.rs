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

/// Calls and returns as a function graph tracer would write them: nested, leaves, of every magnitude of duration,
/// interleaved between CPUs and tasks, and cut off at the end. Made by hand, since not every kernel has the tracer.
#[test]
fn function_graph() {
    if !is_installed() {
        return;
    }
    let common = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;\n\
        \tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:unsigned long func;\toffset:8;\tsize:8;\tsigned:0;\n";
    let entry = format!(
        "name: funcgraph_entry\nID: 11\nformat:\n{common}\tfield:int depth;\toffset:16;\tsize:4;\tsigned:1;\n\n\
         print fmt: \"--> %ps (%d)\", (void *)REC->func, REC->depth\n"
    );
    let exit = format!(
        "name: funcgraph_exit\nID: 10\nformat:\n{common}\
         \tfield:unsigned long long calltime;\toffset:16;\tsize:8;\tsigned:0;\n\
         \tfield:unsigned long long rettime;\toffset:24;\tsize:8;\tsigned:0;\n\
         \tfield:unsigned long overrun;\toffset:32;\tsize:8;\tsigned:0;\n\
         \tfield:int depth;\toffset:40;\tsize:4;\tsigned:1;\n\n\
         print fmt: \"<-- %ps (%d)\", (void *)REC->func, REC->depth\n"
    );
    // (cpu, time, pid, function or minus function for its return, depth, duration)
    let calls: [(usize, u64, u32, i64, u32, u64); 19] = [
        (0, 1000, 7, 1, 0, 0),
        (0, 1100, 7, 2, 1, 0),
        (0, 1900, 7, -2, 1, 800),
        (1, 2000, 8, 1, 0, 0),
        (0, 2100, 7, 3, 1, 0),
        (1, 2200, 8, -1, 0, 12_345),
        (0, 2300, 7, -3, 1, 100_001),
        (0, 2400, 7, -1, 0, 1_000_001),
        (0, 2500, 7, 2, 0, 0),
        (0, 2600, 8, -2, 0, 999),
        (0, 2700, 7, 9, 5, 0),
        (0, 2800, 7, -9, 5, 1_234_567_890),
        (0, 2900, 7, 2, 0, 0),
        (0, 3000, 7, -3, 0, 0),
        (0, 3100, 7, 2, 2, 0),
        (0, 3200, 7, -2, 2, 10_000),
        (0, 3300, 7, 2, 2, 0),
        (0, 3400, 7, -2, 2, 99_999_999_999),
        (0, 3500, 7, 1, 0, 0),
    ];
    let mut cpus = vec![Vec::new(), Vec::new()];
    for (cpu, (data, last)) in cpus.iter_mut().zip([1000_u64, 1000]).enumerate() {
        let mut records = Vec::new();
        let mut now = last;
        for (_, time, pid, function, depth, duration) in calls.iter().filter(|call| call.0 == cpu) {
            let address = 0xffff_ffff_8100_0000 + function.unsigned_abs() * 0x100;
            let mut payload = vec![if *function > 0 { 11 } else { 10 }, 0, 0, 0];
            payload.extend(pid.to_le_bytes());
            payload.extend(address.to_le_bytes());
            if *function < 0 {
                payload.extend((time + 5).to_le_bytes());
                payload.extend((time + 5 + duration).to_le_bytes());
                payload.extend([0; 8]);
            }
            payload.extend(depth.to_le_bytes());
            let words = u32::try_from(payload.len() / 4).unwrap();
            let delta = u32::try_from(time - now).unwrap();
            now = *time;
            records.extend((words | delta << 5).to_le_bytes());
            records.extend(payload);
        }
        data.extend(1000_u64.to_le_bytes());
        data.extend(u64::try_from(records.len()).unwrap().to_le_bytes());
        data.extend(records);
        data.resize(4096, 0);
    }
    let recorded = Recorded {
        cpus,
        header_page: PageLayout::native64_le(4096).unwrap().header_page_text(),
        header_event: "# compressed entry header\n".to_owned(),
        formats: vec![("ftrace".to_owned(), vec![entry, exit])],
    };
    let path =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("graph-{}.dat", std::process::id()));
    let symbols = b"ffffffff81000100 T one\nffffffff81000200 T two\nffffffff81000300 T three\nffffffff81000400 T four\n";
    write_file_with(&recorded, Version::V6, &path, symbols);
    let (theirs, _) = trace_cmd(&["report"], &path).unwrap();
    assert_eq!(our_report(&path), theirs);
    fs::remove_file(path).unwrap();
}

/// Calls as the function tracer writes them, and stacks: indentation follows a guess from names, which must be the same
/// guess.
#[test]
fn functions_and_stacks() {
    if !is_installed() {
        return;
    }
    let common = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n";
    let function = format!(
        "name: function\nID: 1\nformat:\n{common}\
         \tfield:unsigned long ip;\toffset:8;\tsize:8;\tsigned:0;\n\
         \tfield:unsigned long parent_ip;\toffset:16;\tsize:8;\tsigned:0;\n\n\
         print fmt: \" %ps <-- %ps\", (void *)REC->ip, (void *)REC->parent_ip\n"
    );
    let stack = format!(
        "name: kernel_stack\nID: 4\nformat:\n{common}\
         \tfield:int size;\toffset:8;\tsize:4;\tsigned:1;\n\
         \tfield:unsigned long caller[8];\toffset:16;\tsize:64;\tsigned:0;\n\n\
         print fmt: \"%ps\", (void *)REC->caller[0]\n"
    );
    let raw = format!(
        "name: raw_data\nID: 19\nformat:\n{common}\
         \tfield:unsigned int id;\toffset:8;\tsize:4;\tsigned:0;\n\
         \tfield:char buf[];\toffset:12;\tsize:0;\tsigned:0;\n\n\
         print fmt: \"id:%04x %08x\", REC->id, (int)REC->buf[0]\n"
    );
    let address = |name: u64| 0xffff_ffff_8100_0000 + name * 0x100;
    let mut cpus = Vec::new();
    for cpu in 0..2_u64 {
        let mut records = Vec::new();
        // A fixed walk over callers and callees, unknown ones among them (0 and 5 have no symbol).
        let mut state = 7 + cpu;
        for step in 0..60_u64 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (one, two) = (state >> 33 & 7, state >> 40 & 7);
            let mut payload: Vec<u8> = Vec::new();
            match step % 20 {
                18 => {
                    payload.extend([4, 0, 0, 0, 9, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
                    for caller in [address(one) + 4, address(two) + 8, address(9), u64::MAX, 1] {
                        payload.extend(caller.to_le_bytes());
                    }
                }
                19 => {
                    payload.extend([19, 0, 0, 0, 9, 0, 0, 0, 0xab, 0xcd, 0, 0]);
                    payload.extend(state.to_le_bytes());
                }
                _ => {
                    payload.extend([1, 0, 0, 0, 9, 0, 0, 0]);
                    payload.extend((address(one) + 1).to_le_bytes());
                    payload.extend((address(two) + 2).to_le_bytes());
                }
            }
            let words = u32::try_from(payload.len() / 4).unwrap();
            let delta = if step == 0 {
                u32::try_from(cpu).unwrap()
            } else {
                10
            };
            records.extend((words | delta << 5).to_le_bytes());
            records.extend(payload);
        }
        let mut page = 1000_u64.to_le_bytes().to_vec();
        page.extend(u64::try_from(records.len()).unwrap().to_le_bytes());
        page.extend(records);
        page.resize(4096, 0);
        cpus.push(page);
    }
    let recorded = Recorded {
        cpus,
        header_page: PageLayout::native64_le(4096).unwrap().header_page_text(),
        header_event: "# compressed entry header\n".to_owned(),
        formats: vec![("ftrace".to_owned(), vec![function, stack, raw])],
    };
    let path =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("function-{}.dat", std::process::id()));
    let symbols = b"ffffffff81000100 T one\nffffffff81000200 T two\nffffffff81000300 T three\n\
        ffffffff81000400 T four\nffffffff81000600 T six\nffffffff81000700 T seven\nffffffff81000800 T end\n";
    write_file_with(&recorded, Version::V7(Compression::None), &path, symbols);
    let (theirs, _) = trace_cmd(&["report"], &path).unwrap();
    assert_eq!(our_report(&path), theirs);
    fs::remove_file(path).unwrap();
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

#[derive(Clone, Copy, Debug)]
enum What {
    Events,
    Functions,
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
fn record(what: What) -> Option<Recorded> {
    let path = Path::new(TRACEFS)
        .join("instances")
        .join(format!("vmtrail-peer-{}", std::process::id()));
    fs::create_dir(&path).ok()?;
    let instance = Instance(path);
    let write = |name: &str, value: &str| fs::write(instance.0.join(name), value);
    write("buffer_size_kb", "8192").ok()?;
    match what {
        What::Events => {
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
        }
        What::Functions => {
            // Setting a tracer clears the buffer, so it is the last thing set and the recording stops with it.
            write("tracing_on", "0").ok()?;
            write("current_tracer", "function").ok()?;
            write("tracing_on", "1").ok()?;
            std::thread::sleep(Duration::from_millis(3));
        }
    }
    // Stacks of the kernel and of the writer, raw marks, and a moment of every function, where this kernel has them.
    for option in ["options/stacktrace", "options/userstacktrace"] {
        let _ = write(option, "1");
    }
    let _ = write("trace_marker_raw", "\x05\0\0\0raw bytes");
    std::thread::sleep(Duration::from_millis(20));
    for option in ["options/stacktrace", "options/userstacktrace"] {
        let _ = write(option, "0");
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
    write_file_with(
        recorded,
        version,
        path,
        &fs::read("/proc/kallsyms").unwrap(),
    );
}

fn write_file_with(recorded: &Recorded, version: Version, path: &Path, kallsyms: &[u8]) {
    let layout = PageLayout::parse(&recorded.header_page, Endian::Little).unwrap();
    let printk = fs::read(Path::new(TRACEFS).join("printk_formats")).unwrap_or_default();
    let comms = fs::read(Path::new(TRACEFS).join("saved_cmdlines")).unwrap_or_default();
    let mut texts = KernelTexts {
        header_event: &recorded.header_event,
        kallsyms,
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
    for what in [What::Events, What::Functions] {
        match record(what) {
            Some(recorded) => compare(what, &recorded),
            None => eprintln!("skipped: {what:?} cannot be recorded here"),
        }
    }
}

fn compare(what: What, recorded: &Recorded) {
    let directory =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("peer-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    for version in [
        Version::V6,
        Version::V7(Compression::None),
        Version::V7(Compression::Zstd),
    ] {
        let path = directory.join("trace.dat");
        write_file(recorded, version, &path);
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
        eprintln!(
            "{what:?}, {version:?}: {lines} lines, {} events differ",
            found.len()
        );
        assert!(lines > 100, "{lines} lines only");
        assert!(found.is_empty(), "{version:?}: {found:#?}");
        let (summary, _) = trace_cmd(&["dump", "--summary", "-i"], &path).unwrap();
        assert!(summary.contains("[Kallsyms"), "{summary}");
    }
    fs::remove_dir_all(directory).unwrap();
}
