//! `trace.dat`, the file of trace-cmd, versions 6 and 7.
//!
//! The format is described in trace-cmd's `Documentation/trace-cmd/trace-cmd.dat.v6.5.txt` and `…v7.5.txt`; where the
//! documents are silent, what trace-cmd 3.1.6 itself writes and reads is meant.
//!
//! ```text
//! both     17 08 44 "tracing" "6\0" or "7\0", u8 big-endian?, u8 size of long, u32 page size
//! v6       header_page, header_event, ftrace formats, event systems, kallsyms, printk formats, command lines,
//!          u32 CPUs, ["options  \0" options], "flyrecord\0", offset and size of each CPU's pages, [clock], pages
//! v7       compression name and version, u64 offset of the first options section
//!          sections: u16 id, u16 flags, u32 name, u64 size; options point to the other sections, the last option of a
//!          section to the next options section
//! ```

mod check;
mod compression;
mod input;
mod options;
mod reader;
mod writer;

pub use check::Contents;
pub use compression::Compression;
pub use input::ReadError;
pub use options::{CpuStat, FileOptions, TimeSample, TimeShift};
pub use reader::{Buffer, CpuData, CpuPages, TraceFile};
pub use writer::{FileInfo, GuestInfo, KernelTexts, Version, WriteError, Writer};

/// First bytes of every file.
pub(crate) const MAGIC: &[u8; 10] = b"\x17\x08\x44tracing";

/// Ids of options and, where they point to one, of sections (`include/private/trace-cmd-private.h`).
pub(crate) mod id {
    pub(crate) const DONE: u16 = 0;
    pub(crate) const CPUSTAT: u16 = 2;
    pub(crate) const BUFFER: u16 = 3;
    pub(crate) const TRACECLOCK: u16 = 4;
    pub(crate) const UNAME: u16 = 5;
    pub(crate) const OFFSET: u16 = 7;
    pub(crate) const CPUCOUNT: u16 = 8;
    pub(crate) const VERSION: u16 = 9;
    pub(crate) const TRACEID: u16 = 11;
    pub(crate) const TIME_SHIFT: u16 = 12;
    pub(crate) const GUEST: u16 = 13;
    pub(crate) const TSC2NSEC: u16 = 14;
    pub(crate) const HEADER_INFO: u16 = 16;
    pub(crate) const FTRACE_EVENTS: u16 = 17;
    pub(crate) const EVENT_FORMATS: u16 = 18;
    pub(crate) const KALLSYMS: u16 = 19;
    pub(crate) const PRINTK: u16 = 20;
    pub(crate) const CMDLINES: u16 = 21;
}

/// Flag of a section: its content is compressed.
pub(crate) const SECTION_COMPRESSED: u16 = 1;
