//! Our words for what a virtual machine monitor says and is told. QMP is one way to say them.

/// The two ends of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The QEMU that the VM leaves.
    Source,
    /// The QEMU that waits for it.
    Destination,
}

/// How far a migration is, by the monitor's word. States that a newer monitor invents are `Other` and mean: go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// No migration was ever started, or it was reset.
    None,
    /// Connecting.
    Setup,
    /// Precopy passes.
    Active,
    /// The VM is stopped and its state not yet saved; it waits for us.
    PreSwitchover,
    /// Device state is being saved or loaded.
    Device,
    /// The destination runs and fetches pages.
    PostcopyActive,
    /// The source sent everything.
    Completed,
    /// Being cancelled.
    Cancelling,
    /// Cancelled.
    Cancelled,
    /// Failed.
    Failed,
    /// Anything else, named as the monitor does.
    Other(String),
}

/// What a monitor says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The migration is in this state.
    Status(Status),
    /// The vCPUs stopped. Host wall time.
    Stopped {
        /// Nanoseconds since the Unix epoch.
        wall_ns: u64,
    },
    /// The vCPUs run. Host wall time.
    Resumed {
        /// Nanoseconds since the Unix epoch.
        wall_ns: u64,
    },
    /// The guest was reset.
    Reset,
    /// The answer to [`Command::QueryRunning`].
    Running(bool),
    /// The monitor is gone.
    Closed(String),
}

/// What a monitor is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Report migration events.
    EnableEvents,
    /// Ask the destination to confirm that it loaded the state.
    EnableReturnPath,
    /// Wait before the switchover (or do not).
    PauseBeforeSwitchover(bool),
    /// Listen.
    Incoming(String),
    /// Go.
    Migrate(String),
    /// Leave the pause before the switchover.
    Continue,
    /// Give up.
    Cancel,
    /// Report the state now ([`Event::Status`]).
    QueryStatus,
    /// Report whether the vCPUs run ([`Event::Running`]).
    QueryRunning,
}
