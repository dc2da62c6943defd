//! The store's promise in single strokes: syncs that lie, page caches that look durable, disks that fill up, creations that
//! die. `trail_crash.rs` does the same at random; here each failure has its name.

mod common;

use std::sync::Arc;

use common::*;
use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::{Event, TrailError, TrailWriter, WriterOptions};
use vmtrail_wire::{Sequence, StreamId};

fn small() -> WriterOptions {
    WriterOptions {
        segment_bytes: 60 << 10,
        ..options()
    }
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
