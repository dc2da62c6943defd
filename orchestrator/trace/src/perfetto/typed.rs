//! Events that perfetto has messages for: from these it builds scheduling, interrupts, syscalls and frequencies.
//!
//! Field numbers are those of `protos/perfetto/trace/ftrace/*.proto`.

use crate::event_format::{EventFormat, Field, FieldKind};

/// How a field goes into a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Signed,
    Unsigned,
    Text,
    /// `repeated uint64`
    Words,
}

/// An event's message: number in `FtraceEvent`, and its fields by number.
#[derive(Clone, Debug)]
pub(super) struct Typed {
    pub(super) message: u32,
    pub(super) fields: Vec<(Field, u32, Kind)>,
}

type Row = (
    &'static str,
    &'static str,
    u32,
    &'static [(&'static str, u32, Kind)],
);

const WAKE: &[(&str, u32, Kind)] = &[
    ("comm", 1, Kind::Text),
    ("pid", 2, Kind::Signed),
    ("prio", 3, Kind::Signed),
    ("success", 4, Kind::Signed),
    ("target_cpu", 5, Kind::Signed),
];
const STATE: &[(&str, u32, Kind)] = &[("state", 1, Kind::Unsigned), ("cpu_id", 2, Kind::Unsigned)];
const VEC: &[(&str, u32, Kind)] = &[("vec", 1, Kind::Unsigned)];
const WORK: &[(&str, u32, Kind)] = &[("work", 1, Kind::Unsigned), ("function", 2, Kind::Unsigned)];

const ROWS: &[Row] = &[
    (
        "ftrace",
        "print",
        3,
        &[("ip", 1, Kind::Unsigned), ("buf", 2, Kind::Text)],
    ),
    (
        "sched",
        "sched_switch",
        4,
        &[
            ("prev_comm", 1, Kind::Text),
            ("prev_pid", 2, Kind::Signed),
            ("prev_prio", 3, Kind::Signed),
            ("prev_state", 4, Kind::Signed),
            ("next_comm", 5, Kind::Text),
            ("next_pid", 6, Kind::Signed),
            ("next_prio", 7, Kind::Signed),
        ],
    ),
    ("power", "cpu_frequency", 11, STATE),
    ("power", "cpu_idle", 13, STATE),
    ("sched", "sched_wakeup", 17, WAKE),
    ("sched", "sched_waking", 20, WAKE),
    ("irq", "softirq_entry", 24, VEC),
    ("irq", "softirq_exit", 25, VEC),
    (
        "irq",
        "irq_handler_entry",
        36,
        &[
            ("irq", 1, Kind::Signed),
            ("name", 2, Kind::Text),
            ("handler", 3, Kind::Unsigned),
        ],
    ),
    (
        "irq",
        "irq_handler_exit",
        37,
        &[("irq", 1, Kind::Signed), ("ret", 2, Kind::Signed)],
    ),
    ("workqueue", "workqueue_execute_end", 57, WORK),
    ("workqueue", "workqueue_execute_start", 58, WORK),
    ("sched", "sched_wakeup_new", 114, WAKE),
    (
        "task",
        "task_newtask",
        235,
        &[
            ("pid", 1, Kind::Signed),
            ("comm", 2, Kind::Text),
            ("clone_flags", 3, Kind::Unsigned),
            ("oom_score_adj", 4, Kind::Signed),
        ],
    ),
    (
        "task",
        "task_rename",
        236,
        &[
            ("pid", 1, Kind::Signed),
            ("oldcomm", 2, Kind::Text),
            ("newcomm", 3, Kind::Text),
            ("oom_score_adj", 4, Kind::Signed),
        ],
    ),
    (
        "raw_syscalls",
        "sys_enter",
        329,
        &[("id", 1, Kind::Signed), ("args", 2, Kind::Words)],
    ),
    (
        "raw_syscalls",
        "sys_exit",
        330,
        &[("id", 1, Kind::Signed), ("ret", 2, Kind::Signed)],
    ),
];

impl Typed {
    /// The message of an event, if perfetto has one and the event has fields for it.
    pub(super) fn of(event: &EventFormat) -> Option<Self> {
        let (_, _, message, fields) = ROWS
            .iter()
            .find(|(system, name, ..)| *system == event.system() && *name == event.name())?;
        let fields: Vec<(Field, u32, Kind)> = fields
            .iter()
            .filter_map(|(name, number, kind)| {
                let field = event.field(name)?;
                // A kernel whose field is of another kind than perfetto thinks: better none than nonsense.
                let scalar = matches!(field.kind, FieldKind::Scalar | FieldKind::Pointer);
                let fits = match kind {
                    Kind::Signed | Kind::Unsigned => scalar,
                    Kind::Text => field.text,
                    Kind::Words => field.kind == FieldKind::Array,
                };
                fits.then(|| (field.clone(), *number, *kind))
            })
            .collect();
        (!fields.is_empty()).then_some(Self {
            message: *message,
            fields,
        })
    }
}
