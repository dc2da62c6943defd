//! QMP, the QEMU Machine Protocol, as a tracer needs it: it must survive every QEMU.
//!
//! A tracer sits beside VMs of all ages, often for years, and does not get to choose their QEMU. So:
//!
//! # Design constraints
//!
//! - **Nothing a newer QEMU adds may fail.** Unknown events, migration states, run states and
//!   fields are kept as raw JSON; enumerations are open (`Other(String)`). A codec with closed
//!   enumerations ends the whole connection at the first new event, in the middle of a migration.
//! - **Nothing a peer sends may grow without bound.** Lines, events in wait, commands in flight and
//!   writes all have a named limit, and reaching one is a designed outcome: an error that says so.
//! - **No event that decides something is lost.** `MIGRATION`, `STOP`, `RESUME` and their like are
//!   edge-triggered and never repeated by QEMU; see [`event::is_critical`]. Everything else is
//!   bounded, and what is dropped is counted.
//! - **Late answers are normal.** QEMU's main loop may stand still for many seconds (NFS, a big
//!   `query-*` of somebody else's monitor). A command whose deadline passed gets its answer ignored
//!   and counted; the connection goes on.
//! - **The core has no runtime and no clock.** [`session::Session`] takes bytes and `now`, gives
//!   bytes and outcomes, and so is replayed from transcripts, byte by byte. The `client` feature
//!   adds tokio and the unix socket.
//!
//! # Which part does what
//!
//! | module | subject |
//! | --- | --- |
//! | [`mod@line`] | bytes to lines, bounded |
//! | [`message`] | a line to greeting, return, error or event |
//! | [`event`] | the events that mean something to us, and which of them are never dropped |
//! | [`command`] | typed commands; replies that tolerate a newer QEMU |
//! | [`session`] | the protocol machine |
//! | `client` | feature `client`: a unix socket and a session |
//! | `testing` | feature `testing`: a scripted QMP server |
//! | [`error`] | what can go wrong, as sentences |
//!
//! Time is `u64` nanoseconds from any fixed start throughout the core.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod command;
pub mod error;
pub mod event;
pub mod line;
pub mod message;
pub mod session;

#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "testing")]
pub mod testing;

pub use command::Command;
pub use error::{CloseReason, CommandError, QmpError};
pub use message::{Event, Greeting, Timestamp};

#[cfg(feature = "client")]
pub use client::{Client, ConnectOptions, EventReceiver};
#[cfg(feature = "client")]
pub use error::{ConnectError, ExecuteError};

/// The generated types of the `qapi-qmp` crate (QEMU 9.1's schema), for commands this crate has no
/// own type for.
///
/// Their *arguments* are safe with every QEMU. Their *replies* hold closed enumerations, so a reply
/// of a newer QEMU may fail to decode (that command only, never the connection): prefer the types
/// of [`command`] where they exist.
pub use qapi_qmp as qapi;
