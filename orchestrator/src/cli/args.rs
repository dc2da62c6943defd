//! What can be typed.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

/// One continuous kernel trace of a virtual machine, for as long as it lives and wherever it is moved.
///
/// An agent in the guest (vmtrail-agent) sends the guest kernel's ftrace pages through virtio-serial ports. vmtrail reads them on the
/// host, keeps them in a trail, follows the VM through live migrations, and proves that nothing is missing, or says what
/// is.
#[derive(Debug, Parser)]
#[command(name = "vmtrail", version, max_term_width = 100)]
pub(super) struct Args {
    #[command(subcommand)]
    pub(super) command: Command,

    /// Form of log lines on standard error; what is logged is chosen by RUST_LOG (default: warn)
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    pub(super) log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    Record(RecordArgs),
    Migrate(MigrateArgs),
    Stop(StopArgs),
    Mark(MarkArgs),
    Verify(VerifyArgs),
    Info(InfoArgs),
    Report(ReportArgs),
    Tail(TailArgs),
    Export(ExportArgs),
}

/// Record a running VM into a trail
///
/// Uses the VM's ports named vmtrail.N (or trace-path-cpuN). If it has none, adds some over QMP and takes them away at the end;
/// never to a VM that libvirt, Proxmox or another manager owns.
///
/// Ends on Ctrl-C, SIGTERM, `vmtrail stop TRAIL`, or a limit: the agent then stops, everything it still has is
/// fetched, and the trail is complete. Exit code 0: complete; 5: the last pages may be missing; 1: an error.
#[derive(Debug, ClapArgs)]
pub(super) struct RecordArgs {
    /// QMP socket of the VM; a socket of our own (`-qmp unix:PATH,server=on,wait=off`), for QEMU serves one client on each
    #[arg(long, value_name = "PATH")]
    pub(super) qmp: PathBuf,

    /// Directory of the trail; must not exist, or be empty
    #[arg(short, long = "output", visible_alias = "trail", value_name = "TRAIL")]
    pub(super) output: PathBuf,

    /// Continue a trail that exists, for instance after this program was killed
    #[arg(long)]
    pub(super) append: bool,

    #[command(flatten)]
    pub(super) what: WhatArgs,

    #[command(flatten)]
    pub(super) ports: PortArgs,

    /// End after this long (30s, 5m, 2h)
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(super) duration: Option<Duration>,

    /// End after this many bytes of pages (500M, 2G)
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(super) max_size: Option<u64>,

    #[command(flatten)]
    pub(super) keep: KeepArgs,

    /// One JSON object a line on standard output instead of progress
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Clone, ClapArgs)]
pub(super) struct WhatArgs {
    /// Event to record: SYSTEM or SYSTEM:EVENT, may be repeated (default: whatever the agent was started with)
    #[arg(short = 'e', long = "event", value_name = "EVENT")]
    pub(super) events: Vec<String>,

    /// Filter of an event: SYSTEM:EVENT=EXPRESSION, as tracefs takes it (sched:sched_switch=prev_prio<100)
    #[arg(long = "filter", value_name = "FILTER")]
    pub(super) filters: Vec<String>,

    /// Trace clock of the guest (mono, mono_raw, boot, x86-tsc, …); another than the one in force clears the guest's rings
    #[arg(long, value_name = "CLOCK")]
    pub(super) clock: Option<String>,

    /// Ring of each guest CPU (4M); another size than the one in force clears the guest's rings
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(super) buffer_size: Option<u64>,

    /// Tracer (function, function_graph, nop)
    #[arg(long, value_name = "TRACER")]
    pub(super) tracer: Option<String>,

    /// Trace option, NAME or noNAME, may be repeated
    #[arg(long = "trace-option", value_name = "OPTION")]
    pub(super) trace_options: Vec<String>,
}

#[derive(Debug, Clone, ClapArgs)]
pub(super) struct PortArgs {
    /// Where a port is that QEMU does not tell: NAME=PATH (PATH.in and PATH.out, or a socket), may be repeated
    #[arg(long = "port", value_name = "NAME=PATH", value_parser = port)]
    pub(super) paths: Vec<(String, PathBuf)>,

    /// Never add ports to the VM
    #[arg(long)]
    pub(super) no_add_ports: bool,

    /// Leave ports that were added
    #[arg(long)]
    pub(super) keep_ports: bool,
}

#[derive(Debug, Clone, ClapArgs)]
pub(super) struct KeepArgs {
    /// Keep at most this much of the trail: the oldest segments go (10G)
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub(super) retain_size: Option<u64>,

    /// Keep at most this long of the trail: the oldest segments go (24h)
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(super) retain_time: Option<Duration>,
}

/// Live-migrate a VM together with its recording
///
/// If a recorder is running on TRAIL, it is asked to do it, goes on recording at the destination, and this command ends
/// when the VM runs there. Otherwise this command records itself, continuing TRAIL if it exists, and goes on
/// until Ctrl-C.
///
/// On `pre-switchover` the stopped source is drained of what its ports still hold, no longer than the drain budget;
/// whatever that leaves is replayed by the agent. Ctrl-C before the switchover cancels: the VM and its recording go on at
/// the source.
///
/// Exit code 0: the VM runs at the destination; 3: it was refused, cancelled or failed and the VM runs at the source;
/// 4: it cannot be told where the VM runs; 1: another error.
#[derive(Debug, ClapArgs)]
pub(super) struct MigrateArgs {
    /// QMP socket of the VM
    #[arg(long, value_name = "PATH")]
    pub(super) from_qmp: PathBuf,

    /// QMP socket of the destination, started with `-incoming defer` and the same devices
    #[arg(long, value_name = "PATH")]
    pub(super) to_qmp: PathBuf,

    /// Migration URI that the destination listens on and the source connects to (tcp:HOST:PORT, unix:PATH)
    #[arg(long)]
    pub(super) uri: String,

    /// Directory of the trail
    #[arg(short, long = "output", visible_alias = "trail", value_name = "TRAIL")]
    pub(super) output: PathBuf,

    /// Hold the stopped VM no longer than this for its trace
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "50ms")]
    pub(super) drain_budget: Duration,

    #[command(flatten)]
    pub(super) what: WhatArgs,

    #[command(flatten)]
    pub(super) ports: PortArgs,

    /// Where a port of the destination is that QEMU does not tell: NAME=PATH, may be repeated
    #[arg(long = "to-port", value_name = "NAME=PATH", value_parser = port)]
    pub(super) to_ports: Vec<(String, PathBuf)>,

    #[command(flatten)]
    pub(super) keep: KeepArgs,

    /// One JSON object a line on standard output instead of progress
    #[arg(long)]
    pub(super) json: bool,
}

/// End the recording of a trail in order
///
/// Returns when the trail is complete. Exit codes as of `vmtrail record`.
#[derive(Debug, ClapArgs)]
pub(super) struct StopArgs {
    /// Directory of the trail
    pub(super) trail: PathBuf,

    /// The answer as JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Write a line into the trace of a VM that is being recorded
#[derive(Debug, ClapArgs)]
pub(super) struct MarkArgs {
    /// Directory of the trail
    pub(super) trail: PathBuf,

    /// The line
    pub(super) text: String,
}

/// Prove that a trail is whole, or say what is missing
///
/// Reads every stored page. The verdict is `continuous`, `overrun` (the guest's ring overwrote events before they were
/// read: how many, when), `lossy` (frames are missing: how many, where, why) or `unknown` (the end cannot be known).
///
/// Exit code 0 only for `continuous`; 10 overrun, 11 lossy, 12 unknown; 1: an error. docs/trail.md documents the JSON.
#[derive(Debug, ClapArgs)]
pub(super) struct VerifyArgs {
    /// Directory of the trail
    pub(super) trail: PathBuf,

    /// As one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// Show what is in a trail
#[derive(Debug, ClapArgs)]
pub(super) struct InfoArgs {
    /// Directory of the trail
    pub(super) trail: PathBuf,

    /// As one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Clone, ClapArgs)]
pub(super) struct SelectArgs {
    /// Run of the agent, as `vmtrail info` names it (default: the last one)
    #[arg(long, value_name = "SESSION")]
    pub(super) session: Option<String>,

    /// Only these CPUs (0,2,3)
    #[arg(long = "cpu", value_name = "CPUS", value_delimiter = ',')]
    pub(super) cpus: Vec<u32>,

    /// Clock of the times: the guest's trace clock, on which a blackout is no time, or the hosts', on which it is a gap
    #[arg(long, value_enum, default_value_t = ClockArg::Guest)]
    pub(super) clock: ClockArg,

    /// From this time on, in nanoseconds of the clock
    #[arg(long, value_name = "NS")]
    pub(super) since: Option<u64>,

    /// Up to this time
    #[arg(long, value_name = "NS")]
    pub(super) until: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ClockArg {
    Guest,
    Host,
}

/// Show a trail as text, in trace-cmd's layout
///
/// Migrations, blackouts and losses stand between the events, as lines of the pseudo task <vmtrail>. Takes a trace.dat (version 6 or
/// 7) of trace-cmd as well.
#[derive(Debug, ClapArgs)]
pub(super) struct ReportArgs {
    /// Directory of the trail, or a trace.dat
    pub(super) trail: PathBuf,

    #[command(flatten)]
    pub(super) select: SelectArgs,

    #[command(flatten)]
    pub(super) lines: LinesArgs,
}

/// Show the events of a trail while it is being recorded, through its migrations
///
/// Begins with what is stored from now on, and ends when the recording does.
#[derive(Debug, ClapArgs)]
pub(super) struct TailArgs {
    /// Directory of the trail
    pub(super) trail: PathBuf,

    /// Only these CPUs (0,2,3)
    #[arg(long = "cpu", value_name = "CPUS", value_delimiter = ',')]
    pub(super) cpus: Vec<u32>,

    #[command(flatten)]
    pub(super) lines: LinesArgs,
}

#[derive(Debug, Clone, ClapArgs)]
pub(super) struct LinesArgs {
    /// Only these events: 'event == sched_switch && prev_comm =~ "qemu*"'; names are fields, or event, system, cpu, pid, task, time
    #[arg(long = "where", value_name = "FILTER")]
    pub(super) filter: Option<String>,

    /// One JSON object a line
    #[arg(long)]
    pub(super) json: bool,

    /// Times with nine digits
    #[arg(short = 't', long)]
    pub(super) nanoseconds: bool,

    /// Fields as numbers instead of the events' own text
    #[arg(short = 'R', long)]
    pub(super) raw: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// For trace-cmd and KernelShark
    TraceDat,
    /// For ui.perfetto.dev
    Perfetto,
    /// A directory for babeltrace2 and Trace Compass
    Ctf,
}

/// Write a trail as a file for other tools
///
/// The file appears under its name only when it is whole.
#[derive(Debug, ClapArgs)]
pub(super) struct ExportArgs {
    /// Directory of the trail
    pub(super) trail: PathBuf,

    /// For which tool
    #[arg(long, value_enum)]
    pub(super) to: Format,

    /// The file
    #[arg(short, long, value_name = "FILE")]
    pub(super) output: PathBuf,

    /// Replace a file that exists
    #[arg(long)]
    pub(super) force: bool,

    /// trace-dat: version 6, for old tools (default: 7)
    #[arg(long)]
    pub(super) v6: bool,

    /// trace-dat: version 7 without compression (default: zstd)
    #[arg(long)]
    pub(super) uncompressed: bool,

    #[command(flatten)]
    pub(super) select: SelectArgs,
}

fn port(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok((name.into(), path.into()))
        }
        _ => Err("expected NAME=PATH".into()),
    }
}

/// A time: a number with a unit.
fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_unit(text)?;
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" | "" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        other => {
            return Err(format!(
                "\"{other}\" is no unit of time (us, ms, s, m, h, d)"
            ));
        }
    };
    Duration::try_from_secs_f64(number * scale).map_err(|error| error.to_string())
}

/// A number of bytes: K, M, G, T are powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split_unit(text)?;
    let shift = match unit.trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "K" | "k" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        other => return Err(format!("\"{other}\" is no unit of size (K, M, G, T)")),
    };
    let value = number * f64::from(1u32 << (shift % 30)) * f64::from(1u32 << (shift / 30 * 30));
    if !(0.0..1e18).contains(&value) {
        return Err("out of range".into());
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked to be between 0 and 10^18"
    )]
    let whole = value as u64;
    Ok(whole)
}

fn split_unit(text: &str) -> Result<(f64, &str), String> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number = number
        .parse()
        .map_err(|_| format!("\"{text}\" does not begin with a number"))?;
    Ok((number, unit.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn sizes_and_times_are_read_with_their_units() {
        assert_eq!(bytes("4M"), Ok(4 << 20));
        assert_eq!(bytes("1.5G"), Ok(3 << 29));
        assert_eq!(bytes("512KiB"), Ok(512 << 10));
        assert_eq!(bytes("2T"), Ok(2 << 40));
        assert!(bytes("4X").is_err() && bytes("M").is_err() && bytes("9999999T").is_err());
        assert_eq!(duration("50ms"), Ok(Duration::from_millis(50)));
        assert_eq!(duration("1.5h"), Ok(Duration::from_secs(5400)));
        assert!(duration("-1s").is_err() && duration("3 weeks").is_err());
    }
}
