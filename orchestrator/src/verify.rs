//! Whether a trail is whole, from what is stored and nothing else.
//!
//! Every stored page is read. Sequences and page counts come from the frames themselves; the log only says where a stream had to
//! begin and end, and why something is missing. The JSON form is documented in docs/trail.md, and so is the order in which
//! a verdict is chosen:
//!
//! ```text
//! lossy       frames are missing, or stored wrongly
//! unknown     else, if the end or the content of a stream cannot be known
//! overrun     else, if the guest's ring overwrote events before they were read
//! continuous  else
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;
use vmtrail_trace::Endian;
use vmtrail_trace::ring_buffer::{Missed, PageLayout, page_summary};
use vmtrail_wire::flags;

use crate::info::plain;
use crate::trail::event::{Counters, Event, MigrationEnded, RetiredStream, Session, StreamEnd};
use crate::trail::{DamageKind, Entry, StoredFrame};
use crate::trail::{TrailError, TrailReader};

/// Losses listed one by one at most; a guest that overruns without end must not make the report grow without end. The
/// sums count all of them.
const MAX_LISTED: usize = 10_000;

/// Sentences of one kind at most. A guest decides what is in its pages, and can make each of them odd.
const MAX_SENTENCES: usize = 1000;

/// The verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Everything that the guest's ring gave is there.
    Continuous,
    /// The guest's ring overwrote events before they were read.
    Overrun,
    /// The end or the content of a stream cannot be known.
    Unknown,
    /// Frames are missing.
    Lossy,
}

/// All that was found.
#[derive(Debug, Clone, Serialize)]
pub struct Verification {
    /// The verdict.
    pub verdict: Verdict,
    /// Why it is no better, one sentence each; empty for `continuous`.
    pub reasons: Vec<String>,
    /// Whether somebody is writing to the trail now: the verdict is about what is there so far.
    pub being_recorded: bool,
    /// Each run of the agent.
    pub sessions: Vec<SessionVerification>,
    /// Each attempt to move the VM.
    pub migrations: Vec<MigrationVerification>,
    /// Everything that is missing, in the order in which it was found; at most 10,000.
    pub losses: Vec<Loss>,
    /// Losses that are counted but not listed.
    pub losses_not_listed: u64,
    /// Damage of the stored bytes, one sentence each.
    pub damage: Vec<String>,
    /// Bytes behind the last whole batch: being written, or torn by a crash and cut when the trail is continued.
    pub torn_bytes: u64,
}

/// One run of the agent.
#[derive(Debug, Clone, Serialize)]
pub struct SessionVerification {
    /// 16 hexadecimal digits.
    pub session: String,
    /// Kernel release of the guest.
    pub kernel: String,
    /// Whether the agent said where its streams end.
    pub ended: bool,
    /// Each CPU.
    pub streams: Vec<StreamVerification>,
}

/// One stream.
#[derive(Debug, Clone, Default, Serialize)]
pub struct StreamVerification {
    /// CPU.
    pub cpu: u32,
    /// Frames stored.
    pub frames: u64,
    /// Pages in them.
    pub pages: u64,
    /// Bytes of the pages.
    pub bytes: u64,
    /// Events in the pages.
    pub events: u64,
    /// Sequence of the first frame.
    pub first_sequence: Option<u64>,
    /// Sequence of the last frame.
    pub last_sequence: Option<u64>,
    /// Guest trace clock of the first event.
    pub first_event: Option<u64>,
    /// Guest trace clock of the last event.
    pub last_event: Option<u64>,
    /// Frames that came again and were dropped.
    pub duplicates_dropped: u64,
    /// Frames that came before their turn and were dropped; their replay is counted where it is stored.
    pub ahead_dropped: u64,
    /// Frames stored from a replay.
    pub replayed: u64,
    /// Frames missing.
    pub lost_frames: u64,
    /// Pages missing in them, where it can be told.
    pub lost_pages: u64,
    /// Events that the guest's ring overwrote within the recording, as its pages count them.
    pub overrun_events: u64,
    /// Overruns whose number of events the kernel did not say.
    pub overruns_uncounted: u64,
    /// Events overwritten before the first page that the trail has: it begins behind them. No loss within the recording.
    pub overrun_before_start: u64,
    /// Whether events were overwritten there whose number the kernel did not say.
    pub overrun_before_start_uncounted: bool,
    /// Frames stored twice or out of order.
    pub disordered_frames: u64,
    /// Pages that cannot be read.
    pub damaged_pages: u64,
    /// Frames removed by retention.
    pub retired_frames: u64,
}

/// Something that is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// `frames` or `overrun`.
    pub kind: LossKind,
    /// Session.
    pub session: String,
    /// CPU.
    pub cpu: u32,
    /// Guest trace clock of the last event before it.
    pub after: Option<u64>,
    /// Guest trace clock of the first event behind it.
    pub before: Option<u64>,
    /// Events, where known.
    pub events: Option<u64>,
    /// Frames from … (sequence).
    pub from: Option<u64>,
    /// … to before (sequence).
    pub to: Option<u64>,
    /// Pages, where known.
    pub pages: Option<u64>,
    /// Why, for people.
    pub cause: String,
}

/// Kinds of [`Loss`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// Frames that the agent sent and that are not there.
    Frames,
    /// Events that the guest's ring overwrote.
    Overrun,
}

/// One attempt to move the VM.
#[derive(Debug, Clone, Serialize)]
pub struct MigrationVerification {
    /// Its number.
    pub attempt: u64,
    /// Residency it left.
    pub from: u64,
    /// Residency it went to.
    pub to: u64,
    /// Phases with the time they began (wall clock of the recording host).
    pub phases: Vec<PhaseTime>,
    /// How it ended; `None` if the log does not say.
    pub ended: Option<MigrationEnded>,
    /// Per CPU whether the session went on behind the last frame that came from the source.
    pub boundaries_continued: Vec<Boundary>,
}

/// A phase.
#[derive(Debug, Clone, Serialize)]
pub struct PhaseTime {
    /// Its name.
    pub phase: String,
    /// When it began, nanoseconds since the Unix epoch.
    pub at_ns: u64,
}

/// A boundary.
#[derive(Debug, Clone, Serialize)]
pub struct Boundary {
    /// CPU.
    pub cpu: u32,
    /// Sequence of the first frame behind it.
    pub next: u64,
    /// Whether that very frame is stored (or was, and retired), or the stream ended exactly there. `None` if that cannot
    /// be known: nothing came behind the boundary, and the agent did not say that nothing was to come.
    pub continued: Option<bool>,
}

impl Verification {
    /// The exit code of `vmtrail verify`.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self.verdict {
            Verdict::Continuous => 0,
            Verdict::Overrun => 10,
            Verdict::Lossy => 11,
            Verdict::Unknown => 12,
        }
    }
}

/// Reads the whole trail.
///
/// # Errors
///
/// The filesystem refused. What is wrong with the trail is a result, not an error.
pub fn verify(reader: &TrailReader) -> Result<Verification, TrailError> {
    // Asked first: a recorder that ends while we read leaves more behind than we saw, not less.
    let being_recorded = reader.writer()?.is_some();
    let log = Log::read(reader, oldest_ns(reader)?)?;
    let mut check = Check::new(reader, &log);
    let mut frames = reader.frames();
    while let Some(entry) = frames.next()? {
        match entry {
            Entry::Segment(_) | Entry::Batch(_) => {}
            Entry::Frame(frame) => check.take_frame(&frame),
            Entry::Damage(damage) => {
                let place = format!("segment {} at {}", damage.segment, damage.offset);
                check.take_damage(damage.kind, format!("{place}: {}", damage.text));
            }
        }
    }
    let torn_bytes = frames.torn().map_or(0, |torn| torn.bytes);
    Ok(check.finish(being_recorded, torn_bytes))
}

/// When the oldest frames that are left were written, if older ones were retired; else 0.
fn oldest_ns(reader: &TrailReader) -> Result<u64, TrailError> {
    match reader.segments()?.first() {
        Some(first) if first.number > 1 => Ok(reader.index(first.number)?.first_written_ns),
        _ => Ok(0),
    }
}

/// What the event log says.
#[derive(Debug, Default)]
struct Log {
    sessions: Vec<SessionLog>,
    migrations: Vec<MigrationVerification>,
    /// For each of `migrations`, the session that was recorded when the source was stopped.
    migrated_sessions: Vec<Option<String>>,
    /// The session that spoke last.
    current_session: Option<String>,
    last_epoch: u64,
    /// Kernel counters logged before this say nothing about the frames that are left.
    oldest_ns: u64,
    unreadable: Sentences,
    /// Where in `sessions` each is, by its name.
    names: BTreeMap<String, usize>,
}

/// Sentences about one kind of finding: the first ones, and how many there were besides.
#[derive(Debug, Clone, Default)]
struct Sentences {
    listed: Vec<String>,
    more: u64,
}

impl Sentences {
    fn push(&mut self, sentence: String) {
        if self.listed.len() < MAX_SENTENCES {
            self.listed.push(sentence);
        } else {
            self.more += 1;
        }
    }

    fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }

    fn into_listed(mut self) -> Vec<String> {
        if self.more > 0 {
            (self.listed).push(format!("… and {} more of this kind", self.more));
        }
        self.listed
    }
}

#[derive(Debug, Default)]
struct SessionLog {
    name: String,
    about: Option<Session>,
    /// Whether its clock was changed while it was recorded.
    changed_clock: bool,
    began: BTreeMap<u32, u64>,
    /// By CPU and first missing sequence: the sequence behind, and the cause.
    gaps: BTreeMap<(u32, u64), (u64, String)>,
    forks: Vec<String>,
    drops: BTreeMap<u32, (u64, u64)>,
    retired: BTreeMap<u32, RetiredStream>,
    retired_frames: BTreeMap<u32, u64>,
    first_counters: BTreeMap<u32, Counters>,
    last_counters: BTreeMap<u32, Counters>,
    /// Where its streams ended, unless it spoke again.
    ends: Option<Ends>,
}

#[derive(Debug)]
struct Ends {
    streams: Vec<StreamEnd>,
    /// The newest attachment by then. A frame of a later one says that the session went on.
    epoch: u64,
}

impl Log {
    fn read(reader: &TrailReader, oldest_ns: u64) -> Result<Self, TrailError> {
        let mut log = Self {
            oldest_ns,
            ..Self::default()
        };
        let mut lines = reader.events()?;
        while let Some(line) = lines.next()? {
            match line.content {
                Ok(content) => log.take(content.at_ns, content.event),
                Err(reason) => {
                    log.unreadable
                        .push(format!("line {} of the log: {reason}", line.line));
                }
            }
        }
        Ok(log)
    }

    /// Where streams crossed from one host to another: session, CPU and the sequence of the first frame behind it.
    fn boundaries(&self) -> impl Iterator<Item = (String, u32, u64)> + '_ {
        let migrations = self.migrations.iter().zip(&self.migrated_sessions);
        migrations.flat_map(|(migration, session)| {
            let ended = migration.ended.iter().zip(session);
            ended.flat_map(|(ended, session)| {
                (ended.boundaries.iter()).map(|end| (session.clone(), end.cpu, end.next))
            })
        })
    }

    fn session(&mut self, name: &str) -> &mut SessionLog {
        let sessions = &mut self.sessions;
        let index = *self.names.entry(name.to_owned()).or_insert_with(|| {
            sessions.push(SessionLog {
                name: name.to_owned(),
                ..SessionLog::default()
            });
            sessions.len() - 1
        });
        &mut sessions[index]
    }

    fn take(&mut self, at_ns: u64, event: Event) {
        match event {
            Event::Session(about) => {
                self.current_session = Some(about.session.clone());
                let session = self.session(&about.session);
                // A recorder that comes back says again whom it found; only another clock is a change.
                session.changed_clock |=
                    (session.about.as_ref()).is_some_and(|known| known.clock != about.clock);
                session.ends = None;
                session.about = Some(about);
            }
            Event::Attached { epoch, .. } => self.last_epoch = self.last_epoch.max(epoch),
            Event::StreamBegan {
                session,
                cpu,
                sequence,
                ..
            } => {
                self.session(&session).began.entry(cpu).or_insert(sequence);
            }
            Event::Gap {
                session,
                cpu,
                from,
                to,
                cause,
                ..
            } => {
                self.session(&session).gaps.insert((cpu, from), (to, cause));
            }
            Event::Fork {
                session,
                cpu,
                have,
                next,
            } => {
                self.session(&session).forks.push(format!(
                    "CPU {cpu} of session {session}: the guest was put back from frame {have} to frame {next}"
                ));
            }
            Event::Lost { session, counters } => {
                let counts = at_ns >= self.oldest_ns;
                let session = self.session(&session);
                for counters in counters {
                    if counts {
                        session
                            .first_counters
                            .entry(counters.cpu)
                            .or_insert(counters);
                    }
                    session.last_counters.insert(counters.cpu, counters);
                }
            }
            Event::Stopped { session, streams } => {
                let epoch = self.last_epoch;
                self.session(&session).ends = Some(Ends { streams, epoch });
            }
            Event::Dropped {
                session, streams, ..
            } => {
                let session = self.session(&session);
                for drops in streams {
                    let sum = session.drops.entry(drops.cpu).or_default();
                    sum.0 += drops.duplicates;
                    sum.1 += drops.ahead;
                }
            }
            Event::Retired { streams, .. } => {
                for stream in streams {
                    let session = self.session(&stream.session);
                    *session.retired_frames.entry(stream.cpu).or_default() += stream.frames;
                    session.retired.insert(stream.cpu, stream);
                }
            }
            Event::MigrationStarted {
                attempt, from, to, ..
            } => {
                self.migrations.push(MigrationVerification {
                    attempt,
                    from,
                    to,
                    phases: Vec::new(),
                    ended: None,
                    boundaries_continued: Vec::new(),
                });
                self.migrated_sessions.push(self.current_session.clone());
            }
            Event::MigrationPhase { attempt, phase } => {
                if let Some(at) =
                    (self.migrations.iter()).rposition(|known| known.attempt == attempt)
                {
                    // The guest may have been booted anew since the attempt began; from here on it stands still.
                    if phase == "switchover" {
                        self.migrated_sessions[at].clone_from(&self.current_session);
                    }
                    self.migrations[at].phases.push(PhaseTime { phase, at_ns });
                }
            }
            Event::MigrationEnded(ended) => {
                if let Some(migration) = self
                    .migrations
                    .iter_mut()
                    .rfind(|migration| migration.attempt == ended.attempt)
                {
                    migration.ended = Some(ended);
                }
            }
            _ => {}
        }
    }
}

/// What is known of a stream while its frames go by.
#[derive(Debug, Default)]
struct StreamCheck {
    found: StreamVerification,
    /// The sequence that must come next.
    next: Option<u64>,
    /// Pages before it.
    next_page: Option<u64>,
    /// Time in the last page's header.
    page_time: Option<u64>,
    /// A hole whose far side is not known before the next event.
    open_loss: Option<Loss>,
    /// Boundaries of migrations whose next frame was seen.
    continued: BTreeSet<u64>,
}

#[derive(Debug)]
struct Check<'a> {
    log: &'a Log,
    layouts: BTreeMap<String, Result<PageLayout, String>>,
    sessions: Vec<String>,
    streams: BTreeMap<(String, u32), StreamCheck>,
    /// Sequences behind the boundaries of migrations, per stream.
    boundaries: BTreeSet<(String, u32, u64)>,
    /// Sessions that went on after they had been stopped.
    went_on: BTreeSet<String>,
    losses: Vec<Loss>,
    losses_not_listed: u64,
    lossy: Sentences,
    unknown: Sentences,
    overrun: Sentences,
    damage: Sentences,
}

impl<'a> Check<'a> {
    fn new(reader: &TrailReader, log: &'a Log) -> Self {
        let mut check = Self {
            log,
            layouts: BTreeMap::new(),
            sessions: Vec::new(),
            streams: BTreeMap::new(),
            boundaries: log.boundaries().collect(),
            went_on: BTreeSet::new(),
            losses: Vec::new(),
            losses_not_listed: 0,
            lossy: Sentences::default(),
            // Whatever the line said of a beginning, an end or a counter is not known now.
            unknown: log.unreadable.clone(),
            overrun: Sentences::default(),
            damage: log.unreadable.clone(),
        };
        for session in &log.sessions {
            check.sessions.push(session.name.clone());
            let Some(about) = &session.about else {
                check.unknown.push(format!(
                    "session {}: the log does not describe it, so its pages cannot be read",
                    session.name
                ));
                continue;
            };
            check
                .layouts
                .insert(about.session.clone(), layout(reader, about));
        }
        check
    }

    fn take_damage(&mut self, kind: DamageKind, text: String) {
        match kind {
            // The frames' own numbers say whether something is missing; but what was there cannot be believed.
            DamageKind::Content | DamageKind::SegmentHeader => self.unknown.push(text.clone()),
            DamageKind::MissingSegments
            | DamageKind::Shortened
            | DamageKind::Unreadable
            | DamageKind::MissingBatches
            | DamageKind::FrameHeader => self.lossy.push(text.clone()),
        }
        self.damage.push(text);
    }

    fn session_log(&self, session: &str) -> Option<&'a SessionLog> {
        let index = self.log.names.get(session)?;
        self.log.sessions.get(*index)
    }

    fn take_frame(&mut self, frame: &StoredFrame<'_>) {
        let header = &frame.header;
        let Some(cpu) = header.stream.cpu() else {
            return;
        };
        let session = header.session.to_string();
        let log = self.session_log(&session);
        if log.is_none() && !self.sessions.contains(&session) {
            self.unknown.push(format!(
                "session {session} has frames, but the log does not know it"
            ));
            self.sessions.push(session.clone());
        }
        let mut stream = self
            .streams
            .remove(&(session.clone(), cpu))
            .unwrap_or_else(|| {
                let retired = log.and_then(|log| log.retired.get(&cpu));
                let next = retired
                    .map(|retired| retired.to)
                    .or_else(|| log?.began.get(&cpu).copied());
                if log.is_some() && next.is_none() {
                    self.unknown.push(format!(
                        "CPU {cpu} of session {session}: the log does not say where the stream began"
                    ));
                }
                StreamCheck {
                    next,
                    next_page: retired.map(|retired| retired.next_page),
                    found: StreamVerification {
                        cpu,
                        ..StreamVerification::default()
                    },
                    ..StreamCheck::default()
                }
            });
        let sequence = header.sequence.0;
        let ends = log.and_then(|log| log.ends.as_ref());
        if ends.is_some_and(|ends| header.epoch.0 > ends.epoch) {
            self.went_on.insert(session.clone());
        }
        if !self.boundaries.is_empty()
            && (self.boundaries).contains(&(session.clone(), cpu, sequence))
        {
            stream.continued.insert(sequence);
        }
        let next = stream.next.unwrap_or(sequence);
        if sequence < next {
            stream.found.disordered_frames += 1;
            self.streams.insert((session, cpu), stream);
            return;
        }
        if sequence > next {
            let pages = stream
                .next_page
                .and_then(|page| header.first_page.checked_sub(page));
            self.take_gap(&mut stream, &session, log, (next, sequence), pages);
        } else if stream
            .next_page
            .is_some_and(|page| page != header.first_page)
        {
            self.unknown.push(format!(
                "CPU {cpu} of session {session}: frame {sequence} counts {} pages before it, the trail has another number",
                header.first_page
            ));
        }
        stream.next = Some(sequence + 1);
        stream.next_page = Some(header.first_page + u64::from(header.page_count));
        let found = &mut stream.found;
        found.first_sequence.get_or_insert(sequence);
        found.last_sequence = Some(sequence);
        found.frames += 1;
        found.pages += u64::from(header.page_count);
        found.bytes += u64::from(header.payload_len);
        found.replayed += u64::from(header.flags & flags::REPLAY != 0);
        for page in frame.pages() {
            self.take_page(&mut stream, &session, log, page);
        }
        self.streams.insert((session, cpu), stream);
    }

    fn take_gap(
        &mut self,
        stream: &mut StreamCheck,
        session: &str,
        log: Option<&SessionLog>,
        (from, to): (u64, u64),
        pages: Option<u64>,
    ) {
        let found = &mut stream.found;
        found.lost_frames += to - from;
        found.lost_pages += pages.unwrap_or(0);
        let cpu = found.cpu;
        let cause = log
            .and_then(|log| log.gaps.range((cpu, 0)..(cpu, to)).next_back())
            .filter(|(_, (end, _))| from < *end)
            .map_or_else(
                || "not known: the log does not mention it".to_owned(),
                |(_, (_, cause))| cause.clone(),
            );
        if stream.open_loss.is_some() {
            let loss = stream.open_loss.take();
            self.list(loss);
        }
        stream.open_loss = Some(Loss {
            kind: LossKind::Frames,
            session: session.to_owned(),
            cpu: stream.found.cpu,
            after: stream.found.last_event,
            before: None,
            events: None,
            from: Some(from),
            to: Some(to),
            pages,
            cause,
        });
    }

    fn take_page(
        &mut self,
        stream: &mut StreamCheck,
        session: &str,
        log: Option<&SessionLog>,
        page: &[u8],
    ) {
        let Some(Ok(layout)) = self.layouts.get(session) else {
            return;
        };
        let Ok(summary) = page_summary(*layout, page) else {
            stream.found.damaged_pages += 1;
            return;
        };
        let is_first = stream.page_time.is_none();
        let found = &mut stream.found;
        found.damaged_pages += u64::from(summary.damage.is_some());
        found.events += u64::from(summary.events);
        let went_back = stream
            .page_time
            .is_some_and(|time| summary.timestamp < time);
        // Another clock, chosen while recording, begins elsewhere.
        if went_back && log.is_none_or(|log| !log.changed_clock) {
            self.unknown.push(format!(
                "CPU {} of session {session}: a page's time goes back to {}",
                found.cpu, summary.timestamp
            ));
        }
        stream.page_time = Some(summary.timestamp);
        let missed = match summary.missed {
            Missed::None => None,
            Missed::Unknown => Some(None),
            Missed::Count(count) => Some(Some(count)),
        };
        if let Some(events) = missed {
            // Behind frames that are missing it may be theirs.
            if is_first && found.lost_frames == 0 {
                found.overrun_before_start += events.unwrap_or(0);
                found.overrun_before_start_uncounted |= events.is_none();
            } else {
                found.overrun_events += events.unwrap_or(0);
                found.overruns_uncounted += u64::from(events.is_none());
                // A hole of frames and an overrun at one place stay two losses: they have two causes.
                let open = stream.open_loss.take();
                self.list(open);
                stream.open_loss = Some(Loss {
                    kind: LossKind::Overrun,
                    session: session.to_owned(),
                    cpu: stream.found.cpu,
                    after: stream.found.last_event,
                    before: None,
                    events,
                    from: None,
                    to: None,
                    pages: None,
                    cause: "the guest's ring overwrote events before they were read".to_owned(),
                });
            }
        }
        if let Some(first) = summary.first_ts {
            stream.found.first_event.get_or_insert(first);
            if let Some(mut loss) = stream.open_loss.take() {
                loss.before = Some(first);
                self.list(Some(loss));
            }
        }
        stream.found.last_event = summary.last_ts.or(stream.found.last_event);
    }

    fn list(&mut self, loss: Option<Loss>) {
        let Some(loss) = loss else { return };
        if self.losses.len() < MAX_LISTED {
            self.losses.push(loss);
        } else {
            self.losses_not_listed += 1;
        }
    }

    fn finish(mut self, being_recorded: bool, torn_bytes: u64) -> Verification {
        let mut sessions = Vec::new();
        for name in self.sessions.clone() {
            sessions.push(self.finish_session(&name, being_recorded));
        }
        let migrations = self.finish_migrations();
        let streams: Vec<_> = std::mem::take(&mut self.streams).into_iter().collect();
        for (key, mut stream) in streams {
            let open = stream.open_loss.take();
            self.list(open);
            self.judge_stream(&key.0, &stream.found);
            if let Some(session) = sessions.iter_mut().find(|session| session.session == key.0) {
                session.streams.push(stream.found);
            }
        }
        let verdict = if !self.lossy.is_empty() {
            Verdict::Lossy
        } else if !self.unknown.is_empty() {
            Verdict::Unknown
        } else if !self.overrun.is_empty() {
            Verdict::Overrun
        } else {
            Verdict::Continuous
        };
        let reasons = [self.lossy, self.unknown, self.overrun]
            .map(Sentences::into_listed)
            .concat();
        Verification {
            verdict,
            reasons,
            being_recorded,
            sessions,
            migrations,
            losses: self.losses,
            losses_not_listed: self.losses_not_listed,
            damage: self.damage.into_listed(),
            torn_bytes,
        }
    }

    /// Judges what a session as a whole says; its streams are judged one by one later.
    fn finish_session(&mut self, name: &str, being_recorded: bool) -> SessionVerification {
        let log = self.session_log(name);
        let about = log.and_then(|log| log.about.as_ref());
        if let Some(Err(reason)) = self.layouts.get(name) {
            self.unknown
                .push(format!("session {name}: pages cannot be read: {reason}"));
        }
        let ends = (log.and_then(|log| log.ends.as_ref()))
            .filter(|_| !self.went_on.contains(name))
            .map(|ends| ends.streams.as_slice());
        self.check_gaps(name, log);
        if let Some(log) = log {
            for fork in &log.forks {
                self.lossy.push(fork.clone());
            }
            for (&cpu, &(duplicates, ahead)) in &log.drops {
                if let Some(stream) = self.streams.get_mut(&(name.to_owned(), cpu)) {
                    stream.found.duplicates_dropped = duplicates;
                    stream.found.ahead_dropped = ahead;
                }
            }
            for (&cpu, &frames) in &log.retired_frames {
                if let Some(stream) = self.streams.get_mut(&(name.to_owned(), cpu)) {
                    stream.found.retired_frames = frames;
                }
            }
        }
        match ends {
            Some(ends) => {
                self.check_ends(name, log, ends);
                let streams = (self.streams.keys()).filter(|(session, _)| session == name);
                for (_, cpu) in streams {
                    if !ends.iter().any(|end| end.cpu == *cpu) {
                        self.unknown.push(format!(
                            "CPU {cpu} of session {name} has no end: the agent's last word does not mention it"
                        ));
                    }
                }
            }
            None if being_recorded => {}
            None => self.unknown.push(format!(
                "session {name} has no end: the recording stopped without the agent's last word, so frames may be missing there"
            )),
        }
        if ends.is_some() {
            self.check_counters(name, log);
        }
        SessionVerification {
            session: name.to_owned(),
            kernel: about.map(|about| about.kernel.clone()).unwrap_or_default(),
            ended: ends.is_some(),
            streams: Vec::new(),
        }
    }

    /// Losses that the log knows of and that no frame came behind.
    fn check_gaps(&mut self, name: &str, log: Option<&SessionLog>) {
        let mut furthest: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for (&(cpu, from), &(to, _)) in log.iter().flat_map(|log| &log.gaps) {
            let gap = furthest.entry(cpu).or_insert((from, to));
            if to > gap.1 {
                *gap = (from, to);
            }
        }
        for (cpu, (from, to)) in furthest {
            let ends = [StreamEnd { cpu, next: to }];
            let have = self.next_of(name, log, cpu);
            if have <= from && from < to {
                self.check_ends(name, log, &ends);
            }
        }
    }

    /// The sequence that a stream would go on with.
    fn next_of(&self, name: &str, log: Option<&SessionLog>, cpu: u32) -> u64 {
        (self.streams.get(&(name.to_owned(), cpu)))
            .and_then(|stream| stream.next)
            .or_else(|| log?.retired.get(&cpu).map(|retired| retired.to))
            .or_else(|| log?.began.get(&cpu).copied())
            .unwrap_or(0)
    }

    /// Every stream must have come as far as the agent says that it got.
    fn check_ends(&mut self, name: &str, log: Option<&SessionLog>, ends: &[StreamEnd]) {
        for end in ends {
            let key = (name.to_owned(), end.cpu);
            let have = self.next_of(name, log, end.cpu);
            if have >= end.next {
                continue;
            }
            let mut stream = self.streams.remove(&key).unwrap_or_else(|| StreamCheck {
                found: StreamVerification {
                    cpu: end.cpu,
                    ..StreamVerification::default()
                },
                ..StreamCheck::default()
            });
            self.take_gap(&mut stream, name, log, (have, end.next), None);
            stream.next = Some(end.next);
            self.streams.insert(key, stream);
        }
    }

    /// What the kernel counted beyond what pages say was overwritten behind the last page that was read, or cleared with
    /// a ring.
    ///
    /// Its counters begin at 0 with the session. Of a stream that the trail has from its first frame on, pages and counters
    /// must agree exactly. Of another one, what was counted before the trail had it is taken off, and the rest is the
    /// least that was lost: the first page may tell of some of it, too.
    fn check_counters(&mut self, name: &str, log: Option<&SessionLog>) {
        let Some(log) = log else { return };
        for (cpu, last) in &log.last_counters {
            let is_whole = log.began.get(cpu) == Some(&0) && !log.retired.contains_key(cpu);
            let first = match log.first_counters.get(cpu) {
                Some(first) if !is_whole => *first,
                None if !is_whole => *last,
                _ => Counters {
                    cpu: *cpu,
                    overrun: 0,
                    commit_overrun: 0,
                    dropped: 0,
                    read: 0,
                },
            };
            let delta = |of: fn(&Counters) -> u64| of(last).saturating_sub(of(&first));
            let nested = delta(|c| c.commit_overrun) + delta(|c| c.dropped);
            if nested > 0 {
                self.overrun.push(format!(
                    "CPU {cpu} of session {name}: the kernel dropped {nested} events (nested too deep, or the ring was full)"
                ));
            }
            let overrun = delta(|c| c.overrun);
            let key = (name.to_owned(), *cpu);
            if overrun == 0 {
                continue;
            }
            // A CPU without a frame can have lost all that it had.
            let stream = self.streams.entry(key).or_insert_with(|| StreamCheck {
                found: StreamVerification {
                    cpu: *cpu,
                    ..StreamVerification::default()
                },
                ..StreamCheck::default()
            });
            let found = &mut stream.found;
            let counted = found
                .overrun_events
                .saturating_add(found.overrun_before_start);
            let unsaid = overrun.saturating_sub(counted);
            let is_uncounted = found.overruns_uncounted > 0 || found.overrun_before_start_uncounted;
            if unsaid > 0 && !is_uncounted {
                found.overrun_events += unsaid;
                let loss = Loss {
                    kind: LossKind::Overrun,
                    session: name.to_owned(),
                    cpu: *cpu,
                    after: found.last_event,
                    before: None,
                    events: Some(unsaid),
                    from: None,
                    to: None,
                    pages: None,
                    cause: "the guest's ring overwrote events that no page tells of, by the kernel's counter"
                        .to_owned(),
                };
                let open = stream.open_loss.take();
                self.list(open);
                self.list(Some(loss));
            }
        }
    }

    fn judge_stream(&mut self, session: &str, found: &StreamVerification) {
        let stream = format!("CPU {} of session {session}", found.cpu);
        if found.lost_frames > 0 {
            self.lossy.push(format!(
                "{stream}: {} frames are missing ({} pages, where that can be told)",
                found.lost_frames, found.lost_pages
            ));
        }
        if found.disordered_frames > 0 {
            self.lossy.push(format!(
                "{stream}: {} frames are stored twice or out of order",
                found.disordered_frames
            ));
        }
        if found.damaged_pages > 0 {
            self.unknown.push(format!(
                "{stream}: {} pages cannot be read to their end",
                found.damaged_pages
            ));
        }
        if found.overrun_events > 0 || found.overruns_uncounted > 0 {
            let uncounted = match found.overruns_uncounted {
                0 => String::new(),
                times => format!(", and {times} times a number that the kernel did not say"),
            };
            self.overrun.push(format!(
                "{stream}: the guest's ring overwrote {} events{uncounted}",
                found.overrun_events
            ));
        }
    }

    fn finish_migrations(&self) -> Vec<MigrationVerification> {
        let mut migrations = self.log.migrations.clone();
        for (migration, session) in migrations.iter_mut().zip(&self.log.migrated_sessions) {
            let boundaries = migration.ended.iter().flat_map(|ended| &ended.boundaries);
            migration.boundaries_continued = boundaries
                .map(|end| Boundary {
                    cpu: end.cpu,
                    next: end.next,
                    continued: session
                        .as_ref()
                        .and_then(|session| self.boundary_continued(session, *end)),
                })
                .collect();
        }
        migrations
    }

    fn boundary_continued(&self, session: &str, boundary: StreamEnd) -> Option<bool> {
        let log = self.session_log(session)?;
        let retired = log.retired.get(&boundary.cpu);
        if retired.is_some_and(|retired| boundary.next < retired.to) {
            return Some(true);
        }
        let stream = self.streams.get(&(session.to_owned(), boundary.cpu));
        if stream.is_some_and(|stream| stream.continued.contains(&boundary.next)) {
            return Some(true);
        }
        // Frames behind it are stored, but not that one.
        if stream.and_then(|stream| stream.found.last_sequence) > Some(boundary.next) {
            return Some(false);
        }
        let ends = (log.ends.as_ref()).filter(|_| !self.went_on.contains(session))?;
        let end = (ends.streams.iter()).find(|end| end.cpu == boundary.cpu)?;
        Some(end.next == boundary.next)
    }
}

fn layout(reader: &TrailReader, about: &Session) -> Result<PageLayout, String> {
    if about.long_size == 8 && !about.big_endian {
        return PageLayout::native64_le(about.page_size).map_err(|error| error.to_string());
    }
    let endian = if about.big_endian {
        Endian::Big
    } else {
        Endian::Little
    };
    let text = header_page(reader, &about.session)
        .ok_or("the trail has no events/header_page of this session")?;
    PageLayout::parse(&text, endian).map_err(|error| error.to_string())
}

fn header_page(reader: &TrailReader, session: &str) -> Option<String> {
    let (manifests, _) = reader.manifests().ok()?;
    let (id, generation) = manifests
        .into_iter()
        .rfind(|(id, _)| id.to_string() == session)?;
    let manifest = reader.manifest(id, generation).ok()?;
    let mut items = reader.items(&manifest).ok()?;
    String::from_utf8(items.remove("events/header_page")?).ok()
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Continuous => "continuous",
            Self::Overrun => "overrun",
            Self::Unknown => "unknown",
            Self::Lossy => "lossy",
        })
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for session in &self.sessions {
            let kernel = plain(&session.kernel);
            writeln!(f, "session {} (Linux {kernel})", plain(&session.session))?;
            writeln!(
                f,
                "  {:>4} {:>9} {:>10} {:>13} {:>12} {:>10} {:>9} {:>7} {:>12}",
                "CPU",
                "frames",
                "pages",
                "bytes",
                "events",
                "doubled",
                "replayed",
                "lost",
                "overwritten"
            )?;
            for stream in &session.streams {
                writeln!(
                    f,
                    "  {:>4} {:>9} {:>10} {:>13} {:>12} {:>10} {:>9} {:>7} {:>12}",
                    stream.cpu,
                    stream.frames,
                    stream.pages,
                    stream.bytes,
                    stream.events,
                    stream.duplicates_dropped,
                    stream.replayed,
                    stream.lost_frames,
                    stream.overrun_events
                )?;
                if stream.overrun_before_start_uncounted {
                    writeln!(
                        f,
                        "       (the trail begins behind events that the guest's ring had overwritten by then, the kernel does not say how many)"
                    )?;
                } else if stream.overrun_before_start > 0 {
                    writeln!(
                        f,
                        "       (the trail begins behind {} events that the guest's ring had overwritten by then)",
                        stream.overrun_before_start
                    )?;
                }
            }
        }
        for migration in &self.migrations {
            write_migration(f, migration)?;
        }
        for loss in self.losses.iter().take(50) {
            write_loss(f, loss)?;
        }
        let more = self.losses.len().saturating_sub(50) as u64 + self.losses_not_listed;
        if more > 0 {
            writeln!(
                f,
                "… and {more} losses more (--json lists up to {MAX_LISTED})"
            )?;
        }
        for damage in &self.damage {
            writeln!(f, "damage: {}", plain(damage))?;
        }
        if self.being_recorded {
            writeln!(f, "being recorded: this is about what is stored so far")?;
        }
        writeln!(f, "verdict: {}", self.verdict)?;
        for reason in &self.reasons {
            writeln!(f, "  {}", plain(reason))?;
        }
        Ok(())
    }
}

fn write_migration(f: &mut fmt::Formatter<'_>, migration: &MigrationVerification) -> fmt::Result {
    let Some(ended) = &migration.ended else {
        return writeln!(
            f,
            "migration {}: the log does not say how it ended",
            migration.attempt
        );
    };
    let outcome = plain(&ended.outcome);
    write!(f, "migration {}: {outcome}", migration.attempt)?;
    let mut times = Vec::new();
    let ms = |ns: u64| format!("{}.{} ms", ns / 1_000_000, ns / 100_000 % 10);
    times.extend(ended.blackout_ns.map(|ns| format!("blackout {}", ms(ns))));
    times.extend(
        ended
            .qemu_downtime_ms
            .map(|downtime| format!("QEMU's downtime {downtime} ms")),
    );
    times.extend(ended.drain_ns.map(|ns| format!("drain {}", ms(ns))));
    times.extend(ended.reason.clone());
    if !times.is_empty() {
        write!(f, " ({})", plain(&times.join(", ")))?;
    }
    let phases: Vec<_> = (migration.phases.windows(2))
        .map(|pair| {
            format!(
                "{} {}",
                pair[0].phase,
                ms(pair[1].at_ns.saturating_sub(pair[0].at_ns))
            )
        })
        .collect();
    if !phases.is_empty() {
        write!(f, ": {}", plain(&phases.join(", ")))?;
    }
    writeln!(f)
}

fn write_loss(f: &mut fmt::Formatter<'_>, loss: &Loss) -> fmt::Result {
    write!(f, "lost: CPU {}, ", loss.cpu)?;
    match loss.kind {
        LossKind::Frames => write!(
            f,
            "frames {} to {}",
            loss.from.unwrap_or(0),
            loss.to.unwrap_or(1).saturating_sub(1)
        )?,
        LossKind::Overrun => match loss.events {
            Some(events) => write!(f, "{events} events")?,
            None => f.write_str("a number of events that the kernel did not say")?,
        },
    }
    if let Some(pages) = loss.pages {
        write!(f, " ({pages} pages)")?;
    }
    let seconds = |ns: u64| format!("{}.{:06}", ns / 1_000_000_000, ns / 1000 % 1_000_000);
    match (loss.after, loss.before) {
        (Some(after), Some(before)) => {
            write!(f, " between {} and {} s", seconds(after), seconds(before))?;
        }
        (Some(after), None) => write!(f, " after {} s", seconds(after))?,
        (None, Some(before)) => write!(f, " before {} s", seconds(before))?,
        (None, None) => {}
    }
    writeln!(f, ": {}", plain(&loss.cause))
}
