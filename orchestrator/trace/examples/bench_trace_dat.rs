//! Times decoding and reporting of a `trace.dat` held in memory: `bench_trace_dat FILE`.

use std::error::Error;
use std::fs::File;
use std::io::BufReader;
use std::time::Instant;

use vmtrail_trace::measure::{report, walk_fields};
use vmtrail_trace::merge::{PageSource, Pull};
use vmtrail_trace::trace_dat::TraceFile;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("which file?")?;
    let file = TraceFile::open(BufReader::new(File::open(path)?))?;
    let buffer = file.buffers().first().ok_or("no pages")?;
    let mut cpus = Vec::new();
    for cpu in &buffer.cpus {
        let (mut pages, mut all, mut page) = (file.pages(buffer, cpu), Vec::new(), Vec::new());
        while pages.next_page(&mut page)? == Pull::Page {
            page.resize(buffer.layout.page_size(), 0);
            all.extend_from_slice(&page);
        }
        cpus.push((cpu.cpu, all));
    }
    for _ in 0..3 {
        let start = Instant::now();
        let (mut events, mut fields) = (0, 0);
        for (_, pages) in &cpus {
            let walked = walk_fields(file.metadata(), buffer.layout, pages);
            events += walked.events;
            fields += walked.fields;
        }
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "fields: {events} events, {fields} fields in {seconds:.3} s: {:.2} M events/s",
            million(events) / seconds
        );
    }
    let slices: Vec<(u32, &[u8])> = cpus.iter().map(|(cpu, pages)| (*cpu, &**pages)).collect();
    for _ in 0..3 {
        let start = Instant::now();
        let walked = report(
            file.metadata(),
            buffer.layout,
            &slices,
            &mut std::io::sink(),
        )?;
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "report: {} events, {} bytes of text in {seconds:.3} s: {:.2} M events/s",
            walked.events,
            walked.checksum,
            million(walked.events) / seconds
        );
    }
    Ok(())
}

fn million(events: u64) -> f64 {
    f64::from(u32::try_from(events).unwrap_or(u32::MAX)) / 1e6
}
