//! The store's promise on disks that crash, lie about a sync, and fill up: what was acknowledged is there, what was not is
//! there whole or not at all, and what was cut is said.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::*;
use proptest::prelude::*;
use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::{Event, TrailError, TrailWriter, WriterOptions};
use vmtrail_wire::{Sequence, SessionId, StreamId};

/// What a run of a writer acknowledged before it died.
#[derive(Debug, Default)]
struct Acknowledged {
    /// Per CPU the sequence behind the last durable frame.
    frames: BTreeMap<u32, u64>,
    /// Notes whose batch was durable.
    notes: u64,
    metadata: Vec<(SessionId, u32)>,
}

fn small() -> WriterOptions {
    WriterOptions {
        segment_bytes: 60 << 10,
        ..options()
    }
}

/// Records until an operation of the disk fails.
fn record(
    writer: &mut TrailWriter,
    agents: &mut [Agent],
    rounds: u32,
    acknowledged: &mut Acknowledged,
) {
    let mut notes = acknowledged.notes;
    for round in 0..rounds {
        for agent in agents.iter_mut() {
            if (round + agent.cpu) % 3 != 0 {
                let (header, bytes) = agent.frame(1 + round % 3);
                writer.append(&header, &bytes);
            }
        }
        if round % 2 == 0 {
            // Some lines longer than a sector.
            writer.log(note(&format!(
                "{notes} {}",
                "x".repeat((round as usize % 5) * 200)
            )));
            notes += 1;
        }
        if round % 7 == 3 {
            let item = format!("format {round} ").repeat(100).into_bytes();
            let _ = writer.put_metadata(SESSION, round, "events/header_page", item);
            writer.finish_metadata(SESSION, round);
        }
        let Some(mut batch) = writer.take_batch() else {
            continue;
        };
        if batch.commit().is_err() {
            return;
        }
        let durable = writer.finish_batch(batch);
        for ((_, stream), next) in durable.streams {
            acknowledged.frames.insert(stream.0, next.0);
        }
        acknowledged.notes = notes;
        acknowledged.metadata.extend(durable.metadata);
    }
}

/// Every frame once and in order on each CPU, from 0; at least what was acknowledged. Returns what each CPU has.
fn check(disk: &CrashDisk, acknowledged: &Acknowledged) -> BTreeMap<u32, u64> {
    let (frames, damage) = contents(disk);
    assert_eq!(damage, [] as [String; 0]);
    let mut next: BTreeMap<u32, u64> = BTreeMap::new();
    for (cpu, sequence) in frames {
        let next = next.entry(cpu).or_default();
        assert_eq!(sequence, *next, "cpu {cpu}");
        *next += 1;
    }
    for (cpu, &promised) in &acknowledged.frames {
        let have = next.get(cpu).copied().unwrap_or(0);
        assert!(have >= promised, "cpu {cpu}: {have} of {promised}");
    }
    let mut notes = 0;
    for line in events(disk) {
        if let Event::Note { text } = &line.event
            && !text.starts_with("recovery: ")
        {
            assert!(text.starts_with(&format!("{notes} ")), "{text}");
            notes += 1;
        }
    }
    assert!(notes >= acknowledged.notes);
    let reader = reader(disk);
    for &(session, generation) in &acknowledged.metadata {
        let manifest = reader.manifest(session, generation).unwrap();
        assert_eq!(reader.items(&manifest).unwrap().len(), 1);
    }
    next
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// A crash at any operation, with any choice of what landed; then once more; then the rest.
    #[test]
    fn any_crash_keeps_what_was_acknowledged(
        deaths in proptest::collection::vec((0u64..150, any::<u64>()), 1..4),
        failing_sync in proptest::option::of(0u32..3),
    ) {
        let mut disk = CrashDisk::new();
        drop(create(&disk, small()));
        let mut acknowledged = Acknowledged::default();
        let mut agents = [Agent::new(0), Agent::new(1)];
        for (operations, seed) in deaths {
            // The next writer may itself die in its recovery.
            disk.die_after(operations);
            if let Ok((mut writer, recovery)) = open(&disk, small()) {
                for agent in &mut agents {
                    rewind(agent, &recovery);
                }
                if let Some(count) = failing_sync {
                    disk.fail_syncs(count);
                }
                record(&mut writer, &mut agents, 40, &mut acknowledged);
            }
            let mut random = seed;
            disk = disk.crash(|n| {
                // splitmix64: the same seed leaves the same disk.
                random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = random;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                usize::try_from((z ^ (z >> 31)) % n as u64).unwrap()
            });
            let (writer, recovery) = open(&disk, small()).expect("a crash never makes a trail unusable");
            drop(writer);
            let have = check(&disk, &acknowledged);
            for (cpu, next) in have {
                prop_assert_eq!(
                    recovery.resume[&(SESSION, StreamId(cpu))].next,
                    Sequence(next)
                );
            }
            if recovery.cut_bytes > 0 {
                prop_assert!(!recovery.cuts.is_empty());
            }
            // A note that was written and not acknowledged may be there: count on from what is durable.
            acknowledged.notes = notes_of(&disk);
        }
        let (mut writer, recovery) = open(&disk, small()).unwrap();
        for agent in &mut agents {
            rewind(agent, &recovery);
        }
        record(&mut writer, &mut agents, 20, &mut acknowledged);
        writer.close().unwrap();
        check(&disk, &acknowledged);
    }

    /// Any prefix of what a writer had written is a trail: a copy that was cut short can be read and continued.
    #[test]
    fn any_prefix_of_a_segment_is_readable(cut in 0usize..200_000, log_cut in 0usize..3000) {
        let disk = CrashDisk::new();
        let mut writer = create(&disk, options());
        let mut agents = [Agent::new(0), Agent::new(1)];
        record(&mut writer, &mut agents, 12, &mut Acknowledged::default());
        drop(writer);
        disk.tamper("streams/00000001.seg", |bytes| bytes.truncate(cut));
        disk.tamper("events/log.jsonl", |bytes| bytes.truncate(log_cut.max(1)));
        let (before, damage) = contents(&disk);
        prop_assert_eq!(damage, [] as [String; 0]);
        let (writer, _) = open(&disk, options()).unwrap();
        drop(writer);
        prop_assert_eq!(contents(&disk).0, before);
    }

    /// Any bytes in the place of the files are survived: no panic, no endless loop, no allocation by their word.
    #[test]
    fn any_bytes_are_survived(
        at in 0usize..100_000,
        rubbish in proptest::collection::vec(any::<u8>(), 1..300),
        which in 0usize..5,
    ) {
        let disk = CrashDisk::new();
        let mut writer = create(&disk, small());
        record(&mut writer, &mut [Agent::new(0)], 15, &mut Acknowledged::default());
        writer.close().unwrap();
        let names = ["streams/00000001.seg", "streams/00000001.idx", "events/log.jsonl", "streams/00000002.seg", "trail.json"];
        disk.tamper(names[which], |bytes| {
            let at = at % bytes.len();
            let end = (at + rubbish.len()).min(bytes.len());
            bytes[at..end].copy_from_slice(&rubbish[..end - at]);
        });
        if let Ok(reader) = vmtrail::trail::TrailReader::open_in(Arc::new(disk.clone())) {
            let mut frames = reader.frames();
            while frames.next().unwrap().is_some() {}
            let mut lines = reader.events().unwrap();
            while lines.next().unwrap().is_some() {}
            let _ = vmtrail::verify::verify(&reader).unwrap().to_string();
            let _ = vmtrail::info::info(&reader).unwrap().to_string();
        }
        if let Ok((writer, _)) = open(&disk, small()) {
            writer.close().unwrap();
        }
    }
}

fn rewind(agent: &mut Agent, recovery: &vmtrail::trail::Recovery) {
    let resume = recovery.resume.get(&(agent.session, StreamId(agent.cpu)));
    agent.sequence = resume.map_or(0, |point| point.next.0);
    agent.page = resume.map_or(0, |point| point.next_page);
}

fn notes_of(disk: &CrashDisk) -> u64 {
    let notes = events(disk).into_iter().filter(
        |line| matches!(&line.event, Event::Note { text } if !text.starts_with("recovery: ")),
    );
    notes.count() as u64
}

#[test]
fn a_full_disk_is_backpressure_and_not_loss() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, small());
    let mut agent = Agent::new(0);
    let used: usize = disk
        .names()
        .iter()
        .map(|name| disk.content(name).unwrap().len())
        .sum();
    disk.set_capacity(Some(used as u64 + 100_000));
    let mut refused = 0;
    let mut durable = 0;
    for round in 0..40 {
        let (header, bytes) = agent.frame(2);
        writer.append(&header, &bytes);
        writer.log(note(&format!("{round}")));
        let Some(mut batch) = writer.take_batch() else {
            panic!("something waits");
        };
        while let Err(error) = batch.commit() {
            assert!(error.is_full(), "{error:?}");
            // What is on the disk is a sound trail all the while.
            let (frames, damage) = contents(&disk);
            assert_eq!(frames.len(), durable);
            assert_eq!(damage, [] as [String; 0]);
            refused += 1;
            if refused % 3 == 0 {
                disk.set_capacity(Some((used + 100_000 + refused * 20_000) as u64));
            }
            // The writer goes on taking what comes, and a batch that was handed back comes out again.
            assert_eq!(writer.finish_batch(batch).streams.len(), 0);
            batch = writer.take_batch().expect("the refused batch");
        }
        let next = writer.finish_batch(batch).streams[&(SESSION, StreamId(0))];
        durable = usize::try_from(next.0).unwrap();
        assert_eq!(durable, round + 1);
    }
    assert!(refused > 5, "{refused}");
    disk.set_capacity(None);
    writer.close().unwrap();
    assert_eq!(contents(&disk), ((0..40).map(|n| (0, n)).collect(), vec![]));
    let notes: Vec<_> = events(&disk)
        .into_iter()
        .filter_map(|line| match line.event {
            Event::Note { text } => Some(text),
            _ => None,
        })
        .collect();
    assert_eq!(notes, (0..40).map(|n| n.to_string()).collect::<Vec<_>>());
}

#[test]
fn retention_works_on_a_full_disk() {
    // The line that announces a removal needs room too; if there is none, the removal makes it.
    let disk = CrashDisk::new();
    let keep = WriterOptions {
        retain_bytes: Some(100 << 10),
        ..small()
    };
    let mut writer = create(&disk, keep);
    let mut agent = Agent::new(0);
    for round in 0..60 {
        let (header, bytes) = agent.frame(2);
        writer.append(&header, &bytes);
        let mut batch = writer.take_batch().unwrap();
        // No more room than what one segment needs beyond the limit.
        disk.set_capacity(Some(190 << 10));
        batch
            .commit()
            .unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        writer.finish_batch(batch);
    }
    let (frames, damage) = contents(&disk);
    assert_eq!(frames.last(), Some(&(0, 59)));
    assert_eq!(damage, [] as [String; 0]);
}

#[test]
fn a_sync_that_failed_is_not_believed_when_repeated() {
    for failing in 1..4 {
        let disk = CrashDisk::new();
        let mut writer = create(&disk, options());
        let mut agent = Agent::new(0);
        let (header, bytes) = agent.frame(4);
        writer.append(&header, &bytes);
        writer.log(note("0 of one batch"));
        let mut batch = writer.take_batch().unwrap();
        disk.fail_syncs(failing);
        for _ in 0..failing {
            assert!(!batch.commit().unwrap_err().is_full());
        }
        batch.commit().unwrap();
        writer.finish_batch(batch);
        drop(writer);
        // Nothing that was only in the page cache lands.
        let after = disk.crash(|_| 0);
        assert_eq!(contents(&after).0, [(0, 0)]);
        let (_, recovery) = open(&after, options()).unwrap();
        assert_eq!(recovery.cut_bytes, 0);
    }
}

#[test]
fn what_a_killed_writer_left_in_the_page_cache_is_made_durable_before_it_counts() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    let mut agent = Agent::new(0);
    let (header, bytes) = agent.frame(1);
    writer.append(&header, &bytes);
    flush(&mut writer);
    let (header, bytes) = agent.frame(1);
    writer.append(&header, &bytes);
    let mut batch = writer.take_batch().unwrap();
    // Written, and then the sync fails: clean pages that are not on the disk. The roll-back never runs.
    disk.fail_syncs(1);
    disk.die_after(2);
    batch.commit().unwrap_err();
    drop(batch);
    drop(writer);
    disk.die_after(u64::MAX / 2);
    let (writer, recovery) = open(&disk, options()).unwrap();
    let next = recovery.resume[&(SESSION, StreamId(0))].next;
    drop(writer);
    assert_eq!(next, Sequence(2), "the frame was readable");
    let after = disk.crash(|_| 0);
    assert_eq!(contents(&after).0, [(0, 0), (0, 1)], "and it stays");
}

#[test]
fn a_creation_that_died_anywhere_leaves_a_trail_or_an_empty_place() {
    for operations in 0..30 {
        let disk = CrashDisk::new();
        disk.die_after(operations);
        let created = TrailWriter::create_in(Arc::new(disk.clone()), options(), vm());
        let was_created = created.is_ok();
        drop(created);
        for landing in [0, 1] {
            let after = disk.crash(|n| if landing == 0 { 0 } else { n - 1 });
            match open(&after, options()) {
                Ok((writer, _)) => writer.close().unwrap(),
                Err(TrailError::NotATrail { .. }) => {
                    assert!(!was_created, "after {operations} operations");
                    create(&after, options()).close().unwrap();
                }
                Err(error) => panic!("after {operations} operations: {error:?}"),
            }
        }
    }
}

#[test]
fn a_creation_that_is_refused_leaves_nothing() {
    let disk = CrashDisk::new();
    disk.set_capacity(Some(1000));
    let refused = TrailWriter::create_in(Arc::new(disk.clone()), options(), vm());
    assert!(matches!(refused, Err(TrailError::Full { free: 1000, .. })));
    assert_eq!(disk.names(), [] as [String; 0]);
}

/// The same on a real filesystem, where root may mount one that is small.
#[test]
fn a_real_full_disk_is_backpressure_and_not_loss() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=6m", "none"])
        .arg(dir.path())
        .output()
        .is_ok_and(|output| output.status.success());
    if !mounted {
        println!("not root, or not allowed to mount: the disk in memory stands for it");
        return;
    }
    let unmount = Unmount(dir.path());
    let path = dir.path().join("trail");
    let ballast = dir.path().join("ballast");
    let mut writer = TrailWriter::create(&path, options(), vm()).unwrap();
    std::fs::write(&ballast, vec![1; 4 << 20]).unwrap();
    let mut agent = Agent::new(0);
    let mut refused = 0;
    for round in 0..10 {
        let (header, bytes) = agent.frame(64);
        writer.append(&header, &bytes);
        let mut batch = writer.take_batch().unwrap();
        while let Err(error) = batch.commit() {
            assert!(error.is_full(), "{error:?}");
            refused += 1;
            if refused == 3 {
                std::fs::remove_file(&ballast).unwrap();
            }
        }
        let durable = writer.finish_batch(batch);
        assert_eq!(
            durable.streams[&(SESSION, StreamId(0))],
            Sequence(round + 1)
        );
    }
    assert_eq!(refused, 3);
    writer.close().unwrap();
    let reader = vmtrail::trail::TrailReader::open(&path).unwrap();
    let mut frames = reader.frames();
    let mut count = 0;
    while let Some(entry) = frames.next().unwrap() {
        match entry {
            vmtrail::trail::Entry::Frame(_) => count += 1,
            vmtrail::trail::Entry::Damage(damage) => panic!("{damage:?}"),
            _ => {}
        }
    }
    assert_eq!(count, 10);
    drop((frames, reader));

    // A disk that is full from the start is said at the start.
    std::fs::write(&ballast, vec![1; 3 << 20]).unwrap();
    let second = dir.path().join("second");
    assert!(matches!(
        TrailWriter::create(&second, options(), vm()),
        Err(TrailError::Full { .. })
    ));
    assert!(!second.exists());
    drop(unmount);
}

struct Unmount<'a>(&'a std::path::Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        // Lazily: a test that failed may still have files open.
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(self.0)
            .status();
    }
}
