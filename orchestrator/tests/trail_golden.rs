//! The bytes of store version 1, pinned. **Do not change the fixtures**: trails of this version exist, and every later
//! vmtrail must read them. A new version gets a directory of its own beside them.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::*;
use vmtrail::trail::event::{Residency, Session, StreamEnd};
use vmtrail::trail::{Entry, Event, TrailReader, TrailWriter, WriterOptions};
use vmtrail_wire::{Sequence, StreamId};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/trail-v1")
}

/// Two segments, two CPUs, a metadata generation, a log.
fn write(dir: &Path) {
    let options = WriterOptions {
        now_ns: frozen,
        trail_id: Some(TRAIL),
        segment_bytes: 40 << 10,
        ..WriterOptions::default()
    };
    let mut writer = TrailWriter::create(dir, options, vm()).unwrap();
    writer.log(Event::Residency(Residency {
        residency: 1,
        host: "host-a".to_owned(),
        pid: Some(4711),
        qemu: "7.2.22".to_owned(),
        qmp: "/run/web-1.qmp".to_owned(),
        parent: None,
        cause: "attach".to_owned(),
    }));
    writer.log(Event::Attached {
        epoch: 1,
        residency: 1,
        ports: vec!["vmtrail.0".to_owned(), "vmtrail.1".to_owned()],
    });
    writer.log(Event::Session(Session {
        session: SESSION.to_string(),
        boot_id: "00112233445566778899aabbccddeeff".to_owned(),
        agent: "0.1.0".to_owned(),
        kernel: "6.1.0-42-cloud-amd64".to_owned(),
        clock: "local".to_owned(),
        page_size: 4096,
        long_size: 8,
        big_endian: false,
        cpus: 2,
    }));
    let mut agents = [Agent::new(0), Agent::new(1)];
    for agent in &agents {
        writer.log(Event::StreamBegan {
            session: SESSION.to_string(),
            cpu: agent.cpu,
            sequence: 0,
            first_page: 0,
        });
    }
    for (name, item) in [
        ("events/header_page", "\tfield: u64 timestamp;\n"),
        ("proc/kallsyms", "ffffffff81000000 T _text\n"),
    ] {
        writer
            .put_metadata(SESSION, 1, name, item.as_bytes().to_vec())
            .unwrap();
    }
    writer.finish_metadata(SESSION, 1);
    for pages in [1, 2, 1] {
        for agent in &mut agents {
            let (header, bytes) = agent.frame(pages);
            writer.append(&header, &bytes);
        }
        flush(&mut writer);
    }
    writer.log(Event::Stopped {
        session: SESSION.to_string(),
        streams: vec![StreamEnd { cpu: 0, next: 3 }, StreamEnd { cpu: 1, next: 3 }],
    });
    writer.close().unwrap();
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![];
    for sub in ["", "events", "meta", "streams"] {
        for entry in fs::read_dir(dir.join(sub)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() && !path.ends_with("lock") {
                let name = path.strip_prefix(dir).unwrap().display().to_string();
                files.push((name, fs::read(&path).unwrap()));
            }
        }
    }
    files.sort_unstable();
    files
}

/// The version of vmtrail is in two places, and is no part of the format.
fn without_version(name: &str, bytes: &[u8]) -> Vec<u8> {
    if !name.ends_with(".json") && !name.ends_with(".jsonl") {
        return bytes.to_vec();
    }
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    text.replace(&format!("\"{}\"", env!("CARGO_PKG_VERSION")), "\"0.1.0\"")
        .into_bytes()
}

#[test]
fn a_writer_of_today_writes_version_1() {
    let dir = tempfile::tempdir().unwrap();
    let made = dir.path().join("trail");
    write(&made);
    // Only for a new version, in a new directory.
    if std::env::var_os("VMTRAIL_WRITE_FIXTURE").is_some() {
        for (name, bytes) in files(&made) {
            let path = fixture().join(&name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
    let (made, pinned) = (files(&made), files(&fixture()));
    let names = |files: &[(String, Vec<u8>)]| -> Vec<String> {
        files.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&made), names(&pinned));
    for ((name, made), (_, pinned)) in made.iter().zip(&pinned) {
        assert!(
            without_version(name, made) == *pinned,
            "{name} differs from the fixture"
        );
    }
}

#[test]
fn version_1_is_read() {
    let reader = TrailReader::open(&fixture()).unwrap();
    assert_eq!(reader.file().trail, TRAIL);
    assert_eq!(reader.file().vm, vm());
    assert_eq!(reader.file().created_ns, frozen());
    let mut found = vec![];
    let mut frames = reader.frames();
    while let Some(entry) = frames.next().unwrap() {
        match entry {
            Entry::Frame(frame) => {
                assert_eq!(frame.header.session, SESSION);
                let pages: Vec<_> = frame.pages().collect();
                let header = frame.header;
                assert_eq!(pages.len(), header.page_count as usize);
                assert_eq!(pages[0], page_of(header.sent_ns, header.stream.0));
                found.push((frame.place.segment, header.stream.0, header.sequence.0));
            }
            Entry::Damage(damage) => panic!("{damage:?}"),
            _ => {}
        }
    }
    assert_eq!(
        found,
        [
            (1, 0, 0),
            (1, 1, 0),
            (2, 0, 1),
            (2, 1, 1),
            (3, 0, 2),
            (3, 1, 2)
        ]
    );
    assert_eq!(frames.torn(), None);
    let index = reader.index(2).unwrap();
    assert_eq!(index.streams[&(SESSION, StreamId(1))].from, Sequence(1));
    assert_eq!(index.streams[&(SESSION, StreamId(1))].next_page, 3);
    let manifest = reader.manifest(SESSION, 1).unwrap();
    let items = reader.items(&manifest).unwrap();
    assert_eq!(items["proc/kallsyms"], b"ffffffff81000000 T _text\n");
    let verification = vmtrail::verify::verify(&reader).unwrap();
    assert_eq!(
        verification.verdict,
        vmtrail::verify::Verdict::Continuous,
        "{verification}"
    );
}

/// Offsets by hand, as docs/trail.md draws them: the constants of the code are not asked.
#[test]
fn the_bytes_are_where_the_page_says() {
    let file = fs::read(fixture().join("streams/00000002.seg")).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    // The segment's page.
    assert_eq!(file[..8], *b"\x89VMTRSEG");
    assert_eq!(u32_at(8), 1, "store version");
    assert_eq!(file[16..32], TRAIL.0);
    assert_eq!(u64_at(32), 2, "segment number");
    assert_eq!(u64_at(40), frozen(), "created_ns");
    assert_eq!(u64_at(48), 1, "first batch");
    let previous = fs::read(fixture().join("streams/00000001.seg")).unwrap();
    assert_eq!(u64_at(56), previous.len() as u64, "length before");
    assert!(file[64..4096].iter().all(|&byte| byte == 0));
    // The batch's page.
    let at = 4096;
    assert_eq!(file[at..at + 8], *b"\x89VMTRBAT");
    assert_eq!(u32_at(at + 8), 1, "store version");
    assert_eq!(file[at + 16..at + 32], TRAIL.0);
    assert_eq!(u64_at(at + 32), 2, "segment number");
    assert_eq!(u64_at(at + 40), 4096, "offset");
    assert_eq!(u64_at(at + 48), 1, "batch number");
    assert_eq!(u64_at(at + 56), frozen(), "written_ns");
    let content_len = 2 * (4096 + 2 * 4096);
    assert_eq!(u64_at(at + 64), content_len, "content length");
    assert_eq!(u32_at(at + 72), 2, "frames");
    let content = &file[8192..8192 + usize::try_from(content_len).unwrap()];
    // The protocol's table computes what the hardware stored.
    assert_eq!(u32_at(at + 76), vmtrail_wire::crc32c(content));
    assert!(file[at + 80..8192].iter().all(|&byte| byte == 0));
    // The checksum of a page takes its own field as zero.
    for at in [0, 4096] {
        let mut page = file[at..at + 4096].to_vec();
        page[12..16].fill(0);
        assert_eq!(u32_at(at + 12), vmtrail_wire::crc32c(&page));
    }
    // Frames as received.
    assert_eq!(content[..8], *b"\x89VMTRAIL");
    assert_eq!(content[3 * 4096..3 * 4096 + 8], *b"\x89VMTRAIL");
    assert_eq!(file.len(), 8192 + content.len());

    let index = fs::read(fixture().join("streams/00000002.idx")).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(index[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(index[at..at + 8].try_into().unwrap());
    assert_eq!(index[..8], *b"\x89VMTRIDX");
    assert_eq!(u64_at(32), 2, "segment number");
    assert_eq!(u64_at(40), file.len() as u64, "length of the segment");
    assert_eq!((u64_at(48), u64_at(56)), (1, 2), "first and next batch");
    assert_eq!((u64_at(64), u64_at(72)), (frozen(), frozen()));
    assert_eq!((u32_at(80), u32_at(84)), (2, 1), "streams, positions");
    let stream = 88 + 96;
    assert_eq!(u64_at(stream), SESSION.0);
    assert_eq!(u32_at(stream + 8), 1, "CPU");
    assert_eq!(
        (u64_at(stream + 16), u64_at(stream + 24)),
        (1, 2),
        "from, to"
    );
    assert_eq!(
        (u64_at(stream + 32), u64_at(stream + 40)),
        (1, 2),
        "frames, pages"
    );
    assert_eq!(u64_at(stream + 48), 8192, "bytes");
    assert_eq!(
        (u64_at(stream + 56), u64_at(stream + 64)),
        (1, 3),
        "pages before"
    );
    assert_eq!(u64_at(stream + 88), 1, "newest epoch");
    let position = 88 + 2 * 96;
    assert_eq!((u64_at(position), u64_at(position + 8)), (4096, 1));
    assert_eq!(index.len(), position + 24);
}
