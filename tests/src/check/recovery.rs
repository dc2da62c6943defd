//! From any crash point the trail recovers to a prefix of what was written, never less than what was synced.

use super::{Entry, Judge, Violation};

/// Judges a recovery: `written` is the trail before the crash, the first `synced` entries of which the disk had confirmed.
///
/// # Errors
///
/// Something is there that was not written, or something is gone that was confirmed.
pub fn judge(written: &[Entry], synced: usize, recovered: &[Entry]) -> Result<(), Violation> {
    if recovered.len() < synced {
        let text = format!(
            "{} entries were recovered, {synced} were confirmed as synced",
            recovered.len()
        );
        return Err(Violation::of(Judge::Recovery, text));
    }
    let differs = recovered
        .iter()
        .enumerate()
        .find(|(index, entry)| written.get(*index) != Some(entry));
    if let Some((index, _)) = differs {
        let text = format!("entry {index} of the recovered trail is not what was written");
        return Err(Violation::of(Judge::Recovery, text));
    }
    Ok(())
}
