//! Bytes to lines: QMP is one JSON object a line.
//!
//! QEMU ends each message with `\r\n` and writes none over several lines, unless `pretty=on` was
//! asked of the monitor (`monitor/qmp.c: qmp_send_response`), which
//! [`MessageError::Pretty`](crate::message::MessageError::Pretty) names.

/// Most bytes a line may have, its line feed not counted: 16 MiB.
///
/// The longest line that QEMU is known to write is the answer to `query-qmp-schema`, some 200 KiB.
pub const DEFAULT_MAX_LINE_BYTES: usize = 16 << 20;

/// Above this capacity an emptied buffer is given back: one long answer must not cost its memory
/// for the rest of a connection that lasts for months.
const KEEP_CAPACITY_BYTES: usize = 256 << 10;

/// A line was longer than the limit; the stream cannot be used any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer sent a line of more than {limit} bytes")]
pub struct LineTooLong {
    /// The limit that was passed, in bytes.
    pub limit: usize,
}

/// Cuts a byte stream into lines and remembers how far it has already looked, so that a line that
/// arrives in many pieces is searched once.
///
/// It holds at most `limit` bytes and the last piece pushed, provided that the lines are taken out
/// after every [`push`](Self::push).
#[derive(Debug)]
pub struct LineSplitter {
    buffer: Vec<u8>,
    /// Bytes before this were given out.
    start: usize,
    /// Bytes before this hold no line feed after `start`.
    scanned: usize,
    limit: usize,
    too_long: bool,
}

impl LineSplitter {
    /// A splitter for lines of up to `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            scanned: 0,
            limit,
            too_long: false,
        }
    }

    /// Takes the next bytes of the stream. After a [`LineTooLong`] they are thrown away.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.too_long {
            return;
        }
        if self.start > 0 {
            // All whole lines were taken, so what moves here is at most the last piece's tail.
            self.buffer.drain(..self.start);
            self.scanned -= self.start;
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole line, without `\n` or `\r\n`; `None` until more bytes come.
    ///
    /// Once it has failed it fails for ever: where the next line begins is not known.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, LineTooLong> {
        if self.too_long {
            return Err(LineTooLong { limit: self.limit });
        }
        let found = self.buffer[self.scanned..]
            .iter()
            .position(|&byte| byte == b'\n');
        let length = match found {
            Some(offset) => self.scanned + offset - self.start,
            None => self.buffer.len() - self.start,
        };
        if length > self.limit {
            self.too_long = true;
            self.buffer = Vec::new();
            self.start = 0;
            self.scanned = 0;
            return Err(LineTooLong { limit: self.limit });
        }
        if found.is_none() {
            self.scanned = self.buffer.len();
            if self.start == self.buffer.len() && self.buffer.capacity() > KEEP_CAPACITY_BYTES {
                self.buffer = Vec::new();
                self.start = 0;
                self.scanned = 0;
            }
            return Ok(None);
        }
        let begin = self.start;
        let end = begin + length;
        self.start = end + 1;
        self.scanned = self.start;
        let line = &self.buffer[begin..end];
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }

    /// What has arrived of a line that is not yet whole; for error messages.
    #[must_use]
    pub fn partial(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    /// Bytes of memory the splitter holds.
    #[must_use]
    pub fn capacity_bytes(&self) -> usize {
        self.buffer.capacity()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines_of(splitter: &mut LineSplitter) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        while let Some(line) = splitter
            .next_line()
            .expect("no line is over the limit here")
        {
            lines.push(line.to_vec());
        }
        lines
    }

    #[test]
    fn a_line_in_pieces_is_one_line() {
        let mut splitter = LineSplitter::new(64);
        splitter.push(b"{\"QM");
        assert_eq!(splitter.next_line(), Ok(None));
        splitter.push(b"P\":1}\r");
        assert_eq!(splitter.next_line(), Ok(None));
        splitter.push(b"\n{}\n\nx");
        assert_eq!(
            lines_of(&mut splitter),
            [b"{\"QMP\":1}".to_vec(), b"{}".to_vec(), vec![]]
        );
        assert_eq!(splitter.partial(), b"x");
    }

    #[test]
    fn pushing_before_all_lines_were_taken_loses_none() {
        let mut splitter = LineSplitter::new(64);
        splitter.push(b"a\n\nb\nc");
        assert_eq!(splitter.next_line(), Ok(Some(&b"a"[..])));
        splitter.push(b"d\n");
        assert_eq!(
            lines_of(&mut splitter),
            [b"".to_vec(), b"b".to_vec(), b"cd".to_vec()]
        );
    }

    #[test]
    fn the_limit_is_the_longest_line_that_passes() {
        let mut splitter = LineSplitter::new(4);
        splitter.push(b"1234\n");
        assert_eq!(splitter.next_line(), Ok(Some(&b"1234"[..])));
        splitter.push(b"1234");
        assert_eq!(splitter.next_line(), Ok(None));
        splitter.push(b"5");
        assert_eq!(splitter.next_line(), Err(LineTooLong { limit: 4 }));
        splitter.push(b"\nok\n");
        assert_eq!(
            splitter.next_line(),
            Err(LineTooLong { limit: 4 }),
            "the failure is final"
        );
        assert_eq!(splitter.capacity_bytes(), 0);
    }

    #[test]
    fn a_long_line_does_not_keep_its_memory() {
        let mut splitter = LineSplitter::new(DEFAULT_MAX_LINE_BYTES);
        let mut long = vec![b'a'; 4 << 20];
        long.push(b'\n');
        splitter.push(&long);
        assert_eq!(
            splitter.next_line().map(|line| line.map(<[u8]>::len)),
            Ok(Some(4 << 20))
        );
        assert_eq!(splitter.next_line(), Ok(None));
        assert!(splitter.capacity_bytes() <= KEEP_CAPACITY_BYTES);
    }

    proptest! {
        #[test]
        fn every_split_gives_the_same_lines(
            lines in prop::collection::vec(prop::collection::vec(any::<u8>().prop_filter(
                "part of a line end", |byte| *byte != b'\n' && *byte != b'\r'), 0..40), 0..12),
            cuts in prop::collection::vec(1usize..17, 1..40),
        ) {
            let stream: Vec<u8> =
                lines.iter().flat_map(|line| line.iter().copied().chain(*b"\r\n")).collect();
            let mut splitter = LineSplitter::new(64);
            let mut got = Vec::new();
            let mut rest = stream.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, behind) = rest.split_at((*cut).min(rest.len()));
                splitter.push(piece);
                got.extend(lines_of(&mut splitter));
                rest = behind;
            }
            prop_assert_eq!(got, lines);
        }
    }
}
