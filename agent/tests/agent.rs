//! The agent on the build machine's own kernel: a private tracefs instance, FIFO pairs and sockets for ports.

mod support;

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use support::{Agent, Host, PATIENCE, Store, can_trace, wait_until};
use vmtrail_wire::HostMessage;

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
