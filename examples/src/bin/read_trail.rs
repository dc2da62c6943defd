//! Counts the events of a trail by name and says when the VM stood still: `read_trail TRAIL`.

use std::collections::BTreeMap;
use std::path::Path;

use vmtrail::decode::{Selection, Story};
use vmtrail::trail::TrailReader;
use vmtrail_trace::timeline::Item;

fn main() -> anyhow::Result<()> {
    let trail = std::env::args().nth(1).unwrap_or_else(|| ".".to_owned());
    let story = Story::open(
        &TrailReader::open(Path::new(&trail))?,
        &Selection::default(),
    )?;
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let mut timeline = story.timeline();
    loop {
        match timeline.advance()? {
            Item::Event(entry) => {
                let event = story.metadata.events.get(entry.type_id);
                *counts
                    .entry(event.map_or("?", |event| event.name()))
                    .or_default() += 1;
            }
            Item::Note(note) => println!("{} {}", note.kind.name(), note.kind.text()),
            Item::Damaged { cpu, damage, .. } => eprintln!("CPU {cpu}: failed to {damage}"),
            Item::Waiting | Item::End => break,
        }
    }
    counts
        .iter()
        .for_each(|(name, count)| println!("{count:>10} {name}"));
    Ok(())
}
