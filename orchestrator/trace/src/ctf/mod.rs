//! Common Trace Format 1.8: a directory that babeltrace2 and Trace Compass open.
//!
//! One file a CPU, made of packets, and a text, `metadata`, that describes them in TSDL
//! (<https://diamon.org/ctf/v1.8.3/>):
//!
//! ```text
//! packet header   u32 magic c1fc1fc1, u8 uuid[16], u32 stream_id
//! packet context  u64 timestamp_begin, timestamp_end, content_size, packet_size (bits), packet_seq_num,
//!                 u64 events_discarded (all so far on this CPU), u32 cpu_id
//! event header    u16 id, u64 timestamp
//! event context   u8 common_flags, u8 common_preempt_count, s32 pid
//! event           its fields, in the traced kernel's byte order; text up to a NUL
//! ```
//!
//! CTF has words for both kinds of loss, and readers say them aloud: `events_discarded` rises by the events the kernel
//! lost (a packet ends before the event behind the loss, so that the reader puts it in the right place), and
//! `packet_seq_num` skips the pages that are known to be missing. A loss without a number raises `events_discarded` by
//! one: CTF cannot say "some", and zero would hide it; [`CtfTotals`] keeps the two apart.

mod metadata;
mod writer;

pub use writer::{CtfOutput, CtfTotals, CtfWriter};
