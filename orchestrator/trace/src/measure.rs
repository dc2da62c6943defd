//! Work to be timed: the loops whose speed is promised, as functions. Clocks are the caller's.

use std::hint::black_box;
use std::io::{self, Write};

use crate::event_format::Value;
use crate::merge::{Merge, PageSource, SlicePages, Step};
use crate::metadata::Metadata;
use crate::report::{ReportOptions, Reporter};
use crate::ring_buffer::{Page, PageLayout};

/// What a walk came past.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Walked {
    /// Events.
    pub events: u64,
    /// Their fields, each decoded to a value.
    pub fields: u64,
    /// Bytes of pages.
    pub bytes: u64,
    /// Sum over the values: the work cannot be left out, and two walks can be compared.
    pub checksum: u64,
}

/// Walks all events of pages that lie one behind the other and decodes all fields, common ones included. No merge: this
/// is the price of decoding alone.
#[must_use]
pub fn walk_fields(metadata: &Metadata, layout: PageLayout, pages: &[u8]) -> Walked {
    let mut walked = Walked {
        bytes: u64::try_from(pages.len()).unwrap_or(0),
        ..Walked::default()
    };
    let endian = layout.endian();
    for bytes in pages.chunks(layout.page_size()) {
        let Ok(page) = Page::parse(layout, bytes) else {
            continue;
        };
        for record in page.records() {
            let Ok(record) = record else { break };
            walked.events += 1;
            let Some(event) = metadata.events.get(record.type_id) else {
                continue;
            };
            for field in event.common_fields().iter().chain(event.fields()) {
                walked.fields += 1;
                let value = match field.value(endian, record.payload) {
                    Value::Unsigned(value) | Value::Pointer(value) => value,
                    Value::Signed(value) => value.cast_unsigned(),
                    Value::Text(text) => u64::try_from(text.len()).unwrap_or(0),
                    Value::Array(elements) => u64::try_from(elements.bytes.len()).unwrap_or(0),
                    Value::Missing => 0,
                };
                walked.checksum = walked.checksum.wrapping_add(value);
            }
            walked.checksum = walked.checksum.wrapping_add(record.timestamp);
        }
    }
    black_box(walked)
}

/// Merges the pages of CPUs and writes the text report.
pub fn report<W: Write>(
    metadata: &Metadata,
    layout: PageLayout,
    cpus: &[(u32, &[u8])],
    out: &mut W,
) -> io::Result<Walked> {
    let sources = cpus
        .iter()
        .map(|(cpu, pages)| (*cpu, SlicePages::new(layout, pages)));
    let bytes = cpus
        .iter()
        .map(|(_, pages)| u64::try_from(pages.len()).unwrap_or(0))
        .sum();
    let walked = report_merge(metadata, Merge::new(layout, sources), out)
        .map_err(|error| error.unwrap_or_else(|never| match never {}))?;
    Ok(Walked { bytes, ..walked })
}

/// What went wrong in [`report_merge`].
#[derive(Debug)]
pub enum FailedWith<E> {
    /// The output.
    Output(io::Error),
    /// A source of pages.
    Source(E),
}

impl<E> FailedWith<E> {
    fn unwrap_or_else(self, source: impl FnOnce(E) -> io::Error) -> io::Error {
        match self {
            Self::Output(error) => error,
            Self::Source(error) => source(error),
        }
    }
}

/// Writes the text report of a merge.
pub fn report_merge<S: PageSource, W: Write>(
    metadata: &Metadata,
    mut merge: Merge<S>,
    out: &mut W,
) -> Result<Walked, FailedWith<S::Error>> {
    let mut reporter = Reporter::new(metadata, ReportOptions::default());
    let mut text = Vec::with_capacity(1 << 17);
    let mut walked = Walked::default();
    loop {
        match merge.advance().map_err(FailedWith::Source)? {
            Step::Event(entry) => {
                walked.events += 1;
                reporter.write(&entry, &mut text);
            }
            Step::Damaged { .. } => {}
            Step::Waiting | Step::End => break,
        }
        if text.len() >= 1 << 16 {
            walked.checksum = walked
                .checksum
                .wrapping_add(u64::try_from(text.len()).unwrap_or(0));
            out.write_all(&text).map_err(FailedWith::Output)?;
            text.clear();
        }
    }
    reporter.finish(&mut text);
    walked.checksum = walked
        .checksum
        .wrapping_add(u64::try_from(text.len()).unwrap_or(0));
    out.write_all(&text).map_err(FailedWith::Output)?;
    Ok(walked)
}
