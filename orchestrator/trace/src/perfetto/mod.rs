//! Perfetto traces: what ui.perfetto.dev opens.
//!
//! About a dozen messages are written, by hand; field numbers are from `protos/perfetto/trace/` of perfetto (checked
//! against the protos that PyPI's `perfetto` 0.59 carries):
//!
//! ```text
//! Trace.packet = 1: TracePacket { ftrace_events = 1, process_tree = 2, clock_snapshot = 6, timestamp = 8,
//!     trusted_packet_sequence_id = 10, track_event = 11, ftrace_stats = 34, system_info = 45, track_descriptor = 60 }
//! FtraceEventBundle { cpu = 1, event = 2, lost_events = 3 }
//! FtraceEvent { timestamp = 1, pid = 2, one of the typed events, or generic = 327 }
//! ```
//!
//! Times are written as boot time, perfetto's default clock, whatever clock they were taken with: one time line, already
//! mapped. (Given a guest's own clock and snapshots, trace_processor drops a clock that ever steps back, and with it the
//! events: `clock_synchronizer.cc`. A migrated guest's clock does.)
//!
//! A loss shows three times: as the flag of the bundle (perfetto keeps no count there), as a slice on the CPU's "lost
//! events" track with the exact number, and in `FtraceStats`.

mod check;
mod packet;
mod typed;
mod writer;

pub use check::{CheckError, Summary, check};
pub use writer::PerfettoWriter;
