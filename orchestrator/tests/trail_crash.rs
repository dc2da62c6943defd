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
