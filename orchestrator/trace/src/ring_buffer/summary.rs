//! What one wants to know of a page without decoding its events.

use super::{Damage, Missed, Page, PageError, PageLayout, Record};

/// A page in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSummary {
    /// Base time in the page's header; the page's place in its CPU's order even if it has no event.
    pub timestamp: u64,
    /// Committed bytes of records.
    pub committed: usize,
    /// Time of the first event, `None` if there is none.
    pub first_ts: Option<u64>,
    /// Time of the last event, `None` if there is none.
    pub last_ts: Option<u64>,
    /// Data records: what `trace-cmd report` would count.
    pub events: u32,
    /// Records that the kernel discarded itself. Neither events nor loss.
    pub discarded: u32,
    /// Events lost between the page before and this one.
    pub missed: Missed,
    /// The record from which on the page could not be read; the numbers above count what is before it.
    pub damage: Option<Damage>,
}

/// Reads one page and counts.
pub fn page_summary(layout: PageLayout, bytes: &[u8]) -> Result<PageSummary, PageError> {
    let page = Page::parse(layout, bytes)?;
    let mut summary = PageSummary {
        timestamp: page.timestamp(),
        committed: page.data().len(),
        first_ts: None,
        last_ts: None,
        events: 0,
        discarded: 0,
        missed: page.missed(),
        damage: None,
    };
    let mut records = page.records();
    for record in records.by_ref() {
        match record {
            Ok(record) => {
                summary.events += 1;
                summary.first_ts.get_or_insert(record.timestamp);
                summary.last_ts = Some(record.timestamp);
            }
            Err(damage) => summary.damage = Some(damage),
        }
    }
    summary.discarded = records.discarded();
    Ok(summary)
}

/// Where `ftrace/print` events (what was written to `trace_marker`) keep their text: enough to find marks in pages
/// without the full machinery of event formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkerFormat {
    /// The event's `common_type`.
    pub type_id: u16,
    /// Offset of the text in the payload.
    pub text_offset: usize,
}

impl MarkerFormat {
    /// From the text of `events/ftrace/print/format`; `None` if it has no `ID:` or no field `buf`.
    #[must_use]
    pub fn parse(format: &str) -> Option<Self> {
        let type_id = format
            .lines()
            .find_map(|line| line.strip_prefix("ID:"))?
            .trim()
            .parse()
            .ok()?;
        let text_offset = format
            .lines()
            .filter(|line| line.contains("char buf"))
            .find_map(|line| {
                line.split("offset:")
                    .nth(1)?
                    .split(';')
                    .next()?
                    .trim()
                    .parse()
                    .ok()
            })?;
        Some(Self {
            type_id,
            text_offset,
        })
    }

    /// The text of a mark, without its final newline; `None` if `record` is something else.
    #[must_use]
    pub fn text<'a>(&self, record: &Record<'a>) -> Option<&'a [u8]> {
        if record.type_id != self.type_id {
            return None;
        }
        let text = record.payload.get(self.text_offset..)?;
        let text = text.split(|byte| *byte == 0).next().unwrap_or(text);
        Some(text.strip_suffix(b"\n").unwrap_or(text))
    }
}
