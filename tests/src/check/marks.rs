//! The judge of completeness: the marks that the guest's workload numbered itself.
//!
//! It reads what lies on the disk and believes nothing that vmtrail counts. Of a trail's frames it uses the CPU, the
//! page size and the length; never a sequence number, an epoch, a page count of the ledger or a manifest. So a bug in the
//! ledger that loses, doubles or swaps a page shows up here as numbers that are missing, doubled or swapped, whatever
//! `vmtrail verify` says.
//!
//! What it asks of each CPU: every number from the first to the last is there exactly once and in order, or lies inside
//! a loss that was declared, with a count that covers it ([`judge`]).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use anyhow::{Context as _, Result};
use vmtrail_trace::ring_buffer::{MarkerFormat, Page, PageLayout};
use vmtrail_wire::{FrameHeader, HEADER_SIZE, Kind, frame};

/// `ftrace/print` has had number 5 (`TRACE_PRINT`, kernel/trace/trace.h) and its text behind eight common bytes and an
/// 8-byte address since there is a `trace_marker`. Written down here and not read from the trail, which is judged.
const PRINT: MarkerFormat = MarkerFormat {
    type_id: 5,
    text_offset: 16,
};

const MARK: &str = "vmtrail-mark cpu=";

/// How far apart in time two neighbouring pages may be for a torn raw stream to be believed in step again.
const RESYNC_REACH_NS: u64 = 600_000_000_000;

/// A mark as it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Its number.
    pub seq: u64,
    /// When the guest's trace clock says it was written, in nanoseconds.
    pub at: u64,
}

/// What was found of each CPU, in the order it is stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The marks by CPU.
    pub marks: BTreeMap<u32, Vec<Mark>>,
    /// Whole pages.
    pub pages: u64,
    /// Bytes of whole pages.
    pub bytes: u64,
    /// Events of any kind in them.
    pub events: u64,
    /// What is wrong with the bytes themselves, one sentence each. Torn pages are told here.
    pub damage: Vec<String>,
}

impl Evidence {
    /// Reads every frame below `trail/streams`, file by file in the order of their names.
    ///
    /// Frames are found by the magic and checksum of their header, wherever they lie: what a store puts around them is its
    /// own matter.
    ///
    /// # Errors
    ///
    /// If the directory or a file cannot be read.
    pub fn of_trail(trail: &Path) -> Result<Self> {
        let mut files = Vec::new();
        collect_files(&trail.join("streams"), &mut files)?;
        files.sort();
        let mut evidence = Self::default();
        for file in files {
            let bytes = fs::read(&file)
                .with_context(|| format!("failed to read the segment {}", file.display()))?;
            evidence.add_frames(&bytes);
        }
        Ok(evidence)
    }

    /// Adds the pages of every frame in `bytes`.
    pub fn add_frames(&mut self, bytes: &[u8]) {
        let mut at = 0;
        while let Some(step) = find(&bytes[at..], &frame::MAGIC) {
            at += step;
            let Some(page) = bytes[at..].first_chunk::<HEADER_SIZE>() else {
                break;
            };
            let Ok(header) = FrameHeader::check(page) else {
                // The magic alone proves nothing: trace data may contain it.
                at += 1;
                continue;
            };
            let whole = bytes[at..].get(HEADER_SIZE..header.frame_len());
            if let (Kind::Pages, Some(cpu)) = (header.kind, header.stream.cpu()) {
                match (whole, PageLayout::native64_le(header.page_size)) {
                    (Some(payload), Ok(layout)) => {
                        for page in payload.chunks(layout.page_size()) {
                            self.add_page(cpu, layout, page);
                        }
                    }
                    (None, _) => self.damage.push(format!("a frame of CPU {cpu} is cut off")),
                    (_, Err(error)) => self.damage.push(format!("CPU {cpu}: failed to {error}")),
                }
            }
            at = at.saturating_add(header.frame_len()).min(bytes.len());
        }
    }

    /// Adds the pages of a raw stream of one CPU: `trace_pipe_raw` as something copied it, page behind page.
    ///
    /// A reader that comes late starts within a page, and one that leaves loses the end of one, so the stream is put in step
    /// again at the next place where a whole page makes sense and follows in time.
    pub fn add_raw(&mut self, cpu: u32, bytes: &[u8], page_size: u32) {
        let Ok(layout) = PageLayout::native64_le(page_size) else {
            self.damage.push(format!("{page_size} is no page size"));
            return;
        };
        let mut at = 0;
        let mut torn = 0_u64;
        let mut last_time = None;
        // In step, a page without a record is a page: a reader may copy one that nothing was committed to yet.
        let mut in_step = false;
        while let Some(page) = bytes.get(at..at + layout.page_size()) {
            if let Some(time) = believable(layout, page, last_time, in_step) {
                self.add_page(cpu, layout, page);
                last_time = Some(time);
                in_step = true;
                at += layout.page_size();
            } else {
                torn += 1;
                in_step = false;
                at += 1;
            }
        }
        torn += u64::try_from(bytes.len() - at).unwrap_or(u64::MAX);
        if torn > 0 {
            self.damage
                .push(format!("CPU {cpu}: {torn} bytes belong to no whole page"));
        }
    }

    fn add_page(&mut self, cpu: u32, layout: PageLayout, bytes: &[u8]) {
        let page = match Page::parse(layout, bytes) {
            Ok(page) => page,
            Err(error) => {
                self.damage.push(format!("CPU {cpu}: failed to {error}"));
                return;
            }
        };
        self.pages += 1;
        self.bytes += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        for record in page.records() {
            let record = match record {
                Ok(record) => record,
                Err(error) => {
                    self.damage.push(format!("CPU {cpu}: failed to {error}"));
                    return;
                }
            };
            self.events += 1;
            let Some((says, seq)) = PRINT.text(&record).and_then(parse_mark) else {
                continue;
            };
            if says != cpu {
                self.damage.push(format!(
                    "mark {seq} of CPU {says} lies in the stream of CPU {cpu}"
                ));
            }
            self.marks.entry(cpu).or_default().push(Mark {
                seq,
                at: record.timestamp,
            });
        }
    }
}

/// A loss that vmtrail declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loss {
    /// Of which CPU.
    pub cpu: u32,
    /// How many events, where known.
    pub events: Option<u64>,
    /// Guest time of the last event before it, where known.
    pub after: Option<u64>,
    /// Guest time of the first event behind it, where known.
    pub before: Option<u64>,
}

impl Loss {
    /// Whether it lies within the gap: the marks around a gap are outside of, or at the edge of, the loss that made it.
    fn lies_in(&self, cpu: u32, gap: &Gap) -> bool {
        let within = |at: u64| (gap.before.at..=gap.after.at).contains(&at);
        self.cpu == cpu && self.after.is_none_or(within) && self.before.is_none_or(within)
    }
}

/// Numbers that are nowhere, between two that are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gap {
    /// The last number before it.
    pub before: Mark,
    /// The first number behind it.
    pub after: Mark,
    /// Whether losses were declared there that count no fewer events than numbers are missing.
    pub declared: bool,
}

impl Gap {
    /// How many numbers are missing.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.after.seq - self.before.seq - 1
    }
}

/// What the judge says of one CPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuFinding {
    /// Smallest number found.
    pub first: u64,
    /// Largest number found.
    pub last: u64,
    /// Different numbers found.
    pub found: u64,
    /// Numbers between first and last that are nowhere.
    pub gaps: Vec<Gap>,
    /// Numbers found more often than once, each counted once.
    pub doubled: u64,
    /// Marks that stand behind a larger one, doubled ones apart.
    pub out_of_order: u64,
    /// The number that the guest says it wrote last, where it was asked.
    pub guest_last: Option<u64>,
    /// Declared losses of this CPU cover fewer events than are missing.
    pub declared_too_few: bool,
}

impl CpuFinding {
    /// Numbers that are nowhere.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.gaps.iter().map(Gap::missing).sum()
    }

    /// Numbers that are nowhere and that nobody declared.
    #[must_use]
    pub fn undeclared(&self) -> u64 {
        if self.declared_too_few {
            return self.missing();
        }
        self.gaps
            .iter()
            .filter(|gap| !gap.declared)
            .map(Gap::missing)
            .sum()
    }

    /// Numbers behind the last one found that the guest wrote.
    #[must_use]
    pub fn missing_at_end(&self) -> u64 {
        self.guest_last
            .map_or(0, |guest| guest.saturating_sub(self.last))
    }
}

/// The judge's verdict.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Finding {
    /// By CPU.
    pub cpus: BTreeMap<u32, CpuFinding>,
    /// What is wrong with the bytes themselves.
    pub damage: Vec<String>,
    /// CPUs that the guest says it wrote marks on and of which there is none.
    pub silent: Vec<u32>,
}

impl Finding {
    /// Every number exactly once and in order, up to the guest's own last, nothing damaged, nothing even declared lost.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_honest() && self.missing() == 0
    }

    /// As [`is_whole`](Self::is_whole), except for what was declared.
    #[must_use]
    pub fn is_honest(&self) -> bool {
        !self.cpus.is_empty()
            && self.damage.is_empty()
            && self.silent.is_empty()
            && self.cpus.values().all(|cpu| {
                cpu.undeclared() == 0
                    && cpu.doubled == 0
                    && cpu.out_of_order == 0
                    && cpu.missing_at_end() == 0
            })
    }

    /// Different numbers found, over all CPUs.
    #[must_use]
    pub fn found(&self) -> u64 {
        self.cpus.values().map(|cpu| cpu.found).sum()
    }

    /// Numbers that are nowhere, those at the end included.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.cpus
            .values()
            .map(|cpu| cpu.missing() + cpu.missing_at_end())
            .sum()
    }

    /// Numbers found more often than once.
    #[must_use]
    pub fn doubled(&self) -> u64 {
        self.cpus.values().map(|cpu| cpu.doubled).sum()
    }

    /// Marks behind a larger one.
    #[must_use]
    pub fn out_of_order(&self) -> u64 {
        self.cpus.values().map(|cpu| cpu.out_of_order).sum()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (cpu, finding) in &self.cpus {
            writeln!(
                f,
                "cpu{cpu}: marks {}..={}, found {}, missing {} ({} undeclared), doubled {}, out of order {}{}",
                finding.first,
                finding.last,
                finding.found,
                finding.missing(),
                finding.undeclared(),
                finding.doubled,
                finding.out_of_order,
                match finding.missing_at_end() {
                    0 => String::new(),
                    missing => format!(", {missing} missing at the end"),
                }
            )?;
        }
        for cpu in &self.silent {
            writeln!(f, "cpu{cpu}: no marks at all")?;
        }
        for damage in &self.damage {
            writeln!(f, "damage: {damage}")?;
        }
        Ok(())
    }
}

/// Judges what was found.
///
/// `guest_last` is what the guest said it wrote last on each CPU, where it was asked: without it, a loss at the very end could not be
/// told from a guest that wrote less. `losses` is what vmtrail declares; a gap is excused by losses of its CPU that lie there by
/// their times and count no fewer events than numbers are missing. A loss of an unknown number may be any; whether unknown
/// losses are acceptable is for the caller to say.
#[must_use]
pub fn judge(evidence: &Evidence, guest_last: &[(u32, u64)], losses: &[Loss]) -> Finding {
    let mut finding = Finding {
        damage: evidence.damage.clone(),
        ..Finding::default()
    };
    for (&cpu, marks) in &evidence.marks {
        let mut result = judge_cpu(cpu, marks, losses);
        result.guest_last = guest_last
            .iter()
            .find(|(of, _)| *of == cpu)
            .map(|(_, last)| *last);
        finding.cpus.insert(cpu, result);
    }
    finding.silent = guest_last
        .iter()
        .map(|(cpu, _)| *cpu)
        .filter(|cpu| !finding.cpus.contains_key(cpu))
        .collect();
    finding
}

fn judge_cpu(cpu: u32, marks: &[Mark], losses: &[Loss]) -> CpuFinding {
    let mut seen = BTreeMap::new();
    let mut twice = BTreeSet::new();
    let mut highest = None;
    let mut finding = CpuFinding::default();
    for mark in marks {
        if seen.insert(mark.seq, *mark).is_some() {
            twice.insert(mark.seq);
        } else if highest.is_some_and(|highest| mark.seq < highest) {
            finding.out_of_order += 1;
        }
        highest = highest.max(Some(mark.seq));
    }
    finding.found = u64::try_from(seen.len()).unwrap_or(u64::MAX);
    finding.doubled = u64::try_from(twice.len()).unwrap_or(u64::MAX);
    let mut previous: Option<Mark> = None;
    for mark in seen.values() {
        match previous {
            None => finding.first = mark.seq,
            Some(before) if mark.seq > before.seq + 1 => {
                let mut gap = Gap {
                    before,
                    after: *mark,
                    declared: false,
                };
                let there = losses.iter().filter(|loss| loss.lies_in(cpu, &gap));
                gap.declared = covers(there, gap.missing());
                finding.gaps.push(gap);
            }
            Some(_) => {}
        }
        finding.last = mark.seq;
        previous = Some(*mark);
    }
    // A loss without times lies in every gap, and must not excuse each of them anew.
    let of_cpu = losses.iter().filter(|loss| loss.cpu == cpu);
    finding.declared_too_few = finding.missing() > 0 && !covers(of_cpu, finding.missing());
    finding
}

/// Whether there are losses and they count no fewer than `missing` events.
fn covers<'a>(losses: impl Iterator<Item = &'a Loss>, missing: u64) -> bool {
    let mut any = false;
    let mut known = 0_u64;
    for loss in losses {
        any = true;
        known = known.saturating_add(loss.events.unwrap_or(u64::MAX));
    }
    any && known >= missing
}

/// The page's time if it is a whole page near `after` in time, with at least one record unless the page before was whole.
fn believable(layout: PageLayout, bytes: &[u8], after: Option<u64>, in_step: bool) -> Option<u64> {
    let page = Page::parse(layout, bytes).ok()?;
    // Earlier ones too: a doubled page repeats what was there.
    let in_time = after.is_none_or(|after| page.timestamp().abs_diff(after) < RESYNC_REACH_NS);
    let mut records = 0;
    for record in page.records() {
        record.ok()?;
        records += 1;
    }
    (in_time && (records > 0 || in_step)).then_some(page.timestamp())
}

/// `vmtrail-mark cpu=1 seq=42` is `(1, 42)`.
fn parse_mark(text: &[u8]) -> Option<(u32, u64)> {
    let rest = std::str::from_utf8(text).ok()?.strip_prefix(MARK)?;
    let (cpu, seq) = rest.split_once(" seq=")?;
    Some((cpu.parse().ok()?, seq.parse().ok()?))
}

fn find(bytes: &[u8], what: &[u8; 8]) -> Option<usize> {
    let mut at = 0;
    loop {
        at += bytes.get(at..)?.iter().position(|byte| *byte == what[0])?;
        if bytes[at..].starts_with(what) {
            return Some(at);
        }
        at += 1;
    }
}

fn collect_files(dir: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(dir)
        .with_context(|| format!("failed to read the trail's directory {}", dir.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("failed to read {}", dir.display()))?
            .path();
        if path.is_dir() {
            collect_files(&path, into)?;
        } else if path.extension().is_some_and(|extension| extension == "seg") {
            into.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmtrail_wire::{Epoch, SessionId, StreamId};

    const PAGE: u32 = 4096;

    /// A page of marks, byte by byte as the kernel lays it out (kernel/trace/ring_buffer.c): 8 bytes of time, 8 of commit,
    /// then records with their length in words in the low five bits and the delta above them.
    fn page(cpu: u32, numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let mut data = Vec::new();
        let mut first = None;
        for number in numbers {
            first.get_or_insert(number);
            let mut payload = vec![5, 0, 0, 0, 1, 0, 0, 0];
            payload.extend_from_slice(&[0; 8]);
            payload
                .extend_from_slice(format!("vmtrail-mark cpu={cpu} seq={number}\n\0").as_bytes());
            while payload.len() % 4 != 0 {
                payload.push(0);
            }
            let words = u32::try_from(payload.len() / 4).unwrap();
            assert!(words <= 28);
            data.extend_from_slice(&(words | 1000 << 5).to_le_bytes());
            data.extend_from_slice(&payload);
        }
        let mut page = Vec::new();
        page.extend_from_slice(&(1_000_000 + first.unwrap() * 1000).to_le_bytes());
        page.extend_from_slice(&u64::try_from(data.len()).unwrap().to_le_bytes());
        page.extend_from_slice(&data);
        assert!(page.len() <= 4096);
        page.resize(4096, 0);
        page
    }

    fn frame_of(cpu: u32, pages: &[Vec<u8>]) -> Vec<u8> {
        let mut header = FrameHeader::new(Kind::Pages, SessionId(7), Epoch(1), StreamId(cpu));
        header.page_size = PAGE;
        header.page_count = u32::try_from(pages.len()).unwrap();
        header.payload_len = header.page_count * PAGE;
        let mut bytes = header.encode(&[]).to_vec();
        bytes.extend(pages.concat());
        bytes
    }

    fn judged(pages: &[Vec<u8>]) -> Finding {
        let mut evidence = Evidence::default();
        for page in pages {
            evidence.add_frames(&frame_of(0, std::slice::from_ref(page)));
        }
        judge(&evidence, &[(0, 29)], &[])
    }

    fn three_pages() -> [Vec<u8>; 3] {
        [page(0, 0..10), page(0, 10..20), page(0, 20..30)]
    }

    #[test]
    fn a_whole_trail_is_whole() {
        let finding = judged(&three_pages());
        assert!(finding.is_whole(), "{finding}");
        assert_eq!(
            (
                finding.found(),
                finding.cpus[&0].first,
                finding.cpus[&0].last
            ),
            (30, 0, 29)
        );
    }

    #[test]
    fn a_missing_page_is_missed() {
        let [a, _, c] = three_pages();
        let finding = judged(&[a, c]);
        assert!(!finding.is_honest());
        assert_eq!(
            (finding.missing(), finding.doubled(), finding.out_of_order()),
            (10, 0, 0)
        );
    }

    #[test]
    fn a_doubled_page_is_doubled() {
        let [a, b, c] = three_pages();
        let finding = judged(&[a, b.clone(), b, c]);
        assert!(!finding.is_honest());
        assert_eq!(
            (finding.missing(), finding.doubled(), finding.out_of_order()),
            (0, 10, 0)
        );
    }

    #[test]
    fn swapped_pages_are_out_of_order() {
        let [a, b, c] = three_pages();
        let finding = judged(&[a, c, b]);
        assert!(!finding.is_honest());
        assert_eq!(
            (finding.missing(), finding.doubled(), finding.out_of_order()),
            (0, 0, 10)
        );
    }

    #[test]
    fn one_number_out_of_thirty_is_missed() {
        let finding = judged(&[
            page(0, 0..10),
            page(0, (10..20).filter(|n| *n != 13)),
            page(0, 20..30),
        ]);
        assert_eq!(finding.missing(), 1);
        assert!(!finding.is_honest());
    }

    #[test]
    fn a_cut_end_is_seen_by_what_the_guest_says() {
        let [a, b, _] = three_pages();
        let finding = judged(&[a, b]);
        assert_eq!(finding.missing(), 10);
        assert!(!finding.is_honest());
        // And without the guest's word it could not be.
        let mut evidence = Evidence::default();
        evidence.add_frames(&frame_of(0, &three_pages()[..2]));
        assert!(judge(&evidence, &[], &[]).is_whole());
    }

    #[test]
    fn a_cpu_without_any_mark_is_not_whole() {
        let mut evidence = Evidence::default();
        evidence.add_frames(&frame_of(0, &three_pages()));
        let finding = judge(&evidence, &[(0, 29), (1, 12)], &[]);
        assert_eq!(finding.silent, [1]);
        assert!(!finding.is_whole());
        assert!(
            !judge(&Evidence::default(), &[], &[]).is_whole(),
            "nothing is not everything"
        );
    }

    #[test]
    fn a_declared_loss_excuses_what_it_covers_and_no_more() {
        let [a, _, c] = three_pages();
        let mut evidence = Evidence::default();
        evidence.add_frames(&frame_of(0, &[a, c]));
        let loss = Loss {
            cpu: 0,
            events: Some(10),
            after: None,
            before: None,
        };
        let with = |losses: &[Loss]| judge(&evidence, &[(0, 29)], losses);
        let finding = with(&[loss]);
        assert!(finding.is_honest() && !finding.is_whole(), "{finding}");
        assert!(
            !with(&[Loss {
                events: Some(9),
                ..loss
            }])
            .is_honest(),
            "too few"
        );
        assert!(!with(&[Loss { cpu: 1, ..loss }]).is_honest(), "another CPU");
        assert!(
            !with(&[Loss {
                before: Some(2),
                ..loss
            }])
            .is_honest(),
            "another time"
        );
        assert!(
            with(&[Loss {
                events: None,
                ..loss
            }])
            .is_honest(),
            "an unknown number"
        );
        let gap = finding.cpus[&0].gaps[0];
        let timed = Loss {
            after: Some(gap.before.at),
            before: Some(gap.after.at),
            ..loss
        };
        assert!(with(&[timed]).is_honest());
        let two = [
            Loss {
                events: Some(4),
                ..timed
            },
            Loss {
                events: Some(6),
                ..timed
            },
        ];
        assert!(with(&two).is_honest());
        assert!(!with(&two[..1]).is_honest());
    }

    #[test]
    fn one_loss_without_times_does_not_excuse_two_gaps() {
        let mut evidence = Evidence::default();
        let pages = [page(0, 0..10), page(0, 15..20), page(0, 25..30)];
        evidence.add_frames(&frame_of(0, &pages));
        let loss = Loss {
            cpu: 0,
            events: Some(5),
            after: None,
            before: None,
        };
        assert!(!judge(&evidence, &[(0, 29)], &[loss]).is_honest());
        assert!(judge(&evidence, &[(0, 29)], &[loss, loss]).is_honest());
    }

    #[test]
    fn a_mark_in_the_wrong_stream_is_damage() {
        let mut evidence = Evidence::default();
        evidence.add_frames(&frame_of(0, &[page(1, 0..3)]));
        assert!(!judge(&evidence, &[], &[]).is_honest());
    }

    #[test]
    fn frames_are_found_among_other_bytes() {
        let mut bytes = b"some manifest of a store ".to_vec();
        bytes.extend_from_slice(&frame::MAGIC);
        for page in three_pages() {
            bytes.extend(frame_of(0, &[page]));
            bytes.extend_from_slice(b"a trailer");
        }
        let mut evidence = Evidence::default();
        evidence.add_frames(&bytes);
        assert!(judge(&evidence, &[(0, 29)], &[]).is_whole());
    }

    #[test]
    fn a_cut_frame_is_damage() {
        let mut bytes = frame_of(0, &three_pages());
        bytes.truncate(bytes.len() - 1);
        let mut evidence = Evidence::default();
        evidence.add_frames(&bytes);
        assert_eq!(evidence.damage.len(), 1);
    }

    #[test]
    fn a_raw_stream_that_begins_within_a_page_is_put_in_step() {
        let [a, b, c] = three_pages();
        let mut evidence = Evidence::default();
        evidence.add_raw(0, &[&a[4096 - 32..], &b, &c].concat(), PAGE);
        assert_eq!(evidence.pages, 2);
        assert_eq!(evidence.damage.len(), 1);
        let finding = judge(&evidence, &[(0, 29)], &[]);
        assert_eq!(
            (finding.cpus[&0].first, finding.found(), finding.missing()),
            (10, 20, 0)
        );
        // Torn in the middle: what came of `b` is lost with its end, `c` is found again.
        let mut evidence = Evidence::default();
        evidence.add_raw(0, &[&a[..], &b[..1000], &c].concat(), PAGE);
        let finding = judge(&evidence, &[(0, 29)], &[]);
        assert_eq!((finding.found(), finding.missing()), (20, 10));
    }

    #[test]
    fn a_doubled_raw_page_stays_doubled() {
        let [a, b, c] = three_pages();
        let mut evidence = Evidence::default();
        evidence.add_raw(0, &[&a[..], &b, &b, &c].concat(), PAGE);
        assert_eq!(judge(&evidence, &[(0, 29)], &[]).doubled(), 10);
    }
}
