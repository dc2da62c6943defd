//! One line of every type of the event log, as store version 1 writes and reads it. **Do not change this test, nor its
//! file**: such lines lie on disks. A new type gets a line of its own behind these; a new field must be optional.

mod common;

use common::*;
use vmtrail::trail::Event;
use vmtrail::trail::event::{
    Counters, LogLine, MigrationEnded, Residency, RetiredStream, Session, StreamDrops, StreamEnd,
};

const LINES: &str = include_str!("fixtures/events-v1.jsonl");

fn every_event() -> Vec<Event> {
    let session = SESSION.to_string();
    vec![
        Event::WriterOpened {
            version: "0.1.0".to_owned(),
            cut_bytes: 4096,
        },
        Event::Residency(Residency {
            residency: 1,
            host: "alpha".to_owned(),
            pid: Some(4711),
            qemu: "7.2.22".to_owned(),
            qmp: "/run/qmp".to_owned(),
            parent: None,
            cause: "attach".to_owned(),
        }),
        Event::Attached {
            epoch: 1,
            residency: 1,
            ports: vec!["vmtrail.0".to_owned()],
        },
        Event::Session(Session {
            session: session.clone(),
            boot_id: "0123456789abcdef0123456789abcdef".to_owned(),
            agent: "0.1.0".to_owned(),
            kernel: "6.1.0".to_owned(),
            clock: "local".to_owned(),
            page_size: 4096,
            long_size: 8,
            big_endian: false,
            cpus: 4,
        }),
        Event::StreamBegan {
            session: session.clone(),
            cpu: 2,
            sequence: 0,
            first_page: 0,
        },
        Event::Clock {
            session: session.clone(),
            residency: 1,
            host_ns: 1_700_000_000_000_000_000,
            error_ns: 40_000,
            monotonic_ns: 5_000_000_000,
            boottime_ns: 5_000_000_001,
            realtime_ns: 1_700_000_000_000_030_000,
        },
        Event::MigrationStarted {
            attempt: 1,
            from: 1,
            to: 2,
            uri: "tcp:beta:4444".to_owned(),
        },
        Event::MigrationPhase {
            attempt: 1,
            phase: "switchover".to_owned(),
        },
        Event::MigrationEnded(MigrationEnded {
            attempt: 1,
            outcome: "committed".to_owned(),
            reason: None,
            blackout_ns: Some(41_000_000),
            qemu_downtime_ms: Some(40),
            drain_ns: Some(2_000_000),
            drained: Some(true),
            drained_bytes: Some(8192),
            boundaries: vec![StreamEnd { cpu: 2, next: 1 }],
            transferred_bytes: Some(1_073_741_824),
            total_ms: Some(900),
        }),
        Event::ResidencyEnded {
            residency: 1,
            reason: "migrated".to_owned(),
        },
        Event::Dropped {
            session: session.clone(),
            epoch: 1,
            streams: vec![StreamDrops {
                cpu: 2,
                duplicates: 3,
                ahead: 1,
            }],
        },
        Event::Lost {
            session: session.clone(),
            counters: vec![Counters {
                cpu: 2,
                overrun: 0,
                commit_overrun: 0,
                dropped: 0,
                read: 2,
            }],
        },
        Event::Stopped {
            session: session.clone(),
            streams: vec![StreamEnd { cpu: 2, next: 2 }],
        },
        Event::Gap {
            session: "00000000000000ff".to_owned(),
            cpu: 0,
            from: 7,
            to: 9,
            pages: Some(12),
            cause: "the agent held them no longer".to_owned(),
        },
        Event::Fork {
            session: "00000000000000ff".to_owned(),
            cpu: 0,
            have: 9,
            next: 4,
        },
        Event::Retired {
            segment: 0,
            bytes: 268_435_456,
            limit: "bytes".to_owned(),
            streams: vec![RetiredStream {
                session: "00000000000000ff".to_owned(),
                cpu: 0,
                from: 0,
                to: 7,
                frames: 7,
                pages: 70,
                first_page: 0,
                next_page: 70,
            }],
        },
        Event::MigrationEnded(MigrationEnded {
            attempt: 2,
            outcome: "failed".to_owned(),
            reason: Some("refused".to_owned()),
            blackout_ns: None,
            qemu_downtime_ms: None,
            drain_ns: None,
            drained: None,
            drained_bytes: None,
            boundaries: vec![],
            transferred_bytes: None,
            total_ms: None,
        }),
        note("a note, \"quoted\""),
        Event::WriterClosed,
    ]
}

#[test]
fn every_type_is_written_as_version_1_does() {
    let events = every_event();
    let pinned: Vec<_> = LINES.lines().collect();
    assert_eq!(pinned.len(), events.len());
    for (event, line) in events.into_iter().zip(pinned) {
        let at_ns = frozen();
        let found = serde_json::to_string(&LogLine { at_ns, event }).unwrap();
        assert_eq!(found, line);
    }
}

#[test]
fn every_type_of_version_1_is_read() {
    for (line, event) in LINES.lines().zip(every_event()) {
        let found: LogLine = serde_json::from_str(line).unwrap();
        assert_eq!((found.at_ns, found.event), (frozen(), event));
        // A later version may say more.
        let more = line.replacen('{', "{\"later\":{\"a\":[1]},", 1);
        let with_more: LogLine = serde_json::from_str(&more).unwrap();
        let again: LogLine = serde_json::from_str(line).unwrap();
        assert_eq!(with_more, again);
    }
}

#[test]
fn every_type_is_in_the_document_with_its_fields() {
    let document = include_str!("../../docs/trail.md");
    let about = |field: &str| document.contains(&format!("`{field}`"));
    for line in LINES.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let kind = line["type"].as_str().unwrap();
        assert!(about(kind), "{kind} is not in docs/trail.md");
        let mut stack = vec![&line];
        while let Some(value) = stack.pop() {
            match value {
                serde_json::Value::Object(fields) => {
                    for (field, value) in fields {
                        assert!(about(field), "{field} of {kind} is not in docs/trail.md");
                        stack.push(value);
                    }
                }
                serde_json::Value::Array(items) => stack.extend(items),
                _ => {}
            }
        }
    }
}
