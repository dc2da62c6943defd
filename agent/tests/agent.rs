//! The agent on the build machine's own kernel: a private tracefs instance, FIFO pairs and sockets for ports.
//!
//! The judge of completeness is the trace itself: numbered marks written through `trace_marker`, looked for in the
//! pages that arrived. It knows nothing of sequences.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use support::{Agent, Host, PATIENCE, Store, can_trace};
use vmtrail_wire::agent_to_host::ErrorCode;
use vmtrail_wire::host_to_agent::Setting;
use vmtrail_wire::{HostMessage, Sequence, StreamId};

#[test]
fn a_reader_gets_every_mark_once() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    // Before a reader speaks, not a byte.
    agent.marks(0..100);
    host.read_for(&mut store, Duration::from_millis(500));
    assert_eq!(store.bytes, 0);

    host.attach(&mut store, 1);
    agent.marks(100..5000);
    let quiesced = host.ask(&mut store, HostMessage::Flush);
    assert!(quiesced.started);
    store.assert_contiguous();
    store.assert_marks(0..5000);
    for state in &quiesced.streams {
        let held = store
            .streams
            .get(&state.stream.0)
            .map_or(0, |frames| frames.len() as u64);
        assert_eq!(state.next.0, held, "{}", state.stream);
    }
    assert_eq!(host.desynchronised, 0);
}

#[test]
fn several_ports_share_the_cpus() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(2, &[]);
    let mut store = Store::default();
    let mut hosts = [Host::on_fifo(&agent.port(0)), Host::on_fifo(&agent.port(1))];
    for host in &mut hosts {
        host.attach(&mut store, 1);
    }
    agent.marks(0..3000);
    for host in &mut hosts {
        host.ask(&mut store, HostMessage::Flush);
    }
    store.assert_contiguous();
    store.assert_marks(0..3000);
    let mut carried: Vec<u32> = Vec::new();
    for hello in &store.hellos {
        assert_eq!(hello.ports, 2);
        carried.extend(hello.streams.iter().map(|state| state.stream.0));
    }
    carried.sort_unstable();
    carried.dedup();
    assert_eq!(
        carried.len(),
        store.hellos[0].cpus as usize,
        "each CPU has its port"
    );
}

#[test]
fn a_dead_readers_successor_gets_what_it_lacks() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut first = Host::on_fifo(&agent.port(0));
    first.attach(&mut store, 7);
    agent.marks(0..1000);
    first.ask(&mut store, HostMessage::Flush);
    // From here on nothing is acknowledged. The reader is slow, then it dies with bytes unread, and its store with it.
    let durable = store.next();
    agent.marks(1000..3000);
    first.read_for(&mut store, Duration::from_millis(400));
    drop(first);
    agent.marks(3000..4000);
    let durable: BTreeMap<u32, u64> = durable
        .iter()
        .map(|(stream, next)| (stream.0, next.0))
        .collect();
    for (cpu, frames) in &mut store.streams {
        let next = durable.get(cpu).copied().unwrap_or(0);
        frames.retain(|&sequence, _| sequence < next);
    }

    let mut second = Host::on_fifo(&agent.port(0));
    second.attach(&mut store, 8);
    second.ask(&mut store, HostMessage::Flush);
    assert!(store.replayed > 0, "nothing was replayed");
    store.assert_contiguous();
    store.assert_marks(0..4000);

    // A third reader, who has lost nothing, is told so: no replay beyond what is unacknowledged.
    second.read_until(&mut store, "acks are read", |_| true);
    second.ack(&store);
    let replayed = store.replayed;
    let mut third = Host::on_fifo(&agent.port(0));
    third.attach(&mut store, 9);
    third.ask(&mut store, HostMessage::Flush);
    assert_eq!(
        store.replayed, replayed,
        "replayed although everything was held"
    );
    assert_eq!(
        first_of(&store),
        store.next(),
        "the last Hello tells where each stream goes on"
    );
}

fn first_of(store: &Store) -> Vec<(StreamId, Sequence)> {
    let hello = store.hellos.last().unwrap();
    hello
        .streams
        .iter()
        .filter(|state| state.next.0 > 0)
        .map(|state| (state.stream, state.first))
        .collect()
}

#[test]
fn stale_epochs_are_refused_and_equal_ones_ignored() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 10);
    let hellos = store.hellos.len();
    host.hello(&store, 10);
    host.hello(&store, 9);
    host.epoch = 10;
    host.read_until(&mut store, "the old epoch is refused", |store| {
        !store.errors.is_empty()
    });
    assert_eq!(store.errors[0].code, ErrorCode::StaleEpoch);
    assert_eq!(store.errors[0].epoch, 10);
    assert_eq!(
        store.hellos.len(),
        hellos,
        "an epoch that is not newer was answered with Hello"
    );

    // What a stale reader wants is not done either.
    host.epoch = 4;
    host.say(store.session, HostMessage::Stop);
    host.epoch = 10;
    host.read_until(&mut store, "the stale Stop is refused", |store| {
        store.errors.len() > 1
    });
    assert_eq!(store.errors[1].code, ErrorCode::StaleEpoch);
    let on = fs::read_to_string(agent.instance_dir().join("tracing_on")).unwrap();
    assert_eq!(on.trim(), "1");
}

#[test]
fn a_full_window_leaves_the_trace_to_the_ring_and_counts_what_it_drops() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &["--retain-kb", "64", "--buffer-size-kb", "64"]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    host.read_until(&mut store, "the first counters", |store| {
        !store.lost.is_empty()
    });
    // 20,000 marks are some 2 MiB: more than window and ring of any one CPU together, several times.
    agent.marks(0..20_000);
    host.read_for(&mut store, Duration::from_millis(1500));
    let held: u64 = store.next().iter().map(|(_, next)| next.0).sum();
    assert!(held > 0);
    for (cpu, frames) in &store.streams {
        let pages: u32 = frames.values().map(|frame| frame.page_count).sum();
        assert!(
            pages <= 16,
            "cpu{cpu} has {pages} pages of a window of 16 unacknowledged"
        );
    }
    let overrun: u64 = store.lost.iter().map(|cpu| cpu.overrun).sum();
    assert!(
        overrun > 0,
        "the kernel dropped events, the agent did not say so: {:?}",
        store.lost
    );

    // Acknowledging sets it going again, and what is there and what was counted make the whole.
    host.ack(&store);
    let stopped = host.ask(&mut store, HostMessage::Stop);
    assert!(!stopped.started);
    store.assert_contiguous();
    let marks = store.marks();
    assert!(marks.values().all(|&times| times == 1));
    let lost: u64 = store
        .lost
        .iter()
        .map(|cpu| cpu.overrun + cpu.commit_overrun + cpu.dropped)
        .sum();
    assert_eq!(marks.len() as u64 + lost, 20_000);
}

#[test]
fn stop_empties_everything_and_start_goes_on() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    agent.marks(0..50);
    let stopped = host.ask(&mut store, HostMessage::Stop);
    assert!(!stopped.started);
    store.assert_marks(0..50);
    let before = store.frames;
    host.read_for(&mut store, Duration::from_millis(600));
    let pages_after_stop = store.frames - before;
    assert!(
        pages_after_stop <= 2,
        "frames came after Stop: {pages_after_stop}"
    );

    assert!(host.ask(&mut store, HostMessage::Start).started);
    agent.marks(50..100);
    host.ask(&mut store, HostMessage::Flush);
    store.assert_marks(0..100);
    store.assert_contiguous();
}

#[test]
fn a_quiesced_port_cuts_nothing_until_start() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    host.ask(&mut store, HostMessage::Flush);
    let quiesced = host.ask(&mut store, HostMessage::Quiesce);
    let next: Vec<_> = quiesced.streams.iter().map(|state| state.next).collect();
    agent.marks(0..2000);
    host.read_for(&mut store, Duration::from_millis(600));
    assert_eq!(
        store.marks().len(),
        0,
        "pages came although the port was quiesced"
    );
    let again = host.ask(&mut store, HostMessage::Quiesce);
    assert_eq!(
        next,
        again
            .streams
            .iter()
            .map(|state| state.next)
            .collect::<Vec<_>>()
    );
    host.ask(&mut store, HostMessage::Start);
    host.ask(&mut store, HostMessage::Flush);
    store.assert_marks(0..2000);
}

#[test]
fn metadata_is_complete_and_true() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    host.read_until(&mut store, "all metadata came", |store| {
        store.has_all_metadata()
    });
    for name in [
        "events/header_page",
        "events/header_event",
        "events/sched/sched_switch/format",
        "trace_clock",
    ] {
        // Not fs::read: its first, short read is all that header_page gives, so it would confirm the same mistake.
        let cat = Command::new("cat")
            .arg(agent.instance_dir().join(name))
            .output();
        let here = cat.unwrap().stdout;
        assert_eq!(
            String::from_utf8_lossy(&store.metadata[name]),
            String::from_utf8_lossy(&here),
            "{name}"
        );
    }
    let kallsyms = String::from_utf8_lossy(&store.metadata["proc/kallsyms"]);
    let here = fs::read("/proc/kallsyms").unwrap();
    assert_eq!(kallsyms.len(), here.len(), "kallsyms is cut");
    for name in [
        "saved_cmdlines",
        "printk_formats",
        "vmtrail/uname",
        "vmtrail/hostname",
        "vmtrail/cpus",
    ] {
        assert!(store.metadata_complete.contains(name), "{name} is missing");
    }
    let formats = store
        .metadata
        .keys()
        .filter(|name| name.ends_with("/format"))
        .count();
    let here = fs::read_to_string(format!("{}/available_events", support::TRACEFS)).unwrap();
    assert!(
        formats >= here.lines().count(),
        "{formats} formats of {} events",
        here.lines().count()
    );

    // A reader that has this generation is spared, one that has another is not.
    let mut again = Store {
        session: store.session,
        ..Store::default()
    };
    host.epoch = 2;
    let hello = vmtrail_wire::host_to_agent::HostHello {
        version_min: 1,
        version_max: 1,
        have_metadata: store.hellos[0].metadata_generation,
        resume_from: store.next(),
    };
    host.say(store.session, HostMessage::Hello(hello));
    host.read_until(&mut again, "Hello is answered", |again| {
        !again.hellos.is_empty()
    });
    host.read_for(&mut again, Duration::from_millis(300));
    assert_eq!(again.metadata.len(), 0);

    // At a Flush only what grows comes again.
    host.ask(&mut again, HostMessage::Flush);
    assert!(again.metadata_complete.contains("saved_cmdlines"));
    assert!(!again.metadata_complete.contains("proc/kallsyms"));
}

#[test]
fn a_quiet_guest_is_not_silent_and_not_busy() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    host.read_until(&mut store, "all metadata came", |store| {
        store.has_all_metadata()
    });
    // One event now and then reaches the host soon.
    let mut slowest = Duration::ZERO;
    for number in 0..10 {
        std::thread::sleep(Duration::from_millis(317));
        let begin = Instant::now();
        agent.marks(number..number + 1);
        host.read_until(&mut store, "the mark comes", |store| {
            store.marks().contains_key(&number)
        });
        slowest = slowest.max(begin.elapsed());
    }
    eprintln!("slowest of 10 single events: {slowest:?}");
    assert!(slowest < Duration::from_millis(400), "{slowest:?}");

    // Without events nothing is sent but signs of life, and the processor is left alone.
    host.ask(&mut store, HostMessage::Flush);
    host.read_for(&mut store, Duration::from_millis(1500));
    let (frames, heartbeats) = (store.frames, store.heartbeats);
    let (begin, cpu) = (Instant::now(), agent.cpu_time());
    host.read_for(&mut store, Duration::from_secs(6));
    let share = (agent.cpu_time() - cpu).as_secs_f64() / begin.elapsed().as_secs_f64();
    eprintln!(
        "idle: {:.3} % of a CPU, {} KiB resident",
        share * 100.0,
        agent.resident_kib()
    );
    assert!(store.heartbeats > heartbeats);
    assert_eq!(
        store.frames - frames,
        store.heartbeats - heartbeats,
        "something was sent without need"
    );
    assert!(share < 0.005, "{share}");
    assert!(agent.resident_kib() <= 8 << 10);
}

#[test]
fn waiting_for_a_reader_costs_nothing() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(2, &["-e", "sched"]);
    std::thread::sleep(Duration::from_millis(500));
    let (begin, cpu) = (Instant::now(), agent.cpu_time());
    std::thread::sleep(Duration::from_secs(3));
    let share = (agent.cpu_time() - cpu).as_secs_f64() / begin.elapsed().as_secs_f64();
    assert!(share < 0.005, "{share}");
}

#[test]
fn events_are_configured_all_or_none() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(
        1,
        &[
            "-e",
            "sched:sched_switch",
            "-f",
            "sched:sched_switch=prev_pid==1",
        ],
    );
    let enabled = || {
        let text = fs::read_to_string(agent.instance_dir().join("set_event")).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let filter = || {
        fs::read_to_string(
            agent
                .instance_dir()
                .join("events/sched/sched_switch/filter"),
        )
        .unwrap()
    };
    assert_eq!(enabled(), ["sched:sched_switch"]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    let refused = |host: &mut Host, store: &mut Store, settings| {
        let before = store.errors.len();
        host.say(store.session, HostMessage::Configure(settings));
        host.read_until(store, "Configure is refused", |store| {
            store.errors.len() > before
        });
        let error = store.errors.last().unwrap().clone();
        assert_eq!(error.code, ErrorCode::Configure);
        error.text
    };
    let text = refused(
        &mut host,
        &mut store,
        vec![
            Setting::ClearEvents,
            Setting::Event("irq:irq_handler_entry".into()),
            Setting::Clock("boot".into()),
            Setting::Event("sched:no_such_event".into()),
        ],
    );
    assert!(
        text.contains("no_such_event") && text.contains("available_events"),
        "{text}"
    );
    assert_eq!(enabled(), ["sched:sched_switch"]);
    assert_eq!(filter().trim(), "prev_pid==1", "the filter came back");
    let text = refused(
        &mut host,
        &mut store,
        vec![Setting::Filter("sched:sched_switch=nonsense==1".into())],
    );
    assert!(text.contains("nonsense"), "{text}");
    assert_eq!(filter().trim(), "prev_pid==1");
    let text = refused(
        &mut host,
        &mut store,
        vec![Setting::Clock("sundial".into())],
    );
    assert!(text.contains("sundial") && text.contains("mono"), "{text}");
    let text = refused(
        &mut host,
        &mut store,
        vec![Setting::Filter("../../x:y=1".into())],
    );
    assert!(text.contains("no such event"), "{text}");

    let generation = store.hellos[0].metadata_generation;
    host.ask(
        &mut store,
        HostMessage::Configure(vec![
            Setting::ClearEvents,
            Setting::Event("irq".into()),
            Setting::Clock("mono_raw".into()),
            Setting::BufferSizeKb(512),
        ]),
    );
    assert!(enabled().iter().all(|event| event.starts_with("irq:")) && enabled().len() > 3);
    assert_eq!(filter().trim(), "none");
    host.epoch = 2;
    host.attach(&mut store, 2);
    let hello = store.hellos.last().unwrap();
    assert_eq!(hello.clock, "mono_raw");
    assert!(
        hello.metadata_generation > generation,
        "the clock is metadata"
    );
}

#[test]
fn counters_do_not_go_back_when_the_kernel_clears_them() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &["--retain-kb", "16", "--buffer-size-kb", "32"]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    agent.marks(0..5000);
    host.read_for(&mut store, Duration::from_millis(1200));
    let read = |store: &Store| {
        store
            .lost
            .iter()
            .map(|cpu| cpu.overrun + cpu.read)
            .sum::<u64>()
    };
    let before = read(&store);
    // What waits in the rings is lost with the old clock, and counted.
    host.ask(
        &mut store,
        HostMessage::Configure(vec![Setting::Clock("mono".into())]),
    );
    host.ask(&mut store, HostMessage::Flush);
    assert!(
        read(&store) >= before.max(5000),
        "{} after {before}",
        read(&store)
    );
}

#[test]
fn pings_and_marks() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(1, &[]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    let id = host.say(store.session, HostMessage::Ping { host_ns: 42 });
    host.read_until(&mut store, "Pong comes", |store| !store.pongs.is_empty());
    let pong = store.pongs[0];
    assert_eq!((pong.id, pong.host_ns), (id, 42));
    assert!(pong.monotonic_ns > 0 && pong.boottime_ns >= pong.monotonic_ns);
    assert!(pong.realtime_ns > 1_600_000_000_000_000_000);
    host.say(store.session, HostMessage::Mark(support::mark_text(77)));
    host.read_until(&mut store, "the mark comes back in the trace", |store| {
        store.marks().contains_key(&77)
    });
}

#[test]
fn sigterm_sends_the_rest_and_removes_the_instance() {
    if !can_trace() {
        return;
    }
    let size = || fs::read_to_string(format!("{}/saved_cmdlines_size", support::TRACEFS)).unwrap();
    let mut agent = Agent::start(1, &["-e", "sched:sched_process_exec"]);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    host.ask(&mut store, HostMessage::Flush);
    agent.marks(0..300);
    agent.signal(Signal::SIGTERM);
    let begin = Instant::now();
    while agent.instance_dir().exists() {
        assert!(begin.elapsed() < PATIENCE);
        host.read(&mut store);
    }
    assert!(agent.wait().success());
    while host.read(&mut store) > 0 {}
    store.assert_marks(0..300);
    let last = store.quiesced.last().unwrap();
    assert_eq!(
        (last.id, last.started),
        (0, false),
        "the end of the session is announced"
    );
    // Other tests raise it at the same time; what matters is that it is a size again that no agent chose to keep.
    assert!(size().trim().parse::<u64>().is_ok());
}

#[test]
fn a_killed_agents_instance_is_taken_over_and_a_living_ones_is_not() {
    if !can_trace() {
        return;
    }
    let mut first = Agent::start(1, &["-e", "sched:sched_switch"]);
    let second = Command::new(env!("CARGO_BIN_EXE_vmtrail-agent"))
        .args(["--instance", &first.instance])
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(5));
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(
        text.contains("another vmtrail-agent") && text.contains("--instance"),
        "{text}"
    );

    let mut store = Store::default();
    let mut host = Host::on_fifo(&first.port(0));
    host.attach(&mut store, 3);
    first.signal(Signal::SIGKILL);
    first.wait();
    assert!(first.instance_dir().exists());
    let dir = std::mem::replace(&mut first.dir, tempfile::tempdir().unwrap());
    let instance = std::mem::replace(&mut first.instance, "vmtrail-test-nothing".into());
    let heir = Agent::start_in(dir, instance, 1, &[]);
    assert_eq!(
        fs::read_to_string(heir.instance_dir().join("set_event")).unwrap(),
        ""
    );
    let mut fresh = Store::default();
    let mut host = Host::on_fifo(&heir.port(0));
    // What the dead agent said last may still come first.
    host.hello(&fresh, 4);
    heir.marks(0..10);
    let begin = Instant::now();
    while fresh.marks().len() < 10 {
        assert!(begin.elapsed() < PATIENCE);
        let mut old_and_new = Store::default();
        host.read(&mut old_and_new);
        if old_and_new.session.is_some() && old_and_new.session != store.session {
            fresh.session = old_and_new.session;
            fresh.streams.extend(old_and_new.streams);
        }
    }
    assert_ne!(fresh.session, store.session);
}

#[test]
fn sockets_work_and_may_close() {
    if !can_trace() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("p0")).unwrap();
    let agent = Agent::start_in(
        dir,
        format!("vmtrail-test-socket-{}", std::process::id()),
        1,
        &[],
    );
    let mut store = Store::default();
    let mut host = Host::on_socket(&listener);
    host.attach(&mut store, 1);
    agent.marks(0..1000);
    host.read_for(&mut store, Duration::from_millis(100));
    drop(host);
    agent.marks(1000..2000);
    let mut host = Host::on_socket(&listener);
    host.attach(&mut store, 2);
    host.ask(&mut store, HostMessage::Flush);
    store.assert_contiguous();
    store.assert_marks(0..2000);
}

#[test]
fn a_stalled_reader_and_a_torn_line_lose_nothing() {
    if !can_trace() {
        return;
    }
    let agent = Agent::start(
        1,
        &["-e", "sched", "-e", "timer", "--buffer-size-kb", "16384"],
    );
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    for round in 0..6 {
        // The FIFO fills up in the middle of a frame, and then somebody else attaches.
        agent.marks(round * 500..(round + 1) * 500);
        std::thread::sleep(Duration::from_millis(300));
        let mut next = Host::on_fifo(&agent.port(0));
        next.hello(&store, u64::from(round) + 2);
        let hellos = store.hellos.len();
        next.read_until(&mut store, "Hello is answered", |store| {
            store.hellos.len() > hellos
        });
        assert_eq!(
            next.desynchronised, 0,
            "a frame was cut short in the middle of the stream"
        );
        host = next;
    }
    host.ask(&mut store, HostMessage::Stop);
    // The ring is larger than what any of the rounds makes, or this would be a test of the window.
    assert!(
        store.lost.iter().all(|cpu| cpu.overrun == 0),
        "{:?}",
        store.lost
    );
    store.assert_contiguous();
    store.assert_marks(0..3000);
}

#[test]
fn ports_appear_and_disappear() {
    if !can_trace() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let agent = Agent::start_in(
        dir,
        format!("vmtrail-test-ports-{}", std::process::id()),
        2,
        &[],
    );
    let listen = |port: usize| UnixListener::bind(agent.port(port)).unwrap();
    let first = listen(0);
    let mut store = Store::default();
    let mut host = Host::on_socket(&first);
    host.attach(&mut store, 1);
    agent.marks(0..500);
    host.read_for(&mut store, Duration::from_millis(100));
    // A second port takes half of the CPUs away; what was not acknowledged comes again there.
    let second = listen(1);
    let mut other = Host::on_socket(&second);
    other.attach(&mut store, 1);
    agent.marks(500..1000);
    host.ask(&mut store, HostMessage::Flush);
    other.ask(&mut store, HostMessage::Flush);
    store.assert_marks(0..1000);
    // It goes again, and the first carries everything.
    drop(other);
    fs::remove_file(agent.port(1)).unwrap();
    drop(second);
    agent.marks(1000..1500);
    let cpus = store.hellos[0].cpus as usize;
    host.read_until(&mut store, "the first port has all CPUs again", |store| {
        store
            .hellos
            .last()
            .is_some_and(|hello| hello.streams.len() == cpus)
    });
    host.ask(&mut store, HostMessage::Flush);
    store.assert_contiguous();
    store.assert_marks(0..1500);
}

#[test]
fn wrong_beginnings_say_what_to_do() {
    if !can_trace() {
        return;
    }
    let run = |args: &[&str]| {
        let name = format!("vmtrail-test-wrong-{}", std::process::id());
        let output = Command::new(env!("CARGO_BIN_EXE_vmtrail-agent"))
            .args(["--instance", &name])
            .args(args)
            .output()
            .unwrap();
        assert!(
            !std::path::Path::new(support::TRACEFS)
                .join("instances")
                .join(&name)
                .exists()
        );
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (code, text) = run(&["-e", "sched:nonsense"]);
    assert_eq!(code, Some(6));
    assert!(
        text.contains("sched:nonsense") && text.contains("available_events"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1, "{text}");
    let (code, text) = run(&["-e", "nonsense"]);
    assert_eq!(code, Some(6));
    assert!(text.contains("no events of a system"), "{text}");
    let (code, text) = run(&["--clock", "sundial"]);
    assert_eq!(code, Some(6));
    assert!(text.contains("mono"), "{text}");
    let (code, text) = run(&["--tracefs", "/tmp"]);
    assert_eq!(code, Some(3), "{text}");
    let (code, text) = run(&["--frobnicate"]);
    assert_eq!(code, Some(2));
    assert!(text.contains("--help"), "{text}");
}

#[test]
fn large_sub_buffers() {
    if !can_trace() {
        return;
    }
    // The size can only be set on an instance, so one is left behind for the agent to find: with somebody holding it
    // open it is emptied, not replaced.
    let name = format!("vmtrail-test-subbuf-{}", std::process::id());
    let instance = std::path::Path::new(support::TRACEFS)
        .join("instances")
        .join(&name);
    fs::create_dir(&instance).unwrap();
    let size = instance.join("buffer_subbuf_size_kb");
    if !size.exists() {
        fs::remove_dir(&instance).unwrap();
        eprintln!("this kernel (before 6.8) has one size of sub-buffer only");
        return;
    }
    fs::write(&size, "16").unwrap();
    let holder = fs::File::open(instance.join("per_cpu/cpu0/trace_pipe_raw"));
    let agent = Agent::start_in(fifo_dir(), name, 1, &["-e", "sched"]);
    drop(holder);
    let mut store = Store::default();
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 1);
    assert_eq!(store.hellos[0].page_size, 16 << 10);
    agent.marks(0..2000);
    host.read_for(&mut store, Duration::from_millis(20));
    drop(host);
    agent.marks(2000..4000);
    let mut host = Host::on_fifo(&agent.port(0));
    host.attach(&mut store, 2);
    host.ask(&mut store, HostMessage::Stop);
    store.assert_contiguous();
    store.assert_marks(0..4000);
}

fn fifo_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for suffix in ["in", "out"] {
        let path = dir.path().join(format!("p0.{suffix}"));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    }
    dir
}
