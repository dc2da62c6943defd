//! The fuzz entry points with seeded mutations, on stable. A failure prints the seed's round; rounds are independent.

use vmtrail_trace::fuzz;

const SCHED: &[u8] = include_bytes!("fixtures/pages/sched.page");
const OVERRUN: &[u8] = include_bytes!("fixtures/pages/overrun.page");
const HEADER: &[u8] = include_bytes!("fixtures/pages/header_page");
const PRINT: &[u8] = include_bytes!("fixtures/pages/print.format");

/// xorshift64*, seeded by round.
struct Random(u64);

impl Random {
    fn of_round(round: u64) -> Self {
        Self(round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 32).unwrap() % bound.max(1)
    }
}

/// Flips, overwrites, cuts, doubles; texts get pieces of the language rather than noise.
fn mutate(random: &mut Random, original: &[u8], words: &[&str]) -> Vec<u8> {
    let mut bytes = original.to_vec();
    for _ in 0..=random.below(5) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = [0, 0xff, 0x7f, 0x80, b'9'][random.below(5)],
            2 => bytes.truncate(at),
            3 if !words.is_empty() => {
                let word = words[random.below(words.len())].as_bytes();
                bytes.splice(at..at, word.iter().copied());
            }
            4 => {
                let end = (at + random.below(64)).min(bytes.len());
                let piece = bytes.get(at..end).unwrap_or_default().to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let end = (at + random.below(16)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
        }
    }
    bytes
}

fn run(rounds: u64, seeds: &[&[u8]], words: &[&str], target: fn(&[u8])) {
    for round in 0..rounds {
        let mut random = Random::of_round(round);
        let seed = seeds[random.below(seeds.len())];
        let input = mutate(&mut random, seed, words);
        if std::panic::catch_unwind(|| target(&input)).is_err() {
            panic!("round {round}: {:?}", String::from_utf8_lossy(&input));
        }
    }
}

#[test]
fn pages() {
    let big: Vec<u8> = [&[3_u8], OVERRUN].concat();
    let little: Vec<u8> = [&[0_u8], SCHED].concat();
    run(5000, &[&big, &little], &[], fuzz::page);
    run(
        5000,
        &[HEADER],
        &["offset:", "size:", "4294967295", "-1", ";"],
        fuzz::header_page,
    );
}

#[test]
fn formats_and_print_formats() {
    let with_record: Vec<u8> = [PRINT, &[0], &[5; 64]].concat();
    run(
        5000,
        &[&with_record],
        &[
            "\tfield:__data_loc char[] x;\toffset:8;\tsize:4;\n",
            "[",
            "%s",
            "99999",
        ],
        fuzz::format,
    );
    let words = [
        "REC->i",
        "REC->a[",
        "]",
        "(",
        ")",
        "__get_str(s)",
        "?",
        ":",
        "<<",
        "-1",
        "%",
        "/",
        "0x",
        "\"",
        "%*pbl",
        "%pISpc",
        "__print_flags(",
        "__print_symbolic(REC->i, { 1, \"x\" })",
        "sizeof(",
        "({",
        "int x = (1);",
        "})",
        "*",
        "&",
        "(u64 *)",
        ",",
        "__print_array(REC->a, 2, 8)",
    ];
    run(
        10_000,
        &[
            br#""%d %s", REC->i, __get_str(s)"#,
            br#""%s", __print_flags(REC->i, "|", { 1, "a" }, { (1 << 2) | 8, "b" })"#,
            br#""%llx", (u64)REC->a[REC->i] + *(u32 *)&REC->a[1]"#,
            br#""%s", REC->i > 3 ? __print_array(REC->a, 2, 8) : "no""#,
        ],
        &words,
        fuzz::print_format,
    );
}

#[test]
fn filters_and_tables() {
    run(
        10_000,
        &[br#"prev_comm == "qemu" && (prio < 100 || !x) && y =~ "a*b?""#],
        &["(", ")", "&&", "||", "!", "==", "0x", "\"", "'", "-"],
        fuzz::filter,
    );
    run(
        3000,
        &[
            b"ffffffff81000000 T _text\n0x10 : \"%s\\n\"\n12 qemu\n12 13\n",
            PRINT,
        ],
        &["\n", ":", "\"", "\\", "ffffffffffffffffff"],
        fuzz::tables,
    );
}
