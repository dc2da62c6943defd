//! From one order per CPU to one order over all.
//!
//! Each CPU's pages come in order, and so do the records in them; the earliest of the CPUs' next records is therefore
//! the earliest of all that will ever come. So a merge holds one page a CPU and nothing else: its memory does not grow
//! with the trace. Equal times go to the lower CPU, as in trace-cmd.
//!
//! A live source can be [`Pull::Pending`]: its next record is not there yet, and as long as that is so nothing can be
//! released, for the record to come may be the earliest. An idle CPU would hold up all the others for ever; whoever
//! knows that nothing earlier than some time can come any more (a heartbeat of the guest says so) tells it with
//! [`Merge::release_until`].

use std::collections::BinaryHeap;

use crate::report::Entry;
use crate::ring_buffer::{Cursor, Damage, Found, Missed, Page, PageError, PageLayout};

/// What a source of pages had to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pull {
    /// A page: the buffer holds it.
    Page,
    /// None now, perhaps later.
    Pending,
    /// None any more.
    End,
}

/// Pages of one CPU, in order.
pub trait PageSource {
    /// Why pages cannot be read.
    type Error;

    /// Puts the next page into `page` (clearing it first).
    fn next_page(&mut self, page: &mut Vec<u8>) -> Result<Pull, Self::Error>;
}

/// Pages that lie one behind the other in memory.
#[derive(Clone, Copy, Debug)]
pub struct SlicePages<'a> {
    bytes: &'a [u8],
    page_size: usize,
}

impl<'a> SlicePages<'a> {
    /// Pages of `layout`'s size in `bytes`; a rest that is no whole page is taken as a page cut short.
    #[must_use]
    pub const fn new(layout: PageLayout, bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            page_size: layout.page_size(),
        }
    }
}

impl PageSource for SlicePages<'_> {
    type Error = std::convert::Infallible;

    fn next_page(&mut self, page: &mut Vec<u8>) -> Result<Pull, Self::Error> {
        page.clear();
        if self.bytes.is_empty() {
            return Ok(Pull::End);
        }
        let (head, rest) = self.bytes.split_at(self.page_size.min(self.bytes.len()));
        page.extend_from_slice(head);
        self.bytes = rest;
        Ok(Pull::Page)
    }
}

/// One step of a merge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step<'a> {
    /// The next event in time.
    Event(Entry<'a>),
    /// A page, or the rest of one, that cannot be read. What follows on this CPU is still read.
    Damaged {
        /// The CPU.
        cpu: u32,
        /// Time of the last record before, or of the page.
        timestamp: u64,
        /// What is wrong.
        damage: PageDamage,
    },
    /// Nothing can be released before a pending source has given a page or [`Merge::release_until`] was told more.
    Waiting,
    /// All sources have ended.
    End,
}

/// What is wrong with a page. Finishes "failed to …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageDamage {
    /// Its header.
    #[error(transparent)]
    Header(#[from] PageError),
    /// A record in it.
    #[error(transparent)]
    Record(#[from] Damage),
}

/// Merges the records of several CPUs.
#[derive(Debug)]
pub struct Merge<S> {
    layout: PageLayout,
    streams: Vec<Stream<S>>,
    // Streams with a record, the earliest on top.
    heap: BinaryHeap<Head>,
    // The stream whose record was given last: it moves on in the next step.
    moving: Option<usize>,
    // Streams without a record: not begun, pending.
    starved: Vec<usize>,
    released_until: u64,
    ready: Ready,
    // Whether `ready` has been worked out and not yet given.
    peeked: bool,
}

/// What comes next.
#[derive(Clone, Copy, Debug)]
enum Ready {
    /// The current record of this stream, which is not in the heap.
    Event(usize),
    Damaged {
        cpu: u32,
        timestamp: u64,
        damage: PageDamage,
    },
    Waiting,
    End,
}

#[derive(Debug)]
struct Stream<S> {
    cpu: u32,
    source: S,
    page: Vec<u8>,
    data_offset: usize,
    data_end: usize,
    cursor: Cursor,
    current: Option<Found>,
    missed: Missed,
}

/// Order of a stream in the heap: a max-heap, so reversed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    timestamp: u64,
    stream: usize,
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.timestamp, other.stream).cmp(&(self.timestamp, self.stream))
    }
}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// What a stream came to when it moved on.
enum Moved {
    Record(u64),
    Pending,
    End,
    Damaged { timestamp: u64, damage: PageDamage },
}

impl<S: PageSource> Merge<S> {
    /// A merge over CPUs and their pages.
    #[must_use]
    pub fn new(layout: PageLayout, sources: impl IntoIterator<Item = (u32, S)>) -> Self {
        let streams: Vec<Stream<S>> = sources
            .into_iter()
            .map(|(cpu, source)| Stream {
                cpu,
                source,
                page: Vec::new(),
                data_offset: 0,
                data_end: 0,
                cursor: Cursor::new(layout.endian(), 0),
                current: None,
                missed: Missed::None,
            })
            .collect();
        Self {
            layout,
            starved: (0..streams.len()).rev().collect(),
            heap: BinaryHeap::with_capacity(streams.len()),
            streams,
            moving: None,
            released_until: 0,
            ready: Ready::End,
            peeked: false,
        }
    }

    /// Promises that no source will give a record earlier than `timestamp` any more: records up to it are released
    /// although sources are pending.
    pub fn release_until(&mut self, timestamp: u64) {
        self.released_until = self.released_until.max(timestamp);
    }

    /// The next event, or why there is none.
    #[inline]
    pub fn advance(&mut self) -> Result<Step<'_>, S::Error> {
        if !std::mem::take(&mut self.peeked) {
            self.prepare()?;
        }
        Ok(match std::mem::replace(&mut self.ready, Ready::End) {
            Ready::Event(index) => {
                self.moving = Some(index);
                self.give(index)
            }
            Ready::Damaged {
                cpu,
                timestamp,
                damage,
            } => Step::Damaged {
                cpu,
                timestamp,
                damage,
            },
            Ready::Waiting => Step::Waiting,
            Ready::End => Step::End,
        })
    }

    /// Works out what comes next, without giving it.
    #[inline]
    fn prepare(&mut self) -> Result<(), S::Error> {
        if let Some(index) = self.moving.take() {
            // The common case: the same CPU goes on, and the heap need not be touched.
            let Some(stream) = self.streams.get_mut(index) else {
                return Ok(());
            };
            match stream.advance(self.layout)? {
                Moved::Record(timestamp) => {
                    let head = Head {
                        timestamp,
                        stream: index,
                    };
                    if self.starved.is_empty() && self.heap.peek().is_none_or(|other| head > *other)
                    {
                        self.ready = Ready::Event(index);
                        return Ok(());
                    }
                    self.heap.push(head);
                }
                Moved::Pending => self.starved.push(index),
                Moved::End => {}
                Moved::Damaged { timestamp, damage } => {
                    let cpu = stream.cpu;
                    self.moving = Some(index);
                    self.ready = Ready::Damaged {
                        cpu,
                        timestamp,
                        damage,
                    };
                    return Ok(());
                }
            }
        }
        let mut waiting = 0;
        while let Some(place) = self.starved.len().checked_sub(1 + waiting) {
            let Some(&index) = self.starved.get(place) else {
                break;
            };
            let Some(stream) = self.streams.get_mut(index) else {
                break;
            };
            match stream.advance(self.layout)? {
                Moved::Record(timestamp) => {
                    self.heap.push(Head {
                        timestamp,
                        stream: index,
                    });
                    self.starved.swap_remove(place);
                }
                Moved::End => {
                    self.starved.swap_remove(place);
                }
                Moved::Pending => waiting += 1,
                Moved::Damaged { timestamp, damage } => {
                    self.ready = Ready::Damaged {
                        cpu: stream.cpu,
                        timestamp,
                        damage,
                    };
                    return Ok(());
                }
            }
        }
        self.ready = match self.heap.peek() {
            None if waiting > 0 => Ready::Waiting,
            None => Ready::End,
            Some(head) if waiting > 0 && head.timestamp > self.released_until => Ready::Waiting,
            Some(head) => {
                let index = head.stream;
                self.heap.pop();
                Ready::Event(index)
            }
        };
        Ok(())
    }

    /// The time of the event that [`Merge::advance`] would give next; `None` if it would give something else.
    ///
    /// Damage met on the way is kept for `advance`.
    #[inline]
    pub fn peek_time(&mut self) -> Result<Option<u64>, S::Error> {
        if !self.peeked {
            self.prepare()?;
            self.peeked = true;
        }
        Ok(match self.ready {
            Ready::Event(index) => self
                .streams
                .get(index)
                .and_then(|stream| stream.current)
                .map(|found| found.timestamp),
            _ => None,
        })
    }

    #[inline]
    fn give(&mut self, index: usize) -> Step<'_> {
        let Some(stream) = self.streams.get_mut(index) else {
            return Step::End;
        };
        let Some(found) = stream.current else {
            return Step::End;
        };
        let missed = std::mem::take(&mut stream.missed);
        let data = stream
            .page
            .get(stream.data_offset..stream.data_end)
            .unwrap_or_default();
        Step::Event(Entry {
            cpu: stream.cpu,
            timestamp: found.timestamp,
            type_id: found.type_id,
            payload: data.get(found.start..found.end).unwrap_or_default(),
            missed,
        })
    }
}

impl<S: PageSource> Stream<S> {
    #[inline]
    fn advance(&mut self, layout: PageLayout) -> Result<Moved, S::Error> {
        loop {
            let data = self
                .page
                .get(self.data_offset..self.data_end)
                .unwrap_or_default();
            match self.cursor.next(data) {
                Some(Ok(found)) => {
                    self.current = Some(found);
                    return Ok(Moved::Record(found.timestamp));
                }
                Some(Err(damage)) => {
                    let timestamp = self.cursor.timestamp();
                    return Ok(Moved::Damaged {
                        timestamp,
                        damage: damage.into(),
                    });
                }
                None => {}
            }
            match self.source.next_page(&mut self.page)? {
                Pull::Pending => return Ok(Moved::Pending),
                Pull::End => return Ok(Moved::End),
                Pull::Page => {}
            }
            match Page::parse(layout, &self.page) {
                Ok(page) => {
                    self.missed = self.missed.and_then(page.missed());
                    self.cursor = Cursor::new(layout.endian(), page.timestamp());
                    self.data_offset = layout.data_offset();
                    self.data_end = self.data_offset + page.data().len();
                }
                Err(error) => {
                    self.data_offset = 0;
                    self.data_end = 0;
                    let timestamp = self.cursor.timestamp();
                    return Ok(Moved::Damaged {
                        timestamp,
                        damage: error.into(),
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Endian;
    use crate::ring_buffer::build::page;

    fn layout() -> PageLayout {
        PageLayout::native64_le(4096).unwrap()
    }

    fn times<S: PageSource>(merge: &mut Merge<S>) -> Vec<(u64, u32)>
    where
        S::Error: std::fmt::Debug,
    {
        let mut times = Vec::new();
        loop {
            match merge.advance().unwrap() {
                Step::Event(entry) => times.push((entry.timestamp, entry.cpu)),
                Step::End => return times,
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn time_order_and_the_lower_cpu_first() {
        let layout = layout();
        let zero = [
            page(layout, 10, Missed::None, &[10, 30, 30]),
            page(layout, 50, Missed::None, &[50]),
        ]
        .concat();
        let one = page(layout, 5, Missed::None, &[5, 30, 60]);
        let mut merge = Merge::new(
            layout,
            [
                (0, SlicePages::new(layout, &zero)),
                (1, SlicePages::new(layout, &one)),
            ],
        );
        assert_eq!(
            times(&mut merge),
            [(5, 1), (10, 0), (30, 0), (30, 0), (30, 1), (50, 0), (60, 1)]
        );
    }

    #[test]
    fn losses_stay_with_the_event_behind_them() {
        let layout = layout();
        let pages = [
            page(layout, 1, Missed::None, &[1]),
            page(layout, 2, Missed::Count(7), &[]),
            page(layout, 3, Missed::Count(5), &[3, 4]),
        ]
        .concat();
        let mut merge = Merge::new(layout, [(0, SlicePages::new(layout, &pages))]);
        let mut missed = Vec::new();
        while let Step::Event(entry) = merge.advance().unwrap() {
            missed.push(entry.missed);
        }
        assert_eq!(missed, [Missed::None, Missed::Count(12), Missed::None]);
    }

    /// A source that gives its pages one by one, when told.
    struct Drip(Vec<Option<Vec<u8>>>);

    impl PageSource for Drip {
        type Error = std::convert::Infallible;

        fn next_page(&mut self, page: &mut Vec<u8>) -> Result<Pull, Self::Error> {
            match self.0.pop() {
                None => Ok(Pull::End),
                Some(None) => Ok(Pull::Pending),
                Some(Some(bytes)) => {
                    *page = bytes;
                    Ok(Pull::Page)
                }
            }
        }
    }

    #[test]
    fn a_pending_source_holds_up_what_it_might_precede() {
        let layout = layout();
        let one = |time| Some(page(layout, time, Missed::None, &[time]));
        let mut merge = Merge::new(
            layout,
            [
                (0, Drip(vec![one(20), None, None, None, one(10)])),
                (1, Drip(vec![one(30)])),
            ],
        );
        let mut seen = Vec::new();
        loop {
            match merge.advance().unwrap() {
                Step::Event(entry) => seen.push(entry.timestamp),
                Step::Waiting => {
                    seen.push(0);
                }
                Step::End => break,
                other @ Step::Damaged { .. } => panic!("{other:?}"),
            }
        }
        assert_eq!(seen, [10, 0, 0, 20, 30]);

        let mut merge = Merge::new(
            layout,
            [
                (0, Drip(vec![None, None, None, None])),
                (1, Drip(vec![one(40), one(30)])),
            ],
        );
        merge.release_until(35);
        assert!(matches!(
            merge.advance().unwrap(),
            Step::Event(Entry { timestamp: 30, .. })
        ));
        assert_eq!(merge.advance().unwrap(), Step::Waiting);
    }

    #[test]
    fn a_broken_page_does_not_end_its_cpu() {
        let layout = layout();
        let mut broken = page(layout, 2, Missed::None, &[2]);
        broken[8] = 0xff;
        broken[9] = 0xff;
        let pages = [
            page(layout, 1, Missed::None, &[1]),
            broken,
            page(layout, 3, Missed::None, &[3]),
        ]
        .concat();
        let mut merge = Merge::new(layout, [(0, SlicePages::new(layout, &pages))]);
        assert!(matches!(merge.advance().unwrap(), Step::Event(_)));
        assert!(matches!(
            merge.advance().unwrap(),
            Step::Damaged {
                cpu: 0,
                timestamp: 1,
                damage: PageDamage::Header(_)
            }
        ));
        assert!(matches!(
            merge.advance().unwrap(),
            Step::Event(Entry { timestamp: 3, .. })
        ));
        assert_eq!(merge.advance().unwrap(), Step::End);
        assert_eq!(layout.endian(), Endian::Little);
    }
}
