//! What can go wrong, each as the end of a sentence that begins "failed to …".

use std::fmt;
use std::time::Duration;

use crate::line::LineTooLong;
use crate::message::MessageError;

/// QEMU's answer to a command that it did not carry out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("QEMU refused ({class}): {desc}")]
pub struct QmpError {
    /// The kind of error. Nearly all are [`ErrorClass::GenericError`].
    pub class: ErrorClass,
    /// QEMU's words for it. For people: they change between versions.
    pub desc: String,
}

/// The class of a [`QmpError`]: QEMU's `QapiErrorClass` (`qapi/error.json`), open at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ErrorClass {
    /// Everything without a class of its own.
    GenericError,
    /// This QEMU has no such command.
    CommandNotFound,
    /// The device is not active.
    DeviceNotActive,
    /// No such device.
    DeviceNotFound,
    /// KVM lacks something.
    KvmMissingCap,
    /// A class we have not heard of.
    Other(String),
}

impl From<&str> for ErrorClass {
    fn from(name: &str) -> Self {
        match name {
            "GenericError" => Self::GenericError,
            "CommandNotFound" => Self::CommandNotFound,
            "DeviceNotActive" => Self::DeviceNotActive,
            "DeviceNotFound" => Self::DeviceNotFound,
            "KVMMissingCap" => Self::KvmMissingCap,
            other => Self::Other(other.to_owned()),
        }
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::GenericError => "GenericError",
            Self::CommandNotFound => "CommandNotFound",
            Self::DeviceNotActive => "DeviceNotActive",
            Self::DeviceNotFound => "DeviceNotFound",
            Self::KvmMissingCap => "KVMMissingCap",
            Self::Other(name) => name,
        })
    }
}

/// Why a session came to its end. It is cloned into every command that waits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// We closed it.
    #[error("it was closed on our side")]
    Local,
    /// The peer closed it: QEMU exited, or its monitor was taken away.
    #[error("QEMU closed the connection")]
    PeerClosed,
    /// Reading or writing failed.
    #[error("the connection broke: {0}")]
    Io(String),
    /// Nothing came in the time allowed for the greeting.
    #[error(
        "no greeting came within {} ms: a QMP socket serves one client at a time and parks the others \
         silently, so another one (libvirt, another manager, another vmtrail) probably holds this one; \
         give vmtrail its own with `-qmp unix:PATH,server=on,wait=off`",
        after.as_millis()
    )]
    GreetingTimeout {
        /// How long we waited.
        after: Duration,
    },
    /// Something came, but no greeting.
    #[error("the peer does not speak QMP: {0}")]
    NotQmp(String),
    /// QEMU did not answer `qmp_capabilities`.
    #[error("QEMU did not answer `qmp_capabilities` within {} ms", after.as_millis())]
    NegotiationTimeout {
        /// How long we waited.
        after: Duration,
    },
    /// QEMU refused `qmp_capabilities`.
    #[error("QEMU refused to negotiate: {0}")]
    NegotiationRefused(QmpError),
    /// The peer takes no bytes.
    #[error("the peer read nothing for {} ms while we had commands to send", after.as_millis())]
    WriteTimeout {
        /// How long we waited.
        after: Duration,
    },
    /// A line over the limit.
    #[error(transparent)]
    LineTooLong(#[from] LineTooLong),
    /// A line that is no message, after a greeting that was one.
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] MessageError),
    /// A greeting in the middle: whatever answered before is not there any more.
    #[error("the peer greeted a second time")]
    SecondGreeting,
    /// More events that must not be dropped than can be kept.
    #[error(
        "{count} events ({bytes} bytes) that must not be dropped were waiting to be taken; \
         rather than lose one, the connection is given up"
    )]
    EventFlood {
        /// Events waiting.
        count: usize,
        /// Bytes of their lines.
        bytes: usize,
    },
}

/// Why a command has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// QEMU answered with an error.
    #[error(transparent)]
    Qemu(#[from] QmpError),
    /// The deadline passed.
    #[error(
        "no answer came within {} ms ({})", after.as_millis(),
        if *sent { "it was sent, and may still take effect" } else { "it was never sent" }
    )]
    Deadline {
        /// How long the command was given.
        after: Duration,
        /// Whether QEMU may have it: false where it waited behind others and was taken back.
        sent: bool,
    },
    /// The connection ended first.
    #[error("the connection ended: {0}")]
    Closed(#[source] CloseReason),
    /// More commands wait than the session holds.
    #[error("{limit} commands are waiting already")]
    TooMany {
        /// The bound.
        limit: usize,
    },
    /// Out of band was asked for, and this connection has none.
    #[error("QEMU runs no commands out of band on this connection")]
    NoOutOfBand,
    /// The command is longer than QEMU would read.
    #[error("the command has {bytes} bytes, of {limit} at most")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The bound.
        limit: usize,
    },
}

/// Why [`Client::execute`](crate::client::Client::execute) has no value.
#[cfg(feature = "client")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecuteError {
    /// The command failed; see [`CommandError`] for how.
    #[error("failed to execute `{command}`: {source}")]
    Command {
        /// The command's name.
        command: String,
        /// How it failed.
        source: CommandError,
    },
    /// The arguments could not be written as JSON.
    #[error("failed to encode the arguments of `{command}`")]
    Encode {
        /// The command's name.
        command: String,
        /// What serde says.
        source: serde_json::Error,
    },
    /// The answer has another shape than the command's type.
    #[error("failed to understand the answer to `{command}`: {excerpt}")]
    Decode {
        /// The command's name.
        command: String,
        /// How the answer begins.
        excerpt: String,
        /// What serde says.
        source: serde_json::Error,
    },
}

#[cfg(feature = "client")]
impl ExecuteError {
    /// QEMU's own error, where it is one.
    #[must_use]
    pub fn qemu(&self) -> Option<&QmpError> {
        match self {
            Self::Command {
                source: CommandError::Qemu(error),
                ..
            } => Some(error),
            _ => None,
        }
    }

    /// Whether this QEMU does not have the command.
    #[must_use]
    pub fn is_command_not_found(&self) -> bool {
        self.qemu()
            .is_some_and(|error| error.class == ErrorClass::CommandNotFound)
    }

    /// Whether the deadline passed (the connection goes on).
    #[must_use]
    pub fn is_deadline(&self) -> bool {
        matches!(
            self,
            Self::Command {
                source: CommandError::Deadline { .. },
                ..
            }
        )
    }

    /// Why the connection ended, where that is the cause.
    #[must_use]
    pub fn closed(&self) -> Option<&CloseReason> {
        match self {
            Self::Command {
                source: CommandError::Closed(reason),
                ..
            } => Some(reason),
            _ => None,
        }
    }
}

/// Why [`Client::connect`](crate::client::Client::connect) has no client.
///
/// The messages say what to do, because this is the first thing that goes wrong for everybody.
#[cfg(feature = "client")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No such file.
    #[error(
        "failed to connect to QMP at {path}: no such file (is the VM running, and was it started \
         with `-qmp unix:{path},server=on,wait=off`?)", path = path.display()
    )]
    Missing {
        /// The path that was tried.
        path: std::path::PathBuf,
    },
    /// A file of another kind.
    #[error(
        "failed to connect to QMP at {path}: it is {what}, not a unix socket", path = path.display()
    )]
    NotASocket {
        /// The path that was tried.
        path: std::path::PathBuf,
        /// What it is, such as "a directory".
        what: &'static str,
    },
    /// We may not.
    #[error(
        "failed to connect to QMP at {path}: permission denied (run as the user that owns the \
         socket, or as root)", path = path.display()
    )]
    PermissionDenied {
        /// The path that was tried.
        path: std::path::PathBuf,
    },
    /// A socket that nobody listens on.
    #[error(
        "failed to connect to QMP at {path}: nobody listens (the socket was left behind by a QEMU \
         that has exited)", path = path.display()
    )]
    Stale {
        /// The path that was tried.
        path: std::path::PathBuf,
    },
    /// A path that does not fit into a socket address.
    #[error(
        "failed to connect to QMP at {path}: the path is longer than the 107 bytes a unix socket may \
         have", path = path.display()
    )]
    PathTooLong {
        /// The path that was tried.
        path: std::path::PathBuf,
    },
    /// Another client holds the monitor.
    #[error(
        "failed to connect to QMP at {path}: {}. A QMP socket serves one client at a time and parks \
         the others silently, so another one (libvirt, another manager, another vmtrail) probably \
         holds this one. Give vmtrail its own: `-qmp unix:OTHER-PATH,server=on,wait=off`",
        waited.map_or_else(
            || "its queue of waiting clients is full".to_owned(),
            |waited| format!("no greeting came within {} ms", waited.as_millis()),
        ),
        path = path.display()
    )]
    Busy {
        /// The path that was tried.
        path: std::path::PathBuf,
        /// How long we waited; `None` where we could not even queue.
        waited: Option<Duration>,
    },
    /// Somebody listens who does not speak QMP.
    #[error(
        "failed to connect to QMP at {path}: the peer does not speak QMP ({detail}){}",
        if *human_monitor {
            "; this is QEMU's human monitor: use `-qmp` (or `-mon mode=control`), not `-monitor`"
        } else {
            ""
        },
        path = path.display()
    )]
    NotQmp {
        /// The path that was tried.
        path: std::path::PathBuf,
        /// What came instead of a greeting.
        detail: String,
        /// Whether it looks like HMP.
        human_monitor: bool,
    },
    /// The connection ended, or a limit was reached, before it was ready.
    #[error("failed to connect to QMP at {path}: {source}", path = path.display())]
    Closed {
        /// The path that was tried.
        path: std::path::PathBuf,
        /// What happened.
        source: CloseReason,
    },
    /// QEMU greeted but did not tell its state.
    #[error(
        "failed to learn the VM's state over QMP at {path}: {source}", path = path.display()
    )]
    Resync {
        /// The path that was tried.
        path: std::path::PathBuf,
        /// Which query failed, and how.
        source: ExecuteError,
    },
    /// Anything else the system says.
    #[error("failed to connect to QMP at {path}: {source}", path = path.display())]
    Io {
        /// The path that was tried.
        path: std::path::PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
}
