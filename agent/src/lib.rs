//! The guest side of vmtrail: takes ring-buffer pages out of tracefs and puts them, framed, on virtio-serial ports.
//!
//! ```text
//! tracefs instance --splice--> pipe --tee--> retention pipe (until acknowledged)
//!                                |
//!          header page --write-->+--splice--> port, non-blocking
//! ```
//!
//! - [`session`] decides, without I/O; the simulator runs it against the host's ledger.
//! - [`pump`] executes: one thread, one `poll(2)`, pages by reference.
//! - [`tracefs`] owns the instance, [`ports`] finds the ports, [`args`] reads the command line.
//! - [`sys`] holds the system calls.

pub mod args;
pub mod metadata;
pub mod ports;
pub mod pump;
pub mod session;
pub mod sys;
pub mod tracefs;
