//! The agent as a process, and a host that is only as clever as a test needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use vmtrail_wire::agent_to_host::{AgentHello, CpuCounters, Quiesced};
use vmtrail_wire::decode::Expectation;
use vmtrail_wire::host_to_agent::{Envelope, HostHello};
use vmtrail_wire::{
    AgentMessage, Decoded, Decoder, Epoch, FrameHeader, HostMessage, Kind, Sequence, SessionId,
    StreamId, crc32c, flags, version,
};

pub(crate) const TRACEFS: &str = "/sys/kernel/tracing";

/// Longer than anything takes on a loaded machine: a test that waits so long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Whether these tests can run here. They must not be skipped by accident, so "no" has to be said.
pub(crate) fn can_trace() -> bool {
    if std::env::var_os("VMTRAIL_SKIP_TRACEFS").is_some_and(|value| value == "1") {
        eprintln!("skipped: VMTRAIL_SKIP_TRACEFS=1");
        return false;
    }
    let _ = Command::new("mount")
        .args(["-t", "tracefs", "tracefs", TRACEFS])
        .stderr(Stdio::null())
        .status();
    let probe = Path::new(TRACEFS).join("instances");
    assert!(
        nix::unistd::geteuid().is_root() && probe.is_dir(),
        "this test needs root and tracefs at {TRACEFS}; set VMTRAIL_SKIP_TRACEFS=1 to go without it"
    );
    true
}

pub(crate) struct Agent {
    child: Child,
    pub(crate) instance: String,
    pub(crate) dir: tempfile::TempDir,
}

impl Agent {
    /// Starts an agent with an instance of its own on `ports` FIFO pairs `p0`, `p1`, …
    pub(crate) fn start(ports: usize, args: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let instance = format!(
            "vmtrail-test-{}-{}",
            std::process::id(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        );
        let dir = tempfile::tempdir().unwrap();
        for port in 0..ports {
            for suffix in ["in", "out"] {
                let path = dir.path().join(format!("p{port}.{suffix}"));
                nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
            }
        }
        Self::start_in(dir, instance, ports, args)
    }

    pub(crate) fn start_in(
        dir: tempfile::TempDir,
        instance: String,
        ports: usize,
        args: &[&str],
    ) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vmtrail-agent"));
        command.args(["--instance", &instance]).args(args);
        for port in 0..ports {
            command
                .arg("--port")
                .arg(dir.path().join(format!("p{port}")));
        }
        let child = command.spawn().unwrap();
        let agent = Self {
            child,
            instance,
            dir,
        };
        let on = agent.instance_dir().join("tracing_on");
        // A new instance records from the start, and so does one that a dead agent left: ours does when it has opened
        // its rings.
        wait_until("the agent records", || {
            agent.has_open("trace_pipe_raw")
                && fs::read_to_string(&on).is_ok_and(|text| text.trim() == "1")
        });
        agent
    }

    fn has_open(&self, name: &str) -> bool {
        fs::read_dir(format!("/proc/{}/fd", self.child.id()))
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .any(|target| target.ends_with(name))
    }

    pub(crate) fn instance_dir(&self) -> PathBuf {
        Path::new(TRACEFS).join("instances").join(&self.instance)
    }

    pub(crate) fn port(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("p{number}"))
    }

    /// Writes a numbered line into the trace, as a program in the guest would.
    pub(crate) fn marks(&self, numbers: std::ops::Range<u32>) {
        let mut marker = OpenOptions::new()
            .write(true)
            .open(self.instance_dir().join("trace_marker"))
            .unwrap();
        for number in numbers {
            marker.write_all(mark_text(number).as_bytes()).unwrap();
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(
            Pid::from_raw(i32::try_from(self.child.id()).unwrap()),
            signal,
        )
        .unwrap();
    }

    /// Waits for its end; the exit status.
    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begin.elapsed() < PATIENCE, "the agent does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// User and system time so far.
    pub(crate) fn cpu_time(&self) -> Duration {
        let text = fs::read_to_string(format!("/proc/{}/schedstat", self.child.id())).unwrap();
        Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
    }

    pub(crate) fn resident_kib(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A killed agent leaves its instance; so does a test that failed.
        let _ = fs::remove_dir(self.instance_dir());
    }
}

pub(crate) fn mark_text(number: u32) -> String {
    // Long enough that a page holds some forty, and ends in a word that cannot be part of another.
    format!("vmtmark:{number:08}:{:.<64}\n", "")
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

enum Line {
    Fifo { from_agent: File, to_agent: File },
    Socket(UnixStream),
}

/// What one pages frame was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PagesSeen {
    pub(crate) first_page: u64,
    pub(crate) page_count: u32,
    pub(crate) partial: bool,
    pub(crate) sent_ns: u64,
    pub(crate) crc: u32,
    /// Numbers of the marks in it.
    pub(crate) marks: Vec<u32>,
}

/// All that a reader saw over its attachments, and whether it was consistent.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) session: Option<SessionId>,
    pub(crate) streams: BTreeMap<u32, BTreeMap<u64, PagesSeen>>,
    pub(crate) duplicates: u64,
    pub(crate) replayed: u64,
    pub(crate) metadata: BTreeMap<String, Vec<u8>>,
    pub(crate) metadata_complete: BTreeSet<String>,
    pub(crate) metadata_items: u32,
    pub(crate) hellos: Vec<AgentHello>,
    pub(crate) quiesced: Vec<Quiesced>,
    pub(crate) errors: Vec<vmtrail_wire::agent_to_host::AgentError>,
    pub(crate) pongs: Vec<vmtrail_wire::agent_to_host::Pong>,
    pub(crate) heartbeats: u64,
    pub(crate) lost: Vec<CpuCounters>,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
}

impl Store {
    /// What a host holds without a gap: the next sequence of each stream.
    pub(crate) fn next(&self) -> Vec<(StreamId, Sequence)> {
        self.streams
            .iter()
            .map(|(&cpu, frames)| {
                let next = (0..)
                    .find(|sequence| !frames.contains_key(sequence))
                    .unwrap();
                (StreamId(cpu), Sequence(next))
            })
            .collect()
    }

    /// Every stream is complete from its first frame, and pages follow each other.
    pub(crate) fn assert_contiguous(&self) {
        for (cpu, frames) in &self.streams {
            let mut page = 0;
            for (expected, (&sequence, frame)) in (0..).zip(frames) {
                assert_eq!(sequence, expected, "cpu{cpu}: frame missing");
                assert_eq!(
                    frame.first_page, page,
                    "cpu{cpu} frame {sequence}: pages missing"
                );
                page += u64::from(frame.page_count);
            }
        }
    }

    pub(crate) fn has_all_metadata(&self) -> bool {
        self.metadata_items > 0 && self.metadata_complete.len() == self.metadata_items as usize
    }

    /// How often each mark is there.
    pub(crate) fn marks(&self) -> BTreeMap<u32, u32> {
        let mut marks = BTreeMap::new();
        for frame in self.streams.values().flat_map(BTreeMap::values) {
            for &mark in &frame.marks {
                *marks.entry(mark).or_default() += 1;
            }
        }
        marks
    }

    /// Every mark of the range is there once.
    pub(crate) fn assert_marks(&self, range: std::ops::Range<u32>) {
        let marks = self.marks();
        for number in range.clone() {
            assert_eq!(marks.get(&number), Some(&1), "mark {number} of {range:?}");
        }
    }

    fn take(&mut self, header: &FrameHeader, bytes: &[u8]) {
        self.frames += 1;
        self.bytes += bytes.len() as u64;
        assert_eq!(*self.session.get_or_insert(header.session), header.session);
        let (body, payload) = Decoded::parts(header, bytes);
        if header.kind == Kind::Pages {
            self.take_pages(header, payload);
            return;
        }
        match AgentMessage::decode(header, body, payload)
            .unwrap()
            .unwrap()
        {
            AgentMessage::Hello(hello) => self.hellos.push(hello),
            AgentMessage::Quiesced(quiesced) => self.quiesced.push(quiesced),
            AgentMessage::Error(error) => self.errors.push(error),
            AgentMessage::Pong(pong) => self.pongs.push(pong),
            AgentMessage::Heartbeat(_) => self.heartbeats += 1,
            AgentMessage::Lost(counters) => self.lost = counters,
            AgentMessage::Metadata(chunk) => {
                self.metadata_items = chunk.items;
                let item = self.metadata.entry(chunk.name.clone()).or_default();
                if chunk.offset == 0 {
                    item.clear();
                }
                if item.len() as u64 != chunk.offset {
                    // The piece before it died with the last reader. The item comes again from its start.
                    self.metadata.remove(&chunk.name);
                    return;
                }
                item.extend_from_slice(payload);
                if chunk.last {
                    self.metadata_complete.insert(chunk.name);
                }
            }
        }
    }

    fn take_pages(&mut self, header: &FrameHeader, payload: &[u8]) {
        let seen = PagesSeen {
            first_page: header.first_page,
            page_count: header.page_count,
            partial: header.flags & flags::PARTIAL != 0,
            sent_ns: header.sent_ns,
            crc: crc32c(payload),
            marks: find_marks(payload),
        };
        if header.flags & flags::REPLAY != 0 {
            self.replayed += 1;
        }
        let stream = self
            .streams
            .entry(header.stream.cpu().unwrap())
            .or_default();
        match stream.get(&header.sequence.0) {
            Some(before) => {
                assert_eq!(*before, seen, "a frame that came twice differs");
                self.duplicates += 1;
            }
            None => {
                stream.insert(header.sequence.0, seen);
            }
        }
    }
}

fn find_marks(payload: &[u8]) -> Vec<u32> {
    let needle = b"vmtmark:";
    let mut marks = Vec::new();
    let mut at = 0;
    while let Some(found) = payload[at..]
        .windows(needle.len())
        .position(|window| window == needle)
    {
        at += found + needle.len();
        let digits = payload
            .get(at..at + 8)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        marks.extend(digits.and_then(|digits| digits.parse::<u32>().ok()));
    }
    marks
}

/// A reader of one port.
pub(crate) struct Host {
    line: Line,
    decoder: Decoder,
    pub(crate) epoch: u64,
    pub(crate) desynchronised: u64,
}

impl Host {
    pub(crate) fn on_fifo(port: &Path) -> Self {
        let open = |suffix: &str| {
            let mut path = port.as_os_str().to_owned();
            path.push(suffix);
            OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(OFlag::O_NONBLOCK.bits())
                .open(path)
                .unwrap()
        };
        Self::on(Line::Fifo {
            from_agent: open(".out"),
            to_agent: open(".in"),
        })
    }

    pub(crate) fn on_socket(listener: &UnixListener) -> Self {
        let (stream, _) = listener.accept().unwrap();
        Self::on_stream(stream)
    }

    pub(crate) fn on_stream(stream: UnixStream) -> Self {
        stream.set_nonblocking(true).unwrap();
        Self::on(Line::Socket(stream))
    }

    fn on(line: Line) -> Self {
        Self {
            line,
            decoder: Decoder::new(),
            epoch: 0,
            desynchronised: 0,
        }
    }

    /// Says Hello with what the store holds, and waits for the answer.
    pub(crate) fn attach(&mut self, store: &mut Store, epoch: u64) {
        self.hello(store, epoch);
        let hellos = store.hellos.len();
        self.read_until(store, "the agent answers Hello", |store| {
            store.hellos.len() > hellos
        });
    }

    pub(crate) fn hello(&mut self, store: &Store, epoch: u64) {
        self.epoch = epoch;
        // As a host does: nothing of an attachment that was not given out yet is believed while searching.
        self.decoder.expect(Expectation {
            session: store.session,
            newest: Some(Epoch(epoch)),
        });
        let generation = store.hellos.last().map(|hello| hello.metadata_generation);
        let hello = HostHello {
            version_min: version::MIN,
            version_max: version::CURRENT,
            have_metadata: generation.filter(|_| store.has_all_metadata()).unwrap_or(0),
            resume_from: store.next(),
        };
        self.say(store.session, HostMessage::Hello(hello));
    }

    pub(crate) fn ack(&mut self, store: &Store) {
        self.say(store.session, HostMessage::Ack(store.next()));
    }

    pub(crate) fn say(&mut self, session: Option<SessionId>, message: HostMessage) -> u64 {
        // One count for all readers: they share a store, and the store finds answers by their id.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let envelope = Envelope {
            session: session.unwrap_or_default(),
            epoch: Epoch(self.epoch),
            id,
            message,
        };
        let bytes = envelope.encode();
        match &mut self.line {
            Line::Fifo { to_agent, .. } => to_agent.write_all(&bytes).unwrap(),
            Line::Socket(stream) => stream.write_all(&bytes).unwrap(),
        }
        id
    }

    /// Says something and waits for its Quiesced.
    pub(crate) fn ask(&mut self, store: &mut Store, message: HostMessage) -> Quiesced {
        let id = self.say(store.session, message);
        self.read_until(store, "the agent answers", |store| {
            assert!(
                store.errors.iter().all(|error| error.id != id),
                "{:?}",
                store.errors
            );
            store.quiesced.iter().any(|quiesced| quiesced.id == id)
        });
        store
            .quiesced
            .iter()
            .find(|quiesced| quiesced.id == id)
            .unwrap()
            .clone()
    }

    /// Reads what is there, once; bytes read.
    pub(crate) fn read(&mut self, store: &mut Store) -> usize {
        let mut buffer = [0; 64 << 10];
        let read = match &mut self.line {
            Line::Fifo { from_agent, .. } => from_agent.read(&mut buffer),
            Line::Socket(stream) => stream.read(&mut buffer),
        };
        let len = match read {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(self.decoder.push(&buffer[..len]), len);
        while let Some(decoded) = self.decoder.poll() {
            match decoded {
                Decoded::Frame { header, bytes } => store.take(&header, bytes),
                Decoded::Unsupported { version } => panic!("version {version}"),
                Decoded::Desynchronised { .. } => self.desynchronised += 1,
            }
        }
        len
    }

    /// Reads, acknowledging, until the condition holds.
    pub(crate) fn read_until(
        &mut self,
        store: &mut Store,
        what: &str,
        mut condition: impl FnMut(&Store) -> bool,
    ) {
        let begin = Instant::now();
        while !condition(store) {
            assert!(begin.elapsed() < PATIENCE, "waited in vain until {what}");
            if self.read(store) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            } else if self.epoch != 0 && store.session.is_some() {
                self.ack(store);
            }
        }
    }

    /// Reads for a while without acknowledging.
    pub(crate) fn read_for(&mut self, store: &mut Store, time: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < time {
            if self.read(store) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
