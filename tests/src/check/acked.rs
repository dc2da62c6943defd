//! Acknowledged implies durable: of whatever a host tells the agent to let go of, and of whatever the agent lets go of.

use std::collections::BTreeMap;

use vmtrail_wire::Sequence;

use super::{Judge, Stream, Violation};

/// Judges an Ack, the `resume_from` of a Hello (`what` names it), or pages that the agent lets go of: all below `next` must be durable,
/// and `durable` is what the disk says it synced.
///
/// # Errors
///
/// It is not.
pub fn judge(
    what: &str,
    stream: Stream,
    next: Sequence,
    durable: &BTreeMap<Stream, Sequence>,
) -> Result<(), Violation> {
    let synced = durable.get(&stream).copied().unwrap_or_default();
    if next > synced {
        let (session, stream) = stream;
        let text = format!(
            "{what} names {next} of {stream} of session {session}, of which the disk holds what is below {synced}"
        );
        return Err(Violation::of(Judge::AckedIsDurable, text));
    }
    Ok(())
}
