//! Changing what a page's header says: its time (for another clock) and the loss before it.

use super::{Missed, Page, PageError, PageLayout};
use crate::{Endian, LongSize};

const MISSED_EVENTS: u32 = 1 << 31;
const MISSED_STORED: u32 = 1 << 30;

/// Sets the base time of a page; the records keep their distance to it.
///
/// Absolute time stamps inside the page (`time_stamp` records) are not moved: pages that have them cannot be shifted
/// this way, and `false` is returned without a change.
pub fn set_page_timestamp(
    layout: PageLayout,
    page: &mut [u8],
    timestamp: u64,
) -> Result<bool, PageError> {
    if Page::parse(layout, page)?.has_absolute_times() {
        return Ok(false);
    }
    let bytes = match layout.endian() {
        Endian::Little => timestamp.to_le_bytes(),
        Endian::Big => timestamp.to_be_bytes(),
    };
    let at = layout.timestamp_offset();
    if let Some(place) = page.get_mut(at..at + 8) {
        place.copy_from_slice(&bytes);
    }
    Ok(true)
}

/// Adds a loss before a page, as the kernel would write it: the flags, and the count behind the data where it fits. A
/// loss that the page already tells of is kept and added to. Returns what the page says now: a count for which there is
/// no room becomes [`Missed::Unknown`].
pub fn add_missed(
    layout: PageLayout,
    page: &mut [u8],
    missed: Missed,
) -> Result<Missed, PageError> {
    let parsed = Page::parse(layout, page)?;
    let (length, total) = (parsed.data().len(), parsed.missed().and_then(missed));
    let long = layout.long_size().bytes();
    let store = match total {
        Missed::None => return Ok(Missed::None),
        Missed::Unknown => None,
        Missed::Count(count) => Some(count).filter(|count| {
            let fits = layout.long_size() == LongSize::Eight || u32::try_from(*count).is_ok();
            fits && layout.data_offset() + length + long <= page.len()
        }),
    };
    let commit = u32::try_from(length).unwrap_or(0)
        | MISSED_EVENTS
        | if store.is_some() { MISSED_STORED } else { 0 };
    put_long(layout, page, layout.commit_offset(), commit.into());
    if let Some(count) = store {
        put_long(layout, page, layout.data_offset() + length, count);
    }
    Ok(store.map_or(Missed::Unknown, Missed::Count))
}

fn put_long(layout: PageLayout, page: &mut [u8], at: usize, value: u64) {
    let size = layout.long_size().bytes();
    let bytes = match layout.endian() {
        Endian::Little => value.to_le_bytes(),
        Endian::Big => value.to_be_bytes(),
    };
    let bytes = match layout.endian() {
        Endian::Little => &bytes[..size],
        Endian::Big => &bytes[8 - size..],
    };
    if let Some(place) = page.get_mut(at..at + size) {
        place.copy_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring_buffer::build::page;

    #[test]
    fn losses_add_up_and_times_move() {
        let layout = PageLayout::native64_le(4096).unwrap();
        let mut bytes = page(layout, 100, Missed::Count(3), &[100, 110]);
        assert_eq!(
            add_missed(layout, &mut bytes, Missed::Count(4)),
            Ok(Missed::Count(7))
        );
        assert_eq!(set_page_timestamp(layout, &mut bytes, 1000), Ok(true));
        let parsed = Page::parse(layout, &bytes).unwrap();
        assert_eq!(parsed.missed(), Missed::Count(7));
        let times: Vec<u64> = parsed
            .records()
            .map(|record| record.unwrap().timestamp)
            .collect();
        assert_eq!(times, [1000, 1010]);
        assert_eq!(
            add_missed(layout, &mut bytes, Missed::Unknown),
            Ok(Missed::Unknown)
        );
    }

    #[test]
    fn a_full_page_has_no_room_for_a_count() {
        let layout = PageLayout::native64_le(4096).unwrap();
        let times: Vec<u64> = (0..340).collect();
        let mut bytes = page(layout, 0, Missed::None, &times);
        assert_eq!(
            add_missed(layout, &mut bytes, Missed::Count(4)),
            Ok(Missed::Unknown)
        );
        assert_eq!(
            Page::parse(layout, &bytes).unwrap().missed(),
            Missed::Unknown
        );
    }
}
