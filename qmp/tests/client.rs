//! The client against a scripted server: each way in which a peer can be absent, busy, slow, broken
//! or newer than we are.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use vmtrail_qmp::client::{EventsEnded, MAX_RECEIVER_EVENTS};
use vmtrail_qmp::command::{self, MigrationStatus, QueryMigrate, QueryName, QueryStatus};
use vmtrail_qmp::error::{CommandError, ExecuteError};
use vmtrail_qmp::event::EventKind;
use vmtrail_qmp::testing::{FakeQmp, FakeQmpBuilder, Opening, Step};
use vmtrail_qmp::{Client, CloseReason, ConnectError, ConnectOptions};

/// A bound on everything that should be quick; generous, because tests share their machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn short() -> ConnectOptions {
    let mut options = ConnectOptions::default();
    options.session.greeting_deadline = Duration::from_millis(200);
    options
}

struct Scene {
    dir: TempDir,
    fake: FakeQmp,
}

impl Scene {
    fn new(builder: FakeQmpBuilder) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let fake = builder
            .start(dir.path().join("qmp"))
            .expect("a socket in it");
        Self { dir, fake }
    }

    async fn connect(&self) -> Client {
        Client::connect(self.fake.path(), ConnectOptions::default())
            .await
            .expect("it greets")
    }
}

async fn refused(path: &Path) -> ConnectError {
    let attempt = Client::connect(path, short());
    tokio::time::timeout(PATIENCE, attempt)
        .await
        .expect("connecting is bounded in time")
        .expect_err("there is nobody to connect to")
}

#[tokio::test]
async fn absent_peers_are_told_apart() {
    let dir = TempDir::new().expect("a temporary directory");
    let at = |name: &str| dir.path().join(name);

    let error = refused(&at("nothing")).await;
    assert!(matches!(error, ConnectError::Missing { .. }), "{error}");

    std::fs::write(at("file"), "x").expect("writable");
    let error = refused(&at("file")).await;
    assert!(
        matches!(
            error,
            ConnectError::NotASocket {
                what: "a regular file",
                ..
            }
        ),
        "{error}"
    );
    let error = refused(dir.path()).await;
    assert!(
        matches!(
            error,
            ConnectError::NotASocket {
                what: "a directory",
                ..
            }
        ),
        "{error}"
    );

    drop(UnixListener::bind(at("stale")).expect("bind"));
    let error = refused(&at("stale")).await;
    assert!(matches!(error, ConnectError::Stale { .. }), "{error}");

    let error = refused(&at(&"x".repeat(200))).await;
    assert!(matches!(error, ConnectError::PathTooLong { .. }), "{error}");
}

#[tokio::test]
async fn a_held_monitor_is_busy_and_says_what_to_do() {
    let scene = Scene::new(FakeQmp::builder().opening(Opening::Silence));
    let begun = Instant::now();
    let error = refused(scene.fake.path()).await;
    assert!(matches!(error, ConnectError::Busy { .. }), "{error}");
    assert!(begun.elapsed() >= Duration::from_millis(200));
    let text = error.to_string();
    assert!(
        text.contains("serves one client at a time") && text.contains("-qmp unix:"),
        "{text}"
    );
}

#[tokio::test]
async fn a_full_backlog_is_busy_too() {
    let dir = TempDir::new().expect("a temporary directory");
    let path = dir.path().join("qmp");
    // As QEMU listens, with nobody to accept.
    let socket = tokio::net::UnixSocket::new_stream().expect("a socket");
    socket.bind(&path).expect("bind");
    let _listener = socket.listen(1).expect("listen");
    let mut parked = Vec::new();
    let error = loop {
        let mut options = short();
        options.session.greeting_deadline = Duration::from_secs(3600);
        let path = path.clone();
        let mut attempt = tokio::spawn(Client::connect(path, options));
        match tokio::time::timeout(Duration::from_millis(100), &mut attempt).await {
            Ok(ended) => break ended.expect("no panic").expect_err("nobody greets"),
            Err(_) => parked.push(attempt),
        }
        assert!(parked.len() < 10, "the backlog never filled");
    };
    assert!(
        matches!(error, ConnectError::Busy { waited: None, .. }),
        "{error}"
    );
    for attempt in parked {
        attempt.abort();
    }
}

#[tokio::test]
async fn peers_that_speak_something_else() {
    let human = b"QEMU 7.2.22 monitor - type 'help' for more information\r\n(qemu) ".to_vec();
    for (opening, human_monitor) in [
        (Opening::Say(human), true),
        (Opening::Say(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()), false),
        (Opening::Say(b"no line end".to_vec()), false),
        (Opening::Say(vec![0xff, 0, b'\n']), false),
        (Opening::Say(b"{\"return\": {}}\r\n".to_vec()), false),
        (Opening::SayAndClose(Vec::new()), false),
        (Opening::SayAndClose(b"{\"QM".to_vec()), false),
    ] {
        let scene = Scene::new(FakeQmp::builder().opening(opening.clone()));
        let error = refused(scene.fake.path()).await;
        let ConnectError::NotQmp {
            human_monitor: human,
            ..
        } = &error
        else {
            panic!("{opening:?}: {error}")
        };
        assert_eq!(*human, human_monitor, "{error}");
    }
}

#[tokio::test]
async fn an_endless_line_is_cut_off() {
    let scene = Scene::new(FakeQmp::builder().opening(Opening::Say(vec![b'{'; 100_000])));
    let mut options = short();
    options.session.max_line_bytes = 10_000;
    let error = Client::connect(scene.fake.path(), options)
        .await
        .expect_err("too long");
    assert!(
        error.to_string().contains("more than 10000 bytes"),
        "{error}"
    );
}

#[tokio::test]
async fn the_state_is_known_and_no_event_falls_in_between() {
    let scene = Scene::new(
        FakeQmp::builder()
            .on(
                "query-status",
                [
                    Step::event("STOP", Value::Null),
                    Step::returns(json!({"status": "paused", "running": false})),
                    Step::event("RESUME", Value::Null),
                ],
            )
            .on(
                "query-migrate",
                [Step::returns(json!({"status": "postcopy-teleport"}))],
            ),
    );
    let client = scene.connect().await;
    let initial = client.initial().expect("asked for");
    assert!(!initial.status.running);
    assert_eq!(
        initial.migration.status,
        Some(MigrationStatus::Other("postcopy-teleport".to_owned()))
    );
    let mut events = client.subscribe();
    let kinds: Vec<_> = std::iter::from_fn(|| events.try_recv())
        .map(|event| event.expect("open").name.clone())
        .collect();
    assert_eq!(kinds, ["STOP", "RESUME"]);
    assert_eq!(
        client.peer_pid(),
        Some(std::process::id()),
        "the server is in this process"
    );
}

#[tokio::test]
async fn a_server_without_a_vm_is_an_error_or_accepted_on_request() {
    let scene = Scene::new(FakeQmp::builder().on("query-status", [Step::error("no VM here")]));
    let error = Client::connect(scene.fake.path(), short())
        .await
        .expect_err("no state");
    assert!(matches!(error, ConnectError::Resync { .. }), "{error}");
    assert!(error.to_string().contains("no VM here"), "{error}");
    let options = ConnectOptions {
        resync: false,
        ..short()
    };
    let client = Client::connect(scene.fake.path(), options)
        .await
        .expect("it greets");
    assert!(client.initial().is_none());
}

#[tokio::test]
async fn what_is_new_does_not_end_the_connection() {
    let scene = Scene::new(FakeQmp::builder().on("query-name", [
        Step::event("BRAND_NEW", json!({"a": [1, 2, {"b": null}]})),
        Step::Bytes(b"{\"event\": \"MIGRATION\", \"data\": {\"status\": \"new\"}, \"timestamp\": {\"seconds\": -1, \"microseconds\": -1}, \"new\": 1}\r\n".to_vec()),
        Step::returns(json!({"name": "one", "new": {}})),
    ]));
    let client = scene.connect().await;
    let mut events = client.subscribe();
    let name = client.execute(QueryName {}).await.expect("query-name");
    assert_eq!(name.name.as_deref(), Some("one"));
    let event = events
        .try_recv()
        .expect("sent before the answer")
        .expect("open");
    assert_eq!(
        (event.name.as_str(), event.kind()),
        ("BRAND_NEW", EventKind::Other)
    );
    assert_eq!(event.data, json!({"a": [1, 2, {"b": null}]}));
    let event = events
        .try_recv()
        .expect("sent before the answer")
        .expect("open");
    assert_eq!(
        event.kind(),
        EventKind::Migration(MigrationStatus::Other("new".to_owned()))
    );
    assert_eq!(event.timestamp, None);
}

#[tokio::test]
async fn late_answers_are_counted_and_cost_nothing() {
    let scene = Scene::new(FakeQmp::builder().on(
        "query-name",
        [Step::ReturnLater(
            Duration::from_millis(150),
            json!({"name": "late"}),
        )],
    ));
    let client = scene.connect().await;
    let error = client
        .execute_within(QueryName {}, Duration::from_millis(20))
        .await
        .expect_err("it comes later");
    assert!(error.is_deadline(), "{error}");
    assert!(
        error.to_string().contains("may still take effect"),
        "{error}"
    );
    // The second command before the late answer: the case in which ids that are used again fail.
    client.execute(QueryStatus {}).await.expect("unharmed");
    let name = client
        .execute(QueryName {})
        .await
        .expect("this one has time");
    assert_eq!(name.name.as_deref(), Some("late"));
    assert_eq!(client.stats().late_replies_count, 1);
    assert_eq!(client.stats().stray_replies_count, 0);
}

#[tokio::test]
async fn a_command_behind_a_stall_is_taken_back() {
    let scene = Scene::new(FakeQmp::builder().on(
        "query-name",
        [
            Step::Stall(Duration::from_millis(400)),
            Step::returns(json!({})),
        ],
    ));
    let client = scene.connect().await;
    let stalled: Vec<_> = (0..vmtrail_qmp::session::IN_BAND_WINDOW)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                client
                    .execute_within(QueryName {}, Duration::from_millis(50))
                    .await
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let error = client
        .execute_within(command::device_del("p0"), Duration::from_millis(60))
        .await
        .expect_err("the window is full");
    assert!(
        matches!(
            error,
            ExecuteError::Command {
                source: CommandError::Deadline { sent: false, .. },
                ..
            }
        ),
        "{error}"
    );
    for command in stalled {
        assert!(
            command
                .await
                .expect("no panic")
                .expect_err("stalled")
                .is_deadline()
        );
    }
    client
        .execute_within(QueryStatus {}, PATIENCE)
        .await
        .expect("it goes on");
    assert!(
        scene
            .fake
            .received()
            .iter()
            .all(|command| command.name != "device_del")
    );
}

#[tokio::test]
async fn a_dropped_future_still_takes_effect() {
    let scene = Scene::new(FakeQmp::builder().on(
        "cont",
        [Step::Stall(Duration::from_millis(50)), Step::empty()],
    ));
    let client = scene.connect().await;
    let dropped =
        tokio::time::timeout(Duration::from_millis(10), client.execute(command::Cont {})).await;
    assert!(dropped.is_err());
    client.execute(QueryStatus {}).await.expect("unharmed");
    assert!(
        scene
            .fake
            .received()
            .iter()
            .any(|command| command.name == "cont")
    );
}

#[tokio::test]
async fn a_command_given_before_the_last_handle_goes_is_written() {
    let scene = Scene::new(FakeQmp::builder().on("cont", [Step::empty()]));
    let client = scene.connect().await;
    let _ = tokio::time::timeout(Duration::ZERO, client.execute(command::Cont {})).await;
    drop(client);
    let begun = Instant::now();
    while scene
        .fake
        .received()
        .iter()
        .all(|command| command.name != "cont")
    {
        assert!(begun.elapsed() < PATIENCE, "it never arrived");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_peer_that_stops_reading_is_given_up() {
    let scene = Scene::new(FakeQmp::builder().on("stop", [Step::empty(), Step::StopReading]));
    let mut options = ConnectOptions::default();
    options.session.write_deadline = Duration::from_millis(300);
    let client = Client::connect(scene.fake.path(), options)
        .await
        .expect("it greets");
    client.execute(command::Stop {}).await.expect("answered");
    let long = json!({"text": "x".repeat(900_000)});
    let error = client
        .execute_raw("long", long)
        .await
        .expect_err("nobody reads");
    assert!(
        matches!(error.closed(), Some(CloseReason::WriteTimeout { .. })),
        "a socket buffer holds less than this: {error}"
    );
    assert!(matches!(
        client.closed().await,
        CloseReason::WriteTimeout { .. }
    ));
}

#[tokio::test]
async fn an_error_without_an_id_belongs_to_the_only_command() {
    let scene = Scene::new(
        FakeQmp::builder()
            .on(
                "query-name",
                [
                    Step::ReturnWithoutId(json!({"name": "somebody else's"})),
                    Step::Bytes(b"{\"return\": {}, \"id\": 99}\r\n".to_vec()),
                    Step::Bytes(b"{\"return\": {}, \"id\": {\"not\": \"ours\"}}\r\n".to_vec()),
                    Step::returns(json!({"name": "own"})),
                ],
            )
            .on(
                "stop",
                [Step::ErrorWithoutId("JSON parse error".to_owned())],
            ),
    );
    let client = scene.connect().await;
    let error = client.execute(command::Stop {}).await.expect_err("its own");
    assert!(
        error
            .qemu()
            .is_some_and(|error| error.desc == "JSON parse error"),
        "{error}"
    );
    assert_eq!(
        client
            .execute(QueryName {})
            .await
            .expect("its own")
            .name
            .as_deref(),
        Some("own")
    );
    assert_eq!(client.stats().stray_replies_count, 3);
}

#[tokio::test]
async fn an_answer_of_another_shape_is_an_error_of_its_own() {
    let scene = Scene::new(FakeQmp::builder().on("query-name", [Step::returns(json!("plain"))]));
    let client = scene.connect().await;
    let error = client.execute(QueryName {}).await.expect_err("no object");
    assert!(matches!(error, ExecuteError::Decode { .. }), "{error}");
    assert!(error.to_string().contains("plain"), "{error}");
    let raw = client
        .execute_raw("query-name", Value::Null)
        .await
        .expect("raw is raw");
    assert_eq!(raw, json!("plain"));
}

#[tokio::test]
async fn garbage_in_the_middle_ends_everything_with_the_reason() {
    let scene = Scene::new(FakeQmp::builder().on("stop", [Step::Bytes(b"*** panic\n".to_vec())]));
    let client = scene.connect().await;
    let mut events = client.subscribe();
    let error = client.execute(command::Stop {}).await.expect_err("garbage");
    assert!(
        matches!(error.closed(), Some(CloseReason::Protocol(_))),
        "{error}"
    );
    assert!(matches!(
        events.recv().await,
        Err(EventsEnded::Closed(CloseReason::Protocol(_)))
    ));
    let mut later = client.subscribe();
    assert!(matches!(later.recv().await, Err(EventsEnded::Closed(_))));
    assert!(client.execute(QueryStatus {}).await.is_err());
}

#[tokio::test]
async fn a_hang_up_ends_what_waits_after_the_last_event() {
    let scene = Scene::new(FakeQmp::builder().on(
        "quit",
        [
            Step::empty(),
            Step::event(
                "SHUTDOWN",
                json!({"guest": false, "reason": "host-qmp-quit"}),
            ),
            Step::Close,
        ],
    ));
    let client = scene.connect().await;
    let mut events = client.subscribe();
    client
        .execute(command::Quit {})
        .await
        .expect("answered before the end");
    let event = events.recv().await.expect("told before the end");
    assert_eq!(
        event.kind(),
        EventKind::Shutdown {
            guest: false,
            reason: "host-qmp-quit"
        }
    );
    assert!(matches!(
        events.recv().await,
        Err(EventsEnded::Closed(CloseReason::PeerClosed))
    ));
    assert_eq!(client.closed().await, CloseReason::PeerClosed);
    // A new connection works: the server is there again, as a restarted monitor is.
    scene
        .connect()
        .await
        .execute(QueryStatus {})
        .await
        .expect("a new one");
    drop(scene.dir);
}

#[tokio::test]
async fn a_flood_of_what_may_be_dropped_does_not_push_out_what_may_not() {
    let mut flood = Vec::new();
    for number in 0..(MAX_RECEIVER_EVENTS as u64 + 500) {
        flood.push(Step::event("RTC_CHANGE", json!({"offset": number})));
        if number % 3 == 0 {
            flood.push(Step::event("MIGRATION_PASS", json!({"pass": number})));
        }
        if number % 10 == 0 {
            flood.push(Step::event(
                "VSERPORT_CHANGE",
                json!({"id": "p", "open": true}),
            ));
        }
    }
    flood.push(Step::empty());
    let scene = Scene::new(FakeQmp::builder().on("stop", flood));
    let client = scene.connect().await;
    let mut events = client.subscribe();
    client.execute(command::Stop {}).await.expect("answered");
    let mut critical = 0;
    let mut others = 0;
    while let Some(event) = events.try_recv() {
        if event.expect("open").is_critical() {
            critical += 1
        } else {
            others += 1
        }
    }
    assert_eq!(critical, (MAX_RECEIVER_EVENTS + 500).div_ceil(10));
    assert_eq!(others, MAX_RECEIVER_EVENTS);
    let all = MAX_RECEIVER_EVENTS + 500 + (MAX_RECEIVER_EVENTS + 500).div_ceil(3);
    assert_eq!(events.dropped_count(), (all - MAX_RECEIVER_EVENTS) as u64);
}

#[tokio::test]
async fn each_receiver_has_all_events() {
    let scene = Scene::new(FakeQmp::builder());
    let client = scene.connect().await;
    let (mut one, mut two, three) = (client.subscribe(), client.subscribe(), client.subscribe());
    drop(three);
    for _ in 0..100 {
        scene.fake.emit("STOP", Value::Null);
        scene.fake.emit("RESUME", Value::Null);
    }
    for events in [&mut one, &mut two] {
        for number in 0..200 {
            let event = tokio::time::timeout(PATIENCE, events.recv())
                .await
                .expect("sent")
                .expect("open");
            assert_eq!(event.name, if number % 2 == 0 { "STOP" } else { "RESUME" });
        }
    }
}

#[tokio::test]
async fn out_of_band_is_negotiated_or_refused() {
    let scene = Scene::new(FakeQmp::builder().on("yank", [Step::empty()]));
    let client = scene.connect().await;
    assert!(client.has_oob());
    client
        .execute_oob(command::Yank::migration(), PATIENCE)
        .await
        .expect("yank");
    let received = scene.fake.received();
    assert_eq!(received[0].arguments, json!({"enable": ["oob"]}));
    assert!(
        received
            .iter()
            .any(|command| command.name == "yank" && command.oob)
    );

    let scene = Scene::new(FakeQmp::builder().opening(Opening::Greet { oob: false }));
    let client = scene.connect().await;
    assert_eq!(scene.fake.received()[0].arguments, Value::Null);
    let error = client
        .execute_oob(command::Yank::migration(), PATIENCE)
        .await
        .expect_err("none on this connection");
    assert!(
        matches!(
            error,
            ExecuteError::Command {
                source: CommandError::NoOutOfBand,
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_that_offers_oob_and_refuses_it_is_used_without() {
    let scene = Scene::new(FakeQmp::builder().on_with("qmp_capabilities", |command| {
        if command.arguments.is_null() {
            vec![Step::empty()]
        } else {
            vec![Step::error("This monitor has no out of band")]
        }
    }));
    let client = scene.connect().await;
    assert!(!client.has_oob());

    let scene =
        Scene::new(FakeQmp::builder().on("qmp_capabilities", [Step::error("not with you")]));
    let error = Client::connect(scene.fake.path(), short())
        .await
        .expect_err("refused");
    assert!(error.to_string().contains("not with you"), "{error}");
}

#[tokio::test]
async fn a_server_that_greets_and_then_stands_still_is_bounded() {
    let scene = Scene::new(FakeQmp::builder().on("qmp_capabilities", []));
    let mut options = short();
    options.session.negotiation_deadline = Duration::from_millis(100);
    let error = Client::connect(scene.fake.path(), options)
        .await
        .expect_err("stands still");
    assert!(
        error
            .to_string()
            .contains("`qmp_capabilities` within 100 ms"),
        "{error}"
    );
}

#[tokio::test]
async fn commands_have_a_bound_in_length_and_number() {
    let scene = Scene::new(
        FakeQmp::builder()
            .on("query-migrate", [Step::returns(json!({}))])
            .on("stop", []),
    );
    let client = scene.connect().await;
    let error = client
        .execute_raw("x", json!({"long": "x".repeat(2 << 20)}))
        .await
        .expect_err("too long");
    assert!(
        matches!(
            error,
            ExecuteError::Command {
                source: CommandError::TooLong { .. },
                ..
            }
        ),
        "{error}"
    );
    let stuck: Vec<_> = (0..vmtrail_qmp::session::MAX_COMMANDS + 10)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                client
                    .execute_within(command::Stop {}, Duration::from_millis(500))
                    .await
            })
        })
        .collect();
    let mut refused_count = 0;
    for command in stuck {
        let error = command
            .await
            .expect("no panic")
            .expect_err("never answered");
        match error {
            ExecuteError::Command {
                source: CommandError::TooMany { .. },
                ..
            } => {
                refused_count += 1;
            }
            error => assert!(error.is_deadline(), "{error}"),
        }
    }
    assert_eq!(refused_count, 10);
    let error = client
        .execute_within(QueryMigrate {}, Duration::from_millis(50))
        .await
        .expect_err("seven commands were never answered, so the window stays full");
    assert!(error.is_deadline(), "{error}");
}
