//! Which events are wanted: `prev_comm == "qemu" && prio < 100`.
//!
//! ```text
//! or       := and ( "||" and )*
//! and      := not ( "&&" not )*
//! not      := "!" not | "(" or ")" | test
//! test     := name [ operator literal ]           a name alone: the field is there and is not zero or empty
//! operator := == != < <= > >= & =~ !~              & has all these bits; =~ matches with * and ?
//! literal  := number (decimal, 0x…, -…) | "text" | 'text' | word
//! ```
//!
//! A name is a field of the event. Names that are no field of it mean: `event` (also as `system:event`), `system`,
//! `cpu`, `pid` and `task` (of the task that was running), `time` (in units of the clock). A test of a field that an
//! event does not have is false, and so is a comparison of text with a number; `!` turns either around.

use std::sync::OnceLock;

use crate::event_format::{EventFormat, Field, Value};
use crate::metadata::Metadata;
use crate::report::Entry;

/// Longest filter accepted.
pub const MAX_FILTER_BYTES: usize = 64 << 10;

/// Deepest nesting accepted.
const MAX_DEPTH: u32 = 64;

/// Most tests accepted.
const MAX_TESTS: usize = 1024;

/// Why a filter cannot be read. Finishes "failed to …".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// Something else than what was needed.
    #[error("read the filter at byte {offset}: expected {wanted}")]
    Expected {
        /// Where.
        offset: usize,
        /// What was needed.
        wanted: &'static str,
    },
    /// Too long, too deep or too many tests.
    #[error("accept a filter so long or so deeply nested")]
    TooLarge,
}

/// A filter, not yet for any kernel's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    root: Node,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    Test {
        name: String,
        operator: Operator,
        literal: Literal,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Truthy,
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Bits,
    Like,
    NotLike,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Literal {
    Number(i128),
    Text(String),
}

impl Filter {
    /// Reads a filter.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        if text.len() > MAX_FILTER_BYTES {
            return Err(FilterError::TooLarge);
        }
        let mut parser = Parser {
            text,
            at: 0,
            depth: 0,
            tests: 0,
        };
        let root = parser.any()?;
        parser.space();
        if parser.at < text.len() {
            return Err(parser.expected("&&, || or the end"));
        }
        Ok(Self { root })
    }

    /// The filter for the events of one kernel.
    #[must_use]
    pub fn matcher<'a>(&'a self, metadata: &'a Metadata) -> Matcher<'a> {
        let plans = metadata
            .events
            .events()
            .iter()
            .map(|_| OnceLock::new())
            .collect();
        Matcher {
            filter: self,
            metadata,
            plans,
        }
    }
}

/// A filter with the fields of each event looked up.
#[derive(Debug)]
pub struct Matcher<'a> {
    filter: &'a Filter,
    metadata: &'a Metadata,
    plans: Vec<OnceLock<Plan>>,
}

#[derive(Debug)]
enum Plan {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    Known(bool),
    Field {
        field: Box<Field>,
        operator: Operator,
        literal: Literal,
    },
    Cpu(Operator, Literal),
    Time(Operator, Literal),
    Task(Operator, Literal),
}

impl Matcher<'_> {
    /// Whether an event is wanted. Records of unknown events are wanted only by what needs no fields.
    #[inline]
    #[must_use]
    pub fn matches(&self, entry: &Entry<'_>) -> bool {
        let index = self.metadata.events.index(entry.type_id);
        let event = index.and_then(|index| self.metadata.events.events().get(index));
        match (event, index.and_then(|index| self.plans.get(index))) {
            (Some(event), Some(plan)) => plan
                .get_or_init(|| Plan::of(&self.filter.root, Some(event)))
                .matches(self.metadata, Some(event), entry),
            _ => Plan::of(&self.filter.root, None).matches(self.metadata, None, entry),
        }
    }
}

impl Plan {
    fn of(node: &Node, event: Option<&EventFormat>) -> Self {
        match node {
            Node::All(nodes) => {
                let plans: Vec<Self> = nodes.iter().map(|node| Self::of(node, event)).collect();
                if plans.iter().any(|plan| matches!(plan, Self::Known(false))) {
                    return Self::Known(false);
                }
                Self::All(plans)
            }
            Node::Any(nodes) => {
                let plans: Vec<Self> = nodes.iter().map(|node| Self::of(node, event)).collect();
                if plans.iter().any(|plan| matches!(plan, Self::Known(true))) {
                    return Self::Known(true);
                }
                if plans.iter().all(|plan| matches!(plan, Self::Known(false))) {
                    return Self::Known(false);
                }
                Self::Any(plans)
            }
            Node::Not(node) => match Self::of(node, event) {
                Self::Known(known) => Self::Known(!known),
                plan => Self::Not(Box::new(plan)),
            },
            Node::Test {
                name,
                operator,
                literal,
            } => Self::test(name, *operator, literal, event),
        }
    }

    fn test(
        name: &str,
        operator: Operator,
        literal: &Literal,
        event: Option<&EventFormat>,
    ) -> Self {
        if let Some(event) = event {
            let field = event.field(name).or_else(|| match name {
                "pid" => event.field("common_pid"),
                _ => None,
            });
            if let Some(field) = field {
                return Self::Field {
                    field: Box::new(field.clone()),
                    operator,
                    literal: literal.clone(),
                };
            }
            match name {
                "event" => {
                    let full = format!("{}:{}", event.system(), event.name());
                    let text = match literal {
                        Literal::Text(text) if text.contains(':') => full.as_bytes(),
                        _ => event.name().as_bytes(),
                    };
                    return Self::Known(compare_text(text, operator, literal));
                }
                "system" => {
                    return Self::Known(compare_text(event.system().as_bytes(), operator, literal));
                }
                _ => {}
            }
        }
        match name {
            "cpu" | "CPU" => Self::Cpu(operator, literal.clone()),
            "time" => Self::Time(operator, literal.clone()),
            "task" | "COMM" => Self::Task(operator, literal.clone()),
            _ => Self::Known(false),
        }
    }

    fn matches(&self, metadata: &Metadata, event: Option<&EventFormat>, entry: &Entry<'_>) -> bool {
        match self {
            Self::Known(known) => *known,
            Self::All(plans) => plans
                .iter()
                .all(|plan| plan.matches(metadata, event, entry)),
            Self::Any(plans) => plans
                .iter()
                .any(|plan| plan.matches(metadata, event, entry)),
            Self::Not(plan) => !plan.matches(metadata, event, entry),
            Self::Field {
                field,
                operator,
                literal,
            } => match field.value(metadata.events.endian(), entry.payload) {
                Value::Signed(value) => compare_number(value.into(), *operator, literal),
                Value::Unsigned(value) | Value::Pointer(value) => {
                    compare_number(value.into(), *operator, literal)
                }
                Value::Text(text) => compare_text(text, *operator, literal),
                Value::Array(elements) => {
                    *operator == Operator::Truthy && elements.bytes.iter().any(|byte| *byte != 0)
                }
                Value::Missing => false,
            },
            Self::Cpu(operator, literal) => compare_number(entry.cpu.into(), *operator, literal),
            Self::Time(operator, literal) => {
                compare_number(entry.timestamp.into(), *operator, literal)
            }
            Self::Task(operator, literal) => {
                let pid = event
                    .and_then(|event| {
                        event
                            .field("common_pid")?
                            .number(event.endian(), entry.payload)
                    })
                    .and_then(|pid| i32::try_from(pid.cast_signed()).ok());
                let name = pid
                    .and_then(|pid| metadata.comms.get(pid))
                    .unwrap_or(b"<...>");
                compare_text(name, *operator, literal)
            }
        }
    }
}

fn compare_number(value: i128, operator: Operator, literal: &Literal) -> bool {
    let Literal::Number(other) = literal else {
        return operator == Operator::NotEqual;
    };
    match operator {
        Operator::Truthy => value != 0,
        Operator::Equal => value == *other,
        Operator::NotEqual => value != *other,
        Operator::Less => value < *other,
        Operator::LessEqual => value <= *other,
        Operator::Greater => value > *other,
        Operator::GreaterEqual => value >= *other,
        Operator::Bits => value & other == *other,
        Operator::Like | Operator::NotLike => false,
    }
}

fn compare_text(text: &[u8], operator: Operator, literal: &Literal) -> bool {
    if operator == Operator::Truthy {
        return !text.is_empty();
    }
    let Literal::Text(other) = literal else {
        return operator == Operator::NotEqual;
    };
    let other = other.as_bytes();
    match operator {
        Operator::Equal => text == other,
        Operator::NotEqual => text != other,
        Operator::Less => text < other,
        Operator::LessEqual => text <= other,
        Operator::Greater => text > other,
        Operator::GreaterEqual => text >= other,
        Operator::Like => glob(other, text),
        Operator::NotLike => !glob(other, text),
        Operator::Bits | Operator::Truthy => false,
    }
}

/// `*` any bytes, `?` one. Backs up to the last star only, so the time is at most the product of the lengths.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut in_text) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while in_text < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, in_text));
                at += 1;
            }
            Some(byte) if *byte == b'?' || Some(byte) == text.get(in_text) => {
                at += 1;
                in_text += 1;
            }
            _ => match star {
                Some((star_at, covered)) => {
                    at = star_at + 1;
                    in_text = covered + 1;
                    star = Some((star_at, covered + 1));
                }
                None => return false,
            },
        }
    }
    pattern
        .get(at..)
        .unwrap_or_default()
        .iter()
        .all(|byte| *byte == b'*')
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: u32,
    tests: usize,
}

impl Parser<'_> {
    fn expected(&self, wanted: &'static str) -> FilterError {
        FilterError::Expected {
            offset: self.at,
            wanted,
        }
    }

    fn rest(&self) -> &str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    fn take(&mut self, word: &str) -> bool {
        self.space();
        let found = self.rest().starts_with(word);
        if found {
            self.at += word.len();
        }
        found
    }

    fn any(&mut self) -> Result<Node, FilterError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(FilterError::TooLarge);
        }
        let mut nodes = vec![self.all()?];
        while self.take("||") {
            nodes.push(self.all()?);
        }
        self.depth -= 1;
        Ok(match nodes.pop() {
            Some(only) if nodes.is_empty() => only,
            Some(last) => {
                nodes.push(last);
                Node::Any(nodes)
            }
            None => Node::Any(nodes),
        })
    }

    fn all(&mut self) -> Result<Node, FilterError> {
        let mut nodes = vec![self.not()?];
        while self.take("&&") {
            nodes.push(self.not()?);
        }
        Ok(match nodes.pop() {
            Some(only) if nodes.is_empty() => only,
            Some(last) => {
                nodes.push(last);
                Node::All(nodes)
            }
            None => Node::All(nodes),
        })
    }

    fn not(&mut self) -> Result<Node, FilterError> {
        self.space();
        if self.rest().starts_with('!') {
            self.at += 1;
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err(FilterError::TooLarge);
            }
            let node = self.not()?;
            self.depth -= 1;
            return Ok(Node::Not(Box::new(node)));
        }
        if self.take("(") {
            let node = self.any()?;
            return if self.take(")") {
                Ok(node)
            } else {
                Err(self.expected(")"))
            };
        }
        self.test()
    }

    fn test(&mut self) -> Result<Node, FilterError> {
        self.tests += 1;
        if self.tests > MAX_TESTS {
            return Err(FilterError::TooLarge);
        }
        let name = self
            .word()
            .ok_or_else(|| self.expected("the name of a field"))?;
        let operator = [
            ("==", Operator::Equal),
            ("!=", Operator::NotEqual),
            ("<=", Operator::LessEqual),
            (">=", Operator::GreaterEqual),
            ("=~", Operator::Like),
            ("!~", Operator::NotLike),
            ("<", Operator::Less),
            (">", Operator::Greater),
        ]
        .into_iter()
        .find_map(|(text, operator)| self.take(text).then_some(operator));
        let operator = match operator {
            Some(operator) => operator,
            None if self.rest().starts_with('&') && !self.rest().starts_with("&&") => {
                self.at += 1;
                Operator::Bits
            }
            None => {
                let literal = Literal::Number(0);
                return Ok(Node::Test {
                    name,
                    operator: Operator::Truthy,
                    literal,
                });
            }
        };
        let literal = self.literal()?;
        let text = matches!(literal, Literal::Text(_));
        if matches!(operator, Operator::Like | Operator::NotLike) && !text {
            return Err(self.expected("text behind =~ or !~"));
        }
        if operator == Operator::Bits && text {
            return Err(self.expected("a number behind &"));
        }
        Ok(Node::Test {
            name,
            operator,
            literal,
        })
    }

    fn word(&mut self) -> Option<String> {
        self.space();
        let rest = self.rest();
        let end = rest
            .find(|letter: char| !(letter.is_alphanumeric() || matches!(letter, '_' | '.' | ':')))
            .unwrap_or(rest.len());
        if end == 0 {
            return None;
        }
        let word = rest.get(..end)?.to_owned();
        self.at += end;
        Some(word)
    }

    fn literal(&mut self) -> Result<Literal, FilterError> {
        self.space();
        let rest = self.rest();
        if let Some(quote) = rest
            .chars()
            .next()
            .filter(|first| matches!(first, '"' | '\''))
        {
            let inner = rest.get(1..).unwrap_or_default();
            let end = inner
                .find(quote)
                .ok_or_else(|| self.expected("the end of a text"))?;
            let text = inner.get(..end).unwrap_or_default().to_owned();
            self.at += end + 2;
            return Ok(Literal::Text(text));
        }
        let negative = self.take("-");
        let word = self
            .word()
            .ok_or_else(|| self.expected("a number or a text"))?;
        let number = match word.strip_prefix("0x").or_else(|| word.strip_prefix("0X")) {
            Some(hex) => i128::from_str_radix(hex, 16).ok(),
            None => word.parse::<i128>().ok(),
        };
        match number {
            // A field has at most 64 bits; more would be true of none, and overflow nobody's arithmetic here.
            Some(number) if number <= i128::from(u64::MAX) => {
                Ok(Literal::Number(if negative { -number } else { number }))
            }
            None if !negative => Ok(Literal::Text(word)),
            _ => Err(self.expected("a number of at most 64 bits")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring_buffer::{Missed, PageLayout};
    use proptest::prelude::*;

    const FORMAT: &str = "name: sched_switch\nID: 3\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
        \tfield:char prev_comm[8];\toffset:8;\tsize:8;\tsigned:0;\n\
        \tfield:int prio;\toffset:16;\tsize:4;\tsigned:1;\n\
        \tfield:u32 flags;\toffset:20;\tsize:4;\tsigned:0;\n\nprint fmt: \"\"\n";

    fn matches(filter: &str) -> bool {
        let mut metadata = Metadata::bare(PageLayout::native64_le(4096).unwrap());
        metadata.events.add("sched", FORMAT).unwrap();
        metadata.comms.learn(42, b"qemu-kvm");
        let mut payload = vec![3, 0, 0, 0, 42, 0, 0, 0];
        payload.extend_from_slice(b"qemu\0\0\0\0");
        payload.extend_from_slice(&(-7_i32).to_le_bytes());
        payload.extend_from_slice(&6_u32.to_le_bytes());
        let filter = Filter::parse(filter).unwrap_or_else(|error| panic!("{filter}: {error}"));
        let entry = Entry {
            cpu: 2,
            timestamp: 1000,
            type_id: 3,
            payload: &payload,
            missed: Missed::None,
        };
        filter.matcher(&metadata).matches(&entry)
    }

    #[test]
    fn what_is_wanted() {
        for (filter, expected) in [
            (r#"prev_comm == "qemu" && prio < 100"#, true),
            (r#"prev_comm == "qemu" && prio > 100"#, false),
            ("prev_comm=='qemu'&&!(prio>=0)", true),
            ("prev_comm == qemu", true),
            (r#"prev_comm =~ "q*u""#, true),
            (r#"prev_comm !~ "q?mu" || cpu == 3"#, false),
            ("prio == -7", true),
            ("flags & 0x4", true),
            ("flags & 0x9", false),
            ("event == sched_switch", true),
            ("event == sched:sched_switch && system == sched", true),
            ("event =~ 'sched_w*'", false),
            ("pid == 42 && common_pid == 42", true),
            ("task =~ 'qemu*'", true),
            ("cpu != 2 || time >= 1000", true),
            ("flags", true),
            ("no_such_field", false),
            ("!no_such_field", true),
            ("no_such_field == 1 || no_such_field != 1", false),
            ("prio == \"x\"", false),
        ] {
            assert_eq!(matches(filter), expected, "{filter}");
        }
    }

    #[test]
    fn what_is_no_filter() {
        for filter in [
            "", "a ==", "a == \"b", "(a", "a b", "a =~ 3", "a & x", "a == -x", "&& a",
        ] {
            assert!(Filter::parse(filter).is_err(), "{filter}");
        }
        let deep = format!("{}a{}", "(".repeat(10_000), ")".repeat(10_000));
        assert_eq!(Filter::parse(&deep), Err(FilterError::TooLarge));
        assert_eq!(
            Filter::parse(&"!".repeat(10_000)),
            Err(FilterError::TooLarge)
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[a-z0-9_ ()!&|=<>~\"'*?x-]{0,80}") {
            let _ = Filter::parse(&text);
        }

        #[test]
        fn globs_are_those_of_a_plain_recursion(pattern in "[ab*?]{0,8}", text in "[ab]{0,8}") {
            fn plain(pattern: &[u8], text: &[u8]) -> bool {
                match (pattern.split_first(), text.split_first()) {
                    (None, None) => true,
                    (Some((b'*', rest)), _) => {
                        plain(rest, text) || (!text.is_empty() && plain(pattern, &text[1..]))
                    }
                    (Some((b'?', rest)), Some((_, tail))) => plain(rest, tail),
                    (Some((one, rest)), Some((other, tail))) => one == other && plain(rest, tail),
                    _ => false,
                }
            }
            prop_assert_eq!(
                glob(pattern.as_bytes(), text.as_bytes()),
                plain(pattern.as_bytes(), text.as_bytes())
            );
        }
    }
}
