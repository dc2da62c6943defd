//! `cargo lab`: see `cargo lab --help`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use vmtrail_tests::lab::guest::{Accel, Backend, Naming, Ports, VmSpec};
use vmtrail_tests::lab::initramfs::{self, Exporter, Userland};
use vmtrail_tests::lab::kernel::Release;
use vmtrail_tests::lab::{Lab, build, setup};

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
    Naive,
}

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
        Cmd::Naive => {
            let ready = setup::setup(&lab, Release::V6_1)?;
            let events = ["sched", "irq", "timer", "kmem", "raw_syscalls"].map(str::to_owned);
            let n = vmtrail_tests::lab::naive::run(
                &lab,
                &ready,
                &lab.dir("demo")?.join("x"),
                &events,
                3,
                std::time::Duration::from_secs(3),
            )?;
            println!(
                "{} {} pages {} events {:?}",
                n.finding, n.evidence.pages, n.evidence.events, n.migrations
            );
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

fn accel(text: &str) -> Result<Accel, String> {
    match text {
        "tcg" => Ok(Accel::Tcg),
        "kvm" => Ok(Accel::Kvm),
        other => Err(format!("`{other}` is neither tcg nor kvm")),
    }
}
