//! The decisions of vmtrail, without I/O.
//!
//! # Design constraints
//!
//! - Facts and `now` go in, actions and deadlines come out: `handle_*` takes a fact, `poll_action` gives work until it
//!   gives none, `poll_timeout` says when to call `handle_timeout`. Nothing here reads a clock, a file or a socket, so
//!   the same machines are driven by tokio in production, by a seeded simulator, and by real QEMUs in the lab.
//! - Collections are ordered: a run with the same facts makes the same decisions in the same order.
//! - It does not know QMP. [`vmm`] holds our words; the driver translates in one place.
//!
//! # The parts
//!
//! - [`ledger`]: what of each stream is here, what is durable, what is missing.
//! - [`attach`]: one reader attached to one residency's ports: Hello until it is answered, stale epochs, dead ports.
//! - [`migration`]: one attempt to move the VM, from the first capability to the commit or the way back.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod attach;
pub mod ledger;
pub mod migration;
pub mod time;
pub mod vmm;

pub use attach::Attachment;
pub use ledger::Ledger;
pub use migration::Migration;
pub use time::Instant;
