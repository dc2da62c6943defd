//! The command line: what was typed.
//!
//! By hand rather than with a library: a dozen options do not pay for several hundred KiB in somebody's initramfs.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use vmtrail_wire::MAX_CPUS;
use vmtrail_wire::host_to_agent::Setting;

use crate::ports::Source;

/// What `--help` says.
pub const HELP: &str = "\
Puts the kernel trace of this guest on its virtio-serial ports, for vmtrail on the host.

Usage: vmtrail-agent [OPTIONS]

What to record (the host can change it later):
  -e, --event SYSTEM[:EVENT]        record these events; repeat for more
  -f, --filter SYSTEM:EVENT=EXPR    record only events for which EXPR holds (see the kernel's
                                    Documentation/trace/events.rst); the event must be enabled
      --cpus LIST                   record only these CPUs, e.g. 0-3,8 (default: all)
      --clock CLOCK                 trace clock, e.g. mono_raw or x86-tsc (default: the kernel's)
      --buffer-size-kb N            ring of each CPU in KiB (default: the kernel's, about 1400)
      --instance NAME               tracefs instance to make, and to remove at the end (default: vmtrail)

How to send it:
      --retain-kb N                 KiB that a CPU keeps until the host has stored them (default: 1024; all
                                    CPUs together never more than 1/16 of the available memory)
      --idle-flush-ms N             send a page that is not full after so long (default: 200)

Where things are:
      --tracefs DIR                 tracefs (default: /sys/kernel/tracing, mounted if need be)
      --ports-dir DIR               directory with ports named vmtrail.N (default: the kernel's virtio ports)
      --port PATH                   this port: a device, a unix socket, or the FIFO pair PATH.in and PATH.out;
                                    repeat for more

  -h, --help                        this text
  -V, --version                     the version

Without a port the agent waits for one; without a reader it leaves the trace in the kernel's rings.
It ends at SIGTERM or SIGINT, sends what it can within a second, and removes its instance.

Exit status: 0 ended as told; 1 something failed while running; 2 wrong command line;
3 no tracefs; 4 no permission; 5 another agent uses the instance; 6 the kernel refused an event, filter,
clock or size.
";

/// Options as typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Args {
    /// What to record.
    pub settings: Vec<Setting>,
    /// Name of the instance.
    pub instance: String,
    /// KiB of window of each CPU.
    pub retain_kib: u64,
    /// Milliseconds until a page that is not full is sent.
    pub idle_flush_ms: u64,
    /// Where tracefs is.
    pub tracefs: Option<PathBuf>,
    /// Where ports are.
    pub source: Source,
}

/// What the command line asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Work.
    Run(Args),
    /// Print the help.
    Help,
    /// Print the version.
    Version,
}

/// Why a command line is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageError(String);

/// Window of a stream: the pipe that holds it may have at most 65,536 slots (fs/pipe.c allocates 40 bytes for each).
const MAX_RETAIN_KIB: u64 = 256 << 10;

/// Reads a command line without the program's name.
///
/// # Errors
///
/// What is wrong, and with which word.
pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Command, UsageError> {
    let mut words = words.into_iter();
    let mut args = Args {
        settings: Vec::new(),
        instance: "vmtrail".to_owned(),
        retain_kib: 1024,
        idle_flush_ms: 200,
        tracefs: None,
        source: Source::Guest,
    };
    let mut filters = Vec::new();
    while let Some(word) = words.next() {
        let word = text(word)?;
        // Both `--clock mono` and `--clock=mono`. A value may itself contain "=".
        let (option, attached) = match word.split_once('=') {
            Some((option, value)) if option.starts_with("--") => {
                (option.to_owned(), Some(value.to_owned()))
            }
            _ => (word.clone(), None),
        };
        let mut value = || match &attached {
            Some(value) => Ok(value.clone()),
            None => match words.next() {
                Some(value) => text(value),
                None => Err(UsageError(format!("{option} needs a value"))),
            },
        };
        match option.as_str() {
            "-h" | "--help" => return Ok(Command::Help),
            "-V" | "--version" => return Ok(Command::Version),
            "-e" | "--event" => args.settings.push(Setting::Event(value()?)),
            "-f" | "--filter" => filters.push(Setting::Filter(value()?)),
            "--clock" => args.settings.push(Setting::Clock(value()?)),
            "--buffer-size-kb" => {
                let kib = number(&option, &value()?, 8, 16 << 20)?;
                args.settings.push(Setting::BufferSizeKb(kib));
            }
            "--instance" => args.instance = value()?,
            "--retain-kb" => args.retain_kib = number(&option, &value()?, 4, MAX_RETAIN_KIB)?,
            "--idle-flush-ms" => args.idle_flush_ms = number(&option, &value()?, 1, 60_000)?,
            "--tracefs" => args.tracefs = Some(PathBuf::from(value()?)),
            "--ports-dir" => args.source = Source::Directory(PathBuf::from(value()?)),
            "--port" => {
                let path = PathBuf::from(value()?);
                match &mut args.source {
                    Source::Paths(paths) => paths.push(path),
                    source => *source = Source::Paths(vec![path]),
                }
            }
            "--cpus" => args.settings.push(Setting::CpuMask(cpu_mask(&value()?)?)),
            _ => return Err(UsageError(format!("{word:?} is not an option"))),
        }
    }
    // A filter is set on an event that is there, whatever the order on the command line.
    args.settings.append(&mut filters);
    Ok(Command::Run(args))
}

fn text(word: OsString) -> Result<String, UsageError> {
    word.into_string()
        .map_err(|word| UsageError(format!("{word:?} is not UTF-8 text")))
}

fn number(option: &str, value: &str, min: u64, max: u64) -> Result<u64, UsageError> {
    match value.parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ => Err(UsageError(format!(
            "{option} is {value:?}, but must be a number from {min} to {max}"
        ))),
    }
}

/// A list like `0-3,8` as the hexadecimal mask that `tracing_cpumask` takes: words of 32 bits, the highest first.
fn cpu_mask(list: &str) -> Result<String, UsageError> {
    let wrong = || UsageError(format!("--cpus is {list:?}, but must be a list like 0-3,8"));
    let mut words: Vec<u32> = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first: u32 = first.trim().parse().map_err(|_| wrong())?;
        let last: u32 = last.trim().parse().map_err(|_| wrong())?;
        if first > last || last >= MAX_CPUS {
            return Err(wrong());
        }
        for cpu in first..=last {
            let word = (cpu / 32) as usize;
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            words[word] |= 1 << (cpu % 32);
        }
    }
    let words: Vec<String> = words
        .iter()
        .rev()
        .map(|word| format!("{word:08x}"))
        .collect();
    Ok(words.join(","))
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (see vmtrail-agent --help)", self.0)
    }
}

impl std::error::Error for UsageError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &[&str]) -> Result<Args, String> {
        match parse(words.iter().map(OsString::from)) {
            Ok(Command::Run(args)) => Ok(args),
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn values_stand_behind_or_inside_their_option() {
        let args = run(&[
            "--filter=sched:sched_switch=prev_pid==0",
            "-e",
            "sched",
            "--event=irq:irq_handler_entry",
            "--port",
            "a",
            "--port=b",
            "--retain-kb",
            "64",
        ])
        .unwrap();
        let expected = [
            Setting::Event("sched".into()),
            Setting::Event("irq:irq_handler_entry".into()),
            Setting::Filter("sched:sched_switch=prev_pid==0".into()),
        ];
        assert_eq!(args.settings, expected);
        assert_eq!(args.source, Source::Paths(vec!["a".into(), "b".into()]));
        assert_eq!(args.retain_kib, 64);
    }

    #[test]
    fn cpu_lists_become_masks() {
        assert_eq!(cpu_mask("0-3,8").unwrap(), "0000010f");
        assert_eq!(cpu_mask("33").unwrap(), "00000002,00000000");
        for wrong in ["", "3-1", "x", "0-9999"] {
            assert!(cpu_mask(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (words, needle) in [
            (&["--retain-kb", "1"][..], "from 4 to"),
            (&["--retain-kb", "x"], "\"x\""),
            (&["--clock"], "--clock needs a value"),
            (&["sched"], "\"sched\" is not an option"),
        ] {
            let error = run(words).unwrap_err();
            assert!(error.contains(needle), "{error}");
            assert!(error.contains("--help"), "{error}");
        }
    }
}
