//! The command line: what was typed (`args`), what it means and does (`record`, `read`, `show`).

mod args;
mod progress;
mod read;
mod record;
mod show;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Args, Command, LogFormat};

/// Exit codes besides 0 for success, as documented in README.md and docs/trail.md.
pub mod exit {
    /// Something failed; one line on standard error says what.
    pub const ERROR: u8 = 1;
    /// The command line is wrong (clap's code).
    pub const USAGE: u8 = 2;
    /// The migration did not happen: the VM runs at the source, and is recorded there if it was before.
    pub const NOT_MIGRATED: u8 = 3;
    /// Where the VM runs cannot be told: look before you start anything.
    pub const UNKNOWN_PLACE: u8 = 4;
    /// The recording ended, but the trail may lack its last pages.
    pub const INCOMPLETE: u8 = 5;
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let args = Args::parse();
    start_log(&args);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => {
            let outcome = runtime.block_on(run(args.command));
            // A read that blocks in the kernel must not keep the program from ending.
            runtime.shutdown_timeout(std::time::Duration::from_secs(1));
            outcome
        }
        Err(error) => Err(error.into()),
    };
    match outcome {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vmtrail: {error:#}");
            ExitCode::from(exit::ERROR)
        }
    }
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Record(args) => record::record(args).await,
        Command::Migrate(args) => record::migrate(args).await,
        Command::Stop(args) => record::stop(&args).await,
        Command::Mark(args) => record::mark(&args).await,
        Command::Verify(args) => read::verify(&args),
        Command::Info(args) => read::info(&args),
        Command::Report(args) => show::report(&args),
        Command::Tail(args) => show::tail(&args),
        Command::Export(args) => show::export(&args),
    }
}

fn start_log(args: &Args) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    match args.log_format {
        LogFormat::Text => log.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => log.json().init(),
    }
}

/// `vmtrail … | head` is no failure.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
