//! The kernel's side: an instance of our own below tracefs, what it records, and how it is left behind.
//!
//! An instance (`instances/NAME`) has rings, events, filters and a clock of its own, so that we disturb nobody who
//! traces the same guest, and nobody disturbs us. It lives as long as the agent. Outside of it only what has no
//! per-instance form is touched: the table of task names is enlarged (and put back).

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::mount::{MsFlags, mount};
use vmtrail_wire::agent_to_host::CpuCounters;
use vmtrail_wire::host_to_agent::Setting;
use vmtrail_wire::{MAX_CPUS, MAX_SUBBUF_SIZE};

use crate::sys;

/// Where tracefs is found, newest first (before 4.1 it was a part of debugfs).
const PLACES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Wake a poll when a quarter of a ring is full: late enough for whole frames, early enough that a burst does not
/// overwrite before it is read.
const BUFFER_PERCENT: &str = "25";

/// Tasks whose names the kernel shall remember; its default is 128, of which a compile job uses up thousands.
const CMDLINES: u64 = 8192;

/// Bytes of a small file of tracefs that are read at most.
const MAX_SMALL_FILE: usize = 4 << 20;

/// Why the agent cannot trace. Each text says what to do.
#[derive(Debug)]
pub enum TraceError {
    /// There is no tracefs.
    NoTracefs(String),
    /// The kernel does not let us.
    NoPermission(String),
    /// Another agent uses the instance.
    InUse(String),
    /// The kernel does not know or does not want what it was told.
    Refused(String),
    /// Something else went wrong with a file.
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
}

/// The mounted tracefs.
#[derive(Debug, Clone)]
pub struct Tracefs {
    root: PathBuf,
}

/// Our instance. Dropping it stops recording and removes it.
#[derive(Debug)]
pub struct Instance {
    root: PathBuf,
    dir: PathBuf,
    name: String,
    page_size: u32,
    cpus: Vec<u32>,
    /// What the kernel forgot of its counters: it resets them whenever it clears the rings.
    forgotten: BTreeMap<u32, CpuCounters>,
    /// `saved_cmdlines_size` as we found it and as we left it.
    cmdlines: Option<(u64, u64)>,
    marker: Option<File>,
    /// Whether an instance was there that a killed agent left behind.
    leftover: bool,
    /// Held for as long as we live, on the directory itself: it goes with the instance.
    _lock: Flock<File>,
}

/// The raw ring of one CPU, and its counters.
#[derive(Debug)]
pub struct Ring {
    /// `trace_pipe_raw`, non-blocking.
    pub pages: OwnedFd,
    stats: File,
}

/// What to record, as the command line or a host says it.
pub type Settings = [Setting];

/// What an instance recorded before a change, to go back to.
#[derive(Debug)]
struct Snapshot {
    events: Vec<String>,
    filters: Vec<(String, String)>,
    clock: String,
    buffer_size_kb: String,
    cpumask: String,
    tracer: String,
    options: Vec<String>,
}

impl Tracefs {
    /// Finds tracefs, or mounts it where it belongs.
    ///
    /// # Errors
    ///
    /// See [`TraceError`].
    pub fn find(given: Option<&Path>) -> Result<Self, TraceError> {
        if let Some(root) = given {
            return if root.join("events/header_page").exists() {
                Ok(Self {
                    root: root.to_path_buf(),
                })
            } else {
                Err(TraceError::NoTracefs(format!(
                    "{} is not a tracefs with events (events/header_page is not readable there)",
                    root.display()
                )))
            };
        }
        let mounted = |place: &str| Path::new(place).join("events/header_page").exists();
        let mut why = None;
        if !PLACES.iter().any(|place| mounted(place)) {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
            why = mount(
                Some("tracefs"),
                PLACES[0],
                Some("tracefs"),
                flags,
                None::<&str>,
            )
            .err();
        }
        match PLACES.iter().find(|place| mounted(place)) {
            Some(place) => Ok(Self {
                root: PathBuf::from(place),
            }),
            None => Err(match why {
                Some(Errno::EPERM | Errno::EACCES) | None => TraceError::NoPermission(
                    "tracefs is not mounted or not readable: run the agent as root, or mount it with \
                     `mount -t tracefs tracefs /sys/kernel/tracing` and give the agent's user access"
                        .into(),
                ),
                Some(errno) => TraceError::NoTracefs(format!(
                    "tracefs cannot be mounted at {} ({errno}): the guest's kernel needs CONFIG_FTRACE and \
                     CONFIG_EVENT_TRACING",
                    PLACES[0]
                )),
            }),
        }
    }

    /// The mount point.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }
}

impl Instance {
    /// Makes the instance, or takes over what a killed agent left.
    ///
    /// # Errors
    ///
    /// See [`TraceError`].
    pub fn create(tracefs: &Tracefs, name: &str) -> Result<Self, TraceError> {
        let bad_name = name.is_empty() || name.starts_with('.') || name.contains('/');
        if bad_name {
            return Err(TraceError::Refused(format!(
                "instance name {name:?} is not the name of a directory"
            )));
        }
        let dir = tracefs.root.join("instances").join(name);
        let mut leftover = false;
        match fs::create_dir(&dir) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => leftover = true,
            Err(error) => {
                return Err(cannot(
                    &format!("make the instance {}", dir.display()),
                    error,
                ));
            }
        }
        let mut lock = Self::lock(&dir, name)?;
        if leftover {
            // The rings of a dead agent hold pages that nobody can number any more; a new instance starts clean.
            // Somebody who looks into it keeps it alive (EBUSY): then it is emptied instead.
            if fs::remove_dir(&dir).is_ok() {
                fs::create_dir(&dir).map_err(|error| {
                    cannot(&format!("make the instance {} again", dir.display()), error)
                })?;
                lock = Self::lock(&dir, name)?;
            } else {
                for (file, value) in [("tracing_on", "0"), ("set_event", ""), ("trace", "")] {
                    set(&dir, file, value)?;
                }
            }
        }
        let mut instance = Self {
            root: tracefs.root.clone(),
            page_size: page_size(&tracefs.root, &dir)?,
            cpus: Vec::new(),
            forgotten: BTreeMap::new(),
            cmdlines: None,
            marker: None,
            leftover,
            name: name.to_owned(),
            _lock: lock,
            dir,
        };
        // Recording waits for the events to be set, so that the first page does not begin with half of them.
        set(&instance.dir, "tracing_on", "0")?;
        // Since 5.0; without it the kernel wakes at half a ring.
        let _ = set(&instance.dir, "buffer_percent", BUFFER_PERCENT);
        instance.find_cpus()?;
        instance.remember_tasks();
        Ok(instance)
    }

    fn lock(dir: &Path, name: &str) -> Result<Flock<File>, TraceError> {
        let file =
            File::open(dir).map_err(|error| cannot(&format!("open {}", dir.display()), error))?;
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
            Errno::EWOULDBLOCK => TraceError::InUse(format!(
                "another vmtrail-agent is at work in the instance {name:?}: stop it, or choose another with --instance"
            )),
            errno => cannot(&format!("lock {}", dir.display()), errno.into()),
        })
    }

    /// Whether a killed agent's instance was found and cleaned.
    #[must_use]
    pub fn was_leftover(&self) -> bool {
        self.leftover
    }

    /// The instance's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The tracefs around it.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Bytes of a sub-buffer.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// CPUs that have a ring.
    #[must_use]
    pub fn cpus(&self) -> &[u32] {
        &self.cpus
    }

    /// Looks for CPUs that were added. The kernel makes a ring for every CPU that is possible, so this rarely finds any.
    ///
    /// # Errors
    ///
    /// `per_cpu` cannot be listed.
    pub fn find_cpus(&mut self) -> Result<(), TraceError> {
        let per_cpu = self.dir.join("per_cpu");
        let what = || format!("list {}", per_cpu.display());
        let mut cpus = Vec::new();
        for entry in fs::read_dir(&per_cpu).map_err(|error| cannot(&what(), error))? {
            let name = entry.map_err(|error| cannot(&what(), error))?.file_name();
            let cpu = name
                .to_str()
                .and_then(|name| name.strip_prefix("cpu")?.parse().ok());
            cpus.extend(cpu.filter(|&cpu: &u32| cpu < MAX_CPUS));
        }
        cpus.sort_unstable();
        self.cpus = cpus;
        Ok(())
    }

    /// Opens a CPU's ring.
    ///
    /// # Errors
    ///
    /// See [`TraceError`].
    pub fn open_ring(&self, cpu: u32) -> Result<Ring, TraceError> {
        let dir = self.dir.join(format!("per_cpu/cpu{cpu}"));
        let raw = dir.join("trace_pipe_raw");
        let pages = sys::open_nonblocking(&raw, OFlag::O_RDONLY)
            .map_err(|error| cannot(&format!("open {}", raw.display()), error))?;
        let stats = dir.join("stats");
        let stats = File::open(&stats)
            .map_err(|error| cannot(&format!("open {}", stats.display()), error))?;
        Ok(Ring { pages, stats })
    }

    /// The counters of a CPU since the instance was made.
    ///
    /// # Errors
    ///
    /// `stats` cannot be read.
    pub fn counters(&self, cpu: u32, ring: &Ring) -> io::Result<CpuCounters> {
        let (now, _) = ring.counters(cpu)?;
        let before = self.forgotten.get(&cpu).copied().unwrap_or_default();
        Ok(CpuCounters {
            cpu,
            overrun: now.overrun.saturating_add(before.overrun),
            commit_overrun: now.commit_overrun.saturating_add(before.commit_overrun),
            dropped: now.dropped.saturating_add(before.dropped),
            read: now.read.saturating_add(before.read),
        })
    }

    /// The clock in force.
    #[must_use]
    pub fn clock(&self) -> String {
        let clocks = read_small(&self.dir.join("trace_clock")).unwrap_or_default();
        bracketed(&clocks)
    }

    /// Sub-buffers of one CPU's ring.
    #[must_use]
    pub fn ring_pages(&self) -> u64 {
        let text = read_small(&self.dir.join("buffer_size_kb")).unwrap_or_default();
        // An instance that nobody used says "7 (expanded: 1408)".
        let kib = text
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|number| number.parse::<u64>().ok())
            .max()
            .unwrap_or(0);
        (kib << 10).div_ceil(u64::from(self.page_size))
    }

    /// Switches recording.
    ///
    /// # Errors
    ///
    /// See [`TraceError`].
    pub fn record(&self, on: bool) -> Result<(), TraceError> {
        set(&self.dir, "tracing_on", if on { "1" } else { "0" })
    }

    /// Writes a line into the trace.
    ///
    /// # Errors
    ///
    /// See [`TraceError`].
    pub fn mark(&mut self, text: &str) -> Result<(), TraceError> {
        let path = self.dir.join("trace_marker");
        let what = || format!("write to {}", path.display());
        if self.marker.is_none() {
            let marker = OpenOptions::new().write(true).open(&path);
            self.marker = Some(marker.map_err(|error| cannot(&what(), error))?);
        }
        if let Some(marker) = &mut self.marker {
            // One write is one event.
            marker
                .write_all(text.as_bytes())
                .map_err(|error| cannot(&what(), error))?;
        }
        Ok(())
    }

    /// Applies all settings, or none of them. `rings` are told before the kernel forgets their counters.
    ///
    /// # Errors
    ///
    /// The first refusal, in the kernel's words where it has some.
    pub fn configure<'a>(
        &mut self,
        settings: &Settings,
        rings: impl Iterator<Item = (u32, &'a Ring)>,
    ) -> Result<(), TraceError> {
        let before = self.snapshot();
        // A clock or a size that is refused has cleared nothing yet, but one that is accepted cannot give back what it
        // cleared: so they come last.
        let (clearing, harmless): (Vec<&Setting>, Vec<&Setting>) = settings
            .iter()
            .partition(|setting| matches!(setting, Setting::Clock(_) | Setting::BufferSizeKb(_)));
        let clears = clearing.iter().any(|setting| match setting {
            Setting::Clock(clock) => *clock != before.clock,
            Setting::BufferSizeKb(kib) => kib.to_string() != before.buffer_size_kb,
            _ => false,
        });
        let kept = self.forgotten.clone();
        let result = harmless
            .iter()
            .try_for_each(|setting| self.apply(setting))
            .and_then(|()| {
                if clears {
                    self.keep_counters(rings);
                }
                clearing.iter().try_for_each(|setting| self.apply(setting))
            });
        if result.is_err() {
            self.forgotten = kept;
            self.restore(&before);
        }
        result
    }

    fn keep_counters<'a>(&mut self, rings: impl Iterator<Item = (u32, &'a Ring)>) {
        for (cpu, ring) in rings {
            let Ok((now, unread)) = ring.counters(cpu) else {
                continue;
            };
            let kept = self.forgotten.entry(cpu).or_default();
            kept.cpu = cpu;
            // Unread events are cleared with the ring: as lost as if they had been overwritten.
            kept.overrun = kept
                .overrun
                .saturating_add(now.overrun)
                .saturating_add(unread);
            kept.commit_overrun = kept.commit_overrun.saturating_add(now.commit_overrun);
            kept.dropped = kept.dropped.saturating_add(now.dropped);
            kept.read = kept.read.saturating_add(now.read);
        }
    }

    fn apply(&self, setting: &Setting) -> Result<(), TraceError> {
        match setting {
            Setting::ClearEvents => {
                for event in self.enabled_events() {
                    let filter = self
                        .dir
                        .join("events")
                        .join(event.replace(':', "/"))
                        .join("filter");
                    let _ = write_file(&filter, "0", false);
                }
                set(&self.dir, "set_event", "")
            }
            Setting::Event(event) => self.enable(event),
            Setting::Filter(filter) => self.filter(filter),
            Setting::Clock(clock) => {
                if *clock == self.clock() {
                    return Ok(());
                }
                write_file(&self.dir.join("trace_clock"), clock, false).map_err(|error| {
                    let clocks = read_small(&self.dir.join("trace_clock")).unwrap_or_default();
                    refused(
                        &format!("set the trace clock {clock:?}"),
                        &error,
                        &format!("this kernel has {}", clocks.trim().replace(['[', ']'], "")),
                    )
                })
            }
            Setting::BufferSizeKb(kib) => {
                if kib.to_string() == self.buffer_size_kb() {
                    return Ok(());
                }
                write_file(&self.dir.join("buffer_size_kb"), &kib.to_string(), false).map_err(
                    |error| {
                        refused(
                            &format!("make rings of {kib} KiB a CPU"),
                            &error,
                            "choose a smaller --buffer-size-kb",
                        )
                    },
                )
            }
            Setting::CpuMask(mask) => write_file(&self.dir.join("tracing_cpumask"), mask, false)
                .map_err(|error| {
                    refused(
                        &format!("record the CPUs of mask {mask:?}"),
                        &error,
                        "give a hexadecimal mask like tracing_cpumask",
                    )
                }),
            Setting::Option(option) => write_file(&self.dir.join("trace_options"), option, false)
                .map_err(|error| {
                    refused(
                        &format!("set the trace option {option:?}"),
                        &error,
                        "see trace_options",
                    )
                }),
            Setting::Tracer(tracer) => write_file(&self.dir.join("current_tracer"), tracer, false)
                .map_err(|error| {
                    let tracers =
                        read_small(&self.dir.join("available_tracers")).unwrap_or_default();
                    refused(
                        &format!("set the tracer {tracer:?}"),
                        &error,
                        &format!("this kernel has {}", tracers.trim()),
                    )
                }),
        }
    }

    fn enable(&self, event: &str) -> Result<(), TraceError> {
        // "sched" alone would also match an event of that name in any system.
        let full = if event.contains(':') {
            event.to_owned()
        } else {
            format!("{event}:*")
        };
        let path = self.dir.join("set_event");
        write_file(&path, &full, true).map_err(|error| {
            let (system, name) = full.split_once(':').unwrap_or((&full, "*"));
            let system_dir = self.dir.join("events").join(system);
            let hint = if system.contains(['*', '?', '[']) || system_dir.join(name).exists() {
                "see available_events".to_owned()
            } else if system_dir.is_dir() {
                format!(
                    "its system {system} has no event {name:?} in this kernel; see available_events"
                )
            } else {
                format!("this kernel has no events of a system {system:?}; see available_events")
            };
            refused(&format!("enable the event {event:?}"), &error, &hint)
        })
    }

    fn filter(&self, setting: &str) -> Result<(), TraceError> {
        let parts = setting
            .split_once('=')
            .and_then(|(event, expression)| Some((event.split_once(':')?, expression)));
        let Some(((system, event), expression)) = parts else {
            return Err(TraceError::Refused(format!(
                "filter {setting:?} is not SYSTEM:EVENT=EXPRESSION"
            )));
        };
        let outside = |part: &str| part.is_empty() || part.starts_with('.') || part.contains('/');
        let path = self
            .dir
            .join("events")
            .join(system)
            .join(event)
            .join("filter");
        if outside(system) || outside(event) || !path.exists() {
            return Err(TraceError::Refused(format!(
                "failed to filter {system}:{event}: this kernel has no such event; see available_events"
            )));
        }
        write_file(&path, expression, false).map_err(|error| {
            // The kernel writes the expression with a caret under the fault, and its reason, into the file itself.
            let reason = read_small(&path).unwrap_or_default();
            let reason = reason.lines().map(str::trim).collect::<Vec<_>>().join(" ");
            // It also keeps the failed text as the filter.
            let _ = write_file(&path, "0", false);
            refused(
                &format!("filter {system}:{event} by {expression:?}"),
                &error,
                reason.trim(),
            )
        })
    }

    fn enabled_events(&self) -> Vec<String> {
        let text = read_small(&self.dir.join("set_event")).unwrap_or_default();
        text.lines()
            .filter(|line| line.contains(':'))
            .map(str::to_owned)
            .collect()
    }

    fn buffer_size_kb(&self) -> String {
        let text = read_small(&self.dir.join("buffer_size_kb")).unwrap_or_default();
        text.trim().to_owned()
    }

    fn snapshot(&self) -> Snapshot {
        let events = self.enabled_events();
        let mut filters = Vec::new();
        for event in &events {
            let path = self
                .dir
                .join("events")
                .join(event.replace(':', "/"))
                .join("filter");
            if let Ok(filter) = read_small(&path)
                && filter.trim() != "none"
            {
                filters.push((event.clone(), filter.trim().to_owned()));
            }
        }
        let word = |file: &str| {
            let text = read_small(&self.dir.join(file)).unwrap_or_default();
            text.trim().to_owned()
        };
        Snapshot {
            events,
            filters,
            clock: self.clock(),
            buffer_size_kb: self.buffer_size_kb(),
            cpumask: word("tracing_cpumask"),
            tracer: word("current_tracer"),
            options: word("trace_options").lines().map(str::to_owned).collect(),
        }
    }

    /// Back to what was recorded before. What fails here was refused by a kernel that had accepted it a moment ago;
    /// there is nobody better to tell than the host, which gets the first error anyway.
    fn restore(&self, before: &Snapshot) {
        let _ = self.apply(&Setting::ClearEvents);
        let tracer = read_small(&self.dir.join("current_tracer")).unwrap_or_default();
        if tracer.trim() != before.tracer {
            let _ = set(&self.dir, "current_tracer", &before.tracer);
        }
        let options = read_small(&self.dir.join("trace_options")).unwrap_or_default();
        for (now, then) in options.lines().zip(&before.options) {
            if now != then {
                let _ = set(&self.dir, "trace_options", then);
            }
        }
        let _ = set(&self.dir, "tracing_cpumask", &before.cpumask);
        for (event, filter) in &before.filters {
            let path = self
                .dir
                .join("events")
                .join(event.replace(':', "/"))
                .join("filter");
            let _ = write_file(&path, filter, false);
        }
        for event in &before.events {
            let _ = self.enable(event);
        }
        let _ = self.apply(&Setting::Clock(before.clock.clone()));
        if let Ok(kib) = before.buffer_size_kb.parse() {
            let _ = self.apply(&Setting::BufferSizeKb(kib));
        }
    }

    /// Names and thread groups of tasks have no per-instance form. A table that somebody made larger is left alone.
    fn remember_tasks(&mut self) {
        let size = self.root.join("saved_cmdlines_size");
        let found = read_small(&size)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(found) = found
            && found < CMDLINES
            && write_file(&size, &CMDLINES.to_string(), false).is_ok()
        {
            // The kernel rounds up, so what to recognise at the end is what it says now.
            let left = read_small(&size)
                .ok()
                .and_then(|text| text.trim().parse().ok());
            self.cmdlines = left.map(|left| (found, left));
        }
        let _ = write_file(&self.dir.join("options/record-cmd"), "1", false);
        // The kernel keeps an int for each possible pid (trace_alloc_tgid_map): 16 MiB where pid_max is 4 million,
        // which a small guest must not be charged for names.
        let pids = read_small(Path::new("/proc/sys/kernel/pid_max"))
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(u64::MAX);
        if pids.saturating_mul(4) <= available_memory().unwrap_or(0) / 64 {
            let _ = write_file(&self.dir.join("options/record-tgid"), "1", false);
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // The rings must be closed before: an open file keeps an instance alive. The pump drops them first.
        self.marker = None;
        let _ = set(&self.dir, "tracing_on", "0");
        let _ = set(&self.dir, "set_event", "");
        if let Err(error) = fs::remove_dir(&self.dir) {
            eprintln!(
                "vmtrail-agent: failed to remove the instance {} ({}): {error}; the next agent will, or `rmdir` it",
                self.name,
                self.dir.display()
            );
        }
        let size = self.root.join("saved_cmdlines_size");
        if let Some((found, left)) = self.cmdlines
            && read_small(&size).is_ok_and(|text| text.trim() == left.to_string())
        {
            let _ = write_file(&size, &found.to_string(), false);
        }
    }
}

impl Ring {
    /// The kernel's counters since it last cleared the ring, and the events that wait in it.
    fn counters(&self, cpu: u32) -> io::Result<(CpuCounters, u64)> {
        let mut bytes = [0; 1024];
        let len = self.stats.read_at(&mut bytes, 0)?;
        let text = String::from_utf8_lossy(&bytes[..len]);
        Ok(parse_stats(cpu, &text))
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTracefs(text)
            | Self::NoPermission(text)
            | Self::InUse(text)
            | Self::Refused(text) => f.write_str(text),
            Self::Io { what, source } => write!(f, "failed to {what}: {source}"),
        }
    }
}

impl std::error::Error for TraceError {}

/// `MemAvailable` in bytes.
#[must_use]
pub fn available_memory() -> Option<u64> {
    let text = read_small(Path::new("/proc/meminfo")).ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// A file's text; a longer one is cut at the bound.
///
/// # Errors
///
/// Of reading.
pub fn read_small(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut bytes = vec![0; 16 << 10];
    let mut filled = 0;
    loop {
        filled += fill(&mut file, &mut bytes[filled..])?;
        if filled < bytes.len() || bytes.len() >= MAX_SMALL_FILE {
            break;
        }
        bytes.resize(filled * 2, 0);
    }
    bytes.truncate(filled);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Reads until the buffer is full or the file ends; bytes read.
///
/// Not `read_to_end`, which begins with a probe of 32 bytes: `events/header_page` gives what fits into the first read
/// and then says that it has ended (show_header, kernel/trace/trace_events.c), so that on kernel 6.1 its last lines
/// were never seen.
///
/// # Errors
///
/// Of reading.
pub fn fill(file: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Sub-buffer size: `buffer_subbuf_size_kb` (6.8), else where the data of a page begins and how long it is.
fn page_size(root: &Path, dir: &Path) -> Result<u32, TraceError> {
    let kib = read_small(&dir.join("buffer_subbuf_size_kb"))
        .ok()
        .and_then(|text| text.trim().parse::<u32>().ok());
    let size = match kib {
        Some(kib) => kib.saturating_mul(1024),
        None => {
            let path = root.join("events/header_page");
            let text = read_small(&path)
                .map_err(|error| cannot(&format!("read {}", path.display()), error))?;
            parse_header_page(&text).unwrap_or(0)
        }
    };
    if size.is_power_of_two() && (64..=MAX_SUBBUF_SIZE).contains(&size) {
        Ok(size)
    } else {
        Err(TraceError::Refused(format!(
            "this kernel's ring-buffer pages have {size} bytes, which is not a power of two up to {MAX_SUBBUF_SIZE}"
        )))
    }
}

/// End of the last field of `events/header_page`: `field: char data; offset:16; size:4080; signed:0;`.
fn parse_header_page(text: &str) -> Option<u32> {
    let line = text.lines().find(|line| line.contains(" data;"))?;
    let number = |key: &str| -> Option<u32> {
        let rest = &line[line.find(key)? + key.len()..];
        rest.split(';').next()?.trim().parse().ok()
    };
    number("offset:")?.checked_add(number("size:")?)
}

/// Bytes of the kernel's long: the size of the commit counter (`local_t`).
#[must_use]
pub fn parse_long_size(header_page: &str) -> Option<u8> {
    let line = header_page.lines().find(|line| line.contains(" commit;"))?;
    let rest = &line[line.find("size:")? + "size:".len()..];
    rest.split(';')
        .next()?
        .trim()
        .parse()
        .ok()
        .filter(|size| matches!(size, 4 | 8))
}

fn parse_stats(cpu: u32, text: &str) -> (CpuCounters, u64) {
    let mut counters = CpuCounters {
        cpu,
        ..CpuCounters::default()
    };
    let mut entries = 0;
    for line in text.lines() {
        let Some((key, value)) = line.split_once(": ") else {
            continue;
        };
        let Ok(value) = value.trim().parse() else {
            continue;
        };
        match key {
            "entries" => entries = value,
            "overrun" => counters.overrun = value,
            "commit overrun" => counters.commit_overrun = value,
            "dropped events" => counters.dropped = value,
            "read events" => counters.read = value,
            _ => {}
        }
    }
    (counters, entries)
}

/// The word in brackets: `local [mono] boot`.
fn bracketed(text: &str) -> String {
    let inside = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or_else(|| text.trim().to_owned(), |(word, _)| word.to_owned())
}

fn set(dir: &Path, file: &str, value: &str) -> Result<(), TraceError> {
    let path = dir.join(file);
    write_file(&path, value, false)
        .map_err(|error| cannot(&format!("write {value:?} to {}", path.display()), error))
}

/// Files of tracefs act on each `write(2)`: the value goes in one.
fn write_file(path: &Path, value: &str, append: bool) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .append(append)
        .truncate(!append)
        .open(path)?;
    if value.is_empty() {
        // Opening it for truncation was the deed.
        return Ok(());
    }
    file.write_all(format!("{value}\n").as_bytes())
}

fn cannot(what: &str, source: io::Error) -> TraceError {
    if source.kind() == io::ErrorKind::PermissionDenied {
        return TraceError::NoPermission(format!(
            "failed to {what}: {source}: run the agent as root, or give its user access to tracefs"
        ));
    }
    TraceError::Io {
        what: what.to_owned(),
        source,
    }
}

fn refused(what: &str, error: &io::Error, hint: &str) -> TraceError {
    TraceError::Refused(format!("failed to {what}: {error} ({hint})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_ends_after_its_first_read_is_read_whole() {
        struct ShowHeader(bool);
        impl Read for ShowHeader {
            fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                if std::mem::replace(&mut self.0, true) {
                    return Ok(0);
                }
                let len = bytes.len().min(200);
                bytes[..len].fill(b'x');
                Ok(len)
            }
        }
        let mut bytes = [0; 4096];
        assert_eq!(fill(&mut ShowHeader(false), &mut bytes).unwrap(), 200);
    }

    #[test]
    fn stats_of_a_real_kernel() {
        let text = "entries: 17\noverrun: 4294967297\ncommit overrun: 2\nbytes: 816\noldest event ts:  2643.1\n\
                    now ts:  2643.904683\ndropped events: 3\nread events: 99\n";
        let expected = CpuCounters {
            cpu: 5,
            overrun: 4_294_967_297,
            commit_overrun: 2,
            dropped: 3,
            read: 99,
        };
        assert_eq!(parse_stats(5, text), (expected, 17));
        assert_eq!(parse_stats(5, "").1, 0);
    }

    #[test]
    fn header_pages_of_64_and_32_bits() {
        let wide = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
                    \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
                    \tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;\n\
                    \tfield: char data;\toffset:16;\tsize:65520;\tsigned:0;\n";
        assert_eq!(parse_header_page(wide), Some(65_536));
        assert_eq!(parse_long_size(wide), Some(8));
        let narrow = "\tfield: local_t commit;\toffset:8;\tsize:4;\tsigned:1;\n\
                      \tfield: char data;\toffset:12;\tsize:4084;\tsigned:1;\n";
        assert_eq!(parse_header_page(narrow), Some(4096));
        assert_eq!(parse_long_size(narrow), Some(4));
        assert_eq!(parse_header_page(""), None);
    }

    #[test]
    fn the_clock_is_the_one_in_brackets() {
        assert_eq!(bracketed("local global [mono_raw] boot\n"), "mono_raw");
        assert_eq!(bracketed("local\n"), "local");
    }
}
