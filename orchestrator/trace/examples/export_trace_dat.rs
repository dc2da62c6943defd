//! Exports a `trace.dat`: `export_trace_dat IN OUT perfetto|ctf|json`.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write};

use vmtrail_trace::merge::Merge;
use vmtrail_trace::perfetto::{PerfettoWriter, check};
use vmtrail_trace::timeline::{Item, Note, NoteKind, TimeMap, Timeline};
use vmtrail_trace::trace_dat::{CpuPages, TraceFile};

type Source<'a> = CpuPages<'a, BufReader<File>>;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [input, output, kind] = arguments.as_slice() else {
        return Err("usage: export_trace_dat IN OUT perfetto".into());
    };
    let file = TraceFile::open(BufReader::new(File::open(input)?))?;
    let buffer = file.buffers().first().ok_or("no pages")?;
    let merge: Merge<Source<'_>> = file.merge(buffer);
    let mut timeline = Timeline::new(merge, TimeMap::default(), Vec::<Note>::new());
    match kind.as_str() {
        "perfetto" => {
            let out = BufWriter::new(File::create(output)?);
            let mut writer = PerfettoWriter::new(out, file.metadata(), "guest");
            if let Some(uname) = &file.options().uname {
                writer = writer.with_uname(uname);
            }
            loop {
                match timeline.advance()? {
                    Item::Event(entry) => writer.event(&entry)?,
                    Item::Note(note) => writer.note(note)?,
                    Item::Damaged { cpu, timestamp, .. } => {
                        let kind = NoteKind::Mark {
                            text: format!("damaged page on CPU {cpu}"),
                        };
                        writer.note(&Note { timestamp, kind })?;
                    }
                    Item::Waiting | Item::End => break,
                }
            }
            writer.finish()?.flush()?;
            println!("{:?}", check(&fs::read(output)?)?);
        }
        other => return Err(format!("unknown kind {other}").into()),
    }
    Ok(())
}
