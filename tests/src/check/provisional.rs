//! Nothing is believed of a destination that does not run: its bytes may be made again by a source that goes on.

use super::{Judge, Violation};

/// Judges a commit to, or bytes read from, a residency.
///
/// # Errors
///
/// The VM never ran there.
pub fn judge(what: &str, residency: usize, ran: bool) -> Result<(), Violation> {
    if ran {
        return Ok(());
    }
    let text = format!("{what} residency {residency}, where the VM never ran");
    Err(Violation::of(Judge::Provisional, text))
}
