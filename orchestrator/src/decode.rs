//! From a trail to a timeline: the metadata of one run of the agent, its CPUs' pages, and between them what happened to the VM.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::rc::Rc;

use anyhow::{Context, Result, bail};
use vmtrail_trace::Endian;
use vmtrail_trace::catalog::Catalog;
use vmtrail_trace::merge::{Merge, PageSource, Pull};
use vmtrail_trace::metadata::{Clock, Comms, Metadata, PrintkFormats, Symbols, Tgids};
use vmtrail_trace::ring_buffer::{Missed, Page, PageLayout, page_summary};
use vmtrail_trace::timeline::{Note, NoteKind, TimeMap, Timeline};
use vmtrail_wire::{SessionId, StreamId};

use crate::trail::event::{Event, MigrationEnded, Session, StreamEnd};
use crate::trail::{Entry, Frames, TrailReader};
use crate::verify::{Loss, LossKind, verify};

/// On which clock times are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ShownClock {
    /// The guest's trace clock, on which a blackout is no time.
    #[default]
    Guest,
    /// The hosts' wall clock, on which it is a gap.
    Host,
}

/// What is wanted of a trail.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// The run of the agent; the last one if not said.
    pub session: Option<String>,
    /// The CPUs; all if none are said.
    pub cpus: Vec<u32>,
    /// The clock.
    pub clock: ShownClock,
    /// From this time on, on the shown clock.
    pub from: Option<u64>,
    /// Up to this time.
    pub to: Option<u64>,
}

/// One run of the agent, ready to be told.
#[derive(Debug)]
pub struct Story {
    /// What the log says of the run.
    pub about: Session,
    /// For decoding.
    pub metadata: Metadata,
    /// The guest kernel's own texts, by name.
    pub texts: BTreeMap<String, Vec<u8>>,
    /// CPUs that have pages and are wanted.
    pub cpus: Vec<u32>,
    /// What could not be used, one sentence each.
    pub warnings: Vec<String>,
    /// CPUs that were asked for; all if none.
    wanted: Vec<u32>,
    reader: TrailReader,
    id: SessionId,
    notes: Vec<Note>,
    map: TimeMap,
    span: Option<(u64, u64)>,
}

impl Story {
    /// Reads metadata and log, and walks through the trail once to find where migrations and losses lie.
    ///
    /// # Errors
    ///
    /// The trail has no such session, or nothing of it can be decoded.
    pub fn open(reader: &TrailReader, selection: &Selection) -> Result<Self> {
        let log = Log::read(reader)?;
        let about = match &selection.session {
            Some(wanted) => log
                .sessions
                .iter()
                .find(|session| session.session == *wanted),
            None => log.sessions.last(),
        };
        let Some(about) = about.cloned() else {
            bail!(
                "failed to find a session in {}: nothing was recorded",
                reader.place().display()
            );
        };
        let id =
            u64::from_str_radix(&about.session, 16).context("failed to read the session's id")?;
        let id = SessionId(id);
        let mut warnings = Vec::new();
        let texts = texts(reader, id, &mut warnings)?;
        let metadata = metadata(&about, &texts, &mut warnings)?;
        let verification = verify(reader)?;
        let found = verification
            .sessions
            .iter()
            .find(|session| session.session == about.session);
        let cpus = found
            .into_iter()
            .flat_map(|session| &session.streams)
            .map(|stream| stream.cpu);
        let cpus: Vec<u32> = cpus
            .filter(|cpu| selection.cpus.is_empty() || selection.cpus.contains(cpu))
            .collect();
        let losses = verification
            .losses
            .iter()
            .filter(|loss| loss.session == about.session);
        let mut notes: Vec<Note> = losses.map(loss_note).collect();
        notes.extend(log.migration_notes(reader, id, metadata.layout)?);
        let map = match selection.clock {
            ShownClock::Guest => TimeMap::default(),
            ShownClock::Host => log.host_clock(&about, &notes)?,
        };
        for note in &mut notes {
            note.timestamp = map.map(note.timestamp);
        }
        let span = (selection.from.is_some() || selection.to.is_some()).then(|| {
            (
                selection.from.unwrap_or(0),
                selection.to.unwrap_or(u64::MAX),
            )
        });
        Ok(Self {
            about,
            metadata,
            texts,
            cpus,
            warnings,
            wanted: selection.cpus.clone(),
            reader: reader.clone(),
            id,
            notes,
            map,
            span,
        })
    }

    /// Events and notes in time order. Memory does not grow with the trail.
    #[must_use]
    pub fn timeline(&self) -> Timeline<CpuPages> {
        let sources = self.cpus.iter().map(|&cpu| (cpu, self.pages(cpu)));
        let merge = Merge::new(self.metadata.layout, sources);
        let timeline = Timeline::new(merge, self.map.clone(), self.notes.iter().cloned());
        match self.span {
            Some((from, to)) => timeline.between(from, to),
            None => timeline,
        }
    }

    /// The pages of one CPU.
    #[must_use]
    pub fn pages(&self, cpu: u32) -> CpuPages {
        let stream = StreamId(cpu);
        CpuPages {
            frames: self.reader.frames().only_stream(self.id, stream),
            id: self.id,
            stream,
            frame: Vec::new(),
            page_size: self.metadata.layout.page_size(),
            at: 0,
            newest: None,
        }
    }

    /// Events from now on, as they are stored: CPUs without news are [`Pull::Pending`]. `newest` is told the time of each page that is read.
    ///
    /// # Errors
    ///
    /// The trail cannot be read.
    pub fn follow(&self, newest: &Rc<Cell<u64>>) -> Result<Timeline<CpuPages>> {
        let mut sources = Vec::new();
        for cpu in 0..self.about.cpus {
            if !self.wanted.is_empty() && !self.wanted.contains(&cpu) {
                continue;
            }
            let mut pages = self.pages(cpu);
            // What is stored already is for `vmtrail report`.
            let mut skipped = Vec::new();
            while pages.next_page(&mut skipped)? == Pull::Page {}
            pages.newest = Some((self.metadata.layout, Rc::clone(newest)));
            sources.push((cpu, pages));
        }
        let merge = Merge::new(self.metadata.layout, sources);
        Ok(Timeline::new(merge, self.map.clone(), Vec::new()))
    }

    /// A text of the guest's kernel, as text.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        self.texts
            .get(name)
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
            .unwrap_or_default()
    }
}

/// Pages of one CPU in the order of the trail.
#[derive(Debug)]
pub struct CpuPages {
    frames: Frames,
    id: SessionId,
    stream: StreamId,
    frame: Vec<u8>,
    page_size: usize,
    at: usize,
    /// Where a follower is told how far this CPU's pages are.
    newest: Option<(PageLayout, Rc<Cell<u64>>)>,
}

impl PageSource for CpuPages {
    type Error = io::Error;

    fn next_page(&mut self, page: &mut Vec<u8>) -> io::Result<Pull> {
        page.clear();
        while self.at >= self.frame.len() {
            self.at = 0;
            self.frame.clear();
            match self.frames.next().map_err(io::Error::other)? {
                None if self.newest.is_some() => return Ok(Pull::Pending),
                None => return Ok(Pull::End),
                Some(Entry::Frame(frame))
                    if frame.header.session == self.id && frame.header.stream == self.stream =>
                {
                    for page in frame.pages() {
                        self.frame.extend_from_slice(page);
                    }
                }
                // Damage is `vmtrail verify`'s to tell; what is left of the trail is shown.
                Some(_) => {}
            }
        }
        let end = (self.at + self.page_size).min(self.frame.len());
        page.extend_from_slice(&self.frame[self.at..end]);
        self.at = end;
        if let Some((layout, newest)) = &self.newest
            && let Ok(page) = Page::parse(*layout, page)
        {
            newest.set(newest.get().max(page.timestamp()));
        }
        Ok(Pull::Page)
    }
}

#[derive(Debug, Default)]
struct Log {
    sessions: Vec<Session>,
    /// Residency to host.
    hosts: BTreeMap<u64, String>,
    /// Attempt to (from, to).
    attempts: BTreeMap<u64, (u64, u64)>,
    migrations: Vec<MigrationEnded>,
    /// (residency, guest monotonic, host wall, error) of a session.
    clocks: BTreeMap<String, Vec<ClockSample>>,
}

#[derive(Debug, Clone, Copy)]
struct ClockSample {
    residency: u64,
    guest_ns: u64,
    host_ns: u64,
    error_ns: u64,
}

impl Log {
    fn read(reader: &TrailReader) -> Result<Self> {
        let mut log = Self::default();
        let mut lines = reader.events()?;
        while let Some(line) = lines.next()? {
            match line.content.map(|line| line.event) {
                Ok(Event::Session(session)) => {
                    log.sessions
                        .retain(|known| known.session != session.session);
                    log.sessions.push(session);
                }
                Ok(Event::Residency(residency)) => {
                    log.hosts.insert(residency.residency, residency.host);
                }
                Ok(Event::MigrationStarted {
                    attempt, from, to, ..
                }) => {
                    log.attempts.insert(attempt, (from, to));
                }
                Ok(Event::MigrationEnded(ended)) => log.migrations.push(ended),
                Ok(Event::Clock {
                    session,
                    residency,
                    host_ns,
                    error_ns,
                    monotonic_ns,
                    ..
                }) => {
                    log.clocks.entry(session).or_default().push(ClockSample {
                        residency,
                        guest_ns: monotonic_ns,
                        host_ns,
                        error_ns,
                    });
                }
                _ => {}
            }
        }
        Ok(log)
    }

    /// Each committed migration, put between the last event before its boundary and the first behind it.
    fn migration_notes(
        &self,
        reader: &TrailReader,
        id: SessionId,
        layout: PageLayout,
    ) -> Result<Vec<Note>> {
        let committed: Vec<_> = self
            .migrations
            .iter()
            .filter(|ended| ended.outcome == "committed")
            .collect();
        let spans = blackout_spans(reader, id, layout, &committed)?;
        let mut notes = Vec::new();
        for (ended, span) in committed.iter().zip(spans) {
            let Some((before, after)) = span else {
                continue;
            };
            let (from, to) = self
                .attempts
                .get(&ended.attempt)
                .copied()
                .unwrap_or_default();
            let host = |residency: u64| {
                let host = self.hosts.get(&residency).map_or("?", String::as_str);
                format!("{host}#{residency}")
            };
            let kinds = [
                (
                    before,
                    NoteKind::MigrationBegin {
                        from: host(from),
                        to: host(to),
                    },
                ),
                (before, NoteKind::BlackoutBegin),
                (
                    after,
                    NoteKind::BlackoutEnd {
                        duration_ns: ended.blackout_ns.unwrap_or(0),
                    },
                ),
                (
                    after,
                    NoteKind::ResidencyBegin {
                        host: host(to),
                        cause: "migration".into(),
                    },
                ),
                (
                    after,
                    NoteKind::MigrationEnd {
                        outcome: ended.outcome.clone(),
                    },
                ),
            ];
            notes.extend(kinds.map(|(timestamp, kind)| Note { timestamp, kind }));
        }
        Ok(notes)
    }

    /// From the guest's clock to the hosts': for each residency the sample with the smallest error, from the end of the
    /// blackout before it on.
    fn host_clock(&self, about: &Session, notes: &[Note]) -> Result<TimeMap> {
        if about.clock != "mono" {
            bail!(
                "failed to map to host time: the guest's trace clock is \"{}\", and only \"mono\" is compared with the hosts' \
                 (record with --clock mono)",
                about.clock
            );
        }
        let mut best: BTreeMap<u64, ClockSample> = BTreeMap::new();
        for sample in self.clocks.get(&about.session).into_iter().flatten() {
            let entry = best.entry(sample.residency).or_insert(*sample);
            if sample.error_ns < entry.error_ns {
                *entry = *sample;
            }
        }
        if best.is_empty() {
            bail!("failed to map to host time: the trail has no comparison of the clocks");
        }
        let mut ends = notes
            .iter()
            .filter(|note| matches!(note.kind, NoteKind::BlackoutEnd { .. }))
            .map(|note| note.timestamp);
        let pieces = best.values().enumerate().map(|(index, sample)| {
            let from = if index == 0 {
                0
            } else {
                ends.next().unwrap_or(sample.guest_ns)
            };
            (
                from,
                sample.host_ns.wrapping_sub(sample.guest_ns).cast_signed(),
            )
        });
        Ok(TimeMap::new(pieces.collect::<Vec<_>>()))
    }
}

/// For each migration the guest times of the last event before its boundary and of the first behind it, over all CPUs.
fn blackout_spans(
    reader: &TrailReader,
    id: SessionId,
    layout: PageLayout,
    migrations: &[&MigrationEnded],
) -> Result<Vec<Option<(u64, u64)>>> {
    let mut spans: Vec<(Option<u64>, Option<u64>)> = vec![(None, None); migrations.len()];
    // Per CPU the boundaries that are still to come.
    let mut ahead: BTreeMap<u32, VecDeque<(usize, u64)>> = BTreeMap::new();
    for (index, migration) in migrations.iter().enumerate() {
        for &StreamEnd { cpu, next } in &migration.boundaries {
            ahead.entry(cpu).or_default().push_back((index, next));
        }
    }
    let mut frames = reader.frames();
    while let Some(entry) = frames.next()? {
        let Entry::Frame(frame) = entry else { continue };
        let header = &frame.header;
        let Some(cpu) = header.stream.cpu().filter(|_| header.session == id) else {
            continue;
        };
        let Some(boundaries) = ahead.get_mut(&cpu) else {
            continue;
        };
        let mut times = None;
        while let Some(&(index, next)) = boundaries.front() {
            if header.sequence.0 + 1 < next {
                break;
            }
            let (first, last) = *times.get_or_insert_with(|| frame_times(layout, frame.pages()));
            let span = &mut spans[index];
            if header.sequence.0 + 1 == next {
                span.0 = span.0.max(last);
                break;
            }
            span.1 = match (span.1, first) {
                (Some(known), Some(first)) => Some(known.min(first)),
                (known, first) => known.or(first),
            };
            boundaries.pop_front();
        }
    }
    Ok(spans
        .into_iter()
        .map(|(before, after)| {
            let before = before.or(after)?;
            // What the source's last page and the destination's first say may touch: time stood still between them.
            Some((before, after.unwrap_or(before).max(before)))
        })
        .collect())
}

fn frame_times<'a>(
    layout: PageLayout,
    pages: impl Iterator<Item = &'a [u8]>,
) -> (Option<u64>, Option<u64>) {
    pages
        .filter_map(|page| page_summary(layout, page).ok())
        .fold((None, None), |(first, last), summary| {
            (first.or(summary.first_ts), summary.last_ts.or(last))
        })
}

fn loss_note(loss: &Loss) -> Note {
    let count = |count: Option<u64>| count.map_or(Missed::Unknown, Missed::Count);
    Note {
        timestamp: loss.before.or(loss.after).unwrap_or(0),
        kind: NoteKind::Loss {
            cpu: Some(loss.cpu),
            pages: if loss.kind == LossKind::Frames {
                count(loss.pages)
            } else {
                Missed::None
            },
            events: count(loss.events),
            cause: loss.cause.clone(),
        },
    }
}

fn texts(
    reader: &TrailReader,
    id: SessionId,
    warnings: &mut Vec<String>,
) -> Result<BTreeMap<String, Vec<u8>>> {
    let (manifests, _) = reader.manifests()?;
    match manifests.into_iter().rfind(|(session, _)| *session == id) {
        Some((_, generation)) => Ok(reader.items(&reader.manifest(id, generation)?)?),
        None => {
            warnings.push(
                "the trail has no complete metadata of this session (it was ended too early): events are counted, not named"
                    .to_owned(),
            );
            Ok(BTreeMap::new())
        }
    }
}

fn metadata(
    about: &Session,
    texts: &BTreeMap<String, Vec<u8>>,
    warnings: &mut Vec<String>,
) -> Result<Metadata> {
    let endian = if about.big_endian {
        Endian::Big
    } else {
        Endian::Little
    };
    let text = |name: &str| texts.get(name).map(|bytes| String::from_utf8_lossy(bytes));
    let bytes = |name: &str| texts.get(name).map(Vec::as_slice).unwrap_or_default();
    let layout = match text("events/header_page") {
        Some(text) => PageLayout::parse(&text, endian),
        None => PageLayout::native64_le(about.page_size),
    }
    .context("failed to learn the layout of the guest's pages")?;
    let mut events = Catalog::new(layout.endian(), layout.long_size());
    let mut unreadable = 0_u32;
    for (name, format) in texts {
        let Some(system) = system_of(name) else {
            continue;
        };
        if events
            .add(system, &String::from_utf8_lossy(format))
            .is_err()
        {
            unreadable += 1;
        }
    }
    if unreadable > 0 {
        warnings.push(format!(
            "{unreadable} event formats cannot be read: their events are shown raw"
        ));
    }
    Ok(Metadata {
        layout,
        events,
        symbols: Symbols::parse(bytes("proc/kallsyms")),
        printk: PrintkFormats::parse(bytes("printk_formats")),
        comms: Comms::parse(bytes("saved_cmdlines")),
        tgids: Tgids::parse(bytes("saved_tgids")),
        clock: Clock::parse(&about.clock),
    })
}

/// The system of `events/SYSTEM/EVENT/format`.
#[must_use]
pub fn system_of(name: &str) -> Option<&str> {
    let (system, rest) = name.strip_prefix("events/")?.split_once('/')?;
    rest.ends_with("/format").then_some(system)
}
