//! QEMU as the facts describe it (hw/char/virtio-serial-bus.c, hw/char/virtio-console.c, chardev/): a virtqueue of elements, a chardev
//! that takes some bytes at a time, a port that is throttled while the chardev takes none, and what becomes of all that when
//! the VM stops, moves, or its reader goes.

use std::collections::VecDeque;

use vmtrail_continuity::attach::PortKind;
use vmtrail_continuity::vmm::Status;

use super::options::Options;
use super::rng::Rng;

/// Buffers that the guest offers for input (`fill_queue`, drivers/char/virtio_console.c: a page each, as many as the queue has).
const IN_BUFFERS: usize = 32;

/// One port: both directions, and the port's own belief about its chardev.
#[derive(Debug, Clone)]
pub(super) struct Port {
    pub(super) kind: PortKind,
    /// Elements that the guest made available. Guest memory.
    pub(super) queue: VecDeque<Vec<u8>>,
    /// Bytes of the first element that are written already (`iov_offset`).
    pub(super) offset: usize,
    /// What stands in the FIFO or in the socket. Not guest memory.
    pub(super) out: VecDeque<u8>,
    room: usize,
    /// Whether a reader is connected to the chardev. A FIFO always is.
    pub(super) open: bool,
    /// Whether the port believes so. Changes are not delivered while the VM is stopped.
    pub(super) host_connected: bool,
    throttled: bool,
    /// Whether anything will unthrottle it (`vcon->watch`): there is none where the chardev was not connected.
    watch: bool,
    /// What the host wrote and QEMU did not read yet. Not guest memory.
    pub(super) input: VecDeque<u8>,
    /// What the guest can read. Guest memory.
    pub(super) in_queue: VecDeque<Vec<u8>>,
}

impl Port {
    pub(super) fn new(options: &Options) -> Self {
        let open = options.kind == PortKind::Fifo;
        Self {
            kind: options.kind,
            queue: VecDeque::new(),
            offset: 0,
            out: VecDeque::new(),
            room: options.pipe_bytes,
            open,
            host_connected: open,
            throttled: false,
            watch: false,
            input: VecDeque::new(),
            in_queue: VecDeque::new(),
        }
    }

    /// `flush_queued_data`: writes what the chardev takes, at most `most` bytes of it now. Whether there is more to do.
    pub(super) fn flush(&mut self, most: usize) -> bool {
        let mut left = most;
        while let Some(element) = self.queue.front() {
            if !self.host_connected {
                // `discard_vq_data`: the guest is told that all went well.
                self.queue.pop_front();
                self.offset = 0;
                continue;
            }
            if self.throttled {
                return false;
            }
            if !self.open {
                self.throttled = true;
                self.watch = false;
                return false;
            }
            if left == 0 {
                return true;
            }
            let free = self.room.saturating_sub(self.out.len());
            let count = free.min(left).min(element.len() - self.offset);
            if count == 0 {
                self.throttled = true;
                self.watch = true;
                return false;
            }
            self.out.extend(&element[self.offset..self.offset + count]);
            self.offset += count;
            left -= count;
            if self.offset == element.len() {
                self.queue.pop_front();
                self.offset = 0;
            }
        }
        false
    }

    /// The host read: whether the port may be flushed again. `honours` is false where a stopped QEMU does not look.
    pub(super) fn unthrottle(&mut self, honours: bool) -> bool {
        if self.throttled && self.watch && honours && self.out.len() < self.room {
            self.throttled = false;
            self.watch = false;
            return true;
        }
        false
    }

    /// A socket's reader is gone; `running` says whether the port is told.
    pub(super) fn disconnect(&mut self, running: bool) {
        if self.kind == PortKind::Fifo || !self.open {
            return;
        }
        self.open = false;
        self.out.clear();
        self.input.clear();
        self.watch = false;
        if running {
            // virtio_serial_close: throttled no more, and everything queued is discarded.
            self.host_connected = false;
            self.throttled = false;
            self.queue.clear();
            self.offset = 0;
        }
    }

    /// A socket's reader is there.
    pub(super) fn connect(&mut self, running: bool) {
        if self.kind == PortKind::Fifo {
            return;
        }
        self.open = true;
        if running {
            // virtio_serial_open does not reset `throttled`.
            self.host_connected = true;
        }
    }

    /// The vCPUs start: OPENED is delivered to a port whose chardev is open; CLOSED is not made up for one whose is not.
    pub(super) fn start(&mut self, honours: bool) {
        if self.open {
            self.host_connected = true;
        }
        if !honours && self.watch && self.out.len() < self.room {
            self.throttled = false;
            self.watch = false;
        }
    }

    /// What the host wrote goes into the guest's buffers.
    pub(super) fn pull_input(&mut self, rng: &mut Rng) -> bool {
        if self.input.is_empty() || self.in_queue.len() >= IN_BUFFERS {
            return false;
        }
        let count = rng.len(1, self.input.len());
        self.in_queue.push_back(self.input.drain(..count).collect());
        true
    }

    /// The state of a stopped source, as its destination loads it: guest memory, the element under way, the port's belief. Not
    /// `throttled`, and nothing of the chardev.
    pub(super) fn load(&mut self, saved: &Self) {
        self.queue.clone_from(&saved.queue);
        self.offset = saved.offset;
        self.in_queue.clone_from(&saved.in_queue);
        self.host_connected = saved.host_connected;
        self.throttled = false;
        self.watch = false;
    }

    pub(super) fn is_drained(&self) -> bool {
        self.queue.is_empty()
    }
}

/// Where a migration is that this QEMU is the source of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Setup,
    Active,
    Stopping,
    Held,
    Device,
    Loaded,
    Over,
}

/// Where an attempt breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    RefuseIncoming,
    RefuseMigrate,
    FailSetup,
    FailActive,
    FailHeld,
    /// While the state is saved: nothing of it arrived.
    FailDevice,
    /// The destination loaded the state, emitted what it found in the queues, and died.
    FailLoaded,
    /// Somebody else cancels.
    CancelActive,
    CancelHeld,
    /// The destination dies while it waits.
    DestinationDies,
}

impl Fault {
    pub(super) const ALL: [Self; 10] = [
        Self::RefuseIncoming,
        Self::RefuseMigrate,
        Self::FailSetup,
        Self::FailActive,
        Self::FailHeld,
        Self::FailDevice,
        Self::FailLoaded,
        Self::CancelActive,
        Self::CancelHeld,
        Self::DestinationDies,
    ];
}

/// A migration under way.
#[derive(Debug, Clone)]
pub(super) struct Outgoing {
    pub(super) to: usize,
    pub(super) stage: Stage,
    pub(super) fault: Option<Fault>,
    /// Tells steps of this attempt from those of an earlier one.
    pub(super) number: u64,
}

/// One QEMU process.
#[derive(Debug)]
pub(super) struct Qemu {
    pub(super) alive: bool,
    /// Whether its vCPUs run.
    pub(super) running: bool,
    /// Whether they ever did.
    pub(super) ran: bool,
    pub(super) status: Status,
    pub(super) pause: bool,
    pub(super) ports: Vec<Port>,
    pub(super) outgoing: Option<Outgoing>,
    /// Its monitor says things one after the other.
    pub(super) said_at: u64,
}

impl Qemu {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            alive: true,
            running: false,
            ran: false,
            status: Status::None,
            pause: false,
            ports: (0..options.ports).map(|_| Port::new(options)).collect(),
            outgoing: None,
            said_at: 0,
        }
    }
}
