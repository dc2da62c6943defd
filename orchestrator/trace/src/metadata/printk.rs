//! Constant strings of the traced kernel that binary records point to: tracefs `printk_formats`.

use crate::print_fmt::unescape;

/// Most strings kept. A kernel has a few thousand (`trace_printk` formats and strings of RCU and the like).
const MAX_FORMATS: usize = 200_000;

/// Most bytes of strings kept.
const MAX_BYTES: usize = 32 << 20;

/// Addresses and the strings at them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrintkFormats {
    entries: Vec<(u64, Box<[u8]>)>,
    truncated: bool,
}

impl PrintkFormats {
    /// Reads lines of the form `0xffffffff81c0ffee : "text\n"`. A newline at the end of a string is dropped: it ends
    /// the line of the report.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let mut formats = Self::default();
        let mut kept = 0;
        for line in text.split(|byte| *byte == b'\n') {
            let Some((address, string)) = parse_line(line) else {
                continue;
            };
            kept += string.len();
            if formats.entries.len() == MAX_FORMATS || kept > MAX_BYTES {
                formats.truncated = true;
                break;
            }
            let mut string = unescape(string);
            if string.last() == Some(&b'\n') {
                string.pop();
            }
            formats.entries.push((address, string.into()));
        }
        formats.entries.sort_by_key(|(address, _)| *address);
        formats
    }

    /// The string at `address`.
    #[must_use]
    pub fn text(&self, address: u64) -> Option<&[u8]> {
        let index = self
            .entries
            .binary_search_by_key(&address, |(address, _)| *address)
            .ok()?;
        self.entries.get(index).map(|(_, text)| &**text)
    }

    /// Number of strings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a bound cut the table.
    #[must_use]
    pub const fn is_truncated(&self) -> bool {
        self.truncated
    }
}

fn parse_line(line: &[u8]) -> Option<(u64, &[u8])> {
    let line = std::str::from_utf8(line.get(..line.iter().position(|byte| *byte == b':')?)?)
        .ok()
        .map(str::trim)
        .and_then(|address| address.strip_prefix("0x").or(Some(address)))
        .and_then(|address| u64::from_str_radix(address, 16).ok())
        .map(|address| (address, line))?;
    let (address, line) = line;
    let colon = line.iter().position(|byte| *byte == b':')?;
    let text = line.get(colon + 1..)?.trim_ascii();
    let text = text.strip_prefix(b"\"").unwrap_or(text);
    Some((address, text.strip_suffix(b"\"").unwrap_or(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let formats = PrintkFormats::parse(
            b"0xffffffff82 : \"Start\"\n0xffffffff81 : \"a: %d\\n b\\t\\\"q\\\"\\n\"\nnonsense\n: \"x\"\n",
        );
        assert_eq!(formats.len(), 2);
        assert_eq!(formats.text(0xff_ffff_ff82), Some(&b"Start"[..]));
        assert_eq!(formats.text(0xff_ffff_ff81), Some(&b"a: %d\n b\t\"q\""[..]));
        assert_eq!(formats.text(0), None);
    }
}
