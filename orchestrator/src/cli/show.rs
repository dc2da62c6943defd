//! `vmtrail report`, `tail` and `export`.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use vmtrail_trace::ctf::{CtfOutput, CtfWriter};
use vmtrail_trace::filter::{Filter, Matcher};
use vmtrail_trace::json;
use vmtrail_trace::merge::{PageSource, Pull};
use vmtrail_trace::metadata::Metadata;
use vmtrail_trace::perfetto::PerfettoWriter;
use vmtrail_trace::report::{Entry, ReportOptions, Reporter, TimeFormat};
use vmtrail_trace::timeline::{Item, Note, TimeMap, Timeline};
use vmtrail_trace::trace_dat::{Compression, FileInfo, KernelTexts, TraceFile, Version, Writer};

use super::args::{ClockArg, ExportArgs, Format, LinesArgs, ReportArgs, SelectArgs, TailArgs};
use crate::decode::{Selection, ShownClock, Story, system_of};
use crate::trail::TrailReader;

/// How long `tail` waits for the metadata of a recording that has just begun …
const METADATA_PATIENCE: Duration = Duration::from_secs(30);
/// … looking again so often.
const METADATA_POLL: Duration = Duration::from_millis(500);
/// How long `tail` keeps events back for the sake of their order.
const TAIL_ORDER: Duration = Duration::from_millis(250);
/// How often it looks for news.
const TAIL_POLL: Duration = Duration::from_millis(20);

/// Bytes of text that are gathered before they are written.
const FLUSH_AT: usize = 1 << 20;

pub(super) fn report(args: &ReportArgs) -> Result<ExitCode> {
    let filter = args.lines.filter()?;
    if args.trail.is_file() {
        return report_trace_dat(args, filter.as_ref());
    }
    let story = open(&args.trail, &args.select)?;
    let mut lines = Lines::new(&story.metadata, &args.lines, filter.as_ref());
    lines.head(story.about.cpus);
    let mut timeline = story.timeline();
    while lines.take(timeline.advance()?)? {}
    lines.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// What trace-cmd wrote is told in the same words.
fn report_trace_dat(args: &ReportArgs, filter: Option<&Filter>) -> Result<ExitCode> {
    let file = BufReader::new(File::open(&args.trail)?);
    let file = TraceFile::open(file)
        .with_context(|| format!("failed to read {}", args.trail.display()))?;
    for warning in file.warnings() {
        eprintln!("vmtrail: warning: {warning}");
    }
    let mut lines = Lines::new(file.metadata(), &args.lines, filter);
    lines.head(file.cpu_count());
    for buffer in file.buffers() {
        let mut timeline = Timeline::new(file.merge(buffer), TimeMap::default(), Vec::new());
        if args.select.since.is_some() || args.select.until.is_some() {
            let since = args.select.since.unwrap_or(0);
            timeline = timeline.between(since, args.select.until.unwrap_or(u64::MAX));
        }
        loop {
            let item = match timeline.advance()? {
                Item::Event(entry) => {
                    let cpus = &args.select.cpus;
                    if !cpus.is_empty() && !cpus.contains(&entry.cpu) {
                        continue;
                    }
                    let timestamp = file.options().correct(entry.cpu, entry.timestamp);
                    Item::Event(Entry { timestamp, ..entry })
                }
                other => other,
            };
            if !lines.take(item)? {
                break;
            }
        }
    }
    lines.finish()?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn tail(args: &TailArgs) -> Result<ExitCode> {
    let filter = args.lines.filter()?;
    let reader = TrailReader::open(&args.trail)?;
    let mut waited = Duration::ZERO;
    let story = loop {
        let selection = Selection {
            cpus: args.cpus.clone(),
            ..Selection::default()
        };
        let story = Story::open(&reader, &selection);
        let complete = story.as_ref().is_ok_and(|story| story.warnings.is_empty());
        if complete || waited >= METADATA_PATIENCE || reader.writer()?.is_none() {
            break story?;
        }
        waited += METADATA_POLL;
        std::thread::sleep(METADATA_POLL);
    };
    for warning in &story.warnings {
        eprintln!("vmtrail: warning: {warning}");
    }
    let newest = Rc::new(Cell::new(0));
    let mut timeline = story.follow(&newest)?;
    let mut lines = Lines::new(&story.metadata, &args.lines, filter.as_ref());
    let mut quiet_since = Instant::now();
    let mut seen = 0;
    loop {
        match timeline.advance()? {
            Item::Waiting => {
                lines.flush()?;
                if newest.get() > seen {
                    seen = newest.get();
                    quiet_since = Instant::now();
                }
                // A CPU with nothing to say must not keep the others' events; the agent sends what there is within 200 ms.
                let late = TAIL_ORDER.as_nanos().try_into().unwrap_or(u64::MAX);
                let all = quiet_since.elapsed() >= TAIL_ORDER;
                timeline.release_until(if all { seen } else { seen.saturating_sub(late) });
                if reader.writer()?.is_none() && all {
                    break;
                }
                std::thread::sleep(TAIL_POLL);
            }
            item => {
                if !lines.take(item)? {
                    break;
                }
            }
        }
    }
    lines.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Writes items as lines of text or JSON.
struct Lines<'a> {
    metadata: &'a Metadata,
    reporter: Option<Reporter<'a>>,
    matcher: Option<Matcher<'a>>,
    text: Vec<u8>,
}

impl<'a> Lines<'a> {
    fn new(metadata: &'a Metadata, args: &LinesArgs, filter: Option<&'a Filter>) -> Self {
        let time = if args.nanoseconds {
            TimeFormat::Nanoseconds
        } else {
            TimeFormat::Microseconds
        };
        let options = ReportOptions {
            time,
            raw: args.raw,
            latency: false,
        };
        Self {
            metadata,
            reporter: (!args.json).then(|| Reporter::new(metadata, options)),
            matcher: filter.map(|filter| filter.matcher(metadata)),
            text: Vec::new(),
        }
    }

    fn head(&mut self, cpus: u32) {
        if self.reporter.is_some() {
            self.text
                .extend_from_slice(format!("cpus={cpus}\n").as_bytes());
        }
    }

    /// Takes an item; `false` at the end.
    fn take(&mut self, item: Item<'_>) -> io::Result<bool> {
        match item {
            Item::Event(entry) => {
                if self
                    .matcher
                    .as_ref()
                    .is_none_or(|matcher| matcher.matches(&entry))
                {
                    match &mut self.reporter {
                        Some(reporter) => reporter.write(&entry, &mut self.text),
                        None => json::write_event(self.metadata, &entry, &mut self.text),
                    }
                }
            }
            // A filter is about events; what happened to the VM is always told.
            Item::Note(note) => match &mut self.reporter {
                Some(reporter) => {
                    reporter.finish(&mut self.text);
                    note.write_line(self.metadata.clock.is_nanoseconds(), &mut self.text);
                }
                None => json::write_note(note, &mut self.text),
            },
            Item::Damaged {
                cpu,
                timestamp,
                damage,
            } => {
                eprintln!("vmtrail: CPU {cpu} at {timestamp}: failed to {damage}");
            }
            Item::Waiting | Item::End => return Ok(false),
        }
        if self.text.len() >= FLUSH_AT {
            self.flush()?;
        }
        Ok(true)
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(&self.text)?;
        out.flush()?;
        self.text.clear();
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        if let Some(reporter) = &mut self.reporter {
            reporter.finish(&mut self.text);
        }
        self.flush()
    }
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
    remove(&partial);
    let written = match args.to {
        Format::TraceDat => export_trace_dat(&story, args, &partial),
        Format::Perfetto => export_perfetto(&story, &partial),
        Format::Ctf => export_ctf(&story, &partial),
    };
    let finished = written.and_then(|()| {
        File::open(&partial)?.sync_all()?;
        if args.output.is_dir() {
            fs::remove_dir_all(&args.output)?;
        }
        fs::rename(&partial, &args.output)?;
        Ok(())
    });
    if let Err(error) = finished {
        remove(&partial);
        return Err(error.context(format!("failed to export to {}", args.output.display())));
    }
    eprintln!("exported to {}", args.output.display());
    Ok(ExitCode::SUCCESS)
}

impl LinesArgs {
    fn filter(&self) -> Result<Option<Filter>> {
        let Some(text) = &self.filter else {
            return Ok(None);
        };
        Filter::parse(text)
            .map(Some)
            .map_err(|error| anyhow::anyhow!("failed to {error}"))
    }
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

/// A writer that is given decoded events one by one.
trait EventSink {
    fn event(&mut self, entry: &Entry<'_>) -> io::Result<()>;
    fn note(&mut self, note: &Note) -> io::Result<()>;
}

impl<W: Write> EventSink for PerfettoWriter<'_, W> {
    fn event(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        PerfettoWriter::event(self, entry)
    }

    fn note(&mut self, note: &Note) -> io::Result<()> {
        PerfettoWriter::note(self, note)
    }
}

impl<O: CtfOutput> EventSink for CtfWriter<'_, O> {
    fn event(&mut self, entry: &Entry<'_>) -> io::Result<()> {
        CtfWriter::event(self, entry)
    }

    fn note(&mut self, note: &Note) -> io::Result<()> {
        CtfWriter::note(self, note)
    }
}

/// Gives the whole story to a writer, with progress.
fn tell(story: &Story, writer: &mut impl EventSink) -> Result<()> {
    let bar = progress();
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
    bar.finish_and_clear();
    Ok(())
}

fn export_perfetto(story: &Story, partial: &Path) -> Result<()> {
    let out = BufWriter::with_capacity(1 << 20, File::create(partial)?);
    let mut writer =
        PerfettoWriter::new(out, &story.metadata, "guest").with_uname(&story.about.kernel);
    tell(story, &mut writer)?;
    writer.finish()?.flush()?;
    Ok(())
}

/// CTF is a directory of files: it is made beside and renamed as a whole.
fn export_ctf(story: &Story, partial: &Path) -> Result<()> {
    struct Directory(PathBuf);
    impl CtfOutput for Directory {
        type File = BufWriter<File>;

        fn create(&mut self, name: &str) -> io::Result<Self::File> {
            Ok(BufWriter::new(File::create(self.0.join(name))?))
        }
    }
    fs::create_dir_all(partial)?;
    let mut uuid = [0; 16];
    let session = story.about.session.as_bytes();
    uuid.copy_from_slice(session.first_chunk().unwrap_or(&[0; 16]));
    let directory = Directory(partial.to_owned());
    let mut writer = CtfWriter::create(directory, &story.metadata, uuid, 0, "guest")?;
    tell(story, &mut writer)?;
    writer.finish()?;
    Ok(())
}

fn remove(partial: &Path) {
    let _ = if partial.is_dir() {
        fs::remove_dir_all(partial)
    } else {
        fs::remove_file(partial)
    };
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
