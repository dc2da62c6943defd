//! Prints a `trace.dat` as `trace-cmd report` does: `trace_report FILE [-t] [-R]`.

use std::error::Error;
use std::fs::File;
use std::io::{BufReader, Write};

use vmtrail_trace::merge::Step;
use vmtrail_trace::report::{Entry, ReportOptions, Reporter, TimeFormat};
use vmtrail_trace::trace_dat::TraceFile;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let path = arguments
        .iter()
        .find(|argument| !argument.starts_with('-'))
        .ok_or("which file?")?;
    let has = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let options = ReportOptions {
        time: if has("-t") {
            TimeFormat::Nanoseconds
        } else {
            TimeFormat::Microseconds
        },
        raw: has("-R"),
        latency: has("-l"),
    };
    let file = TraceFile::open(BufReader::new(File::open(path)?))?;
    for warning in file.warnings() {
        eprintln!("{warning}");
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "cpus={}", file.cpu_count())?;
    let Some(buffer) = file.buffers().first() else {
        return Ok(());
    };
    let mut reporter = Reporter::new(file.metadata(), options);
    let mut merge = file.merge(buffer);
    let mut out = Vec::new();
    loop {
        match merge.advance()? {
            Step::Event(entry) => {
                let timestamp = file.options().correct(entry.cpu, entry.timestamp);
                reporter.write(&Entry { timestamp, ..entry }, &mut out);
            }
            Step::Damaged {
                cpu,
                timestamp,
                damage,
            } => {
                eprintln!("CPU {cpu} at {timestamp}: failed to {damage}");
            }
            Step::Waiting | Step::End => break,
        }
        if out.len() > 1 << 16 {
            stdout.write_all(&out)?;
            out.clear();
        }
    }
    reporter.finish(&mut out);
    stdout.write_all(&out)?;
    Ok(())
}
