//! `verify` can fail: every way in which a trail can be less than whole gets the verdict, the place and the count that it must.

mod common;

use common::*;
use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::event::{Counters, MigrationEnded, Session, StreamEnd};
use vmtrail::trail::format::segment_name;
use vmtrail::trail::{Event, TrailWriter, WriterOptions};
use vmtrail::verify::{LossKind, Verdict, Verification, verify};
use vmtrail_wire::FrameHeader;

const FRAMES: u64 = 30;

fn verified(disk: &CrashDisk) -> Verification {
    let verification = verify(&reader(disk)).unwrap();
    // Whatever it is, it can be shown.
    assert!(verification.to_string().contains("verdict: "));
    verification
}

fn small() -> WriterOptions {
    WriterOptions {
        segment_bytes: 64 << 10,
        ..options()
    }
}

fn session() -> Event {
    Event::Session(Session {
        session: SESSION.to_string(),
        boot_id: "00112233445566778899aabbccddeeff".to_owned(),
        agent: "0.1.0".to_owned(),
        kernel: "6.1.0".to_owned(),
        clock: "local".to_owned(),
        page_size: 4096,
        long_size: 8,
        big_endian: false,
        cpus: 2,
    })
}

fn attached(epoch: u64) -> Event {
    Event::Attached {
        epoch,
        residency: 1,
        ports: vec![],
    }
}

fn begin(disk: &CrashDisk, cpus: u32) -> TrailWriter {
    let mut writer = create(disk, small());
    writer.log(attached(1));
    writer.log(session());
    for cpu in 0..cpus {
        writer.log(Event::StreamBegan {
            session: SESSION.to_string(),
            cpu,
            sequence: 0,
            first_page: 0,
        });
    }
    writer
}

fn end(mut writer: TrailWriter, next: &[u64]) {
    let streams = (0..)
        .zip(next)
        .map(|(cpu, &next)| StreamEnd { cpu, next })
        .collect();
    writer.log(Event::Stopped {
        session: SESSION.to_string(),
        streams,
    });
    writer.close().unwrap();
}

/// One CPU, `FRAMES` frames of two pages; `edit` decides what is appended for each frame.
fn record(edit: impl Fn(u64, &mut TrailWriter, &FrameHeader, &[u8])) -> CrashDisk {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 1);
    let mut agent = Agent::new(0);
    for sequence in 0..FRAMES {
        let (header, bytes) = agent.frame(2);
        edit(sequence, &mut writer, &header, &bytes);
        flush(&mut writer);
    }
    end(writer, &[FRAMES]);
    disk
}

fn whole() -> CrashDisk {
    record(|_, writer, header, bytes| writer.append(header, bytes))
}

#[test]
fn a_whole_trail_is_continuous() {
    let found = verified(&whole());
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
    assert_eq!(found.exit_code(), 0);
    assert_eq!(found.reasons, [] as [String; 0]);
    assert!(!found.being_recorded);
    let stream = &found.sessions[0].streams[0];
    assert_eq!((stream.frames, stream.pages, stream.events), (30, 60, 60));
    assert_eq!(stream.bytes, 60 * 4096);
    assert_eq!(
        (stream.first_sequence, stream.last_sequence),
        (Some(0), Some(29))
    );
    assert!(found.sessions[0].ended);
}

#[test]
fn the_names_of_the_json_are_those_of_the_page() {
    let json = serde_json::to_value(verified(&whole())).unwrap();
    let page = include_str!("../../docs/trail.md");
    let mut stack = vec![&json];
    let mut names = 0;
    while let Some(value) = stack.pop() {
        match value {
            serde_json::Value::Object(fields) => {
                for (name, value) in fields {
                    assert!(
                        page.contains(&format!("`{name}")),
                        "{name} is not documented"
                    );
                    names += 1;
                    stack.push(value);
                }
            }
            serde_json::Value::Array(items) => stack.extend(items),
            _ => {}
        }
    }
    assert!(names > 25, "{names}");
    assert_eq!(json["verdict"], "continuous");
}

#[test]
fn a_dropped_frame_is_a_loss_with_its_place_and_its_pages() {
    let found = verified(&record(|sequence, writer, header, bytes| {
        if sequence != 7 && sequence != 8 {
            writer.append(header, bytes);
        }
    }));
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    assert_eq!(found.exit_code(), 11);
    let [loss] = &found.losses[..] else {
        panic!("{:?}", found.losses);
    };
    assert_eq!(loss.kind, LossKind::Frames);
    assert_eq!(
        (loss.from, loss.to, loss.pages),
        (Some(7), Some(9), Some(4))
    );
    assert_eq!(loss.cpu, 0);
    assert!(loss.after < loss.before, "{loss:?}");
    assert!(loss.cause.contains("not known"), "{loss:?}");
    assert_eq!(found.sessions[0].streams[0].lost_frames, 2);
    assert_eq!(found.sessions[0].streams[0].lost_pages, 4);
}

#[test]
fn a_gap_that_the_log_explains_is_still_a_loss_and_has_its_cause() {
    let found = verified(&record(|sequence, writer, header, bytes| {
        if sequence == 7 {
            writer.log(Event::Gap {
                session: SESSION.to_string(),
                cpu: 0,
                from: 7,
                to: 8,
                pages: None,
                cause: "the agent no longer held it".to_owned(),
            });
        } else {
            writer.append(header, bytes);
        }
    }));
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    assert_eq!(found.losses[0].cause, "the agent no longer held it");
}

#[test]
fn bookkeeping_does_not_make_a_hole_go_away_nor_one_appear() {
    // A log that claims a loss which the frames refute.
    let found = verified(&record(|sequence, writer, header, bytes| {
        if sequence == 7 {
            writer.log(Event::Gap {
                session: SESSION.to_string(),
                cpu: 0,
                from: 3,
                to: 5,
                pages: Some(4),
                cause: "wrong".to_owned(),
            });
        }
        writer.append(header, bytes);
    }));
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
    assert_eq!(found.losses, []);
}

#[test]
fn missing_first_and_last_frames_are_losses() {
    let found = verified(&record(|sequence, writer, header, bytes| {
        if sequence >= 3 {
            writer.append(header, bytes);
        }
    }));
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    assert_eq!(
        (found.losses[0].from, found.losses[0].to),
        (Some(0), Some(3))
    );
    let found = verified(&record(|sequence, writer, header, bytes| {
        if sequence < 27 {
            writer.append(header, bytes);
        }
    }));
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    assert_eq!(
        (found.losses[0].from, found.losses[0].to),
        (Some(27), Some(30))
    );
    assert!(found.losses[0].before.is_none());
}

#[test]
fn a_cpu_that_has_no_frame_at_all_is_missed() {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 2);
    let mut agent = Agent::new(0);
    let (header, bytes) = agent.frame(1);
    writer.append(&header, &bytes);
    end(writer, &[1, 5]);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    assert_eq!(found.losses[0].cpu, 1);
    assert_eq!(
        (found.losses[0].from, found.losses[0].to),
        (Some(0), Some(5))
    );
}

#[test]
fn a_doubled_frame_is_seen() {
    let found = verified(&record(|sequence, writer, header, bytes| {
        writer.append(header, bytes);
        if sequence == 7 {
            writer.append(header, bytes);
        }
    }));
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    let stream = &found.sessions[0].streams[0];
    assert_eq!((stream.disordered_frames, stream.lost_frames), (1, 0));
    assert_eq!(stream.frames, FRAMES, "it is not counted twice");
}

#[test]
fn swapped_frames_are_seen() {
    let held = std::cell::RefCell::new(None);
    let found = verified(&record(|sequence, writer, header, bytes| {
        if sequence == 7 {
            *held.borrow_mut() = Some((*header, bytes.to_vec()));
            return;
        }
        writer.append(header, bytes);
        if let Some((header, bytes)) = held.borrow_mut().take() {
            writer.append(&header, &bytes);
        }
    }));
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    assert_eq!(found.sessions[0].streams[0].disordered_frames, 1);
}

#[test]
fn every_flipped_bit_of_what_is_stored_is_seen() {
    let disk = whole();
    let sound = disk.content(&segment_name(2)).unwrap();
    // Segment page, batch page, frame header, page header, page content, and the unused end of a page.
    let places = [
        0,
        40,
        4096,
        4096 + 64,
        8192,
        8192 + 40,
        12288,
        12288 + 8,
        12288 + 20,
        12288 + 4000,
    ];
    for at in places {
        for bit in [0, 7] {
            disk.tamper(&segment_name(2), |bytes| {
                bytes.clone_from(&sound);
                bytes[at] ^= 1 << bit;
            });
            let found = verified(&disk);
            assert!(
                matches!(found.verdict, Verdict::Lossy | Verdict::Unknown),
                "byte {at}, bit {bit}: {found}"
            );
            assert!(!found.damage.is_empty(), "byte {at}, bit {bit}");
        }
    }
    disk.tamper(&segment_name(2), |bytes| bytes.clone_from(&sound));
    assert_eq!(verified(&disk).verdict, Verdict::Continuous);
}

#[test]
fn a_missing_segment_is_a_loss_wherever_it_was() {
    let segments = reader(&whole()).segments().unwrap();
    assert!(segments.len() > 4, "{segments:?}");
    for segment in &segments {
        let disk = whole();
        disk.lose(&segment_name(segment.number));
        let found = verified(&disk);
        assert_eq!(found.verdict, Verdict::Lossy, "{}: {found}", segment.number);
        let lost = found.sessions[0].streams[0].lost_frames;
        let held = reader(&whole()).index(segment.number).unwrap();
        assert_eq!(
            lost,
            held.streams.values().next().unwrap().frames,
            "{}: {found}",
            segment.number
        );
    }
}

#[test]
fn a_truncated_segment_is_a_loss_wherever_it_is() {
    for number in [2, reader(&whole()).segments().unwrap().len() as u64] {
        for cut in [1, 4096, 20_000] {
            let disk = whole();
            disk.tamper(&segment_name(number), |bytes| {
                bytes.truncate(bytes.len().saturating_sub(cut).max(8192));
            });
            let found = verified(&disk);
            assert_eq!(found.verdict, Verdict::Lossy, "{number}, {cut}: {found}");
            assert!(!found.damage.is_empty(), "{number}, {cut}: {found}");
        }
    }
}

#[test]
fn a_retired_segment_is_not_lost() {
    let disk = CrashDisk::new();
    let mut writer = create(
        &disk,
        WriterOptions {
            retain_bytes: Some(150 << 10),
            ..small()
        },
    );
    writer.log(attached(1));
    writer.log(session());
    writer.log(Event::StreamBegan {
        session: SESSION.to_string(),
        cpu: 0,
        sequence: 0,
        first_page: 0,
    });
    let mut agent = Agent::new(0);
    for _ in 0..FRAMES {
        let (header, bytes) = agent.frame(2);
        writer.append(&header, &bytes);
        flush(&mut writer);
    }
    end(writer, &[FRAMES]);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
    let stream = &found.sessions[0].streams[0];
    assert!(stream.retired_frames > 5, "{stream:?}");
    assert_eq!(stream.frames + stream.retired_frames, FRAMES);

    // But one that is gone besides is lost.
    let first = reader(&disk).segments().unwrap()[0].number;
    disk.lose(&segment_name(first));
    assert_eq!(verified(&disk).verdict, Verdict::Lossy);
}

fn overrun(count: Option<u64>, at: u64) -> CrashDisk {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 1);
    let mut agent = Agent::new(0);
    for sequence in 0..10 {
        let (header, bytes) = agent.frame_with(2, |index, page| {
            if sequence == at && index == 0 {
                miss(page, count);
            }
        });
        writer.append(&header, &bytes);
    }
    writer.log(Event::Lost {
        session: SESSION.to_string(),
        counters: vec![Counters {
            cpu: 0,
            overrun: count.unwrap_or(5),
            commit_overrun: 0,
            dropped: 0,
            read: 20,
        }],
    });
    end(writer, &[10]);
    disk
}

#[test]
fn a_missed_events_flag_is_an_overrun_with_count_and_place() {
    let found = verified(&overrun(Some(1234), 4));
    assert_eq!(found.verdict, Verdict::Overrun, "{found}");
    assert_eq!(found.exit_code(), 10);
    let [loss] = &found.losses[..] else {
        panic!("{:?}", found.losses);
    };
    assert_eq!((loss.kind, loss.events), (LossKind::Overrun, Some(1234)));
    assert!(loss.after < loss.before, "{loss:?}");
    assert_eq!(found.sessions[0].streams[0].overrun_events, 1234);
    assert_eq!(found.sessions[0].streams[0].lost_frames, 0);
}

#[test]
fn an_overrun_without_a_count_is_one_all_the_same() {
    let found = verified(&overrun(None, 4));
    assert_eq!(found.verdict, Verdict::Overrun, "{found}");
    assert_eq!(found.losses[0].events, None);
    assert_eq!(found.sessions[0].streams[0].overruns_uncounted, 1);
}

#[test]
fn what_was_overwritten_before_the_first_page_is_told_apart() {
    let found = verified(&overrun(Some(99), 0));
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
    assert_eq!(found.sessions[0].streams[0].overrun_before_start, 99);
    assert!(
        found.to_string().contains("begins behind 99 events"),
        "{found}"
    );
}

#[test]
fn the_kernels_counter_tells_what_no_page_tells() {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 1);
    let mut agent = Agent::new(0);
    let (header, bytes) = agent.frame(2);
    writer.append(&header, &bytes);
    writer.log(Event::Lost {
        session: SESSION.to_string(),
        counters: vec![Counters {
            cpu: 0,
            overrun: 42,
            commit_overrun: 0,
            dropped: 0,
            read: 2,
        }],
    });
    end(writer, &[1]);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Overrun, "{found}");
    assert_eq!(found.losses[0].events, Some(42));
}

#[test]
fn time_that_runs_back_within_a_cpu_is_not_believed() {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 1);
    let mut agent = Agent::new(0);
    for sequence in 0..10 {
        if sequence == 5 {
            agent.timestamp -= 55_000;
        }
        let (header, bytes) = agent.frame(1);
        writer.append(&header, &bytes);
    }
    end(writer, &[10]);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Unknown, "{found}");
    assert_eq!(found.exit_code(), 12);
}

#[test]
fn an_end_that_nobody_told_is_unknown_unless_it_is_still_being_recorded() {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 1);
    let mut agent = Agent::new(0);
    let (header, bytes) = agent.frame(1);
    writer.append(&header, &bytes);
    flush(&mut writer);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
    assert!(found.being_recorded);
    drop(writer);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Unknown, "{found}");
    assert!(!found.being_recorded);
    assert!(!found.sessions[0].ended);
}

#[test]
fn a_recording_that_went_on_after_its_end_has_no_end() {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 1);
    let mut agent = Agent::new(0);
    let (header, bytes) = agent.frame(1);
    writer.append(&header, &bytes);
    end(writer, &[1]);
    assert_eq!(verified(&disk).verdict, Verdict::Continuous);
    let (mut writer, _) = open(&disk, small()).unwrap();
    writer.log(attached(2));
    writer.log(session());
    agent.epoch = 2;
    let (header, bytes) = agent.frame(1);
    writer.append(&header, &bytes);
    writer.close().unwrap();
    assert_eq!(verified(&disk).verdict, Verdict::Unknown);
    let (writer, _) = open(&disk, small()).unwrap();
    end(writer, &[2]);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
}

#[test]
fn a_migrations_boundary_is_where_the_successor_follows() {
    let migrated = |lose_successor: bool| {
        let disk = CrashDisk::new();
        let mut writer = begin(&disk, 1);
        let mut agent = Agent::new(0);
        for sequence in 0..10 {
            if sequence == 4 {
                writer.log(Event::MigrationStarted {
                    attempt: 1,
                    from: 1,
                    to: 2,
                    uri: "unix:/run/m".to_owned(),
                });
                for phase in ["migrate", "switchover", "commit"] {
                    writer.log(Event::MigrationPhase {
                        attempt: 1,
                        phase: phase.to_owned(),
                    });
                }
                writer.log(Event::MigrationEnded(MigrationEnded {
                    attempt: 1,
                    outcome: "committed".to_owned(),
                    reason: None,
                    blackout_ns: Some(12_300_000),
                    qemu_downtime_ms: Some(11),
                    drain_ns: Some(2_000_000),
                    drained: Some(true),
                    drained_bytes: Some(4096),
                    boundaries: vec![StreamEnd { cpu: 0, next: 4 }],
                    transferred_bytes: None,
                    total_ms: None,
                }));
                writer.log(attached(2));
                agent.epoch = 2;
            }
            let (header, bytes) = agent.frame(1);
            if !(lose_successor && sequence == 4) {
                writer.append(&header, &bytes);
            }
            flush(&mut writer);
        }
        end(writer, &[10]);
        verified(&disk)
    };
    let found = migrated(false);
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
    let migration = &found.migrations[0];
    assert_eq!(migration.phases.len(), 3);
    let continued = |found: &Verification| {
        let json = serde_json::to_value(found).unwrap();
        json["migrations"][0]["boundaries_continued"][0]["continued"].as_bool()
    };
    assert_eq!(continued(&found), Some(true));
    assert!(found.to_string().contains("blackout 12.3 ms"), "{found}");
    let found = migrated(true);
    assert_eq!(found.verdict, Verdict::Lossy, "{found}");
    assert_eq!(continued(&found), Some(false));
}

#[test]
fn drops_and_replays_are_shown_and_are_no_fault() {
    let disk = CrashDisk::new();
    let mut writer = begin(&disk, 1);
    let mut agent = Agent::new(0);
    for _ in 0..5 {
        let (mut header, _) = agent.frame(1);
        header.flags |= vmtrail_wire::flags::REPLAY;
        let mut bytes = header.encode(&[]).to_vec();
        bytes.extend(page_of(header.sent_ns, 0));
        writer.append(&header, &bytes);
    }
    writer.log(Event::Dropped {
        session: SESSION.to_string(),
        epoch: 1,
        streams: vec![vmtrail::trail::event::StreamDrops {
            cpu: 0,
            duplicates: 3,
            ahead: 2,
        }],
    });
    end(writer, &[5]);
    let found = verified(&disk);
    assert_eq!(found.verdict, Verdict::Continuous, "{found}");
    let stream = &found.sessions[0].streams[0];
    assert_eq!(
        (
            stream.replayed,
            stream.duplicates_dropped,
            stream.ahead_dropped
        ),
        (5, 3, 2)
    );
}
