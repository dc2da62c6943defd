//! A scripted QMP server, for tests of this crate and of those that use it.
//!
//! It behaves as QEMU does where that matters: one client at a time (others are connected and
//! parked), no command before `qmp_capabilities`, `CommandNotFound` for what it was not told of. And
//! it misbehaves on request: no greeting, garbage, late answers, unknown events, a main loop that
//! stands still, a peer that stops reading.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use serde_json::json;
//! use vmtrail_qmp::testing::{FakeQmp, Step};
//! use vmtrail_qmp::{Client, ConnectOptions};
//!
//! let dir = std::env::temp_dir().join("fake-qmp");
//! let fake = FakeQmp::builder()
//!     .on("query-name", [Step::returns(json!({"name": "one"}))])
//!     .on("migrate", [
//!         Step::empty(),
//!         Step::event("MIGRATION", json!({"status": "setup"})),
//!     ])
//!     .start(&dir)?;
//! let client = Client::connect(fake.path(), ConnectOptions::default()).await?;
//! fake.emit("VSERPORT_CHANGE", json!({"id": "p0", "open": true}));
//! # Ok(()) }
//! ```

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// What the server does when a client has connected.
#[derive(Debug, Clone)]
pub enum Opening {
    /// Greets as QEMU 7.2 does, with or without `oob` on offer.
    Greet {
        /// Whether `oob` is on offer.
        oob: bool,
    },
    /// Says nothing and keeps the connection: a monitor that somebody else holds.
    Silence,
    /// Sends these bytes instead of a greeting, and goes on.
    Say(Vec<u8>),
    /// Sends these bytes and closes.
    SayAndClose(Vec<u8>),
}

/// One thing the server does about a command, in order.
#[derive(Debug, Clone)]
pub enum Step {
    /// Answers with a value.
    Return(Value),
    /// Answers with a value and no id, which QEMU never does to a command that had one.
    ReturnWithoutId(Value),
    /// Answers after a while, and serves others meanwhile.
    ReturnLater(Duration, Value),
    /// Answers with an error.
    Error {
        /// Its class, such as `GenericError`.
        class: String,
        /// Its description.
        desc: String,
    },
    /// Answers with an error and no id.
    ErrorWithoutId(String),
    /// Sends an event.
    Event(String, Value),
    /// Sends bytes as they are.
    Bytes(Vec<u8>),
    /// Stands still: serves nothing for a while.
    Stall(Duration),
    /// Reads nothing more, for ever; the connection stays.
    StopReading,
    /// Closes the connection.
    Close,
}

impl Step {
    /// Answers with a value.
    #[must_use]
    pub fn returns(value: Value) -> Self {
        Self::Return(value)
    }

    /// Answers with `{}`, as commands do that have nothing to say.
    #[must_use]
    pub fn empty() -> Self {
        Self::Return(json!({}))
    }

    /// Answers with a `GenericError`.
    #[must_use]
    pub fn error(desc: impl Into<String>) -> Self {
        Self::Error {
            class: "GenericError".to_owned(),
            desc: desc.into(),
        }
    }

    /// Sends an event.
    #[must_use]
    pub fn event(name: impl Into<String>, data: Value) -> Self {
        Self::Event(name.into(), data)
    }
}

/// A command as the server received it.
#[derive(Debug, Clone, PartialEq)]
pub struct Received {
    /// Its name.
    pub name: String,
    /// Its arguments; [`Value::Null`] for none.
    pub arguments: Value,
    /// Its id; [`Value::Null`] for none.
    pub id: Value,
    /// Whether it came as `exec-oob`.
    pub oob: bool,
}

type Handler = Box<dyn FnMut(&Received) -> Vec<Step> + Send>;

/// A server in the making; see [`FakeQmp::builder`].
pub struct FakeQmpBuilder {
    opening: Opening,
    handlers: BTreeMap<String, Handler>,
}

impl std::fmt::Debug for FakeQmpBuilder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let commands: Vec<_> = self.handlers.keys().collect();
        formatter
            .debug_struct("FakeQmpBuilder")
            .field("opening", &self.opening)
            .field("commands", &commands)
            .finish()
    }
}

impl FakeQmpBuilder {
    /// What to do when a client has connected. Greeting with `oob` on offer is what happens else.
    #[must_use]
    pub fn opening(mut self, opening: Opening) -> Self {
        self.opening = opening;
        self
    }

    /// What to do about a command, each time it comes.
    #[must_use]
    pub fn on(self, name: &str, steps: impl IntoIterator<Item = Step>) -> Self {
        let steps: Vec<Step> = steps.into_iter().collect();
        self.on_with(name, move |_| steps.clone())
    }

    /// What to do about a command, decided when it comes.
    #[must_use]
    pub fn on_with(
        mut self,
        name: &str,
        handler: impl FnMut(&Received) -> Vec<Step> + Send + 'static,
    ) -> Self {
        self.handlers.insert(name.to_owned(), Box::new(handler));
        self
    }

    /// Listens at `path`, until the [`FakeQmp`] is dropped. Wants a tokio runtime.
    pub fn start(self, path: impl AsRef<Path>) -> io::Result<FakeQmp> {
        let path = path.as_ref().to_owned();
        let listener = UnixListener::bind(&path)?;
        let received = Arc::new(Mutex::new(Vec::new()));
        let (said, inbox) = mpsc::unbounded_channel();
        let server = Server {
            opening: self.opening,
            handlers: self.handlers,
            received: Arc::clone(&received),
            said: said.clone(),
            inbox,
        };
        let task = tokio::spawn(server.run(listener));
        Ok(FakeQmp {
            path,
            received,
            said,
            task,
        })
    }
}

/// A running server. It ends, with its connection, when this is dropped.
#[derive(Debug)]
pub struct FakeQmp {
    path: PathBuf,
    received: Arc<Mutex<Vec<Received>>>,
    said: mpsc::UnboundedSender<Say>,
    task: JoinHandle<()>,
}

impl FakeQmp {
    /// A server that greets, negotiates, and says that a VM runs and has never migrated
    /// (`query-status`, `query-migrate`); both can be overridden.
    #[must_use]
    pub fn builder() -> FakeQmpBuilder {
        FakeQmpBuilder {
            opening: Opening::Greet { oob: true },
            handlers: BTreeMap::new(),
        }
        .on("qmp_capabilities", [Step::empty()])
        .on(
            "query-status",
            [Step::returns(json!({"status": "running", "running": true}))],
        )
        .on("query-migrate", [Step::empty()])
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All commands so far, in the order in which they were served.
    #[must_use]
    pub fn received(&self) -> Vec<Received> {
        lock(&self.received).clone()
    }

    /// Sends an event to the client (or to the next one, if there is none).
    pub fn emit(&self, name: &str, data: Value) {
        self.emit_bytes(event_line(name, &data));
    }

    /// Sends bytes as they are.
    pub fn emit_bytes(&self, bytes: impl Into<Vec<u8>>) {
        // Fails only when the server has ended, which the test will notice by its client.
        let _ = self.said.send(Say::Bytes(bytes.into()));
    }

    /// Closes the connection as a QEMU does that exits; the next client is served.
    pub fn hang_up(&self) {
        let _ = self.said.send(Say::HangUp);
    }
}

impl Drop for FakeQmp {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What is said without a command having asked for it.
#[derive(Debug)]
enum Say {
    Bytes(Vec<u8>),
    HangUp,
}

struct Server {
    opening: Opening,
    handlers: BTreeMap<String, Handler>,
    received: Arc<Mutex<Vec<Received>>>,
    /// For answers that come later.
    said: mpsc::UnboundedSender<Say>,
    inbox: mpsc::UnboundedReceiver<Say>,
}

impl Server {
    async fn run(mut self, listener: UnixListener) {
        while let Ok((stream, _)) = listener.accept().await {
            // A client that goes away in the middle ends its own connection, not the server.
            let _ = self.serve(stream).await;
        }
    }

    async fn serve(&mut self, mut stream: UnixStream) -> io::Result<()> {
        match self.opening.clone() {
            Opening::Greet { oob } => stream.write_all(&greeting_line(oob)).await?,
            Opening::Silence => {}
            Opening::Say(bytes) => stream.write_all(&bytes).await?,
            Opening::SayAndClose(bytes) => return stream.write_all(&bytes).await,
        }
        let (reader, mut writer) = stream.split();
        let mut lines = BufReader::new(reader).lines();
        let mut negotiated = false;
        loop {
            let line = tokio::select! {
                line = lines.next_line() => match line? {
                    Some(line) => line,
                    None => return Ok(()),
                },
                said = self.inbox.recv() => match said {
                    Some(Say::Bytes(bytes)) => {
                        writer.write_all(&bytes).await?;
                        continue;
                    }
                    Some(Say::HangUp) | None => return Ok(()),
                },
            };
            if matches!(self.opening, Opening::Silence) {
                continue;
            }
            let Some(command) = Received::parse(&line) else {
                let desc = "JSON parse error, or no command";
                writer
                    .write_all(&error_line("GenericError", desc, &Value::Null))
                    .await?;
                continue;
            };
            let steps = self.steps_for(&command, &mut negotiated);
            lock(&self.received).push(command.clone());
            for step in steps {
                match step {
                    Step::Return(value) => {
                        writer.write_all(&return_line(&value, &command.id)).await?;
                    }
                    Step::ReturnWithoutId(value) => {
                        writer.write_all(&return_line(&value, &Value::Null)).await?;
                    }
                    Step::ReturnLater(after, value) => {
                        let line = return_line(&value, &command.id);
                        let said = self.said.clone();
                        tokio::spawn(async move {
                            tokio::time::sleep(after).await;
                            let _ = said.send(Say::Bytes(line));
                        });
                    }
                    Step::Error { class, desc } => {
                        writer
                            .write_all(&error_line(&class, &desc, &command.id))
                            .await?;
                    }
                    Step::ErrorWithoutId(desc) => {
                        writer
                            .write_all(&error_line("GenericError", &desc, &Value::Null))
                            .await?;
                    }
                    Step::Event(name, data) => {
                        writer.write_all(&event_line(&name, &data)).await?;
                    }
                    Step::Bytes(bytes) => writer.write_all(&bytes).await?,
                    Step::Stall(time) => tokio::time::sleep(time).await,
                    Step::StopReading => std::future::pending().await,
                    Step::Close => return Ok(()),
                }
            }
        }
    }

    fn steps_for(&mut self, command: &Received, negotiated: &mut bool) -> Vec<Step> {
        if !*negotiated && command.name != "qmp_capabilities" {
            return vec![Step::Error {
                class: "CommandNotFound".to_owned(),
                desc: "Expecting capabilities negotiation with 'qmp_capabilities'".to_owned(),
            }];
        }
        match self.handlers.get_mut(&command.name) {
            Some(handler) => {
                let steps = handler(command);
                *negotiated |= steps
                    .iter()
                    .any(|step| matches!(step, Step::Return(_) | Step::ReturnWithoutId(_)));
                steps
            }
            None => vec![Step::Error {
                class: "CommandNotFound".to_owned(),
                desc: format!("The command {} has not been found", command.name),
            }],
        }
    }
}

impl Received {
    fn parse(line: &str) -> Option<Self> {
        let value: Value = serde_json::from_str(line).ok()?;
        let (name, oob) = match (value.get("execute"), value.get("exec-oob")) {
            (Some(name), _) => (name.as_str()?, false),
            (None, Some(name)) => (name.as_str()?, true),
            (None, None) => return None,
        };
        let field = |key: &str| value.get(key).cloned().unwrap_or_default();
        Some(Self {
            name: name.to_owned(),
            arguments: field("arguments"),
            id: field("id"),
            oob,
        })
    }
}

fn greeting_line(oob: bool) -> Vec<u8> {
    let capabilities: &[&str] = if oob { &["oob"] } else { &[] };
    line(&json!({"QMP": {
        "version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "a scripted server"},
        "capabilities": capabilities,
    }}))
}

fn return_line(value: &Value, id: &Value) -> Vec<u8> {
    answer_line("return", value, id)
}

fn error_line(class: &str, desc: &str, id: &Value) -> Vec<u8> {
    answer_line("error", &json!({"class": class, "desc": desc}), id)
}

fn answer_line(key: &str, value: &Value, id: &Value) -> Vec<u8> {
    let mut answer = serde_json::Map::new();
    answer.insert(key.to_owned(), value.clone());
    if !id.is_null() {
        answer.insert("id".to_owned(), id.clone());
    }
    line(&Value::Object(answer))
}

fn event_line(name: &str, data: &Value) -> Vec<u8> {
    let mut event = serde_json::Map::new();
    event.insert(
        "timestamp".to_owned(),
        json!({"seconds": 1_700_000_000, "microseconds": 1}),
    );
    event.insert("event".to_owned(), name.into());
    if !data.is_null() {
        event.insert("data".to_owned(), data.clone());
    }
    line(&Value::Object(event))
}

fn line(value: &Value) -> Vec<u8> {
    format!("{value}\r\n").into_bytes()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
