//! What is needed besides event formats to read a trace without its kernel: symbols, constant strings, task names.
//!
//! All of it is text from the guest, bounded here before it is kept.

mod comms;
mod printk;
mod symbols;

pub use comms::{Comms, Tgids};
pub use printk::PrintkFormats;
pub use symbols::{Symbol, SymbolCache, Symbols};

use crate::catalog::Catalog;
use crate::ring_buffer::PageLayout;

/// All that is needed to read the pages of one kernel.
#[derive(Debug)]
pub struct Metadata {
    /// Layout of its pages.
    pub layout: PageLayout,
    /// Its events.
    pub events: Catalog,
    /// Its symbols.
    pub symbols: Symbols,
    /// Its constant strings.
    pub printk: PrintkFormats,
    /// Names of its tasks.
    pub comms: Comms,
    /// Processes of its tasks.
    pub tgids: Tgids,
    /// What its time stamps count.
    pub clock: Clock,
}

impl Metadata {
    /// Metadata that knows nothing but the layout: records can be counted and timed, not named.
    #[must_use]
    pub fn bare(layout: PageLayout) -> Self {
        Self {
            layout,
            events: Catalog::new(layout.endian(), layout.long_size()),
            symbols: Symbols::default(),
            printk: PrintkFormats::default(),
            comms: Comms::default(),
            tgids: Tgids::default(),
            clock: Clock::default(),
        }
    }
}

/// A trace clock (`kernel/trace/trace.c`, `trace_clocks`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clock {
    name: Box<str>,
}

impl Clock {
    /// Longest name kept.
    const MAX_NAME: usize = 64;

    /// From the text of `trace_clock`, where the clock in use stands in brackets, or from a bare name.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let name = text
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'))
            .map_or(text, |(name, _)| name)
            .trim();
        let name = name.get(..Self::MAX_NAME).unwrap_or(name);
        Self {
            name: if name.is_empty() { "local" } else { name }.into(),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it counts nanoseconds. `counter` counts events, `x86-tsc` and `ppc-tb` cycles, `uptime` jiffies.
    #[must_use]
    pub fn is_nanoseconds(&self) -> bool {
        matches!(
            &*self.name,
            "local" | "global" | "perf" | "mono" | "mono_raw" | "boot" | "tai"
        )
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            name: "local".into(),
        }
    }
}
