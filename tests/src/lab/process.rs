//! Running other programs: quietly, with their words kept for the day they fail.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{env, fs};

use anyhow::{Context as _, Result, bail};

/// How many of a failed program's last lines an error carries.
const LAST_LINES: usize = 20;

/// Runs `command` to its end and returns what it wrote to standard output.
///
/// # Errors
///
/// If it cannot be started or does not succeed; the error carries the last lines it wrote.
pub fn output_of(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("failed to start `{shown}`"))?;
    if !output.status.success() {
        let mut words = String::from_utf8_lossy(&output.stdout).into_owned();
        words.push_str(&String::from_utf8_lossy(&output.stderr));
        bail!(
            "failed to run `{shown}`: {}\n{}",
            output.status,
            last_lines(&words)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `command` to its end with both its outputs in the file `log`.
///
/// # Errors
///
/// If it cannot be started or does not succeed; the error carries the last lines of the log and its path.
pub fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let shown = shown(command);
    let out = fs::File::create(log)
        .with_context(|| format!("failed to create the log {}", log.display()))?;
    let err = out
        .try_clone()
        .with_context(|| format!("failed to share the log {}", log.display()))?;
    let status = command
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .status()
        .with_context(|| format!("failed to start `{shown}`"))?;
    if !status.success() {
        let words = fs::read(log).unwrap_or_default();
        bail!(
            "failed to run `{shown}`: {status} (whole log: {})\n{}",
            log.display(),
            last_lines(&String::from_utf8_lossy(&words))
        );
    }
    Ok(())
}

/// Whether a program of this name is to be found in PATH.
#[must_use]
pub fn in_path(program: &str) -> bool {
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// The last lines of `text`, indented, for an error or a report.
#[must_use]
pub fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(LAST_LINES);
    lines[from..]
        .iter()
        .map(|line| format!("    {line}\n"))
        .collect()
}

fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program()];
    words.extend(command.get_args());
    words
        .iter()
        .map(|word| OsStr::to_string_lossy(word))
        .collect::<Vec<_>>()
        .join(" ")
}
