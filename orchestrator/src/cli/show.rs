//! `vmtrail report` and `vmtrail export`.

use std::fs::{self, File};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use vmtrail_trace::merge::{PageSource, Pull};
use vmtrail_trace::perfetto::PerfettoWriter;
use vmtrail_trace::report::{ReportOptions, Reporter, TimeFormat};
use vmtrail_trace::timeline::Item;
use vmtrail_trace::trace_dat::{Compression, FileInfo, KernelTexts, Version, Writer};

use super::args::{ClockArg, ExportArgs, Format, ReportArgs, SelectArgs};
use crate::decode::{Selection, ShownClock, Story, system_of};
use crate::trail::TrailReader;

/// Bytes of text that are gathered before they are written.
const FLUSH_AT: usize = 1 << 20;

pub(super) fn report(args: &ReportArgs) -> Result<ExitCode> {
    let story = open(&args.trail, &args.select)?;
    let time = if args.nanoseconds {
        TimeFormat::Nanoseconds
    } else {
        TimeFormat::Microseconds
    };
    let mut reporter = Reporter::new(
        &story.metadata,
        ReportOptions {
            time,
            raw: args.raw,
            latency: false,
        },
    );
    let mut out = io::stdout().lock();
    let mut text = format!("cpus={}\n", story.about.cpus).into_bytes();
    let mut timeline = story.timeline();
    loop {
        match timeline.advance()? {
            Item::Event(entry) => reporter.write(&entry, &mut text),
            Item::Note(note) => {
                reporter.finish(&mut text);
                note.write_line(story.metadata.clock.is_nanoseconds(), &mut text);
            }
            Item::Damaged {
                cpu,
                timestamp,
                damage,
            } => {
                eprintln!("vmtrail: CPU {cpu} at {timestamp}: failed to {damage}");
            }
            Item::Waiting | Item::End => break,
        }
        if text.len() >= FLUSH_AT {
            out.write_all(&text)?;
            text.clear();
        }
    }
    reporter.finish(&mut text);
    out.write_all(&text)?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn export(args: &ExportArgs) -> Result<ExitCode> {
    if args.output.exists() && !args.force {
        bail!("{} exists (--force replaces it)", args.output.display());
    }
    let story = open(&args.trail, &args.select)?;
    // What is interrupted leaves a file that nobody takes for a whole one.
    let mut partial = args.output.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let written = match args.to {
        Format::TraceDat => export_trace_dat(&story, args, &partial),
        Format::Perfetto => export_perfetto(&story, &partial),
    };
    let finished = written.and_then(|()| {
        File::open(&partial)?.sync_all()?;
        fs::rename(&partial, &args.output)?;
        Ok(())
    });
    if let Err(error) = finished {
        let _ = fs::remove_file(&partial);
        return Err(error.context(format!("failed to export to {}", args.output.display())));
    }
    eprintln!("exported to {}", args.output.display());
    Ok(ExitCode::SUCCESS)
}

fn open(trail: &Path, select: &SelectArgs) -> Result<Story> {
    let reader = TrailReader::open(trail)?;
    let clock = match select.clock {
        ClockArg::Guest => ShownClock::Guest,
        ClockArg::Host => ShownClock::Host,
    };
    let selection = Selection {
        session: select.session.clone(),
        cpus: select.cpus.clone(),
        clock,
        from: select.since,
        to: select.until,
    };
    let story = Story::open(&reader, &selection)?;
    for warning in &story.warnings {
        eprintln!("vmtrail: warning: {warning}");
    }
    Ok(story)
}

/// A trace.dat holds pages as they are: nothing is decoded, nothing is smoothed, losses are the pages' own flags.
fn export_trace_dat(story: &Story, args: &ExportArgs, partial: &Path) -> Result<()> {
    if args.select.since.is_some() || args.select.until.is_some() {
        bail!(
            "a trace.dat holds whole pages: choose a time in trace-cmd or KernelShark (--since and --until are for report and perfetto)"
        );
    }
    if args.select.clock == ClockArg::Host {
        bail!(
            "a trace.dat holds pages as they are, on the guest's clock: --clock host is for report and perfetto"
        );
    }
    let version = match (args.v6, args.uncompressed) {
        (true, _) => Version::V6,
        (false, true) => Version::V7(Compression::None),
        (false, false) => Version::V7(Compression::Zstd),
    };
    let header_event = story.text("events/header_event");
    let mut texts = KernelTexts {
        header_event: &header_event,
        kallsyms: bytes(story, "proc/kallsyms"),
        printk_formats: bytes(story, "printk_formats"),
        saved_cmdlines: bytes(story, "saved_cmdlines"),
        ..KernelTexts::default()
    };
    let formats: Vec<(&str, String)> = (story.texts.iter())
        .filter_map(|(name, format)| {
            Some((
                system_of(name)?,
                String::from_utf8_lossy(format).into_owned(),
            ))
        })
        .collect();
    for (system, format) in &formats {
        if *system == "ftrace" {
            texts.ftrace_formats.push(format);
        } else {
            match texts
                .event_formats
                .last_mut()
                .filter(|(last, _)| last == system)
            {
                Some((_, formats)) => formats.push(format),
                None => texts.event_formats.push((system, vec![format])),
            }
        }
    }
    let clock = format!("[{}]", story.about.clock);
    let info = FileInfo {
        cpu_count: story.about.cpus,
        clock: &clock,
        uname: Some(&story.about.kernel),
        writer: Some("vmtrail"),
        ..FileInfo::default()
    };
    let out = BufWriter::with_capacity(1 << 20, File::create(partial)?);
    let bar = progress();
    let mut writer = Writer::create(out, version, story.metadata.layout, &texts, &info)?;
    writer.begin_buffer("", &story.about.clock, story.metadata.layout)?;
    let mut page = Vec::new();
    for &cpu in &story.cpus {
        writer.begin_cpu(cpu)?;
        let mut pages = story.pages(cpu);
        while pages.next_page(&mut page)? == Pull::Page {
            writer.page(&page)?;
            bar.inc(1);
        }
    }
    writer.finish()?.flush()?;
    bar.finish_and_clear();
    Ok(())
}

fn export_perfetto(story: &Story, partial: &Path) -> Result<()> {
    let out = BufWriter::with_capacity(1 << 20, File::create(partial)?);
    let bar = progress();
    let mut writer =
        PerfettoWriter::new(out, &story.metadata, "guest").with_uname(&story.about.kernel);
    let mut timeline = story.timeline();
    loop {
        match timeline.advance()? {
            Item::Event(entry) => writer.event(&entry)?,
            Item::Note(note) => writer.note(note)?,
            Item::Damaged {
                cpu,
                timestamp,
                damage,
            } => {
                eprintln!("vmtrail: CPU {cpu} at {timestamp}: failed to {damage}");
            }
            Item::Waiting | Item::End => break,
        }
        bar.inc(1);
    }
    writer.finish()?.flush()?;
    bar.finish_and_clear();
    Ok(())
}

fn progress() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("{spinner} exporting: {human_pos} ({per_sec})")
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn bytes<'a>(story: &'a Story, name: &str) -> &'a [u8] {
    story.texts.get(name).map(Vec::as_slice).unwrap_or_default()
}
