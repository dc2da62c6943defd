//! Events as lines of JSON, one object a line.
//!
//! ```json
//! {"ts":2526619427000,"cpu":1,"pid":4242,"event":"sched:sched_waking","fields":{"comm":"qemu","pid":7}}
//! ```
//!
//! Numbers are written as numbers, also above 2^53: whoever reads them into doubles loses their last bits, not we.

use crate::event_format::{EventFormat, Value};
use crate::metadata::Metadata;
use crate::report::Entry;
use crate::ring_buffer::Missed;
use crate::text::{push_decimal, push_hex_padded, push_signed};
use crate::timeline::Note;

/// Appends one event and its newline.
pub fn write_event(metadata: &Metadata, entry: &Entry<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"ts\":");
    push_decimal(out, entry.timestamp);
    out.extend_from_slice(b",\"cpu\":");
    push_decimal(out, u64::from(entry.cpu));
    match entry.missed {
        Missed::None => {}
        Missed::Unknown => out.extend_from_slice(b",\"missed_before\":null"),
        Missed::Count(count) => {
            out.extend_from_slice(b",\"missed_before\":");
            push_decimal(out, count);
        }
    }
    match metadata.events.get(entry.type_id) {
        Some(event) => write_known(event, entry, out),
        None => {
            out.extend_from_slice(b",\"event\":null,\"type\":");
            push_decimal(out, u64::from(entry.type_id));
            out.extend_from_slice(b",\"raw\":\"");
            for byte in entry.payload {
                push_hex_padded(out, u64::from(*byte), 2);
            }
            out.push(b'"');
        }
    }
    out.extend_from_slice(b"}\n");
}

/// Appends a note and its newline.
pub fn write_note(note: &Note, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"ts\":");
    push_decimal(out, note.timestamp);
    out.extend_from_slice(b",\"note\":");
    write_string(note.kind.name().as_bytes(), out);
    out.extend_from_slice(b",\"text\":");
    write_string(note.kind.text().as_bytes(), out);
    out.extend_from_slice(b"}\n");
}

fn write_known(event: &EventFormat, entry: &Entry<'_>, out: &mut Vec<u8>) {
    let endian = event.endian();
    if let Some(pid) = event
        .field("common_pid")
        .and_then(|field| field.number(endian, entry.payload))
    {
        out.extend_from_slice(b",\"pid\":");
        push_signed(out, pid.cast_signed());
    }
    out.extend_from_slice(b",\"event\":");
    write_string(
        format!("{}:{}", event.system(), event.name()).as_bytes(),
        out,
    );
    out.extend_from_slice(b",\"fields\":{");
    for (index, field) in event.fields().iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_string(field.name.as_bytes(), out);
        out.push(b':');
        match field.value(endian, entry.payload) {
            Value::Signed(value) => push_signed(out, value),
            Value::Unsigned(value) | Value::Pointer(value) => push_decimal(out, value),
            Value::Text(text) => write_string(text, out),
            Value::Array(elements) => {
                out.push(b'[');
                for (index, value) in elements.iter().enumerate() {
                    if index > 0 {
                        out.push(b',');
                    }
                    if value < 0 {
                        out.push(b'-');
                    }
                    push_decimal(out, u64::try_from(value.unsigned_abs()).unwrap_or(u64::MAX));
                }
                out.push(b']');
            }
            Value::Missing => out.extend_from_slice(b"null"),
        }
    }
    out.push(b'}');
}

/// A JSON string. Bytes that are no UTF-8 become U+FFFD.
fn write_string(text: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for letter in String::from_utf8_lossy(text).chars() {
        match letter {
            '"' => out.extend_from_slice(b"\\\""),
            '\\' => out.extend_from_slice(b"\\\\"),
            '\n' => out.extend_from_slice(b"\\n"),
            '\t' => out.extend_from_slice(b"\\t"),
            control if u32::from(control) < 0x20 => {
                out.extend_from_slice(b"\\u");
                push_hex_padded(out, u64::from(u32::from(control)), 4);
            }
            letter => {
                let mut bytes = [0; 4];
                out.extend_from_slice(letter.encode_utf8(&mut bytes).as_bytes());
            }
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring_buffer::PageLayout;

    #[test]
    fn one_object_a_line() {
        let mut metadata = Metadata::bare(PageLayout::native64_le(4096).unwrap());
        let format = "name: a\nID: 3\nformat:\n\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
            \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
            \tfield:char s[4];\toffset:8;\tsize:4;\tsigned:0;\n\
            \tfield:s8 n[2];\toffset:12;\tsize:2;\tsigned:1;\n\
            \tfield:int far;\toffset:99;\tsize:4;\tsigned:1;\n\nprint fmt: \"\"\n";
        metadata.events.add("sys", format).unwrap();
        let payload = [
            3, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, b'"', 1, 0xff, 0, 0xff, 5, 0, 0,
        ];
        let entry = Entry {
            cpu: 1,
            timestamp: 7,
            type_id: 3,
            payload: &payload,
            missed: Missed::Count(2),
        };
        let mut out = Vec::new();
        write_event(&metadata, &entry, &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "{\"ts\":7,\"cpu\":1,\"missed_before\":2,\"pid\":-1,\"event\":\"sys:a\",\
             \"fields\":{\"s\":\"\\\"\\u0001\u{fffd}\",\"n\":[-1,5],\"far\":null}}\n"
        );
    }
}
