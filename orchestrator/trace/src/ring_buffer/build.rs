//! Pages made by hand, for tests.

use super::{Missed, PageLayout};
use crate::Endian;

/// A little-endian page of records of type 5 at `times` (each at most 27 bits behind the one before).
pub(crate) fn page(layout: PageLayout, timestamp: u64, missed: Missed, times: &[u64]) -> Vec<u8> {
    assert_eq!(layout.endian(), Endian::Little);
    let mut data = Vec::new();
    let mut now = timestamp;
    for time in times {
        let delta = u32::try_from(time - now).unwrap();
        now = *time;
        data.extend_from_slice(&(2 | delta << 5).to_le_bytes());
        data.extend_from_slice(&5_u32.to_le_bytes());
        data.extend_from_slice(&42_u32.to_le_bytes());
    }
    let mut commit = u64::try_from(data.len()).unwrap();
    match missed {
        Missed::None => {}
        Missed::Unknown => commit |= 1 << 31,
        Missed::Count(count) => {
            commit |= 3 << 30;
            data.extend_from_slice(&count.to_le_bytes());
        }
    }
    let mut bytes = timestamp.to_le_bytes().to_vec();
    bytes.extend_from_slice(&commit.to_le_bytes());
    bytes.extend_from_slice(&data);
    bytes.resize(layout.page_size(), 0);
    bytes
}
