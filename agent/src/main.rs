//! Puts the kernel trace of this guest on its virtio-serial ports.

use std::io::Write;
use std::process::ExitCode;

use vmtrail_agent::args::{self, Args, Command};
use vmtrail_agent::pump::{Options, Pump, PumpError};
use vmtrail_agent::tracefs::{Instance, TraceError, Tracefs};

fn main() -> ExitCode {
    let args = match args::parse(std::env::args_os().skip(1)) {
        Ok(Command::Run(args)) => args,
        Ok(Command::Help) => return print(args::HELP),
        Ok(Command::Version) => {
            return print(concat!("vmtrail-agent ", env!("CARGO_PKG_VERSION"), "\n"));
        }
        Err(error) => {
            eprintln!("vmtrail-agent: {error}");
            return ExitCode::from(2);
        }
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmtrail-agent: {error}");
            ExitCode::from(status(&error))
        }
    }
}

fn run(args: Args) -> Result<(), PumpError> {
    let tracefs = Tracefs::find(args.tracefs.as_deref()).map_err(PumpError::Trace)?;
    let instance = Instance::create(&tracefs, &args.instance).map_err(PumpError::Trace)?;
    if instance.was_leftover() {
        eprintln!(
            "vmtrail-agent: the instance {:?} was left behind by an agent that was killed; it was emptied, and a new session begins",
            args.instance
        );
    }
    let options = Options {
        source: args.source,
        retain_bytes: args.retain_kib << 10,
        idle_flush_ns: args.idle_flush_ms * 1_000_000,
        settings: args.settings,
    };
    Pump::new(instance, options)?.run()
}

/// Documented in the help.
fn status(error: &PumpError) -> u8 {
    match error {
        PumpError::Trace(TraceError::NoTracefs(_)) => 3,
        PumpError::Trace(TraceError::NoPermission(_)) => 4,
        PumpError::Trace(TraceError::InUse(_)) => 5,
        PumpError::Trace(TraceError::Refused(_)) => 6,
        PumpError::Trace(TraceError::Io { .. }) | PumpError::Io { .. } => 1,
    }
}

fn print(text: &str) -> ExitCode {
    // A reader that closed early has read what it wanted.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}
