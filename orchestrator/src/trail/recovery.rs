//! From what a crash left to a trail that can be continued.
//!
//! What can be torn is known, because one batch is in flight at a time: the last batch of the last segment, that
//! segment's making, and the last piece of the event log. Those are cut. Anything else that is wrong was durable once;
//! it is reported and left as it is, because cutting it would destroy what follows.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use vmtrail_wire::{Epoch, Sequence, SessionId, StreamId};

use super::event::Event;
use super::format::{
    EVENT_LOG, EVENTS, MAX_EVENT_LINE, META, STREAMS, TrailId, index_name, segment_name,
    segment_number,
};
use super::reader::{EventLines, index_of, list_segments, scan};
use super::sink::{End, MAX_LOG_PIECE, Sealed};
use super::storage::{Access, Storage, StoredFile};
use super::{Recovery, ResumePoint, TrailError, io_error, metadata};

/// Mends the trail. The caller holds the lock.
pub(super) fn recover(
    storage: &Arc<dyn Storage>,
    trail: TrailId,
) -> Result<(Recovery, End), TrailError> {
    let mut recovery = Recovery::default();
    let log = recover_log(storage, &mut recovery)?;
    sweep(&**storage, &log)?;
    let end = recover_segments(storage, trail, &log, &mut recovery)?;
    let (manifests, _) = metadata::list(&**storage).map_err(io_error(&**storage, "list", META))?;
    // In order, so the newest of each session stays.
    recovery.metadata = manifests.into_iter().collect();
    Ok((recovery, end))
}

#[derive(Debug, Default)]
struct LogState {
    len: u64,
    /// Every segment up to this one was retired.
    retired_to: u64,
    resume: BTreeMap<(SessionId, StreamId), ResumePoint>,
}

fn recover_log(
    storage: &Arc<dyn Storage>,
    recovery: &mut Recovery,
) -> Result<LogState, TrailError> {
    let failed = |operation| io_error(&**storage, operation, EVENT_LOG);
    let file = match storage.open(EVENT_LOG, Access::Write) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            recovery
                .damage
                .push(format!("{EVENT_LOG} is missing; a new one is begun"));
            storage
                .open(EVENT_LOG, Access::Create)
                .map_err(failed("create"))?
        }
        file => file.map_err(failed("open"))?,
    };
    let file_len = file.len().map_err(failed("look at"))?;
    let closes_in_order = last_line_closes(&**storage, file_len)?;
    let mut state = LogState::default();
    let mut facts = Facts::default();
    let mut lines = EventLines::open(storage)?;
    while let Some(line) = lines.next()? {
        match line.content {
            Ok(content) => {
                facts.take(&content.event, &mut state);
                recovery.closed = content.event == Event::WriterClosed;
            }
            Err(why) => {
                let may_be_torn =
                    !closes_in_order && file_len.saturating_sub(state.len) <= MAX_LOG_PIECE as u64;
                if may_be_torn {
                    break;
                }
                recovery.damage.push(format!(
                    "line {} of {EVENT_LOG} cannot be read: {why}",
                    line.line
                ));
            }
        }
        state.len = line.end;
    }
    // Before anything that was only found is called durable. A line longer than a piece was a piece of its own.
    let from = (state.len).saturating_sub((MAX_LOG_PIECE + MAX_EVENT_LINE) as u64);
    rewrite(&*file, from, state.len).map_err(failed("write"))?;
    if state.len < file_len {
        recovery.closed = false;
        let cut = file_len - state.len;
        recovery.cut_bytes += cut;
        recovery
            .cuts
            .push(format!("{cut} bytes of a torn tail of {EVENT_LOG}"));
        file.set_len(state.len).map_err(failed("cut"))?;
    }
    file.sync().map_err(failed("sync"))?;
    storage
        .sync_dir(EVENTS)
        .map_err(io_error(&**storage, "sync directory", EVENTS))?;
    facts.finish(recovery);
    Ok(state)
}

/// Writes again what is there.
///
/// A writer that was killed leaves bytes that can be read and were never synced; one whose sync failed leaves bytes that
/// can be read, are clean, and are not on the disk. Both look durable to a reader, and a sync alone helps only the first.
fn rewrite(file: &dyn StoredFile, from: u64, to: u64) -> std::io::Result<()> {
    let mut buffer = vec![0; 128 << 10];
    let mut at = from;
    while at < to {
        let len = usize::try_from(to - at).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = file.read_at(&mut buffer[..len], at)?;
        if read == 0 {
            break;
        }
        file.write_all_at(&buffer[..read], at)?;
        at += read as u64;
    }
    Ok(())
}

/// Whether the log ends with a whole line that says that its writer closed it: then nothing of it is torn.
fn last_line_closes(storage: &dyn Storage, len: u64) -> Result<bool, TrailError> {
    let failed = |operation| io_error(storage, operation, EVENT_LOG);
    let file = storage
        .open(EVENT_LOG, Access::Read)
        .map_err(failed("open"))?;
    let mut tail = [0; 256];
    let from = len.saturating_sub(tail.len() as u64);
    let read = file.read_at(&mut tail, from).map_err(failed("read"))?;
    let Some(body) = tail[..read].strip_suffix(b"\n") else {
        return Ok(false);
    };
    let start = body
        .iter()
        .rposition(|&byte| byte == b'\n')
        .map_or(0, |newline| newline + 1);
    let line: Result<super::LogLine, _> = serde_json::from_slice(&body[start..]);
    Ok(line.is_ok_and(|line| line.event == Event::WriterClosed))
}

/// What the events say about where to go on.
#[derive(Debug, Default)]
struct Facts {
    sessions: Vec<super::event::Session>,
    residencies: Vec<super::event::Residency>,
    ended: BTreeSet<u64>,
    last_epoch: u64,
    last_attempt: u64,
    open_attempt: Option<u64>,
}

impl Facts {
    fn take(&mut self, event: &Event, state: &mut LogState) {
        match event {
            Event::Session(session) => {
                // An agent says who it is at every attachment.
                match self
                    .sessions
                    .iter_mut()
                    .find(|known| known.session == session.session)
                {
                    Some(known) => known.clone_from(session),
                    None => self.sessions.push(session.clone()),
                }
            }
            Event::Residency(residency) => self.residencies.push(residency.clone()),
            Event::ResidencyEnded { residency, .. } => {
                self.ended.insert(*residency);
            }
            Event::Attached { epoch, .. } => self.last_epoch = self.last_epoch.max(*epoch),
            Event::MigrationStarted { attempt, .. } => {
                self.last_attempt = self.last_attempt.max(*attempt);
                self.open_attempt = Some(*attempt);
            }
            Event::MigrationEnded(ended) if self.open_attempt == Some(ended.attempt) => {
                self.open_attempt = None;
            }
            Event::Retired {
                segment, streams, ..
            } => {
                state.retired_to = state.retired_to.max(*segment);
                for stream in streams {
                    let Ok(session) = u64::from_str_radix(&stream.session, 16) else {
                        continue;
                    };
                    state.resume.insert(
                        (SessionId(session), StreamId(stream.cpu)),
                        ResumePoint {
                            next: Sequence(stream.to),
                            next_page: stream.next_page,
                        },
                    );
                }
            }
            _ => {}
        }
    }

    fn finish(self, recovery: &mut Recovery) {
        recovery.open_residencies = self
            .residencies
            .iter()
            .map(|residency| residency.residency)
            .filter(|residency| !self.ended.contains(residency))
            .collect();
        recovery.sessions = self.sessions;
        recovery.residencies = self.residencies;
        recovery.last_epoch = Epoch(self.last_epoch);
        recovery.last_attempt = self.last_attempt;
        recovery.open_attempt = self.open_attempt;
    }
}

/// Removes what an interrupted writer left lying about: temporary files, and segments that the log calls retired.
fn sweep(storage: &dyn Storage, log: &LogState) -> Result<(), TrailError> {
    for dir in ["", STREAMS, META] {
        let names = match storage.list(dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                storage
                    .make_dir(dir)
                    .map_err(io_error(storage, "create", dir))?;
                continue;
            }
            names => names.map_err(io_error(storage, "list", dir))?,
        };
        for name in names {
            let is_retired = dir == STREAMS
                && segment_number(&name).is_some_and(|number| number <= log.retired_to);
            if name.ends_with(".tmp") || is_retired {
                let path = if dir.is_empty() {
                    name
                } else {
                    format!("{dir}/{name}")
                };
                storage
                    .remove(&path)
                    .map_err(io_error(storage, "remove", &path))?;
                if let Some(number) = path.strip_suffix(".seg") {
                    let _ = storage.remove(&format!("{number}.idx"));
                }
            }
        }
    }
    Ok(())
}

fn recover_segments(
    storage: &Arc<dyn Storage>,
    trail: TrailId,
    log: &LogState,
    recovery: &mut Recovery,
) -> Result<End, TrailError> {
    let mut end = End {
        sealed: VecDeque::new(),
        current: None,
        next_segment: log.retired_to + 1,
        next_batch: 0,
        previous_len: 0,
        log_len: log.len,
    };
    let mut resume = log.resume.clone();
    let segments = list_segments(&**storage)?;
    let last = segments.last().map(|segment| segment.number);
    for segment in segments {
        let number = segment.number;
        let mut index = if Some(number) == last {
            let scan = scan(storage, trail, number)?;
            recovery
                .damage
                .extend(scan.damage.iter().map(|damage| damage.text.clone()));
            if let Some(torn) = scan.torn {
                cut_segment(&**storage, number, torn.place.offset, torn.bytes, recovery)?;
                if torn.place.offset == 0 {
                    continue;
                }
            }
            if let Some(header) = &scan.header {
                let from = scan.last_batch.map_or(0, |batch| batch.offset);
                let name = segment_name(header.number);
                let failed = |operation| io_error(&**storage, operation, &name);
                let file = storage.open(&name, Access::Write).map_err(failed("open"))?;
                rewrite(&*file, from, scan.index.len).map_err(failed("write"))?;
                file.sync().map_err(failed("sync"))?;
                storage.sync_dir(STREAMS).map_err(io_error(
                    &**storage,
                    "sync directory",
                    STREAMS,
                ))?;
            }
            end.current = scan.header.map(|header| (header, scan.index.clone()));
            scan.index
        } else {
            index_of(storage, trail, number)?.0
        };
        if end.current.is_none() {
            index.len = segment.bytes;
            end.sealed.push_back(Sealed {
                number,
                len: index.len,
                last_written_ns: index.last_written_ns,
            });
        }
        end.next_segment = number + 1;
        end.next_batch = end.next_batch.max(index.next_batch);
        end.previous_len = index.len;
        for (&stream, span) in &index.streams {
            recovery.last_epoch = recovery.last_epoch.max(span.last_epoch);
            // In the trail's order, so the last word counts: a guest that was restored from a snapshot goes on lower.
            resume.insert(
                stream,
                ResumePoint {
                    next: span.to,
                    next_page: span.next_page,
                },
            );
        }
    }
    // A segment that ends in damage is not written further: its index would hide it.
    if let Some((_, index)) = &end.current {
        let name = segment_name(index.segment);
        let len = storage
            .open(&name, Access::Read)
            .and_then(|file| file.len())
            .map_err(io_error(&**storage, "look at", &name))?;
        if len != index.len {
            end.sealed.push_back(Sealed {
                number: index.segment,
                len,
                last_written_ns: index.last_written_ns,
            });
            end.previous_len = len;
            end.current = None;
        }
    }
    recovery.resume = resume;
    Ok(end)
}

fn cut_segment(
    storage: &dyn Storage,
    number: u64,
    offset: u64,
    bytes: u64,
    recovery: &mut Recovery,
) -> Result<(), TrailError> {
    let name = segment_name(number);
    let failed = |operation| io_error(storage, operation, &name);
    recovery.cut_bytes += bytes;
    if offset == 0 {
        // An empty file is a name that was in time and nothing else: there is nothing to say.
        if bytes > 0 {
            recovery.cuts.push(format!(
                "{name}, {bytes} bytes: it was being begun when the writer died"
            ));
        }
        storage.remove(&name).map_err(failed("remove"))?;
        let _ = storage.remove(&index_name(number));
        storage
            .sync_dir(STREAMS)
            .map_err(io_error(storage, "sync directory", STREAMS))?;
        return Ok(());
    }
    recovery.cuts.push(format!(
        "{bytes} bytes of a batch that was never acknowledged, at offset {offset} of {name}"
    ));
    let file = storage.open(&name, Access::Write).map_err(failed("open"))?;
    file.set_len(offset).map_err(failed("cut"))?;
    file.sync().map_err(failed("sync"))?;
    Ok(())
}
