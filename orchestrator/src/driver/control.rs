//! The socket in a trail over which its recorder is asked: `vmtrail migrate`, `stop` and `mark` in another process.
//!
//! One JSON object a line, both ways: a [`Question`] in, [`Report`]s out, the last of which is the answer. The socket lies
//! in the trail's directory and is only its owner's to open.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{broadcast, mpsc};
use vmtrail_continuity::migration::Options;

use super::Request;
use crate::status::Report;

/// Name of the socket in a trail.
pub const SOCKET: &str = "control.sock";

/// A line of a question at most.
const MAX_LINE: u64 = 64 << 10;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "question", rename_all = "kebab-case")]
pub enum Question {
    /// Move the VM. Hanging up does not cancel: ask for that.
    Migrate {
        /// Destination's QMP socket, absolute.
        to_qmp: PathBuf,
        /// Source's QMP socket, absolute.
        from_qmp: Option<PathBuf>,
        /// Migration URI.
        uri: String,
        /// Drain budget in nanoseconds.
        drain_budget_ns: u64,
        /// Where ports of the destination are.
        port_paths: BTreeMap<String, PathBuf>,
    },
    /// Give the migration up.
    Cancel,
    /// Write a line into the trace.
    Mark {
        /// The line.
        text: String,
    },
    /// End in order.
    Stop,
}

/// Where a trail's recorder listens. Removed when dropped.
#[derive(Debug)]
pub struct Control {
    path: PathBuf,
    task: tokio::task::JoinHandle<()>,
    /// Held by every conversation: when all are gone, the receiver's channel is closed.
    talking: mpsc::Receiver<()>,
}

/// How long the last answers may take to be taken.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

impl Drop for Control {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Control {
    /// Listens in `trail`, whose lock the caller holds: a socket that lies there is a dead recorder's.
    ///
    /// # Errors
    ///
    /// The socket cannot be made.
    pub fn listen(
        trail: &Path,
        requests: mpsc::Sender<Request>,
        reports: broadcast::Sender<Arc<Report>>,
    ) -> Result<Self> {
        let path = trail.join(SOCKET);
        let _ = std::fs::remove_file(&path);
        let listener = through_directory(trail, |short| UnixListener::bind(short))
            .with_context(|| format!("failed to listen on {}", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))
            .with_context(|| format!("failed to make {} private", path.display()))?;
        let (talks, talking) = mpsc::channel(1);
        let task = tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let (requests, reports) = (requests.clone(), reports.clone());
                        let talk = talks.clone();
                        tokio::spawn(async move {
                            serve(stream, requests, reports).await;
                            drop(talk);
                        });
                    }
                    // Out of descriptors, most likely: some will be closed.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        });
        Ok(Self {
            path,
            task,
            talking,
        })
    }

    /// Hears no more questions and lets the answers under way arrive: the process that asked for the end waits for the word that it
    /// came.
    pub async fn end(mut self) {
        self.task.abort();
        let _ = tokio::time::timeout(LAST_ANSWERS, self.talking.recv()).await;
    }
}

async fn serve(
    mut stream: UnixStream,
    requests: mpsc::Sender<Request>,
    reports: broadcast::Sender<Arc<Report>>,
) {
    let (read, mut write) = stream.split();
    let mut line = String::new();
    let mut reader = BufReader::new(read.take(MAX_LINE));
    if !matches!(reader.read_line(&mut line).await, Ok(count) if count > 0) {
        return;
    }
    let (reply, mut answers) = mpsc::unbounded_channel();
    let question: Question = match serde_json::from_str(&line) {
        Ok(question) => question,
        Err(error) => {
            let reason = format!("failed to read the question: {error}");
            let _ = write_line(&mut write, &Report::Refused { reason }).await;
            return;
        }
    };
    let mut told = reports.subscribe();
    let request = match question {
        Question::Migrate {
            to_qmp,
            from_qmp,
            uri,
            drain_budget_ns,
            port_paths,
        } => Request::Migrate {
            to_qmp,
            from_qmp,
            options: Options {
                uri,
                drain_budget: Duration::from_nanos(drain_budget_ns),
            },
            port_paths,
            reply,
        },
        Question::Cancel => Request::Cancel { reply },
        Question::Mark { text } => Request::Mark { text, reply },
        Question::Stop => Request::Stop {
            reason: "asked over the control socket".into(),
            reply: Some(reply),
        },
    };
    if requests.send(request).await.is_err() {
        return;
    }
    loop {
        tokio::select! {
            biased;
            answer = answers.recv() => {
                let refused = || Report::Refused { reason: "the recorder ended".into() };
                let _ = write_line(&mut write, &answer.unwrap_or_else(refused)).await;
                return;
            }
            report = told.recv() => match report {
                Ok(report) if matches!(*report, Report::Phase { .. } | Report::Progress { .. } | Report::Warning { .. }) => {
                    if write_line(&mut write, &report).await.is_err() {
                        return;
                    }
                }
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return,
            },
        }
    }
}

async fn write_line(write: &mut (impl AsyncWriteExt + Unpin), report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    // A client that does not read must not keep the recorder's reports.
    tokio::time::timeout(Duration::from_secs(5), write.write_all(&line))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Whether a recorder listens in this trail.
#[must_use]
pub fn is_recorded(trail: &Path) -> bool {
    through_directory(trail, |short| {
        std::os::unix::net::UnixStream::connect(short)
    })
    .is_ok()
}

/// Asks the recorder of a trail, hands every report to `told`, and returns the answer.
///
/// # Errors
///
/// No recorder listens, or it ended before it answered.
pub async fn ask(
    trail: &Path,
    question: &Question,
    mut told: impl FnMut(&Report),
) -> Result<Report> {
    let stream = through_directory(trail, |short| {
        std::os::unix::net::UnixStream::connect(short)
    })
    .with_context(|| {
        format!(
            "failed to reach a recorder of {} (is `vmtrail record` running on it?)",
            trail.display()
        )
    })?;
    stream.set_nonblocking(true)?;
    let mut stream = UnixStream::from_std(stream)?;
    let (read, mut write) = stream.split();
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    write
        .write_all(&line)
        .await
        .context("failed to ask the recorder")?;
    let mut lines = BufReader::new(read).lines();
    while let Some(line) = lines
        .next_line()
        .await
        .context("failed to hear the recorder")?
    {
        let report: Report = serde_json::from_str(&line)
            .with_context(|| format!("failed to understand the recorder: {line}"))?;
        match report {
            Report::Migrated(_)
            | Report::Refused { .. }
            | Report::Done
            | Report::Stopped { .. } => {
                return Ok(report);
            }
            other => told(&other),
        }
    }
    bail!(
        "the recorder of {} ended before it answered",
        trail.display()
    )
}

/// Names the socket by way of a descriptor of its directory: a unix socket's path has 107 bytes, a trail's may have more.
fn through_directory<T>(
    trail: &Path,
    use_path: impl FnOnce(PathBuf) -> io::Result<T>,
) -> io::Result<T> {
    let directory = std::fs::File::open(trail)?;
    use_path(PathBuf::from(format!(
        "/proc/self/fd/{}/{SOCKET}",
        directory.as_raw_fd()
    )))
}
