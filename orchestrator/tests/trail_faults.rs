//! The store against weather: any order of appends, commits, failing syncs, restarts and a death in between; disks that fill up, also
//! a real one; files that somebody damaged. What directed tests of the same look like is in `trail_crash.rs`.

mod common;

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use common::*;
use proptest::prelude::*;
use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::format::{EVENT_LOG, segment_name};
use vmtrail::trail::storage::{Access, Storage};
use vmtrail::trail::{Durable, Entry, Event, Recovery, TrailReader, TrailWriter, WriterOptions};
use vmtrail_wire::{SessionId, StreamId};

/// `SplitMix64`: the same seed, the same disk.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % (bound as u64)).unwrap()
    }
}

#[derive(Debug, Clone)]
enum Step {
    Frame {
        cpu: u32,
        pages: u32,
    },
    Note,
    Metadata,
    Commit,
    /// The next syncs fail.
    BadSyncs(u32),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3u32, 1..4u32).prop_map(|(cpu, pages)| Step::Frame { cpu, pages }),
        2 => Just(Step::Note),
        1 => Just(Step::Metadata),
        5 => Just(Step::Commit),
        1 => (1..3u32).prop_map(Step::BadSyncs),
        1 => Just(Step::Restart),
    ]
}

/// What a recorder believes.
#[derive(Default)]
struct Belief {
    agents: BTreeMap<u32, Agent>,
    /// Per CPU the sequence below which all was acknowledged.
    acknowledged: BTreeMap<u32, u64>,
    notes: u64,
    /// Notes below this were durable.
    notes_durable: u64,
    generation: u32,
    generation_durable: u32,
}

impl Belief {
    fn agent(&mut self, cpu: u32) -> &mut Agent {
        self.agents.entry(cpu).or_insert_with(|| Agent::new(cpu))
    }

    fn acknowledge(&mut self, durable: &Durable, notes: u64) {
        for ((_, stream), next) in &durable.streams {
            self.acknowledged.insert(stream.0, next.0);
        }
        for (_, generation) in &durable.metadata {
            self.generation_durable = *generation;
        }
        self.notes_durable = notes;
    }
}

fn small() -> WriterOptions {
    WriterOptions {
        segment_bytes: 80 << 10,
        ..options()
    }
}

/// Does the steps until the disk dies; says what was believed by then.
fn record(writer: TrailWriter, disk: &CrashDisk, steps: &[Step]) -> Belief {
    let mut belief = Belief::default();
    let mut writer = Some(writer);
    for step in steps {
        let Some(open_writer) = &mut writer else {
            break;
        };
        match step {
            Step::Frame { cpu, pages } => {
                let (header, bytes) = belief.agent(*cpu).frame(*pages);
                open_writer.append(&header, &bytes);
            }
            Step::Note => {
                open_writer.log(note(&format!("note {}", belief.notes)));
                belief.notes += 1;
            }
            Step::Metadata => {
                belief.generation += 1;
                let content = format!("format {}", belief.generation).repeat(300);
                open_writer
                    .put_metadata(
                        SESSION,
                        belief.generation,
                        "events/a/format",
                        content.into(),
                    )
                    .unwrap();
                open_writer.finish_metadata(SESSION, belief.generation);
            }
            Step::Commit => {
                let Some(mut batch) = open_writer.take_batch() else {
                    continue;
                };
                let notes = belief.notes;
                // Bad syncs pass; a dead disk does not.
                let committed = (0..8).any(|_| batch.commit().is_ok());
                let durable = open_writer.finish_batch(batch);
                if committed {
                    belief.acknowledge(&durable, notes);
                } else {
                    assert_eq!(durable, Durable::default());
                    break;
                }
            }
            Step::BadSyncs(count) => disk.fail_syncs(*count),
            Step::Restart => {
                disk.fail_syncs(0);
                let notes = belief.notes;
                let Some(old) = writer.take() else { break };
                if old.close().is_err() {
                    break;
                }
                for (cpu, agent) in &belief.agents {
                    belief.acknowledged.insert(*cpu, agent.sequence);
                }
                belief.generation_durable = belief.generation;
                belief.notes_durable = notes;
                writer = match open(disk, small()) {
                    Ok((writer, recovery)) => {
                        assert!(recovery.closed);
                        assert_eq!(recovery.cut_bytes, 0);
                        Some(writer)
                    }
                    Err(_) => None,
                };
            }
        }
    }
    belief
}

/// What is stored: frames per CPU, notes.
fn stored(disk: &CrashDisk) -> (BTreeMap<u32, Vec<u64>>, Vec<String>, Vec<String>) {
    let (frames, damage) = contents(disk);
    let mut streams: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    for (cpu, sequence) in frames {
        streams.entry(cpu).or_default().push(sequence);
    }
    let notes = events(disk)
        .into_iter()
        .filter_map(|line| match line.event {
            Event::Note { text } if text.starts_with("note ") => Some(text),
            _ => None,
        });
    (streams, notes.collect(), damage)
}

/// Recovery kept what was acknowledged and a prefix of the rest; then writing goes on.
fn check_recovered(disk: &CrashDisk, belief: &Belief) {
    let (mut writer, recovery) =
        open(disk, small()).expect("a trail that was made can be continued");
    assert_eq!(
        recovery.cut_bytes > 0,
        !recovery.cuts.is_empty(),
        "{recovery:?}"
    );
    assert_eq!(
        recovery.damage,
        [] as [String; 0],
        "a crash damages nothing that was durable"
    );
    let (streams, notes, damage) = stored(disk);
    assert_eq!(damage, [] as [String; 0]);
    for (cpu, agent) in &belief.agents {
        let found = streams.get(cpu).map_or(&[][..], Vec::as_slice);
        let next = found.len() as u64;
        assert_eq!(
            found,
            (0..next).collect::<Vec<_>>(),
            "CPU {cpu}: in order, without holes"
        );
        let acknowledged = belief.acknowledged.get(cpu).copied().unwrap_or(0);
        assert!(
            next >= acknowledged,
            "CPU {cpu}: {next} of {acknowledged} acknowledged"
        );
        assert!(next <= agent.sequence);
        let resume = recovery.resume.get(&(SESSION, StreamId(*cpu)));
        assert_eq!(resume.map_or(0, |point| point.next.0), next);
    }
    let expected: Vec<_> = (0..notes.len()).map(|n| format!("note {n}")).collect();
    assert_eq!(notes, expected);
    assert!(
        notes.len() as u64 >= belief.notes_durable,
        "an acknowledged event is gone"
    );
    let generation = recovery.metadata.get(&SESSION).copied().unwrap_or(0);
    assert!(generation >= belief.generation_durable);
    if generation > 0 {
        let reader = reader(disk);
        let items = reader
            .items(&reader.manifest(SESSION, generation).unwrap())
            .unwrap();
        assert_eq!(
            items["events/a/format"].len(),
            format!("format {generation}").len() * 300
        );
    }

    // The agent replays what is behind.
    for (cpu, agent) in &belief.agents {
        let mut again = Agent::new(*cpu);
        let resume = recovery.resume.get(&(SESSION, StreamId(*cpu)));
        for sequence in 0..agent.sequence + 2 {
            let (header, bytes) = again.frame(2);
            if resume.is_none_or(|point| sequence >= point.next.0) {
                writer.append(&header, &bytes);
            }
        }
        flush(&mut writer);
    }
    writer.close().unwrap();
    let (streams, _, damage) = stored(disk);
    assert_eq!(damage, [] as [String; 0]);
    for (cpu, agent) in &belief.agents {
        assert_eq!(streams[cpu], (0..agent.sequence + 2).collect::<Vec<_>>());
    }
    let (_, recovery) = open(disk, small()).unwrap();
    assert!(recovery.closed);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_things_and_a_crash_keep_what_was_acknowledged(
        steps in prop::collection::vec(step(), 1..60),
        dies_after in 0..120u64,
        recovery_dies_after in prop::option::of(0..40u64),
        seed: u64,
    ) {
        let mut dice = Dice(seed);
        let disk = CrashDisk::new();
        let writer = create(&disk, small());
        disk.die_after(dies_after);
        let belief = record(writer, &disk, &steps);
        let mut disk = disk.crash(|bound| dice.below(bound));
        if let Some(operations) = recovery_dies_after {
            // Recovery itself can be interrupted, with something written and something cut.
            disk.die_after(operations);
            if let Ok((mut writer, _)) = open(&disk, small())
                && let Some(mut batch) = writer.take_batch()
            {
                let _ = batch.commit();
            }
            disk = disk.crash(|bound| dice.below(bound));
        }
        check_recovered(&disk, &belief);
    }

    #[test]
    fn any_full_disk_is_backpressure(
        steps in prop::collection::vec(step(), 1..40),
        room in 0..200_000u64,
        seed: u64,
    ) {
        let mut dice = Dice(seed);
        let disk = CrashDisk::new();
        let mut writer = create(&disk, small());
        let mut belief = Belief::default();
        let used: usize = disk.names().iter().filter_map(|name| disk.content(name)).map(|content| content.len()).sum();
        disk.set_capacity(Some(used as u64 + room));
        let mut out = None;
        for step in &steps {
            match step {
                Step::Frame { cpu, pages } => {
                    let (header, bytes) = belief.agent(*cpu).frame(*pages);
                    writer.append(&header, &bytes);
                }
                Step::Note => {
                    writer.log(note(&format!("note {}", belief.notes)));
                    belief.notes += 1;
                }
                Step::Commit if out.is_none() => {
                    let Some(mut batch) = writer.take_batch() else { continue };
                    match batch.commit() {
                        Ok(()) => {
                            let durable = writer.finish_batch(batch);
                            belief.acknowledge(&durable, belief.notes);
                        }
                        Err(error) => {
                            prop_assert!(error.is_full(), "{}", error);
                            // Again without space: again the same, and nothing is spoiled.
                            prop_assert!(batch.commit().unwrap_err().is_full());
                            out = Some(batch);
                        }
                    }
                }
                _ => {}
            }
        }
        // Whoever dies on a full disk loses no more than on any other.
        check_recovered(&disk.crash(|bound| dice.below(bound)), &belief);
        // And when space returns, nothing is lost.
        disk.set_capacity(None);
        if let Some(mut batch) = out {
            batch.commit().unwrap();
            let _ = writer.finish_batch(batch);
        }
        writer.close().unwrap();
        let (streams, notes, damage) = stored(&disk);
        prop_assert_eq!(damage, [] as [String; 0]);
        prop_assert_eq!(notes.len() as u64, belief.notes);
        for (cpu, agent) in &belief.agents {
            prop_assert_eq!(&streams[cpu], &(0..agent.sequence).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_torn_tail_is_cut_and_said() {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    let mut agent = Agent::new(0);
    for _ in 0..3 {
        let (header, bytes) = agent.frame(2);
        writer.append(&header, &bytes);
        flush(&mut writer);
    }
    drop(writer);
    let batch = 4096 * 4;
    // The last batch landed but for one sector, and the log but for its last bytes.
    disk.tamper(&segment_name(1), |bytes| {
        let at = bytes.len() - 2000;
        bytes[at..at + 512].fill(0x55);
    });
    disk.tamper(EVENT_LOG, |bytes| {
        bytes.extend_from_slice(b"{\"at_ns\":17,\"ty")
    });
    let found = vmtrail::verify::verify(&reader(&disk)).unwrap();
    assert_eq!(found.torn_bytes, batch);

    let (writer, recovery) = open(&disk, options()).unwrap();
    assert_eq!(recovery.cut_bytes, batch + 15);
    assert_eq!(recovery.cuts.len(), 2, "{recovery:?}");
    assert!(recovery.cuts[0].contains("15 bytes of a torn tail of events/log.jsonl"));
    assert!(recovery.cuts[1].contains("16384 bytes of a batch that was never acknowledged"));
    assert_eq!(recovery.resume[&(SESSION, StreamId(0))].next.0, 2);
    writer.close().unwrap();
    let said: Vec<_> = events(&disk)
        .into_iter()
        .filter(|line| match &line.event {
            Event::WriterOpened { cut_bytes, .. } => *cut_bytes == batch + 15,
            Event::Note { text } => text.starts_with("recovery: "),
            _ => false,
        })
        .collect();
    assert_eq!(said.len(), 3, "{said:?}");
}

#[test]
fn frames_never_land_before_the_lines_that_explain_them() {
    // Of every crash within the commit of a batch with both, none may leave the frames alone.
    let mut with_frames = 0;
    for operations in 0..20 {
        for seed in 0..40 {
            let mut dice = Dice(seed * 1000 + operations);
            let disk = CrashDisk::new();
            let mut writer = create(&disk, options());
            let (header, bytes) = Agent::new(0).frame(1);
            writer.log(note("note 0"));
            writer.append(&header, &bytes);
            let mut batch = writer.take_batch().unwrap();
            disk.die_after(operations);
            let _ = batch.commit();
            let disk = disk.crash(|bound| dice.below(bound));
            let (_, recovery) = open(&disk, options()).unwrap();
            let (_, notes, _) = stored(&disk);
            if !recovery.resume.is_empty() {
                with_frames += 1;
                assert_eq!(
                    notes,
                    ["note 0"],
                    "after {operations} operations, seed {seed}"
                );
            }
        }
    }
    assert!(with_frames > 10, "{with_frames}");
}

#[test]
fn a_second_writer_is_told_who_the_first_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trail");
    let _writer = TrailWriter::create(&path, WriterOptions::default(), vm()).unwrap();
    let error = TrailWriter::open(&path, WriterOptions::default()).unwrap_err();
    let expected = format!(
        "{} is being written by process {}; two writers cannot share a trail",
        path.display(),
        std::process::id()
    );
    assert_eq!(error.to_string(), expected);
}

/// The directory of the small filesystem; set only for the process inside.
const FULL_DIR: &str = "VMTRAIL_TEST_FULL_DIR";

#[test]
fn a_filesystem_that_fills_up_and_is_freed_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    // A filesystem of our own needs a mount, and a mount needs a namespace: `unshare -rm` gives one to anybody.
    let script = format!(
        "mount -t tmpfs -o size=8m none {0} && {FULL_DIR}={0} exec {1} --ignored --exact inside_the_small_filesystem",
        dir.path().display(),
        std::env::current_exe().unwrap().display(),
    );
    let output = Command::new("unshare")
        .args(["-rm", "sh", "-c", &script])
        .output()
        .expect("unshare is part of util-linux");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by a_filesystem_that_fills_up_and_is_freed_loses_nothing, in a namespace of its own"]
fn inside_the_small_filesystem() {
    let dir = std::path::PathBuf::from(std::env::var_os(FULL_DIR).expect("run by another test"));
    let path = dir.join("trail");
    let ballast = dir.join("ballast");
    std::fs::write(&ballast, vec![1; 2 << 20]).unwrap();
    let mut writer = TrailWriter::create(&path, WriterOptions::default(), vm()).unwrap();
    let mut agent = Agent::new(0);
    let mut durable = 0;
    let mut batch = loop {
        let (header, bytes) = agent.frame(64);
        writer.append(&header, &bytes);
        let mut batch = writer.take_batch().unwrap();
        match batch.commit() {
            Ok(()) => durable = writer.finish_batch(batch).streams[&(SESSION, StreamId(0))].0,
            Err(error) => {
                assert!(error.is_full(), "{error:?}");
                break batch;
            }
        }
        assert!(agent.sequence < 100, "8 MiB hold no 100 frames of 260 KiB");
    };
    assert!(durable > 10, "{durable}");
    // More comes in meanwhile, and the disk stays full.
    for _ in 0..3 {
        let (header, bytes) = agent.frame(64);
        writer.append(&header, &bytes);
        assert!(batch.commit().unwrap_err().is_full());
    }
    let count = |path: &std::path::Path| {
        let mut frames = TrailReader::open(path).unwrap().frames();
        let mut next = 0;
        while let Some(entry) = frames.next().unwrap() {
            match entry {
                Entry::Frame(frame) => {
                    assert_eq!(frame.header.sequence.0, next);
                    next += 1;
                }
                Entry::Damage(damage) => panic!("{damage:?}"),
                Entry::Segment(_) | Entry::Batch(_) => {}
            }
        }
        next
    };
    assert_eq!(
        count(&path),
        durable,
        "what was acknowledged is readable on the full disk"
    );
    std::fs::remove_file(&ballast).unwrap();
    batch.commit().unwrap();
    assert_eq!(
        writer.finish_batch(batch).streams[&(SESSION, StreamId(0))].0,
        durable + 1
    );
    writer.close().unwrap();
    assert_eq!(count(&path), agent.sequence);
    let (_, recovery) = TrailWriter::open(&path, WriterOptions::default()).unwrap();
    assert!(recovery.closed);
    assert_eq!(recovery.cut_bytes, 0);
}

/// A trail with something of everything.
fn specimen() -> CrashDisk {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, small());
    let mut agents = [Agent::new(0), Agent::new(1)];
    for round in 0..12 {
        for agent in &mut agents {
            let (header, bytes) = agent.frame(1 + round % 2);
            writer.append(&header, &bytes);
        }
        writer.log(note("round"));
        if round == 3 {
            let text = b"page header".repeat(10);
            writer
                .put_metadata(SESSION, 1, "events/header_page", text)
                .unwrap();
            writer.finish_metadata(SESSION, 1);
        }
        flush(&mut writer);
    }
    writer.close().unwrap();
    disk
}

/// Everything that reads a trail, over one that may hold anything. Nothing of it may panic or run away.
fn read_everything(disk: &CrashDisk, bytes: usize) {
    let Ok(reader) = TrailReader::open_in(Arc::new(disk.clone())) else {
        return;
    };
    let bound = bytes / 2048 + 1000;
    for headers_only in [false, true] {
        let mut frames = reader.frames();
        if headers_only {
            frames = frames.headers_only();
        }
        let mut steps = 0;
        while let Ok(Some(entry)) = frames.next() {
            if let Entry::Frame(frame) = entry {
                assert_eq!(frame.pages().count() > 0, !headers_only);
            }
            steps += 1;
            assert!(steps < bound, "it runs away");
        }
    }
    let mut lines = reader.events().unwrap();
    let mut steps = 0;
    while let Ok(Some(_)) = lines.next() {
        steps += 1;
        assert!(steps < bytes + 10, "it runs away");
    }
    for segment in reader.segments().unwrap() {
        let _ = reader.index(segment.number);
    }
    if let Ok((manifests, _)) = reader.manifests() {
        for (session, generation) in manifests {
            if let Ok(manifest) = reader.manifest(session, generation) {
                let _ = reader.items(&manifest);
            }
        }
    }
    if let Ok(found) = vmtrail::verify::verify(&reader) {
        let _ = found.to_string();
    }
    if let Ok(found) = vmtrail::info::info(&reader) {
        let _ = found.to_string();
    }
}

/// Damages the files of a trail.
fn mutate(disk: &CrashDisk, dice: &mut Dice) {
    for _ in 0..=dice.below(4) {
        let names = disk.names();
        let name = &names[dice.below(names.len())];
        match dice.below(12) {
            0 => disk.lose(name),
            1 => {
                let other = disk
                    .content(&names[dice.below(names.len())])
                    .unwrap_or_default();
                disk.tamper(name, |bytes| *bytes = other);
            }
            kind => disk.tamper(name, |bytes| {
                let len = bytes.len();
                // Headers are where it hurts.
                let at = if dice.below(2) == 0 {
                    dice.below(len.max(1)) & !4095 | dice.below(96)
                } else {
                    dice.below(len.max(1))
                }
                .min(len);
                match kind {
                    2 => bytes.truncate(at),
                    3 => bytes.resize(len + dice.below(20_000), 0),
                    4 => bytes.extend((0..dice.below(9000)).map(|_| 0x89)),
                    5 => bytes[at..].fill(0xff),
                    6 => {
                        let copy = bytes[at..].to_vec();
                        bytes.extend(copy);
                    }
                    7 => bytes[at..(at + 8).min(len)].fill(0xff),
                    8 => {
                        let to = (at + 4096).min(len);
                        bytes.drain(at..to);
                    }
                    _ => {
                        if let Some(byte) = bytes.get_mut(at) {
                            *byte ^= 1 << dice.below(8);
                        }
                    }
                }
            }),
        }
    }
}

/// `VMTRAIL_MUTATIONS=100000` (and `VMTRAIL_MUTATIONS_SEED`) for a long run.
#[test]
fn any_bytes_are_read_and_recovered_without_a_panic() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let first: u64 = number("VMTRAIL_MUTATIONS_SEED", 1);
    let mut continued = 0;
    let count = number("VMTRAIL_MUTATIONS", 200);
    for seed in first..first + count {
        let mut dice = Dice(seed);
        let disk = specimen();
        mutate(&disk, &mut dice);
        let names = disk.names();
        let bytes = names
            .iter()
            .filter_map(|name| disk.content(name))
            .map(|content| content.len())
            .sum();
        let context = std::panic::catch_unwind(|| {
            read_everything(&disk, bytes);
            continue_and_find(&disk)
        });
        match context {
            Ok(is_continued) => continued += u64::from(is_continued),
            Err(panic) => {
                eprintln!("seed {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(continued > count / 2, "{continued} of {count}");
}

/// Whatever was damaged: if the trail opens, what is written from then on is found.
fn continue_and_find(disk: &CrashDisk) -> bool {
    let Ok((mut writer, _)) = open(disk, small()) else {
        return false;
    };
    let mut agent = Agent::new(7);
    agent.session = SessionId(77);
    for _ in 0..3 {
        let (header, bytes) = agent.frame(1);
        writer.append(&header, &bytes);
        flush(&mut writer);
    }
    writer.close().unwrap();
    let found = |frames: Vec<(u32, u64)>| -> Vec<u64> {
        let ours = frames.into_iter().filter(|(cpu, _)| *cpu == 7);
        ours.map(|(_, sequence)| sequence).collect()
    };
    assert_eq!(found(contents(disk).0), [0, 1, 2]);
    // And found again by the next writer.
    let (_, recovery): (_, Recovery) = open(disk, small()).unwrap();
    assert_eq!(recovery.resume[&(SessionId(77), StreamId(7))].next.0, 3);
    assert!(disk.open(EVENT_LOG, Access::Read).is_ok());
    true
}
