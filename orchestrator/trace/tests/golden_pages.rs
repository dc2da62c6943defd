//! Pages of a real kernel. The expected numbers are the kernel's own, see `fixtures/pages/README.md`.

use vmtrail_trace::Endian;
use vmtrail_trace::ring_buffer::{MarkerFormat, Missed, Page, PageLayout, page_summary};

const SCHED: &[u8] = include_bytes!("fixtures/pages/sched.page");
const OVERRUN: &[u8] = include_bytes!("fixtures/pages/overrun.page");
const SUBBUF_8K: &[u8] = include_bytes!("fixtures/pages/subbuf_8k.page");
const TIME_EXTEND: &[u8] = include_bytes!("fixtures/pages/time_extend.page");
const HEADER: &str = include_str!("fixtures/pages/header_page");
const HEADER_8K: &str = include_str!("fixtures/pages/header_page_8k");
const PRINT: &str = include_str!("fixtures/pages/print.format");

#[test]
fn events_and_losses_are_those_the_kernel_counted() {
    let layout = PageLayout::parse(HEADER, Endian::Little).unwrap();
    let layout_8k = PageLayout::parse(HEADER_8K, Endian::Little).unwrap();
    for (name, layout, bytes, events, missed) in [
        ("sched", layout, SCHED, 131, Missed::None),
        ("overrun", layout, OVERRUN, 92, Missed::Count(2766)),
        ("subbuf_8k", layout_8k, SUBBUF_8K, 150, Missed::None),
        ("time_extend", layout, TIME_EXTEND, 3, Missed::None),
    ] {
        let summary = page_summary(layout, bytes).unwrap();
        assert_eq!(bytes.len(), layout.page_size(), "{name}");
        assert_eq!((summary.events, summary.missed), (events, missed), "{name}");
        assert_eq!(summary.damage, None, "{name}");
        assert_eq!(summary.first_ts, Some(summary.timestamp), "{name}");
    }
}

#[test]
fn marks_are_found_by_the_format_file() {
    let layout = PageLayout::parse(HEADER, Endian::Little).unwrap();
    let format = MarkerFormat::parse(PRINT).unwrap();
    assert_eq!(
        format,
        MarkerFormat {
            type_id: 5,
            text_offset: 16
        }
    );
    let marks = |bytes: &[u8]| -> Vec<(u64, String)> {
        let page = Page::parse(layout, bytes).unwrap();
        page.records()
            .map(|record| record.unwrap())
            .filter_map(|record| {
                let text = format.text(&record)?;
                Some((record.timestamp, String::from_utf8(text.to_vec()).unwrap()))
            })
            .collect()
    };
    let texts: Vec<String> = marks(SCHED).into_iter().map(|(_, text)| text).collect();
    assert_eq!(texts, ["vmtrail mark 1", "vmtrail mark 2"]);

    let extended = marks(TIME_EXTEND);
    let slept_ns = extended[1].0 - extended[0].0;
    assert!((300_000_000..320_000_000).contains(&slept_ns), "{slept_ns}");
    assert_eq!(extended[2].1, "x".repeat(200));
}

#[test]
fn time_does_not_run_back_within_a_page() {
    let layout = PageLayout::parse(HEADER, Endian::Little).unwrap();
    let page = Page::parse(layout, SCHED).unwrap();
    let times: Vec<u64> = page
        .records()
        .map(|record| record.unwrap().timestamp)
        .collect();
    assert!(times.is_sorted());
}

/// A page cut or changed anywhere gives an error or fewer events: never a panic, never more than the bytes can hold.
#[test]
fn damaged_pages_cost_themselves_only() {
    let layout = PageLayout::parse(HEADER, Endian::Little).unwrap();
    let mut seed = 0x1234_5678_9abc_def0_u64;
    let mut random = move || {
        // xorshift64*, enough to hit every byte over the rounds.
        seed ^= seed >> 12;
        seed ^= seed << 25;
        seed ^= seed >> 27;
        seed.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    for original in [SCHED, OVERRUN, TIME_EXTEND] {
        for _ in 0..2000 {
            let mut bytes = original.to_vec();
            for _ in 0..=random() % 4 {
                let length = u64::try_from(bytes.len()).unwrap();
                let at = usize::try_from(random() % length).unwrap();
                bytes[at] ^= 1 << (random() % 8);
            }
            if random() % 4 == 0 {
                bytes.truncate(usize::try_from(random() % 4096).unwrap());
            }
            if let Ok(summary) = page_summary(layout, &bytes) {
                assert!(summary.events <= 4080 / 8);
            }
        }
    }
}
