//! Rewrites a `trace.dat`: `convert_trace_dat IN OUT 6|7|7-zstd|7-zlib`.
//!
//! The kernel's texts are taken from this machine, so this is for files recorded here; a trail has its own.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read};
use std::path::Path;

use vmtrail_trace::merge::{PageSource, Pull};
use vmtrail_trace::trace_dat::{
    Compression, Contents, FileInfo, KernelTexts, TraceFile, Version, Writer,
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [input, output, version] = arguments.as_slice() else {
        return Err("usage: convert_trace_dat IN OUT 6|7|7-zstd|7-zlib".into());
    };
    let version = match version.as_str() {
        "6" => Version::V6,
        "7" => Version::V7(Compression::None),
        "7-zstd" => Version::V7(Compression::Zstd),
        "7-zlib" => Version::V7(Compression::Zlib),
        _ => return Err("which version?".into()),
    };
    let file = TraceFile::open(BufReader::new(File::open(input)?))?;
    let tracefs = Path::new("/sys/kernel/tracing");
    let formats: Systems = systems(&tracefs.join("events"))?;
    let read = |name: &str| fs::read(tracefs.join(name)).unwrap_or_default();
    // In one read: the file gives its text to the first one only.
    let mut header_event = vec![0; 4096];
    let length = File::open(tracefs.join("events/header_event"))?.read(&mut header_event)?;
    header_event.truncate(length);
    let header_event = String::from_utf8(header_event)?;
    let (kallsyms, printk) = (fs::read("/proc/kallsyms")?, read("printk_formats"));
    let mut cmdlines = Vec::new();
    for (pid, name) in file.metadata().comms.iter() {
        cmdlines.extend_from_slice(format!("{pid} {}\n", String::from_utf8_lossy(name)).as_bytes());
    }
    let mut texts = KernelTexts {
        header_event: &header_event,
        kallsyms: &kallsyms,
        printk_formats: &printk,
        saved_cmdlines: &cmdlines,
        ..KernelTexts::default()
    };
    for (system, events) in &formats {
        let events: Vec<&str> = events.iter().map(String::as_str).collect();
        if system == "ftrace" {
            texts.ftrace_formats = events;
        } else {
            texts.event_formats.push((system, events));
        }
    }
    let clock = format!("[{}]", file.metadata().clock.name());
    let info = FileInfo {
        cpu_count: file.cpu_count(),
        clock: &clock,
        uname: file.options().uname.as_deref(),
        writer: Some("vmtrail"),
        trace_id: file.options().trace_id,
        ..FileInfo::default()
    };
    let out = BufWriter::with_capacity(1 << 20, File::create(output)?);
    let mut writer = Writer::create(out, version, file.metadata().layout, &texts, &info)?;
    for buffer in file.buffers() {
        writer.begin_buffer(&buffer.name, buffer.clock.name(), buffer.layout)?;
        let mut page = Vec::new();
        for cpu in &buffer.cpus {
            writer.begin_cpu(cpu.cpu)?;
            let mut pages = file.pages(buffer, cpu);
            while pages.next_page(&mut page)? == Pull::Page {
                writer.page(&page)?;
            }
        }
    }
    writer.finish()?;
    let written = TraceFile::open(BufReader::new(File::open(output)?))?;
    let (before, after) = (Contents::of(&file)?, Contents::of(&written)?);
    println!("{} events, {} missed", after.total(), after.missed);
    if before == after {
        Ok(())
    } else {
        Err("the written file holds something else".into())
    }
}

type Systems = Vec<(String, Vec<String>)>;

fn systems(events: &Path) -> Result<Systems, Box<dyn Error>> {
    let mut systems = Vec::new();
    for system in fs::read_dir(events)?.flatten() {
        let Ok(directory) = fs::read_dir(system.path()) else {
            continue;
        };
        let formats: Vec<String> = directory
            .flatten()
            .filter_map(|event| fs::read_to_string(event.path().join("format")).ok())
            .collect();
        if !formats.is_empty() {
            systems.push((system.file_name().to_string_lossy().into_owned(), formats));
        }
    }
    Ok(systems)
}
