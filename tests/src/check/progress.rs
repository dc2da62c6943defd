//! Progress: once the faults stop, everything that a living session made and its ring did not overwrite becomes durable.

use std::collections::BTreeMap;

use super::{Judge, Made, Stream, Violation};

/// The first stream that is not yet complete: with its pages made, overwritten and durable.
#[must_use]
pub fn incomplete(
    made: &Made,
    durable_pages: &BTreeMap<Stream, u64>,
) -> Option<(Stream, u64, u64, u64)> {
    made.streams
        .iter()
        .filter(|(_, made)| !made.ended)
        .map(|(&stream, made)| {
            let durable = durable_pages.get(&stream).copied().unwrap_or(0);
            (stream, made.pages, made.overwritten.len() as u64, durable)
        })
        .find(|&(_, pages, overwritten, durable)| durable + overwritten < pages)
}

/// Judges the end of a run.
///
/// # Errors
///
/// A stream is not complete `after_ns` after the last fault.
pub fn judge(
    made: &Made,
    durable_pages: &BTreeMap<Stream, u64>,
    after_ns: u64,
) -> Result<(), Violation> {
    let Some(((session, stream), pages, overwritten, durable)) = incomplete(made, durable_pages)
    else {
        return Ok(());
    };
    let text = format!(
        "{stream} of session {session}: of {pages} pages, {overwritten} overwritten, only {durable} are durable {} ms after the last fault",
        after_ns / 1_000_000
    );
    Err(Violation::of(Judge::Progress, text))
}
