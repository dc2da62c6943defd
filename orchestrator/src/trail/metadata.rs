//! What is needed to decode a session's pages without its guest's kernel.
//!
//! A kernel has some 2,500 event formats of about a KiB. A file and a sync for each would take seconds and thousands of
//! inodes a session, so small items lie behind each other in an object, and the objects are content-addressed: a
//! second session of the same kernel shares its formats. Names of items come from the guest: they are keys of a
//! manifest and never part of a path.

use std::collections::BTreeMap;
use std::io;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use vmtrail_wire::SessionId;

use super::format::META;
use super::storage::{Access, Storage, read_bounded, write_atomically};
use super::{MetadataError, StoreError};

/// Bytes of one item at most. The symbol table of a large kernel is some 15 MiB.
pub const MAX_ITEM: usize = 32 << 20;
/// Bytes of a generation at most.
pub const MAX_GENERATION: usize = 64 << 20;
/// Items of a generation at most (the protocol's bound).
pub const MAX_ITEMS: usize = vmtrail_wire::agent_to_host::MAX_METADATA_ITEMS as usize;

/// Items at least this long get an object of their own; the rest share two.
const OWN_OBJECT: usize = 64 << 10;
const MAX_MANIFEST: usize = 64 << 20;

/// `meta/<session>-<generation>.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Session, 16 hexadecimal digits.
    pub session: String,
    /// Generation.
    pub generation: u32,
    /// SHA-256 of the objects, in hexadecimal: `meta/<sha256>`.
    pub objects: Vec<String>,
    /// Where each item is.
    pub items: BTreeMap<String, ItemPlace>,
}

/// Where an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ItemPlace {
    /// Index of the object.
    pub object: usize,
    /// Offset in it.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// A generation that is being collected.
#[derive(Debug, Default)]
pub(super) struct Generation {
    items: BTreeMap<String, Vec<u8>>,
    bytes: usize,
}

impl Generation {
    pub(super) fn put(&mut self, name: &str, bytes: Vec<u8>) -> Result<(), MetadataError> {
        if bytes.len() > MAX_ITEM {
            return Err(MetadataError::ItemTooLong {
                len: bytes.len(),
                max: MAX_ITEM,
            });
        }
        let replaced = self.items.get(name).map_or(0, Vec::len);
        let total = self.bytes - replaced + bytes.len();
        if total > MAX_GENERATION {
            return Err(MetadataError::GenerationTooLong {
                max: MAX_GENERATION,
            });
        }
        if self.items.len() >= MAX_ITEMS && !self.items.contains_key(name) {
            return Err(MetadataError::TooManyItems { max: MAX_ITEMS });
        }
        self.bytes = total;
        self.items.insert(name.to_owned(), bytes);
        Ok(())
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes the generation durable; returns the bytes that were new. Can be repeated after a failure.
    pub(super) fn store(
        &self,
        storage: &dyn Storage,
        session: SessionId,
        generation: u32,
    ) -> Result<u64, StoreError> {
        let mut manifest = Manifest {
            session: session.to_string(),
            generation,
            objects: Vec::new(),
            items: BTreeMap::new(),
        };
        let mut written = 0;
        // The formats stay together and apart from what changes with every boot, so that they can be shared.
        let is_format = |name: &str| name.starts_with("events/");
        let (large, small): (Vec<_>, Vec<_>) = self
            .items
            .iter()
            .partition(|(_, bytes)| bytes.len() >= OWN_OBJECT);
        let (formats, rest): (Vec<_>, Vec<_>) =
            small.into_iter().partition(|(name, _)| is_format(name));
        let groups = large.into_iter().map(|item| vec![item]);
        for group in groups.chain([formats, rest]) {
            if group.is_empty() {
                continue;
            }
            let mut content = Vec::new();
            for (name, bytes) in group {
                manifest.items.insert(
                    name.clone(),
                    ItemPlace {
                        object: manifest.objects.len(),
                        offset: content.len() as u64,
                        bytes: bytes.len() as u64,
                    },
                );
                content.extend_from_slice(bytes);
            }
            let hash = hex(&Sha256::digest(&content));
            written += store_file(storage, &hash, &content, Existing::IsTheSame)?;
            manifest.objects.push(hash);
        }
        let json = serde_json::to_vec(&manifest).map_err(|error| StoreError {
            operation: "encode",
            path: storage.place(META),
            source: error.into(),
        })?;
        let name = manifest_name(session, generation);
        written += store_file(storage, &name, &json, Existing::IsReplaced)?;
        Ok(written)
    }
}

#[derive(PartialEq)]
enum Existing {
    IsTheSame,
    IsReplaced,
}

fn store_file(
    storage: &dyn Storage,
    name: &str,
    content: &[u8],
    existing: Existing,
) -> Result<u64, StoreError> {
    if existing == Existing::IsTheSame {
        let held = storage
            .open(&format!("{META}/{name}"), Access::Read)
            .and_then(|file| file.len());
        // An object only gets its name once it is whole and synced, so its length is all there is to look at.
        if held.is_ok_and(|len| len == content.len() as u64) {
            return Ok(0);
        }
    }
    write_atomically(storage, META, name, content).map_err(|(operation, source)| StoreError {
        operation,
        path: storage.place(&format!("{META}/{name}")),
        source,
    })?;
    Ok(content.len() as u64)
}

/// Every manifest's session and generation, and the bytes of all files; what is none of ours is passed over.
pub(super) fn list(storage: &dyn Storage) -> io::Result<(Vec<(SessionId, u32)>, u64)> {
    let mut manifests = Vec::new();
    let mut bytes = 0;
    let names = match storage.list(META) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((manifests, 0)),
        names => names?,
    };
    for name in names {
        if let Ok(file) = storage.open(&format!("{META}/{name}"), Access::Read) {
            bytes += file.len()?;
        }
        let parsed = name.strip_suffix(".json").and_then(|stem| {
            let (session, generation) = stem.split_once('-')?;
            Some((
                SessionId(u64::from_str_radix(session, 16).ok()?),
                generation.parse().ok()?,
            ))
        });
        manifests.extend(parsed);
    }
    manifests.sort_unstable();
    Ok((manifests, bytes))
}

/// Reads a manifest.
pub(super) fn manifest(
    storage: &dyn Storage,
    session: SessionId,
    generation: u32,
) -> io::Result<Manifest> {
    let name = format!("{META}/{}", manifest_name(session, generation));
    let bytes = read_bounded(storage, &name, MAX_MANIFEST)?
        .ok_or_else(|| damaged("the manifest is longer than any"))?;
    serde_json::from_slice(&bytes).map_err(io::Error::from)
}

/// Reads an object and checks it against its name.
pub(super) fn object(storage: &dyn Storage, hash: &str) -> io::Result<Vec<u8>> {
    // The hash comes from a file that anybody may have edited; it becomes a path here.
    if hash.len() != 64 || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(damaged("the manifest names an object that cannot be one"));
    }
    let content = read_bounded(storage, &format!("{META}/{hash}"), MAX_GENERATION)?
        .ok_or_else(|| damaged("the object is longer than any"))?;
    if hex(&Sha256::digest(&content)) != hash {
        return Err(damaged("the object's content does not have its hash"));
    }
    Ok(content)
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn manifest_name(session: SessionId, generation: u32) -> String {
    format!("{session}-{generation}.json")
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|nibble| char::from(DIGITS[usize::from(nibble)]))
        .collect()
}
