//! Building what the lab runs: the guest's two static programs and the host's `vmtrail`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::process::output_of;
use super::setup::Step;
use super::{Lab, repository};

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// There is no libc in the guest.
const STATIC: &str = "-C target-feature=+crt-static";

/// Builds the guest agent as it is shipped: static and small.
///
/// Its own target directory, because other RUSTFLAGS in the shared one would rebuild the world back and forth.
///
/// # Errors
///
/// If cargo fails; its words are on the terminal.
pub fn agent(lab: &Lab) -> Result<PathBuf> {
    let _alone = lab.lock("build-agent")?;
    let target_dir = lab.dir("target-agent")?;
    let mut cargo = cargo();
    cargo
        .args(["build", "--quiet", "--profile", "agent", "--target", TARGET])
        .args(["-p", "vmtrail-agent", "--bin", "vmtrail-agent"])
        .arg("--target-dir")
        .arg(&target_dir)
        .env("RUSTFLAGS", STATIC);
    let path = target_dir.join(TARGET).join("agent/vmtrail-agent");
    run_cargo(cargo, "building the guest agent (static)", path.is_file())?;
    Ok(path)
}

/// Path of a vmtrail to use as it is: an installed one, or one of another version.
pub const VMTRAIL_VARIABLE: &str = "VMTRAIL_BINARY";

/// Builds the host's `vmtrail`, optimized, into the target directory that cargo uses anyway; unless
/// [`VMTRAIL_VARIABLE`] names one.
///
/// # Errors
///
/// If cargo fails; its words are on the terminal.
pub fn vmtrail() -> Result<PathBuf> {
    if let Some(binary) = env::var_os(VMTRAIL_VARIABLE) {
        return Ok(repository().join(binary));
    }
    let mut cargo = cargo();
    cargo.args([
        "build",
        "--quiet",
        "--release",
        "-p",
        "vmtrail",
        "--bin",
        "vmtrail",
    ]);
    let path = target_dir()?.join("release/vmtrail");
    run_cargo(cargo, "building vmtrail (release)", path.is_file())?;
    Ok(path)
}

/// Builds the guest's workload.
///
/// By rustc alone: it uses nothing but the standard library, and cargo would first build everything that the rest of
/// this package needs, a second time, statically.
///
/// # Errors
///
/// If rustc fails, with its words.
pub fn workload(lab: &Lab) -> Result<PathBuf> {
    let _alone = lab.lock("build-workload")?;
    let source = repository().join("tests/src/bin/guest-workload.rs");
    let text = fs::read(&source).with_context(|| format!("failed to read {}", source.display()))?;
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = output_of(
        Command::new(&rustc)
            .arg("--version")
            .current_dir(repository()),
    )?;
    let name = format!(
        "guest-workload-{}",
        short_hash(&[&text, version.as_bytes()])
    );
    let path = lab.dir("guest")?.join(name);
    if path.is_file() {
        return Ok(path);
    }
    let step = Step::begin("building the guest's workload (static)");
    let unfinished = path.with_extension("unfinished");
    output_of(
        Command::new(&rustc)
            .current_dir(repository())
            .args([
                "--edition",
                "2024",
                "--crate-name",
                "guest_workload",
                "--target",
                TARGET,
            ])
            .args(STATIC.split(' '))
            .args(["-O", "-C", "strip=symbols", "-C", "panic=abort", "-o"])
            .arg(&unfinished)
            .arg(&source),
    )?;
    fs::rename(&unfinished, &path)
        .with_context(|| format!("failed to put {} in place", path.display()))?;
    step.end();
    Ok(path)
}

/// Twelve hexadecimal digits that name a content.
#[must_use]
pub fn short_hash(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(repository());
    command
}

fn run_cargo(mut cargo: Command, what: &str, built_before: bool) -> Result<()> {
    // Cargo itself finds out whether there is work; only a first build takes long enough to be announced.
    let step = (!built_before).then(|| Step::begin(what));
    let status = cargo.status().context("failed to start cargo")?;
    if !status.success() {
        bail!("failed {what}: cargo says {status}");
    }
    if let Some(step) = step {
        step.end();
    }
    Ok(())
}

fn target_dir() -> Result<PathBuf> {
    if let Some(dir) = env::var_os("CARGO_TARGET_DIR") {
        return Ok(repository().join(dir));
    }
    let metadata = output_of(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: serde_json::Value =
        serde_json::from_str(&metadata).context("failed to read cargo's metadata")?;
    metadata["target_directory"]
        .as_str()
        .map(|dir| Path::new(dir).to_owned())
        .context("failed to find the target directory in cargo's metadata")
}
