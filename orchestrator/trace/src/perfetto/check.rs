//! A judge of perfetto traces: whether one is well formed, and whether it has what the UI needs.

use std::collections::BTreeMap;

use super::packet::{Read, read_field};

/// What a trace holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Packets.
    pub packets: u64,
    /// Ftrace events by CPU.
    pub events: BTreeMap<u64, u64>,
    /// Ftrace events by the number of their message in `FtraceEvent` (327: generic).
    pub messages: BTreeMap<u64, u64>,
    /// Generic events by name.
    pub generic: BTreeMap<String, u64>,
    /// Bundles marked as having lost events before them.
    pub lost_bundles: u64,
    /// Events lost, from the last `FtraceStats`.
    pub overrun: u64,
    /// Track events by the name of their track.
    pub tracks: BTreeMap<String, u64>,
}

/// Why a trace is no good. Finishes "failed to …".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// Not protobuf, or cut off.
    #[error("read the protobuf of packet {packet}")]
    Malformed {
        /// Which packet, from 0.
        packet: u64,
    },
    /// No clock snapshot before the first event.
    #[error("find a clock snapshot before the first event")]
    NoClock,
    /// Times of one CPU run back within a bundle: trace_processor drops such events.
    #[error("find the events of CPU {cpu} in time order")]
    Backwards {
        /// Which.
        cpu: u64,
    },
    /// A track event on a track nobody described.
    #[error("find a description of track {track:x}")]
    UnknownTrack {
        /// Which.
        track: u64,
    },
    /// A slice ended that had not begun, or begun and never ended.
    #[error("match beginnings and ends of the slices on track {name}")]
    Unbalanced {
        /// Name of the track.
        name: String,
    },
}

/// Reads a whole trace.
pub fn check(trace: &[u8]) -> Result<Summary, CheckError> {
    let mut summary = Summary::default();
    let mut judge = Judge::default();
    let mut rest = trace;
    while !rest.is_empty() {
        let malformed = CheckError::Malformed {
            packet: summary.packets,
        };
        let (1, Read::Data(packet), after) = read_field(rest).ok_or_else(|| malformed.clone())?
        else {
            return Err(malformed);
        };
        judge.packet(packet, &mut summary)?.ok_or(malformed)?;
        summary.packets += 1;
        rest = after;
    }
    match judge.open.iter().find(|(_, open)| **open != 0) {
        Some((track, _)) => Err(CheckError::Unbalanced {
            name: judge.names.get(track).cloned().unwrap_or_default(),
        }),
        None => Ok(summary),
    }
}

#[derive(Default)]
struct Judge {
    has_clock: bool,
    names: BTreeMap<u64, String>,
    open: BTreeMap<u64, i64>,
    last: BTreeMap<u64, u64>,
}

type Checked = Result<Option<()>, CheckError>;

impl Judge {
    /// `Ok(None)` if it is malformed.
    fn packet(&mut self, mut packet: &[u8], summary: &mut Summary) -> Checked {
        while !packet.is_empty() {
            let Some((field, value, rest)) = read_field(packet) else {
                return Ok(None);
            };
            packet = rest;
            let done = match (field, value) {
                (6, Read::Data(_)) => {
                    self.has_clock = true;
                    Some(())
                }
                (1, Read::Data(bundle)) => self.bundle(bundle, summary)?,
                (60, Read::Data(track)) => self.descriptor(track),
                (11, Read::Data(event)) => self.track_event(event, summary)?,
                (34, Read::Data(stats)) => read_stats(stats, summary),
                _ => Some(()),
            };
            if done.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(()))
    }

    fn bundle(&mut self, mut bundle: &[u8], summary: &mut Summary) -> Checked {
        if !self.has_clock {
            return Err(CheckError::NoClock);
        }
        let mut cpu = 0;
        while !bundle.is_empty() {
            let Some((field, value, rest)) = read_field(bundle) else {
                return Ok(None);
            };
            bundle = rest;
            match (field, value) {
                (1, Read::Varint(number)) => cpu = number,
                (3, Read::Varint(lost)) => summary.lost_bundles += u64::from(lost != 0),
                (2, Read::Data(event)) => {
                    *summary.events.entry(cpu).or_default() += 1;
                    let Some(time) = read_event(event, summary) else {
                        return Ok(None);
                    };
                    let last = self.last.entry(cpu).or_default();
                    if time < *last {
                        return Err(CheckError::Backwards { cpu });
                    }
                    *last = time;
                }
                _ => {}
            }
        }
        Ok(Some(()))
    }

    fn descriptor(&mut self, mut track: &[u8]) -> Option<()> {
        let (mut uuid, mut name) = (0, String::new());
        while !track.is_empty() {
            let (field, value, rest) = read_field(track)?;
            track = rest;
            match (field, value) {
                (1, Read::Varint(value)) => uuid = value,
                (2, Read::Data(text)) => name = std::str::from_utf8(text).ok()?.to_owned(),
                _ => {}
            }
        }
        self.names.insert(uuid, name);
        Some(())
    }

    fn track_event(&mut self, mut event: &[u8], summary: &mut Summary) -> Checked {
        let (mut track, mut kind) = (0, 0);
        while !event.is_empty() {
            let Some((field, value, rest)) = read_field(event) else {
                return Ok(None);
            };
            event = rest;
            match (field, value) {
                (11, Read::Varint(value)) => track = value,
                (9, Read::Varint(value)) => kind = value,
                _ => {}
            }
        }
        let name = self
            .names
            .get(&track)
            .ok_or(CheckError::UnknownTrack { track })?;
        *summary.tracks.entry(name.clone()).or_default() += 1;
        let open = self.open.entry(track).or_default();
        match kind {
            1 => *open += 1,
            2 => *open -= 1,
            _ => {}
        }
        if *open < 0 {
            return Err(CheckError::Unbalanced { name: name.clone() });
        }
        Ok(Some(()))
    }
}

/// An event's time.
fn read_event(mut event: &[u8], summary: &mut Summary) -> Option<u64> {
    let mut time = None;
    while !event.is_empty() {
        let (field, value, rest) = read_field(event)?;
        event = rest;
        match (field, value) {
            (1, Read::Varint(value)) => time = Some(value),
            (1 | 2 | 5, _) => {}
            (message, Read::Data(content)) => {
                *summary.messages.entry(message).or_default() += 1;
                if message == 327 {
                    let (1, Read::Data(name), _) = read_field(content)? else {
                        return None;
                    };
                    let name = std::str::from_utf8(name).ok()?.to_owned();
                    *summary.generic.entry(name).or_default() += 1;
                }
            }
            _ => {}
        }
    }
    time
}

fn read_stats(mut stats: &[u8], summary: &mut Summary) -> Option<()> {
    summary.overrun = 0;
    while !stats.is_empty() {
        let (field, value, rest) = read_field(stats)?;
        stats = rest;
        let (2, Read::Data(mut cpu)) = (field, value) else {
            continue;
        };
        while !cpu.is_empty() {
            let (field, value, rest) = read_field(cpu)?;
            cpu = rest;
            if let (3, Read::Varint(overrun)) = (field, value) {
                summary.overrun = summary.overrun.saturating_add(overrun);
            }
        }
    }
    Some(())
}
