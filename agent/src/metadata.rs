//! What is needed to decode the trace without the guest's kernel: formats, names, symbols.

use std::fs::{self, File};
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};

use vmtrail_wire::agent_to_host::{MAX_METADATA_CHUNK, MAX_METADATA_ITEMS};
use vmtrail_wire::crc32c;

use crate::session::{Inventory, MetadataPiece};
use crate::tracefs::{fill, read_small};

/// Bytes of one item at most. The largest there is, kallsyms, has 5 to 20 MiB.
const MAX_ITEM: u64 = 128 << 20;

/// Files of the instance itself.
const OF_INSTANCE: [&str; 3] = ["trace_clock", "trace_options", "timestamp_mode"];

/// Files that tracefs has once for all instances.
const OF_ROOT: [&str; 7] = [
    "printk_formats",
    "saved_cmdlines",
    "saved_tgids",
    "kprobe_events",
    "uprobe_events",
    "synthetic_events",
    "dynamic_events",
];

/// Files that grow while recording.
const VOLATILE: [&str; 3] = ["printk_formats", "saved_cmdlines", "saved_tgids"];

/// The items, and the one that is being read.
#[derive(Debug)]
pub struct Metadata {
    root: PathBuf,
    dir: PathBuf,
    /// Names; an item's number is its place.
    items: Vec<String>,
    texts: Vec<(&'static str, String)>,
    fingerprint: Option<u32>,
    reading: Option<Reading>,
}

struct Reading {
    item: u32,
    offset: u64,
    source: Box<dyn Read>,
}

impl std::fmt::Debug for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reading")
            .field("item", &self.item)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl Metadata {
    /// Metadata of the instance in `dir` of the tracefs at `root`; `texts` are items of our own (`vmtrail/…`).
    #[must_use]
    pub fn new(root: &Path, dir: &Path, texts: Vec<(&'static str, String)>) -> Self {
        Self {
            root: root.to_path_buf(),
            dir: dir.to_path_buf(),
            items: Vec::new(),
            texts,
            fingerprint: None,
            reading: None,
        }
    }

    /// Looks at what there is now.
    pub fn take_inventory(&mut self) -> Inventory {
        let fingerprint = self.take_fingerprint();
        let changed = self.fingerprint != Some(fingerprint);
        if changed {
            self.fingerprint = Some(fingerprint);
            self.list();
        }
        let volatile = (0..).zip(&self.items);
        Inventory {
            items: u32::try_from(self.items.len()).unwrap_or(0),
            volatile: volatile
                .filter(|(_, name)| VOLATILE.contains(&name.as_str()))
                .map(|(item, _)| item)
                .collect(),
            changed,
        }
    }

    /// Reads the piece of an item that begins at `offset`. An item that cannot be read (a module went, and its events
    /// with it) is empty: the host must not wait for it.
    pub fn read(&mut self, item: u32, offset: u64) -> MetadataPiece {
        let name = usize::try_from(item)
            .ok()
            .and_then(|item| self.items.get(item))
            .cloned()
            .unwrap_or_default();
        let (bytes, last) = self
            .read_bytes(item, &name, offset)
            .unwrap_or_else(|_| (Vec::new(), true));
        if last {
            self.reading = None;
        }
        MetadataPiece { name, bytes, last }
    }

    fn read_bytes(&mut self, item: u32, name: &str, offset: u64) -> io::Result<(Vec<u8>, bool)> {
        // Files like kallsyms are made while they are read, so they are read on, not again, where possible.
        let mut reading = match self.reading.take() {
            Some(reading) if reading.item == item && reading.offset == offset => reading,
            _ => {
                let mut source = self.open(name)?;
                io::copy(&mut (&mut source).take(offset), &mut io::sink())?;
                Reading {
                    item,
                    offset,
                    source,
                }
            }
        };
        let mut bytes = vec![0; MAX_METADATA_CHUNK];
        let len = fill(&mut reading.source, &mut bytes)?;
        bytes.truncate(len);
        reading.offset += bytes.len() as u64;
        let last = bytes.len() < MAX_METADATA_CHUNK || reading.offset >= MAX_ITEM;
        self.reading = Some(reading);
        Ok((bytes, last))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Read>> {
        let text = self.texts.iter().find(|(key, _)| *key == name);
        if let Some((_, text)) = text {
            return Ok(Box::new(Cursor::new(text.clone().into_bytes())));
        }
        Ok(Box::new(File::open(self.path(name))?))
    }

    fn path(&self, name: &str) -> PathBuf {
        if let Some(file) = name.strip_prefix("proc/") {
            Path::new("/proc").join(file)
        } else if name.starts_with("events/") || OF_INSTANCE.contains(&name) {
            self.dir.join(name)
        } else {
            self.root.join(name)
        }
    }

    fn list(&mut self) {
        // The small and indispensable first: a host that loses its guest early can decode what it has.
        let mut items = vec![
            "events/header_page".to_owned(),
            "events/header_event".to_owned(),
        ];
        let own = self.texts.iter().map(|(name, _)| (*name).to_owned());
        items.extend(own);
        items.extend(
            OF_INSTANCE
                .iter()
                .chain(&OF_ROOT)
                .map(|&name| name.to_owned()),
        );
        items.push("proc/modules".to_owned());
        let mut formats = Vec::new();
        for system in subdirectories(&self.dir.join("events")) {
            for event in subdirectories(&self.dir.join("events").join(&system)) {
                formats.push(format!("events/{system}/{event}/format"));
            }
        }
        items.append(&mut formats);
        items.push("proc/kallsyms".to_owned());
        items.retain(|name| name.starts_with("vmtrail/") || self.path(name).is_file());
        items.truncate(MAX_METADATA_ITEMS as usize);
        items.shrink_to_fit();
        self.items = items;
    }

    /// Changes when the list or the meaning of the items does: modules, probes, clock, options.
    fn take_fingerprint(&self) -> u32 {
        let mut text = String::new();
        for name in [
            "trace_clock",
            "trace_options",
            "dynamic_events",
            "kprobe_events",
            "uprobe_events",
        ] {
            text += &read_small(&self.path(name)).unwrap_or_default();
        }
        // Only names and addresses: the use counts in it change all the time.
        for line in read_small(Path::new("/proc/modules"))
            .unwrap_or_default()
            .lines()
        {
            let mut words = line.split_whitespace();
            text += words.next().unwrap_or_default();
            text += words.next_back().unwrap_or_default();
        }
        crc32c(text.as_bytes())
    }
}

fn subdirectories(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}
