//! No false loss: what is declared missing is held by nobody any more.

use std::collections::BTreeMap;

use vmtrail_continuity::ledger::Gap;
use vmtrail_wire::Sequence;

use super::{Judge, Stream, Violation};

/// Judges a declared gap. `freed` is the first frame that each stream's agent still holds or has yet to make.
///
/// # Errors
///
/// The agent still holds a frame that is declared lost.
pub fn judge(gap: &Gap, freed: &BTreeMap<Stream, Sequence>) -> Result<(), Violation> {
    let held = freed
        .get(&(gap.session, gap.stream))
        .copied()
        .unwrap_or_default();
    if gap.to > held {
        let text = format!(
            "frames {} to {} of {} of session {} are declared lost ({:?}), and the agent holds what is from {held} on",
            gap.from, gap.to, gap.stream, gap.session, gap.cause
        );
        return Err(Violation::of(Judge::NoFalseLoss, text));
    }
    Ok(())
}
