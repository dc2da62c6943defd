//! From tokens to expressions.

use super::PrintError;
use super::expr::{Binary, Expr, Function, INT, Place, S64, Table, Type, U32, U64, Unary};
use super::token::Token;
use crate::event_format::{EventFormat, Field, FieldKind, size_of_type};
use crate::{Endian, LongSize};

/// Deepest nesting accepted. The gfp flags of Linux 6.18 nest to about 40 parentheses; each level is a few stack frames
/// of a few hundred bytes in the parser and one in the evaluation.
const MAX_DEPTH: u32 = 200;

/// Most operators in one argument (not counting those in different entries of a table, which lie side by side).
/// `a + b + c …` needs no recursion to parse, but makes a tree as deep as it is long, and evaluation recurses.
const MAX_OPERATORS: u32 = 1000;

pub(super) struct Parser<'a> {
    event: &'a EventFormat,
    tokens: &'a [Token],
    at: usize,
    depth: u32,
    operators: u32,
    // Variables of statement expressions: name, value, what one use of it adds to the count of operators.
    locals: Vec<(&'a str, Expr, u32)>,
}

impl<'a> Parser<'a> {
    pub(super) fn new(event: &'a EventFormat, tokens: &'a [Token]) -> Self {
        Self {
            event,
            tokens,
            at: 0,
            depth: 0,
            operators: 0,
            locals: Vec::new(),
        }
    }

    /// The arguments behind the format string, to the end of the text.
    pub(super) fn arguments(&mut self) -> Result<Vec<Expr>, PrintError> {
        let mut arguments = Vec::new();
        while self.at < self.tokens.len() {
            self.expect(",")?;
            self.operators = 0;
            arguments.push(self.expression()?);
        }
        Ok(arguments)
    }

    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.at)
    }

    fn peek_punct(&self) -> Option<&'static str> {
        match self.peek() {
            Some(Token::Punct(punct)) => Some(punct),
            _ => None,
        }
    }

    fn take(&mut self, punct: &str) -> bool {
        let found = self.peek_punct() == Some(punct);
        if found {
            self.at += 1;
        }
        found
    }

    fn expect(&mut self, punct: &'static str) -> Result<(), PrintError> {
        if self.take(punct) {
            Ok(())
        } else {
            Err(self.unexpected(punct))
        }
    }

    fn unexpected(&self, wanted: &'static str) -> PrintError {
        let found = match self.peek() {
            None => "the end".to_owned(),
            Some(Token::Name(name)) => format!("`{name}`"),
            Some(Token::Number { value, .. }) => format!("`{value}`"),
            Some(Token::Text(_)) => "a string".to_owned(),
            Some(Token::Punct(punct)) => format!("`{punct}`"),
        };
        PrintError::Unexpected { wanted, found }
    }

    fn name(&mut self) -> Result<&'a str, PrintError> {
        match self.peek() {
            Some(Token::Name(name)) => {
                self.at += 1;
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    fn field(&self, name: &str) -> Result<&'a Field, PrintError> {
        self.event.field(name).ok_or_else(|| PrintError::NoField {
            name: name.to_owned(),
        })
    }

    fn expression(&mut self) -> Result<Expr, PrintError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(PrintError::TooDeep);
        }
        let condition = self.binary(0)?;
        let expression = if self.take("?") {
            let yes = self.expression()?;
            self.expect(":")?;
            let no = self.expression()?;
            Expr::Choice {
                condition: condition.into(),
                yes: yes.into(),
                no: no.into(),
            }
        } else {
            condition
        };
        self.depth -= 1;
        Ok(expression)
    }

    fn count_operator(&mut self) -> Result<(), PrintError> {
        self.count_operators(1)
    }

    fn count_operators(&mut self, count: u32) -> Result<(), PrintError> {
        self.operators = self.operators.saturating_add(count);
        if self.operators > MAX_OPERATORS {
            Err(PrintError::TooDeep)
        } else {
            Ok(())
        }
    }

    /// Precedence climbing; level 0 binds loosest. One stack frame for an operand without operators, whatever the number
    /// of levels: a format nested as deep as the bound allows must fit on a thread's stack.
    fn binary(&mut self, lowest: usize) -> Result<Expr, PrintError> {
        let mut left = self.unary()?;
        loop {
            let Some((level, operator)) = self.peek_punct().and_then(operator) else {
                return Ok(left);
            };
            if level < lowest {
                return Ok(left);
            }
            self.at += 1;
            let right = self.binary(level + 1)?;
            self.count_operator()?;
            left = combine(operator, left, right)?;
        }
    }

    fn unary(&mut self) -> Result<Expr, PrintError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(PrintError::TooDeep);
        }
        let expression = self.unary_inner();
        self.depth -= 1;
        expression
    }

    fn unary_inner(&mut self) -> Result<Expr, PrintError> {
        let operator = match self.peek_punct() {
            Some("-") => Unary::Minus,
            Some("!") => Unary::Not,
            Some("~") => Unary::Complement,
            Some("+") => {
                self.at += 1;
                return self.unary();
            }
            Some("*") => {
                self.at += 1;
                let operand = self.unary()?;
                return match operand {
                    Expr::Address { place, element } => Ok(Expr::Load {
                        place,
                        of: element,
                        pointer: false,
                    }),
                    _ => Err(PrintError::Unsupported {
                        what: "a pointer that leads out of the record",
                    }),
                };
            }
            Some("&") => {
                self.at += 1;
                let operand = self.unary()?;
                return match operand {
                    Expr::Load { place, of, .. } => Ok(Expr::Address { place, element: of }),
                    address @ Expr::Address { .. } => Ok(address),
                    _ => Err(PrintError::Unsupported {
                        what: "the address of a value",
                    }),
                };
            }
            Some("(") => {
                if let Some(cast) = self.cast()? {
                    return Ok(cast);
                }
                return self.postfix();
            }
            _ => return self.postfix(),
        };
        self.at += 1;
        let operand = self.unary()?;
        let of = match operator {
            Unary::Not => INT,
            _ => number_type(&operand)?.promoted(),
        };
        Ok(Expr::Unary {
            operator,
            of,
            operand: operand.into(),
        })
    }

    /// `(type) operand`, if that is what stands here; nothing is consumed otherwise.
    fn cast(&mut self) -> Result<Option<Expr>, PrintError> {
        let start = self.at;
        self.at += 1;
        let Some(cast) = self.type_name() else {
            self.at = start;
            return Ok(None);
        };
        let known = cast.known;
        if !self.take(")") {
            self.at = start;
            return Ok(None);
        }
        // `(REC->x)` is no type, `(FOO) - 1` no cast: an unknown word in parentheses is a type only if an operand follows.
        let operand_follows = match self.peek() {
            Some(Token::Name(_) | Token::Number { .. } | Token::Text(_)) => true,
            Some(Token::Punct(punct)) => {
                *punct == "(" || (known && matches!(*punct, "-" | "~" | "!" | "*" | "&" | "+"))
            }
            None => false,
        };
        if !operand_follows {
            self.at = start;
            return Ok(None);
        }
        let operand = self.unary()?;
        Ok(Some(apply_cast(&cast, operand, self.event.long_size())))
    }

    /// A type as it stands in a cast or a `sizeof`, up to what follows it.
    fn type_name(&mut self) -> Option<CastType> {
        let mut words: Vec<&str> = Vec::new();
        while let Some(Token::Name(name)) = self.peek() {
            if &**name == "REC" {
                return None;
            }
            words.push(name);
            self.at += 1;
        }
        if words.is_empty() {
            return None;
        }
        let mut stars = 0;
        loop {
            if self.take("*") {
                stars += 1;
            } else if let Some(Token::Name(name)) = self.peek() {
                if &**name != "const" {
                    return None;
                }
                self.at += 1;
            } else {
                break;
            }
        }
        // `(u8 (*)[6])` and `(int[])`
        while self.take("[") {
            while self.peek_punct() != Some("]") {
                self.peek()?;
                self.at += 1;
            }
            self.at += 1;
            stars += 1;
        }
        let text = words.join(" ");
        let size = size_of_type(&text, self.event.long_size());
        let signed = size.is_some() && is_signed(&words);
        let known = size.is_some()
            || stars > 0
            || words
                .iter()
                .any(|word| matches!(*word, "struct" | "enum" | "union" | "void"));
        Some(CastType {
            size,
            signed,
            stars,
            known,
            boolean: text == "bool" || text == "_Bool",
        })
    }

    fn postfix(&mut self) -> Result<Expr, PrintError> {
        let mut expression = self.primary()?;
        loop {
            if self.take("[") {
                self.count_operator()?;
                let index = self.expression()?;
                self.expect("]")?;
                let Expr::Address { place, element } = expression else {
                    return Err(PrintError::Unsupported {
                        what: "an index into something that is no array",
                    });
                };
                let scale = u32::from(element.bits / 8);
                let place = Place::Further {
                    base: place.into(),
                    index: index.into(),
                    scale,
                };
                expression = Expr::Load {
                    place,
                    of: element,
                    pointer: false,
                };
            } else if matches!(self.peek_punct(), Some("->" | "...")) {
                return Err(PrintError::Unsupported {
                    what: "a member of a structure",
                });
            } else {
                return Ok(expression);
            }
        }
    }

    fn primary(&mut self) -> Result<Expr, PrintError> {
        match self.peek() {
            Some(Token::Number {
                value,
                decimal,
                unsigned,
                longs,
            }) => {
                self.at += 1;
                Ok(Expr::Number {
                    value: *value,
                    of: literal_type(*value, *decimal, *unsigned, *longs, self.event.long_size()),
                })
            }
            Some(Token::Text(text)) => {
                self.at += 1;
                Ok(Expr::Text(text.clone()))
            }
            Some(Token::Punct("(")) if self.tokens.get(self.at + 1) == Some(&Token::Punct("{")) => {
                self.at += 2;
                self.statements()
            }
            Some(Token::Punct("(")) => {
                // `(REC)->x`: the preprocessor's parentheses around the record itself.
                if let Some([Token::Punct("("), Token::Name(name), Token::Punct(")")]) =
                    self.tokens.get(self.at..self.at + 3)
                    && &**name == "REC"
                {
                    self.at += 3;
                    return self.record_field();
                }
                self.at += 1;
                let expression = self.expression()?;
                self.expect(")")?;
                Ok(expression)
            }
            Some(Token::Name(name)) => {
                self.at += 1;
                if &**name == "REC" {
                    return self.record_field();
                }
                if self.take("(") {
                    return self.call(name);
                }
                if let Some((_, value, cost)) = self
                    .locals
                    .iter()
                    .rev()
                    .find(|(local, ..)| *local == &**name)
                {
                    let (value, cost) = (value.clone(), *cost);
                    self.count_operators(cost)?;
                    return Ok(value);
                }
                Ok(named_constant(name)
                    .map_or(Expr::Unknown, |value| Expr::Number { value, of: INT }))
            }
            _ => Err(self.unexpected("an operand")),
        }
    }

    /// `({ int x = (a); int y = (b); x < y ? x : y; })`, which is what `min()` and its like become; from behind the
    /// opening brace.
    fn statements(&mut self) -> Result<Expr, PrintError> {
        let outer = self.locals.len();
        let value = loop {
            // `type name = value;`: words up to the `=`.
            let words = self
                .tokens
                .get(self.at..)
                .unwrap_or_default()
                .iter()
                .take_while(|token| matches!(token, Token::Name(_) | Token::Punct("*")))
                .count();
            if words >= 2 && self.tokens.get(self.at + words) == Some(&Token::Punct("=")) {
                let name = self.tokens.get(self.at + words - 1).and_then(token_name);
                let name = name.ok_or_else(|| self.unexpected("a variable"))?;
                self.at += words + 1;
                let (start, before) = (self.at, self.operators);
                let value = self.expression()?;
                self.expect(";")?;
                // Each use copies the value, and values use each other: the copies are counted so that a few lines cannot
                // unfold to gigabytes.
                let tokens = u32::try_from(self.at - start).unwrap_or(u32::MAX);
                let cost = tokens.saturating_add(self.operators - before);
                self.locals.push((name, value, cost));
                continue;
            }
            let value = self.expression()?;
            self.take(";");
            if self.take("}") {
                break value;
            }
        };
        self.locals.truncate(outer);
        self.expect(")")?;
        Ok(value)
    }

    fn record_field(&mut self) -> Result<Expr, PrintError> {
        if !self.take("->") {
            return Ok(Expr::Address {
                place: Place::Fixed { offset: 0, size: 0 },
                element: U8,
            });
        }
        let name = self.name()?;
        // `REC->__data_loc_name` is the location word itself.
        let word = name
            .strip_prefix("__data_loc_")
            .or_else(|| name.strip_prefix("__rel_loc_"));
        if let (None, Some(word)) = (self.event.field(name), word) {
            let field = self.field(word)?;
            let place = Place::Fixed {
                offset: field.offset,
                size: field.size,
            };
            return Ok(Expr::Load {
                place,
                of: U32,
                pointer: false,
            });
        }
        field_expression(self.field(name)?)
    }

    fn dynamic_place(&mut self) -> Result<(Place, &'a Field), PrintError> {
        let field = self.field(
            self.tokens
                .get(self.at)
                .and_then(token_name)
                .unwrap_or_default(),
        )?;
        self.at += 1;
        self.expect(")")?;
        Ok((place_of(field), field))
    }

    /// A call whose name and opening parenthesis have been read.
    fn call(&mut self, name: &str) -> Result<Expr, PrintError> {
        match name {
            "__print_flags" | "__print_flags_u64" => {
                let value = self.expression()?;
                self.expect(",")?;
                let delimiter = match self.peek() {
                    Some(Token::Text(text)) => {
                        self.at += 1;
                        text.clone()
                    }
                    // A delimiter may be left out: `__print_flags(x, , …)`, or be NULL.
                    Some(Token::Punct(",")) => Box::default(),
                    _ => {
                        self.expression()?;
                        Box::default()
                    }
                };
                let entries = self.table()?;
                Ok(Expr::Flags(
                    Table {
                        value,
                        delimiter,
                        entries,
                    }
                    .into(),
                ))
            }
            "__print_symbolic" | "__print_symbolic_u64" => {
                let value = self.expression()?;
                let entries = self.table()?;
                Ok(Expr::Symbolic(
                    Table {
                        value,
                        delimiter: Box::default(),
                        entries,
                    }
                    .into(),
                ))
            }
            "__get_str" | "__get_rel_str" => {
                let (place, _) = self.dynamic_place()?;
                Ok(Expr::Str(place))
            }
            "__get_dynamic_array"
            | "__get_rel_dynamic_array"
            | "__get_sockaddr"
            | "__get_rel_sockaddr"
            | "__get_sockaddr_rel" => {
                let (place, field) = self.dynamic_place()?;
                let element = Type::of(field.element_size, field.signed).unwrap_or(U8);
                Ok(Expr::Address { place, element })
            }
            "__get_dynamic_array_len" | "__get_rel_dynamic_array_len" => {
                let (place, _) = self.dynamic_place()?;
                Ok(Expr::Length(place))
            }
            "__get_bitmask" | "__get_rel_bitmask" => {
                let (place, _) = self.dynamic_place()?;
                Ok(Expr::Bitmask(place))
            }
            "__get_cpumask" | "__get_rel_cpumask" => {
                let (place, _) = self.dynamic_place()?;
                Ok(Expr::CpuMask(place))
            }
            "__print_hex" | "__print_hex_str" => {
                let place = self.place_argument()?;
                self.expect(",")?;
                let length = self.expression()?;
                self.expect(")")?;
                Ok(Expr::Hex {
                    place,
                    length: length.into(),
                    spaced: name == "__print_hex",
                })
            }
            "__print_array" => {
                let place = self.place_argument()?;
                self.expect(",")?;
                let count = self.expression()?;
                self.expect(",")?;
                let element_size = self.expression()?;
                self.expect(")")?;
                Ok(Expr::Array {
                    place,
                    count: count.into(),
                    element_size: element_size.into(),
                })
            }
            "__builtin_expect" => {
                let value = self.expression()?;
                self.expect(",")?;
                self.expression()?;
                self.expect(")")?;
                Ok(value)
            }
            "__builtin_choose_expr" => {
                let condition = self.expression()?;
                self.expect(",")?;
                let yes = self.expression()?;
                self.expect(",")?;
                let no = self.expression()?;
                self.expect(")")?;
                Ok(if condition.constant().unwrap_or(0) != 0 {
                    yes
                } else {
                    no
                })
            }
            "sizeof" => self.size_of(),
            _ => {
                let function = function(name, self.event.endian()).ok_or_else(|| {
                    PrintError::UnknownFunction {
                        name: name.to_owned(),
                    }
                })?;
                let argument = self.expression()?;
                self.expect(")")?;
                Ok(match function {
                    Some(function) => Expr::Call {
                        function,
                        argument: argument.into(),
                    },
                    None => argument,
                })
            }
        }
    }

    fn place_argument(&mut self) -> Result<Place, PrintError> {
        match self.expression()? {
            Expr::Address { place, .. } | Expr::Str(place) => Ok(place),
            _ => Err(PrintError::Unsupported {
                what: "an array that is not in the record",
            }),
        }
    }

    /// `, { value, "name" }, …)`
    fn table(&mut self) -> Result<TableEntries, PrintError> {
        let mut entries = Vec::new();
        let before = self.operators;
        let mut most = before;
        while self.take(",") {
            if self.take(")") {
                return Ok(entries);
            }
            most = most.max(self.operators);
            self.operators = before;
            self.expect("{")?;
            if self.take("}") {
                continue;
            }
            // An enumerator the kernel did not translate (`TRACE_DEFINE_ENUM` was forgotten) has no value here: it matches
            // nothing, and the number is printed.
            let value = self.expression()?.constant();
            self.expect(",")?;
            match self.peek() {
                Some(Token::Text(text)) => {
                    self.at += 1;
                    if let Some(value) = value {
                        entries.push((value, text.clone()));
                    }
                }
                // `{ -1, ((void *)0) }`, NULL, ends a table.
                _ => drop(self.expression()?),
            }
            self.take(",");
            self.expect("}")?;
        }
        self.operators = most.max(self.operators);
        self.expect(")")?;
        Ok(entries)
    }

    fn size_of(&mut self) -> Result<Expr, PrintError> {
        let of = if self.event.long_size() == LongSize::Four {
            U32
        } else {
            U64
        };
        let start = self.at;
        if let Some(cast) = self.type_name()
            && self.take(")")
        {
            let long = u64::try_from(self.event.long_size().bytes()).unwrap_or(8);
            let value = if cast.stars > 0 {
                Some(long)
            } else {
                cast.size.map(u64::from)
            };
            let value = value.ok_or(PrintError::Unsupported {
                what: "the size of an unknown type",
            })?;
            return Ok(Expr::Number { value, of });
        }
        self.at = start;
        let value = match self.expression()? {
            Expr::Address {
                place: Place::Fixed { size, .. },
                ..
            } => u64::from(size),
            other => u64::from(number_type(&other)?.bits / 8),
        };
        self.expect(")")?;
        Ok(Expr::Number { value, of })
    }
}

type TableEntries = Vec<(u64, Box<[u8]>)>;

struct CastType {
    size: Option<u32>,
    signed: bool,
    stars: u32,
    known: bool,
    boolean: bool,
}

const U8: Type = Type {
    bits: 8,
    signed: false,
};

const LEVELS: [&[(&str, Binary)]; 10] = [
    &[("||", Binary::LogicalOr)],
    &[("&&", Binary::LogicalAnd)],
    &[("|", Binary::Or)],
    &[("^", Binary::Xor)],
    &[("&", Binary::And)],
    &[("==", Binary::Equal), ("!=", Binary::NotEqual)],
    &[
        ("<", Binary::Less),
        ("<=", Binary::LessEqual),
        (">", Binary::Greater),
        (">=", Binary::GreaterEqual),
    ],
    &[("<<", Binary::ShiftLeft), (">>", Binary::ShiftRight)],
    &[("+", Binary::Add), ("-", Binary::Subtract)],
    &[
        ("*", Binary::Multiply),
        ("/", Binary::Divide),
        ("%", Binary::Remainder),
    ],
];

fn operator(punct: &str) -> Option<(usize, Binary)> {
    LEVELS.iter().enumerate().find_map(|(level, operators)| {
        let (_, operator) = operators.iter().find(|(text, _)| *text == punct)?;
        Some((level, *operator))
    })
}

fn number_type(expression: &Expr) -> Result<Type, PrintError> {
    expression.number_type().ok_or(PrintError::Unsupported {
        what: "arithmetic with text",
    })
}

fn combine(operator: Binary, left: Expr, right: Expr) -> Result<Expr, PrintError> {
    // Pointer arithmetic within the record.
    if let (Binary::Add, Expr::Address { place, element }) = (operator, &left) {
        let scale = u32::from(element.bits / 8);
        let place = Place::Further {
            base: place.clone().into(),
            index: right.into(),
            scale,
        };
        return Ok(Expr::Address {
            place,
            element: *element,
        });
    }
    let of = match operator {
        Binary::Less
        | Binary::LessEqual
        | Binary::Greater
        | Binary::GreaterEqual
        | Binary::Equal
        | Binary::NotEqual
        | Binary::LogicalAnd
        | Binary::LogicalOr => INT,
        Binary::ShiftLeft | Binary::ShiftRight => number_type(&left)?.promoted(),
        _ => number_type(&left)?.common(number_type(&right)?),
    };
    Ok(Expr::Binary {
        operator,
        of,
        left: left.into(),
        right: right.into(),
    })
}

fn apply_cast(cast: &CastType, operand: Expr, long_size: LongSize) -> Expr {
    let long = Type {
        bits: if long_size == LongSize::Four { 32 } else { 64 },
        signed: false,
    };
    if cast.stars > 0 {
        return match operand {
            Expr::Address { place, element } => {
                let element = match (cast.stars, cast.size) {
                    (1, Some(size)) => Type::of(size, cast.signed).unwrap_or(element),
                    (1, None) => element,
                    _ => long,
                };
                Expr::Address { place, element }
            }
            other if other.number_type().is_some() => Expr::Cast {
                to: long,
                operand: other.into(),
            },
            text => text,
        };
    }
    let to = cast.size.and_then(|size| Type::of(size, cast.signed));
    match to {
        Some(to) if operand.number_type().is_some() && !cast.boolean => Expr::Cast {
            to,
            operand: operand.into(),
        },
        Some(_) if cast.boolean && operand.number_type().is_some() => {
            let not = Expr::Unary {
                operator: Unary::Not,
                of: INT,
                operand: operand.into(),
            };
            Expr::Unary {
                operator: Unary::Not,
                of: INT,
                operand: not.into(),
            }
        }
        // A type nobody knows by name (`xfs_ino_t`): the operand's own size is the best guess.
        _ => operand,
    }
}

fn is_signed(words: &[&str]) -> bool {
    let unsigned = words.iter().any(|word| {
        *word == "unsigned"
            || *word == "bool"
            || *word == "_Bool"
            || *word == "ulong"
            || *word == "uint"
            || *word == "size_t"
            || *word == "dev_t"
            || *word == "gfp_t"
            || *word == "sector_t"
            || *word == "ino_t"
            || *word == "umode_t"
            || word.starts_with("u8")
            || word.starts_with("u16")
            || word.starts_with("u32")
            || word.starts_with("u64")
            || word.starts_with("__u")
            || word.starts_with("uint")
            || word.starts_with("uid")
            || word.starts_with("gid")
            || word.starts_with("__le")
            || word.starts_with("__be")
    });
    !unsigned
}

/// The type of a literal: the first of the list that holds it (C11 6.4.4.1).
fn literal_type(value: u64, decimal: bool, unsigned: bool, longs: u8, long: LongSize) -> Type {
    let long_bits = if long == LongSize::Four && longs < 2 {
        32
    } else {
        64
    };
    let candidates = [(32, longs == 0), (long_bits, longs < 2), (64, true)];
    for (bits, possible) in candidates {
        if !possible {
            continue;
        }
        let signed_max = (1_u64 << (bits - 1)) - 1;
        if !unsigned && value <= signed_max {
            return Type { bits, signed: true };
        }
        let unsigned_max = if bits == 64 {
            u64::MAX
        } else {
            (1 << bits) - 1
        };
        if (unsigned || !decimal) && value <= unsigned_max {
            return Type {
                bits,
                signed: false,
            };
        }
    }
    if unsigned { U64 } else { S64 }
}

fn field_expression(field: &Field) -> Result<Expr, PrintError> {
    Ok(match field.kind {
        FieldKind::Scalar | FieldKind::Pointer => {
            let place = Place::Fixed {
                offset: field.offset,
                size: field.size,
            };
            match Type::of(field.size, field.signed) {
                Some(of) => Expr::Load {
                    place,
                    of,
                    pointer: field.kind == FieldKind::Pointer,
                },
                None => Expr::Address { place, element: U8 },
            }
        }
        FieldKind::Array | FieldKind::Rest => Expr::Address {
            place: place_of(field),
            element: Type::of(field.element_size, field.signed).unwrap_or(U8),
        },
        // Without `__get_…` the field is its location word.
        FieldKind::DataLoc | FieldKind::RelLoc => Expr::Load {
            place: Place::Fixed {
                offset: field.offset,
                size: field.size,
            },
            of: Type::of(field.size, false).unwrap_or(U32),
            pointer: false,
        },
    })
}

fn place_of(field: &Field) -> Place {
    match field.kind {
        FieldKind::DataLoc => Place::Dynamic {
            offset: field.offset,
            relative_size: None,
        },
        FieldKind::RelLoc => Place::Dynamic {
            offset: field.offset,
            relative_size: Some(field.size),
        },
        _ => Place::Fixed {
            offset: field.offset,
            size: field.size,
        },
    }
}

fn token_name(token: &Token) -> Option<&str> {
    match token {
        Token::Name(name) => Some(name),
        _ => None,
    }
}

/// Enumerators that kernels left untranslated in their formats (before `TRACE_DEFINE_ENUM`, Linux 4.1).
fn named_constant(name: &str) -> Option<u64> {
    Some(match name {
        "HI_SOFTIRQ" | "HRTIMER_NORESTART" | "NULL" | "false" => 0,
        "TIMER_SOFTIRQ" | "HRTIMER_RESTART" | "true" => 1,
        "NET_TX_SOFTIRQ" => 2,
        "NET_RX_SOFTIRQ" => 3,
        "BLOCK_SOFTIRQ" => 4,
        "IRQ_POLL_SOFTIRQ" | "BLOCK_IOPOLL_SOFTIRQ" => 5,
        "TASKLET_SOFTIRQ" => 6,
        "SCHED_SOFTIRQ" => 7,
        "HRTIMER_SOFTIRQ" => 8,
        "RCU_SOFTIRQ" => 9,
        _ => return None,
    })
}

/// A helper by name: `Some(None)` is one that changes nothing on a machine of this byte order.
fn function(name: &str, endian: Endian) -> Option<Option<Function>> {
    let swap = |function| {
        if endian == Endian::Little {
            Some(function)
        } else {
            None
        }
    };
    Some(match name {
        "jiffies_to_msecs" => Some(Function::JiffiesToMsecs),
        "jbd2_dev_to_name" => Some(Function::DeviceName),
        "__print_ns_to_secs" => Some(Function::NsToSecs),
        "__print_ns_without_secs" => Some(Function::NsWithoutSecs),
        "is_writable_pte" => Some(Function::IsWritablePte),
        "__builtin_bswap16" | "__swab16" | "__fswab16" => Some(Function::Swap16),
        "__builtin_bswap32" | "__swab32" | "__fswab32" => Some(Function::Swap32),
        "__builtin_bswap64" | "__swab64" | "__fswab64" => Some(Function::Swap64),
        "ntohs" | "htons" | "be16_to_cpu" | "__be16_to_cpu" | "cpu_to_be16" => {
            swap(Function::Swap16)
        }
        "ntohl" | "htonl" | "be32_to_cpu" | "__be32_to_cpu" | "cpu_to_be32" => {
            swap(Function::Swap32)
        }
        "be64_to_cpu" | "__be64_to_cpu" | "cpu_to_be64" => swap(Function::Swap64),
        "__builtin_constant_p" | "likely" | "unlikely" | "READ_ONCE" => None,
        _ => return None,
    })
}
