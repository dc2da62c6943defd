//! Events that trace-cmd does not print by their print format.
//!
//! The list is that of the plugins of libtraceevent 1.7 (function, sched_switch, hrtimer, kmem, kvm, tlb, futex) and of
//! libtracecmd (function graph). Fields are looked up once, when the reporter is made.

use crate::event_format::{EventFormat, Field, FieldKind};
use crate::metadata::Comms;
use crate::print_fmt::{Environment, write_bprint};
use crate::text::{
    push_decimal, push_decimal_zeroed, push_hex, push_hex_padded, push_repeated, push_signed,
    push_text, until_nul,
};

use super::function::{CallStacks, GraphEntryFields, GraphExitFields, write_exit};
use super::{Entry, TaskColumn, raw};

/// Who writes what follows the event's name.
#[derive(Debug)]
pub(super) enum Handler {
    /// The event's own print format.
    Print,
    /// All fields as numbers.
    Raw,
    SchedSwitch(Box<SchedSwitch>),
    SchedWakeup(Box<SchedWakeup>),
    /// ip, parent_ip
    Function(Box<[Field; 2]>),
    /// ip, parent_ip, count, top_delta_ts, bottom_delta_ts
    FunctionRepeats(Box<[Field; 5]>),
    GraphEntry(Box<GraphEntryFields>),
    GraphExit(Box<GraphExitFields>),
    /// caller
    KernelStack(Box<Field>),
    /// id, buf
    RawData(Box<[Field; 2]>),
    /// ip, fmt, buf
    Bprint(Box<[Field; 3]>),
    /// timer, now or expires, function, softexpires
    Hrtimer {
        start: bool,
        fields: Box<HrtimerFields>,
    },
    /// call_site, then the print format
    CallSite(Box<Field>),
    KvmExit(Box<KvmExit>),
    /// vcpu_id, rip
    KvmEntry(Box<[Field; 2]>),
    /// pages, reason
    TlbFlush(Box<[Field; 2]>),
    /// uaddr, op, val, utime, uaddr2, val3
    Futex(Box<[Field; 6]>),
}

#[derive(Debug)]
pub(super) struct SchedSwitch {
    prev_comm: Field,
    prev_pid: Field,
    prev_prio: Field,
    prev_state: Field,
    next_comm: Field,
    next_pid: Field,
    next_prio: Field,
}

#[derive(Debug)]
pub(super) struct SchedWakeup {
    comm: Field,
    pid: Field,
    prio: Field,
    success: Option<Field>,
    target_cpu: Option<Field>,
}

#[derive(Debug)]
pub(super) struct HrtimerFields {
    timer: Field,
    time: Field,
    function: Option<Field>,
    softexpires: Option<Field>,
}

#[derive(Debug)]
pub(super) struct KvmExit {
    reason: Field,
    isa: Option<Field>,
    rip: Field,
    info: Option<[Field; 2]>,
}

/// What a handler works with.
pub(super) struct Task<'a, 'b, 'm> {
    pub(super) event: &'b EventFormat,
    pub(super) environment: &'b Environment<'b, 'm>,
    pub(super) entry: &'b Entry<'b>,
    pub(super) stacks: &'a mut CallStacks<'m>,
    pub(super) learned: &'a mut Comms,
    pub(super) tasks: &'a mut TaskColumn,
    pub(super) known: &'b Comms,
}

impl Handler {
    /// The handler of an event; its print format if the event is not special or lacks a field it should have.
    pub(super) fn of(event: &EventFormat) -> Self {
        Self::special(event).unwrap_or(Self::Print)
    }

    fn special(event: &EventFormat) -> Option<Self> {
        let field = |name: &str| event.field(name).cloned();
        let number = |name: &str| {
            field(name).filter(|field| matches!(field.kind, FieldKind::Scalar | FieldKind::Pointer))
        };
        Some(match (event.system(), event.name()) {
            ("sched", "sched_switch") => Self::SchedSwitch(Box::new(SchedSwitch {
                prev_comm: field("prev_comm")?,
                prev_pid: number("prev_pid")?,
                prev_prio: number("prev_prio")?,
                prev_state: number("prev_state")?,
                next_comm: field("next_comm")?,
                next_pid: number("next_pid")?,
                next_prio: number("next_prio")?,
            })),
            ("sched", "sched_wakeup" | "sched_wakeup_new") => {
                Self::SchedWakeup(Box::new(SchedWakeup {
                    comm: field("comm")?,
                    pid: number("pid")?,
                    prio: number("prio")?,
                    success: number("success"),
                    target_cpu: number("target_cpu"),
                }))
            }
            ("ftrace", "function") => {
                Self::Function(Box::new([number("ip")?, number("parent_ip")?]))
            }
            ("ftrace", "func_repeats") => Self::FunctionRepeats(Box::new([
                number("ip")?,
                number("parent_ip")?,
                number("count")?,
                number("top_delta_ts")?,
                number("bottom_delta_ts")?,
            ])),
            ("ftrace", "funcgraph_entry") => Self::GraphEntry(Box::new(GraphEntryFields {
                function: number("func")?,
                depth: number("depth")?,
            })),
            ("ftrace", "funcgraph_exit") => Self::GraphExit(Box::new(GraphExitFields {
                function: number("func")?,
                depth: number("depth")?,
                calltime: number("calltime")?,
                rettime: number("rettime")?,
            })),
            ("ftrace", "kernel_stack") => Self::KernelStack(Box::new(field("caller")?)),
            ("ftrace", "raw_data") => Self::RawData(Box::new([number("id")?, field("buf")?])),
            ("ftrace", "bprint") => {
                Self::Bprint(Box::new([number("ip")?, number("fmt")?, field("buf")?]))
            }
            ("timer", "hrtimer_start") => Self::Hrtimer {
                start: true,
                fields: Box::new(HrtimerFields {
                    timer: number("timer").or_else(|| number("hrtimer"))?,
                    time: number("expires")?,
                    function: number("function"),
                    softexpires: Some(number("softexpires")?),
                }),
            },
            ("timer", "hrtimer_expire_entry") => Self::Hrtimer {
                start: false,
                fields: Box::new(HrtimerFields {
                    timer: number("timer").or_else(|| number("hrtimer"))?,
                    time: number("now")?,
                    function: number("function"),
                    softexpires: None,
                }),
            },
            (
                "kmem",
                "kfree"
                | "kmalloc"
                | "kmalloc_node"
                | "kmem_cache_alloc"
                | "kmem_cache_alloc_node"
                | "kmem_cache_free",
            ) => Self::CallSite(Box::new(number("call_site")?)),
            ("kvm", "kvm_exit") => Self::KvmExit(Box::new(KvmExit {
                reason: number("exit_reason")?,
                isa: number("isa"),
                rip: number("guest_rip")?,
                info: number("info1").and_then(|one| Some([one, number("info2")?])),
            })),
            ("kvm", "kvm_entry") => Self::KvmEntry(Box::new([number("vcpu_id")?, number("rip")?])),
            ("tlb", "tlb_flush") => Self::TlbFlush(Box::new([number("pages")?, number("reason")?])),
            ("syscalls", "sys_enter_futex") => Self::Futex(Box::new([
                number("uaddr")?,
                number("op")?,
                number("val")?,
                number("utime")?,
                number("uaddr2")?,
                number("val3")?,
            ])),
            _ => return None,
        })
    }

    pub(super) fn write(&self, task: &mut Task<'_, '_, '_>, out: &mut Vec<u8>) {
        let start = out.len();
        if self.try_write(task, out).is_none() {
            // A record shorter than its format: what there is, field by field.
            out.truncate(start);
            raw::write_failed(task.event, task.entry.payload, out);
        }
    }

    fn try_write(&self, task: &mut Task<'_, '_, '_>, out: &mut Vec<u8>) -> Option<()> {
        let (event, payload) = (task.event, task.entry.payload);
        let endian = event.endian();
        let number = |field: &Field| field.number(endian, payload);
        match self {
            Self::Print => {
                let program = event.program().ok()?;
                program.write(task.environment, payload, out);
            }
            Self::Raw => raw::write_fields(event, payload, out),
            Self::SchedSwitch(fields) => fields.write(task, out)?,
            Self::SchedWakeup(fields) => fields.write(task, out)?,
            Self::Function(fields) => {
                write_function(task, number(&fields[0])?, number(&fields[1])?, out);
            }
            Self::FunctionRepeats(fields) => {
                let [ip, parent, count, top, bottom] = &**fields;
                write_function(task, number(ip)?, number(parent)?, out);
                out.extend_from_slice(b" (count: ");
                push_decimal(out, number(count)?);
                out.extend_from_slice(b"  last_ts: ");
                let delta = number(top)? << 32 | number(bottom)?;
                let micros = task.entry.timestamp.wrapping_sub(delta).saturating_add(500) / 1000;
                crate::text::push_decimal_right(out, micros / 1_000_000, 5);
                out.push(b'.');
                push_decimal_zeroed(out, micros % 1_000_000, 6);
                out.push(b')');
            }
            Self::GraphEntry(_) => return None,
            Self::GraphExit(fields) => {
                if !write_exit(fields, event, task.entry, out) {
                    return None;
                }
            }
            Self::KernelStack(caller) => write_stack(task, caller, out)?,
            Self::RawData(fields) => {
                out.extend_from_slice(b"# ");
                push_hex(out, number(&fields[0])?);
                for byte in payload.get(fields[1].offset as usize..)? {
                    out.push(b' ');
                    push_hex_padded(out, u64::from(*byte), 2);
                }
            }
            Self::Bprint(fields) => {
                let [ip, format, buffer] = &**fields;
                crate::print_fmt::write_symbol(task.environment, number(ip)?, false, out);
                out.extend_from_slice(b": ");
                let address = number(format)?;
                match task.environment.printk.text(address) {
                    Some(text) => {
                        let arguments = payload.get(buffer.offset as usize..)?;
                        write_bprint(task.environment, text, arguments, out);
                    }
                    None => {
                        out.extend_from_slice(b"(NO FORMAT FOUND at ");
                        push_hex(out, address);
                        out.extend_from_slice(b")\n");
                    }
                }
            }
            Self::Hrtimer { start, fields } => {
                out.extend_from_slice(b"hrtimer=0x");
                push_hex(out, number(&fields.timer)?);
                if !start {
                    out.extend_from_slice(b" now=");
                    push_decimal(out, number(&fields.time)?);
                }
                if let Some(function) = &fields.function {
                    out.extend_from_slice(b" function=");
                    let address = number(function)?;
                    match task.environment.symbols.find(address) {
                        Some(symbol) => {
                            out.extend_from_slice(symbol.name);
                            out.extend_from_slice(b"/0x");
                            push_hex(out, address.wrapping_sub(symbol.address) & 0xffff_ffff);
                        }
                        None => {
                            out.extend_from_slice(b"0x");
                            push_hex_padded(out, address, 8);
                        }
                    }
                }
                if let Some(softexpires) = &fields.softexpires {
                    out.extend_from_slice(b" expires=");
                    push_decimal(out, number(&fields.time)?);
                    out.extend_from_slice(b" softexpires=");
                    push_decimal(out, number(softexpires)?);
                }
            }
            Self::CallSite(field) => {
                let address = number(field)?;
                if let Some(symbol) = task.environment.symbols.find(address) {
                    out.push(b'(');
                    push_text(out, symbol.name);
                    out.extend_from_slice(b"+0x");
                    push_hex(out, address.wrapping_sub(symbol.address) & 0xffff_ffff);
                    out.extend_from_slice(b") ");
                }
                event.program().ok()?.write(task.environment, payload, out);
            }
            Self::KvmExit(fields) => {
                let isa = fields.isa.as_ref().and_then(number).unwrap_or(1);
                let reason = number(&fields.reason)?;
                out.extend_from_slice(b"reason ");
                match exit_reason(isa, reason & 0xffff_ffff) {
                    Some(name) => out.extend_from_slice(name.as_bytes()),
                    None => {
                        out.extend_from_slice(b"UNKNOWN (");
                        push_decimal(out, reason);
                        out.push(b')');
                    }
                }
                out.extend_from_slice(b" rip 0x");
                push_hex(out, number(&fields.rip)?);
                if let Some([one, two]) = &fields.info {
                    out.extend_from_slice(b" info ");
                    push_hex(out, number(one)?);
                    out.push(b' ');
                    push_hex(out, number(two)?);
                }
            }
            Self::KvmEntry(fields) => {
                out.extend_from_slice(b" vcpu ");
                push_decimal(out, number(&fields[0])?);
                out.extend_from_slice(b" rip 0x");
                push_hex(out, number(&fields[1])?);
            }
            Self::TlbFlush(fields) => {
                out.extend_from_slice(b"pages=");
                push_signed(out, number(&fields[0])?.cast_signed());
                let reason = number(&fields[1])?;
                out.extend_from_slice(b" reason=");
                out.extend_from_slice(match reason {
                    0 => b"flush on task switch",
                    1 => b"remote shootdown",
                    2 => b"local shootdown",
                    3 => b"local mm shootdown",
                    _ => b"",
                });
                out.extend_from_slice(b" (");
                push_signed(out, reason.cast_signed());
                out.push(b')');
            }
            Self::Futex(fields) => {
                let mut values = [0; 6];
                for (value, field) in values.iter_mut().zip(fields.iter()) {
                    *value = number(field)?;
                }
                if !write_futex(&values, out) {
                    event.program().ok()?.write(task.environment, payload, out);
                }
            }
        }
        Some(())
    }
}

impl SchedSwitch {
    fn write(&self, task: &mut Task<'_, '_, '_>, out: &mut Vec<u8>) -> Option<()> {
        let (endian, payload) = (task.event.endian(), task.entry.payload);
        let number = |field: &Field| field.number(endian, payload).map(u64::cast_signed);
        let pid = number(&self.prev_pid)?;
        write_comm(task, &self.prev_comm, pid, out)?;
        push_signed(out, pid);
        out.extend_from_slice(b" [");
        push_signed(out, number(&self.prev_prio)?);
        out.extend_from_slice(b"] ");
        write_state(number(&self.prev_state)?, out);
        out.extend_from_slice(b" ==> ");
        let pid = number(&self.next_pid)?;
        write_comm(task, &self.next_comm, pid, out)?;
        push_signed(out, pid);
        out.extend_from_slice(b" [");
        push_signed(out, number(&self.next_prio)?);
        out.push(b']');
        Some(())
    }
}

impl SchedWakeup {
    fn write(&self, task: &mut Task<'_, '_, '_>, out: &mut Vec<u8>) -> Option<()> {
        let (endian, payload) = (task.event.endian(), task.entry.payload);
        let number = |field: &Field| field.number(endian, payload).map(u64::cast_signed);
        let pid = number(&self.pid)?;
        write_comm(task, &self.comm, pid, out)?;
        push_signed(out, pid);
        out.extend_from_slice(b" [");
        push_signed(out, number(&self.prio)?);
        out.push(b']');
        if let Some(success) = self.success.as_ref().and_then(number) {
            out.extend_from_slice(b" success=");
            push_signed(out, success);
        }
        if let Some(cpu) = self.target_cpu.as_ref().and_then(number) {
            out.extend_from_slice(b" CPU:");
            push_decimal_zeroed(out, cpu.cast_unsigned(), 3);
        }
        Some(())
    }
}

/// `name:`, and the name is remembered for the pid if none is known.
fn write_comm(
    task: &mut Task<'_, '_, '_>,
    field: &Field,
    pid: i64,
    out: &mut Vec<u8>,
) -> Option<()> {
    let name = until_nul(field.bytes(task.event.endian(), task.entry.payload)?);
    push_text(out, name);
    out.push(b':');
    if let Ok(pid) = i32::try_from(pid)
        && pid != 0
        && task.known.get(pid).is_none()
        && task.learned.learn(pid, name)
    {
        task.tasks.forget(pid);
    }
    Some(())
}

/// The letters of `TASK_*` states by bit, as libtraceevent knows them.
fn write_state(state: i64, out: &mut Vec<u8>) {
    const STATES: &[u8; 8] = b"SDTtZXxW";
    let mut found = false;
    for (bit, letter) in STATES.iter().enumerate() {
        if state >> bit & 1 == 1 {
            if found {
                out.push(b'|');
            }
            found = true;
            out.push(*letter);
        }
    }
    if !found {
        out.push(b'R');
    }
}

fn write_function(task: &mut Task<'_, '_, '_>, ip: u64, parent_ip: u64, out: &mut Vec<u8>) {
    let function = task.environment.symbols.find(ip);
    let depth = task
        .environment
        .symbols
        .find(parent_ip)
        .map_or(0, |parent| {
            task.stacks.depth(
                task.entry.cpu,
                parent.name,
                function.map(|function| function.name),
            )
        });
    push_repeated(out, b' ', depth * 3);
    match function {
        Some(function) => out.extend_from_slice(function.name),
        None => {
            out.extend_from_slice(b"0x");
            push_hex(out, ip);
        }
    }
}

fn write_stack(task: &mut Task<'_, '_, '_>, caller: &Field, out: &mut Vec<u8>) -> Option<()> {
    out.extend_from_slice(b"<stack trace >\n");
    let endian = task.event.endian();
    let long = task.event.long_size();
    let bytes = task.entry.payload.get(caller.offset as usize..)?;
    for chunk in bytes.chunks_exact(long.bytes()) {
        let address = endian.long(long, chunk, 0)?;
        let end = if long == crate::LongSize::Four {
            0xffff_ffff
        } else {
            u64::MAX
        };
        if address == end {
            break;
        }
        out.extend_from_slice(b"=> ");
        if let Some(symbol) = task.environment.symbols.find(address) {
            out.extend_from_slice(symbol.name);
            out.extend_from_slice(b" (");
            push_hex(out, address);
            out.extend_from_slice(b")\n");
        } else {
            push_hex(out, address);
            out.push(b'\n');
        }
    }
    Some(())
}

/// `FUTEX_*` operations by number and which arguments they have, from futex(2).
fn write_futex(values: &[u64; 6], out: &mut Vec<u8>) -> bool {
    const PRIVATE: u64 = 128;
    const REALTIME: u64 = 256;
    /// How an argument is shown.
    #[derive(Clone, Copy)]
    enum Show {
        No,
        Count,
        Hex,
    }
    use Show::{Count, Hex, No};
    let [uaddr, op, val, utime, uaddr2, val3] = *values;
    let (name, shows, second): (&str, [Show; 4], &str) = match op & !(PRIVATE | REALTIME) {
        0 => ("FUTEX_WAIT", [Hex, Hex, No, No], "utime"),
        1 => ("FUTEX_WAKE", [Count, No, No, No], ""),
        2 => ("FUTEX_FD", [Count, No, No, No], ""),
        3 => ("FUTEX_REQUEUE", [Count, Count, Hex, No], "val2"),
        4 => ("FUTEX_CMP_REQUEUE", [Count, Count, Hex, Hex], "val2"),
        5 => ("FUTEX_WAKE_OP", [Count, Count, Hex, Hex], "val2"),
        6 => ("FUTEX_LOCK_PI", [No, Hex, No, No], "utime"),
        7 => ("FUTEX_UNLOCK_PI", [No, No, No, No], ""),
        8 => ("FUTEX_TRYLOCK_PI", [No, No, No, No], ""),
        9 => ("FUTEX_WAIT_BITSET", [Hex, Hex, No, Hex], "utime"),
        10 => ("FUTEX_WAKE_BITSET", [Count, No, No, Hex], ""),
        11 => ("FUTEX_WAIT_REQUEUE_PI", [Hex, Hex, Hex, Hex], "utime"),
        12 => ("FUTEX_CMP_REQUEUE_PI", [Count, Count, Hex, Hex], "val2"),
        _ => return false,
    };
    out.extend_from_slice(b"op=");
    out.extend_from_slice(name.as_bytes());
    if op & PRIVATE != 0 {
        out.extend_from_slice(b"|FUTEX_PRIVATE_FLAG");
    }
    if op & REALTIME != 0 {
        out.extend_from_slice(b"|FUTEX_CLOCK_REALTIME");
    }
    let arguments = [
        ("val", val),
        (second, utime),
        ("uaddr2", uaddr2),
        ("val3", val3),
    ];
    for ((name, value), show) in
        std::iter::once((("uaddr", uaddr), Hex)).chain(arguments.into_iter().zip(shows))
    {
        if matches!(show, No) {
            continue;
        }
        out.push(b' ');
        out.extend_from_slice(name.as_bytes());
        out.push(b'=');
        if matches!(show, Hex) {
            out.extend_from_slice(b"0x");
            push_hex_padded(out, value, 8);
        } else {
            push_decimal(out, value);
        }
    }
    true
}

/// Why a guest left: Intel SDM volume 3 appendix C (isa 1), AMD APM volume 2 appendix C (isa 2); the names are those of
/// `arch/x86/include/uapi/asm/vmx.h` and `svm.h` without their prefix, as libtraceevent has them.
fn exit_reason(isa: u64, reason: u64) -> Option<&'static str> {
    let table: &[(u64, &str)] = match isa {
        1 => &VMX_EXITS,
        2 => &SVM_EXITS,
        _ => return Some("UNKNOWN-ISA"),
    };
    table
        .iter()
        .find(|(value, _)| *value == reason)
        .map(|(_, name)| *name)
}

const VMX_EXITS: [(u64, &str); 44] = [
    (0, "EXCEPTION_NMI"),
    (1, "EXTERNAL_INTERRUPT"),
    (2, "TRIPLE_FAULT"),
    (7, "PENDING_INTERRUPT"),
    (8, "NMI_WINDOW"),
    (9, "TASK_SWITCH"),
    (10, "CPUID"),
    (12, "HLT"),
    (13, "INVD"),
    (14, "INVLPG"),
    (15, "RDPMC"),
    (16, "RDTSC"),
    (18, "VMCALL"),
    (19, "VMCLEAR"),
    (20, "VMLAUNCH"),
    (21, "VMPTRLD"),
    (22, "VMPTRST"),
    (23, "VMREAD"),
    (24, "VMRESUME"),
    (25, "VMWRITE"),
    (26, "VMOFF"),
    (27, "VMON"),
    (28, "CR_ACCESS"),
    (29, "DR_ACCESS"),
    (30, "IO_INSTRUCTION"),
    (31, "MSR_READ"),
    (32, "MSR_WRITE"),
    (36, "MWAIT_INSTRUCTION"),
    (39, "MONITOR_INSTRUCTION"),
    (40, "PAUSE_INSTRUCTION"),
    (41, "MCE_DURING_VMENTRY"),
    (43, "TPR_BELOW_THRESHOLD"),
    (44, "APIC_ACCESS"),
    (45, "EOI_INDUCED"),
    (48, "EPT_VIOLATION"),
    (49, "EPT_MISCONFIG"),
    (50, "INVEPT"),
    (52, "PREEMPTION_TIMER"),
    (54, "WBINVD"),
    (55, "XSETBV"),
    (56, "APIC_WRITE"),
    (58, "INVPCID"),
    (62, "PML_FULL"),
    (63, "XSAVES"),
];

const SVM_EXITS: [(u64, &str); 52] = [
    (0x000, "EXIT_READ_CR0"),
    (0x003, "EXIT_READ_CR3"),
    (0x004, "EXIT_READ_CR4"),
    (0x008, "EXIT_READ_CR8"),
    (0x010, "EXIT_WRITE_CR0"),
    (0x013, "EXIT_WRITE_CR3"),
    (0x014, "EXIT_WRITE_CR4"),
    (0x018, "EXIT_WRITE_CR8"),
    (0x040, "EXIT_EXCP_DE"),
    (0x041, "EXIT_EXCP_DB"),
    (0x043, "EXIT_EXCP_BP"),
    (0x044, "EXIT_EXCP_OF"),
    (0x046, "EXIT_EXCP_UD"),
    (0x047, "EXIT_EXCP_NM"),
    (0x048, "EXIT_EXCP_DF"),
    (0x04a, "EXIT_EXCP_TS"),
    (0x04b, "EXIT_EXCP_NP"),
    (0x04c, "EXIT_EXCP_SS"),
    (0x04d, "EXIT_EXCP_GP"),
    (0x04e, "EXIT_EXCP_PF"),
    (0x060, "EXIT_INTR"),
    (0x061, "EXIT_NMI"),
    (0x062, "EXIT_SMI"),
    (0x063, "EXIT_INIT"),
    (0x064, "EXIT_VINTR"),
    (0x06e, "EXIT_RDTSC"),
    (0x06f, "EXIT_RDPMC"),
    (0x072, "EXIT_CPUID"),
    (0x074, "EXIT_IRET"),
    (0x076, "EXIT_INVD"),
    (0x077, "EXIT_PAUSE"),
    (0x078, "EXIT_HLT"),
    (0x079, "EXIT_INVLPG"),
    (0x07a, "EXIT_INVLPGA"),
    (0x07b, "EXIT_IOIO"),
    (0x07c, "EXIT_MSR"),
    (0x07d, "EXIT_TASK_SWITCH"),
    (0x07f, "EXIT_SHUTDOWN"),
    (0x080, "EXIT_VMRUN"),
    (0x081, "EXIT_VMMCALL"),
    (0x082, "EXIT_VMLOAD"),
    (0x083, "EXIT_VMSAVE"),
    (0x087, "EXIT_RDTSCP"),
    (0x089, "EXIT_WBINVD"),
    (0x08a, "EXIT_MONITOR"),
    (0x08b, "EXIT_MWAIT"),
    (0x08c, "EXIT_MWAIT_COND"),
    (0x08d, "EXIT_XSETBV"),
    (0x400, "EXIT_NPF"),
    (0x401, "EXIT_AVIC_INCOMPLETE_IPI"),
    (0x402, "EXIT_AVIC_UNACCELERATED_ACCESS"),
    (0xffff_ffff, "EXIT_ERR"),
];
