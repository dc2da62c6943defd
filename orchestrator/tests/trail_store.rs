//! The store on sound disks: what goes in comes out, in order, and only one may write.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::format::segment_name;
use vmtrail::trail::{
    Entry, Event, Place, ResumePoint, TrailError, TrailReader, TrailWriter, WriterOptions,
};
use vmtrail_wire::{Epoch, Sequence, SessionId, StreamId};

#[test]
fn what_goes_in_comes_out() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    let (mut cpu0, mut cpu1) = (Agent::new(0), Agent::new(1));
    let mut sent = vec![];
    for round in 1..=5 {
        for agent in [&mut cpu0, &mut cpu1] {
            let (header, bytes) = agent.frame(round);
            writer.append(&header, &bytes);
            sent.push((header, bytes));
        }
        let durable = flush(&mut writer);
        let next = Sequence(u64::from(round));
        assert_eq!(durable.streams[&(SESSION, StreamId(0))], next);
        assert_eq!(durable.streams[&(SESSION, StreamId(1))], next);
    }
    writer.log(note("the end"));
    writer.close().unwrap();

    let mut frames = reader(&disk).frames();
    let mut found = vec![];
    let mut batches = 0;
    while let Some(entry) = frames.next().unwrap() {
        match entry {
            Entry::Frame(frame) => found.push((frame.header, frame.bytes.to_vec())),
            Entry::Batch(batch) => {
                assert_eq!(batch.frames, 2);
                batches += 1;
            }
            Entry::Segment(header) => assert_eq!(header.number, 1),
            Entry::Damage(damage) => panic!("{damage:?}"),
        }
    }
    assert_eq!(found, sent);
    assert_eq!(batches, 5);
    assert_eq!(frames.torn(), None);
    let log: Vec<_> = events(&disk).into_iter().map(|line| line.event).collect();
    assert!(matches!(log[0], Event::WriterOpened { cut_bytes: 0, .. }));
    assert_eq!(log[1..], [note("the end"), Event::WriterClosed]);
}

#[test]
fn one_sync_a_batch_whatever_the_number_of_cpus() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    let mut agents: Vec<_> = (0..64).map(Agent::new).collect();
    let mut send = |writer: &mut TrailWriter| {
        for agent in &mut agents {
            let (header, bytes) = agent.frame(1);
            writer.append(&header, &bytes);
        }
    };
    send(&mut writer);
    flush(&mut writer);
    let before = disk.syncs();
    send(&mut writer);
    flush(&mut writer);
    assert_eq!(disk.syncs() - before, 1);
}

#[test]
fn a_trail_is_continued_where_it_ended() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    let mut agent = Agent::new(3);
    for _ in 0..4 {
        let (header, bytes) = agent.frame(2);
        writer.append(&header, &bytes);
    }
    writer.log(Event::Attached {
        epoch: 9,
        residency: 1,
        ports: vec![],
    });
    writer.close().unwrap();

    let (mut writer, recovery) = open(&disk, options()).unwrap();
    assert!(recovery.closed);
    assert_eq!(recovery.cut_bytes, 0);
    assert_eq!(recovery.cuts, [] as [String; 0]);
    assert_eq!(recovery.damage, [] as [String; 0]);
    assert_eq!(recovery.last_epoch, Epoch(9));
    let resume = ResumePoint {
        next: Sequence(4),
        next_page: 8,
    };
    assert_eq!(recovery.resume[&(SESSION, StreamId(3))], resume);
    let (header, bytes) = agent.frame(1);
    writer.append(&header, &bytes);
    writer.close().unwrap();
    let (frames, damage) = contents(&disk);
    assert_eq!(frames, (0..5).map(|n| (3, n)).collect::<Vec<_>>());
    assert_eq!(damage, [] as [String; 0]);
}

#[test]
fn segments_rotate_and_their_indexes_agree_with_them() {
    let disk = CrashDisk::new();
    let small = WriterOptions {
        segment_bytes: 64 << 10,
        ..options()
    };
    let mut writer = create(&disk, small);
    let mut agent = Agent::new(0);
    for _ in 0..40 {
        let (header, bytes) = agent.frame(2);
        writer.append(&header, &bytes);
        flush(&mut writer);
    }
    writer.close().unwrap();
    let reader = reader(&disk);
    let segments = reader.segments().unwrap();
    assert!(segments.len() > 5, "{segments:?}");
    assert!(segments.iter().all(|segment| segment.bytes <= 64 << 10));
    let stored: Vec<_> = segments
        .iter()
        .map(|segment| reader.index(segment.number).unwrap())
        .collect();
    // Without their files they come from the segments, and are the same.
    for segment in &segments {
        disk.lose(&format!("streams/{:08}.idx", segment.number));
    }
    for (segment, stored) in segments.iter().zip(&stored) {
        assert_eq!(reader.index(segment.number).unwrap(), *stored);
    }
    assert_eq!(contents(&disk).0.len(), 40);
    assert_eq!(contents(&disk).1, [] as [String; 0]);

    // From a position in the middle the rest follows.
    let middle = &stored[3];
    let mut frames = reader.frames_from(Place {
        segment: middle.segment,
        offset: middle.positions[0].offset,
    });
    let mut expected = middle.streams[&(SESSION, StreamId(0))].from.0;
    while let Some(entry) = frames.next().unwrap() {
        match entry {
            Entry::Frame(frame) => {
                assert_eq!(frame.header.sequence.0, expected);
                expected += 1;
            }
            Entry::Damage(damage) => panic!("{damage:?}"),
            _ => {}
        }
    }
    assert_eq!(expected, 40);
}

#[test]
fn a_growing_trail_is_followed() {
    let disk = CrashDisk::new();
    let small = WriterOptions {
        segment_bytes: 40 << 10,
        ..options()
    };
    let mut writer = create(&disk, small);
    let mut agent = Agent::new(0);
    let mut frames = reader(&disk).frames();
    let mut seen = 0;
    for round in 0..30u64 {
        let (header, bytes) = agent.frame(1);
        writer.append(&header, &bytes);
        flush(&mut writer);
        if round % 4 == 3 {
            while let Some(entry) = frames.next().unwrap() {
                match entry {
                    Entry::Frame(frame) => {
                        assert_eq!(frame.header.sequence.0, seen);
                        seen += 1;
                    }
                    Entry::Damage(damage) => panic!("{damage:?}"),
                    _ => {}
                }
            }
            assert_eq!(seen, round + 1);
        }
    }
}

#[test]
fn the_oldest_segments_go_and_the_log_says_so() {
    let disk = CrashDisk::new();
    let keep = WriterOptions {
        segment_bytes: 64 << 10,
        retain_bytes: Some(200 << 10),
        ..options()
    };
    let mut writer = create(&disk, keep.clone());
    let mut agent = Agent::new(0);
    for _ in 0..60 {
        let (header, bytes) = agent.frame(2);
        writer.append(&header, &bytes);
        flush(&mut writer);
    }
    let segments = reader(&disk).segments().unwrap();
    let total: u64 = segments.iter().map(|segment| segment.bytes).sum();
    assert!(total <= (200 << 10) + (64 << 10), "{segments:?}");
    let mut retired_to = 0;
    let mut last = 0;
    for line in events(&disk) {
        if let Event::Retired {
            segment, streams, ..
        } = line.event
        {
            assert_eq!(segment, last + 1);
            last = segment;
            assert_eq!(streams[0].from, retired_to);
            retired_to = streams[0].to;
        }
    }
    assert_eq!(segments[0].number, last + 1);
    let (frames, damage) = contents(&disk);
    assert_eq!(frames.first(), Some(&(0, retired_to)));
    assert_eq!(frames.last(), Some(&(0, 59)));
    assert_eq!(damage, [] as [String; 0]);

    // A writer that died between the line and the removal has it done by the next one.
    drop(writer);
    let (mut writer, recovery) = open(&disk, keep).unwrap();
    assert_eq!(recovery.resume[&(SESSION, StreamId(0))].next, Sequence(60));
    writer.log(Event::Retired {
        segment: segments[0].number,
        bytes: 0,
        limit: "bytes".to_owned(),
        streams: vec![],
    });
    flush(&mut writer);
    drop(writer);
    let (_writer, _) = open(&disk, options()).unwrap();
    assert_eq!(disk.content(&segment_name(segments[0].number)), None);
}

#[test]
fn old_age_retires_too() {
    let disk = CrashDisk::new();
    let keep = WriterOptions {
        segment_bytes: 16 << 10,
        // The clock ticks by a microsecond a look.
        retain_age: Some(Duration::from_micros(40)),
        ..options()
    };
    let mut writer = create(&disk, keep);
    let mut agent = Agent::new(0);
    for _ in 0..60 {
        let (header, bytes) = agent.frame(1);
        writer.append(&header, &bytes);
        flush(&mut writer);
    }
    let segments = reader(&disk).segments().unwrap();
    assert!(segments.len() < 30, "{}", segments.len());
    assert!(
        events(&disk)
            .iter()
            .any(|line| matches!(&line.event, Event::Retired { limit, .. } if limit == "age"))
    );
}

#[test]
fn metadata_is_shared_between_sessions_and_its_names_are_no_paths() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    let other = SessionId(2);
    let put = |writer: &mut TrailWriter, session, boot: &str| {
        for item in 0..500 {
            let text = format!("name: event{item}\n").repeat(20);
            let name = format!("events/sched/event{item}/format");
            writer
                .put_metadata(session, 1, &name, text.into_bytes())
                .unwrap();
        }
        for name in ["proc/kallsyms", "../../../etc/passwd", "lock", ""] {
            let content = format!("{name} of {boot}").repeat(4000);
            writer
                .put_metadata(session, 1, name, content.into_bytes())
                .unwrap();
        }
        writer.finish_metadata(session, 1);
    };
    put(&mut writer, SESSION, "boot 1");
    let before = disk.syncs();
    assert_eq!(flush(&mut writer).metadata, [(SESSION, 1)]);
    assert!(disk.syncs() - before < 10, "no sync an item");
    let files = disk.names().len();
    put(&mut writer, other, "boot 2");
    assert_eq!(flush(&mut writer).metadata, [(other, 1)]);
    // A manifest, two large items and the small ones: the formats are there already.
    assert_eq!(disk.names().len() - files, 1 + 3);
    writer.close().unwrap();
    assert!(
        disk.names().iter().all(|name| !name.contains("passwd")),
        "{:?}",
        disk.names()
    );
    let reader = reader(&disk);
    assert_eq!(reader.manifests().unwrap().0, [(other, 1), (SESSION, 1)]);
    let manifest = reader.manifest(other, 1).unwrap();
    let items = reader.items(&manifest).unwrap();
    assert_eq!(items.len(), 504);
    assert!(items["../../../etc/passwd"].starts_with(b"../../../etc/passwd of boot 2"));
    assert!(items["events/sched/event7/format"].starts_with(b"name: event7\n"));
    let (_, recovery) = open(&disk, options()).unwrap();
    assert_eq!(recovery.metadata[&other], 1);

    // A flipped bit is seen, not handed out.
    disk.tamper(&format!("meta/{}", manifest.objects[0]), |bytes| {
        bytes[100] ^= 1;
    });
    assert!(reader.items(&manifest).is_err());
}

#[test]
fn metadata_is_bounded() {
    let disk = CrashDisk::new();
    let mut writer = create(
        &disk,
        WriterOptions {
            metadata_bytes: 10_000,
            ..options()
        },
    );
    let mut put = |name: &str, len| writer.put_metadata(SESSION, 1, name, vec![0; len]);
    assert!(put("a", 33 << 20).is_err());
    assert_eq!(put("a", 6_000), Ok(()));
    assert!(put("b", 6_000).is_err());
    assert_eq!(put("b", 4_000), Ok(()));
}

#[test]
fn two_writers_cannot_share_a_trail() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trail");
    let writer = TrailWriter::create(&path, WriterOptions::default(), vm()).unwrap();
    let Err(TrailError::Locked { pid, .. }) = TrailWriter::open(&path, WriterOptions::default())
    else {
        panic!("a second writer came in");
    };
    assert_eq!(pid, Some(std::process::id()));
    let reader = TrailReader::open(&path).unwrap();
    assert_eq!(
        reader.writer().unwrap().and_then(|holder| holder.pid),
        Some(std::process::id())
    );
    // Looking does not take: the trail can be closed, and continued by the next.
    writer.close().unwrap();
    assert_eq!(reader.writer().unwrap(), None);
    let (second, recovery) = TrailWriter::open(&path, WriterOptions::default()).unwrap();
    assert!(recovery.closed);
    drop(second);
}

#[test]
fn a_new_trail_needs_an_empty_place() {
    let dir = tempfile::tempdir().unwrap();
    let create = |path: &std::path::Path| {
        TrailWriter::create(path, WriterOptions::default(), vm()).map(drop)
    };
    let occupied = dir.path().join("occupied");
    std::fs::create_dir(&occupied).unwrap();
    std::fs::write(occupied.join("file"), "x").unwrap();
    assert!(matches!(create(&occupied), Err(TrailError::Exists { .. })));
    assert!(matches!(
        create(&occupied.join("file")),
        Err(TrailError::Exists { .. })
    ));
    assert_eq!(std::fs::read_dir(&occupied).unwrap().count(), 1);
    assert!(matches!(
        create(&dir.path().join("no/such/parent")),
        Err(TrailError::Io { .. })
    ));
    assert!(matches!(
        TrailWriter::open(&occupied, WriterOptions::default()),
        Err(TrailError::NotATrail { .. })
    ));
    assert_eq!(std::fs::read_dir(&occupied).unwrap().count(), 1);

    let new = dir.path().join("new");
    create(&new).unwrap();
    assert!(matches!(create(&new), Err(TrailError::Exists { .. })));

    // What a killed writer left before it was a trail does not stand in the way.
    std::fs::remove_file(new.join("trail.json")).unwrap();
    create(&new).unwrap();
}

#[test]
fn a_trail_of_a_later_version_says_who_reads_it() {
    let disk = CrashDisk::new();
    create(&disk, options()).close().unwrap();
    disk.tamper("trail.json", |bytes| {
        *bytes = br#"{"version": 7, "vmtrail": "3.1.4", "anything": [1, 2]}"#.to_vec();
    });
    let error = TrailReader::open_in(Arc::new(disk.clone())).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("store version 7"), "{text}");
    assert!(text.contains("use vmtrail 3.1.4 or later"), "{text}");
    assert!(matches!(
        open(&disk, options()),
        Err(TrailError::Version { .. })
    ));
}

#[test]
fn an_idle_trail_is_small() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    let mut agent = Agent::new(0);
    for _ in 0..100 {
        let (header, bytes) = agent.frame(64);
        writer.append(&header, &bytes);
    }
    flush(&mut writer);
    assert!(writer.buffer_bytes() > 1 << 20, "it is reused");
    // It forgets with the small batches that an idle guest makes.
    for _ in 0..20 {
        writer.log(note("alive"));
        flush(&mut writer);
    }
    assert!(
        writer.buffer_bytes() < 64 << 10,
        "{}",
        writer.buffer_bytes()
    );
    writer.release_memory();
    assert_eq!(writer.buffer_bytes(), 0);
}
