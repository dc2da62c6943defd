//! Files written by us and read by us, whole and damaged; and the public samples, if they are there.

use std::fs::File;
use std::io::{BufReader, Cursor};
use std::path::{Path, PathBuf};

use vmtrail_trace::merge::Step;
use vmtrail_trace::report::{Entry, ReportOptions, Reporter};
use vmtrail_trace::ring_buffer::PageLayout;
use vmtrail_trace::trace_dat::{
    Compression, Contents, FileInfo, KernelTexts, TimeSample, TimeShift, TraceFile, Version, Writer,
};

const SCHED: &[u8] = include_bytes!("fixtures/pages/sched.page");
const OVERRUN: &[u8] = include_bytes!("fixtures/pages/overrun.page");
const TIME_EXTEND: &[u8] = include_bytes!("fixtures/pages/time_extend.page");
const PRINT: &str = include_str!("fixtures/pages/print.format");

const VERSIONS: [Version; 4] = [
    Version::V6,
    Version::V7(Compression::None),
    Version::V7(Compression::Zstd),
    Version::V7(Compression::Zlib),
];

fn write(version: Version, shift: Option<&TimeShift>) -> Vec<u8> {
    let layout = PageLayout::native64_le(4096).unwrap();
    let texts = KernelTexts {
        header_event: "# compressed entry header\n",
        ftrace_formats: vec![PRINT],
        event_formats: vec![("sched", Vec::new())],
        kallsyms: b"ffffffff81000000 T _text\nffffffff81000100 T foo\n",
        printk_formats: b"0xffffffff82000000 : \"hello\\n\"\n",
        saved_cmdlines: b"1 init\n",
    };
    let info = FileInfo {
        cpu_count: 3,
        clock: "[local] global",
        uname: Some("Linux test"),
        writer: Some("vmtrail"),
        trace_id: Some(0xfeed),
        time_shift: shift,
        cpu_stats: vec!["CPU: 0\n"],
        ..FileInfo::default()
    };
    let mut writer =
        Writer::create(Cursor::new(Vec::new()), version, layout, &texts, &info).unwrap();
    writer.begin_buffer("", "local", layout).unwrap();
    writer.begin_cpu(0).unwrap();
    writer.page(SCHED).unwrap();
    // Over a block of ten pages, so that compressed files have more than one.
    for _ in 0..25 {
        writer.page(OVERRUN).unwrap();
    }
    writer.begin_cpu(1).unwrap();
    writer.begin_cpu(2).unwrap();
    writer.page(&TIME_EXTEND[..400]).unwrap();
    writer.finish().unwrap().into_inner()
}

fn report(bytes: &[u8]) -> String {
    let file = TraceFile::open(Cursor::new(bytes)).unwrap();
    let mut reporter = Reporter::new(file.metadata(), ReportOptions::default());
    let mut merge = file.merge(&file.buffers()[0]);
    let mut out = Vec::new();
    while let Step::Event(entry) = merge.advance().unwrap() {
        let timestamp = file.options().correct(entry.cpu, entry.timestamp);
        reporter.write(&Entry { timestamp, ..entry }, &mut out);
    }
    reporter.finish(&mut out);
    String::from_utf8(out).unwrap()
}

#[test]
fn every_version_holds_the_same() {
    let mut texts = Vec::new();
    for version in VERSIONS {
        let bytes = write(version, None);
        let file = TraceFile::open(Cursor::new(&bytes)).unwrap();
        assert!(
            file.warnings().is_empty(),
            "{version:?}: {:?}",
            file.warnings()
        );
        let contents = Contents::of(&file).unwrap();
        assert_eq!(contents.total(), 131 + 25 * 92 + 3, "{version:?}");
        assert_eq!(contents.missed, 25 * 2766);
        assert_eq!(contents.damaged, 0);
        assert_eq!(contents.cpus.keys().copied().collect::<Vec<_>>(), [0, 2]);
        assert_eq!(file.cpu_count(), 3);
        assert_eq!(file.options().trace_id, Some(0xfeed));
        assert_eq!(file.options().uname.as_deref(), Some("Linux test"));
        assert_eq!(file.metadata().clock.name(), "local");
        assert_eq!(file.metadata().symbols.len(), 2);
        assert_eq!(file.metadata().comms.get(1), Some(&b"init"[..]));
        texts.push(report(&bytes));
    }
    assert!(texts.iter().all(|text| *text == texts[0]));
    assert!(texts[0].contains("CPU:0 [2766 EVENTS DROPPED]\n"));
    assert!(texts[0].contains(": vmtrail mark 1\n"));
}

#[test]
fn an_unfinished_file_is_refused() {
    let whole = write(Version::V7(Compression::None), None);
    // The offset of the options is patched last.
    let mut unfinished = whole.clone();
    let at = whole
        .windows(6)
        .position(|window| window == b"none\0\0")
        .unwrap()
        + 6;
    unfinished[at..at + 8].fill(0);
    assert!(TraceFile::open(Cursor::new(unfinished)).is_err());
}

#[test]
fn time_shift_steps() {
    let sample = |time, offset| TimeSample {
        time,
        offset,
        scaling: 1,
        fraction: 0,
    };
    let first = 2_547_442_940_927;
    let shift = TimeShift {
        peer: 1,
        interpolate: false,
        cpus: vec![
            vec![
                sample(0, -1000),
                sample(first, 5000),
                sample(first + (1 << 40), 0)
            ];
            3
        ],
    };
    for version in VERSIONS {
        let bytes = write(version, Some(&shift));
        let file = TraceFile::open(Cursor::new(&bytes)).unwrap();
        assert_eq!(file.options().time_shift.as_ref(), Some(&shift));
        assert_eq!(file.options().correct(0, first - 1), first - 1001);
        assert_eq!(file.options().correct(0, first), first + 5000);
        assert_eq!(
            file.options().correct(9, first),
            first,
            "a CPU without samples"
        );
    }
}

/// Any change to a file gives an error, a warning or other events; never a panic, a hang or memory without bound.
#[test]
fn damaged_files() {
    let mut seed = 0x0123_4567_89ab_cdef_u64;
    let mut random = move || {
        seed ^= seed >> 12;
        seed ^= seed << 25;
        seed ^= seed >> 27;
        seed.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    for version in VERSIONS {
        let whole = write(version, None);
        let length = u64::try_from(whole.len()).unwrap();
        for round in 0..300 {
            let mut bytes = whole.clone();
            for _ in 0..=random() % 3 {
                // Mostly where the structure is: the first kilobytes and the last.
                let at = match round % 3 {
                    0 => random() % length,
                    1 => random() % 2048.min(length),
                    _ => length - 1 - random() % 700.min(length),
                };
                let at = usize::try_from(at).unwrap();
                bytes[at] = match random() % 3 {
                    0 => 0xff,
                    1 => 0,
                    _ => bytes[at] ^ (1 << (random() % 8)),
                };
            }
            if random() % 5 == 0 {
                bytes.truncate(usize::try_from(random() % length).unwrap());
            }
            if let Ok(file) = TraceFile::open(Cursor::new(bytes)) {
                let _ = Contents::of(&file);
                let mut reporter = Reporter::new(file.metadata(), ReportOptions::default());
                let mut out = Vec::new();
                for buffer in file.buffers() {
                    let mut merge = file.merge(buffer);
                    while let Ok(Step::Event(entry)) = merge.advance() {
                        reporter.write(&entry, &mut out);
                        out.clear();
                    }
                }
            }
        }
    }
}

fn samples() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/samples");
    let Ok(directory) = std::fs::read_dir(&root) else {
        return Vec::new();
    };
    directory
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "dat"))
        .collect()
}

/// Counts from `trace-cmd report` 3.1.6 of each file.
#[test]
fn public_samples() {
    let paths = samples();
    if paths.is_empty() {
        eprintln!("skipped: ../shared/samples is not there");
        return;
    }
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let expected = match name.as_str() {
            "lisa_rtapp.dat" => 7820,
            "lisa_sched_load.dat" => 3724,
            "trappy_raw_trace.dat" => 757,
            "trappy_trace.dat" => 525,
            "trappy_trace_idle.dat" => 43,
            _ => continue,
        };
        let file = TraceFile::open(BufReader::new(File::open(&path).unwrap())).unwrap();
        let contents = Contents::of(&file).unwrap();
        assert_eq!(contents.total(), expected, "{name}");
        assert_eq!((contents.damaged, contents.backwards), (0, 0), "{name}");
    }
}
