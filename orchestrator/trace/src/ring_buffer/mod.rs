//! Pages of the kernel's ring buffer, as `trace_pipe_raw` gives them.
//!
//! The layout of a page is not fixed: it follows the size of `long` and of a sub-buffer, and the kernel describes it in
//! `events/header_page` ([`PageLayout::parse`]). The layout of a record has been fixed since 2.6.30
//! (`include/linux/ring_buffer.h`, `enum ring_buffer_type`):
//!
//! ```text
//! page (64-bit)                                record
//!  0   8  timestamp of the first record         u32: type_len (5 bits), time_delta (27 bits)
//!  8   8  commit: bytes of data + flags         type_len 1..=28  data of type_len * 4 bytes
//!  16  n  records                               type_len 0       u32 length (counts itself), data
//!         then, with flag bit 30, a long:       type_len 29      padding, or a discarded record
//!         number of events missed               type_len 30      time extend: u32 = delta >> 27
//!                                               type_len 31      time stamp: u32 = absolute time >> 27
//! ```

#[cfg(test)]
pub(crate) mod build;
mod edit;
mod layout;
mod page;
mod record;
mod summary;

pub use edit::{add_missed, set_page_timestamp};
pub use layout::{LayoutError, MAX_PAGE_SIZE, PageLayout};
pub use page::{Missed, Page, PageError};
pub(crate) use record::{Cursor, Found};
pub use record::{Damage, DamageKind, Record, Records};
pub use summary::{MarkerFormat, PageSummary, page_summary};
