//! Entry points for fuzzing: any bytes go in, nothing may panic, hang or take memory beyond what the bytes justify.
//!
//! `cargo fuzz` targets are one line each over these; the tests run them on stable with seeded mutations.

use std::io::Cursor;

use crate::catalog::Catalog;
use crate::filter::Filter;
use crate::json;
use crate::metadata::{Comms, Metadata, PrintkFormats, Symbols, Tgids};
use crate::perfetto::{PerfettoWriter, check};
use crate::report::{Entry, ReportOptions, Reporter};
use crate::ring_buffer::{Missed, Page, PageLayout, page_summary};
use crate::trace_dat::TraceFile;
use crate::{Endian, LongSize};

/// First byte: byte order and size of `long`; then a page.
pub fn page(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else {
        return;
    };
    let endian = if choice & 1 == 0 {
        Endian::Little
    } else {
        Endian::Big
    };
    let Ok(mut layout) = PageLayout::native64_le(4096) else {
        return;
    };
    if *choice != 0 {
        let long = if choice & 2 == 0 { 8 } else { 4 };
        let text = layout
            .header_page_text()
            .replace("offset:8;\tsize:8", &format!("offset:8;\tsize:{long}"))
            .replace("offset:16", &format!("offset:{}", 8 + long));
        match PageLayout::parse(&text, endian) {
            Ok(parsed) => layout = parsed,
            Err(_) => return,
        }
    }
    if let (Ok(page), Ok(summary)) = (Page::parse(layout, data), page_summary(layout, data)) {
        let counted = page.records().filter(Result::is_ok).count();
        assert_eq!(
            u32::try_from(counted).ok(),
            Some(summary.events),
            "two walks disagree"
        );
    }
}

/// A description of a page.
pub fn header_page(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(layout) = PageLayout::parse(&text, Endian::Little) {
        let again = PageLayout::parse(&layout.header_page_text(), Endian::Little);
        assert_eq!(
            again.map(|layout| layout.page_size()),
            Ok(layout.page_size())
        );
    }
}

/// A format file, a zero byte, a record: printed, as raw fields, as JSON, and to perfetto.
pub fn format(data: &[u8]) {
    let split = data
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(data.len());
    let (text, record) = data.split_at(split);
    let Ok(layout) = PageLayout::native64_le(4096) else {
        return;
    };
    let mut metadata = Metadata::bare(layout);
    metadata.symbols = Symbols::parse(b"1000 T one\n2000 t two\n");
    metadata.printk = PrintkFormats::parse(b"0x10 : \"%s %d %pS %*d\"\n");
    let Ok(event) = metadata.events.add("fuzz", &String::from_utf8_lossy(text)) else {
        return;
    };
    let type_id = event.id();
    let entry = Entry {
        cpu: 0,
        timestamp: 1,
        type_id,
        payload: record,
        missed: Missed::None,
    };
    let mut out = Vec::new();
    for raw in [false, true] {
        let mut reporter = Reporter::new(
            &metadata,
            ReportOptions {
                raw,
                ..ReportOptions::default()
            },
        );
        reporter.write(&entry, &mut out);
        reporter.finish(&mut out);
    }
    json::write_event(&metadata, &entry, &mut out);
    let mut writer = PerfettoWriter::new(Vec::new(), &metadata, "fuzz");
    if writer.event(&entry).is_ok()
        && let Ok(trace) = writer.finish()
    {
        assert!(check(&trace).is_ok(), "our own judge refuses what we wrote");
    }
}

/// A print format alone, on fixed fields and a fixed record.
pub fn print_format(data: &[u8]) {
    let text = format!(
        "name: f\nID: 9\nformat:\n\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
         \tfield:int i;\toffset:8;\tsize:4;\tsigned:1;\n\
         \tfield:__data_loc char[] s;\toffset:12;\tsize:4;\tsigned:0;\n\
         \tfield:u64 a[2];\toffset:16;\tsize:16;\tsigned:0;\n\nprint fmt: {}\n",
        String::from_utf8_lossy(data)
    );
    let mut bytes = text.into_bytes();
    bytes.push(0);
    bytes.extend_from_slice(&[9, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, 32, 0, 4, 0]);
    bytes.extend_from_slice(&[7; 16]);
    bytes.extend_from_slice(b"abc\0");
    format(&bytes);
}

/// A whole file.
pub fn trace_dat(data: &[u8]) {
    let Ok(file) = TraceFile::open(Cursor::new(data)) else {
        return;
    };
    let mut reporter = Reporter::new(file.metadata(), ReportOptions::default());
    let mut out = Vec::new();
    for buffer in file.buffers() {
        let mut merge = file.merge(buffer);
        // A file can name the same pages for thousands of CPUs: its length bounds what is worth looking at.
        let mut left = data.len();
        while let Ok(step) = merge.advance() {
            match step {
                crate::merge::Step::Event(entry) => reporter.write(&entry, &mut out),
                crate::merge::Step::Damaged { .. } => {}
                crate::merge::Step::Waiting | crate::merge::Step::End => break,
            }
            out.clear();
            left = left.saturating_sub(8);
            if left == 0 {
                break;
            }
        }
    }
}

/// A filter.
pub fn filter(data: &[u8]) {
    let Ok(filter) = Filter::parse(&String::from_utf8_lossy(data)) else {
        return;
    };
    let Ok(layout) = PageLayout::native64_le(4096) else {
        return;
    };
    let metadata = Metadata::bare(layout);
    let entry = Entry {
        cpu: 0,
        timestamp: 1,
        type_id: 9,
        payload: &[9, 0],
        missed: Missed::None,
    };
    let _ = filter.matcher(&metadata).matches(&entry);
}

/// The kernel's tables.
pub fn tables(data: &[u8]) {
    let symbols = Symbols::parse(data);
    let _ = symbols.find(0x1000);
    let _ = PrintkFormats::parse(data).text(0x10);
    let _ = Comms::parse(data).get(1);
    let _ = Tgids::parse(data).get(1);
    let mut catalog = Catalog::new(Endian::Big, LongSize::Four);
    let _ = catalog.add("fuzz", &String::from_utf8_lossy(data));
}
