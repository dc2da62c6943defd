//! Events as the kernel describes them: the `format` files below `events/`.
//!
//! ```text
//! name: sched_switch
//! ID: 316
//! format:
//!     field:unsigned short common_type;   offset:0;   size:2;   signed:0;
//!     …
//!                                                        (an empty line ends the common fields)
//!     field:char prev_comm[16];           offset:8;   size:16;  signed:0;
//!     field:__data_loc char[] name;       offset:24;  size:4;   signed:0;
//!
//! print fmt: "prev_comm=%s", REC->prev_comm
//! ```
//!
//! (`kernel/trace/trace_events.c`, `f_show`.) The text comes from the guest. Sizes and offsets are checked where a field
//! is read, against the record at hand, so a lying format costs a [`Value::Missing`] and nothing else.

use std::sync::OnceLock;

use crate::print_fmt::{PrintError, Program};
use crate::text::until_nul;
use crate::{Endian, LongSize};

/// Longest format file accepted. The longest of Linux 6.18 has 5 KiB.
pub const MAX_FORMAT_BYTES: usize = 256 << 10;

/// Most fields of one event accepted. The kernel's own limits are lower (`MAX_TRACE_ARGS` and
/// `SYNTH_FIELDS_MAX` are 128 and 64).
pub const MAX_FIELDS: usize = 1024;

/// Why a format file was not accepted. Finishes "failed to …".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Larger than [`MAX_FORMAT_BYTES`].
    #[error("accept an event format of {length} bytes, more than {MAX_FORMAT_BYTES}")]
    TooLong {
        /// Bytes given.
        length: usize,
    },
    /// No `name:` or `ID:` line, or an ID that does not fit in 16 bits.
    #[error("find a usable `{line}` line in an event format")]
    MissingLine {
        /// Which line.
        line: &'static str,
    },
    /// A `field:` line that cannot be read.
    #[error("read the field line `{line}` of event {event}")]
    BadField {
        /// Name of the event.
        event: String,
        /// The line.
        line: String,
    },
    /// More than [`MAX_FIELDS`].
    #[error("accept event {event} with more than {MAX_FIELDS} fields")]
    TooManyFields {
        /// Name of the event.
        event: String,
    },
}

/// How a field lies in the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FieldKind {
    /// One number.
    Scalar,
    /// One address.
    Pointer,
    /// A fixed number of elements.
    Array,
    /// `x[]` of size zero: elements to the end of the record.
    Rest,
    /// `__data_loc`: a word with offset (low half, from the start of the record) and length (high half).
    DataLoc,
    /// `__rel_loc`: the same, the offset counted from behind the word.
    RelLoc,
}

/// One field of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name, without brackets.
    pub name: Box<str>,
    /// Type as written, without name and brackets.
    pub type_name: Box<str>,
    /// Offset in the record, in bytes.
    pub offset: u32,
    /// Size in bytes; 0 for [`FieldKind::Rest`].
    pub size: u32,
    /// Whether numbers (or elements) are signed.
    pub signed: bool,
    /// How it lies in the record.
    pub kind: FieldKind,
    /// Size of one element of an array, otherwise `size`.
    pub element_size: u32,
    /// Elements are characters: the field is text.
    pub text: bool,
}

/// A field of one record, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// An unsigned number.
    Unsigned(u64),
    /// A signed number.
    Signed(i64),
    /// An address.
    Pointer(u64),
    /// Text, up to its NUL. Bytes of the guest: usually, not always, UTF-8.
    Text(&'a [u8]),
    /// Elements of an array (or a number of an unheard-of size).
    Array(Elements<'a>),
    /// The field lies beyond the end of the record.
    Missing,
}

/// Elements of an array field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elements<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// Size of one element.
    pub element_size: usize,
    /// Whether elements are signed.
    pub signed: bool,
    /// Their byte order.
    pub endian: Endian,
}

impl<'a> Elements<'a> {
    /// The elements as numbers, sign-extended where they are signed; sizes other than 1, 2, 4, 8 go byte by byte.
    pub fn iter(&self) -> impl Iterator<Item = i128> + use<'a> {
        let Self {
            bytes,
            element_size,
            signed,
            endian,
        } = *self;
        let size = if matches!(element_size, 1 | 2 | 4 | 8) {
            element_size
        } else {
            1
        };
        bytes.chunks_exact(size).map(move |chunk| {
            let value = read_unsigned(endian, chunk, 0, size).unwrap_or(0);
            if signed {
                i128::from(extend(value, size))
            } else {
                i128::from(value)
            }
        })
    }
}

/// One event: name, fields, and how to print it.
#[derive(Debug)]
pub struct EventFormat {
    system: Box<str>,
    name: Box<str>,
    id: u16,
    common: usize,
    fields: Vec<Field>,
    print_fmt: Box<str>,
    endian: Endian,
    long_size: LongSize,
    // Parsed when the first record is printed: of two thousand events of a kernel a trace holds fifty.
    program: OnceLock<Result<Program, PrintError>>,
}

impl EventFormat {
    /// Reads the text of a `format` file. `system` is the directory it came from.
    pub fn parse(
        system: &str,
        text: &str,
        endian: Endian,
        long_size: LongSize,
    ) -> Result<Self, FormatError> {
        if text.len() > MAX_FORMAT_BYTES {
            return Err(FormatError::TooLong { length: text.len() });
        }
        let name = text
            .lines()
            .find_map(|line| line.strip_prefix("name:"))
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .ok_or(FormatError::MissingLine { line: "name:" })?;
        let id = text
            .lines()
            .find_map(|line| line.strip_prefix("ID:"))
            .and_then(|id| id.trim().parse().ok())
            .ok_or(FormatError::MissingLine { line: "ID:" })?;

        let mut fields = Vec::new();
        let mut common = None;
        let mut print_fmt = "";
        let mut offset = 0;
        for line in text.split_inclusive('\n') {
            let trimmed = line.trim();
            if let Some(rest) = trimmed.strip_prefix("print fmt:") {
                // The format may go on over lines (a literal newline in a string of an old kernel): to the end.
                let start = offset + line.len() - line.trim_start().len() + "print fmt:".len();
                print_fmt = text.get(start..).unwrap_or(rest).trim();
                break;
            }
            offset += line.len();
            if trimmed.starts_with("field:") || trimmed.starts_with("field special:") {
                if fields.len() == MAX_FIELDS {
                    return Err(FormatError::TooManyFields {
                        event: name.to_owned(),
                    });
                }
                fields.push(Field::parse(trimmed, long_size).ok_or_else(|| {
                    FormatError::BadField {
                        event: name.to_owned(),
                        line: trimmed.to_owned(),
                    }
                })?);
            } else if trimmed.is_empty() && !fields.is_empty() && common.is_none() {
                common = Some(fields.len());
            }
        }
        // An event without fields of its own has no empty line between: its fields are all common.
        let named_common = fields
            .iter()
            .take_while(|field: &&Field| field.name.starts_with("common_"))
            .count();
        let common = common.unwrap_or(named_common).min(named_common);
        Ok(Self {
            system: system.into(),
            name: name.into(),
            id,
            common,
            fields,
            print_fmt: print_fmt.into(),
            endian,
            long_size,
            program: OnceLock::new(),
        })
    }

    /// The directory of the event: `sched`, `irq`, `ftrace`.
    #[must_use]
    pub fn system(&self) -> &str {
        &self.system
    }

    /// Name of the event.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What `common_type` is in its records.
    #[must_use]
    pub const fn id(&self) -> u16 {
        self.id
    }

    /// The fields every event has (`common_type`, `common_flags`, `common_pid`, …).
    #[must_use]
    pub fn common_fields(&self) -> &[Field] {
        self.fields.get(..self.common).unwrap_or_default()
    }

    /// The event's own fields.
    #[must_use]
    pub fn fields(&self) -> &[Field] {
        self.fields.get(self.common..).unwrap_or_default()
    }

    /// A field by name, common ones first.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| &*field.name == name)
    }

    /// The `print fmt:` text.
    #[must_use]
    pub fn print_fmt(&self) -> &str {
        &self.print_fmt
    }

    /// Byte order of its records.
    #[must_use]
    pub const fn endian(&self) -> Endian {
        self.endian
    }

    /// Size of `long` in its records.
    #[must_use]
    pub const fn long_size(&self) -> LongSize {
        self.long_size
    }

    /// The print format, compiled when first asked for; or why it cannot be.
    pub fn program(&self) -> Result<&Program, &PrintError> {
        self.program.get_or_init(|| Program::compile(self)).as_ref()
    }
}

impl Field {
    fn parse(line: &str, long_size: LongSize) -> Option<Self> {
        let (_, line) = line.split_once(':')?;
        let (declaration, rest) = line.split_once(';')?;
        let (mut offset, mut size, mut signed) = (None, None, None);
        for part in rest.split(';') {
            match part.trim().split_once(':') {
                Some(("offset", value)) => offset = value.trim().parse().ok(),
                Some(("size", value)) => size = value.trim().parse().ok(),
                Some(("signed", value)) => signed = Some(value.trim() != "0"),
                _ => {}
            }
        }
        let (offset, size): (u32, u32) = (offset?, size?);
        // Whoever adds them later must not have to think of overflow.
        offset.checked_add(size)?;

        let declaration = declaration.trim();
        let (declaration, location) = match declaration.strip_prefix("__data_loc") {
            Some(rest) => (rest.trim_start(), Some(FieldKind::DataLoc)),
            None => match declaration.strip_prefix("__rel_loc") {
                Some(rest) => (rest.trim_start(), Some(FieldKind::RelLoc)),
                None => (declaration, None),
            },
        };
        // `char comm[16]` carries its brackets behind the name, `__data_loc char[] name` before it.
        let (declaration, count) = match declaration.strip_suffix(']') {
            Some(rest) => {
                let (head, count) = rest.rsplit_once('[')?;
                (head.trim_end(), Some(count.trim()))
            }
            None => (declaration, None),
        };
        let name_at = declaration
            .rfind([' ', '*', '\t', ']'])
            .map_or(0, |at| at + 1);
        let name = declaration.get(name_at..)?;
        if name.is_empty() {
            return None;
        }
        let type_text = declaration.get(..name_at)?.trim_end();
        let type_name = type_text.trim_end_matches(['[', ']', ' ']).trim_end();
        let pointer = type_name.ends_with('*');
        let kind = match (location, count) {
            (Some(location), _) => location,
            (None, Some(_)) if size == 0 => FieldKind::Rest,
            (None, Some(_)) => FieldKind::Array,
            (None, None) if pointer => FieldKind::Pointer,
            (None, None) => FieldKind::Scalar,
        };
        let is_array = !matches!(kind, FieldKind::Scalar | FieldKind::Pointer);
        let element_size = if !is_array {
            size
        } else {
            match count.and_then(|count| count.parse::<u32>().ok()) {
                Some(count) if count > 0 && kind == FieldKind::Array && size % count == 0 => {
                    size / count
                }
                _ => size_of_type(type_name, long_size).unwrap_or(1),
            }
        };
        let words = || type_name.split_whitespace();
        let text = is_array
            && words().any(|word| word == "char")
            && !words().any(|word| word == "unsigned" || word == "signed")
            && !pointer;
        // Kernels before 2.6.32 do not say.
        let signed = signed.unwrap_or({
            !pointer
                && matches!(
                    type_name,
                    "int" | "long" | "short" | "char" | "pid_t" | "s64" | "s32"
                )
        });
        Some(Self {
            name: name.into(),
            type_name: type_name.into(),
            offset,
            size,
            signed,
            kind,
            element_size,
            text,
        })
    }

    /// Where the field's bytes are in `payload`; `None` if they are not all there.
    #[inline]
    #[must_use]
    pub fn bytes<'a>(&self, endian: Endian, payload: &'a [u8]) -> Option<&'a [u8]> {
        let offset = self.offset as usize;
        match self.kind {
            FieldKind::Rest => payload.get(offset..),
            FieldKind::DataLoc => dynamic(endian, payload, offset, None),
            FieldKind::RelLoc => dynamic(endian, payload, offset, Some(self.size as usize)),
            _ => payload.get(offset..offset + self.size as usize),
        }
    }

    /// The field as a number, sign-extended if it is signed; `None` for arrays and beyond the end of the record.
    #[inline]
    #[must_use]
    pub fn number(&self, endian: Endian, payload: &[u8]) -> Option<u64> {
        let size = self.size as usize;
        let value = read_unsigned(endian, payload, self.offset as usize, size)?;
        Some(if self.signed {
            extend(value, size).cast_unsigned()
        } else {
            value
        })
    }

    /// The field, decoded.
    #[inline]
    #[must_use]
    pub fn value<'a>(&self, endian: Endian, payload: &'a [u8]) -> Value<'a> {
        match self.kind {
            FieldKind::Scalar if matches!(self.size, 1 | 2 | 4 | 8) => {
                match self.number(endian, payload) {
                    Some(value) if self.signed => Value::Signed(value.cast_signed()),
                    Some(value) => Value::Unsigned(value),
                    None => Value::Missing,
                }
            }
            FieldKind::Pointer => self
                .number(endian, payload)
                .map_or(Value::Missing, Value::Pointer),
            _ => match self.bytes(endian, payload) {
                None => Value::Missing,
                Some(bytes) if self.text => Value::Text(until_nul(bytes)),
                Some(bytes) => Value::Array(Elements {
                    bytes,
                    element_size: self.element_size as usize,
                    signed: self.signed,
                    endian,
                }),
            },
        }
    }
}

/// The bytes a location word at `offset` points to.
#[inline]
pub(crate) fn dynamic(
    endian: Endian,
    payload: &[u8],
    offset: usize,
    relative_size: Option<usize>,
) -> Option<&[u8]> {
    let word = endian.u32(payload, offset)?;
    let start = (word & 0xffff) as usize + relative_size.map_or(0, |size| offset + size);
    payload.get(start..start + (word >> 16) as usize)
}

/// A number of 1, 2, 4 or 8 bytes.
#[inline]
pub(crate) fn read_unsigned(
    endian: Endian,
    payload: &[u8],
    offset: usize,
    size: usize,
) -> Option<u64> {
    match size {
        4 => endian.u32(payload, offset).map(u64::from),
        8 => endian.u64(payload, offset),
        2 => endian.u16(payload, offset).map(u64::from),
        1 => payload.get(offset).copied().map(u64::from),
        _ => None,
    }
}

/// Sign extension from `size` bytes.
#[inline]
pub(crate) fn extend(value: u64, size: usize) -> i64 {
    let shift = 64 - 8 * u32::try_from(size.clamp(1, 8)).unwrap_or(8);
    (value << shift).cast_signed() >> shift
}

/// Size of a C type by its name, as far as names tell.
pub(crate) fn size_of_type(name: &str, long_size: LongSize) -> Option<u32> {
    let long = if long_size == LongSize::Four { 4 } else { 8 };
    if name.ends_with('*') {
        return Some(long);
    }
    let mut words = name
        .split_whitespace()
        .filter(|word| *word != "const" && *word != "volatile");
    let mut longs = 0;
    let mut base = None;
    for word in &mut words {
        match word {
            "long" => longs += 1,
            "unsigned" | "signed" | "int" => base = base.or(Some(4)),
            "char" | "u8" | "s8" | "__u8" | "__s8" | "uint8_t" | "int8_t" | "bool" | "_Bool"
            | "uchar" => base = Some(1),
            "short" | "u16" | "s16" | "__u16" | "__s16" | "uint16_t" | "int16_t" | "__le16"
            | "__be16" | "umode_t" | "ushort" => base = Some(2),
            "u32" | "s32" | "__u32" | "__s32" | "uint32_t" | "int32_t" | "__le32" | "__be32"
            | "uint" | "pid_t" | "uid_t" | "gid_t" | "dev_t" | "gfp_t" | "__poll_t" | "enum" => {
                base = Some(4)
            }
            "u64" | "s64" | "__u64" | "__s64" | "uint64_t" | "int64_t" | "__le64" | "__be64"
            | "loff_t" | "sector_t" | "ktime_t" | "time64_t" | "blkcnt_t" => base = Some(8),
            "size_t" | "ssize_t" | "ulong" | "uintptr_t" | "ino_t" | "__kernel_size_t" => {
                base = Some(long);
            }
            _ if base.is_none() && longs == 0 => return None,
            _ => {}
        }
    }
    match longs {
        0 => base,
        1 => Some(long),
        _ => Some(8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(line: &str) -> Field {
        Field::parse(line, LongSize::Eight).unwrap_or_else(|| panic!("{line}"))
    }

    #[test]
    fn declarations_of_real_kernels() {
        use FieldKind::{Array, DataLoc, Pointer, RelLoc, Rest, Scalar};
        for (declaration, size, name, type_name, kind, element, text) in [
            (
                "unsigned short common_type",
                2,
                "common_type",
                "unsigned short",
                Scalar,
                2,
                false,
            ),
            (
                "char prev_comm[16]",
                16,
                "prev_comm",
                "char",
                Array,
                1,
                true,
            ),
            (
                "char comm[TASK_COMM_LEN]",
                16,
                "comm",
                "char",
                Array,
                1,
                true,
            ),
            (
                "unsigned char addr[6]",
                6,
                "addr",
                "unsigned char",
                Array,
                1,
                false,
            ),
            (
                "unsigned long args[6]",
                48,
                "args",
                "unsigned long",
                Array,
                8,
                false,
            ),
            (
                "__data_loc char[] name",
                4,
                "name",
                "char",
                DataLoc,
                1,
                true,
            ),
            ("__rel_loc char[] name", 4, "name", "char", RelLoc, 1, true),
            (
                "__data_loc u64[] addrs",
                4,
                "addrs",
                "u64",
                DataLoc,
                8,
                false,
            ),
            (
                "const char * fmt",
                8,
                "fmt",
                "const char *",
                Pointer,
                8,
                false,
            ),
            (
                "struct page *page",
                8,
                "page",
                "struct page *",
                Pointer,
                8,
                false,
            ),
            ("u32 buf[]", 0, "buf", "u32", Rest, 4, false),
            ("char buf[]", 0, "buf", "char", Rest, 1, true),
            (
                "enum zone_type idx",
                4,
                "idx",
                "enum zone_type",
                Scalar,
                4,
                false,
            ),
            (
                "const char *const * argv",
                8,
                "argv",
                "const char *const *",
                Pointer,
                8,
                false,
            ),
            (
                "__data_loc unsigned int[] x",
                4,
                "x",
                "unsigned int",
                DataLoc,
                4,
                false,
            ),
            ("struct foo s", 12, "s", "struct foo", Scalar, 12, false),
        ] {
            let field = field(&format!(
                "field:{declaration};\toffset:8;\tsize:{size};\tsigned:0;"
            ));
            assert_eq!(
                (
                    &*field.name,
                    &*field.type_name,
                    field.kind,
                    field.element_size,
                    field.text
                ),
                (name, type_name, kind, element, text),
                "{declaration}"
            );
        }
    }

    #[test]
    fn lies_are_refused_or_missing() {
        for line in [
            "field:;\toffset:0;\tsize:4;",
            "field:int x;\toffset:4294967295;\tsize:4;",
            "field:int x;\tsize:4;",
            "field:int x[;\toffset:0;\tsize:99999999999;",
        ] {
            assert_eq!(Field::parse(line, LongSize::Eight), None, "{line}");
        }
        let far = field("field:int x;\toffset:4294960000;\tsize:4;\tsigned:1;");
        assert_eq!(far.value(Endian::Little, &[0; 64]), Value::Missing);
    }

    #[test]
    fn values() {
        let payload = [0xff_u8, 0xff, 0xff, 0xff, 9, 0, 3, 0, b'x', b'h', b'i', 0];
        let signed = field("field:int x;\toffset:0;\tsize:4;\tsigned:1;");
        let unsigned = field("field:u32 x;\toffset:0;\tsize:4;\tsigned:0;");
        let text = field("field:__data_loc char[] x;\toffset:4;\tsize:4;\tsigned:0;");
        let relative = field("field:__rel_loc char[] x;\toffset:4;\tsize:4;\tsigned:0;");
        assert_eq!(signed.value(Endian::Little, &payload), Value::Signed(-1));
        assert_eq!(
            unsigned.value(Endian::Little, &payload),
            Value::Unsigned(0xffff_ffff)
        );
        assert_eq!(text.value(Endian::Little, &payload), Value::Text(b"hi"));
        // Nine behind the word is beyond the end.
        assert_eq!(relative.value(Endian::Little, &payload), Value::Missing);
        let array = field("field:s8 x[4];\toffset:8;\tsize:4;\tsigned:1;");
        let Value::Array(elements) = array.value(Endian::Little, &payload) else {
            panic!()
        };
        assert_eq!(elements.iter().collect::<Vec<_>>(), [120, 104, 105, 0]);
    }

    #[test]
    fn a_whole_file() {
        let text = "name: foo\nID: 7\nformat:\n\
            \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
            \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
            \tfield:int x;\toffset:8;\tsize:4;\tsigned:1;\n\n\
            print fmt: \"x=%d\", REC->x\n";
        let event = EventFormat::parse("sys", text, Endian::Little, LongSize::Eight).unwrap();
        assert_eq!(
            (event.name(), event.id(), event.system()),
            ("foo", 7, "sys")
        );
        assert_eq!(event.common_fields().len(), 2);
        assert_eq!(event.fields().len(), 1);
        assert_eq!(event.print_fmt(), "\"x=%d\", REC->x");
        for broken in ["", "name: x\n", "name: x\nID: 70000\n", "ID: 5\n"] {
            assert!(EventFormat::parse("s", broken, Endian::Little, LongSize::Eight).is_err());
        }
    }
}
