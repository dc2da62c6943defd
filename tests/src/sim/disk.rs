//! A disk: what is written, what of it is synced, and what a crash leaves.

use std::collections::BTreeMap;

use vmtrail_continuity::ledger::ResumePoint;
use vmtrail_wire::{Epoch, Sequence, SessionId};

use super::mutation::Mutation;
use super::rng::Rng;
use crate::check::page::PAGE_SIZE;
use crate::check::{Entry, Stream, Violation, recovery};

/// The trail of one VM.
#[derive(Debug, Default)]
pub(super) struct Disk {
    pub(super) entries: Vec<Entry>,
    pub(super) synced: usize,
    /// What of each stream is synced.
    pub(super) durable: BTreeMap<Stream, Sequence>,
    /// Pages of each stream that are synced.
    pub(super) pages: BTreeMap<Stream, u64>,
    /// Newest overrun of each stream that is synced.
    pub(super) overrun: BTreeMap<(SessionId, u32), u64>,
}

impl Disk {
    /// Everything below `until` is synced.
    pub(super) fn sync(&mut self, until: usize) {
        for entry in &self.entries[self.synced..until] {
            match entry {
                Entry::Frame { header, .. } => {
                    let stream = (header.session, header.stream);
                    let next = self.durable.entry(stream).or_default();
                    *next = (*next).max(header.sequence.next());
                    *self.pages.entry(stream).or_default() += u64::from(header.page_count);
                }
                Entry::Gap(gap) => {
                    let next = self.durable.entry((gap.session, gap.stream)).or_default();
                    *next = (*next).max(gap.to);
                }
                Entry::Overrun { session, by_cpu } => {
                    for &(cpu, count) in by_cpu {
                        self.overrun.insert((*session, cpu), count);
                    }
                }
                Entry::Fork { .. } | Entry::Attached(_) => {}
            }
        }
        self.synced = until;
    }

    /// The recorder dies, maybe with its host: of what is not synced any prefix survives, its last frame maybe torn. Recovery
    /// keeps what is whole, syncs it, and the judge looks.
    pub(super) fn crash_and_recover(
        &mut self,
        rng: &mut Rng,
        torn: bool,
        mutation: Option<Mutation>,
    ) -> Result<(), Violation> {
        let written = self.entries.clone();
        let keep = if torn {
            rng.len(self.synced, self.entries.len())
        } else {
            self.entries.len()
        };
        self.entries.truncate(keep);
        // What is torn carries its header, and not all of its pages.
        if torn && let Some(Entry::Frame { header, pages }) = written.get(keep) {
            let mut pages = pages.clone();
            pages.truncate(rng.len(0, pages.len() / PAGE_SIZE - 1) * PAGE_SIZE);
            self.entries.push(Entry::Frame {
                header: *header,
                pages,
            });
        }
        let is_whole = |entry: &Entry| match entry {
            Entry::Frame { header, pages } => pages.len() == header.payload_len as usize,
            _ => true,
        };
        if mutation != Some(Mutation::RecoveryKeepsTorn)
            && self.entries.last().is_some_and(|last| !is_whole(last))
        {
            self.entries.pop();
        }
        if mutation == Some(Mutation::RecoveryCutsSynced) {
            self.entries.pop();
        }
        recovery::judge(&written, self.synced, &self.entries)?;
        self.sync(self.entries.len());
        Ok(())
    }

    /// Where to go on with each stream, and the newest epoch, as a recovery tells it.
    pub(super) fn resume(&self) -> (Vec<(Stream, ResumePoint)>, Epoch) {
        let mut points: BTreeMap<Stream, ResumePoint> = BTreeMap::new();
        let mut newest = Epoch(0);
        for entry in &self.entries {
            match entry {
                Entry::Frame { header, .. } => {
                    let point = ResumePoint {
                        next: header.sequence.next(),
                        next_page: header.first_page + u64::from(header.page_count),
                    };
                    points.insert((header.session, header.stream), point);
                }
                Entry::Attached(epoch) => newest = newest.max(*epoch),
                _ => {}
            }
        }
        (points.into_iter().collect(), newest)
    }
}
