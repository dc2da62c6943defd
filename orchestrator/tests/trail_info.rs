//! What `vmtrail info` says of a trail, and that a guest's words do nothing to a terminal.

mod common;

use common::*;
use vmtrail::info::info;
use vmtrail::trail::Event;
use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::event::{MigrationEnded, Residency, Session};
use vmtrail::verify::verify;

fn residency(number: u64, parent: Option<u64>) -> Event {
    Event::Residency(Residency {
        residency: number,
        host: format!("host-{number}"),
        pid: (number == 1).then_some(4711),
        qemu: "7.2.22".to_owned(),
        qmp: "/run/qmp".to_owned(),
        parent,
        cause: if parent.is_some() {
            "migration"
        } else {
            "attach"
        }
        .to_owned(),
    })
}

fn recorded(kernel: &str) -> CrashDisk {
    let disk = CrashDisk::new();
    let mut writer = create(&disk, options());
    writer.log(residency(1, None));
    let session = Session {
        session: SESSION.to_string(),
        boot_id: "00".repeat(16),
        agent: "0.1.0".to_owned(),
        kernel: kernel.to_owned(),
        clock: "local".to_owned(),
        page_size: 4096,
        long_size: 8,
        big_endian: false,
        cpus: 2,
    };
    writer.log(Event::Session(session.clone()));
    writer
        .put_metadata(SESSION, 1, "events/header_page", b"text".to_vec())
        .unwrap();
    writer.finish_metadata(SESSION, 1);
    let mut agents = [Agent::new(0), Agent::new(1)];
    for _ in 0..3 {
        for agent in &mut agents {
            let (header, bytes) = agent.frame(2);
            writer.append(&header, &bytes);
        }
        flush(&mut writer);
    }
    writer.log(residency(2, Some(1)));
    writer.log(Event::MigrationEnded(MigrationEnded {
        attempt: 1,
        outcome: "committed".to_owned(),
        reason: None,
        blackout_ns: Some(1),
        qemu_downtime_ms: None,
        drain_ns: None,
        drained: None,
        drained_bytes: None,
        boundaries: vec![],
        transferred_bytes: None,
        total_ms: None,
    }));
    writer.log(Event::ResidencyEnded {
        residency: 1,
        reason: "migrated".to_owned(),
    });
    // A recorder that comes back says again whom it found.
    writer.log(Event::Session(session));
    writer.log(note("seen"));
    writer.close().unwrap();
    disk
}

#[test]
fn what_is_in_a_trail_is_said() {
    let disk = recorded("6.1.0-57");
    let found = info(&reader(&disk)).unwrap();
    assert_eq!(found.store_version, 1);
    assert_eq!(found.vm, vm());
    assert!(!found.being_recorded);
    assert_eq!(found.segments, 1);
    let len = disk.content("streams/00000001.seg").unwrap().len();
    assert_eq!(found.segment_bytes, len as u64);
    assert!(found.metadata_bytes > 4);
    let lives: Vec<_> = found
        .residencies
        .iter()
        .map(|info| (info.residency.residency, info.end.as_deref()))
        .collect();
    assert_eq!(lives, [(1, Some("migrated")), (2, None)]);
    assert!(found.residencies[0].ended_ns > Some(found.residencies[0].began_ns));
    assert_eq!(found.sessions.len(), 1, "said twice, and one");
    assert_eq!(found.sessions[0].metadata, [1]);
    let streams: Vec<_> = found.sessions[0]
        .streams
        .iter()
        .map(|stream| (stream.cpu, stream.frames, stream.pages, stream.bytes))
        .collect();
    assert_eq!(streams, [(0, 3, 6, 6 * 4096), (1, 3, 6, 6 * 4096)]);
    assert_eq!(found.sessions[0].streams[0].first_sent_ns, 1_000_000);
    assert_eq!(found.sessions[0].streams[0].last_sent_ns, 1_040_000);
    assert_eq!(found.migrations.len(), 1);
    assert_eq!(found.notes, ["seen"]);
    let text = found.to_string();
    for line in [
        "residency 1: attach on host-1 (QEMU 7.2.22, pid 4711): migrated",
        "residency 2: migration on host-2 (QEMU 7.2.22, pid ?), from 1: no end yet",
        "session 5e55100000000001: Linux 6.1.0-57, agent 0.1.0, clock local, 2 CPUs, pages of 4096 bytes, metadata complete",
        "migration 1: committed",
        "note: seen",
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line:?} is not in\n{text}"
        );
    }
}

#[test]
fn a_guests_words_do_nothing_to_a_terminal() {
    let disk = recorded("6.1\u{1b}]0;owned\u{7}\u{1b}[2J\r\n\u{202e}");
    for text in [
        info(&reader(&disk)).unwrap().to_string(),
        verify(&reader(&disk)).unwrap().to_string(),
    ] {
        assert!(text.contains("Linux 6.1\u{fffd}]0;owned"), "{text:?}");
        let is_bad = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.contains(is_bad), "{text:?}");
    }
}
