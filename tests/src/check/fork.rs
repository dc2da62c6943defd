//! A guest that was put back to an earlier state of its history makes other frames under numbers that the trail holds. That is declared as
//! a fork, or the trail would silently hold one line's frames and lack the other's. And only that is.

use std::collections::BTreeMap;

use vmtrail_wire::Sequence;

use super::{Entry, Judge, Stream, Violation};

/// Judges a trail at the end. `restored` is the sequence each stream was put back to, if the VM was; `told` what the agent's first Hello
/// said that it will make next; `held` what the trail held durably before. A guest that ran on past `held` before it was first asked
/// cannot be told from one that was never put back: its Hello says nothing unusual, and the agent lets go of what is below `held`.
///
/// # Errors
///
/// A fork that is not declared, or one that is none.
pub fn judge(
    trail: &[Entry],
    restored: Option<&BTreeMap<Stream, Sequence>>,
    told: &BTreeMap<Stream, Sequence>,
    held: &BTreeMap<Stream, Sequence>,
) -> Result<(), Violation> {
    let declared = |stream: Stream| {
        trail
            .iter()
            .any(|entry| matches!(entry, Entry::Fork { stream: of, .. } if *of == stream))
    };
    for entry in trail {
        let Entry::Fork { stream, have, next } = entry else {
            continue;
        };
        let real = restored.and_then(|restored| restored.get(stream));
        if real.is_none_or(|put_back_to| put_back_to >= have) {
            let text = format!(
                "{} is declared to be at {next} where the trail is at {have}, and it was put back to {real:?}",
                stream.1
            );
            return Err(Violation::of(Judge::Fork, text));
        }
    }
    for (&stream, &put_back_to) in restored.into_iter().flatten() {
        let held = held.get(&stream).copied().unwrap_or_default();
        if let Some(&told) = told.get(&stream)
            && told < held
            && !declared(stream)
        {
            let text = format!(
                "{} was put back to {put_back_to} while the trail holds what is below {held}, said that {told} is next, and nobody says so",
                stream.1
            );
            return Err(Violation::of(Judge::Fork, text));
        }
    }
    Ok(())
}
