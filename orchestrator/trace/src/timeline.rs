//! What a writer is given: the events of all CPUs, and between them what happened to the machine itself.
//!
//! Migrations, blackouts, marks and losses are events of their own ([`Note`]), put where they happened. A writer that
//! does not know a kind of note still gets it; nothing is smoothed over by being left out.

use std::collections::VecDeque;

use crate::merge::{Merge, PageDamage, PageSource, Step};
use crate::report::Entry;
use crate::ring_buffer::Missed;
use crate::text::{push_decimal, push_decimal_right, push_decimal_zeroed};

/// Something that happened to the traced machine or its trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// When, on the clock of the timeline.
    pub timestamp: u64,
    /// What.
    pub kind: NoteKind,
}

/// Kinds of notes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoteKind {
    /// A process on a host begins to carry the machine.
    ResidencyBegin {
        /// The host.
        host: String,
        /// What it came from: boot, migration, restore.
        cause: String,
    },
    /// It ends.
    ResidencyEnd {
        /// The host.
        host: String,
    },
    /// A migration begins.
    MigrationBegin {
        /// The host it leaves.
        from: String,
        /// The host it goes to.
        to: String,
    },
    /// A migration ends.
    MigrationEnd {
        /// How: completed, failed, cancelled.
        outcome: String,
    },
    /// The machine stands still from here on.
    BlackoutBegin,
    /// It runs again.
    BlackoutEnd {
        /// How long it stood, in nanoseconds of host time: on the guest's clock no time may have passed at all.
        duration_ns: u64,
    },
    /// A line somebody wrote into the trace.
    Mark {
        /// The line.
        text: String,
    },
    /// Something is missing.
    Loss {
        /// The CPU, `None` for all.
        cpu: Option<u32>,
        /// Whole pages.
        pages: Missed,
        /// Events, where known.
        events: Missed,
        /// Why.
        cause: String,
    },
}

impl NoteKind {
    /// A word for the kind, as an event's name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::ResidencyBegin { .. } => "residency_begin",
            Self::ResidencyEnd { .. } => "residency_end",
            Self::MigrationBegin { .. } => "migration_begin",
            Self::MigrationEnd { .. } => "migration_end",
            Self::BlackoutBegin => "blackout_begin",
            Self::BlackoutEnd { .. } => "blackout_end",
            Self::Mark { .. } => "mark",
            Self::Loss { .. } => "loss",
        }
    }

    /// What it says, in words.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::ResidencyBegin { host, cause } => format!("host={host} cause={cause}"),
            Self::ResidencyEnd { host } => format!("host={host}"),
            Self::MigrationBegin { from, to } => format!("from={from} to={to}"),
            Self::MigrationEnd { outcome } => format!("outcome={outcome}"),
            Self::BlackoutBegin => String::new(),
            Self::BlackoutEnd { duration_ns } => {
                format!(
                    "duration={}.{:06}ms",
                    duration_ns / 1_000_000,
                    duration_ns % 1_000_000
                )
            }
            Self::Mark { text } => text.clone(),
            Self::Loss {
                cpu,
                pages,
                events,
                cause,
            } => {
                let cpu = cpu.map_or_else(|| "all".to_owned(), |cpu| cpu.to_string());
                format!(
                    "cpu={cpu} pages={} events={} cause={cause}",
                    count(*pages),
                    count(*events)
                )
            }
        }
    }
}

fn count(missed: Missed) -> String {
    match missed {
        Missed::None => "0".to_owned(),
        Missed::Unknown => "unknown".to_owned(),
        Missed::Count(count) => count.to_string(),
    }
}

impl Note {
    /// Appends the note as a line of a text report: the pseudo task `<vmtrail>` on no CPU.
    pub fn write_line(&self, nanoseconds: bool, out: &mut Vec<u8>) {
        out.extend_from_slice(b"       <vmtrail>-0     [---]");
        if nanoseconds {
            let micros = self.timestamp.saturating_add(500) / 1000;
            out.push(b' ');
            push_decimal_right(out, micros / 1_000_000, 5);
            out.push(b'.');
            push_decimal_zeroed(out, micros % 1_000_000, 6);
        } else {
            push_decimal(out, self.timestamp);
        }
        out.extend_from_slice(b": ");
        let name = self.kind.name();
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b": ");
        crate::text::push_repeated(out, b' ', 20_usize.saturating_sub(name.len()));
        // One line, whatever a mark contains.
        out.extend(
            self.kind
                .text()
                .bytes()
                .map(|byte| if byte == b'\n' { b' ' } else { byte }),
        );
        out.push(b'\n');
    }
}

/// From a machine's clock to another one, piece by piece: each residency of a guest has its own relation to host time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimeMap {
    // Sorted by the first time they hold for.
    pieces: Vec<(u64, i64)>,
}

impl TimeMap {
    /// From pieces: a time, and what to add to it and to all later ones up to the next piece. Times before the first
    /// piece are mapped by the first.
    #[must_use]
    pub fn new(pieces: impl IntoIterator<Item = (u64, i64)>) -> Self {
        let mut pieces: Vec<(u64, i64)> = pieces.into_iter().collect();
        pieces.sort_by_key(|(from, _)| *from);
        Self { pieces }
    }

    /// `time` on the other clock.
    #[inline]
    #[must_use]
    pub fn map(&self, time: u64) -> u64 {
        let after = self.pieces.partition_point(|(from, _)| *from <= time);
        match self.pieces.get(after.saturating_sub(1)) {
            Some((_, offset)) => time.wrapping_add_signed(*offset),
            None => time,
        }
    }
}

/// One item of a timeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Item<'a> {
    /// An event of a CPU, its time mapped.
    Event(Entry<'a>),
    /// Something that happened to the machine.
    Note(&'a Note),
    /// A page that cannot be read.
    Damaged {
        /// The CPU.
        cpu: u32,
        /// Time before it.
        timestamp: u64,
        /// What is wrong.
        damage: PageDamage,
    },
    /// Nothing yet: see [`Step::Waiting`].
    Waiting,
    /// All is told.
    End,
}

/// Events and notes in time order. Memory: one page a CPU, and the notes.
#[derive(Debug)]
pub struct Timeline<S> {
    merge: Merge<S>,
    map: TimeMap,
    notes: VecDeque<Note>,
    // A note given last, kept so that it can be borrowed.
    given: Option<Note>,
    span: Option<(u64, u64)>,
}

impl<S: PageSource> Timeline<S> {
    /// A timeline of a merge's events. Notes are in the mapped clock, in any order.
    #[must_use]
    pub fn new(merge: Merge<S>, map: TimeMap, notes: impl IntoIterator<Item = Note>) -> Self {
        let mut notes: Vec<Note> = notes.into_iter().collect();
        notes.sort_by_key(|note| note.timestamp);
        Self {
            merge,
            map,
            notes: notes.into(),
            given: None,
            span: None,
        }
    }

    /// Only what lies between two times (both included), on the mapped clock.
    #[must_use]
    pub fn between(mut self, from: u64, to: u64) -> Self {
        self.span = Some((from, to));
        self
    }

    /// Puts in a note that has become known meanwhile. One that is earlier than what was already given comes next.
    pub fn add_note(&mut self, note: Note) {
        let at = self
            .notes
            .partition_point(|other| other.timestamp <= note.timestamp);
        self.notes.insert(at, note);
    }

    /// As [`Merge::release_until`], in the unmapped clock.
    pub fn release_until(&mut self, timestamp: u64) {
        self.merge.release_until(timestamp);
    }

    /// The next item.
    #[inline]
    pub fn advance(&mut self) -> Result<Item<'_>, S::Error> {
        loop {
            let upcoming = self.merge.peek_time()?.map(|time| self.map.map(time));
            if let Some(note) = self.notes.front() {
                // At equal times the note first: a residency begins before its first event.
                if upcoming.is_none_or(|time| note.timestamp <= time) {
                    let note = self.notes.pop_front();
                    let wanted = note.as_ref().is_some_and(|note| self.wants(note.timestamp));
                    self.given = note;
                    if wanted {
                        return Ok(self.given.as_ref().map_or(Item::End, Item::Note));
                    }
                    continue;
                }
            }
            let mapped = upcoming.is_some_and(|time| !self.wants(time));
            if mapped {
                self.merge.advance()?;
                continue;
            }
            return Ok(match self.merge.advance()? {
                Step::Event(entry) => Item::Event(Entry {
                    timestamp: self.map.map(entry.timestamp),
                    ..entry
                }),
                Step::Damaged {
                    cpu,
                    timestamp,
                    damage,
                } => Item::Damaged {
                    cpu,
                    timestamp: self.map.map(timestamp),
                    damage,
                },
                Step::Waiting => Item::Waiting,
                Step::End => Item::End,
            });
        }
    }

    fn wants(&self, timestamp: u64) -> bool {
        self.span
            .is_none_or(|(from, to)| (from..=to).contains(&timestamp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::merge::SlicePages;
    use crate::ring_buffer::PageLayout;
    use crate::ring_buffer::build::page;

    fn mark(timestamp: u64) -> Note {
        Note {
            timestamp,
            kind: NoteKind::Mark { text: "m".into() },
        }
    }

    fn run(mut timeline: Timeline<SlicePages<'_>>) -> Vec<(char, u64)> {
        let mut seen = Vec::new();
        loop {
            match timeline.advance().unwrap() {
                Item::Event(entry) => seen.push(('e', entry.timestamp)),
                Item::Note(note) => seen.push(('n', note.timestamp)),
                Item::End => return seen,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn notes_stand_where_they_happened() {
        let layout = PageLayout::native64_le(4096).unwrap();
        let pages = page(layout, 10, Missed::None, &[10, 20, 30]);
        let merge = || Merge::new(layout, [(0, SlicePages::new(layout, &pages))]);
        let notes = || [mark(120), mark(100), mark(500)];
        // From 20 on the machine is elsewhere, 1000 later.
        let map = TimeMap::new([(20, 1000), (0, 100)]);
        let timeline = Timeline::new(merge(), map.clone(), notes());
        assert_eq!(
            run(timeline),
            [
                ('n', 100),
                ('e', 110),
                ('n', 120),
                ('n', 500),
                ('e', 1020),
                ('e', 1030)
            ]
        );
        let timeline = Timeline::new(merge(), map, notes()).between(115, 1020);
        assert_eq!(run(timeline), [('n', 120), ('n', 500), ('e', 1020)]);
    }

    #[test]
    fn a_note_is_one_line() {
        let mut out = Vec::new();
        let kind = NoteKind::Loss {
            cpu: Some(1),
            pages: Missed::Count(2),
            events: Missed::Unknown,
            cause: "store\nfull".into(),
        };
        Note {
            timestamp: 1_500_000_499,
            kind,
        }
        .write_line(true, &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "       <vmtrail>-0     [---]     1.500000: loss:                 cpu=1 pages=2 events=unknown cause=store full\n"
        );
    }
}
