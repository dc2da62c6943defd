//! The `metadata` text.

use std::fmt::Write;

use crate::event_format::{EventFormat, Field, FieldKind};
use crate::metadata::Metadata;
use crate::{Endian, LongSize};

/// How a field is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// An integer of the field's own size.
    Integer,
    /// Bytes up to a NUL.
    Text,
    /// A fixed number of elements.
    Array { count: u32, element: u32 },
    /// A u32 count, then elements.
    Sequence { element: u32 },
}

impl Shape {
    pub(super) fn of(field: &Field) -> Self {
        let element = if matches!(field.element_size, 1 | 2 | 4 | 8) {
            field.element_size
        } else {
            1
        };
        match field.kind {
            FieldKind::Scalar | FieldKind::Pointer if matches!(field.size, 1 | 2 | 4 | 8) => {
                Self::Integer
            }
            FieldKind::Scalar | FieldKind::Pointer => Self::Array {
                count: field.size,
                element: 1,
            },
            _ if field.text => Self::Text,
            FieldKind::Array => Self::Array {
                count: field.size / element,
                element,
            },
            _ => Self::Sequence { element },
        }
    }
}

/// The text for a kernel's events. `uuid` is that of the trace; `offset_ns` is what to add to times to get to 1970.
pub(super) fn text(
    metadata: &Metadata,
    uuid: [u8; 16],
    clock_frequency: u64,
    offset_ns: u64,
    host: &str,
) -> String {
    let order = if metadata.layout.endian() == Endian::Big {
        "be"
    } else {
        "le"
    };
    let uuid = uuid_text(uuid);
    let long = if metadata.layout.long_size() == LongSize::Four {
        32
    } else {
        64
    };
    let clock = identifier(metadata.clock.name());
    let (seconds, ticks) = (offset_ns / 1_000_000_000, offset_ns % 1_000_000_000);
    let host = quoted(host);
    let mut text = String::from("/* CTF 1.8 */\n\n");
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        r#"typealias integer {{ size = 8; align = 8; signed = false; }} := u8;
typealias integer {{ size = 16; align = 8; signed = false; }} := u16;
typealias integer {{ size = 32; align = 8; signed = false; }} := u32;
typealias integer {{ size = 64; align = 8; signed = false; }} := u64;
typealias integer {{ size = 8; align = 8; signed = true; }} := s8;
typealias integer {{ size = 16; align = 8; signed = true; }} := s16;
typealias integer {{ size = 32; align = 8; signed = true; }} := s32;
typealias integer {{ size = 64; align = 8; signed = true; }} := s64;
typealias integer {{ size = {long}; align = 8; signed = false; base = 16; }} := address;

trace {{
    major = 1;
    minor = 8;
    uuid = "{uuid}";
    byte_order = {order};
    packet.header := struct {{
        u32 magic;
        u8 uuid[16];
        u32 stream_id;
    }};
}};

env {{
    hostname = "{host}";
    domain = "kernel";
    tracer_name = "vmtrail";
    tracer_major = 0;
    tracer_minor = 1;
}};

clock {{
    name = "{clock}";
    freq = {clock_frequency};
    offset_s = {seconds};
    offset = {ticks};
}};

typealias integer {{ size = 64; align = 8; signed = false; map = clock.{clock}.value; }} := time;

stream {{
    id = 0;
    event.header := struct {{
        u16 id;
        time timestamp;
    }};
    event.context := struct {{
        u8 _common_flags;
        u8 _common_preempt_count;
        s32 _pid;
    }};
    packet.context := struct {{
        time timestamp_begin;
        time timestamp_end;
        u64 content_size;
        u64 packet_size;
        u64 packet_seq_num;
        u64 events_discarded;
        u32 cpu_id;
    }};
}};

stream {{
    id = 1;
    event.header := struct {{
        u16 id;
        time timestamp;
    }};
    packet.context := struct {{
        time timestamp_begin;
        time timestamp_end;
        u64 content_size;
        u64 packet_size;
        u64 packet_seq_num;
        u64 events_discarded;
    }};
}};

event {{
    name = "vmtrail";
    id = 0;
    stream_id = 1;
    fields := struct {{
        string _kind;
        string _text;
    }};
}};
"#
    );
    for event in metadata.events.events() {
        write_event(&mut text, event);
    }
    text
}

fn write_event(text: &mut String, event: &EventFormat) {
    let name = quoted(event.name());
    let _ = write!(
        text,
        "\nevent {{\n    name = \"{name}\";\n    id = {};\n    stream_id = 0;\n    fields := struct {{\n",
        event.id()
    );
    for (index, field) in event.fields().iter().enumerate() {
        let name = field_name(event, index);
        let integer =
            |size: u32, signed: bool| format!("{}{}", if signed { 's' } else { 'u' }, size * 8);
        let _ = match Shape::of(field) {
            Shape::Integer if field.kind == FieldKind::Pointer => {
                writeln!(
                    text,
                    "        {} {name};",
                    if field.size == 8 || field.size == 4 {
                        "address"
                    } else {
                        "u8"
                    }
                )
            }
            Shape::Integer => writeln!(
                text,
                "        {} {name};",
                integer(field.size, field.signed)
            ),
            Shape::Text => writeln!(text, "        string {name};"),
            Shape::Array { count, element } => {
                writeln!(
                    text,
                    "        {} {name}[{count}];",
                    integer(element, field.signed)
                )
            }
            Shape::Sequence { element } => writeln!(
                text,
                "        u32 {name}_length;\n        {} {name}[{name}_length];",
                integer(element, field.signed)
            ),
        };
    }
    text.push_str("    };\n};\n");
}

/// A field's name in TSDL: with an underscore before it, which readers take off again, so that no name is a keyword; and
/// with its number behind it where two fields would have the same.
fn field_name(event: &EventFormat, index: usize) -> String {
    let fields = event.fields();
    let Some(field) = fields.get(index) else {
        return String::from("_");
    };
    let name = identifier(&field.name);
    let before = fields.get(..index).unwrap_or_default();
    if before.iter().any(|other| identifier(&other.name) == name) {
        format!("_{name}_{index}")
    } else {
        format!("_{name}")
    }
}

/// Letters, digits and underscores only.
fn identifier(name: &str) -> String {
    let mut text: String = name
        .chars()
        .take(128)
        .map(|letter| {
            if letter.is_ascii_alphanumeric() {
                letter
            } else {
                '_'
            }
        })
        .collect();
    if text.is_empty() || text.starts_with(|first: char| first.is_ascii_digit()) {
        text.insert(0, '_');
    }
    text
}

/// For a string literal: no quotes, backslashes or control characters.
fn quoted(name: &str) -> String {
    name.chars()
        .take(256)
        .map(|letter| {
            if letter == '"' || letter == '\\' || letter.is_control() {
                '_'
            } else {
                letter
            }
        })
        .collect()
}

fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = String::new();
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}
