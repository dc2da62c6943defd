//! A unix socket and a [`Session`], and nothing else: the decisions are the session's.
//!
//! [`Client::connect`] opens the socket, negotiates, asks for the VM's state, and leaves a task
//! behind that owns the socket. [`Client`] is a handle on it, cheap to clone; the connection ends
//! when the last handle is dropped, and what was written by then takes effect.
//!
//! - [`execute`](Client::execute) sends when it is first polled. Dropping its future afterwards loses
//!   nothing: the command takes effect and its answer is dropped.
//! - Events and answers keep QEMU's order: once an answer was returned, every event that QEMU sent
//!   before it is in every [`EventReceiver`].
//! - QEMU never repeats an event, so [`Client::initial`] tells the state that the first events build
//!   on, and the first receiver begins *before* that state was asked for: nothing falls in between.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use serde_json::value::RawValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::command::{Command, MigrationInfo, QueryMigrate, QueryStatus, StatusInfo};
use crate::error::{CloseReason, CommandError, ConnectError, ExecuteError};
use crate::event::{Budget, is_critical};
use crate::message::{Event, Greeting, excerpt};
use crate::session::{CommandId, Outcome, Session, SessionConfig, State, Stats};

/// Commands handed to the task and not yet taken by it.
const MAX_HANDED_OVER: usize = 64;

/// Bytes read from the socket at once.
const READ_BYTES: usize = 64 << 10;

/// Events of the kind that may be dropped: most that wait in one receiver.
pub const MAX_RECEIVER_EVENTS: usize = 1024;

/// Events that must not be dropped: most that wait in one receiver (and at most
/// [`MAX_QUEUED_BYTES`](crate::event::MAX_QUEUED_BYTES) of them). At this the receiver ends with
/// [`EventsEnded::Overrun`], which is a loss that is told; the connection goes on.
pub const MAX_RECEIVER_CRITICAL_EVENTS: usize = 65_536;

/// How to connect.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Limits and deadlines of the connection.
    pub session: SessionConfig,
    /// How long a command may take where [`Client::execute`] is not told otherwise: 5 s.
    pub command_deadline: Duration,
    /// Whether to run `query-status` and `query-migrate` first, for [`Client::initial`]. Off for a
    /// server that is no VM (`qemu-storage-daemon`) and for tests.
    pub resync: bool,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            session: SessionConfig::default(),
            command_deadline: Duration::from_secs(5),
            resync: true,
        }
    }
}

/// The VM's state at the moment of connecting.
#[derive(Debug, Clone, PartialEq)]
pub struct InitialState {
    /// Whether the vCPUs run.
    pub status: StatusInfo,
    /// Where a migration stands, seen from this QEMU.
    pub migration: MigrationInfo,
}

/// A handle on one QMP connection.
#[derive(Debug, Clone)]
pub struct Client {
    requests: mpsc::Sender<Request>,
    shared: Arc<Shared>,
    greeting: Arc<Greeting>,
    initial: Option<Arc<InitialState>>,
    command_deadline: Duration,
    peer_pid: Option<u32>,
}

/// What handles and the task both hold.
#[derive(Debug)]
struct Shared {
    subscribers: Mutex<Subscribers>,
    closed: watch::Sender<Option<CloseReason>>,
    stats: Mutex<Stats>,
    has_oob: watch::Sender<bool>,
}

#[derive(Debug)]
struct Subscribers {
    queues: Vec<Arc<Queue>>,
    /// The receiver that began with the connection, until somebody takes it.
    first: Option<EventReceiver>,
}

#[derive(Debug)]
struct Request {
    name: String,
    arguments: Value,
    allowed: Duration,
    oob: bool,
    reply: oneshot::Sender<Result<Box<RawValue>, CommandError>>,
}

impl Client {
    /// Connects to the QMP socket at `path`: negotiates, and asks for the VM's state.
    ///
    /// Bounded in time by the deadlines of `options`.
    pub async fn connect(
        path: impl AsRef<Path>,
        options: ConnectOptions,
    ) -> Result<Self, ConnectError> {
        let path = path.as_ref();
        let stream = match UnixStream::connect(path).await {
            Ok(stream) => stream,
            Err(error) => {
                return Err(connect_error(path, error));
            }
        };
        Self::over(stream, path, options).await
    }

    /// Speaks QMP over a socket that is connected already, such as one that a manager passed.
    pub async fn from_stream(
        stream: UnixStream,
        options: ConnectOptions,
    ) -> Result<Self, ConnectError> {
        Self::over(stream, Path::new("(a socket passed to us)"), options).await
    }

    async fn over(
        stream: UnixStream,
        path: &Path,
        options: ConnectOptions,
    ) -> Result<Self, ConnectError> {
        let peer_pid = stream
            .peer_cred()
            .ok()
            .and_then(|credentials| credentials.pid())
            .and_then(|pid| u32::try_from(pid).ok());
        let first = Arc::new(Queue::default());
        let shared = Arc::new(Shared {
            subscribers: Mutex::new(Subscribers {
                queues: vec![Arc::clone(&first)],
                first: Some(EventReceiver { queue: first }),
            }),
            closed: watch::Sender::new(None),
            stats: Mutex::new(Stats::default()),
            has_oob: watch::Sender::new(false),
        });
        let (requests, inbox) = mpsc::channel(MAX_HANDED_OVER);
        let (ready, greeted) = oneshot::channel();
        let driver = Driver {
            session: Session::new(0, options.session.clone()),
            epoch: Instant::now(),
            stream,
            shared: Arc::clone(&shared),
            inbox: Some(inbox),
            replies: BTreeMap::new(),
            ready: Some(ready),
        };
        tokio::spawn(driver.run());

        let greeting = match greeted.await {
            Ok(Ok(greeting)) => greeting,
            Ok(Err(reason)) => return Err(closed_error(path, reason)),
            // The task ends early only with the runtime.
            Err(_) => return Err(closed_error(path, CloseReason::Local)),
        };
        let mut client = Self {
            requests,
            shared,
            greeting: Arc::new(greeting),
            initial: None,
            command_deadline: options.command_deadline,
            peer_pid,
        };
        if options.resync {
            let resync = |source| ConnectError::Resync {
                path: path.to_owned(),
                source,
            };
            let (status, migration) = tokio::join!(
                client.execute(QueryStatus {}),
                client.execute(QueryMigrate {})
            );
            client.initial = Some(Arc::new(InitialState {
                status: status.map_err(resync)?,
                migration: migration.map_err(resync)?,
            }));
        }
        Ok(client)
    }

    /// Runs a command, within [`ConnectOptions::command_deadline`].
    pub async fn execute<C: Command>(&self, command: C) -> Result<C::Return, ExecuteError> {
        self.execute_within(command, self.command_deadline).await
    }

    /// Runs a command, within `allowed`. The time that it waits behind others counts.
    pub async fn execute_within<C: Command>(
        &self,
        command: C,
        allowed: Duration,
    ) -> Result<C::Return, ExecuteError> {
        self.run(&command, allowed, false).await
    }

    /// Runs a command beside QEMU's main loop. Only some commands can
    /// ([`Command::ALLOW_OOB`]), and only where [`has_oob`](Self::has_oob).
    pub async fn execute_oob<C: Command>(
        &self,
        command: C,
        allowed: Duration,
    ) -> Result<C::Return, ExecuteError> {
        self.run(&command, allowed, true).await
    }

    /// Runs a command by name. `arguments` is a JSON object, or [`Value::Null`] for none.
    pub async fn execute_raw(&self, name: &str, arguments: Value) -> Result<Value, ExecuteError> {
        let raw = self
            .request(name, arguments, self.command_deadline, false)
            .await?;
        decode(name, &raw)
    }

    /// All events from now on; for the first who asks, all since the connection was made.
    #[must_use]
    pub fn subscribe(&self) -> EventReceiver {
        let mut subscribers = lock(&self.shared.subscribers);
        if let Some(first) = subscribers.first.take() {
            return first;
        }
        let queue = Arc::new(Queue::default());
        if let Some(reason) = self.shared.closed.borrow().clone() {
            queue.end(EventsEnded::Closed(reason));
        } else {
            subscribers.queues.push(Arc::clone(&queue));
        }
        EventReceiver { queue }
    }

    /// The VM's state when the connection was made; `None` if [`ConnectOptions::resync`] was off.
    #[must_use]
    pub fn initial(&self) -> Option<&InitialState> {
        self.initial.as_deref()
    }

    /// What QEMU said first.
    #[must_use]
    pub fn greeting(&self) -> &Greeting {
        &self.greeting
    }

    /// The process that listens at the other end: QEMU's, if QEMU made the socket itself. Where a
    /// manager made it and passed it on (libvirt does), it is the manager's. `None` where the kernel
    /// does not tell, as across PID namespaces.
    #[must_use]
    pub fn peer_pid(&self) -> Option<u32> {
        self.peer_pid
    }

    /// Whether [`execute_oob`](Self::execute_oob) can be used.
    #[must_use]
    pub fn has_oob(&self) -> bool {
        *self.shared.has_oob.borrow()
    }

    /// The connection's counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *lock(&self.shared.stats)
    }

    /// Waits for the connection's end and tells why it ended.
    pub async fn closed(&self) -> CloseReason {
        let mut closed = self.shared.closed.subscribe();
        match closed.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(CloseReason::Local),
            // `self` holds the sender, so this does not happen.
            Err(_) => CloseReason::Local,
        }
    }

    /// Why the connection ended, if it has.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.shared.closed.borrow().clone()
    }

    async fn run<C: Command>(
        &self,
        command: &C,
        allowed: Duration,
        oob: bool,
    ) -> Result<C::Return, ExecuteError> {
        let arguments = match serde_json::to_value(command) {
            Ok(Value::Object(arguments)) if arguments.is_empty() => Value::Null,
            Ok(arguments) => arguments,
            Err(source) => {
                return Err(ExecuteError::Encode {
                    command: C::NAME.to_owned(),
                    source,
                });
            }
        };
        let raw = self.request(C::NAME, arguments, allowed, oob).await?;
        decode(C::NAME, &raw)
    }

    async fn request(
        &self,
        name: &str,
        arguments: Value,
        allowed: Duration,
        oob: bool,
    ) -> Result<Box<RawValue>, ExecuteError> {
        let (reply, answer) = oneshot::channel();
        let request = Request {
            name: name.to_owned(),
            arguments,
            allowed,
            oob,
            reply,
        };
        let closed = || {
            let reason = self.close_reason().unwrap_or(CloseReason::Local);
            Err(CommandError::Closed(reason))
        };
        // Handing over waits only while the task is busy, which is never long; the bound is for a
        // runtime that does not get to run it.
        let result = match tokio::time::timeout(allowed, self.requests.send(request)).await {
            Ok(Ok(())) => answer.await.unwrap_or_else(|_| closed()),
            Ok(Err(_)) => closed(),
            Err(_) => Err(CommandError::Deadline {
                after: allowed,
                sent: false,
            }),
        };
        result.map_err(|source| ExecuteError::Command {
            command: name.to_owned(),
            source,
        })
    }
}

/// Why an [`EventReceiver`] ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EventsEnded {
    /// The connection ended; all its events were given before.
    #[error("the connection ended: {0}")]
    Closed(#[source] CloseReason),
    /// The receiver was not read until its bound was reached, and an event that matters had to be
    /// dropped. Subscribe anew and ask for the state.
    #[error("events were not taken for so long that one that matters had to be dropped")]
    Overrun,
}

/// All events of a connection, in order, for one consumer.
///
/// Those that [`is_critical`] are never dropped in silence; of the others at most
/// [`MAX_RECEIVER_EVENTS`] wait, and [`dropped_count`](Self::dropped_count) tells what did not fit.
#[derive(Debug)]
pub struct EventReceiver {
    queue: Arc<Queue>,
}

impl EventReceiver {
    /// The next event. Dropping the future loses nothing.
    pub async fn recv(&mut self) -> Result<Arc<Event>, EventsEnded> {
        loop {
            if let Some(result) = self.try_recv() {
                return result;
            }
            // An arrival between the look and this line left a permit, and there is one consumer.
            self.queue.arrived.notified().await;
        }
    }

    /// The next event if one waits, or the end if it was reached; `None` if there is nothing yet.
    pub fn try_recv(&mut self) -> Option<Result<Arc<Event>, EventsEnded>> {
        let mut inner = lock(&self.queue.inner);
        if let Some((event, line_bytes)) = inner.events.pop_front() {
            inner.budget(is_critical(&event.name)).release(line_bytes);
            return Some(Ok(event));
        }
        inner.ended.clone().map(Err)
    }

    /// Events dropped because they came faster than they were taken. Never one that
    /// [`is_critical`].
    #[must_use]
    pub fn dropped_count(&self) -> u64 {
        lock(&self.queue.inner).dropped_count
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        let mut inner = lock(&self.queue.inner);
        inner.abandoned = true;
        inner.events.clear();
    }
}

#[derive(Debug, Default)]
struct Queue {
    inner: Mutex<QueueInner>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct QueueInner {
    /// With the length of each one's line.
    events: VecDeque<(Arc<Event>, usize)>,
    critical: Budget,
    others: Budget,
    dropped_count: u64,
    ended: Option<EventsEnded>,
    abandoned: bool,
}

impl QueueInner {
    fn budget(&mut self, critical: bool) -> &mut Budget {
        if critical {
            &mut self.critical
        } else {
            &mut self.others
        }
    }
}

impl Queue {
    /// Whether the receiver still wants more.
    fn push(&self, event: &Arc<Event>, line_bytes: usize) -> bool {
        let mut inner = lock(&self.inner);
        if inner.abandoned || inner.ended.is_some() {
            return false;
        }
        let critical = is_critical(&event.name);
        let max = if critical {
            MAX_RECEIVER_CRITICAL_EVENTS
        } else {
            MAX_RECEIVER_EVENTS
        };
        let admitted = inner.budget(critical).admit(line_bytes, max);
        if admitted {
            inner.events.push_back((Arc::clone(event), line_bytes));
        } else if critical {
            inner.ended = Some(EventsEnded::Overrun);
        } else {
            inner.dropped_count += 1;
        }
        drop(inner);
        self.arrived.notify_one();
        admitted || !critical
    }

    fn end(&self, why: EventsEnded) {
        lock(&self.inner).ended.get_or_insert(why);
        self.arrived.notify_one();
    }
}

/// The task: moves bytes and outcomes between the socket, the session and the handles.
struct Driver {
    session: Session,
    epoch: Instant,
    stream: UnixStream,
    shared: Arc<Shared>,
    /// `None` once all handles are gone.
    inbox: Option<mpsc::Receiver<Request>>,
    replies: BTreeMap<CommandId, oneshot::Sender<Result<Box<RawValue>, CommandError>>>,
    ready: Option<oneshot::Sender<Result<Greeting, CloseReason>>>,
}

/// What woke the task.
enum Wake {
    Read(io::Result<usize>),
    Written(io::Result<usize>),
    Request(Option<Request>),
    Timeout,
}

impl Driver {
    async fn run(mut self) {
        let mut buffer = vec![0; READ_BYTES];
        let mut writing: Option<(Vec<u8>, usize)> = None;
        loop {
            self.deliver();
            if self.session.state() == State::Closed {
                return;
            }
            if writing.is_none() {
                let now = self.now();
                writing = self.session.poll_transmit(now).map(|line| (line, 0));
            }
            if self.inbox.is_none() && writing.is_none() {
                self.session.close_local();
                continue;
            }

            let deadline = self.session.poll_timeout();
            let wake = {
                let (mut reader, mut writer) = self.stream.split();
                let epoch = self.epoch;
                tokio::select! {
                    read = reader.read(&mut buffer) => Wake::Read(read),
                    written = async {
                        match &writing {
                            Some((line, done)) => writer.write(&line[*done..]).await,
                            None => std::future::pending().await,
                        }
                    } => Wake::Written(written),
                    request = async {
                        match &mut self.inbox {
                            Some(inbox) => inbox.recv().await,
                            None => std::future::pending().await,
                        }
                    } => Wake::Request(request),
                    () = async {
                        match deadline {
                            Some(at) => {
                                tokio::time::sleep_until(epoch + Duration::from_nanos(at)).await;
                            }
                            None => std::future::pending().await,
                        }
                    } => Wake::Timeout,
                }
            };

            let now = self.now();
            match wake {
                Wake::Read(Ok(0)) => self.session.handle_eof(),
                Wake::Read(Ok(count)) => self.session.handle_bytes(now, &buffer[..count]),
                Wake::Written(Ok(count)) => {
                    if let Some((line, done)) = &mut writing {
                        *done += count;
                        if *done == line.len() {
                            writing = None;
                            self.session.handle_transmitted();
                        }
                    }
                }
                // A peer that ends (`quit`) often resets the connection under our write; what it
                // said last may still be unread, so only reading decides.
                Wake::Written(Err(_)) => {
                    self.drain_last_words(&mut buffer).await;
                }
                // QEMU acts on `quit` at its closing brace and exits with our line feed unread, of
                // which the kernel makes a reset: the same end, seen now and then.
                Wake::Read(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
                    self.session.handle_eof();
                }
                Wake::Read(Err(error)) => self.session.handle_io_error(&error),
                Wake::Request(Some(request)) => self.submit(request),
                Wake::Request(None) => self.inbox = None,
                Wake::Timeout => {}
            }
            let now = self.now();
            self.session.handle_timeout(now);
        }
    }

    /// Reads what is there already, then ends.
    async fn drain_last_words(&mut self, buffer: &mut [u8]) {
        loop {
            match self.stream.try_read(buffer) {
                Ok(count) if count > 0 => {
                    let now = self.now();
                    self.session.handle_bytes(now, &buffer[..count]);
                    self.deliver();
                }
                _ => break,
            }
            tokio::task::yield_now().await;
        }
        self.session.handle_eof();
    }

    fn submit(&mut self, request: Request) {
        let Request {
            name,
            arguments,
            allowed,
            oob,
            reply,
        } = request;
        let now = self.now();
        match self.session.submit(now, &name, &arguments, allowed, oob) {
            Ok(id) => {
                self.replies.insert(id, reply);
            }
            Err(error) => {
                let _ = reply.send(Err(error));
            }
        }
    }

    fn deliver(&mut self) {
        while let Some(outcome) = self.session.poll_outcome() {
            match outcome {
                Outcome::Ready(greeting) => {
                    tracing::debug!(
                        package = greeting.package,
                        oob = self.session.has_oob(),
                        "QMP is ready"
                    );
                    self.shared.has_oob.send_replace(self.session.has_oob());
                    if let Some(ready) = self.ready.take() {
                        let _ = ready.send(Ok(greeting));
                    }
                }
                Outcome::Reply(id, result) => {
                    if let Some(reply) = self.replies.remove(&id) {
                        // A caller that has gone is as good as one that was told.
                        let _ = reply.send(result);
                    }
                }
                Outcome::Event { event, line_bytes } => {
                    tracing::trace!(name = event.name, "event");
                    let event = Arc::new(event);
                    let mut subscribers = lock(&self.shared.subscribers);
                    subscribers
                        .queues
                        .retain(|queue| queue.push(&event, line_bytes));
                }
                Outcome::Closed(reason) => self.announce_end(reason),
            }
        }
        *lock(&self.shared.stats) = self.session.stats();
    }

    fn announce_end(&mut self, reason: CloseReason) {
        tracing::debug!(%reason, "the QMP connection ended");
        if let Some(ready) = self.ready.take() {
            let _ = ready.send(Err(reason.clone()));
        }
        let queues = {
            let mut subscribers = lock(&self.shared.subscribers);
            // Under the lock, so that `subscribe` sees either the end or its queue in the list.
            self.shared.closed.send_replace(Some(reason.clone()));
            std::mem::take(&mut subscribers.queues)
        };
        for queue in queues {
            queue.end(EventsEnded::Closed(reason.clone()));
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

fn decode<T: serde::de::DeserializeOwned>(name: &str, raw: &RawValue) -> Result<T, ExecuteError> {
    serde_json::from_str(raw.get()).map_err(|source| ExecuteError::Decode {
        command: name.to_owned(),
        excerpt: excerpt(raw.get().as_bytes()),
        source,
    })
}

/// A panic while a lock is held would be a bug of ours; the data are counters and queues, whole at
/// every moment, so going on is right.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect_error(path: &Path, error: io::Error) -> ConnectError {
    let path: PathBuf = path.to_owned();
    match error.kind() {
        io::ErrorKind::NotFound => ConnectError::Missing { path },
        io::ErrorKind::PermissionDenied => ConnectError::PermissionDenied { path },
        // connect(2) says "refused" both for a socket without a listener and for a file that is no
        // socket at all.
        io::ErrorKind::ConnectionRefused => match std::fs::metadata(&path) {
            Ok(metadata) if !metadata.file_type().is_socket() => ConnectError::NotASocket {
                path,
                what: kind_of(metadata.file_type()),
            },
            _ => ConnectError::Stale { path },
        },
        // The listener's backlog is full of clients that wait for the one that holds the monitor
        // (QEMU listens with a backlog of 1).
        io::ErrorKind::WouldBlock => ConnectError::Busy { path, waited: None },
        io::ErrorKind::InvalidInput => ConnectError::PathTooLong { path },
        _ => ConnectError::Io {
            path,
            source: error,
        },
    }
}

fn kind_of(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_file() {
        "a regular file"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else {
        "another kind of file"
    }
}

fn closed_error(path: &Path, reason: CloseReason) -> ConnectError {
    let path = path.to_owned();
    match reason {
        CloseReason::GreetingTimeout { after } => ConnectError::Busy {
            path,
            waited: Some(after),
        },
        CloseReason::NotQmp(detail) => {
            // `monitor/hmp.c` greets with "QEMU <version> monitor - type 'help' for more information".
            let human_monitor = detail.contains("monitor - type");
            ConnectError::NotQmp {
                path,
                detail,
                human_monitor,
            }
        }
        source => ConnectError::Closed { path, source },
    }
}
