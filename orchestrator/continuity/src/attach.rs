//! One reader attached to the ports of one residency.
//!
//! ```text
//!                 Hello of our epoch
//!   Calling ----------------------------> Live
//!     |  ^  Hello repeated every 0.5 s     |
//!     |  |                                 | the VM was moved, or the port reconnected: new epoch
//!     |  +---------------------------------+
//!     |  ^ silence of a live port (no heartbeat), or the guest was reset: a new agent may be there, call again
//!     | StaleEpoch answered: a newer epoch was in force; take a still newer one and call again, on all ports
//! ```
//!
//! A Hello may get lost: one written into a source's FIFO before a migration is never delivered. So it is repeated
//! until it is answered. On a socket, silence of a running VM is QEMU's wedge (the port is throttled and nobody will
//! ever unthrottle it); it ends only by disconnecting, which discards what is queued, which is replayed.

use std::collections::VecDeque;
use std::time::Duration;

use vmtrail_wire::agent_to_host::{AgentMessage, ErrorCode};
use vmtrail_wire::{Epoch, FrameHeader, SessionId};

use crate::time::Instant;

/// How often an unanswered Hello is repeated.
pub const HELLO_INTERVAL: Duration = Duration::from_millis(500);

/// Silence of a running VM after which a socket port is taken for wedged.
pub const WEDGE_SILENCE: Duration = Duration::from_secs(2);

/// Silence of a live port of a running VM after which it is called again: the agent sends a heartbeat every 5 s, so it was
/// restarted, or the guest was. An agent that lives ignores an epoch that it obeys already.
pub const LOST_AFTER: Duration = Duration::from_secs(12);

/// Silence of a running VM after which the agent is reported absent.
pub const ABSENT_AFTER: Duration = Duration::from_secs(5);

/// Of which kind a port's host side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortKind {
    /// A FIFO pair: always connected.
    Fifo,
    /// A unix socket.
    Socket,
}

/// What the driver shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Send a Hello of this epoch on this port.
    SendHello {
        /// Index of the port.
        port: usize,
        /// The epoch.
        epoch: Epoch,
    },
    /// Disconnect and connect this port again.
    Reconnect {
        /// Index of the port.
        port: usize,
    },
    /// Nobody answers on any port.
    AgentAbsent,
}

#[derive(Debug, Clone, Copy)]
struct Port {
    kind: PortKind,
    answered: bool,
    /// The session that answered here last.
    session: Option<SessionId>,
    hello_at: Option<Instant>,
    silent_since: Instant,
}

/// See the module's text.
#[derive(Debug)]
pub struct Attachment {
    epoch: Epoch,
    session: Option<SessionId>,
    ports: Vec<Port>,
    running: bool,
    absent_reported: bool,
    attached_at: Instant,
    actions: VecDeque<Action>,
}

impl Attachment {
    /// Attaches to ports of these kinds. `epoch` must be newer than every one given out for this VM.
    #[must_use]
    pub fn new(now: Instant, epoch: Epoch, kinds: &[PortKind], running: bool) -> Self {
        let ports = kinds
            .iter()
            .map(|&kind| Port {
                kind,
                answered: false,
                session: None,
                hello_at: None,
                silent_since: now,
            })
            .collect();
        let mut attachment = Self {
            epoch,
            session: None,
            ports,
            running,
            absent_reported: false,
            attached_at: now,
            actions: VecDeque::new(),
        };
        attachment.call_again(now);
        attachment
    }

    /// The epoch in force.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The session that answered.
    #[must_use]
    pub fn session(&self) -> Option<SessionId> {
        self.session
    }

    /// Whether a Hello of our epoch came on every port.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.ports.iter().all(|port| port.answered)
    }

    /// Whether a Hello of our epoch came on this port.
    #[must_use]
    pub fn is_answered(&self, port: usize) -> bool {
        self.ports.get(port).is_some_and(|port| port.answered)
    }

    /// The vCPUs run, or do not. Silence counts only while they run.
    pub fn handle_running(&mut self, now: Instant, running: bool) {
        if running && !self.running {
            self.attached_at = now;
            for port in &mut self.ports {
                port.silent_since = now;
            }
        }
        self.running = running;
    }

    /// A frame came on a port. `message` is what it said, if it was not pages.
    pub fn handle_frame(
        &mut self,
        now: Instant,
        port: usize,
        header: &FrameHeader,
        message: Option<&AgentMessage>,
    ) {
        let Some(state) = self.ports.get_mut(port) else {
            return;
        };
        if let Some(AgentMessage::Error(error)) = message
            && error.code == ErrorCode::StaleEpoch
        {
            // Only a refusal of what we last said counts: an older one may have travelled with the VM.
            if error.epoch >= self.epoch.0 && !state.answered {
                self.epoch = Epoch(error.epoch.saturating_add(1));
                self.call_again(now);
            }
            return;
        }
        if header.epoch != self.epoch {
            return;
        }
        state.silent_since = now;
        let introduced = matches!(message, Some(AgentMessage::Hello(_)));
        if state.answered && !introduced && state.session != Some(header.session) {
            // An agent that was restarted obeyed our epoch, and its introduction got lost: what it sends would be nobody's for
            // ever. A newer epoch makes it introduce itself again.
            self.epoch = Epoch(self.epoch.0.saturating_add(1));
            self.call_again(now);
            return;
        }
        if introduced {
            state.answered = true;
            state.session = Some(header.session);
            self.session = Some(header.session);
            self.absent_reported = false;
        }
    }

    /// The agent said that it ends, or the guest was reset: whoever answers next is another one.
    pub fn handle_agent_gone(&mut self, now: Instant) {
        self.attached_at = now;
        self.call_again(now);
    }

    /// Whether the vCPUs run.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.running
    }

    /// A port was connected anew: whatever was under way on it is gone.
    pub fn handle_reconnected(&mut self, now: Instant, port: usize, epoch: Epoch) {
        // One epoch for all ports: a stream may move between ports, and its frames must not be taken for stale.
        let _ = port;
        self.epoch = self.epoch.max(epoch);
        self.call_again(now);
    }

    /// Call when [`Attachment::poll_timeout`] has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        let epoch = self.epoch;
        for (index, port) in self.ports.iter_mut().enumerate() {
            if port.answered {
                let lost = self.running && now.since(port.silent_since) >= LOST_AFTER;
                if !lost {
                    continue;
                }
                port.answered = false;
                port.hello_at = None;
                port.silent_since = now;
                self.attached_at = now;
            }
            if self.running
                && port.kind == PortKind::Socket
                && now.since(port.silent_since) >= WEDGE_SILENCE
            {
                port.silent_since = now;
                self.actions.push_back(Action::Reconnect { port: index });
            } else if port
                .hello_at
                .is_none_or(|at| now.since(at) >= HELLO_INTERVAL)
            {
                port.hello_at = Some(now);
                self.actions
                    .push_back(Action::SendHello { port: index, epoch });
            }
        }
        if self.running
            && !self.absent_reported
            && !self.ports.iter().any(|port| port.answered)
            && now.since(self.attached_at) >= ABSENT_AFTER
        {
            self.absent_reported = true;
            self.actions.push_back(Action::AgentAbsent);
        }
    }

    /// The next thing to do.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When to call [`Attachment::handle_timeout`].
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.ports
            .iter()
            .filter_map(|port| {
                if port.answered {
                    return self.running.then(|| port.silent_since.after(LOST_AFTER));
                }
                let hello_at = port.hello_at;
                Some(hello_at.map_or(Instant(0), |at| at.after(HELLO_INTERVAL)))
            })
            .min()
    }

    fn call_again(&mut self, now: Instant) {
        self.actions
            .retain(|action| !matches!(action, Action::SendHello { .. }));
        for (index, port) in self.ports.iter_mut().enumerate() {
            port.answered = false;
            port.silent_since = now;
            port.hello_at = Some(now);
            self.actions.push_back(Action::SendHello {
                port: index,
                epoch: self.epoch,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmtrail_wire::agent_to_host::{AgentError, AgentHello};
    use vmtrail_wire::{Kind, StreamId};

    fn hello() -> AgentMessage {
        AgentMessage::Hello(AgentHello {
            boot_id: [1; 16],
            version_min: 1,
            version_max: 1,
            agent_version: String::new(),
            kernel: String::new(),
            clock: String::new(),
            page_size: 4096,
            long_size: 8,
            big_endian: false,
            started: true,
            cpus: 1,
            ports: 1,
            window: 0,
            metadata_generation: 1,
            streams: vec![],
        })
    }

    fn header(epoch: u64) -> FrameHeader {
        FrameHeader::new(Kind::Hello, SessionId(3), Epoch(epoch), StreamId::SESSION)
    }

    fn actions(attachment: &mut Attachment) -> Vec<Action> {
        std::iter::from_fn(|| attachment.poll_action()).collect()
    }

    fn after(ms: u64) -> Instant {
        Instant(0).after(Duration::from_millis(ms))
    }

    #[test]
    fn a_hello_is_repeated_until_it_is_answered() {
        let mut attachment = Attachment::new(Instant(0), Epoch(7), &[PortKind::Fifo], true);
        let call = Action::SendHello {
            port: 0,
            epoch: Epoch(7),
        };
        assert_eq!(actions(&mut attachment), [call]);
        assert_eq!(attachment.poll_timeout(), Some(after(500)));
        attachment.handle_timeout(after(500));
        assert_eq!(actions(&mut attachment), [call]);
        // An answer to somebody else's epoch is none.
        attachment.handle_frame(after(600), 0, &header(6), Some(&hello()));
        assert!(!attachment.is_live());
        attachment.handle_frame(after(600), 0, &header(7), Some(&hello()));
        assert!(attachment.is_live());
        assert_eq!(attachment.session(), Some(SessionId(3)));
    }

    #[test]
    fn a_stale_epoch_is_outbid_on_all_ports() {
        let kinds = [PortKind::Fifo, PortKind::Fifo];
        let mut attachment = Attachment::new(Instant(0), Epoch(7), &kinds, true);
        let _ = actions(&mut attachment);
        let error = AgentMessage::Error(AgentError {
            id: 0,
            code: ErrorCode::StaleEpoch,
            epoch: 20,
            text: String::new(),
        });
        attachment.handle_frame(after(1), 1, &header(20), Some(&error));
        let calls: Vec<_> = (0..2)
            .map(|port| Action::SendHello {
                port,
                epoch: Epoch(21),
            })
            .collect();
        assert_eq!(actions(&mut attachment), calls);
        // The second port's refusal of the same old Hello changes nothing.
        attachment.handle_frame(after(2), 0, &header(20), Some(&error));
        assert_eq!(actions(&mut attachment), []);
    }

    #[test]
    fn silence_of_a_running_vm_on_a_socket_is_the_wedge_and_on_a_fifo_it_is_not() {
        let kinds = [PortKind::Socket, PortKind::Fifo];
        let mut attachment = Attachment::new(Instant(0), Epoch(7), &kinds, false);
        let _ = actions(&mut attachment);
        attachment.handle_timeout(after(3000));
        assert!(
            !actions(&mut attachment).contains(&Action::Reconnect { port: 0 }),
            "VM is stopped"
        );
        attachment.handle_running(after(3000), true);
        attachment.handle_timeout(after(5000));
        let seen = actions(&mut attachment);
        assert!(seen.contains(&Action::Reconnect { port: 0 }));
        assert!(!seen.contains(&Action::Reconnect { port: 1 }));
    }

    #[test]
    fn a_live_port_without_heartbeats_is_called_again_but_not_while_the_vm_stands_still() {
        let mut attachment = Attachment::new(Instant(0), Epoch(7), &[PortKind::Fifo], true);
        let _ = actions(&mut attachment);
        attachment.handle_frame(after(100), 0, &header(7), Some(&hello()));
        assert_eq!(attachment.poll_timeout(), Some(after(12_100)));
        // A heartbeat, or anything else of our epoch, is a sign of life.
        attachment.handle_frame(after(5000), 0, &header(7), None);
        attachment.handle_timeout(after(12_100));
        assert_eq!(actions(&mut attachment), []);
        attachment.handle_running(after(13_000), false);
        attachment.handle_timeout(after(60_000));
        assert_eq!(actions(&mut attachment), []);
        attachment.handle_running(after(60_000), true);
        attachment.handle_timeout(after(72_000));
        assert_eq!(
            actions(&mut attachment),
            [Action::SendHello {
                port: 0,
                epoch: Epoch(7)
            }]
        );
        assert!(!attachment.is_live());
    }

    #[test]
    fn a_session_whose_introduction_got_lost_is_called_with_a_newer_epoch() {
        let mut attachment = Attachment::new(Instant(0), Epoch(7), &[PortKind::Fifo], true);
        let _ = actions(&mut attachment);
        attachment.handle_frame(after(100), 0, &header(7), Some(&hello()));
        let stranger = FrameHeader {
            session: SessionId(4),
            ..FrameHeader::new(Kind::Pages, SessionId(4), Epoch(7), StreamId(0))
        };
        attachment.handle_frame(after(200), 0, &stranger, None);
        assert_eq!(
            actions(&mut attachment),
            [Action::SendHello {
                port: 0,
                epoch: Epoch(8)
            }]
        );
        // What is still on its way under the old epoch changes nothing more.
        attachment.handle_frame(after(210), 0, &stranger, None);
        assert_eq!(actions(&mut attachment), []);
    }

    #[test]
    fn an_absent_agent_is_reported_once() {
        let mut attachment = Attachment::new(Instant(0), Epoch(7), &[PortKind::Fifo], true);
        let mut reports = 0;
        for tick in 0..40 {
            attachment.handle_timeout(after(tick * 500));
            reports += actions(&mut attachment)
                .iter()
                .filter(|action| **action == Action::AgentAbsent)
                .count();
        }
        assert_eq!(reports, 1);
    }
}
