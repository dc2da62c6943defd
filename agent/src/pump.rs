//! Executes what the session decides: one thread, one `poll(2)`, pages by reference.
//!
//! ```text
//! ring --splice--> fresh --tee--> retained (per stream)
//!                    |               |  ack: splice to /dev/null
//!                    |               +--tee--> replay (per port, while replaying)
//!                    v                            |
//!   header --write-> outgoing (per port) <--------+
//!                    |
//!                    +--splice--> port
//! ```
//!
//! All pipes are private and non-blocking, so nothing here ever waits but `poll`. `fresh` is empty between two actions:
//! a ring is harvested only when its port has nothing in hand, and the pages go straight on. That keeps one rule simple:
//! whatever has left a ring is in `retained`.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::utsname::uname;
use vmtrail_wire::agent_to_host::Pong;
use vmtrail_wire::host_to_agent::Setting;
use vmtrail_wire::{FrameHeader, HEADER_SIZE, MAX_FRAME_PAGES, MessageDecoder, SessionId};

use crate::metadata::Metadata;
use crate::ports::{Found, Line, Source, Uevents};
use crate::session::{
    About, Action, Configured, Harvest, MAX_FRAME_BYTES, Payload, PortId, Sent, Session,
};
use crate::sys::{self, Clock, Moved, Pipe};
use crate::tracefs::{self, Instance, Ring, TraceError};

const MILLISECOND: u64 = 1_000_000;

/// Actions between two looks at the ports' input.
const ACTIONS_PER_ROUND: u32 = 32;

/// How often ports, CPUs and free memory are looked at when nothing announces a change.
const RESCAN_EVERY: u64 = 5_000 * MILLISECOND;

/// The same while there is no port at all.
const RESCAN_WITHOUT_PORTS: u64 = 1_000 * MILLISECOND;

/// After an announcement: time for the device node to appear.
const RESCAN_SOON: u64 = 50 * MILLISECOND;

/// A port without a host is looked at this often at first, and ever more seldom. Its poll is level-triggered (POLLHUP
/// in virtio_console's `port_fops_poll`), so waiting on it would spin.
const HUNG_FIRST: u64 = 10 * MILLISECOND;
const HUNG_MAX: u64 = 250 * MILLISECOND;

/// How long the end of the agent may take to send what the rings still hold.
const SHUTDOWN_BUDGET: u64 = 1_000 * MILLISECOND;

/// All streams together retain at most this part of the memory that is available. It is in nobody's RSS, so the OOM
/// killer would choose somebody else for it.
const MEMORY_SHARE: u64 = 16;

/// The agent's death frees what it retains, so let it be the first to go.
const OOM_SCORE: &str = "800";

/// Room of `outgoing` besides pages: the longest table of streams.
const OUTGOING_MIN: usize = 256 << 10;

/// `/proc/sys/fs/pipe-max-size` where nobody changed it.
const DEFAULT_PIPE_MAX: usize = 1 << 20;

/// Bytes copied at a time where the other end of a port cannot be spliced to.
const COPY: usize = 32 << 10;

/// What the command line says of the pump.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where ports are.
    pub source: Source,
    /// Bytes that a stream may keep unacknowledged.
    pub retain_bytes: u64,
    /// After how long a page that is not full is sent.
    pub idle_flush_ns: u64,
    /// What to record from the start.
    pub settings: Vec<Setting>,
}

/// Why the agent ended before it was told to.
#[derive(Debug)]
pub enum PumpError {
    /// Tracing failed.
    Trace(TraceError),
    /// A system call failed.
    Io {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// The agent at work.
#[derive(Debug)]
pub struct Pump {
    session: Session,
    // Rings must be closed before the instance is removed: fields are dropped in this order.
    streams: BTreeMap<u32, StreamIo>,
    ports: BTreeMap<PortId, PortIo>,
    metadata: Metadata,
    instance: Instance,
    fresh: Pipe,
    void: File,
    page: Vec<u8>,
    input: Vec<u8>,
    options: Options,
    page_size: usize,
    signals: SignalFd,
    uevents: Option<Uevents>,
    rescan_at: u64,
    ending: Option<u64>,
    /// Room of a retention pipe.
    retain_bytes: usize,
    said_no_ports: bool,
    said_no_retention: bool,
    /// Ports that could not be opened and why, so that it is said once.
    refused: BTreeMap<PortId, String>,
}

#[derive(Debug)]
struct StreamIo {
    ring: Ring,
    /// Made with the first page: a guest may have many more possible CPUs than it uses.
    retained: Option<Pipe>,
    retained_bytes: usize,
}

#[derive(Debug)]
struct PortIo {
    found: Found,
    line: Line,
    decoder: MessageDecoder,
    outgoing: Pipe,
    /// Bytes of the frame in hand that are not on the port, and all of them.
    pending: usize,
    total: usize,
    replay: Option<Pipe>,
    /// Bytes taken out of `outgoing` to be copied, where splicing is impossible.
    copied: Option<Vec<u8>>,
    hung: Option<Hung>,
}

#[derive(Debug, Clone, Copy)]
struct Hung {
    look_at: u64,
    pause: u64,
}

#[derive(Debug, Clone, Copy)]
enum Woken {
    Signal,
    Uevent,
    Port(PortId),
    Output(PortId),
    Ring(u32),
}

impl Pump {
    /// Prepares everything; recording begins.
    ///
    /// # Errors
    ///
    /// See [`PumpError`].
    pub fn new(mut instance: Instance, options: Options) -> Result<Self, PumpError> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGTERM);
        mask.add(Signal::SIGINT);
        mask.thread_block().context("block signals")?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
            .context("make a signalfd")?;
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            // A port takes up to 5 descriptors, a CPU 4: more than 1024 in a large guest.
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
        let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE);

        let now = Clock::Monotonic.now_ns();
        instance
            .configure(&options.settings, std::iter::empty())
            .map_err(PumpError::Trace)?;
        let page_size = instance.page_size() as usize;
        let retain_bytes = retention(&options, page_size).context("make a retention pipe")?;
        let about = about(&instance, &options, retain_bytes)?;
        let texts = vec![
            ("vmtrail/uname", uname_text()),
            ("vmtrail/hostname", hostname()),
            ("vmtrail/cpus", cpus_text()),
        ];
        let frame_bytes = (MAX_FRAME_PAGES as usize * page_size).min(MAX_FRAME_BYTES);
        let mut pump = Self {
            session: Session::new(now, about),
            streams: BTreeMap::new(),
            ports: BTreeMap::new(),
            metadata: Metadata::new(instance.root(), instance.dir(), texts),
            fresh: Pipe::with_room(frame_bytes).context("make a pipe")?,
            void: OpenOptions::new()
                .write(true)
                .open("/dev/null")
                .context("open /dev/null")?,
            page: vec![0; page_size],
            input: vec![0; 16 << 10],
            options,
            page_size,
            signals,
            uevents: Uevents::listen().ok(),
            rescan_at: now,
            ending: None,
            retain_bytes,
            said_no_ports: false,
            said_no_retention: false,
            refused: BTreeMap::new(),
            instance,
        };
        let inventory = pump.metadata.take_inventory();
        pump.session.handle_inventory(now, inventory);
        pump.find_cpus(now)?;
        pump.measure_memory(now);
        pump.instance.record(true).map_err(PumpError::Trace)?;
        pump.session.handle_tracing(now, None, Ok(true));
        Ok(pump)
    }

    /// Works until SIGTERM or SIGINT.
    ///
    /// # Errors
    ///
    /// See [`PumpError`]. Recording has ended then, and the instance is removed.
    pub fn run(mut self) -> Result<(), PumpError> {
        loop {
            let now = Clock::Monotonic.now_ns();
            self.session.handle_timeout(now);
            if now >= self.rescan_at {
                self.rescan(now)?;
            }
            let busy = self.work()?;
            if let Some(deadline) = self.ending
                && (self.session.is_idle() || Clock::Monotonic.now_ns() >= deadline)
            {
                return Ok(());
            }
            for (woken, events) in self.wait(busy)? {
                let now = Clock::Monotonic.now_ns();
                match woken {
                    Woken::Signal => {
                        if self.read_signals()? {
                            return Ok(());
                        }
                    }
                    Woken::Uevent => {
                        if self.uevents.as_ref().is_some_and(Uevents::drain) {
                            self.rescan_at = now.saturating_add(RESCAN_SOON);
                        }
                    }
                    Woken::Ring(cpu) => self.session.handle_ring_ready(now, cpu),
                    Woken::Port(id) => self.port_woke(now, id, events),
                    Woken::Output(id) => self.push(now, id),
                }
            }
        }
    }

    /// Executes actions until there are none, or for a while: whether there are more.
    fn work(&mut self) -> Result<bool, PumpError> {
        let mut left = ACTIONS_PER_ROUND;
        while let Some(action) = self.session.poll_action() {
            self.execute(action)?;
            left = left.saturating_sub(1);
            if left == 0 && self.session.is_settled() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn wait(&mut self, busy: bool) -> Result<Vec<(Woken, PollFlags)>, PumpError> {
        let now = Clock::Monotonic.now_ns();
        let mut until = self.rescan_at;
        until = until.min(self.session.poll_timeout().unwrap_or(u64::MAX));
        until = until.min(self.ending.unwrap_or(u64::MAX));
        let mut who = vec![Woken::Signal];
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        if let Some(uevents) = &self.uevents {
            who.push(Woken::Uevent);
            fds.push(PollFd::new(uevents.fd(), PollFlags::POLLIN));
        }
        for (&id, port) in &self.ports {
            if let Some(hung) = port.hung
                && now < hung.look_at
            {
                until = until.min(hung.look_at);
                continue;
            }
            let wants_out = port.pending > 0;
            let both = wants_out && port.line.is_one();
            let out = if both {
                PollFlags::POLLOUT
            } else {
                PollFlags::empty()
            };
            who.push(Woken::Port(id));
            fds.push(PollFd::new(port.line.input(), PollFlags::POLLIN | out));
            if wants_out && !both {
                who.push(Woken::Output(id));
                fds.push(PollFd::new(port.line.output(), PollFlags::POLLOUT));
            }
        }
        for (&cpu, stream) in &self.streams {
            if self.session.wants_ring_wakeup(cpu) {
                who.push(Woken::Ring(cpu));
                fds.push(PollFd::new(stream.ring.pages.as_fd(), PollFlags::POLLIN));
            }
        }
        let pause = if busy { 0 } else { until.saturating_sub(now) };
        // Rounded up, or the last millisecond would be spent spinning.
        let milliseconds = i32::try_from(pause.div_ceil(MILLISECOND)).unwrap_or(i32::MAX);
        let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("poll"),
        }
        let events = fds
            .iter()
            .map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        let hung = |id: &PortId| self.ports.get(id).is_some_and(|port| port.hung.is_some());
        Ok(who
            .into_iter()
            .zip(events)
            .filter(|(woken, events)| match woken {
                // A port that hung must be seen without events, too: that its host is back shows by POLLHUP missing.
                Woken::Port(id) => !events.is_empty() || hung(id),
                _ => !events.is_empty(),
            })
            .collect())
    }

    fn read_signals(&mut self) -> Result<bool, PumpError> {
        while self
            .signals
            .read_signal()
            .context("read a signal")?
            .is_some()
        {
            if self.ending.is_some() {
                // Asked twice.
                return Ok(true);
            }
            let now = Clock::Monotonic.now_ns();
            self.instance.record(false).map_err(PumpError::Trace)?;
            self.session.handle_tracing(now, None, Ok(false));
            self.session.handle_shutdown(now);
            self.ending = Some(now.saturating_add(SHUTDOWN_BUDGET));
        }
        Ok(false)
    }

    fn port_woke(&mut self, now: u64, id: PortId, events: PollFlags) {
        let Some(port) = self.ports.get_mut(&id) else {
            return;
        };
        if events.intersects(PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL) {
            // A device without a host says IN as well; without it, it was unplugged. A socket ends for good.
            let unplugged = !events.contains(PollFlags::POLLIN) || port.line.is_socket();
            if unplugged && !events.contains(PollFlags::POLLIN) {
                self.close(now, id, "it went away");
                return;
            }
            if unplugged {
                // What the peer said last is still to be read; the end of it closes the port.
                self.read_port(now, id);
                return;
            }
            let pause = port
                .hung
                .map_or(HUNG_FIRST, |hung| (hung.pause * 2).min(HUNG_MAX));
            let first = port.hung.is_none();
            port.hung = Some(Hung {
                look_at: now.saturating_add(pause),
                pause,
            });
            if first {
                port.decoder = MessageDecoder::new();
                self.session.handle_host_gone(now, id);
            }
            return;
        }
        port.hung = None;
        if events.contains(PollFlags::POLLIN) {
            self.read_port(now, id);
        }
        if events.contains(PollFlags::POLLOUT) {
            self.push(now, id);
        }
    }

    fn read_port(&mut self, now: u64, id: PortId) {
        let mut buffer = std::mem::take(&mut self.input);
        // Bounded: a host that never stops talking must not keep us from working.
        for _ in 0..8 {
            let Some(port) = self.ports.get_mut(&id) else {
                break;
            };
            match sys::read_some(port.line.input(), &mut buffer) {
                Ok(Moved::Blocked) => break,
                Ok(Moved::Bytes(0)) => {
                    if port.line.is_socket() {
                        self.close(now, id, "its host closed it");
                    }
                    // A device reads as ended while it has no host; its next poll says so.
                    break;
                }
                Ok(Moved::Bytes(len)) => self.take_input(now, id, &buffer[..len]),
                Err(error) => {
                    self.close(now, id, &format!("failed to read: {error}"));
                    break;
                }
            }
        }
        self.input = buffer;
    }

    fn take_input(&mut self, now: u64, id: PortId, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(port) = self.ports.get_mut(&id) else {
                return;
            };
            let taken = port.decoder.push(bytes);
            bytes = &bytes[taken..];
            let mut polled = false;
            while let Some(message) = self.ports.get_mut(&id).and_then(|port| port.decoder.poll()) {
                polled = true;
                match message {
                    Ok(envelope) => self.session.handle_message(now, id, envelope),
                    Err(error) => self.session.handle_bad_message(now, id, error),
                }
                // The session's rule: all work that follows from a fact before the next fact.
                while !self.session.is_settled() {
                    let Some(action) = self.session.poll_action() else {
                        break;
                    };
                    if let Err(error) = self.execute(action) {
                        say(&error.to_string());
                    }
                }
            }
            if taken == 0 && !polled {
                // Cannot happen with a decoder that always makes room; but never loop on it.
                return;
            }
        }
    }

    fn execute(&mut self, action: Action) -> Result<(), PumpError> {
        let now = Clock::Monotonic.now_ns();
        match action {
            Action::Harvest {
                cpu,
                max_pages,
                partial,
            } => {
                let got = self.harvest(cpu, max_pages, partial)?;
                self.session
                    .handle_harvest(now, cpu, (max_pages, partial), got);
            }
            Action::Send {
                port,
                header,
                body,
                payload,
            } => {
                self.stage(port, &header, &body, payload)?;
                self.push(now, port);
            }
            Action::DropUnsent { port } => {
                if let Some(port) = self.ports.get_mut(&port) {
                    port.drop_unsent(&self.void)?;
                }
            }
            Action::BeginReplay { port, cpu } => {
                if let Err(error) = self.begin_replay(port, cpu) {
                    say(&format!(
                        "failed to prepare the replay of cpu{cpu}, will try again: {error}"
                    ));
                    self.session.handle_replay_failed(now, port);
                }
            }
            Action::SkipReplay { port, pages } => {
                let bytes = self.bytes_of(pages);
                if let Some(replay) = self.ports.get(&port).and_then(|port| port.replay.as_ref()) {
                    replay
                        .discard(&self.void, bytes)
                        .context("skip replayed pages")?;
                }
            }
            Action::EndReplay { port } => {
                if let Some(port) = self.ports.get_mut(&port) {
                    port.replay = None;
                }
            }
            Action::Free { cpu, pages } => {
                let bytes = self.bytes_of(pages);
                if let Some(stream) = self.streams.get_mut(&cpu)
                    && let Some(retained) = &stream.retained
                {
                    let gone = retained
                        .discard(&self.void, bytes)
                        .context("free retained pages")?;
                    stream.retained_bytes = stream.retained_bytes.saturating_sub(gone);
                }
            }
            Action::ReadCounters => {
                let counters: Vec<_> = self
                    .streams
                    .iter()
                    .filter_map(|(&cpu, stream)| self.instance.counters(cpu, &stream.ring).ok())
                    .collect();
                self.session.handle_counters(now, &counters);
            }
            Action::ReadClocks { port, id, host_ns } => {
                let pong = Pong {
                    id,
                    host_ns,
                    monotonic_ns: Clock::Monotonic.now_ns(),
                    boottime_ns: Clock::Boottime.now_ns(),
                    realtime_ns: Clock::Realtime.now_ns(),
                };
                self.session.handle_clocks(now, port, pong);
            }
            Action::TakeInventory => {
                let inventory = self.metadata.take_inventory();
                self.session.handle_inventory(now, inventory);
            }
            Action::ReadMetadata { item, offset } => {
                let piece = self.metadata.read(item, offset);
                self.session.handle_metadata(now, piece);
            }
            Action::Configure { port, id, settings } => {
                let rings = self
                    .streams
                    .iter()
                    .map(|(&cpu, stream)| (cpu, &stream.ring));
                let result = self
                    .instance
                    .configure(&settings, rings)
                    .map(|()| Configured {
                        clock: self.instance.clock(),
                        ring_pages: self.instance.ring_pages(),
                    })
                    .map_err(|error| error.to_string());
                self.session.handle_configured(now, port, id, result);
            }
            Action::SetTracing { port, id, on } => {
                let result = self
                    .instance
                    .record(on)
                    .map(|()| on)
                    .map_err(|error| error.to_string());
                self.session.handle_tracing(now, Some((port, id)), result);
            }
            Action::Mark { port, id, text } => {
                if let Err(error) = self.instance.mark(&text) {
                    self.session
                        .handle_failure(now, port, id, error.to_string());
                }
            }
        }
        Ok(())
    }

    fn harvest(&mut self, cpu: u32, max_pages: u32, partial: bool) -> Result<Harvest, PumpError> {
        let Some(stream) = self.streams.get_mut(&cpu) else {
            return Ok(Harvest::default());
        };
        if stream.retained.is_none() {
            // Before anything leaves the ring: what cannot be retained must not be taken.
            match Pipe::with_room(self.retain_bytes) {
                Ok(retained) => stream.retained = Some(retained),
                Err(error) => {
                    if !std::mem::replace(&mut self.said_no_retention, true) {
                        say(&format!(
                            "failed to make a retention pipe, cpu{cpu} and others stay unread: {error}"
                        ));
                    }
                    return Ok(Harvest::default());
                }
            }
        }
        let max = max_pages as usize * self.page_size;
        let mut bytes = 0;
        // splice_to_pipe() throws away what does not fit into the pipe, pages and all. `fresh` is empty and has room
        // for a whole frame, so all that is asked for fits.
        while bytes < max {
            match self.fresh.fill_from(&stream.ring.pages, max - bytes) {
                Ok(Moved::Bytes(0) | Moved::Blocked) => break,
                Ok(Moved::Bytes(len)) => bytes += len,
                // The CPU of a ring can be offline; then the kernel has nothing to give, in several words.
                Err(_) => break,
            }
        }
        let mut read = false;
        if partial && bytes < max {
            // Always a whole page's length: splice refuses to go on from a position inside a page.
            match sys::read_some(&stream.ring.pages, &mut self.page) {
                Ok(Moved::Bytes(len)) if len > 0 => {
                    self.page[len..].fill(0);
                    self.fresh.write(&self.page).context("take a page")?;
                    bytes += self.page_size;
                    read = true;
                    if len < self.page_size
                        && let Ok(ring) = self.instance.open_ring(cpu)
                    {
                        // A new descriptor begins at position 0.
                        stream.ring = ring;
                    }
                }
                Ok(_) | Err(_) => {}
            }
        }
        if bytes == 0 {
            return Ok(Harvest::default());
        }
        if let Some(retained) = &stream.retained {
            let kept = self
                .fresh
                .share_with(retained, bytes)
                .context("retain pages")?;
            if kept != Moved::Bytes(bytes) {
                // The window is counted in the pipe's own slots, so this is a broken kernel or a broken agent. To go
                // on would be to promise a replay that cannot be kept; a new session says plainly what is missing.
                return Err(PumpError::Io {
                    what: "retain pages",
                    source: io::Error::other(format!("{bytes} bytes did not fit: {kept:?}")),
                });
            }
        }
        stream.retained_bytes += bytes;
        let pages = u32::try_from(bytes / self.page_size).unwrap_or(max_pages);
        Ok(Harvest {
            pages,
            partial: read,
        })
    }

    /// Puts a whole frame into a port's own pipe.
    fn stage(
        &mut self,
        id: PortId,
        header: &FrameHeader,
        body: &[u8],
        payload: Payload,
    ) -> Result<(), PumpError> {
        let Some(port) = self.ports.get_mut(&id) else {
            // It closed within this round: its pages are retained, and `fresh` must be empty again.
            self.fresh
                .discard(&self.void, usize::MAX >> 1)
                .context("drop pages")?;
            return Ok(());
        };
        let len = header.payload_len as usize;
        let mut staged = port
            .outgoing
            .write(&header.encode(body))
            .context("stage a header")?;
        if staged == Moved::Bytes(HEADER_SIZE) && len > 0 {
            staged = match payload {
                Payload::Bytes(bytes) => port.outgoing.write(&bytes),
                Payload::Fresh { .. } => self.fresh.move_to(&port.outgoing, len),
                Payload::Replay { .. } => match &port.replay {
                    Some(replay) => replay.move_to(&port.outgoing, len),
                    None => Ok(Moved::Blocked),
                },
            }
            .context("stage a payload")?;
            if staged != Moved::Bytes(len) {
                return Err(PumpError::Io {
                    what: "stage a payload",
                    source: io::Error::other(format!("{len} bytes did not fit: {staged:?}")),
                });
            }
        }
        port.total = header.frame_len();
        port.pending = port.total;
        Ok(())
    }

    /// Moves what the port takes of the frame in its hand.
    fn push(&mut self, now: u64, id: PortId) {
        let Some(port) = self.ports.get_mut(&id) else {
            return;
        };
        if port.pending == 0 {
            return;
        }
        match port.push() {
            Ok(Sent::Swallowed) => {
                say(&format!(
                    "the port {} swallowed a frame, it will be sent again",
                    port.found.name
                ));
                if let Err(error) = port.drop_unsent(&self.void) {
                    say(&error.to_string());
                }
                self.session.handle_sent(now, id, Sent::Swallowed);
            }
            Ok(sent) => self.session.handle_sent(now, id, sent),
            Err(error) => self.close(now, id, &format!("failed to write: {error}")),
        }
    }

    fn begin_replay(&mut self, id: PortId, cpu: u32) -> io::Result<()> {
        let (Some(port), Some(stream)) = (self.ports.get_mut(&id), self.streams.get(&cpu)) else {
            return Ok(());
        };
        let Some(retained) = &stream.retained else {
            return Err(io::Error::other("nothing is retained"));
        };
        // A tee starts at the oldest page and cannot skip, so the copy needs as much room as the original.
        let replay = Pipe::with_room(self.retain_bytes)?;
        let shared = retained.share_with(&replay, stream.retained_bytes)?;
        if shared != Moved::Bytes(stream.retained_bytes) {
            return Err(io::Error::other(format!(
                "{} bytes are retained, {shared:?} could be shared",
                stream.retained_bytes
            )));
        }
        port.replay = Some(replay);
        Ok(())
    }

    fn close(&mut self, now: u64, id: PortId, why: &str) {
        if let Some(port) = self.ports.remove(&id) {
            say(&format!("port {} closed: {why}", port.found.name));
            self.tell_ports(now);
            self.rescan_at = self.rescan_at.min(now.saturating_add(RESCAN_SOON * 4));
        }
    }

    fn tell_ports(&mut self, now: u64) {
        let open: Vec<PortId> = self.ports.keys().copied().collect();
        self.session.handle_ports(now, &open);
    }

    fn rescan(&mut self, now: u64) -> Result<(), PumpError> {
        let found = self.options.source.scan();
        let gone: Vec<PortId> = self
            .ports
            .iter()
            .filter(|(_, port)| !found.contains(&port.found) && port.found.is_device())
            .map(|(&id, _)| id)
            .collect();
        for id in gone {
            self.close(now, id, "it was unplugged");
        }
        let mut opened = false;
        for port in found {
            if self.ports.contains_key(&port.id) {
                continue;
            }
            match self.open(port.clone()) {
                Ok(io) => {
                    say(&format!("port {} opened", port.name));
                    self.refused.remove(&port.id);
                    self.ports.insert(port.id, io);
                    opened = true;
                }
                Err(why) => {
                    if self.refused.get(&port.id) != Some(&why) {
                        say(&why);
                        self.refused.insert(port.id, why);
                    }
                }
            }
        }
        if opened {
            self.tell_ports(now);
        }
        if self.ports.is_empty() && !std::mem::replace(&mut self.said_no_ports, true) {
            say(
                "there is no port yet: waiting. The host adds one with `vmtrail record`, or with \
                 -device virtserialport,name=vmtrail.0",
            );
        }
        self.find_cpus(now)?;
        self.measure_memory(now);
        let pause = if self.ports.is_empty() {
            RESCAN_WITHOUT_PORTS
        } else {
            RESCAN_EVERY
        };
        self.rescan_at = now.saturating_add(pause);
        Ok(())
    }

    fn open(&self, found: Found) -> Result<PortIo, String> {
        let line = found.open().map_err(|error| error.to_string())?;
        let pages = MAX_FRAME_PAGES as usize * self.page_size;
        let room = HEADER_SIZE + pages.clamp(OUTGOING_MIN, MAX_FRAME_BYTES);
        let outgoing = Pipe::with_room(room).map_err(|error| {
            format!("failed to make a pipe for the port {}: {error}", found.name)
        })?;
        Ok(PortIo {
            found,
            line,
            decoder: MessageDecoder::new(),
            outgoing,
            pending: 0,
            total: 0,
            replay: None,
            copied: None,
            hung: None,
        })
    }

    fn find_cpus(&mut self, now: u64) -> Result<(), PumpError> {
        self.instance.find_cpus().map_err(PumpError::Trace)?;
        let known = self.streams.len();
        for &cpu in self.instance.cpus() {
            if !self.streams.contains_key(&cpu) {
                let ring = self.instance.open_ring(cpu).map_err(PumpError::Trace)?;
                let stream = StreamIo {
                    ring,
                    retained: None,
                    retained_bytes: 0,
                };
                self.streams.insert(cpu, stream);
            }
        }
        if self.streams.len() != known {
            self.session.handle_cpus(now, self.instance.cpus());
        }
        Ok(())
    }

    fn measure_memory(&mut self, now: u64) {
        let Some(available) = tracefs::available_memory() else {
            return;
        };
        let page_size = self.page_size as u64;
        let retained = self.session.retained_pages() * page_size;
        let active = self
            .streams
            .values()
            .filter(|stream| stream.retained.is_some())
            .count();
        let cpus = (active as u64).max(online_cpus()).max(1);
        let each = available.saturating_add(retained) / MEMORY_SHARE / cpus / page_size;
        self.session.handle_window(now, each);
    }

    fn bytes_of(&self, pages: u64) -> usize {
        usize::try_from(pages).map_or(usize::MAX, |pages| pages.saturating_mul(self.page_size))
    }
}

impl PortIo {
    fn push(&mut self) -> io::Result<Sent> {
        while self.pending > 0 {
            let moved = match &mut self.copied {
                None => match self.outgoing.drain_to(self.line.output(), self.pending) {
                    Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {
                        // Not every kind of file can be spliced to (terminals): copy.
                        self.copied = Some(Vec::new());
                        continue;
                    }
                    moved => moved?,
                },
                Some(bytes) => {
                    if bytes.is_empty() {
                        bytes.resize(COPY, 0);
                        match self.outgoing.read(bytes)? {
                            Moved::Bytes(len) => bytes.truncate(len),
                            Moved::Blocked => bytes.clear(),
                        }
                    }
                    let moved = sys::write_some(self.line.output(), bytes)?;
                    if let Moved::Bytes(len) = moved {
                        bytes.drain(..len);
                    }
                    moved
                }
            };
            match moved {
                Moved::Bytes(0) => return Ok(Sent::Swallowed),
                Moved::Bytes(len) => self.pending -= len.min(self.pending),
                Moved::Blocked => {
                    return Ok(Sent::Blocked {
                        torn: self.pending < self.total,
                    });
                }
            }
        }
        Ok(Sent::Whole)
    }

    fn drop_unsent(&mut self, void: &File) -> Result<(), PumpError> {
        self.outgoing
            .discard(void, self.total)
            .context("drop a frame")?;
        if let Some(bytes) = &mut self.copied {
            bytes.clear();
        }
        self.pending = 0;
        Ok(())
    }
}

trait Context<T> {
    fn context(self, what: &'static str) -> Result<T, PumpError>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: &'static str) -> Result<T, PumpError> {
        self.map_err(|source| PumpError::Io {
            what,
            source: source.into(),
        })
    }
}

impl fmt::Display for PumpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trace(error) => error.fmt(f),
            Self::Io { what, source } => write!(f, "failed to {what}: {source}"),
        }
    }
}

impl std::error::Error for PumpError {}

/// Says something to whoever reads the agent's log: there is one stream of it, and systemd adds the time.
pub(crate) fn say(text: &str) {
    eprintln!("vmtrail-agent: {text}");
}

fn about(instance: &Instance, options: &Options, retain_bytes: usize) -> Result<About, PumpError> {
    let header_page = tracefs::read_small(&instance.root().join("events/header_page"))
        .context("read events/header_page")?;
    let machine_long = u8::try_from(size_of::<usize>()).unwrap_or(8);
    Ok(About {
        session: random_session()?,
        boot_id: boot_id(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: uname()
            .map(|names| names.release().to_string_lossy().into_owned())
            .unwrap_or_default(),
        clock: instance.clock(),
        page_size: instance.page_size(),
        long_size: tracefs::parse_long_size(&header_page).unwrap_or(machine_long),
        big_endian: cfg!(target_endian = "big"),
        ring_pages: instance.ring_pages(),
        window_pages: retain_bytes as u64 / u64::from(instance.page_size()),
        idle_flush_ns: options.idle_flush_ns,
    })
}

/// Room of a retention pipe: what was asked for, or what the kernel grants.
fn retention(options: &Options, page_size: usize) -> io::Result<usize> {
    let wanted = usize::try_from(options.retain_bytes)
        .unwrap_or(usize::MAX)
        .max(page_size);
    match Pipe::with_room(wanted) {
        Ok(_) => return Ok(wanted),
        Err(error) if wanted <= DEFAULT_PIPE_MAX => return Err(error),
        Err(error) => say(&format!(
            "the kernel refuses a retention pipe of {} KiB ({error}), each CPU keeps {} KiB: raise \
             /proc/sys/fs/pipe-max-size, or give the agent CAP_SYS_RESOURCE",
            wanted >> 10,
            DEFAULT_PIPE_MAX >> 10
        )),
    }
    Pipe::with_room(DEFAULT_PIPE_MAX).map(|_| DEFAULT_PIPE_MAX)
}

/// Random, because the agent of a guest that was cloned or restored must not number its frames like its twin.
fn random_session() -> Result<SessionId, PumpError> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .context("read /dev/urandom")?;
    Ok(SessionId(u64::from_le_bytes(bytes).max(1)))
}

fn boot_id() -> [u8; 16] {
    let text =
        tracefs::read_small(Path::new("/proc/sys/kernel/random/boot_id")).unwrap_or_default();
    let mut id = [0; 16];
    let digits: Vec<char> = text.chars().filter(char::is_ascii_hexdigit).collect();
    for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
        let pair: String = pair.iter().collect();
        *byte = u8::from_str_radix(&pair, 16).unwrap_or(0);
    }
    id
}

fn uname_text() -> String {
    uname().map_or_else(
        |_| String::new(),
        |names| {
            let words = [
                names.sysname(),
                names.release(),
                names.version(),
                names.machine(),
            ];
            words
                .map(|word| word.to_string_lossy().into_owned())
                .join(" ")
        },
    )
}

fn hostname() -> String {
    uname().map_or_else(
        |_| String::new(),
        |names| names.nodename().to_string_lossy().into_owned(),
    )
}

fn cpus_text() -> String {
    ["possible", "present", "online"]
        .iter()
        .map(|list| format!("{list} {}\n", cpu_list(list)))
        .collect()
}

fn cpu_list(list: &str) -> String {
    let path = Path::new("/sys/devices/system/cpu").join(list);
    tracefs::read_small(&path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn online_cpus() -> u64 {
    count_cpus(&cpu_list("online"))
}

/// CPUs in a list like `0-3,8`.
fn count_cpus(list: &str) -> u64 {
    list.split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            Some(last.checked_sub(first)?.saturating_add(1))
        })
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_counted() {
        assert_eq!(count_cpus("0-3,8"), 5);
        assert_eq!(count_cpus("0"), 1);
        assert_eq!(count_cpus(""), 0);
        assert_eq!(count_cpus("3-1"), 0);
    }

    #[test]
    fn the_boot_id_is_read() {
        assert_ne!(boot_id(), [0; 16]);
    }
}
