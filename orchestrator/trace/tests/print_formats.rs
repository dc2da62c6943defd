//! Print formats, evaluated: each line is a format as kernels have it, a record, and what the kernel prints.

use vmtrail_trace::catalog::Catalog;
use vmtrail_trace::metadata::{Metadata, PrintkFormats, Symbols};
use vmtrail_trace::report::{Entry, ReportOptions, Reporter};
use vmtrail_trace::ring_buffer::{Missed, PageLayout};
use vmtrail_trace::{Endian, LongSize};

const FIELDS: &str = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
    \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
    \tfield:int i;\toffset:8;\tsize:4;\tsigned:1;\n\
    \tfield:u32 u;\toffset:12;\tsize:4;\tsigned:0;\n\
    \tfield:s64 big;\toffset:16;\tsize:8;\tsigned:1;\n\
    \tfield:unsigned long ip;\toffset:24;\tsize:8;\tsigned:0;\n\
    \tfield:u8 mac[6];\toffset:32;\tsize:6;\tsigned:0;\n\
    \tfield:u16 half;\toffset:38;\tsize:2;\tsigned:0;\n\
    \tfield:char comm[8];\toffset:40;\tsize:8;\tsigned:0;\n\
    \tfield:__data_loc char[] name;\toffset:48;\tsize:4;\tsigned:0;\n\
    \tfield:__rel_loc u16[] nums;\toffset:52;\tsize:4;\tsigned:0;\n\
    \tfield:const char * text;\toffset:56;\tsize:8;\tsigned:0;\n\
    \tfield:u32 arr[3];\toffset:64;\tsize:12;\tsigned:0;\n";

fn record() -> Vec<u8> {
    let mut record = vec![7, 0, 0, 0, 42, 0, 0, 0];
    record.extend((-5_i32).to_le_bytes());
    record.extend(0x8000_0005_u32.to_le_bytes());
    record.extend((-9_i64).to_le_bytes());
    record.extend(0xffff_ffff_8100_0110_u64.to_le_bytes());
    record.extend([0xaa, 0xbb, 0xcc, 0, 1, 2]);
    record.extend(0x1234_u16.to_le_bytes());
    record.extend(*b"qemu\0xyz");
    // name: "disk0" at 76, 6 bytes; nums: 3 elements at 82, relative to 56.
    record.extend((76_u32 | 6 << 16).to_le_bytes());
    record.extend((26_u32 | 6 << 16).to_le_bytes());
    record.extend(0xffff_ffff_8200_0000_u64.to_le_bytes());
    for value in [1_u32, 2, 3] {
        record.extend(value.to_le_bytes());
    }
    record.extend(*b"disk0\0");
    for value in [10_u16, 20, 30] {
        record.extend(value.to_le_bytes());
    }
    record
}

fn metadata(print_fmt: &str) -> Metadata {
    let mut metadata = Metadata::bare(PageLayout::native64_le(4096).unwrap());
    let format = format!("name: test\nID: 7\nformat:\n{FIELDS}\nprint fmt: {print_fmt}\n");
    metadata.events.add("tests", &format).unwrap();
    metadata.symbols = Symbols::parse(b"ffffffff81000100 T foo\nffffffff81000200 T bar\n");
    metadata.printk = PrintkFormats::parse(b"0xffffffff82000000 : \"constant\"\n");
    metadata
}

fn print(print_fmt: &str, record: &[u8]) -> String {
    let metadata = metadata(print_fmt);
    let mut reporter = Reporter::new(&metadata, ReportOptions::default());
    let mut out = Vec::new();
    let entry = Entry {
        cpu: 0,
        timestamp: 0,
        type_id: 7,
        payload: record,
        missed: Missed::None,
    };
    reporter.write(&entry, &mut out);
    let line = String::from_utf8_lossy(&out).into_owned();
    let (_, text) = line.split_once("test: ").unwrap();
    text.trim_start().trim_end_matches('\n').to_owned()
}

#[test]
fn as_the_kernel_prints() {
    for (print_fmt, expected) in [
        (
            r#""%d %u %x", REC->i, REC->i, REC->i"#,
            "-5 4294967291 fffffffb",
        ),
        (r#""%ld", REC->i"#, "-5"),
        (
            r#""%lld %llu", REC->big, REC->big"#,
            "-9 18446744073709551607",
        ),
        (r#""%d", REC->u >> 31"#, "1"),
        (r#""%s", REC->i < 0 ? "neg" : "pos""#, "neg"),
        (r#""%s", REC->u > 0 ? "pos" : "not""#, "pos"),
        (r#""%s", (int)REC->u < 0 ? "neg" : "not""#, "neg"),
        (r#""%lx", (unsigned long)(REC->u & ~0xfUL)"#, "80000000"),
        (r#""%s", REC->comm"#, "qemu"),
        (
            r#""%-8s|%8s|%.2s", REC->comm, REC->comm, REC->comm"#,
            "qemu    |    qemu|qe",
        ),
        (r#""%s", __get_str(name)"#, "disk0"),
        (r#""%.*s", 3, __get_str(name)"#, "dis"),
        (r#""%s", REC->text"#, "constant"),
        (
            r#""%pS %ps %pB", (void *)REC->ip, REC->ip, (void *)REC->ip"#,
            "foo+0x10 foo foo+0x10",
        ),
        (r#""%pM", REC->mac"#, "aa:bb:cc:00:01:02"),
        (
            r#""%s", __print_flags(REC->u, "|", { 1, "A" }, { 4, "B" })"#,
            "A|B|0x80000000",
        ),
        (r#""%s", __print_flags(REC->u & 2, "|", { 1, "A" })"#, ""),
        (
            r#""%s", __print_symbolic(REC->i, { -5, "FIVE" }, { 0, "ZERO" })"#,
            "FIVE",
        ),
        (
            r#""%s", __print_symbolic(REC->half, { 1, "ONE" })"#,
            "0x1234",
        ),
        (
            r#""%s", __print_symbolic(REC->u, { 1, "ONE" }, { -1, ((void *)0) })"#,
            "0x80000005",
        ),
        (r#""%s", __print_array(REC->arr, 3, 4)"#, "{0x1,0x2,0x3}"),
        (
            r#""%s", __print_array(__get_rel_dynamic_array(nums), __get_rel_dynamic_array_len(nums) / sizeof(u16), sizeof(u16))"#,
            "{0xa,0x14,0x1e}",
        ),
        (
            r#""%s %s", __print_hex(REC->mac, 3), __print_hex_str(REC->mac, 3)"#,
            "aa bb cc aabbcc",
        ),
        (r#""%d %d", REC->arr[1], ((u8 *)REC->arr)[4]"#, "2 2"),
        (r#""%u", *(u32 *)&REC->arr[2]"#, "3"),
        (r#""%d", __get_dynamic_array_len(name)"#, "6"),
        (
            r#""%d", ({ int x = (REC->i); int y = (3); x < y ? x : y; })"#,
            "-5",
        ),
        (r#""%d%%", sizeof(long) + sizeof(REC->half)"#, "10%"),
        (r#""%c%c", 'x', REC->comm[0]"#, "xq"),
        (r#""%d", !REC->i || REC->half == 0x1234 && 1"#, "1"),
        (
            r#""%d:%d", ((unsigned int) ((REC->u) >> 20)), ((unsigned int) ((REC->u) & ((1U << 20) - 1)))"#,
            "2048:5",
        ),
        (r#""a" "b" "c %d", 1"#, "abc 1"),
        (r#""%p", vmemmap_base + REC->ip"#, "<not in the record>"),
        (
            r#""%d", REC->i / (REC->half - 0x1234)"#,
            "<not in the record>",
        ),
        (
            r#""|%5d|%-5d|%05d|%#x", REC->i, REC->i, REC->i, REC->half"#,
            "|   -5|-5   |-0005|0x1234",
        ),
        (r#""%*ph", 3, REC->mac"#, "aa bb cc"),
        (
            r#""%s", REC->i ? __print_symbolic(REC->i, { -5, "x" }) : "none""#,
            "x",
        ),
        // Nothing to evaluate it with: the fields, and no line is skipped.
        (
            r#""%s", some_kernel_function(REC->i)"#,
            "[FAILED TO PARSE] i=-5 u=2147483653 big=-9 ip=0xffffffff81000110 mac=ARRAY[aa, bb, cc, 00, 01, 02] \
             half=4660 comm=qemu name=disk0 nums=ARRAY[0a, 00, 14, 00, 1e, 00] text=0xffffffff82000000 \
             arr=ARRAY[01, 00, 00, 00, 02, 00, 00, 00, 03, 00, 00, 00]",
        ),
    ] {
        assert_eq!(print(print_fmt, &record()), expected, "{print_fmt}");
    }
}

/// A record cut anywhere is printed as far as it goes.
#[test]
fn records_cut_short() {
    let whole = record();
    for length in 0..whole.len() {
        let text = print(
            r#""%d %lx %s %s %pM %s", REC->i, REC->ip, REC->comm, __get_str(name), REC->mac, __print_array(REC->arr, 300, 4)"#,
            &whole[..length],
        );
        if length < 76 {
            assert!(text.contains("<not in the record>"), "{length}: {text}");
        }
    }
}

#[test]
fn deep_and_long_formats_are_refused_or_read() {
    let endian = Endian::Little;
    for (body, fine) in [
        (format!("{}1{}", "(".repeat(90), ")".repeat(90)), true),
        (
            format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000)),
            false,
        ),
        (format!("1{}", "+1".repeat(900)), true),
        (format!("1{}", "+1".repeat(60_000)), false),
        ("!".repeat(100_000) + "1", false),
        (format!("{}1", "(int)".repeat(40_000)), false),
        (format!("1{}", "?1:1".repeat(50_000)), false),
        (format!("REC->arr{}", "[0]".repeat(50_000)), false),
        // Variables that double each other: two to the power of a hundred nodes if unfolded.
        (
            format!(
                "({{ int a0 = (1); {} a99; }})",
                (1..100)
                    .map(|n| format!("int a{n} = (a{} + a{});", n - 1, n - 1))
                    .collect::<String>()
            ),
            false,
        ),
    ] {
        let mut catalog = Catalog::new(endian, LongSize::Eight);
        let format = format!("name: t\nID: 7\nformat:\n{FIELDS}\nprint fmt: \"%d\", {body}\n");
        let short: String = body.chars().take(30).collect();
        match catalog.add("tests", &format) {
            Ok(event) => assert_eq!(event.program().is_ok(), fine, "{short}"),
            Err(_) => assert!(!fine, "{short}"),
        }
    }
}

/// Formats with bytes changed, printed on records with bytes changed.
#[test]
fn mutated_formats_and_records() {
    let mut seed = 0xdead_beef_1234_5678_u64;
    let mut random = move |bound: usize| {
        seed ^= seed >> 12;
        seed ^= seed << 25;
        seed ^= seed >> 27;
        usize::try_from(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).unwrap() % bound
    };
    let formats = [
        r#""%d %s %pS", REC->i < 3 ? (u8)REC->u << 2 : 0x1f, __get_str(name), (void *)REC->ip"#,
        r#""%s %*pbl", __print_flags(REC->u, "|", { (1UL << 3) | 4, "A" }, { 4, "B" }), 12, __get_rel_dynamic_array(nums)"#,
        r#""%s %-8.3s", __print_array(__get_rel_dynamic_array(nums), 3, sizeof(u16)), REC->comm"#,
        r#""%pI4 %pI6c %pUl %pISpc", REC->arr, REC->mac, REC->comm, __get_sockaddr(name)"#,
        r#""%d", ({ int x = (REC->i); x % 3; })"#,
    ];
    let alphabet = b"()[]{}<>!~*&%|?:;,\"'\\0123456789abcREC->dlsp .+-/=";
    for round in 0..4000 {
        let mut format = formats[round % formats.len()].as_bytes().to_vec();
        for _ in 0..random(4) {
            let at = random(format.len());
            format[at] = alphabet[random(alphabet.len())];
        }
        let mut bytes = record();
        for _ in 0..random(6) {
            let at = 8 + random(bytes.len() - 8);
            bytes[at] = u8::try_from(random(256)).unwrap();
        }
        bytes.truncate(8 + random(bytes.len()));
        let text = print(&String::from_utf8_lossy(&format), &bytes);
        assert!(text.len() < 1 << 20);
    }
}
