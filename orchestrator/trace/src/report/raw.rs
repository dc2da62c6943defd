//! Fields without their print format: for events whose format cannot be used, and for `raw` reports.

use crate::event_format::{EventFormat, Field, FieldKind, read_unsigned};
use crate::text::{push_decimal, push_hex, push_hex_padded, push_signed, until_nul};

/// Most bytes shown of a record nobody can name.
pub(super) const MAX_RAW_BYTES: usize = 4096;

/// trace-cmd's mark, then every field. The event is not skipped, and nobody takes the line for the kernel's own text.
pub(super) fn write_failed(event: &EventFormat, payload: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(b"[FAILED TO PARSE]");
    write_fields(event, payload, out);
}

/// ` name=value` for each field.
pub(super) fn write_fields(event: &EventFormat, payload: &[u8], out: &mut Vec<u8>) {
    for field in event.fields() {
        out.push(b' ');
        out.extend_from_slice(field.name.as_bytes());
        out.push(b'=');
        write_field(event, field, payload, out);
    }
}

/// One field by its type alone.
pub(super) fn write_field(event: &EventFormat, field: &Field, payload: &[u8], out: &mut Vec<u8>) {
    let endian = event.endian();
    let Some(bytes) = field.bytes(endian, payload) else {
        return out.extend_from_slice(b"<not in the record>");
    };
    if !matches!(field.kind, FieldKind::Scalar | FieldKind::Pointer) {
        let text_type = field.text || (field.element_size == 1 && field.type_name.contains("char"));
        if text_type && printable(bytes) {
            return out.extend_from_slice(until_nul(bytes));
        }
        out.extend_from_slice(b"ARRAY[");
        for (index, byte) in bytes.iter().enumerate() {
            if index > 0 {
                out.extend_from_slice(b", ");
            }
            push_hex_padded(out, u64::from(*byte), 2);
        }
        return out.push(b']');
    }
    let Some(value) = read_unsigned(endian, bytes, 0, bytes.len()) else {
        for byte in bytes {
            push_hex_padded(out, u64::from(*byte), 2);
        }
        return;
    };
    let long = field.type_name.contains("long") && !field.type_name.contains("long long");
    if field.kind == FieldKind::Pointer || (long && !field.signed) {
        out.extend_from_slice(b"0x");
        push_hex(out, value);
    } else if field.signed {
        push_signed(out, crate::event_format::extend(value, bytes.len()));
    } else {
        push_decimal(out, value);
    }
}

fn printable(bytes: &[u8]) -> bool {
    until_nul(bytes)
        .iter()
        .all(|byte| (0x20..0x7f).contains(byte) || (9..=13).contains(byte))
}
