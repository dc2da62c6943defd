//! Exports a `trace.dat`: `export_trace_dat IN OUT perfetto|ctf`.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write};
use std::path::PathBuf;

use vmtrail_trace::ctf::{CtfOutput, CtfWriter};
use vmtrail_trace::merge::Merge;
use vmtrail_trace::perfetto::{PerfettoWriter, check};
use vmtrail_trace::timeline::{Item, Note, NoteKind, TimeMap, Timeline};
use vmtrail_trace::trace_dat::{CpuPages, TraceFile};

type Source<'a> = CpuPages<'a, BufReader<File>>;

struct Directory(PathBuf);

impl CtfOutput for Directory {
    type File = BufWriter<File>;

    fn create(&mut self, name: &str) -> std::io::Result<Self::File> {
        Ok(BufWriter::new(File::create(self.0.join(name))?))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [input, output, kind] = arguments.as_slice() else {
        return Err("usage: export_trace_dat IN OUT perfetto|ctf".into());
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
        "ctf" => {
            let mut uuid = [0; 16];
            uuid[..8].copy_from_slice(&file.options().trace_id.unwrap_or(1).to_le_bytes());
            let output = Directory(output.into());
            fs::create_dir_all(&output.0)?;
            let mut writer = CtfWriter::create(output, file.metadata(), uuid, 0, "guest")?;
            loop {
                match timeline.advance()? {
                    Item::Event(entry) => writer.event(&entry)?,
                    Item::Note(note) => writer.note(note)?,
                    Item::Damaged { .. } => {}
                    Item::Waiting | Item::End => break,
                }
            }
            println!("{:?}", writer.finish()?.1);
        }
        other => return Err(format!("unknown kind {other}").into()),
    }
    Ok(())
}
