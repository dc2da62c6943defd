//! Tokens of a `print fmt:` line.

use super::PrintError;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Name(Box<str>),
    /// A number and its suffix: unsigned, number of `l`s.
    Number {
        value: u64,
        decimal: bool,
        unsigned: bool,
        longs: u8,
    },
    Text(Box<[u8]>),
    /// An operator or a delimiter.
    Punct(&'static str),
}

/// Longest first, so that `<<` is not read as two `<`.
const PUNCTS: [&str; 37] = [
    "...", "<<=", ">>=", "->", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "++", "--", "(",
    ")", "[", "]", "{", "}", ",", "?", ":", ";", "!", "~", "+", "-", "*", "/", "%", "<", ">", "&",
    "|", "^", "=",
];

/// Splits the whole text. Its length is bounded by the format file's, and every token takes at least one byte of it.
pub(super) fn tokens(text: &str) -> Result<Vec<Token>, PrintError> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => at += 1,
            b'"' => {
                let (value, end) = quoted(bytes, at, b'"')?;
                // Neighbouring literals are one, as in C.
                if let Some(Token::Text(before)) = tokens.last_mut() {
                    *before = [&**before, &value].concat().into();
                } else {
                    tokens.push(Token::Text(value.into()));
                }
                at = end;
            }
            b'\'' => {
                let (value, end) = quoted(bytes, at, b'\'')?;
                let value = value.first().copied().map_or(0, u64::from);
                tokens.push(Token::Number {
                    value,
                    decimal: true,
                    unsigned: false,
                    longs: 0,
                });
                at = end;
            }
            b'0'..=b'9' => {
                let (token, end) = number(bytes, at)?;
                tokens.push(token);
                at = end;
            }
            b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'$' | b'.' => {
                let length = bytes[at..]
                    .iter()
                    .take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$'))
                    .count();
                if length == 0 {
                    tokens.push(Token::Punct("..."));
                    at += 1;
                    continue;
                }
                tokens.push(Token::Name(
                    text.get(at..at + length).unwrap_or_default().into(),
                ));
                at += length;
            }
            _ => {
                let rest = bytes.get(at..).unwrap_or_default();
                let punct = PUNCTS
                    .iter()
                    .find(|punct| rest.starts_with(punct.as_bytes()))
                    .ok_or(PrintError::BadCharacter { offset: at })?;
                tokens.push(Token::Punct(punct));
                at += punct.len();
            }
        }
    }
    Ok(tokens)
}

/// The value of a quoted literal that begins at `start`, and the offset behind its closing quote.
fn quoted(bytes: &[u8], start: usize, quote: u8) -> Result<(Vec<u8>, usize), PrintError> {
    let mut value = Vec::new();
    let mut at = start + 1;
    loop {
        match *bytes
            .get(at)
            .ok_or(PrintError::OpenQuote { offset: start })?
        {
            byte if byte == quote => return Ok((value, at + 1)),
            b'\\' => {
                let (byte, end) =
                    escape(bytes, at + 1).ok_or(PrintError::OpenQuote { offset: start })?;
                value.push(byte);
                at = end;
            }
            byte => {
                value.push(byte);
                at += 1;
            }
        }
    }
}

/// One escape sequence from behind its backslash.
fn escape(bytes: &[u8], at: usize) -> Option<(u8, usize)> {
    let byte = *bytes.get(at)?;
    Some(match byte {
        b'n' => (b'\n', at + 1),
        b't' => (b'\t', at + 1),
        b'r' => (b'\r', at + 1),
        b'a' => (7, at + 1),
        b'e' => (27, at + 1),
        b'0'..=b'7' => {
            let digits = bytes[at..]
                .iter()
                .take(3)
                .take_while(|byte| matches!(byte, b'0'..=b'7'))
                .count();
            let value = bytes[at..at + digits].iter().fold(0_u8, |value, digit| {
                value.wrapping_mul(8).wrapping_add(digit - b'0')
            });
            (value, at + digits)
        }
        b'x' => {
            let mut value = 0_u8;
            let mut end = at + 1;
            while let Some(digit) = bytes
                .get(end)
                .and_then(|byte| char::from(*byte).to_digit(16))
            {
                value = value
                    .wrapping_mul(16)
                    .wrapping_add(u8::try_from(digit).unwrap_or(0));
                end += 1;
            }
            (value, end)
        }
        other => (other, at + 1),
    })
}

/// `printk_formats` and `__print_symbolic` texts are escaped the same way.
pub(crate) fn unescape(bytes: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        if byte == b'\\'
            && let Some((byte, end)) = escape(bytes, at + 1)
        {
            value.push(byte);
            at = end;
            continue;
        }
        value.push(byte);
        at += 1;
    }
    value
}

fn number(bytes: &[u8], start: usize) -> Result<(Token, usize), PrintError> {
    let rest = &bytes[start..];
    let (radix, skip) = match rest {
        [b'0', b'x' | b'X', ..] => (16, 2),
        [b'0', b'0'..=b'7', ..] => (8, 1),
        _ => (10, 0),
    };
    let mut value = 0_u64;
    let mut at = start + skip;
    while let Some(digit) = bytes
        .get(at)
        .and_then(|byte| char::from(*byte).to_digit(radix))
    {
        value = value
            .checked_mul(u64::from(radix))
            .and_then(|value| value.checked_add(u64::from(digit)))
            .ok_or(PrintError::BadNumber { offset: start })?;
        at += 1;
    }
    let (mut unsigned, mut longs) = (false, 0_u8);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'u' | b'U' => unsigned = true,
            b'l' | b'L' => longs = longs.saturating_add(1),
            byte if byte.is_ascii_alphanumeric() || *byte == b'_' => {
                return Err(PrintError::BadNumber { offset: start });
            }
            _ => break,
        }
        at += 1;
    }
    Ok((
        Token::Number {
            value,
            decimal: radix == 10,
            unsigned,
            longs,
        },
        at,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_real_line() {
        let tokens = tokens(r#""a\n" "b%d\x41", REC->x << 0x1fUL, '\n'"#).unwrap();
        assert_eq!(
            tokens,
            [
                Token::Text((*b"a\nb%dA").into()),
                Token::Punct(","),
                Token::Name("REC".into()),
                Token::Punct("->"),
                Token::Name("x".into()),
                Token::Punct("<<"),
                Token::Number {
                    value: 31,
                    decimal: false,
                    unsigned: true,
                    longs: 1
                },
                Token::Punct(","),
                Token::Number {
                    value: 10,
                    decimal: true,
                    unsigned: false,
                    longs: 0
                },
            ]
        );
    }

    #[test]
    fn broken_text() {
        for text in [
            "\"abc",
            "\"abc\\",
            "'",
            "0xz",
            "99999999999999999999",
            "\u{e9}",
            "`",
        ] {
            assert!(tokens(text).is_err(), "{text}");
        }
    }
}
