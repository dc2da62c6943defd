//! `cargo lab`: see `cargo lab --help`.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use vmtrail_tests::lab::demo::{self, Parts, Plan};
use vmtrail_tests::lab::guest::{Accel, Backend, Naming, Ports, VmSpec};
use vmtrail_tests::lab::initramfs::{self, Exporter, Userland};
use vmtrail_tests::lab::kernel::Release;
use vmtrail_tests::lab::{Lab, bench, build, repository, setup};

/// Boots real guests in QEMU, traces them, moves them, and checks that nothing is missing.
///
/// Everything the lab downloads and builds lies in `.lab` of the repository (or in VMTRAIL_LAB_DIR). Only installing QEMU
/// needs root. Guests run emulated, so no KVM is needed.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab")]
struct Arguments {
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Debug, Subcommand)]
enum Cmd {
    /// Installs QEMU and downloads a guest kernel and busybox, where they are missing
    Setup {
        /// The guest kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.1")]
        kernel: Release,
    },
    /// Boots a guest with its console on this terminal
    Shell {
        /// The guest kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.1")]
        kernel: Release,
        /// `tcg` (emulated, works everywhere) or `kvm`
        #[arg(long, default_value = "tcg", value_parser = accel)]
        accel: Accel,
        /// Virtual CPUs
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
        vcpus: u32,
        /// Leave the guest alone instead of running the busy workload
        #[arg(long)]
        quiet: bool,
    },
    /// Records a busy guest through live migrations, judges the trace, and moves it the usual way for contrast
    ///
    /// Exit code 0: the judge found every mark of the guest exactly once and in order, and `vmtrail verify` says continuous; 2: not
    /// so; 1: the lab failed.
    Demo {
        /// The guest kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.1")]
        kernel: Release,
        /// `tcg` (emulated, works everywhere) or `kvm`
        #[arg(long, default_value = "tcg", value_parser = accel)]
        accel: Accel,
        /// How many live migrations
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
        moves: u32,
        /// Only the usual way: copied ports, and a new reader after the guest runs elsewhere
        #[arg(long)]
        naive: bool,
    },
    /// Runs the demo's recording again and again, and sums up
    Soak {
        /// How many runs
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
        runs: u32,
        /// The guest kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.1")]
        kernel: Release,
        /// How many live migrations in each
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
        moves: u32,
    },
    /// Runs everything that is tested: unit tests, formats, house rules, and scenarios with real guests
    Test {
        /// Passed on to `cargo test`
        #[arg(last = true)]
        more: Vec<String>,
    },
    /// Compares QEMU's downtime with vmtrail (recording, draining) and without any port or reader
    BenchBlackout {
        /// How many pairs of migrations
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
        pairs: u32,
        /// The guest kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.1")]
        kernel: Release,
        /// `tcg` (emulated, works everywhere) or `kvm`
        #[arg(long, default_value = "tcg", value_parser = accel)]
        accel: Accel,
    },
}

/// Exit code of a trace that is not whole.
const NOT_WHOLE: u8 = 2;

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Cmd) -> Result<ExitCode> {
    let lab = Lab::open()?;
    match command {
        Cmd::Setup { kernel } => {
            if setup::is_ready(&lab, kernel)? {
                println!("lab: ready, nothing to do ({})", lab.root().display());
            } else {
                setup::setup(&lab, kernel)?;
                println!("lab: ready ({})", lab.root().display());
            }
        }
        Cmd::Demo {
            kernel,
            accel,
            moves,
            naive,
        } => {
            let plan = Plan {
                kernel,
                accel,
                moves,
                ..Plan::default()
            };
            let parts = Parts::get(&lab, plan.kernel)?;
            let dir = demo::run_dir(&lab, "demo")?;
            let recorded = if naive {
                None
            } else {
                Some(demo::record(&lab, &parts, &plan, &dir)?)
            };
            let usual = demo::usual_way(&lab, &parts, &plan, &dir)?;
            println!("{}", demo::table(recorded.as_ref(), Some(&usual), &dir));
            if let Some(recorded) = recorded {
                if !recorded.is_whole() {
                    println!("{}", recorded.finding);
                    return Ok(ExitCode::from(NOT_WHOLE));
                }
            } else {
                println!("{}", usual.finding);
                if !usual.finding.is_whole() {
                    return Ok(ExitCode::from(NOT_WHOLE));
                }
            }
        }
        Cmd::Soak {
            runs,
            kernel,
            moves,
        } => return soak(&lab, runs, kernel, moves),
        Cmd::Test { more } => return test(&lab, &more),
        Cmd::BenchBlackout {
            pairs,
            kernel,
            accel,
        } => {
            let parts = Parts::get(&lab, kernel)?;
            let dir = demo::run_dir(&lab, "bench-blackout")?;
            let blackouts = bench::blackout(&lab, &parts, accel, pairs, &dir)?;
            println!("{}", bench::blackout_table(&blackouts));
        }
        Cmd::Shell {
            kernel,
            accel,
            vcpus,
            quiet,
        } => {
            let ready = setup::setup(&lab, kernel)?;
            let agent = build::agent(&lab)?;
            let userland = Userland {
                exporter: Exporter::Agent(Vec::new()),
                load: if quiet {
                    initramfs::Load::Quiet
                } else {
                    initramfs::Load::Busy
                },
                shell: true,
                ..Userland::default()
            };
            let image = initramfs::image(
                &lab,
                &ready,
                Some(&agent),
                &build::workload(&lab)?,
                &userland,
            )?;
            let spec = VmSpec {
                vcpus,
                accel,
                ports: Ports::Present {
                    count: vcpus,
                    naming: Naming::Vmtrail,
                    backend: Backend::Pipe,
                },
                ..VmSpec::new("shell", &ready.kernel.image, &image)
            };
            spec.boot_on_terminal(|guest| {
                println!("The guest boots. From another terminal, record it with");
                println!();
                println!(
                    "    cargo run --release -p vmtrail -- record --qmp {} -e sched -o shell.trail",
                    guest.qmp().display()
                );
                println!();
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn soak(lab: &Lab, runs: u32, kernel: Release, moves: u32) -> Result<ExitCode> {
    let plan = Plan {
        kernel,
        moves,
        ..Plan::default()
    };
    let parts = Parts::get(lab, kernel)?;
    let (mut continuous, mut found, mut missing, mut doubled) = (0, 0, 0, 0);
    for run in 1..=runs {
        let dir = demo::run_dir(lab, "soak")?;
        let recorded = demo::record(lab, &parts, &plan, &dir)?;
        println!(
            "run {run} of {runs}: {}, {} marks found, {} missing, {} doubled, {} out of order ({})",
            recorded.verified.verdict(),
            recorded.finding.found(),
            recorded.finding.missing(),
            recorded.finding.doubled(),
            recorded.finding.out_of_order(),
            dir.display()
        );
        continuous += u32::from(recorded.is_whole());
        found += recorded.finding.found();
        missing += recorded.finding.missing();
        doubled += recorded.finding.doubled();
        if recorded.is_whole() {
            // Hundreds of megabytes that nobody will look at.
            std::fs::remove_dir_all(&dir)
                .with_context(|| format!("failed to remove {}", dir.display()))?;
        } else {
            println!(
                "{}{}",
                recorded.finding, recorded.verified.report["reasons"]
            );
        }
    }
    println!(
        "soak: {continuous} of {runs} runs whole by judge and verify, {found} marks found, {missing} missing, {doubled} doubled"
    );
    Ok(if continuous == runs {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NOT_WHOLE)
    })
}

/// What the tests need is made first, so that no test waits for a compiler while a guest runs.
fn test(lab: &Lab, more: &[String]) -> Result<ExitCode> {
    for kernel in [Release::V6_1, Release::V6_12] {
        Parts::get(lab, kernel)?;
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        .args(["test", "--workspace", "--no-fail-fast"])
        .args(more)
        .current_dir(repository())
        .status()
        .context("failed to start cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn accel(text: &str) -> Result<Accel, String> {
    match text {
        "tcg" => Ok(Accel::Tcg),
        "kvm" => Ok(Accel::Kvm),
        other => Err(format!("`{other}` is neither tcg nor kvm")),
    }
}
