//! Formats of kernel traces: pure functions from bytes to events and back.
//!
//! # Design constraints
//!
//! - **Formats only.** Bytes come in as slices or through [`std::io::Read`], bytes go out through
//!   [`std::io::Write`]. No clocks, no files by name, no knowledge of trails, ports or virtual machines.
//! - **The guest is the adversary.** A page, a format file, a symbol table or a `trace.dat` may say anything. Every
//!   size, offset, count and recursion is bounded by a named constant before it is used; what is wrong costs a clear
//!   diagnostic and that event, never the run, and never a panic.
//! - **Belief is a type.** Raw bytes become a [`ring_buffer::Page`] only through a check of its header; after that the
//!   records are walked without allocation.
//! - **Loss is declared.** Missed events are carried as [`ring_buffer::Missed`]: none, an unknown number, or exactly
//!   this many. Nothing in this crate turns "unknown" into zero.
//!
//! # A page in three lines
//!
//! ```
//! use vmtrail_trace::ring_buffer::{Page, PageLayout};
//!
//! let layout = PageLayout::native64_le(4096)?;
//! let bytes = vec![0_u8; 4096]; // from trace_pipe_raw
//! for record in Page::parse(layout, &bytes)?.records() {
//!     let record = record?;
//!     println!("{} type {} {} bytes", record.timestamp, record.type_id, record.payload.len());
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod bytes;
pub mod catalog;
pub mod ctf;
pub mod event_format;
pub mod filter;
pub mod fuzz;
pub mod json;
pub mod measure;
pub mod merge;
pub mod metadata;
pub mod perfetto;
pub mod print_fmt;
pub mod report;
pub mod ring_buffer;
mod text;
pub mod timeline;
pub mod trace_dat;

pub use bytes::{Endian, LongSize};

/// The README's example is compiled with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
