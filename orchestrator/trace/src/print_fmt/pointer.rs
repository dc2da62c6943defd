//! `%p` and its extensions (`Documentation/core-api/printk-formats.rst`).

use super::Environment;
use super::printf::{Shape, shape_written};
use crate::text::{push_decimal, push_decimal_zeroed, push_hex, push_hex_padded, push_text};
use crate::{Endian, LongSize};

/// What a `%p` argument is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pointee<'a> {
    /// Bytes in the record, to the end of what the argument points to.
    Bytes(&'a [u8]),
    /// An address in the traced kernel.
    Address(u64),
    /// Beyond the record.
    Missing,
}

const NOT_THERE: &[u8] = b"<not in the record>";

pub(super) fn write_pointer(
    environment: &Environment<'_, '_>,
    extension: &[u8],
    shape: Shape,
    pointee: Pointee<'_>,
    out: &mut Vec<u8>,
) {
    let start = out.len();
    let endian = environment.endian;
    match (extension, pointee) {
        (_, Pointee::Missing) => out.extend_from_slice(NOT_THERE),
        ([b's' | b'S' | b'f' | b'F' | b'B', ..], Pointee::Address(address)) => {
            let offset = matches!(extension.first(), Some(b'S' | b'F' | b'B'));
            write_symbol(environment, address, offset, out);
        }
        ([letter @ (b'M' | b'm'), rest @ ..], Pointee::Bytes(bytes)) => {
            write_mac(*letter, rest.first().copied(), bytes, out);
        }
        ([letter @ (b'I' | b'i'), b'4', rest @ ..], Pointee::Bytes(bytes)) => {
            match bytes.first_chunk::<4>() {
                Some(address) => {
                    let host = rest.first() == Some(&b'h') && endian == Endian::Little;
                    let reversed = host || rest.first() == Some(&b'l');
                    write_ip4(*letter == b'i', reversed, *address, out);
                }
                None => out.extend_from_slice(NOT_THERE),
            }
        }
        ([letter @ (b'I' | b'i'), b'6', rest @ ..], Pointee::Bytes(bytes)) => {
            match bytes.first_chunk::<16>() {
                Some(address) if rest.first() == Some(&b'c') => write_ip6_compressed(*address, out),
                Some(address) => write_ip6(*letter == b'I', *address, out),
                None => out.extend_from_slice(NOT_THERE),
            }
        }
        ([letter @ (b'I' | b'i'), b'S', rest @ ..], Pointee::Bytes(bytes)) => {
            write_sockaddr(endian, *letter == b'i', rest, bytes, out);
        }
        ([b'U', rest @ ..], Pointee::Bytes(bytes)) => match bytes.first_chunk::<16>() {
            Some(uuid) => write_uuid(rest.first().copied(), *uuid, out),
            None => out.extend_from_slice(NOT_THERE),
        },
        ([b'h', rest @ ..], Pointee::Bytes(bytes)) => {
            let delimiter: &[u8] = match rest.first() {
                Some(b'C') => b":",
                Some(b'D') => b"-",
                Some(b'N') => b"",
                _ => b" ",
            };
            // The kernel takes the number of bytes from the field width; at most 64.
            let count = shape.width.clamp(1, 64).min(bytes.len());
            for (index, byte) in bytes.iter().take(count).enumerate() {
                if index > 0 {
                    out.extend_from_slice(delimiter);
                }
                push_hex_padded(out, u64::from(*byte), 2);
            }
            return;
        }
        ([b'b', rest @ ..], Pointee::Bytes(bytes)) => {
            // The field width is the number of bits.
            let bytes = match shape.width {
                0 => bytes,
                bits => bytes.get(..bits.div_ceil(8)).unwrap_or(bytes),
            };
            if rest.first() == Some(&b'l') {
                write_bit_list(endian, bytes, out);
            } else {
                write_bitmask(endian, bytes, out);
            }
            return;
        }
        // Bytes under an extension that needs more of the kernel than a trace has: raw.
        (_, Pointee::Bytes(bytes)) => {
            for byte in bytes.iter().take(64) {
                push_hex_padded(out, u64::from(*byte), 2);
            }
        }
        // glibc's `%p`, which is how trace-cmd prints these.
        (_, Pointee::Address(0)) => out.extend_from_slice(b"(nil)"),
        (_, Pointee::Address(address)) => {
            out.extend_from_slice(b"0x");
            push_hex(out, address);
        }
    }
    shape_written(
        out,
        start,
        Shape {
            precision: None,
            ..shape
        },
    );
}

/// `name` or `name+0xoffset`; the address where no symbol covers it.
pub(crate) fn write_symbol(
    environment: &Environment<'_, '_>,
    address: u64,
    offset: bool,
    out: &mut Vec<u8>,
) {
    match environment.symbols.find(address) {
        Some(symbol) => {
            push_text(out, symbol.name);
            if offset {
                out.extend_from_slice(b"+0x");
                push_hex(out, address.wrapping_sub(symbol.address));
            }
        }
        None => {
            out.extend_from_slice(b"0x");
            match environment.long_size {
                LongSize::Four => push_hex(out, address & 0xffff_ffff),
                LongSize::Eight => push_hex(out, address),
            }
        }
    }
}

fn write_mac(letter: u8, variant: Option<u8>, bytes: &[u8], out: &mut Vec<u8>) {
    let Some(mac) = bytes.first_chunk::<6>() else {
        return out.extend_from_slice(NOT_THERE);
    };
    let mut mac = *mac;
    if variant == Some(b'R') {
        mac.reverse();
    }
    for (index, byte) in mac.iter().enumerate() {
        if index > 0 && letter == b'M' {
            out.push(if variant == Some(b'F') { b'-' } else { b':' });
        }
        push_hex_padded(out, u64::from(*byte), 2);
    }
}

fn write_ip4(zeroed: bool, reversed: bool, mut address: [u8; 4], out: &mut Vec<u8>) {
    if reversed {
        address.reverse();
    }
    for (index, byte) in address.iter().enumerate() {
        if index > 0 {
            out.push(b'.');
        }
        push_decimal_zeroed(out, u64::from(*byte), if zeroed { 3 } else { 1 });
    }
}

fn write_ip6(colons: bool, address: [u8; 16], out: &mut Vec<u8>) {
    for (index, byte) in address.iter().enumerate() {
        if colons && index > 0 && index % 2 == 0 {
            out.push(b':');
        }
        push_hex_padded(out, u64::from(*byte), 2);
    }
}

/// `ip6_compressed_string` in `lib/vsprintf.c`: RFC 5952, and dotted quads for mapped and ISATAP addresses.
fn write_ip6_compressed(address: [u8; 16], out: &mut Vec<u8>) {
    let words: [u16; 8] = std::array::from_fn(|index| {
        u16::from_be_bytes([address[2 * index], address[2 * index + 1]])
    });
    let mapped = words[..5].iter().all(|word| *word == 0) && words[5] == 0xffff;
    let isatap = words[4] & !0x0200 == 0 && words[5] == 0x5efe;
    let dotted = mapped || isatap;
    let range = if dotted { 6 } else { 8 };
    // The longest run of zeros, the first of equals; a single zero is not worth it.
    let mut best: Option<(usize, usize)> = None;
    for start in 0..range {
        let length = words[start..range]
            .iter()
            .take_while(|word| **word == 0)
            .count();
        if length > best.map_or(1, |(_, length)| length) {
            best = Some((start, length));
        }
    }
    let mut index = 0;
    let mut colon = false;
    while index < range {
        if let Some((start, length)) = best.filter(|(start, _)| *start == index) {
            if colon || start == 0 {
                out.push(b':');
            }
            out.push(b':');
            colon = false;
            index += length;
            continue;
        }
        if colon {
            out.push(b':');
        }
        push_hex(out, u64::from(words[index]));
        colon = true;
        index += 1;
    }
    if dotted {
        if colon {
            out.push(b':');
        }
        write_ip4(
            false,
            false,
            [address[12], address[13], address[14], address[15]],
            out,
        );
    }
}

/// `struct sockaddr_in` and `struct sockaddr_in6`: family in the machine's order, port and address in the network's.
fn write_sockaddr(endian: Endian, zeroed: bool, flags: &[u8], bytes: &[u8], out: &mut Vec<u8>) {
    const AF_INET: u16 = 2;
    const AF_INET6: u16 = 10;
    let port = bytes
        .get(2..4)
        .map_or(0, |port| u16::from_be_bytes([port[0], port[1]]));
    let with_port = flags.contains(&b'p');
    match endian.u16(bytes, 0) {
        Some(AF_INET) => {
            let Some(address) = bytes.get(4..).and_then(|bytes| bytes.first_chunk::<4>()) else {
                return out.extend_from_slice(NOT_THERE);
            };
            write_ip4(zeroed, false, *address, out);
            if with_port {
                out.push(b':');
                push_decimal(out, u64::from(port));
            }
        }
        Some(AF_INET6) => {
            let Some(address) = bytes.get(8..).and_then(|bytes| bytes.first_chunk::<16>()) else {
                return out.extend_from_slice(NOT_THERE);
            };
            if with_port {
                out.push(b'[');
            }
            if flags.contains(&b'c') {
                write_ip6_compressed(*address, out);
            } else {
                write_ip6(!zeroed, *address, out);
            }
            if with_port {
                out.extend_from_slice(b"]:");
                push_decimal(out, u64::from(port));
            }
        }
        // An empty address, or another family: nothing to show, as in trace-cmd.
        Some(_) => {}
        None => out.extend_from_slice(NOT_THERE),
    }
}

fn write_uuid(variant: Option<u8>, uuid: [u8; 16], out: &mut Vec<u8>) {
    const BIG: [usize; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    const LITTLE: [usize; 16] = [3, 2, 1, 0, 5, 4, 7, 6, 8, 9, 10, 11, 12, 13, 14, 15];
    let order = if matches!(variant, Some(b'l' | b'L')) {
        LITTLE
    } else {
        BIG
    };
    let start = out.len();
    for (index, at) in order.into_iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            out.push(b'-');
        }
        push_hex_padded(out, u64::from(uuid[at]), 2);
    }
    if matches!(variant, Some(b'B' | b'L'))
        && let Some(written) = out.get_mut(start..)
    {
        written.make_ascii_uppercase();
    }
}

/// Bits as hex, commas every 32 (`%*pb`). The bytes are an array of longs of the traced machine.
pub(super) fn write_bitmask(endian: Endian, bytes: &[u8], out: &mut Vec<u8>) {
    for index in (0..bytes.len()).rev() {
        let at = if endian == Endian::Big {
            bytes.len() - 1 - index
        } else {
            index
        };
        push_hex_padded(out, u64::from(bytes[at]), 2);
        if index % 4 == 0 && index > 0 {
            out.push(b',');
        }
    }
}

/// Bits as ranges: `0-3,7` (`%*pbl`).
pub(super) fn write_bit_list(endian: Endian, bytes: &[u8], out: &mut Vec<u8>) {
    let bit = |bit: usize| {
        let index = bit / 8;
        let at = if endian == Endian::Big {
            bytes.len() - 1 - index
        } else {
            index
        };
        bytes[at] >> (bit % 8) & 1 == 1
    };
    let bits = bytes.len() * 8;
    let mut first = true;
    let mut at = 0;
    while at < bits {
        if !bit(at) {
            at += 1;
            continue;
        }
        let start = at;
        while at < bits && bit(at) {
            at += 1;
        }
        if !first {
            out.push(b',');
        }
        first = false;
        push_decimal(out, u64::try_from(start).unwrap_or(0));
        if at - start > 1 {
            out.push(b'-');
            push_decimal(out, u64::try_from(at - 1).unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    /// Expected texts from RFC 5952 and `lib/test_printf.c`.
    #[test]
    fn addresses() {
        for address in [
            "::1",
            "::",
            "2001:db8::1",
            "2001:db8:0:1:1:1:1:1",
            "fe80::1:0:0:1",
            "1:2:3:4:5:6:7:8",
        ] {
            let parsed: std::net::Ipv6Addr = address.parse().unwrap();
            assert_eq!(
                text(|out| write_ip6_compressed(parsed.octets(), out)),
                address
            );
        }
        let mapped = "::ffff:192.0.2.1".parse::<std::net::Ipv6Addr>().unwrap();
        assert_eq!(
            text(|out| write_ip6_compressed(mapped.octets(), out)),
            "::ffff:192.0.2.1"
        );
        assert_eq!(
            text(|out| write_ip4(true, false, [1, 2, 3, 4], out)),
            "001.002.003.004"
        );
        let sockaddr = [2, 0, 0x1f, 0x90, 127, 0, 0, 1];
        assert_eq!(
            text(|out| write_sockaddr(Endian::Little, false, b"pc", &sockaddr, out)),
            "127.0.0.1:8080"
        );
    }

    #[test]
    fn uuids() {
        let uuid: [u8; 16] = std::array::from_fn(|index| u8::try_from(index).unwrap());
        for (variant, expected) in [
            (None, "00010203-0405-0607-0809-0a0b0c0d0e0f"),
            (Some(b'B'), "00010203-0405-0607-0809-0A0B0C0D0E0F"),
            (Some(b'l'), "03020100-0504-0706-0809-0a0b0c0d0e0f"),
            (Some(b'L'), "03020100-0504-0706-0809-0A0B0C0D0E0F"),
        ] {
            assert_eq!(text(|out| write_uuid(variant, uuid, out)), expected);
        }
    }

    #[test]
    fn masks() {
        let mask = [0b1000_1111, 0, 0, 0, 1, 0, 0, 0];
        assert_eq!(
            text(|out| write_bitmask(Endian::Little, &mask, out)),
            "00000001,0000008f"
        );
        assert_eq!(
            text(|out| write_bit_list(Endian::Little, &mask, out)),
            "0-3,7,32"
        );
        assert_eq!(
            text(|out| write_bit_list(Endian::Big, &[0, 0xff], out)),
            "0-7"
        );
    }
}
