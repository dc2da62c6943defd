//! Exactly once, and no silent loss: every page that a guest made lies in the trail once and as it was made; or the ring overwrote it;
//! or it is covered by a declared gap; or it stands behind the last page of a session whose agent died.

use std::collections::BTreeMap;

use super::page::{PAGE_SIZE, Page};
use super::{Entry, Judge, Made, Stream, Violation};

#[derive(Default)]
struct Seen {
    next: u64,
    /// Pages that declared gaps before the next frame excuse.
    excused: u64,
}

/// Judges what lies in a trail.
///
/// # Errors
///
/// The first page that is doubled, changed, or silently missing.
pub fn judge(made: &Made, trail: &[Entry]) -> Result<(), Violation> {
    let hurt = |text: String| Err(Violation::of(Judge::ExactlyOnce, text));
    let mut streams: BTreeMap<Stream, Seen> = BTreeMap::new();
    for entry in trail {
        match entry {
            Entry::Gap(gap) => {
                let seen = streams.entry((gap.session, gap.stream)).or_default();
                seen.excused = seen.excused.saturating_add(gap.pages.unwrap_or(u64::MAX));
            }
            Entry::Frame { header, pages } => {
                let stream = (header.session, header.stream);
                let name = format!("{} of session {}", header.stream, header.session);
                let Some(made) = made.streams.get(&stream) else {
                    return hurt(format!("{name} was never made"));
                };
                let seen = streams.entry(stream).or_default();
                for bytes in pages.chunks(PAGE_SIZE) {
                    let Some(page) = Page::read(header.session, header.stream, bytes) else {
                        return hurt(format!(
                            "{name}, frame {}: a page is not what the guest made",
                            header.sequence
                        ));
                    };
                    if page.number < seen.next {
                        return hurt(format!(
                            "{name}, frame {}: page {} is there again (next is {})",
                            header.sequence, page.number, seen.next
                        ));
                    }
                    if page.number >= made.pages {
                        return hurt(format!("{name}: page {} was not made yet", page.number));
                    }
                    for missing in seen.next..page.number {
                        if made.overwritten.contains(&missing) {
                            continue;
                        }
                        if seen.excused == 0 {
                            return hurt(format!(
                                "{name}: page {missing} is missing before frame {} and nobody says so",
                                header.sequence
                            ));
                        }
                        seen.excused -= 1;
                    }
                    seen.next = page.number + 1;
                }
                seen.excused = 0;
            }
            Entry::Fork { .. } | Entry::Attached(_) | Entry::Overrun { .. } => {}
        }
    }
    Ok(())
}
