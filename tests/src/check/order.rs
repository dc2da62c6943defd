//! Per CPU, the trail's order is the order of the sequences, and epochs do not go back.

use std::collections::BTreeMap;

use super::{Entry, Judge, Stream, Violation};

/// Judges what lies in a trail.
///
/// # Errors
///
/// The first frame that stands in the wrong place.
pub fn judge(trail: &[Entry]) -> Result<(), Violation> {
    let mut last: BTreeMap<Stream, (u64, u64, u64)> = BTreeMap::new();
    for entry in trail {
        let Entry::Frame { header, .. } = entry else {
            continue;
        };
        let here = (
            header.sequence.0,
            header.epoch.0,
            header.first_page + u64::from(header.page_count),
        );
        let before = last.insert((header.session, header.stream), here);
        let Some((sequence, epoch, pages)) = before else {
            continue;
        };
        let name = format!("{} of session {}", header.stream, header.session);
        if header.sequence.0 < sequence {
            let text = format!("{name}: frame {} behind frame {sequence}", header.sequence);
            return Err(Violation::of(Judge::Order, text));
        }
        if header.epoch.0 < epoch {
            let text = format!(
                "{name}, frame {}: epoch {} behind epoch {epoch}",
                header.sequence, header.epoch
            );
            return Err(Violation::of(Judge::Order, text));
        }
        if header.first_page < pages && header.sequence.0 != sequence {
            let text = format!(
                "{name}, frame {}: begins at page {} of the stream, behind {pages}",
                header.sequence, header.first_page
            );
            return Err(Violation::of(Judge::Order, text));
        }
    }
    Ok(())
}
