//! A line to what it means: greeting, return, error or event.
//!
//! ```text
//! {"QMP": {"version": {...}, "capabilities": ["oob"]}}                    greeting
//! {"return": ANY, "id": ANY}                                              return
//! {"error": {"class": STRING, "desc": STRING}, "id": ANY}                 error
//! {"event": STRING, "data": OBJECT, "timestamp": {"seconds": INT, "microseconds": INT}}
//! ```
//!
//! Source: QEMU `docs/interop/qmp-spec.rst`. A message is told by the key it has, read by a visitor:
//! an untagged enumeration would answer a single new field type with "did not match any variant".
//! Unknown keys are skipped.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{ErrorClass, QmpError};

/// Most bytes of an event's line: 256 KiB. QEMU's largest events are a few KiB.
///
/// Events are held parsed, which may take thirty times their text, and they are held in queues; so
/// their bound is lower than that of a line.
pub const MAX_EVENT_BYTES: usize = 256 << 10;

/// One message from the peer.
#[derive(Debug)]
pub enum Message {
    /// The first message on every connection.
    Greeting(Greeting),
    /// A command succeeded. Its value is not parsed yet.
    Return {
        /// The command's id as echoed; QEMU echoes whatever it was given, and nothing for nothing.
        id: Option<Value>,
        /// What the command returned.
        value: Box<RawValue>,
    },
    /// A command failed, or (without an id) QEMU could not read what it was sent.
    Error {
        /// The command's id as echoed.
        id: Option<Value>,
        /// What QEMU says of it.
        error: QmpError,
    },
    /// Something happened.
    Event(Event),
}

/// What a QMP server says first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// QEMU's version as major, minor, micro; `None` where the greeting has it in another shape.
    ///
    /// For logs. What a QEMU can do is asked (`query-commands`, `query-migrate-capabilities`), not
    /// concluded from its version: distributions backport.
    pub version: Option<(u64, u64, u64)>,
    /// The package's own version, such as `Debian 1:7.2+dfsg-7+deb12u18`; may be empty.
    pub package: String,
    /// Capabilities on offer; `oob` is the only one there has ever been.
    pub capabilities: Vec<String>,
}

impl Greeting {
    /// Whether the server can run commands out of band.
    #[must_use]
    pub fn offers_oob(&self) -> bool {
        self.capabilities
            .iter()
            .any(|capability| capability == "oob")
    }
}

/// An event as QEMU sent it. [`Event::kind`](crate::event) gives it a meaning.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The event's name, such as `MIGRATION`.
    pub name: String,
    /// Its data; [`Value::Null`] where it has none.
    pub data: Value,
    /// When QEMU sent it, by the host's wall clock; `None` where QEMU did not know.
    pub timestamp: Option<Timestamp>,
}

/// The host's wall clock as QEMU read it with `gettimeofday`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    /// Seconds since 1970-01-01 UTC.
    pub seconds: u64,
    /// Microseconds within the second, below 1,000,000.
    pub microseconds: u32,
}

impl Timestamp {
    /// Nanoseconds since 1970-01-01 UTC, saturating.
    #[must_use]
    pub fn as_unix_ns(self) -> u64 {
        self.seconds
            .saturating_mul(1_000_000_000)
            .saturating_add(u64::from(self.microseconds) * 1_000)
    }

    /// `None` for what is not a time: QEMU writes -1 into both when its clock fails
    /// (`qapi/qmp-event.c: timestamp_put`).
    fn from_wire(value: &Value) -> Option<Self> {
        let seconds = value.get("seconds")?.as_u64()?;
        let microseconds = u32::try_from(value.get("microseconds")?.as_u64()?).ok()?;
        (microseconds < 1_000_000).then_some(Self {
            seconds,
            microseconds,
        })
    }
}

/// A line that is not a QMP message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Not JSON, or JSON that is no object.
    #[error("the line is not a JSON object ({reason}): {excerpt}")]
    NotJson {
        /// What the parser says.
        reason: String,
        /// How the line begins.
        excerpt: String,
    },
    /// The first line of an object that is spread over several.
    #[error(
        "the monitor spreads its messages over several lines: it was configured with `pretty=on`, \
         which has to go"
    )]
    Pretty,
    /// An object with none of the four keys.
    #[error("the object is neither greeting, return, error nor event: {excerpt}")]
    Unknown {
        /// How the line begins.
        excerpt: String,
    },
    /// An event of more than [`MAX_EVENT_BYTES`].
    #[error("an event of {bytes} bytes is longer than any that QEMU sends")]
    EventTooLong {
        /// How long its line was.
        bytes: usize,
    },
}

impl Message {
    /// Reads one line.
    pub fn parse(line: &[u8]) -> Result<Self, MessageError> {
        if line == b"{" {
            return Err(MessageError::Pretty);
        }
        let not_json = |error: serde_json::Error| MessageError::NotJson {
            reason: error.to_string(),
            excerpt: excerpt(line),
        };
        let mut json = serde_json::Deserializer::from_slice(line);
        let fields = json.deserialize_map(FieldsVisitor).map_err(not_json)?;
        json.end().map_err(not_json)?;

        if let Some(name) = fields.event {
            if line.len() > MAX_EVENT_BYTES {
                return Err(MessageError::EventTooLong { bytes: line.len() });
            }
            let data = match fields.data {
                Some(data) => parse(&data).map_err(not_json)?,
                None => Value::Null,
            };
            let timestamp = fields
                .timestamp
                .and_then(|raw| parse::<Value>(&raw).ok())
                .and_then(|value| Timestamp::from_wire(&value));
            return Ok(Self::Event(Event {
                name,
                data,
                timestamp,
            }));
        }
        let id = match fields.id {
            // An id is ours, so short; one that is not is not ours and will match nothing.
            Some(raw) if raw.get().len() <= MAX_ID_BYTES => parse(&raw).ok(),
            Some(_) => Some(Value::Null),
            None => None,
        };
        if let Some(value) = fields.return_ {
            return Ok(Self::Return { id, value });
        }
        if let Some(raw) = fields.error {
            return Ok(Self::Error {
                id,
                error: parse_error(&raw),
            });
        }
        if let Some(raw) = fields.greeting {
            return Ok(Self::Greeting(parse_greeting(&raw)));
        }
        Err(MessageError::Unknown {
            excerpt: excerpt(line),
        })
    }
}

/// Ids of ours are `u64` numbers.
const MAX_ID_BYTES: usize = 64;

/// Most capabilities of a greeting that are kept.
const MAX_CAPABILITIES: usize = 64;

/// Most bytes of text from a peer that go into an error message.
const EXCERPT_BYTES: usize = 120;

/// How a line begins, fit to be printed: control characters escaped, cut at a bound.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(EXCERPT_BYTES)];
    let mut text = String::new();
    for part in shown.utf8_chunks() {
        text.extend(part.valid().chars().flat_map(char::escape_debug));
        text.extend(
            part.invalid()
                .iter()
                .flat_map(|byte| byte.escape_ascii())
                .map(char::from),
        );
    }
    if bytes.len() > EXCERPT_BYTES {
        text.push('…');
    }
    text
}

fn parse<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Result<T, serde_json::Error> {
    serde_json::from_str(raw.get())
}

/// The fields in use, as text. `id` and `timestamp` of any type are let through: what they hold is
/// judged later, where a surprise costs that field and not the message.
#[derive(Default)]
struct Fields {
    greeting: Option<Box<RawValue>>,
    return_: Option<Box<RawValue>>,
    error: Option<Box<RawValue>>,
    event: Option<String>,
    data: Option<Box<RawValue>>,
    timestamp: Option<Box<RawValue>>,
    id: Option<Box<RawValue>>,
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = Fields::default();
        while let Some(key) = map.next_key_seed(KeySeed)? {
            match key {
                Key::Greeting => fields.greeting = Some(map.next_value()?),
                Key::Return => fields.return_ = Some(map.next_value()?),
                Key::Error => fields.error = Some(map.next_value()?),
                Key::Event => fields.event = Some(map.next_value()?),
                Key::Data => fields.data = Some(map.next_value()?),
                Key::Timestamp => fields.timestamp = Some(map.next_value()?),
                Key::Id => fields.id = Some(map.next_value()?),
                Key::Other => {
                    map.next_value::<serde::de::IgnoredAny>()?;
                }
            }
        }
        Ok(fields)
    }
}

enum Key {
    Greeting,
    Return,
    Error,
    Event,
    Data,
    Timestamp,
    Id,
    Other,
}

struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for KeySeed {
    type Value = Key;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<Key, E> {
        Ok(match key {
            "QMP" => Key::Greeting,
            "return" => Key::Return,
            "error" => Key::Error,
            "event" => Key::Event,
            "data" => Key::Data,
            "timestamp" => Key::Timestamp,
            "id" => Key::Id,
            _ => Key::Other,
        })
    }
}

/// An error in another shape is still an error: what can be read of it is kept.
fn parse_error(raw: &RawValue) -> QmpError {
    let value: Value = parse(raw).unwrap_or(Value::Null);
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    QmpError {
        class: ErrorClass::from(text("class").unwrap_or_default()),
        desc: text("desc").map_or_else(|| excerpt(raw.get().as_bytes()), str::to_owned),
    }
}

fn parse_greeting(raw: &RawValue) -> Greeting {
    let value: Value = parse(raw).unwrap_or(Value::Null);
    let version = value.get("version");
    let number = |key: &str| version?.get("qemu")?.get(key)?.as_u64();
    let capabilities = value.get("capabilities").and_then(Value::as_array);
    Greeting {
        version: match (number("major"), number("minor"), number("micro")) {
            (Some(major), Some(minor), Some(micro)) => Some((major, minor, micro)),
            _ => None,
        },
        package: version
            .and_then(|version| version.get("package")?.as_str())
            .map(|text| excerpt(text.as_bytes()))
            .unwrap_or_default(),
        capabilities: capabilities
            .into_iter()
            .flatten()
            .take(MAX_CAPABILITIES)
            .filter_map(|capability| Some(capability.as_str()?.to_owned()))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_greeting_of_qemu_7_2() {
        let line = br#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2+dfsg-7+deb12u18"}, "capabilities": ["oob"]}}"#;
        let Ok(Message::Greeting(greeting)) = Message::parse(line) else {
            panic!("not a greeting")
        };
        assert_eq!(greeting.version, Some((7, 2, 22)));
        assert_eq!(greeting.package, "Debian 1:7.2+dfsg-7+deb12u18");
        assert!(greeting.offers_oob());
    }

    #[test]
    fn a_greeting_of_another_shape_is_still_one() {
        for line in [
            &br#"{"QMP":{}}"#[..],
            br#"{"QMP":7}"#,
            br#"{"QMP":{"version":"12","capabilities":[{"x":1}]}}"#,
        ] {
            let Ok(Message::Greeting(greeting)) = Message::parse(line) else {
                panic!("{line:?}")
            };
            assert_eq!(greeting.version, None);
            assert!(!greeting.offers_oob());
        }
    }

    #[test]
    fn timestamps_that_are_none() {
        for (timestamp, expected) in [
            (r#"{"seconds": 3, "microseconds": 5}"#, Some(3_000_005_000)),
            (r#"{"seconds": -1, "microseconds": -1}"#, None),
            (r#"{"seconds": 3, "microseconds": 1000000}"#, None),
            (r#"{"seconds": 3}"#, None),
            (r#""yesterday""#, None),
            ("null", None),
        ] {
            let line = format!(r#"{{"timestamp": {timestamp}, "event": "STOP"}}"#);
            let Ok(Message::Event(event)) = Message::parse(line.as_bytes()) else {
                panic!("{line}")
            };
            assert_eq!(
                event.timestamp.map(Timestamp::as_unix_ns),
                expected,
                "{line}"
            );
            assert_eq!(event.data, Value::Null);
        }
        assert!(matches!(
            Message::parse(br#"{"event": "STOP"}"#),
            Ok(Message::Event(_))
        ));
    }

    #[test]
    fn a_null_return_is_a_return() {
        let Ok(Message::Return { id, value }) = Message::parse(br#"{"return": null, "id": 3}"#)
        else {
            panic!("not a return")
        };
        assert_eq!((id, value.get()), (Some(json!(3)), "null"));
    }

    #[test]
    fn errors_in_known_and_unknown_shapes() {
        let parsed = |line: &str| match Message::parse(line.as_bytes()) {
            Ok(Message::Error { id, error }) => (id, error),
            other => panic!("{line}: {other:?}"),
        };
        let (id, error) = parsed(
            r#"{"id": 9, "error": {"class": "CommandNotFound", "desc": "The command x has not been found"}}"#,
        );
        assert_eq!(id, Some(json!(9)));
        assert_eq!(error.class, ErrorClass::CommandNotFound);
        assert_eq!(error.desc, "The command x has not been found");

        let (id, error) = parsed(r#"{"error": {"class": "Novel", "desc": "d", "more": []}}"#);
        assert_eq!(
            (id, error.class),
            (None, ErrorClass::Other("Novel".to_owned()))
        );
        let (_, error) = parsed(r#"{"error": "plain"}"#);
        assert!(error.desc.contains("plain"), "{error}");
    }

    #[test]
    fn what_is_no_message() {
        for line in [
            "QEMU 7.2.22 monitor - type 'help' for more information",
            "",
            "[1]",
            "7",
            "{\"return\": {}} trailing",
            "{\"return\": ",
            "{\"event\": 7}",
        ] {
            let parsed = Message::parse(line.as_bytes());
            assert!(
                matches!(parsed, Err(MessageError::NotJson { .. })),
                "{line}: {parsed:?}"
            );
        }
        assert!(matches!(
            Message::parse(b"{\"x\": 1}"),
            Err(MessageError::Unknown { .. })
        ));
    }

    #[test]
    fn an_event_is_bounded_more_tightly_than_a_line() {
        let line = format!(
            r#"{{"event": "X", "data": {{"a": "{}"}}}}"#,
            "b".repeat(MAX_EVENT_BYTES)
        );
        assert!(matches!(
            Message::parse(line.as_bytes()),
            Err(MessageError::EventTooLong { .. })
        ));
        let line = format!(r#"{{"return": "{}"}}"#, "b".repeat(MAX_EVENT_BYTES));
        assert!(matches!(
            Message::parse(line.as_bytes()),
            Ok(Message::Return { .. })
        ));
    }

    #[test]
    fn depth_does_not_overflow_the_stack() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        // A value stays text until somebody asks for it; a deep event is refused when it is parsed.
        assert!(Message::parse(format!(r#"{{"return": {deep}}}"#).as_bytes()).is_ok());
        assert!(Message::parse(format!(r#"{{"event": "X", "data": {deep}}}"#).as_bytes()).is_err());
        assert!(Message::parse(format!(r#"{{"junk": {deep}, "event": "X"}}"#).as_bytes()).is_ok());
    }

    #[test]
    fn excerpts_are_printable_and_short() {
        assert_eq!(excerpt(b"a\x1b[31m\xff"), "a\\u{1b}[31m\\xff");
        assert!(excerpt(&[b'x'; 1000]).len() < 130);
    }
}
