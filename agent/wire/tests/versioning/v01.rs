//! Protocol version 1, byte by byte.
//!
//! **Do not change the test.** A guest that was started years ago speaks these bytes. If this file fails, the change
//! that broke it needs a new protocol version, and a new file beside this one.
//!
//! The literals were made by a second encoder (in another language), from the drawing in the crate doc alone.

use vmtrail_wire::agent_to_host::{
    AgentError, AgentHello, CpuCounters, ErrorCode, Heartbeat, MetadataChunk, Pong, Quiesced,
    StreamState,
};
use vmtrail_wire::host_to_agent::{Envelope, HostHello, Setting};
use vmtrail_wire::{
    AgentMessage, Decoded, Decoder, Epoch, FrameHeader, HEADER_SIZE, HostMessage, Kind,
    MessageDecoder, Sequence, SessionId, StreamId, crc32c, flags,
};

fn bytes(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn header(kind: Kind) -> FrameHeader {
    FrameHeader {
        sequence: Sequence(3),
        sent_ns: 0x0102_0304_0506_0708,
        ..FrameHeader::new(
            kind,
            SessionId(0x1122_3344_5566_7788),
            Epoch(7),
            StreamId::SESSION,
        )
    }
}

/// Checks a frame in both directions: the value makes these bytes, and these bytes make the value.
fn check_frame(header: FrameHeader, body: &[u8], header_hex: &str, payload: &[u8]) {
    let literal = bytes(header_hex);
    let page = header.encode(body);
    assert_eq!(page[..literal.len()], literal, "header page");
    assert!(
        page[literal.len()..].iter().all(|&byte| byte == 0),
        "the rest of the page is zero"
    );

    let mut decoder = Decoder::new();
    let mut stream = literal;
    stream.resize(HEADER_SIZE, 0);
    stream.extend_from_slice(payload);
    assert_eq!(decoder.push(&stream), stream.len());
    match decoder.poll() {
        Some(Decoded::Frame {
            header: decoded,
            bytes,
        }) => {
            assert_eq!(decoded, header);
            let (decoded_body, decoded_payload) = Decoded::parts(&decoded, bytes);
            assert_eq!((decoded_body, decoded_payload), (body, payload));
        }
        other => panic!("{other:?}"),
    }
}

fn check_message(
    message: &AgentMessage,
    header_hex: &str,
    payload_hex: &str,
    piece: Option<&[u8]>,
) {
    let (kind, body, payload) = message.encode();
    let payload = piece.map_or(payload, <[u8]>::to_vec);
    assert_eq!(payload, bytes(payload_hex), "payload");
    let header = FrameHeader {
        flags: if payload.is_empty() {
            0
        } else {
            flags::PAYLOAD_CRC
        },
        payload_crc: if payload.is_empty() {
            0
        } else {
            crc32c(&payload)
        },
        payload_len: u32::try_from(payload.len()).unwrap(),
        body_len: u32::try_from(body.len()).unwrap(),
        ..header(kind)
    };
    check_frame(header, &body, header_hex, &payload);
    assert_eq!(
        AgentMessage::decode(&header, &body, &payload)
            .unwrap()
            .as_ref(),
        Some(message)
    );
}

fn streams() -> Vec<StreamState> {
    vec![
        StreamState {
            stream: StreamId(0),
            first: Sequence(5),
            next: Sequence(9),
            first_page: 40,
        },
        StreamState {
            stream: StreamId(1),
            first: Sequence(0),
            next: Sequence(0),
            first_page: 0,
        },
    ]
}

#[test]
fn pages() {
    let header = FrameHeader {
        sequence: Sequence(9),
        stream: StreamId(1),
        flags: flags::PARTIAL | flags::REPLAY,
        first_page: 40,
        page_size: 64,
        page_count: 2,
        payload_len: 128,
        ..header(Kind::Pages)
    };
    check_frame(header, &[], PAGES, &[0xab; 128]);
}

#[test]
fn hello() {
    let hello = AgentHello {
        boot_id: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
        version_min: 1,
        version_max: 1,
        agent_version: "0.1.0".into(),
        kernel: "6.12.0".into(),
        clock: "mono_raw".into(),
        page_size: 4096,
        long_size: 8,
        big_endian: false,
        started: true,
        cpus: 2,
        ports: 1,
        window: 1 << 20,
        metadata_generation: 4,
        streams: streams(),
    };
    check_message(&AgentMessage::Hello(hello), HELLO, HELLO_PAYLOAD, None);
}

#[test]
fn metadata() {
    let chunk = MetadataChunk {
        generation: 4,
        item: 2,
        items: 2300,
        offset: 24_576,
        last: true,
        name: "events/header_page".into(),
    };
    check_message(
        &AgentMessage::Metadata(chunk),
        METADATA,
        METADATA_PAYLOAD,
        Some(b"field"),
    );
}

#[test]
fn lost() {
    let counters = CpuCounters {
        cpu: 3,
        overrun: 10,
        commit_overrun: 11,
        dropped: 12,
        read: 13,
    };
    check_message(
        &AgentMessage::Lost(vec![counters]),
        LOST,
        LOST_PAYLOAD,
        None,
    );
}

#[test]
fn pong() {
    let pong = Pong {
        id: 21,
        host_ns: 22,
        monotonic_ns: 23,
        boottime_ns: 24,
        realtime_ns: 25,
    };
    check_message(&AgentMessage::Pong(pong), PONG, "", None);
}

#[test]
fn quiesced() {
    let quiesced = Quiesced {
        id: 21,
        started: true,
        streams: streams(),
    };
    check_message(
        &AgentMessage::Quiesced(quiesced),
        QUIESCED,
        QUIESCED_PAYLOAD,
        None,
    );
}

#[test]
fn heartbeat() {
    let heartbeat = Heartbeat {
        metadata_generation: 4,
        started: true,
    };
    check_message(&AgentMessage::Heartbeat(heartbeat), HEARTBEAT, "", None);
}

#[test]
fn error() {
    let error = AgentError {
        id: 21,
        code: ErrorCode::StaleEpoch,
        epoch: 9,
        text: "no".into(),
    };
    check_message(&AgentMessage::Error(error), ERROR, "", None);
}

#[test]
fn messages_of_the_host() {
    let sequences = || vec![(StreamId(0), Sequence(5)), (StreamId(1), Sequence(9))];
    let hello = HostHello {
        version_min: 1,
        version_max: 1,
        have_metadata: 4,
        resume_from: sequences(),
    };
    let settings = vec![
        Setting::ClearEvents,
        Setting::Event("sched:sched_switch".into()),
        Setting::Filter("sched:sched_switch=prev_pid==0".into()),
        Setting::Clock("mono_raw".into()),
        Setting::BufferSizeKb(2048),
        Setting::CpuMask("f".into()),
        Setting::Option("nooverwrite".into()),
        Setting::Tracer("nop".into()),
    ];
    for (message, hex) in [
        (HostMessage::Hello(hello), SAY_HELLO),
        (HostMessage::Ack(sequences()), SAY_ACK),
        (HostMessage::Configure(settings), SAY_CONFIGURE),
        (HostMessage::Start, SAY_START),
        (HostMessage::Stop, SAY_STOP),
        (HostMessage::Quiesce, SAY_QUIESCE),
        (HostMessage::Flush, SAY_FLUSH),
        (HostMessage::Ping { host_ns: 22 }, SAY_PING),
        (HostMessage::Mark("here".into()), SAY_MARK),
    ] {
        let envelope = Envelope {
            session: SessionId(0x1122_3344_5566_7788),
            epoch: Epoch(7),
            id: 21,
            message,
        };
        assert_eq!(envelope.encode(), bytes(hex), "{envelope:?}");
        let mut decoder = MessageDecoder::new();
        assert_eq!(decoder.push(&bytes(hex)), hex.len() / 2);
        assert_eq!(decoder.poll(), Some(Ok(envelope)));
    }
}

const HELLO: &str = "\
    89564d545241494c0100010093315114c80000003c000000887766554433221107000000000000000300000000000000\
    ffffffff040000000807060504030201000000000000000000000000000000003079ffbf000000000000000000000000\
    00000000000000000000000000000000000000000000000000000000000000000102030405060708090a0b0c0d0e0f10\
    010001000010000008000102000000010000000000100000000000040000000500302e312e300600362e31322e300800\
    6d6f6e6f5f726177";

const HELLO_PAYLOAD: &str = "\
    020000000000000005000000000000000900000000000000280000000000000001000000000000000000000000000000\
    000000000000000000000000";

const PAGES: &str = "\
    89564d545241494c01000200c7f64aaa8000000080000000887766554433221107000000000000000900000000000000\
    010000000300000008070605040302012800000000000000400000000200000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";

const METADATA: &str = "\
    89564d545241494c01000300e672ae47a900000005000000887766554433221107000000000000000300000000000000\
    ffffffff04000000080706050403020100000000000000000000000000000000a0848e46000000000000000000000000\
    00000000000000000000000000000000000000000000000000000000000000000400000002000000fc08000000600000\
    000000000112006576656e74732f6865616465725f70616765";

const METADATA_PAYLOAD: &str = "\
    6669656c64";

const LOST: &str = "\
    89564d545241494c01000400a90683758000000028000000887766554433221107000000000000000300000000000000\
    ffffffff0400000008070605040302010000000000000000000000000000000077cfb92d000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000";

const LOST_PAYLOAD: &str = "\
    01000000030000000a000000000000000b000000000000000c000000000000000d00000000000000";

const PONG: &str = "\
    89564d545241494c0100050018dd5d1aa800000000000000887766554433221107000000000000000300000000000000\
    ffffffff0000000008070605040302010000000000000000000000000000000000000000000000000000000000000000\
    000000000000000000000000000000000000000000000000000000000000000015000000000000001600000000000000\
    170000000000000018000000000000001900000000000000";

const QUIESCED: &str = "\
    89564d545241494c010006007510c3a5890000003c000000887766554433221107000000000000000300000000000000\
    ffffffff040000000807060504030201000000000000000000000000000000003079ffbf000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000150000000000000001";

const QUIESCED_PAYLOAD: &str = "\
    020000000000000005000000000000000900000000000000280000000000000001000000000000000000000000000000\
    000000000000000000000000";

const HEARTBEAT: &str = "\
    89564d545241494c010007004b9b53b38500000000000000887766554433221107000000000000000300000000000000\
    ffffffff0000000008070605040302010000000000000000000000000000000000000000000000000000000000000000\
    00000000000000000000000000000000000000000000000000000000000000000400000001";

const ERROR: &str = "\
    89564d545241494c01000800beb777299600000000000000887766554433221107000000000000000300000000000000\
    ffffffff0000000008070605040302010000000000000000000000000000000000000000000000000000000000000000\
    000000000000000000000000000000000000000000000000000000000000000015000000000000000100090000000000\
    000002006e6f";

const SAY_HELLO: &str = "\
    564d544801000100240000000e170d448877665544332211070000000000000015000000000000000100010004000000\
    02000000000000000500000000000000010000000900000000000000";

const SAY_ACK: &str = "\
    564d5448010002001c000000096230268877665544332211070000000000000015000000000000000200000000000000\
    0500000000000000010000000900000000000000";

const SAY_CONFIGURE: &str = "\
    564d5448010003006f0000005a5b5b998877665544332211070000000000000015000000000000000800000001000200\
    120073636865643a73636865645f73776974636803001e0073636865643a73636865645f7377697463683d707265765f\
    7069643d3d30040008006d6f6e6f5f72617705000008000000000000060001006607000b006e6f6f7665727772697465\
    080003006e6f70";

const SAY_START: &str = "\
    564d5448010004000000000059eb4f4b887766554433221107000000000000001500000000000000";

const SAY_STOP: &str = "\
    564d544801000500000000008860bb35887766554433221107000000000000001500000000000000";

const SAY_QUIESCE: &str = "\
    564d54480100060000000000fbfca6b6887766554433221107000000000000001500000000000000";

const SAY_FLUSH: &str = "\
    564d544801000700000000002a7752c8887766554433221107000000000000001500000000000000";

const SAY_PING: &str = "\
    564d54480100080008000000b67e948c8877665544332211070000000000000015000000000000001600000000000000";

const SAY_MARK: &str = "\
    564d54480100090006000000a5ed14bb887766554433221107000000000000001500000000000000040068657265";
