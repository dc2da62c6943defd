//! `print fmt:`: how the kernel would print an event, compiled once and run for each record.
//!
//! The language is C as the preprocessor left it (`include/trace/stages/stage3_trace_output.h`,
//! `samples/trace_events/trace-events-sample.h`): a printf format, then expressions over `REC->field` with casts,
//! arithmetic, ternaries and a dozen helpers. Numbers follow C: a signed field stays signed, an `int` overflows like one.
//! (libtraceevent reads all fields as unsigned 64-bit numbers; where that makes a difference we print what the kernel's
//! own `trace` file prints.)

mod expr;
mod parse;
mod pointer;
pub(crate) mod printf;
mod token;
mod write;

use crate::event_format::EventFormat;
use crate::metadata::{PrintkFormats, SymbolCache};
use crate::{Endian, LongSize};

pub(crate) use self::pointer::write_symbol;
pub(crate) use self::token::unescape;
pub(crate) use self::write::write_bprint;

use self::expr::Expr;
use self::parse::Parser;
use self::printf::{Amount, Piece, Spec};
use self::token::{Token, tokens};

/// Most parts (literals and conversions) of one format.
const MAX_PARTS: usize = 4096;

/// Why a `print fmt:` cannot be used; the event's fields are printed raw instead. Finishes "failed to …".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrintError {
    /// It does not begin with a format string.
    #[error("find a format string in the print format")]
    NoFormat,
    /// A character that is no part of the language.
    #[error("read the character at byte {offset} of the print format")]
    BadCharacter {
        /// Where.
        offset: usize,
    },
    /// A string without end.
    #[error("find the end of the string at byte {offset} of the print format")]
    OpenQuote {
        /// Where it begins.
        offset: usize,
    },
    /// A number that does not fit in 64 bits or has letters in it.
    #[error("read the number at byte {offset} of the print format")]
    BadNumber {
        /// Where.
        offset: usize,
    },
    /// Something else stands where something was needed.
    #[error("read the print format: {found} where {wanted} was expected")]
    Unexpected {
        /// What was needed.
        wanted: &'static str,
        /// What was found.
        found: String,
    },
    /// `REC->name` without such a field.
    #[error("find the field {name} that the print format uses")]
    NoField {
        /// The name.
        name: String,
    },
    /// A function of the kernel that is not among the known helpers.
    #[error("call the kernel's function {name} that the print format uses")]
    UnknownFunction {
        /// The name.
        name: String,
    },
    /// Valid C that has no meaning outside of the kernel.
    #[error("evaluate {what} in the print format")]
    Unsupported {
        /// What.
        what: &'static str,
    },
    /// Nested or chained beyond the bound.
    #[error("accept a print format nested so deeply")]
    TooDeep,
    /// More than 4096 conversions.
    #[error("accept a print format of so many parts")]
    TooManyParts,
    /// More conversions than arguments.
    #[error("find an argument for each conversion of the print format")]
    TooFewArguments,
}

/// What a print format needs besides the record.
#[derive(Debug)]
pub(crate) struct Environment<'a, 'm> {
    pub(crate) endian: Endian,
    pub(crate) long_size: LongSize,
    pub(crate) symbols: &'a SymbolCache<'m>,
    pub(crate) printk: &'a PrintkFormats,
}

/// A compiled print format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// A literal of at most 32 bytes: nearly all are, and these are copied without a call.
    Short {
        text: [u8; 32],
        length: u8,
    },
    Literal(Box<[u8]>),
    /// A conversion and its arguments: the value, and what stands for `*` as width and precision.
    Conversion {
        spec: Spec,
        plain: bool,
        value: Expr,
        width: Option<Expr>,
        precision: Option<Expr>,
    },
}

impl Program {
    pub(crate) fn compile(event: &EventFormat) -> Result<Self, PrintError> {
        let tokens = tokens(event.print_fmt())?;
        let Some((Token::Text(format), rest)) = tokens.split_first() else {
            return Err(PrintError::NoFormat);
        };
        let mut arguments = Parser::new(event, rest).arguments()?.into_iter();
        let mut argument = || arguments.next().ok_or(PrintError::TooFewArguments);

        let mut parts: Vec<Part> = Vec::new();
        let mut format: &[u8] = format;
        while let Some((piece, rest)) = printf::next_piece(format) {
            format = rest;
            match piece {
                Piece::Literal(text) => {
                    if let Some(Part::Literal(before)) = parts.last_mut() {
                        *before = [&**before, text].concat().into();
                    } else {
                        parts.push(Part::Literal(text.into()));
                    }
                }
                Piece::Conversion(spec) => {
                    let width = match spec.width {
                        Some(Amount::Argument) => Some(argument()?),
                        _ => None,
                    };
                    let precision = match spec.precision {
                        Some(Amount::Argument) => Some(argument()?),
                        _ => None,
                    };
                    let value = argument()?;
                    let plain = spec.is_plain();
                    parts.push(Part::Conversion {
                        spec,
                        plain,
                        value,
                        width,
                        precision,
                    });
                }
            }
            if parts.len() > MAX_PARTS {
                return Err(PrintError::TooManyParts);
            }
        }
        for part in &mut parts {
            let Part::Literal(text) = part else { continue };
            let mut short = [0; 32];
            if let (Some(copy), Ok(length)) =
                (short.get_mut(..text.len()), u8::try_from(text.len()))
            {
                copy.copy_from_slice(text);
                *part = Part::Short {
                    text: short,
                    length,
                };
            }
        }
        Ok(Self { parts })
    }
}
