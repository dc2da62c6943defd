//! The same events in every format, with the same losses; and what the tools of others say of them, where installed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use vmtrail_trace::ctf::{CtfOutput, CtfTotals, CtfWriter};
use vmtrail_trace::merge::{Merge, SlicePages};
use vmtrail_trace::metadata::Metadata;
use vmtrail_trace::perfetto::{PerfettoWriter, Summary, check};
use vmtrail_trace::ring_buffer::{Missed, PageLayout};
use vmtrail_trace::timeline::{Item, Note, NoteKind, TimeMap, Timeline};

const SCHED: &[u8] = include_bytes!("fixtures/pages/sched.page");
const OVERRUN: &[u8] = include_bytes!("fixtures/pages/overrun.page");
const PRINT: &str = include_str!("fixtures/pages/print.format");

/// CPU 0: 131 events of scheduling, interrupts and timers, 2 marks among them. CPU 1: a loss of 2766, then 92 marks.
const EVENTS: u64 = 131 + 92;
const MARKS: u64 = 2 + 92;

fn metadata() -> Metadata {
    let mut metadata = Metadata::bare(PageLayout::native64_le(4096).unwrap());
    metadata.events.add("ftrace", PRINT).unwrap();
    metadata
}

fn notes() -> Vec<Note> {
    let note = |timestamp, kind| Note { timestamp, kind };
    vec![
        note(
            0,
            NoteKind::ResidencyBegin {
                host: "a".into(),
                cause: "boot".into(),
            },
        ),
        note(
            2_547_500_000_000,
            NoteKind::MigrationBegin {
                from: "a".into(),
                to: "b".into(),
            },
        ),
        note(2_547_600_000_000, NoteKind::BlackoutBegin),
        note(
            2_547_700_000_000,
            NoteKind::BlackoutEnd {
                duration_ns: 100_000_000,
            },
        ),
        note(
            2_547_700_000_001,
            NoteKind::ResidencyBegin {
                host: "b".into(),
                cause: "migration".into(),
            },
        ),
        note(
            2_547_700_000_002,
            NoteKind::MigrationEnd {
                outcome: "completed".into(),
            },
        ),
        note(
            2_547_800_000_000,
            NoteKind::Loss {
                cpu: Some(0),
                pages: Missed::Count(3),
                events: Missed::Unknown,
                cause: "store".into(),
            },
        ),
    ]
}

fn timeline(layout: PageLayout) -> Timeline<SlicePages<'static>> {
    let merge = Merge::new(
        layout,
        [
            (0, SlicePages::new(layout, SCHED)),
            (1, SlicePages::new(layout, OVERRUN)),
        ],
    );
    Timeline::new(merge, TimeMap::default(), notes())
}

fn each(layout: PageLayout, mut take: impl FnMut(Item<'_>)) {
    let mut timeline = timeline(layout);
    loop {
        match timeline.advance().unwrap() {
            Item::End => return,
            item => take(item),
        }
    }
}

/// CTF formats describe events one by one; sched's formats are not here, so only marks are described.
fn ctf<O: CtfOutput>(output: O) -> (O, CtfTotals) {
    let metadata = metadata();
    let mut writer = CtfWriter::create(output, &metadata, [7; 16], 0, "guest").unwrap();
    each(metadata.layout, |item| match item {
        Item::Event(entry) => writer.event(&entry).unwrap(),
        Item::Note(note) => writer.note(note).unwrap(),
        other => panic!("{other:?}"),
    });
    writer.finish().unwrap()
}

fn perfetto() -> (Vec<u8>, Summary) {
    let metadata = metadata();
    let mut writer = PerfettoWriter::new(Vec::new(), &metadata, "guest")
        .with_uname("Linux guest 6.12.0 x86_64")
        .with_realtime(2_547_442_940_927, 1_700_000_000_000_000_000);
    each(metadata.layout, |item| match item {
        Item::Event(entry) => writer.event(&entry).unwrap(),
        Item::Note(note) => writer.note(note).unwrap(),
        other => panic!("{other:?}"),
    });
    let trace = writer.finish().unwrap();
    let summary = check(&trace).unwrap();
    (trace, summary)
}

#[test]
fn counts_and_losses_agree() {
    let (_, totals) = ctf(Memory::default());
    assert_eq!(
        totals,
        CtfTotals {
            events: MARKS,
            discarded: 2766,
            discarded_unknown: 0,
            packets_discarded: 3,
            unknown: EVENTS - MARKS,
        }
    );
    let (_, summary) = perfetto();
    assert_eq!(summary.events, BTreeMap::from([(0, 131), (1, 92)]));
    assert_eq!(summary.messages.get(&3), Some(&MARKS));
    assert_eq!((summary.lost_bundles, summary.overrun), (1, 2766));
    assert_eq!(summary.tracks.get("lost events, CPU 1"), Some(&2));
    // Two residencies, each begun and ended; migration and blackout likewise, with a word at the end of each.
    assert_eq!(summary.tracks.get("residency"), Some(&4));
    assert_eq!(summary.tracks.get("migration"), Some(&6));
    assert_eq!(summary.tracks.get("losses"), Some(&1));
}

#[test]
fn the_judge_of_perfetto_traces_finds_faults() {
    let (trace, _) = perfetto();
    for cut in [1, 2, trace.len() / 2, trace.len() - 1] {
        assert!(check(&trace[..cut]).is_err(), "{cut}");
    }
    for at in 0..trace.len() {
        let mut damaged = trace.clone();
        damaged[at] ^= 0x55;
        // Whatever it says of it, it says it without a panic.
        let _ = check(&damaged);
    }
}

#[test]
fn babeltrace_reads_our_losses() {
    let installed = Command::new("babeltrace2").arg("--version").output();
    if !installed.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: babeltrace2 is not installed");
        return;
    }
    let directory = scratch("ctf");
    ctf(Directory(directory.clone()));
    let output = Command::new("babeltrace2")
        .arg(&directory)
        .output()
        .unwrap();
    let (text, warnings) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{warnings}");
    assert_eq!(
        text.lines()
            .filter(|line| line.contains(" print: "))
            .count(),
        usize::try_from(MARKS).unwrap()
    );
    assert_eq!(
        text.lines()
            .filter(|line| line.contains(" vmtrail: "))
            .count(),
        notes().len()
    );
    assert!(
        warnings.contains("Tracer discarded 2766 events"),
        "{warnings}"
    );
    fs::remove_dir_all(directory).unwrap();
}

fn scratch(name: &str) -> PathBuf {
    let directory =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    directory
}

struct Directory(PathBuf);

impl CtfOutput for Directory {
    type File = fs::File;

    fn create(&mut self, name: &str) -> io::Result<Self::File> {
        fs::File::create(self.0.join(name))
    }
}

#[derive(Default)]
struct Memory(BTreeMap<String, Shared>);

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl CtfOutput for Memory {
    type File = Shared;

    fn create(&mut self, name: &str) -> io::Result<Self::File> {
        Ok(self.0.entry(name.to_owned()).or_default().clone())
    }
}
