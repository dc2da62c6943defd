//! The way back: after an attempt that failed or was cancelled the source streams again within a bound, and the next attempt succeeds.

use super::{Judge, Violation};

/// Judges whether the source streams again: `durable_ns` is when a page that was made after the attempt's end became durable.
///
/// # Errors
///
/// It does not.
pub fn judge_streams(failed_attempt: u64, streams: bool, after_ns: u64) -> Result<(), Violation> {
    if streams {
        return Ok(());
    }
    let text = format!(
        "attempt {failed_attempt} did not move the VM, and nothing made since is durable {} ms later",
        after_ns / 1_000_000
    );
    Err(Violation::of(Judge::WayBack, text))
}

/// Judges an attempt without any fault, begun after the faults stopped.
///
/// # Errors
///
/// It did not commit.
pub fn judge_next(outcome: &str, committed: bool) -> Result<(), Violation> {
    if committed {
        return Ok(());
    }
    let text = format!("an attempt without faults ended as {outcome}");
    Err(Violation::of(Judge::WayBack, text))
}
