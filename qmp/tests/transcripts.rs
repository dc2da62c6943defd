//! Replays dialogues that were recorded with a real QEMU (`tests/transcripts/README.md`): whole, one
//! byte at a time, and cut anywhere. The session must send what was sent then and tell the same
//! each time, and each answer must be one that its command's type understands.

use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::Value;
use vmtrail_qmp::command::{self, Command, MigrationStatus, RunState};
use vmtrail_qmp::event::EventKind;
use vmtrail_qmp::session::{Outcome, Session, SessionConfig, State};
use vmtrail_qmp::{CloseReason, CommandError, Event};

/// One line of a transcript.
#[derive(Debug, Clone)]
enum Line {
    Sent(Value),
    /// What the session would never send: replayed as nothing but its answer.
    Mistake,
    Received(Vec<u8>),
    EndOfFile,
}

/// What a replay tells.
#[derive(Debug, Default, PartialEq)]
struct Told {
    /// Each outcome as text, for comparing.
    all: Vec<String>,
    events: Vec<Event>,
    /// Commands by name with their answers.
    replies: Vec<(String, Result<String, String>)>,
    stray_replies_count: u64,
}

fn transcripts() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/transcripts");
    let mut files = Vec::new();
    for version in std::fs::read_dir(root).expect("the transcripts are part of the repository") {
        let version = version.expect("readable").path();
        if version.is_dir() {
            let entries = std::fs::read_dir(version).expect("readable");
            files.extend(entries.map(|entry| entry.expect("readable").path()));
        }
    }
    files.sort();
    files
}

fn read(path: &Path) -> Vec<Line> {
    let text = std::fs::read_to_string(path).expect("a transcript is text");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| match line.split_at(2) {
            ("> ", sent) => Line::Sent(serde_json::from_str(sent).expect("it was sent as JSON")),
            ("! ", _) => Line::Mistake,
            ("< ", "EOF") => Line::EndOfFile,
            ("< ", received) => Line::Received(format!("{received}\r\n").into_bytes()),
            _ => panic!("{}: {line}", path.display()),
        })
        .collect()
}

/// Runs a session through a transcript; `cut` tells the length of each piece that it is given.
fn replay(lines: &[Line], mut cut: impl FnMut() -> usize) -> Told {
    // Some recordings asked for out of band and some did not.
    let want_oob = lines.iter().any(|line| match line {
        Line::Sent(command) => command["arguments"]["enable"][0] == "oob",
        _ => false,
    });
    let config = SessionConfig {
        want_oob,
        ..SessionConfig::default()
    };
    let mut session = Session::new(0, config);
    let mut told = Told::default();
    let mut names = Vec::new();
    let mut unread = Vec::new();
    for line in lines {
        if let Line::Received(bytes) = line {
            // Gathered up to the next turn, so that pieces may hold several lines and parts of them.
            unread.extend_from_slice(bytes);
            continue;
        }
        feed(&mut session, &mut unread, &mut cut);
        take(&mut session, &names, &mut told);
        match line {
            Line::Sent(expected) => {
                let (name, oob) = match (&expected["execute"], &expected["exec-oob"]) {
                    (Value::String(name), _) => (name, false),
                    (_, Value::String(name)) => (name, true),
                    _ => panic!("no command: {expected}"),
                };
                if name != "qmp_capabilities" {
                    session
                        .submit(0, name, &expected["arguments"], Duration::from_secs(1), oob)
                        .expect("the session is ready");
                }
                names.push(name.clone());
                let sent = session
                    .poll_transmit(0)
                    .expect("something is to be sent here");
                session.handle_transmitted();
                let sent: Value = serde_json::from_slice(&sent).expect("we send JSON");
                assert_eq!(&sent, expected);
            }
            Line::EndOfFile => session.handle_eof(),
            Line::Mistake | Line::Received(_) => {}
        }
        take(&mut session, &names, &mut told);
    }
    assert_eq!(
        session.state(),
        State::Closed,
        "transcripts end with the connection"
    );
    assert_eq!(session.poll_transmit(0), None);
    told.stray_replies_count = session.stats().stray_replies_count;
    told
}

fn feed(session: &mut Session, unread: &mut Vec<u8>, cut: &mut impl FnMut() -> usize) {
    let mut rest = unread.as_slice();
    while !rest.is_empty() {
        let (piece, behind) = rest.split_at(cut().clamp(1, rest.len()));
        session.handle_bytes(0, piece);
        rest = behind;
    }
    unread.clear();
}

fn take(session: &mut Session, names: &[String], told: &mut Told) {
    while let Some(outcome) = session.poll_outcome() {
        told.all.push(format!("{outcome:?}"));
        match outcome {
            Outcome::Event { event, .. } => told.events.push(event),
            Outcome::Reply(id, result) => {
                // Ids count from 1, and so do the commands of a transcript.
                let index = usize::try_from(id.get()).expect("small") - 1;
                let result = match result {
                    Ok(value) => Ok(value.get().to_owned()),
                    Err(CommandError::Qemu(error)) => Err(error.to_string()),
                    Err(error) => panic!("{}: {error}", names[index]),
                };
                told.replies.push((names[index].clone(), result));
            }
            Outcome::Ready(_) => {}
            Outcome::Closed(reason) => assert_eq!(reason, CloseReason::PeerClosed),
        }
    }
}

fn whole(path: &Path) -> Told {
    replay(&read(path), || usize::MAX)
}

fn name_of(path: &Path) -> &str {
    path.file_stem()
        .and_then(|stem| stem.to_str())
        .expect("a plain name")
}

fn both(name: &str) -> Vec<Told> {
    let files = transcripts();
    let files = files.iter().filter(|path| name_of(path) == name);
    let told: Vec<_> = files.map(|path| whole(path)).collect();
    assert!(told.len() >= 2, "`{name}` was recorded with both versions");
    told
}

/// The states of `MIGRATION`, and the other events by name.
fn story(told: &Told) -> Vec<String> {
    told.events
        .iter()
        .map(|event| match event.kind() {
            EventKind::Migration(status) => status.to_string(),
            _ => event.name.clone(),
        })
        .collect()
}

fn answers<C: Command>(told: &Told) -> Vec<C::Return> {
    let named = told.replies.iter().filter(|(name, _)| name == C::NAME);
    let values = named.filter_map(|(_, result)| result.as_ref().ok());
    values
        .map(|value| serde_json::from_str(value).expect(C::NAME))
        .collect()
}

#[test]
fn one_byte_at_a_time_is_the_same() {
    let files = transcripts();
    assert_eq!(files.len(), 16);
    for path in files {
        let lines = read(&path);
        assert_eq!(replay(&lines, || 1), whole(&path), "{}", path.display());
    }
}

proptest! {
    #[test]
    fn any_cut_is_the_same(
        which in any::<prop::sample::Index>(),
        cuts in prop::collection::vec(1usize..700, 1..60),
    ) {
        let files = transcripts();
        let path = which.get(&files);
        let mut cuts = cuts.into_iter().cycle();
        let told = replay(&read(path), || cuts.next().unwrap_or(1));
        prop_assert_eq!(told, whole(path));
    }
}

#[test]
fn every_answer_is_understood_by_its_type() {
    for told in both("queries") {
        let refused: Vec<_> = told
            .replies
            .iter()
            .filter(|(_, result)| result.is_err())
            .collect();
        assert!(
            matches!(&refused[..], [(name, _)] if name == "x-query-virtio-queue-element"),
            "the guest has no driver, so this queue has no elements: {refused:?}"
        );
        assert_eq!(
            answers::<command::QueryStatus>(&told)[0].status,
            RunState::Prelaunch
        );
        assert_eq!(answers::<command::QueryMigrate>(&told)[0].status, None);
        let capabilities = &answers::<command::QueryMigrateCapabilities>(&told)[0];
        assert_eq!(capabilities.get("pause-before-switchover"), Some(false));
        let parameters = &answers::<command::QueryMigrateParameters>(&told)[0];
        assert!(parameters.contains_key("max-bandwidth"));
        assert_eq!(
            answers::<command::QueryName>(&told)[0].name.as_deref(),
            Some("one")
        );
        assert_eq!(answers::<command::QueryUuid>(&told)[0].uuid.len(), 36);
        assert!(
            answers::<command::QueryVersion>(&told)[0]
                .package
                .starts_with("Debian")
        );
        assert!(answers::<command::QueryCommands>(&told)[0].len() > 150);
        assert_eq!(
            answers::<command::QueryChardev>(&told)[0][0].label,
            "compat_monitor0"
        );
        let buses = &answers::<command::QueryPci>(&told)[0];
        assert!(
            buses[0]
                .devices
                .iter()
                .any(|device| device.qdev_id == "vser0")
        );
        let devices = &answers::<command::XQueryVirtio>(&told)[0];
        assert_eq!(devices[0].path, "/machine/peripheral/vser0/virtio-backend");
        let children = answers::<command::QomList>(&told);
        assert!(
            children[0]
                .iter()
                .any(|child| child.child_type() == Some("virtio-serial-pci"))
        );
        assert_eq!(answers::<command::QomGet>(&told)[0], 31);
        let queue = &answers::<command::XQueryVirtioQueueStatus>(&told)[0];
        assert_eq!((queue.vring_num, queue.last_avail_idx), (128, Some(0)));
    }
}

#[test]
fn mistakes_cost_only_themselves() {
    for told in both("mistakes") {
        let errors = told
            .replies
            .iter()
            .filter(|(_, result)| result.is_err())
            .count();
        assert_eq!(errors, 6, "{:?}", told.replies);
        assert_eq!(
            told.stray_replies_count, 1,
            "the error that has no id, to no command of ours"
        );
        assert_eq!(
            answers::<command::QueryStatus>(&told).len(),
            1,
            "the connection goes on"
        );
    }
}

#[test]
fn ports_come_and_go() {
    for told in both("ports") {
        assert_eq!(answers::<command::ChardevAdd>(&told).len(), 2);
        assert_eq!(answers::<command::DeviceAdd>(&told).len(), 2);
        let chardevs = &answers::<command::QueryChardev>(&told)[0];
        let named = |label: &str| chardevs.iter().find(|chardev| chardev.label == label);
        assert!(named("c0").is_some_and(|chardev| !chardev.is_disconnected()));
        assert!(named("c1").is_some_and(command::ChardevInfo::is_disconnected));
        assert_eq!(story(&told), ["DEVICE_DELETED", "SHUTDOWN"]);
        assert_eq!(
            told.events[0].kind(),
            EventKind::DeviceDeleted {
                device: Some("p0"),
                path: "/machine/peripheral/p0"
            }
        );
        let removed = told
            .replies
            .iter()
            .filter(|(name, _)| name == "chardev-remove");
        let removed: Vec<_> = removed.map(|(_, result)| result.is_ok()).collect();
        assert_eq!(removed, [false, true], "busy, then free");
    }
}

#[test]
fn power_is_told() {
    for told in both("power") {
        assert_eq!(story(&told), ["RESUME", "STOP", "RESET", "SHUTDOWN"]);
        assert!(told.events.iter().all(|event| event.timestamp.is_some()));
    }
}

#[test]
fn a_source_tells_both_attempts() {
    for told in both("migration-source") {
        let story: Vec<_> = story(&told)
            .into_iter()
            .filter(|event| event != "MIGRATION_PASS")
            .collect();
        let (first, second) = story.split_at(
            story
                .iter()
                .position(|event| event == "cancelled")
                .expect("it was cancelled")
                + 1,
        );
        // A cancelled 7.2 leaves `pre-switchover` through `device`, as if it had been let go on; so
        // `device` alone does not tell that a migration is past its hold.
        let first: Vec<_> = first.iter().filter(|event| *event != "device").collect();
        assert_eq!(
            first,
            [
                "setup",
                "active",
                "STOP",
                "pre-switchover",
                "cancelling",
                "RESUME",
                "cancelled"
            ]
        );
        let end = [
            "setup",
            "active",
            "STOP",
            "pre-switchover",
            "device",
            "completed",
            "SHUTDOWN",
        ];
        assert_eq!(second, end);
        let states = answers::<command::QueryMigrate>(&told);
        let states: Vec<_> = states.iter().map(|info| info.status.clone()).collect();
        assert_eq!(
            states,
            [
                None,
                Some(MigrationStatus::PreSwitchover),
                Some(MigrationStatus::Cancelled),
                Some(MigrationStatus::Completed),
            ]
        );
        let last = answers::<command::QueryMigrate>(&told)
            .pop()
            .expect("there are four");
        assert!(last.downtime_ms.is_some() && last.ram.is_some_and(|ram| ram.total_bytes > 0));
        let states = answers::<command::QueryStatus>(&told);
        let states: Vec<_> = states.iter().map(|info| info.status.clone()).collect();
        assert_eq!(
            states,
            [RunState::Running, RunState::Running, RunState::PostMigrate]
        );
    }
}

#[test]
fn a_destination_resumes_before_it_has_completed() {
    for told in both("migration-destination") {
        assert_eq!(
            story(&told),
            ["setup", "active", "RESUME", "completed", "SHUTDOWN"]
        );
        assert!(answers::<command::QueryStatus>(&told)[0].running);
    }
    for told in both("migration-destination-cancelled") {
        let story = story(&told);
        assert_eq!(story[..2], ["setup", "active"]);
        assert!(!story.contains(&"RESUME".to_owned()), "{story:?}");
    }
}
