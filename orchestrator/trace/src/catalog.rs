//! All events of one traced kernel, by the number in their records.

use crate::event_format::{EventFormat, FormatError};
use crate::{Endian, LongSize};

/// Most events kept. Linux 6.18 with everything built in has 2300; `common_type` has 16 bits.
pub const MAX_EVENTS: usize = 1 << 16;

/// The events of a kernel.
#[derive(Debug)]
pub struct Catalog {
    endian: Endian,
    long_size: LongSize,
    events: Vec<EventFormat>,
    // By id: index + 1, 0 for none.
    by_id: Vec<u32>,
}

impl Catalog {
    /// An empty catalog for a kernel of this byte order and size of `long`.
    #[must_use]
    pub const fn new(endian: Endian, long_size: LongSize) -> Self {
        Self {
            endian,
            long_size,
            events: Vec::new(),
            by_id: Vec::new(),
        }
    }

    /// Adds the event that the text of a `format` file describes. A second format with the same id replaces the first:
    /// dynamic events (kprobes) give their numbers back.
    pub fn add(&mut self, system: &str, format: &str) -> Result<&EventFormat, FormatError> {
        let event = EventFormat::parse(system, format, self.endian, self.long_size)?;
        let id = usize::from(event.id());
        if self.by_id.len() <= id {
            self.by_id.resize(id + 1, 0);
        }
        let known = self.by_id[id];
        let index = if known == 0 {
            self.events.push(event);
            let count = u32::try_from(self.events.len()).unwrap_or(u32::MAX);
            self.by_id[id] = count;
            self.events.len() - 1
        } else {
            let index = known as usize - 1;
            self.events[index] = event;
            index
        };
        Ok(&self.events[index])
    }

    /// The event a record of this type is.
    #[inline]
    #[must_use]
    pub fn get(&self, id: u16) -> Option<&EventFormat> {
        self.events.get(self.index(id)?)
    }

    /// Its place in [`Catalog::events`].
    #[inline]
    #[must_use]
    pub fn index(&self, id: u16) -> Option<usize> {
        (*self.by_id.get(usize::from(id))? as usize).checked_sub(1)
    }

    /// An event by name; the first of that name if `system` is `None`.
    #[must_use]
    pub fn find(&self, system: Option<&str>, name: &str) -> Option<&EventFormat> {
        self.events.iter().find(|event| {
            event.name() == name && system.is_none_or(|system| event.system() == system)
        })
    }

    /// All events, in the order they were added.
    #[must_use]
    pub fn events(&self) -> &[EventFormat] {
        &self.events
    }

    /// Byte order of the kernel.
    #[must_use]
    pub const fn endian(&self) -> Endian {
        self.endian
    }

    /// Size of the kernel's `long`.
    #[must_use]
    pub const fn long_size(&self) -> LongSize {
        self.long_size
    }
}
