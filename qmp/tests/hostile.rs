//! Bytes that no QEMU sends, from a seed: the session must not panic, must not grow, and must end
//! with a reason. It prints its seed first; `VMTRAIL_QMP_SEED` runs one again.

use std::time::Duration;

use serde_json::{Value, json};
use vmtrail_qmp::CommandError;
use vmtrail_qmp::line::LineSplitter;
use vmtrail_qmp::session::{
    IN_BAND_WINDOW, MAX_COMMANDS, MAX_WAITING_CRITICAL_EVENTS, MAX_WAITING_EVENTS, Outcome,
    Session, SessionConfig, State,
};

const MAX_LINE_BYTES: usize = 4096;

/// xorshift64*: enough for choosing, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("below a usize")
    }

    fn one_in(&mut self, odds: usize) -> bool {
        self.below(odds) == 0
    }
}

/// One message or something like it.
fn message(random: &mut Random) -> Vec<u8> {
    let id = match random.below(6) {
        0 => json!(u64::MAX),
        1 => json!(-1),
        2 => json!({"a": [1]}),
        3 => Value::Null,
        _ => json!(random.below(60)),
    };
    let text = "x".repeat(random.below(200));
    let value = match random.below(5) {
        0 => json!({"status": text, "running": random.one_in(2)}),
        1 => json!([[], {}, null, 1e300, text]),
        2 => Value::Null,
        _ => json!({}),
    };
    let events = [
        "MIGRATION",
        "STOP",
        "RESUME",
        "RTC_CHANGE",
        "NEVER_HEARD_OF",
        "",
    ];
    let mut bytes = match random.below(14) {
        0 => json!({"QMP": value}).to_string(),
        1..=4 => json!({"return": value, "id": id}).to_string(),
        5 => json!({"error": value, "id": id}).to_string(),
        6 => json!({"error": {"class": text, "desc": text}}).to_string(),
        7..=11 => {
            let event = events[random.below(events.len())];
            json!({"event": event, "data": value, "timestamp": id}).to_string()
        }
        12 => "[".repeat(random.below(300)),
        _ => text,
    }
    .into_bytes();
    if random.one_in(60) && !bytes.is_empty() {
        let place = random.below(bytes.len());
        bytes[place] = u8::try_from(random.below(256)).expect("below 256");
    }
    if random.one_in(200) {
        bytes.resize(random.below(2 * MAX_LINE_BYTES), b' ');
    }
    bytes.extend_from_slice(if random.one_in(3) { b"\n" } else { b"\r\n" });
    bytes
}

fn weather(seed: u64) {
    let mut random = Random(seed | 1);
    let config = SessionConfig {
        max_line_bytes: MAX_LINE_BYTES,
        ..SessionConfig::default()
    };
    let mut session = Session::new(0, config);
    let mut now = 0;
    let mut open = std::collections::BTreeSet::new();
    let mut sent_count = 0_usize;
    let mut closed = false;
    if !random.one_in(10) {
        session.handle_bytes(now, b"{\"QMP\": {\"capabilities\": [\"oob\"]}}\r\n");
        if !random.one_in(10) {
            session.handle_bytes(now, b"{\"return\": {}, \"id\": 1}\r\n");
        }
    }
    for _ in 0..400 {
        now += random.next() % 50_000_000;
        match random.below(10) {
            0..=3 => {
                let bytes = message(&mut random);
                let mut rest = bytes.as_slice();
                while !rest.is_empty() {
                    let (piece, behind) = rest.split_at(1 + random.below(rest.len()));
                    session.handle_bytes(now, piece);
                    rest = behind;
                }
            }
            4..=6 => {
                let allowed = Duration::from_millis(random.next() % 400);
                let oob = random.one_in(8);
                match session.submit(now, "query-status", &Value::Null, allowed, oob) {
                    Ok(id) => assert!(open.insert(id), "an id was given twice"),
                    Err(CommandError::Closed(_)) => assert_eq!(session.state(), State::Closed),
                    Err(CommandError::NoOutOfBand | CommandError::TooMany { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            7 => session.handle_timeout(now),
            8 => {
                while let Some(line) = session.poll_transmit(now) {
                    let sent: Value = serde_json::from_slice(&line).expect("we send JSON");
                    assert!(sent["id"].is_u64());
                    sent_count += 1;
                    session.handle_transmitted();
                }
            }
            _ if random.one_in(100) => session.handle_eof(),
            _ => {}
        }
        while let Some(outcome) = session.poll_outcome() {
            assert!(!closed, "nothing comes after the end: {outcome:?}");
            match outcome {
                Outcome::Reply(id, _) => assert!(open.remove(&id), "answered once: {id:?}"),
                Outcome::Closed(_) => closed = true,
                Outcome::Ready(_) | Outcome::Event { .. } => {}
            }
        }
        assert!(open.len() <= MAX_COMMANDS);
        assert_eq!(closed, session.state() == State::Closed);
        if let Some(at) = session.poll_timeout() {
            assert!(
                !closed && at <= now + 10_000_000_000,
                "no deadline is further away than 10 s"
            );
        }
    }
    session.close_local();
    while let Some(outcome) = session.poll_outcome() {
        if let Outcome::Reply(id, _) = outcome {
            assert!(open.remove(&id));
        }
    }
    assert!(open.is_empty(), "a command was never answered: {open:?}");
    assert!(sent_count <= 400);
}

#[test]
fn any_weather_ends_well() {
    let seed: u64 = match std::env::var("VMTRAIL_QMP_SEED") {
        Ok(seed) => seed.parse().expect("VMTRAIL_QMP_SEED is a number"),
        Err(_) => 0x005e_ed0f_7ea1,
    };
    println!("VMTRAIL_QMP_SEED={seed}");
    for round in 0..1_500_u64 {
        weather(seed.wrapping_add(round.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    }
}

#[test]
fn raw_noise_never_panics_and_never_grows() {
    let mut random = Random(0x0bad_5eed);
    for _ in 0..300 {
        let mut splitter = LineSplitter::new(MAX_LINE_BYTES);
        let mut session = Session::new(
            0,
            SessionConfig {
                max_line_bytes: MAX_LINE_BYTES,
                ..SessionConfig::default()
            },
        );
        for _ in 0..40 {
            // Line ends are rare, so that lines over the limit come up, too.
            let piece: Vec<u8> = (0..random.below(700))
                .map(
                    |_| match u8::try_from(random.below(256)).expect("below 256") {
                        b'\n' if !random.one_in(20) => b' ',
                        byte => byte,
                    },
                )
                .collect();
            splitter.push(&piece);
            while let Ok(Some(_)) = splitter.next_line() {}
            assert!(splitter.capacity_bytes() <= 4 * MAX_LINE_BYTES);
            session.handle_bytes(0, &piece);
        }
        assert_eq!(session.state(), State::Closed);
    }
}

fn ready() -> Session {
    let mut session = Session::new(0, SessionConfig::default());
    session.handle_bytes(
        0,
        b"{\"QMP\": {\"capabilities\": []}}\r\n{\"return\": {}, \"id\": 1}\r\n",
    );
    assert_eq!(session.state(), State::Ready);
    while session.poll_outcome().is_some() || session.poll_transmit(0).is_some() {}
    session
}

#[test]
fn events_that_nobody_takes_are_bounded_and_counted() {
    let mut session = ready();
    for _ in 0..MAX_WAITING_EVENTS + 7 {
        session.handle_bytes(0, b"{\"event\": \"RTC_CHANGE\"}\r\n");
    }
    assert_eq!(session.stats().events_dropped_count, 7);
    session.handle_bytes(0, b"{\"event\": \"STOP\"}\r\n");
    let mut events = Vec::new();
    while let Some(Outcome::Event { event, .. }) = session.poll_outcome() {
        events.push(event.name);
    }
    assert_eq!(events.len(), MAX_WAITING_EVENTS + 1);
    assert_eq!(events.last().map(String::as_str), Some("STOP"));
    session.handle_bytes(0, b"{\"event\": \"RTC_CHANGE\"}\r\n");
    assert!(
        matches!(session.poll_outcome(), Some(Outcome::Event { .. })),
        "there is room again"
    );
}

#[test]
fn a_flood_of_events_that_matter_ends_loudly() {
    let mut session = ready();
    for _ in 0..MAX_WAITING_CRITICAL_EVENTS {
        session.handle_bytes(0, b"{\"event\": \"STOP\"}\r\n");
    }
    assert_eq!(session.state(), State::Ready);
    session.handle_bytes(0, b"{\"event\": \"STOP\"}\r\n");
    assert_eq!(session.state(), State::Closed);
    let mut count = 0;
    let reason = loop {
        match session.poll_outcome().expect("the end comes last") {
            Outcome::Closed(reason) => break reason,
            _ => count += 1,
        }
    };
    assert_eq!(count, MAX_WAITING_CRITICAL_EVENTS, "all that came are told");
    assert!(reason.to_string().contains("65536 events"), "{reason}");

    // By bytes, long before by number.
    let mut session = ready();
    let long = format!(
        "{{\"event\": \"STOP\", \"data\": \"{}\"}}\r\n",
        "x".repeat(250_000)
    );
    for _ in 0..40 {
        session.handle_bytes(0, long.as_bytes());
    }
    assert_eq!(session.state(), State::Closed);
}

#[test]
fn the_window_holds_back_and_lets_go() {
    let mut session = ready();
    let second = Duration::from_secs(1);
    for _ in 0..IN_BAND_WINDOW + 2 {
        session
            .submit(0, "stop", &Value::Null, second, false)
            .expect("there is room");
    }
    let mut sent = Vec::new();
    while let Some(line) = session.poll_transmit(0) {
        sent.push(line);
    }
    assert_eq!(sent.len(), IN_BAND_WINDOW);
    assert_eq!(session.poll_timeout(), Some(1_000_000_000));
    session.handle_transmitted();
    session.handle_timeout(1_000_000_000);
    let mut expired = Vec::new();
    while let Some(Outcome::Reply(id, Err(CommandError::Deadline { sent, .. }))) =
        session.poll_outcome()
    {
        expired.push((id.get(), sent));
    }
    let expected: Vec<_> = (2..)
        .map(|id| (id, id < 2 + IN_BAND_WINDOW as u64))
        .take(IN_BAND_WINDOW + 2)
        .collect();
    assert_eq!(expired, expected, "those that had waited were never sent");
    // Still with QEMU, all of them: a new one waits until one is answered.
    session
        .submit(1_000_000_000, "cont", &Value::Null, second, false)
        .expect("there is room");
    assert_eq!(session.poll_transmit(1_000_000_000), None);
    session.handle_bytes(1_000_000_000, b"{\"return\": {}, \"id\": 4}\r\n");
    assert!(session.poll_transmit(1_000_000_000).is_some());
    assert_eq!(session.stats().late_replies_count, 1);
}

#[test]
fn deadlines_close_what_never_begins() {
    let mut session = Session::new(5, SessionConfig::default());
    assert_eq!(session.poll_timeout(), Some(2_000_000_005));
    session.handle_timeout(2_000_000_004);
    assert_eq!(session.state(), State::AwaitGreeting);
    session.handle_timeout(2_000_000_005);
    let Some(Outcome::Closed(reason)) = session.poll_outcome() else {
        panic!("it closes")
    };
    assert!(
        reason.to_string().contains("serves one client at a time"),
        "{reason}"
    );

    // A command may be given before the greeting; it waits, and learns of the end.
    let mut session = Session::new(0, SessionConfig::default());
    session
        .submit(0, "stop", &Value::Null, Duration::from_secs(60), false)
        .expect("it waits");
    assert_eq!(session.poll_transmit(0), None);
    session.handle_bytes(0, b"{\"QMP\": {}}\r\n");
    session.handle_timeout(5_000_000_000);
    assert!(matches!(
        session.poll_outcome(),
        Some(Outcome::Reply(_, Err(CommandError::Closed(_))))
    ));
    assert!(matches!(session.poll_outcome(), Some(Outcome::Closed(_))));
}
