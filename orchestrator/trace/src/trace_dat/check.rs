//! A judge of files: reads one to its end and counts.

use std::collections::BTreeMap;
use std::io::{Read, Seek};

use super::{ReadError, TraceFile};
use crate::merge::Step;
use crate::ring_buffer::Missed;

/// What a file holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Events by `common_type`.
    pub events: BTreeMap<u16, u64>,
    /// Events by CPU.
    pub cpus: BTreeMap<u32, u64>,
    /// Events that the file says were lost: the sum of exact counts.
    pub missed: u64,
    /// Losses without a count.
    pub missed_unknown: u64,
    /// Pages or parts of them that cannot be read.
    pub damaged: u64,
    /// Records whose time is before that of the one before them on the same CPU.
    pub backwards: u64,
    /// First and last time.
    pub span: Option<(u64, u64)>,
}

impl Contents {
    /// Reads all buffers of a file.
    pub fn of<R: Read + Seek>(file: &TraceFile<R>) -> Result<Self, ReadError> {
        let mut contents = Self::default();
        for buffer in file.buffers() {
            let mut merge = file.merge(buffer);
            let mut last: BTreeMap<u32, u64> = BTreeMap::new();
            loop {
                match merge.advance()? {
                    Step::Event(entry) => {
                        *contents.events.entry(entry.type_id).or_default() += 1;
                        *contents.cpus.entry(entry.cpu).or_default() += 1;
                        match entry.missed {
                            Missed::None => {}
                            Missed::Unknown => contents.missed_unknown += 1,
                            Missed::Count(count) => {
                                contents.missed = contents.missed.saturating_add(count)
                            }
                        }
                        let before = last.insert(entry.cpu, entry.timestamp).unwrap_or(0);
                        contents.backwards += u64::from(entry.timestamp < before);
                        let (first, end) =
                            contents.span.unwrap_or((entry.timestamp, entry.timestamp));
                        contents.span =
                            Some((first.min(entry.timestamp), end.max(entry.timestamp)));
                    }
                    Step::Damaged { .. } => contents.damaged += 1,
                    Step::Waiting | Step::End => break,
                }
            }
        }
        Ok(contents)
    }

    /// All events.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.events.values().sum()
    }
}
