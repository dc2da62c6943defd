//! What is in a trail: the VM, where it lived, who spoke, how much there is.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::trail::Entry;
use crate::trail::event::{Event, MigrationEnded, Residency, Session};
use crate::trail::{TrailError, TrailReader, VmIdentity};

/// Everything that `vmtrail info` shows.
#[derive(Debug, Clone, Serialize)]
pub struct Info {
    /// The directory.
    pub trail: String,
    /// Version of the store.
    pub store_version: u32,
    /// vmtrail that made it.
    pub vmtrail: String,
    /// The VM.
    pub vm: VmIdentity,
    /// When it was made, nanoseconds since the Unix epoch.
    pub created_ns: u64,
    /// Whether somebody writes to it now.
    pub being_recorded: bool,
    /// Segments.
    pub segments: usize,
    /// Their bytes.
    pub segment_bytes: u64,
    /// Bytes of metadata.
    pub metadata_bytes: u64,
    /// Each QEMU process that carried the VM, in order.
    pub residencies: Vec<ResidencyInfo>,
    /// Each run of the agent, in order.
    pub sessions: Vec<SessionInfo>,
    /// Each ended attempt to move the VM.
    pub migrations: Vec<MigrationEnded>,
    /// What the log notes besides.
    pub notes: Vec<String>,
}

/// One QEMU process.
#[derive(Debug, Clone, Serialize)]
pub struct ResidencyInfo {
    /// What it is.
    #[serde(flatten)]
    pub residency: Residency,
    /// When it began.
    pub began_ns: u64,
    /// When it ended.
    pub ended_ns: Option<u64>,
    /// Why.
    pub end: Option<String>,
}

/// One run of the agent.
#[derive(Debug, Clone, Serialize)]
pub struct SessionInfo {
    /// What it is.
    #[serde(flatten)]
    pub session: Session,
    /// Generations of complete metadata.
    pub metadata: Vec<u32>,
    /// Its streams.
    pub streams: Vec<StreamInfo>,
}

/// One stream.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct StreamInfo {
    /// CPU.
    pub cpu: u32,
    /// Frames.
    pub frames: u64,
    /// Pages.
    pub pages: u64,
    /// Bytes of the pages.
    pub bytes: u64,
    /// Guest `CLOCK_MONOTONIC` when the first frame was cut.
    pub first_sent_ns: u64,
    /// Guest `CLOCK_MONOTONIC` when the last frame was cut.
    pub last_sent_ns: u64,
}

/// Reads headers and log; pages are passed over.
///
/// # Errors
///
/// The filesystem refused.
pub fn info(reader: &TrailReader) -> Result<Info, TrailError> {
    let segments = reader.segments()?;
    let (manifests, metadata_bytes) = reader.manifests()?;
    let file = reader.file();
    let mut info = Info {
        trail: reader.place().display().to_string(),
        store_version: file.version,
        vmtrail: file.vmtrail.clone(),
        vm: file.vm.clone(),
        created_ns: file.created_ns,
        being_recorded: reader.writer()?.is_some(),
        segments: segments.len(),
        segment_bytes: segments.iter().map(|segment| segment.bytes).sum(),
        metadata_bytes,
        residencies: Vec::new(),
        sessions: Vec::new(),
        migrations: Vec::new(),
        notes: Vec::new(),
    };
    let mut lines = reader.events()?;
    while let Some(line) = lines.next()? {
        if let Ok(line) = line.content {
            info.take(line.at_ns, line.event);
        }
    }
    for session in &mut info.sessions {
        session.metadata = (manifests.iter())
            .filter(|(id, _)| id.to_string() == session.session.session)
            .map(|(_, generation)| *generation)
            .collect();
    }
    info.count_streams(reader)?;
    Ok(info)
}

impl Info {
    fn take(&mut self, at_ns: u64, event: Event) {
        match event {
            Event::Residency(residency) => self.residencies.push(ResidencyInfo {
                residency,
                began_ns: at_ns,
                ended_ns: None,
                end: None,
            }),
            Event::ResidencyEnded { residency, reason } => {
                if let Some(info) = self
                    .residencies
                    .iter_mut()
                    .rfind(|info| info.residency.residency == residency)
                {
                    info.ended_ns = Some(at_ns);
                    info.end = Some(reason);
                }
            }
            Event::Session(session) => {
                // The same session again means that its clock was changed.
                self.sessions
                    .retain(|known| known.session.session != session.session);
                self.sessions.push(SessionInfo {
                    session,
                    metadata: Vec::new(),
                    streams: Vec::new(),
                });
            }
            Event::MigrationEnded(ended) => self.migrations.push(ended),
            Event::Note { text } => self.notes.push(text),
            _ => {}
        }
    }

    fn count_streams(&mut self, reader: &TrailReader) -> Result<(), TrailError> {
        let mut streams: BTreeMap<(String, u32), StreamInfo> = BTreeMap::new();
        let mut frames = reader.frames().headers_only();
        while let Some(entry) = frames.next()? {
            let Entry::Frame(frame) = entry else { continue };
            let Some(cpu) = frame.header.stream.cpu() else {
                continue;
            };
            let stream = streams
                .entry((frame.header.session.to_string(), cpu))
                .or_insert_with(|| StreamInfo {
                    cpu,
                    first_sent_ns: frame.header.sent_ns,
                    ..StreamInfo::default()
                });
            stream.frames += 1;
            stream.pages += u64::from(frame.header.page_count);
            stream.bytes += u64::from(frame.header.payload_len);
            stream.last_sent_ns = frame.header.sent_ns;
        }
        for ((name, _), stream) in streams {
            if let Some(session) = self
                .sessions
                .iter_mut()
                .find(|session| session.session.session == name)
            {
                session.streams.push(stream);
            }
        }
        Ok(())
    }
}

/// Text for a terminal. Much of a trail is the guest's word, which may hold what makes a terminal do things.
pub(crate) fn plain(text: &str) -> String {
    let is_harmless = |c: &char| !c.is_control() && !('\u{202a}'..='\u{202e}').contains(c);
    text.chars()
        .map(|c| if is_harmless(&c) { c } else { '\u{fffd}' })
        .collect()
}

impl fmt::Display for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| format!("{}.{} MiB", bytes >> 20, ((bytes & 0xf_ffff) * 10) >> 20);
        writeln!(
            f,
            "trail {}{}",
            self.trail,
            if self.being_recorded {
                " (being recorded)"
            } else {
                ""
            }
        )?;
        writeln!(
            f,
            "VM {}, uuid {}",
            plain(self.vm.name.as_deref().unwrap_or("without a name")),
            plain(self.vm.uuid.as_deref().unwrap_or("none"))
        )?;
        writeln!(
            f,
            "{} segments, {}; metadata {}; store version {} by vmtrail {}",
            self.segments,
            mib(self.segment_bytes),
            mib(self.metadata_bytes),
            self.store_version,
            plain(&self.vmtrail)
        )?;
        for info in &self.residencies {
            let residency = &info.residency;
            write!(
                f,
                "residency {}: {} on {} (QEMU {}, pid {})",
                residency.residency,
                plain(&residency.cause),
                plain(&residency.host),
                plain(&residency.qemu),
                residency
                    .pid
                    .map_or_else(|| "?".to_owned(), |pid| pid.to_string())
            )?;
            if let Some(parent) = residency.parent {
                write!(f, ", from {parent}")?;
            }
            writeln!(
                f,
                ": {}",
                plain(info.end.as_deref().unwrap_or("no end yet"))
            )?;
        }
        for info in &self.sessions {
            let session = &info.session;
            writeln!(
                f,
                "session {}: Linux {}, agent {}, clock {}, {} CPUs, pages of {} bytes, metadata {}",
                plain(&session.session),
                plain(&session.kernel),
                plain(&session.agent),
                plain(&session.clock),
                session.cpus,
                session.page_size,
                if info.metadata.is_empty() {
                    "incomplete"
                } else {
                    "complete"
                }
            )?;
            for stream in &info.streams {
                writeln!(
                    f,
                    "  CPU {}: {} frames, {} pages, {}, over {} ms",
                    stream.cpu,
                    stream.frames,
                    stream.pages,
                    mib(stream.bytes),
                    stream.last_sent_ns.saturating_sub(stream.first_sent_ns) / 1_000_000
                )?;
            }
        }
        for ended in &self.migrations {
            writeln!(f, "migration {}: {}", ended.attempt, plain(&ended.outcome))?;
        }
        for note in &self.notes {
            writeln!(f, "note: {}", plain(note))?;
        }
        Ok(())
    }
}
