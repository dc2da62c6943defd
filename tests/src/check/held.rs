//! A guest is never held longer than the drain budget because of us.

use super::{Judge, Violation};

/// Judges one hold: from when the recorder heard that the source waits to when it let go, less the time in which the recorder itself
/// was not let run, in nanoseconds.
///
/// # Errors
///
/// It was held longer.
pub fn judge(held_ns: u64, budget_ns: u64) -> Result<(), Violation> {
    if held_ns > budget_ns {
        let text = format!("the guest was held for {held_ns} ns, the budget is {budget_ns} ns");
        return Err(Violation::of(Judge::Held, text));
    }
    Ok(())
}
