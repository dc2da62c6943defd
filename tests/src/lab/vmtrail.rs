//! The `vmtrail` binary as a user has it: command lines, exit codes and JSON lines, nothing of its library.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::guest::Guest;
use super::process::last_lines;
use super::qmp::migration_uri;
use crate::check::marks::Loss;

/// Attaching waits for the agent, which may still be booting.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(60);
/// A command that is still there after this hangs.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(20);
/// Reports of a recorder that are kept: the newest.
const REPORTS_KEPT: usize = 10_000;

/// Where the binary is.
#[derive(Debug, Clone)]
pub struct Vmtrail {
    binary: PathBuf,
}

/// How a command ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How long it took.
    pub took: Duration,
}

impl Ended {
    /// The exit code; `None` if a signal ended it.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The JSON objects on standard output, a line each.
    #[must_use]
    pub fn reports(&self) -> Vec<Value> {
        self.stdout
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }
}

impl Vmtrail {
    /// The binary at `path`.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self {
            binary: path.to_owned(),
        }
    }

    /// The binary's path.
    #[must_use]
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// Runs a command to its end, and kills it after three minutes.
    ///
    /// # Errors
    ///
    /// If it cannot be started or hangs. A bad exit status is a result.
    pub fn run<S: Into<OsString>>(&self, arguments: impl IntoIterator<Item = S>) -> Result<Ended> {
        self.start(arguments)?.finish()
    }

    /// Starts a command.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn start<S: Into<OsString>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<Started> {
        let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
        let begun = Instant::now();
        let mut child = self.spawn(&arguments, Stdio::piped(), Stdio::piped())?;
        let stdout = read_in_background(child.stdout.take());
        let stderr = read_in_background(child.stderr.take());
        Ok(Started {
            line: shown(&arguments),
            child,
            stdout,
            stderr,
            begun,
        })
    }

    /// Starts a recording of `guest` and returns when pages are being recorded.
    ///
    /// # Errors
    ///
    /// If it ends or takes too long.
    pub fn record(
        &self,
        guest: &Guest,
        trail: &Path,
        log: &Path,
        events: &[String],
        more: &[&str],
    ) -> Result<Recorder> {
        let mut arguments: Vec<OsString> = vec![
            "record".into(),
            "--json".into(),
            "--qmp".into(),
            guest.qmp().into(),
            "-o".into(),
            trail.into(),
        ];
        for event in events {
            arguments.extend(["-e".into(), event.into()]);
        }
        arguments.extend(more.iter().map(OsString::from));
        let stderr =
            File::create(log).with_context(|| format!("failed to create {}", log.display()))?;
        let mut child = self.spawn(&arguments, Stdio::piped(), stderr.into())?;
        let reports = Arc::new(Mutex::new(VecDeque::new()));
        let reader = child.stdout.take().map(|stdout| {
            let reports = Arc::clone(&reports);
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines() {
                    let Ok(line) = line else { return };
                    let Ok(report) = serde_json::from_str(&line) else {
                        continue;
                    };
                    let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
                    if reports.len() == REPORTS_KEPT {
                        reports.pop_front();
                    }
                    reports.push_back(report);
                }
            })
        });
        let mut recorder = Recorder {
            vmtrail: self.clone(),
            trail: trail.to_owned(),
            log: log.to_owned(),
            child,
            reports,
            reader,
        };
        recorder.wait_for(ATTACH_TIMEOUT, "to record pages", |report| {
            report["report"] == "rate" && report["pages"].as_u64() > Some(0)
        })?;
        // Pages may be stored while the agent is still being configured; only then does the recorder hear others. A socket that is
        // there may be a dead recorder's.
        recorder.wait_until(ATTACH_TIMEOUT, "to listen for other commands", |_| {
            listens(trail)
        })?;
        Ok(recorder)
    }

    /// What `vmtrail verify --json` says.
    ///
    /// # Errors
    ///
    /// If it cannot be run, hangs, or writes no JSON.
    pub fn verify(&self, trail: &Path) -> Result<Verified> {
        let ended = self.run(["verify".into(), OsString::from("--json"), trail.into()])?;
        let report: Value = serde_json::from_str(&ended.stdout).with_context(|| {
            format!(
                "failed to read what vmtrail verify says ({})\n{}",
                ended.status,
                last_lines(&ended.stderr)
            )
        })?;
        Ok(Verified {
            code: ended.code(),
            report,
        })
    }

    fn spawn(&self, arguments: &[OsString], stdout: Stdio, stderr: Stdio) -> Result<Child> {
        // Ends with the lab, as guests do.
        Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(&self.binary)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .with_context(|| format!("failed to start `vmtrail {}`", shown(arguments)))
    }
}

/// A command under way. Killed if it is dropped.
#[derive(Debug)]
pub struct Started {
    line: String,
    child: Child,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
    begun: Instant,
}

impl Started {
    /// Sends it a signal.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        send(&self.child, signal)
    }

    /// Waits for its end, and kills it after three minutes.
    ///
    /// # Errors
    ///
    /// If it hangs. A bad exit status is a result.
    pub fn finish(mut self) -> Result<Ended> {
        let status = wait(&mut self.child, COMMAND_TIMEOUT)?;
        let took = self.begun.elapsed();
        let (stdout, stderr) = (text_of(self.stdout.take()), text_of(self.stderr.take()));
        match status {
            Some(status) => Ok(Ended {
                status,
                stdout,
                stderr,
                took,
            }),
            None => bail!(
                "failed to see `vmtrail {}` end within {} s\n{}",
                self.line,
                COMMAND_TIMEOUT.as_secs(),
                last_lines(&stderr)
            ),
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The verdict of `vmtrail verify`.
#[derive(Debug, Clone)]
pub struct Verified {
    /// Exit code.
    pub code: Option<i32>,
    /// The JSON.
    pub report: Value,
}

impl Verified {
    /// `continuous`, `overrun`, `lossy` or `unknown`.
    #[must_use]
    pub fn verdict(&self) -> &str {
        self.report["verdict"].as_str().unwrap_or("none")
    }

    /// Whether it says continuous, by word and by exit code.
    #[must_use]
    pub fn is_continuous(&self) -> bool {
        self.code == Some(0) && self.verdict() == "continuous"
    }
}

impl Verified {
    /// The losses that it declares.
    #[must_use]
    pub fn losses(&self) -> Vec<Loss> {
        let losses = self.report["losses"]
            .as_array()
            .map(Vec::as_slice)
            .unwrap_or_default();
        losses
            .iter()
            .filter_map(|loss| {
                Some(Loss {
                    cpu: loss["cpu"].as_u64()?.try_into().ok()?,
                    events: loss["events"].as_u64(),
                    after: loss["after"].as_u64(),
                    before: loss["before"].as_u64(),
                })
            })
            .collect()
    }
}

/// A running `vmtrail record`.
#[derive(Debug)]
pub struct Recorder {
    vmtrail: Vmtrail,
    trail: PathBuf,
    log: PathBuf,
    child: Child,
    reports: Arc<Mutex<VecDeque<Value>>>,
    reader: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Its trail.
    #[must_use]
    pub fn trail(&self) -> &Path {
        &self.trail
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs, or how it ended; for error messages.
    pub fn state(&mut self) -> String {
        match self.child.try_wait() {
            Ok(None) => "runs".to_owned(),
            Ok(Some(status)) => format!("ended with {status}\n{}", self.log()),
            Err(error) => format!("cannot be asked: {error}"),
        }
    }

    /// Everything it reported so far.
    #[must_use]
    pub fn reports(&self) -> Vec<Value> {
        self.reports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .cloned()
            .collect()
    }

    /// Waits until one of its reports satisfies `wanted`.
    ///
    /// # Errors
    ///
    /// If it ends, or `timeout` passes.
    pub fn wait_for(
        &mut self,
        timeout: Duration,
        what: &str,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<()> {
        self.wait_until(timeout, what, |recorder| {
            recorder.reports().iter().any(&wanted)
        })
    }

    fn wait_until(
        &mut self,
        timeout: Duration,
        what: &str,
        reached: impl Fn(&Self) -> bool,
    ) -> Result<()> {
        let begun = Instant::now();
        while !reached(self) {
            if let Some(status) = self
                .child
                .try_wait()
                .context("failed to ask for the recorder")?
            {
                bail!(
                    "failed to get vmtrail {what}: it ended with {status}\n{}",
                    self.log()
                );
            }
            if begun.elapsed() > timeout {
                bail!(
                    "failed to get vmtrail {what} within {} s\n{}",
                    timeout.as_secs(),
                    self.log()
                );
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Moves the VM, through a second process that asks this one.
    ///
    /// # Errors
    ///
    /// If the command cannot be run or hangs. A migration that does not commit is a result.
    pub fn migrate(&self, from: &Guest, to: &Guest, more: &[&str]) -> Result<Ended> {
        self.start_migrating(from, to, more)?.finish()
    }

    /// Begins to move the VM, through a second process that asks this one.
    ///
    /// # Errors
    ///
    /// If the command cannot be started.
    pub fn start_migrating(&self, from: &Guest, to: &Guest, more: &[&str]) -> Result<Started> {
        let mut arguments: Vec<OsString> = vec![
            "migrate".into(),
            "--json".into(),
            "--from-qmp".into(),
            from.qmp().into(),
            "--to-qmp".into(),
            to.qmp().into(),
            "--uri".into(),
            migration_uri(to).into(),
            "-o".into(),
            (&self.trail).into(),
        ];
        arguments.extend(more.iter().map(OsString::from));
        self.vmtrail.start(arguments)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        send(&self.child, signal)
    }

    /// Ends it through `vmtrail stop`, and returns its exit status.
    ///
    /// # Errors
    ///
    /// If the command fails or one of the two hangs.
    pub fn stop(mut self) -> Result<ExitStatus> {
        let ended = self
            .vmtrail
            .run(["stop".into(), OsString::from(&self.trail)])?;
        if !ended.status.success() {
            bail!(
                "failed to stop the recording: {}\n{}{}",
                ended.status,
                last_lines(&ended.stderr),
                self.log()
            );
        }
        self.wait()
    }

    /// Waits for it to end by itself, and returns its exit status.
    ///
    /// # Errors
    ///
    /// If it does not.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        match wait(&mut self.child, COMMAND_TIMEOUT)? {
            Some(status) => Ok(status),
            None => bail!(
                "failed to see the recorder end within {} s\n{}",
                COMMAND_TIMEOUT.as_secs(),
                self.log()
            ),
        }
    }

    fn log(&self) -> String {
        last_lines(&fs::read_to_string(&self.log).unwrap_or_default())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Whether somebody listens on the trail's control socket, named by way of its directory: a socket's path has 107 bytes at
/// most, a trail's may have more.
fn listens(trail: &Path) -> bool {
    File::open(trail).is_ok_and(|dir| {
        let path = format!("/proc/self/fd/{}/control.sock", dir.as_raw_fd());
        UnixStream::connect(path).is_ok()
    })
}

fn send(child: &Child, signal: Signal) -> Result<()> {
    let pid = i32::try_from(child.id()).context("failed to name a process")?;
    kill(Pid::from_raw(pid), signal).with_context(|| format!("failed to send {signal}"))
}

fn wait(child: &mut Child, timeout: Duration) -> Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("failed to wait for vmtrail")? {
            return Ok(Some(status));
        }
        if begun.elapsed() > timeout {
            let _ = child.kill();
            let _ = child.wait();
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

fn read_in_background<R: std::io::Read + Send + 'static>(
    stream: Option<R>,
) -> Option<JoinHandle<String>> {
    stream.map(|mut stream| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // What was read until an error is what there is to show.
            let _ = stream.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        })
    })
}

fn text_of(reader: Option<JoinHandle<String>>) -> String {
    reader
        .and_then(|reader| reader.join().ok())
        .unwrap_or_default()
}

fn shown(arguments: &[OsString]) -> String {
    arguments
        .iter()
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
