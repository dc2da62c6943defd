//! Expressions of a `print fmt:`, with the types C would give them.
//!
//! Values are kept as 64 bits, extended by the signedness of their own type; the type of every node is known when it is
//! built, so evaluation is arithmetic and one cut to size.

use crate::Endian;

/// Type of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type {
    pub(super) bits: u8,
    pub(super) signed: bool,
}

pub(super) const INT: Type = Type {
    bits: 32,
    signed: true,
};
pub(super) const U32: Type = Type {
    bits: 32,
    signed: false,
};
pub(super) const U64: Type = Type {
    bits: 64,
    signed: false,
};
pub(super) const S64: Type = Type {
    bits: 64,
    signed: true,
};

impl Type {
    pub(super) fn of(size: u32, signed: bool) -> Option<Self> {
        let bits = match size {
            1 => 8,
            2 => 16,
            4 => 32,
            8 => 64,
            _ => return None,
        };
        Some(Self { bits, signed })
    }

    /// Integer promotion: what is narrower than an int becomes one.
    pub(super) fn promoted(self) -> Self {
        if self.bits < 32 { INT } else { self }
    }

    /// The usual arithmetic conversions.
    pub(super) fn common(self, other: Self) -> Self {
        let (left, right) = (self.promoted(), other.promoted());
        match left.bits.cmp(&right.bits) {
            std::cmp::Ordering::Greater => left,
            std::cmp::Ordering::Less => right,
            std::cmp::Ordering::Equal => Self {
                bits: left.bits,
                signed: left.signed && right.signed,
            },
        }
    }

    /// The value of this type at `offset`.
    #[inline]
    fn load(self, endian: Endian, payload: &[u8], offset: u32) -> Option<u64> {
        let size = usize::from(self.bits / 8);
        let value = crate::event_format::read_unsigned(endian, payload, offset as usize, size)?;
        Some(self.fit(value))
    }

    /// `value` as one of this type.
    #[inline]
    pub(super) fn fit(self, value: u64) -> u64 {
        if self.bits == 64 {
            return value;
        }
        let shift = 64 - u32::from(self.bits);
        if self.signed {
            ((value << shift).cast_signed() >> shift).cast_unsigned()
        } else {
            value << shift >> shift
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unary {
    Minus,
    Not,
    Complement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binary {
    Multiply,
    Divide,
    Remainder,
    Add,
    Subtract,
    ShiftLeft,
    ShiftRight,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Equal,
    NotEqual,
    And,
    Xor,
    Or,
    LogicalAnd,
    LogicalOr,
}

/// Bytes of the record that an expression points to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A field at a fixed offset; size 0 reaches to the end of the record.
    Fixed { offset: u32, size: u32 },
    /// What the location word at `offset` points to.
    Dynamic {
        offset: u32,
        relative_size: Option<u32>,
    },
    /// `scale * index` bytes further on.
    Further {
        base: Box<Self>,
        index: Box<Expr>,
        scale: u32,
    },
}

/// Names and values of `__print_flags` and `__print_symbolic`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) value: Expr,
    pub(super) delimiter: Box<[u8]>,
    pub(super) entries: Vec<(u64, Box<[u8]>)>,
}

/// Helpers that take numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    /// `jiffies_to_msecs`: the guest's HZ is not in the trace, so the number of jiffies stands.
    JiffiesToMsecs,
    /// `jbd2_dev_to_name`: "major:minor".
    DeviceName,
    /// `__print_ns_to_secs`
    NsToSecs,
    /// `__print_ns_without_secs`
    NsWithoutSecs,
    /// `is_writable_pte` (kvmmmu).
    IsWritablePte,
    /// Byte swaps (`ntohs` and friends as the preprocessor left them).
    Swap16,
    Swap32,
    Swap64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Expr {
    Number {
        value: u64,
        of: Type,
    },
    Text(Box<[u8]>),
    /// A variable of the kernel (`jiffies`, `vmemmap_base`): its value is not in the trace.
    Unknown,
    /// A number in the record. `pointer` marks addresses, which `%s` looks up among the kernel's constant strings.
    Load {
        place: Place,
        of: Type,
        pointer: bool,
    },
    /// The address of bytes of the record; elements as the type says.
    Address {
        place: Place,
        element: Type,
    },
    Unary {
        operator: Unary,
        of: Type,
        operand: Box<Self>,
    },
    Binary {
        operator: Binary,
        of: Type,
        left: Box<Self>,
        right: Box<Self>,
    },
    Choice {
        condition: Box<Self>,
        yes: Box<Self>,
        no: Box<Self>,
    },
    Cast {
        to: Type,
        operand: Box<Self>,
    },
    /// `__get_str`
    Str(Place),
    /// `__get_dynamic_array_len`
    Length(Place),
    Flags(Box<Table>),
    Symbolic(Box<Table>),
    Hex {
        place: Place,
        length: Box<Self>,
        spaced: bool,
    },
    Array {
        place: Place,
        count: Box<Self>,
        element_size: Box<Self>,
    },
    Bitmask(Place),
    CpuMask(Place),
    Call {
        function: Function,
        argument: Box<Self>,
    },
}

impl Expr {
    /// Its type as a number; text has none.
    pub(super) fn number_type(&self) -> Option<Type> {
        match self {
            Self::Number { of, .. } | Self::Load { of, .. } => Some(*of),
            Self::Unary { of, .. } | Self::Binary { of, .. } => Some(*of),
            Self::Cast { to, .. } => Some(*to),
            Self::Choice { yes, no, .. } => match (yes.number_type(), no.number_type()) {
                (Some(yes), Some(no)) => Some(yes.common(no)),
                _ => None,
            },
            Self::Address { .. } | Self::Unknown => Some(U64),
            Self::Length(_) => Some(INT),
            Self::Call { function, argument } => match function {
                Function::JiffiesToMsecs => argument.number_type(),
                Function::NsToSecs => Some(U64),
                Function::NsWithoutSecs | Function::Swap32 => Some(U32),
                Function::IsWritablePte => Some(INT),
                Function::Swap16 => Type::of(2, false),
                Function::Swap64 => Some(U64),
                Function::DeviceName => None,
            },
            Self::Text(_)
            | Self::Str(_)
            | Self::Flags(_)
            | Self::Symbolic(_)
            | Self::Hex { .. }
            | Self::Array { .. }
            | Self::Bitmask(_)
            | Self::CpuMask(_) => None,
        }
    }

    /// Its value where that needs no record: for table entries.
    pub(super) fn constant(&self) -> Option<u64> {
        self.evaluate(Endian::Little, &[])
    }

    /// Its value as a number, `None` where it reaches beyond the record or is no number.
    ///
    /// Recursion is as deep as the parser allowed (`MAX_DEPTH`).
    #[inline]
    pub(super) fn evaluate(&self, endian: Endian, payload: &[u8]) -> Option<u64> {
        // Nearly all arguments are a field, or a field cast.
        match self {
            Self::Load {
                place: Place::Fixed { offset, .. },
                of,
                ..
            } => of.load(endian, payload, *offset),
            Self::Cast { to, operand } => match &**operand {
                Self::Load {
                    place: Place::Fixed { offset, .. },
                    of,
                    ..
                } => Some(to.fit(of.load(endian, payload, *offset)?)),
                operand => Some(to.fit(operand.evaluate_any(endian, payload)?)),
            },
            other => other.evaluate_any(endian, payload),
        }
    }

    fn evaluate_any(&self, endian: Endian, payload: &[u8]) -> Option<u64> {
        match self {
            Self::Number { value, .. } => Some(*value),
            Self::Load { place, of, .. } => {
                let size = usize::from(of.bits / 8);
                let value = match place {
                    Place::Fixed { offset, .. } => {
                        crate::event_format::read_unsigned(endian, payload, *offset as usize, size)?
                    }
                    place => {
                        let bytes = place.bytes(endian, payload)?;
                        crate::event_format::read_unsigned(endian, bytes, 0, size)?
                    }
                };
                Some(of.fit(value))
            }
            Self::Cast { to, operand } => Some(to.fit(operand.evaluate(endian, payload)?)),
            Self::Unary {
                operator,
                of,
                operand,
            } => {
                let value = operand.evaluate(endian, payload)?;
                Some(match operator {
                    Unary::Minus => of.fit(of.fit(value).wrapping_neg()),
                    Unary::Complement => of.fit(!value),
                    Unary::Not => u64::from(value == 0),
                })
            }
            Self::Binary {
                operator,
                of,
                left,
                right,
            } => {
                let left_value = left.evaluate(endian, payload)?;
                match operator {
                    Binary::LogicalAnd if left_value == 0 => return Some(0),
                    Binary::LogicalOr if left_value != 0 => return Some(1),
                    _ => {}
                }
                let right_value = right.evaluate(endian, payload)?;
                let operands = left.number_type()?.common(right.number_type()?);
                binary(*operator, *of, operands, left_value, right_value)
            }
            Self::Choice { condition, yes, no } => {
                let chosen = if condition.evaluate(endian, payload)? != 0 {
                    yes
                } else {
                    no
                };
                let value = chosen.evaluate(endian, payload)?;
                Some(self.number_type().map_or(value, |of| of.fit(value)))
            }
            // Where in memory a record lay, nobody knows any more; where in the record, one can say. Enough for
            // `__get_str(x) ? … : …`, which is what such values are used for.
            Self::Address { place, .. } | Self::Str(place) => {
                place.bytes(endian, payload).map(|bytes| {
                    let length = payload.len() - bytes.len();
                    u64::try_from(length).unwrap_or(u64::MAX).max(1)
                })
            }
            Self::Length(place) => place
                .bytes(endian, payload)
                .and_then(|bytes| u64::try_from(bytes.len()).ok()),
            Self::Call { function, argument } => {
                let value = argument.evaluate(endian, payload)?;
                match function {
                    Function::JiffiesToMsecs => Some(value),
                    Function::NsToSecs => Some(value / 1_000_000_000),
                    Function::NsWithoutSecs => Some(value % 1_000_000_000),
                    Function::IsWritablePte => Some(value & 2),
                    Function::Swap16 => u16::try_from(value & 0xffff)
                        .ok()
                        .map(|value| u64::from(value.swap_bytes())),
                    Function::Swap32 => u32::try_from(value & 0xffff_ffff)
                        .ok()
                        .map(|value| u64::from(value.swap_bytes())),
                    Function::Swap64 => Some(value.swap_bytes()),
                    Function::DeviceName => None,
                }
            }
            Self::Text(_)
            | Self::Unknown
            | Self::Flags(_)
            | Self::Symbolic(_)
            | Self::Hex { .. }
            | Self::Array { .. }
            | Self::Bitmask(_)
            | Self::CpuMask(_) => None,
        }
    }
}

fn binary(operator: Binary, of: Type, operands: Type, left: u64, right: u64) -> Option<u64> {
    // Shifts keep the type of their left side; everything else converts both first.
    if matches!(operator, Binary::ShiftLeft | Binary::ShiftRight) {
        let left = of.fit(left);
        let count = u32::try_from(right)
            .ok()
            .filter(|count| *count < u32::from(of.bits));
        return Some(match (operator, count) {
            // Shifting everything out is undefined in C; zero is what a reader expects.
            (_, None) => 0,
            (Binary::ShiftLeft, Some(count)) => of.fit(left << count),
            (_, Some(count)) if of.signed => (left.cast_signed() >> count).cast_unsigned(),
            (_, Some(count)) => left >> count,
        });
    }
    let (left, right) = (operands.fit(left), operands.fit(right));
    let (signed_left, signed_right) = (left.cast_signed(), right.cast_signed());
    let less = if operands.signed {
        signed_left < signed_right
    } else {
        left < right
    };
    Some(match operator {
        Binary::Multiply => of.fit(left.wrapping_mul(right)),
        Binary::Add => of.fit(left.wrapping_add(right)),
        Binary::Subtract => of.fit(left.wrapping_sub(right)),
        // The guest chose the divisor.
        Binary::Divide if operands.signed => {
            of.fit(signed_left.checked_div(signed_right)?.cast_unsigned())
        }
        Binary::Remainder if operands.signed => {
            of.fit(signed_left.checked_rem(signed_right)?.cast_unsigned())
        }
        Binary::Divide => left.checked_div(right)?,
        Binary::Remainder => left.checked_rem(right)?,
        Binary::Less => u64::from(less),
        Binary::GreaterEqual => u64::from(!less),
        Binary::Greater => u64::from(!less && left != right),
        Binary::LessEqual => u64::from(less || left == right),
        Binary::Equal => u64::from(left == right),
        Binary::NotEqual => u64::from(left != right),
        Binary::And => left & right,
        Binary::Or => left | right,
        Binary::Xor => left ^ right,
        Binary::LogicalAnd | Binary::LogicalOr => u64::from(right != 0),
        Binary::ShiftLeft | Binary::ShiftRight => return None,
    })
}

impl Place {
    /// The bytes, `None` where they reach beyond the record.
    pub(super) fn bytes<'a>(&self, endian: Endian, payload: &'a [u8]) -> Option<&'a [u8]> {
        match self {
            Self::Fixed { offset, size: 0 } => payload.get(*offset as usize..),
            Self::Fixed { offset, size } => payload.get(*offset as usize..)?.get(..*size as usize),
            Self::Dynamic {
                offset,
                relative_size,
            } => crate::event_format::dynamic(
                endian,
                payload,
                *offset as usize,
                relative_size.map(|size| size as usize),
            ),
            Self::Further { base, index, scale } => {
                let bytes = base.bytes(endian, payload)?;
                let index = usize::try_from(index.evaluate(endian, payload)?).ok()?;
                bytes.get(index.checked_mul(*scale as usize)?..)
            }
        }
    }
}
