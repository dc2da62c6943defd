//! Verdicts over a real kernel's pages (`trace/tests/fixtures/pages`), and over logs that say more, less or other than the
//! frames: what `verify` must make of the two together. Damaged and reordered frames are in `trail_verify.rs`.

mod common;

use std::ops::{Deref, DerefMut};

use common::*;
use vmtrail::trail::crash_disk::CrashDisk;
use vmtrail::trail::event::{Counters, MigrationEnded, Session, StreamEnd};
use vmtrail::trail::format::{EVENT_LOG, PAGE, segment_name};
use vmtrail::trail::{Event, TrailWriter};
use vmtrail::verify::{Loss, LossKind, StreamVerification, Verdict, Verification, verify};
use vmtrail_trace::ring_buffer::{
    Missed, PageLayout, add_missed, page_summary, set_page_timestamp,
};
use vmtrail_wire::{FrameHeader, SessionId};

const SCHED: &[u8] = include_bytes!("../trace/tests/fixtures/pages/sched.page");
const OVERRUN: &[u8] = include_bytes!("../trace/tests/fixtures/pages/overrun.page");
const MARKS: &[u8] = include_bytes!("../trace/tests/fixtures/pages/time_extend.page");

/// What the kernel says of the fixtures: events, and events missed before `OVERRUN`.
const SCHED_EVENTS: u64 = 131;
const OVERRUN_MISSED: u64 = 2766;

/// Nanoseconds between two pages: more than any fixture spans.
const PAGE_NS: u64 = 1_000_000_000;

const NOT_KNOWN: &str = "not known: the log does not mention it";

type Frame = (FrameHeader, Vec<u8>);

fn layout() -> PageLayout {
    PageLayout::native64_le(4096).unwrap()
}

/// A trail that is being written, with what a recorder logs around the frames.
struct Recording {
    disk: CrashDisk,
    writer: TrailWriter,
}

impl Deref for Recording {
    type Target = TrailWriter;
    fn deref(&self) -> &TrailWriter {
        &self.writer
    }
}

impl DerefMut for Recording {
    fn deref_mut(&mut self) -> &mut TrailWriter {
        &mut self.writer
    }
}

impl Recording {
    /// Attached to CPUs 0 to `cpus` - 1 from their first frames on.
    fn begin(cpus: u32) -> Self {
        let disk = CrashDisk::new();
        let writer = create(&disk, options());
        let mut recording = Self { disk, writer };
        recording.attach(1);
        recording.session(SESSION, "local");
        for cpu in 0..cpus {
            recording.began(SESSION, cpu, 0);
        }
        recording
    }

    fn attach(&mut self, epoch: u64) {
        self.log(Event::Attached {
            epoch,
            residency: 1,
            ports: vec!["vmtrail.0".to_owned()],
        });
    }

    fn session(&mut self, session: SessionId, clock: &str) {
        self.log(Event::Session(about(session, clock)));
    }

    fn began(&mut self, session: SessionId, cpu: u32, sequence: u64) {
        self.log(Event::StreamBegan {
            session: session.to_string(),
            cpu,
            sequence,
            first_page: 0,
        });
    }

    /// One batch.
    fn take(&mut self, frames: &[Frame]) {
        for (header, bytes) in frames {
            self.writer.append(header, bytes);
        }
        flush(&mut self.writer);
    }

    fn stop(&mut self, session: SessionId, ends: &[(u32, u64)]) {
        self.log(Event::Stopped {
            session: session.to_string(),
            streams: stream_ends(ends),
        });
    }

    /// Stopped in order, closed, and judged.
    fn end(mut self, ends: &[(u32, u64)]) -> Verification {
        self.stop(SESSION, ends);
        self.close().judge()
    }

    fn close(self) -> Closed {
        self.writer.close().unwrap();
        Closed(self.disk)
    }
}

/// A trail that nobody writes.
struct Closed(CrashDisk);

impl Closed {
    fn judge(&self) -> Verification {
        verify(&reader(&self.0)).unwrap()
    }

    fn edit_log(&self, change: impl FnOnce(&mut Vec<String>)) {
        self.0.tamper(EVENT_LOG, |bytes| {
            let text = String::from_utf8(std::mem::take(bytes)).unwrap();
            let mut lines = text.lines().map(str::to_owned).collect();
            change(&mut lines);
            *bytes = lines.join("\n").into_bytes();
            bytes.push(b'\n');
        });
    }
}

fn about(session: SessionId, clock: &str) -> Session {
    Session {
        session: session.to_string(),
        boot_id: "00".repeat(16),
        agent: "0.1.0".to_owned(),
        kernel: "6.18.0".to_owned(),
        clock: clock.to_owned(),
        page_size: 4096,
        long_size: 8,
        big_endian: false,
        cpus: 4,
    }
}

fn stream_ends(ends: &[(u32, u64)]) -> Vec<StreamEnd> {
    let ends = ends.iter();
    ends.map(|&(cpu, next)| StreamEnd { cpu, next }).collect()
}

fn agent(cpu: u32) -> Agent {
    Agent {
        timestamp: PAGE_NS,
        ..Agent::new(cpu)
    }
}

/// A real page at a time.
fn real(fixture: &[u8], time: u64) -> Vec<u8> {
    let mut page = fixture.to_vec();
    assert!(set_page_timestamp(layout(), &mut page, time).unwrap());
    page
}

/// The next frame, of the given pages.
fn frame(agent: &mut Agent, fixtures: &[&[u8]]) -> Frame {
    let pages = u32::try_from(fixtures.len()).unwrap();
    let first = agent.page;
    agent.frame_with(pages, |index, page| {
        let time = (first + u64::from(index) + 1) * PAGE_NS;
        page.copy_from_slice(&real(fixtures[usize::try_from(index).unwrap()], time));
    })
}

/// So many frames of two pages.
fn frames(agent: &mut Agent, count: usize) -> Vec<Frame> {
    (0..count).map(|_| frame(agent, &[SCHED, SCHED])).collect()
}

/// Time of the first and of the last event of a page of [`frames`], by its number in the stream.
fn times(page: u64) -> (u64, u64) {
    let summary = page_summary(layout(), &real(SCHED, (page + 1) * PAGE_NS)).unwrap();
    (summary.first_ts.unwrap(), summary.last_ts.unwrap())
}

fn lost(cpu: u32, overrun: u64) -> Event {
    Event::Lost {
        session: SESSION.to_string(),
        counters: vec![Counters {
            cpu,
            overrun,
            commit_overrun: 0,
            dropped: 0,
            read: 1000,
        }],
    }
}

#[track_caller]
fn assert_verdict(found: &Verification, verdict: Verdict, exit_code: u8, reasons: &[&str]) {
    assert_eq!(found.verdict, verdict, "{found}");
    assert_eq!(found.exit_code(), exit_code);
    assert_eq!(found.reasons.len(), reasons.len(), "{found}");
    for reason in reasons {
        assert!(
            found.reasons.iter().any(|found| found.contains(reason)),
            "{reason:?} is not in {found}"
        );
    }
}

fn stream(found: &Verification, cpu: u32) -> &StreamVerification {
    let mut streams = found.sessions.iter().flat_map(|session| &session.streams);
    streams.find(|stream| stream.cpu == cpu).unwrap()
}

fn lost_frames(cpu: u32, (from, to): (u64, u64)) -> Loss {
    Loss {
        kind: LossKind::Frames,
        session: SESSION.to_string(),
        cpu,
        after: None,
        before: None,
        events: None,
        from: Some(from),
        to: Some(to),
        pages: None,
        cause: NOT_KNOWN.to_owned(),
    }
}

fn five_frames() -> Closed {
    let mut recording = Recording::begin(1);
    recording.take(&frames(&mut agent(0), 5));
    recording.stop(SESSION, &[(0, 5)]);
    recording.close()
}

#[test]
fn real_pages_are_counted_as_their_kernel_counted_them() {
    let found = five_frames().judge();
    assert_verdict(&found, Verdict::Continuous, 0, &[]);
    let found = stream(&found, 0);
    assert_eq!((found.frames, found.pages), (5, 10));
    assert_eq!(found.events, 10 * SCHED_EVENTS);
    assert_eq!(found.first_event, Some(times(0).0));
    assert_eq!(found.last_event, Some(times(9).1));
}

#[test]
fn a_loss_stands_between_the_events_around_it() {
    let mut recording = Recording::begin(1);
    let mut sent = frames(&mut agent(0), 5);
    sent.remove(2);
    recording.take(&sent);
    let found = recording.end(&[(0, 5)]);
    assert_verdict(
        &found,
        Verdict::Lossy,
        11,
        &["1 frames are missing (2 pages"],
    );
    let expected = Loss {
        after: Some(times(3).1),
        before: Some(times(6).0),
        pages: Some(2),
        ..lost_frames(0, (2, 3))
    };
    assert_eq!(found.losses, [expected]);
}

#[test]
fn a_damaged_header_costs_the_rest_of_its_batch_and_no_more() {
    let closed = five_frames();
    // Behind the segment's and the batch's page come frames of three pages.
    let at = 2 * PAGE + 2 * 3 * PAGE;
    (closed.0).tamper(&segment_name(1), |bytes| bytes[at + 40] ^= 1);
    let found = closed.judge();
    let place = format!("segment 1 at {at}");
    assert_verdict(
        &found,
        Verdict::Lossy,
        11,
        &[&place, "3 frames are missing"],
    );
    assert!(
        found.damage[0].contains("3 frames cannot be read"),
        "{found}"
    );
    let expected = Loss {
        after: Some(times(3).1),
        ..lost_frames(0, (2, 5))
    };
    assert_eq!(found.losses, [expected]);
}

#[test]
fn a_damaged_page_or_segment_header_loses_no_frame() {
    for (at, place) in [
        (2 * PAGE + 4 * PAGE + 300, "segment 1 at 8192"),
        (20, "segment 1 at 0"),
    ] {
        let closed = five_frames();
        (closed.0).tamper(&segment_name(1), |bytes| bytes[at] ^= 1);
        let found = closed.judge();
        assert_eq!(
            (found.verdict, found.exit_code()),
            (Verdict::Unknown, 12),
            "{found}"
        );
        assert!(found.damage[0].starts_with(place), "{found}");
        assert_eq!(stream(&found, 0).frames, 5);
        assert_eq!(stream(&found, 0).lost_frames, 0);
    }
}

#[test]
fn what_was_overwritten_before_the_first_page_is_said_and_is_no_loss() {
    let mut recording = Recording::begin(1);
    let mut agent = agent(0);
    recording.take(&[
        frame(&mut agent, &[OVERRUN, SCHED]),
        frame(&mut agent, &[SCHED]),
    ]);
    recording.log(lost(0, OVERRUN_MISSED));
    let found = recording.end(&[(0, 2)]);
    assert_verdict(&found, Verdict::Continuous, 0, &[]);
    let found = stream(&found, 0);
    assert_eq!(found.overrun_before_start, OVERRUN_MISSED);
    assert!(!found.overrun_before_start_uncounted);
    assert_eq!(found.overrun_events, 0);
}

#[test]
fn an_overrun_within_the_recording_is_counted_and_placed() {
    let mut recording = Recording::begin(1);
    let mut agent = agent(0);
    recording.take(&[
        frame(&mut agent, &[SCHED, OVERRUN]),
        frame(&mut agent, &[SCHED]),
    ]);
    recording.log(lost(0, OVERRUN_MISSED));
    let found = recording.end(&[(0, 2)]);
    assert_verdict(&found, Verdict::Overrun, 10, &["overwrote 2766 events"]);
    assert_eq!(stream(&found, 0).overrun_events, OVERRUN_MISSED);
    let behind = page_summary(layout(), &real(OVERRUN, 2 * PAGE_NS)).unwrap();
    let [loss] = &found.losses[..] else {
        panic!("{found}");
    };
    assert_eq!(
        (loss.kind, loss.events),
        (LossKind::Overrun, Some(OVERRUN_MISSED))
    );
    assert_eq!(
        (loss.after, loss.before),
        (Some(times(0).1), behind.first_ts)
    );
}

#[test]
fn an_overrun_whose_count_the_kernel_did_not_say_is_not_zero() {
    let mut marks = MARKS.to_vec();
    let missed = add_missed(layout(), &mut marks, Missed::Unknown).unwrap();
    assert_eq!(missed, Missed::Unknown);
    for (pages, verdict, exit_code) in [
        ([SCHED, &marks], Verdict::Overrun, 10),
        ([&marks, SCHED], Verdict::Continuous, 0),
    ] {
        let mut recording = Recording::begin(1);
        recording.take(&[frame(&mut agent(0), &pages)]);
        recording.log(lost(0, 55));
        let found = recording.end(&[(0, 1)]);
        assert_eq!(
            (found.verdict, found.exit_code()),
            (verdict, exit_code),
            "{found}"
        );
        let is_first = verdict == Verdict::Continuous;
        let found = stream(&found, 0);
        assert_eq!(found.overrun_before_start_uncounted, is_first);
        assert_eq!(found.overruns_uncounted, u64::from(!is_first));
        assert_eq!(found.overrun_events, 0, "the counter may be about the same");
    }
}

#[test]
fn an_overrun_in_the_first_page_behind_lost_frames_is_within_the_recording() {
    let mut recording = Recording::begin(1);
    let mut agent = agent(0);
    let _ = frame(&mut agent, &[SCHED]);
    recording.take(&[frame(&mut agent, &[OVERRUN])]);
    let found = recording.end(&[(0, 2)]);
    let reasons = ["1 frames are missing", "overwrote 2766 events"];
    assert_verdict(&found, Verdict::Lossy, 11, &reasons);
    assert_eq!(found.losses.len(), 2, "two causes, two losses");
}

#[test]
fn what_the_kernel_counts_beyond_its_pages_is_an_overrun() {
    // Said once, at the end; said twice; and beyond what the pages say, before the beginning and within.
    for (fixtures, counts, events) in [
        (&[SCHED][..], &[100][..], 100),
        (&[SCHED], &[60, 100], 100),
        (
            &[OVERRUN, SCHED],
            &[OVERRUN_MISSED, OVERRUN_MISSED + 34],
            34,
        ),
        (
            &[SCHED, OVERRUN],
            &[OVERRUN_MISSED + 34],
            OVERRUN_MISSED + 34,
        ),
    ] {
        let mut recording = Recording::begin(1);
        recording.take(&[frame(&mut agent(0), fixtures)]);
        for &count in counts {
            recording.log(lost(0, count));
        }
        let found = recording.end(&[(0, 1)]);
        let reason = format!("overwrote {events} events");
        assert_verdict(&found, Verdict::Overrun, 10, &[&reason]);
        let loss = found.losses.last().unwrap();
        assert!(loss.cause.contains("the kernel's counter"), "{found}");
        assert_eq!(loss.after, stream(&found, 0).last_event);
    }
}

#[test]
fn a_cpu_without_a_frame_can_have_lost_all_that_it_had() {
    let mut recording = Recording::begin(2);
    recording.take(&frames(&mut agent(0), 1));
    recording.log(lost(1, 7));
    let found = recording.end(&[(0, 1), (1, 0)]);
    assert_verdict(&found, Verdict::Overrun, 10, &["CPU 1 of session"]);
    assert_eq!(stream(&found, 1).overrun_events, 7);
}

#[test]
fn counters_from_before_the_trail_are_not_its_losses() {
    // Begun by another recorder: what was overwritten by then is not this trail's.
    let mut recording = Recording::begin(0);
    recording.began(SESSION, 0, 40);
    let mut agent = agent(0);
    agent.sequence = 40;
    recording.log(lost(0, 5000));
    recording.take(&frames(&mut agent, 2));
    recording.log(lost(0, 5000));
    let found = recording.end(&[(0, 42)]);
    assert_verdict(&found, Verdict::Continuous, 0, &[]);
}

#[test]
fn events_nested_too_deep_are_said() {
    let mut recording = Recording::begin(1);
    recording.take(&frames(&mut agent(0), 1));
    let counters = Counters {
        cpu: 0,
        overrun: 0,
        commit_overrun: 3,
        dropped: 4,
        read: 262,
    };
    recording.log(Event::Lost {
        session: SESSION.to_string(),
        counters: vec![counters],
    });
    let found = recording.end(&[(0, 1)]);
    assert_verdict(&found, Verdict::Overrun, 10, &["dropped 7 events"]);
}

#[test]
fn an_end_beyond_the_last_frame_is_a_loss() {
    let mut recording = Recording::begin(2);
    recording.take(&frames(&mut agent(0), 5));
    let found = recording.end(&[(0, 7), (1, 1)]);
    let reasons = [
        "CPU 0 of session 5e55100000000001: 2 frames",
        "CPU 1 of session",
    ];
    assert_verdict(&found, Verdict::Lossy, 11, &reasons);
    let behind = Loss {
        after: Some(times(9).1),
        ..lost_frames(0, (5, 7))
    };
    assert_eq!(found.losses, [behind, lost_frames(1, (0, 1))]);
}

#[test]
fn a_stream_that_the_last_word_does_not_mention_has_no_end() {
    let mut recording = Recording::begin(2);
    recording.take(&frames(&mut agent(0), 2));
    recording.take(&frames(&mut agent(1), 2));
    let found = recording.end(&[(0, 2)]);
    let reason = "CPU 1 of session 5e55100000000001 has no end";
    assert_verdict(&found, Verdict::Unknown, 12, &[reason]);
}

#[test]
fn a_loss_that_nothing_came_behind_is_one_while_recording_too() {
    let mut recording = Recording::begin(1);
    recording.take(&frames(&mut agent(0), 2));
    recording.log(Event::Gap {
        session: SESSION.to_string(),
        cpu: 0,
        from: 2,
        to: 9,
        pages: None,
        cause: "the agent held them no longer".to_owned(),
    });
    flush(&mut recording);
    let found = verify(&reader(&recording.disk)).unwrap();
    assert!(found.being_recorded);
    assert_verdict(&found, Verdict::Lossy, 11, &["7 frames are missing"]);
    assert_eq!(found.losses[0].cause, "the agent held them no longer");
    // And it is counted once when the end comes.
    let found = recording.end(&[(0, 9)]);
    assert_verdict(&found, Verdict::Lossy, 11, &["7 frames are missing"]);
}

#[test]
fn two_sessions_are_judged_each_for_itself() {
    const SECOND: SessionId = SessionId(0x5e55_1000_0000_0002);
    for first_ends in [true, false] {
        let mut recording = Recording::begin(1);
        recording.take(&frames(&mut agent(0), 3));
        if first_ends {
            recording.stop(SESSION, &[(0, 3)]);
        }
        // The guest was booted anew.
        recording.attach(2);
        recording.session(SECOND, "local");
        recording.began(SECOND, 0, 0);
        let mut agent = Agent {
            session: SECOND,
            epoch: 2,
            ..agent(0)
        };
        let mut sent = frames(&mut agent, 4);
        sent.remove(0);
        recording.take(&sent);
        recording.stop(SECOND, &[(0, 4)]);
        let found = recording.close().judge();
        let missing = "session 5e55100000000002: 1 frames are missing";
        let no_end = "session 5e55100000000001 has no end";
        let reasons = [missing, no_end];
        let reasons = &reasons[..if first_ends { 1 } else { 2 }];
        assert_verdict(&found, Verdict::Lossy, 11, reasons);
        let ended: Vec<_> = found.sessions.iter().map(|session| session.ended).collect();
        assert_eq!(ended, [first_ends, true]);
        assert_eq!(found.sessions[0].streams[0].frames, 3);
        assert_eq!(found.sessions[1].streams[0].frames, 3);
    }
}

#[test]
fn a_session_that_goes_on_after_its_end_needs_another() {
    for says_who_it_is in [true, false] {
        let mut recording = Recording::begin(1);
        let mut agent = agent(0);
        recording.take(&frames(&mut agent, 3));
        recording.stop(SESSION, &[(0, 3)]);
        recording.attach(2);
        if says_who_it_is {
            recording.session(SESSION, "local");
        } else {
            agent.epoch = 2;
            recording.take(&frames(&mut agent, 1));
        }
        let found = recording.close().judge();
        assert_verdict(&found, Verdict::Unknown, 12, &["has no end"]);
    }
}

#[test]
fn a_fork_is_named() {
    let mut recording = Recording::begin(1);
    recording.take(&frames(&mut agent(0), 4));
    recording.log(Event::Fork {
        session: SESSION.to_string(),
        cpu: 0,
        have: 4,
        next: 2,
    });
    let found = recording.end(&[(0, 4)]);
    let reason = "the guest was put back from frame 4 to frame 2";
    assert_verdict(&found, Verdict::Lossy, 11, &[reason]);
}

#[test]
fn an_event_of_a_later_version_is_passed_over() {
    let closed = five_frames();
    closed.edit_log(|lines| {
        let line = r#"{"at_ns":7,"type":"eclipse","moon":{"phase":[1,2]},"session":3}"#;
        lines.insert(2, line.to_owned());
    });
    assert_verdict(&closed.judge(), Verdict::Continuous, 0, &[]);
}

#[test]
fn a_damaged_line_of_the_log_is_not_passed_over() {
    let closed = five_frames();
    closed.edit_log(|lines| lines.insert(2, "{\"at_ns\":7,\"type\":\"sto\0\0\0".to_owned()));
    let found = closed.judge();
    assert_verdict(&found, Verdict::Unknown, 12, &["line 3 of the log"]);
    assert!(found.damage[0].contains("line 3 of the log"), "{found}");

    // One that is gone altogether is missed where it mattered.
    for (kind, reason) in [
        ("session", "does not describe it"),
        ("stream-began", "where the stream began"),
        ("stopped", "has no end"),
    ] {
        let closed = five_frames();
        closed.edit_log(|lines| {
            let before = lines.len();
            lines.retain(|line| !line.contains(&format!("\"type\":\"{kind}\"")));
            assert_eq!(lines.len(), before - 1, "{kind}");
        });
        assert_verdict(&closed.judge(), Verdict::Unknown, 12, &[reason]);
    }
}

#[test]
fn time_that_goes_back_is_not_believed_unless_the_clock_was_changed() {
    let goes_back = &["a page's time goes back"][..];
    for (clock, verdict, exit_code, reasons) in [
        (None, Verdict::Unknown, 12, goes_back),
        // A recorder that came back: the same clock.
        (Some("local"), Verdict::Unknown, 12, goes_back),
        (Some("mono"), Verdict::Continuous, 0, &[]),
    ] {
        let mut recording = Recording::begin(1);
        let mut agent = agent(0);
        recording.take(&frames(&mut agent, 2));
        if let Some(clock) = clock {
            recording.session(SESSION, clock);
        }
        let earlier = agent.frame_with(1, |_, page| page.copy_from_slice(&real(SCHED, 5)));
        recording.take(&[earlier]);
        let found = recording.end(&[(0, 3)]);
        assert_verdict(&found, verdict, exit_code, reasons);
    }
}

#[test]
fn a_guest_cannot_make_the_report_grow_without_end() {
    let mut recording = Recording::begin(1);
    let mut agent = agent(0);
    for round in 0..40 {
        // Every page earlier than the one before it.
        recording.take(&[agent.frame_with(64, |index, page| {
            let earlier = 1_000_000 - round * 64 - u64::from(index);
            page.copy_from_slice(&real(MARKS, earlier));
        })]);
    }
    let found = recording.end(&[(0, 40)]);
    assert_eq!((found.verdict, found.exit_code()), (Verdict::Unknown, 12));
    assert_eq!(found.reasons.len(), 1001);
    assert_eq!(found.reasons[1000], "… and 1559 more of this kind");
}

#[test]
fn a_page_that_cannot_be_read_is_counted() {
    let mut recording = Recording::begin(1);
    let mut agent = agent(0);
    let good = frame(&mut agent, &[SCHED]);
    // More data than the page is long.
    let bad = agent.frame_with(1, |_, page| {
        page[8..16].copy_from_slice(&5000u64.to_le_bytes())
    });
    recording.take(&[good, bad]);
    let found = recording.end(&[(0, 2)]);
    assert_verdict(&found, Verdict::Unknown, 12, &["1 pages cannot be read"]);
    assert_eq!(stream(&found, 0).damaged_pages, 1);
}

#[test]
fn a_session_that_the_log_does_not_know_is_said() {
    let mut recording = Recording::begin(1);
    recording.take(&frames(&mut agent(0), 1));
    let mut stranger = agent(0);
    stranger.session = SessionId(9);
    recording.take(&frames(&mut stranger, 1));
    let found = recording.end(&[(0, 1)]);
    let reasons = [
        "the log does not know it",
        "session 0000000000000009 has no end",
    ];
    assert_verdict(&found, Verdict::Unknown, 12, &reasons);
    assert_eq!(found.sessions.len(), 2);
}

#[test]
fn pages_of_another_architecture_need_their_header_page() {
    for has_header_page in [false, true] {
        let mut recording = Recording::begin(0);
        let mut session = about(SESSION, "local");
        session.big_endian = true;
        recording.log(Event::Session(session));
        recording.began(SESSION, 0, 0);
        if has_header_page {
            let text = layout().header_page_text().into_bytes();
            let name = "events/header_page";
            recording.put_metadata(SESSION, 1, name, text).unwrap();
            recording.finish_metadata(SESSION, 1);
        }
        // An empty page: a time, and no byte of data.
        let empty = agent(0).frame_with(1, |_, page| {
            page.fill(0);
            page[..8].copy_from_slice(&77u64.to_be_bytes());
        });
        recording.take(&[empty]);
        let found = recording.end(&[(0, 1)]);
        if has_header_page {
            assert_verdict(&found, Verdict::Continuous, 0, &[]);
        } else {
            assert_verdict(&found, Verdict::Unknown, 12, &["no events/header_page"]);
        }
    }
}

fn migration(recording: &mut Recording, boundaries: &[(u32, u64)]) {
    recording.log(Event::MigrationStarted {
        attempt: 1,
        from: 1,
        to: 2,
        uri: "unix:/run/m".to_owned(),
    });
    recording.log(Event::MigrationPhase {
        attempt: 1,
        phase: "switchover".to_owned(),
    });
    recording.log(Event::MigrationEnded(MigrationEnded {
        attempt: 1,
        outcome: "committed".to_owned(),
        reason: None,
        blackout_ns: Some(41_000_000),
        qemu_downtime_ms: Some(40),
        drain_ns: Some(2_000_000),
        drained: Some(true),
        drained_bytes: Some(8192),
        boundaries: stream_ends(boundaries),
        transferred_bytes: Some(1 << 30),
        total_ms: Some(900),
    }));
}

fn continued(found: &Verification) -> Vec<Option<bool>> {
    let boundaries = found.migrations[0].boundaries_continued.iter();
    boundaries.map(|boundary| boundary.continued).collect()
}

#[test]
fn a_boundary_is_continued_by_the_very_next_frame_or_the_end() {
    let mut recording = Recording::begin(3);
    // CPU 0 goes on, CPU 1 ends exactly there, CPU 2 was to go on.
    migration(&mut recording, &[(0, 3), (1, 2), (2, 1)]);
    recording.take(&frames(&mut agent(0), 6));
    recording.take(&frames(&mut agent(1), 2));
    recording.take(&frames(&mut agent(2), 1));
    let found = verify(&reader(&recording.disk)).unwrap();
    assert_eq!(continued(&found), [Some(true), None, None]);
    let found = recording.end(&[(0, 6), (1, 2), (2, 2)]);
    assert_eq!(continued(&found), [Some(true), Some(true), Some(false)]);
    assert_eq!(found.verdict, Verdict::Lossy);
}

#[test]
fn another_sessions_frame_does_not_continue_a_boundary() {
    const OTHER: SessionId = SessionId(3);
    let mut recording = Recording::begin(1);
    migration(&mut recording, &[(0, 3)]);
    let mut sent = frames(&mut agent(0), 6);
    sent.remove(3);
    recording.take(&sent);
    recording.stop(SESSION, &[(0, 6)]);
    recording.attach(2);
    recording.session(OTHER, "local");
    recording.began(OTHER, 0, 0);
    let mut agent = Agent {
        session: OTHER,
        epoch: 2,
        ..agent(0)
    };
    recording.take(&frames(&mut agent, 6));
    recording.stop(OTHER, &[(0, 6)]);
    let found = recording.close().judge();
    assert_eq!(continued(&found), [Some(false)]);
}

#[test]
fn the_command_says_the_same_by_its_exit_code_and_in_json() {
    let dir = tempfile::tempdir().unwrap();
    for (lacks, code, verdict) in [(false, 0, "continuous"), (true, 11, "lossy")] {
        let path = dir.path().join(verdict);
        let mut writer = TrailWriter::create(&path, options(), vm()).unwrap();
        writer.log(Event::Attached {
            epoch: 1,
            residency: 1,
            ports: vec![],
        });
        writer.log(Event::Session(about(SESSION, "local")));
        writer.log(Event::StreamBegan {
            session: SESSION.to_string(),
            cpu: 0,
            sequence: 0,
            first_page: 0,
        });
        for (header, bytes) in frames(&mut agent(0), 3).iter().skip(usize::from(lacks)) {
            writer.append(header, bytes);
        }
        writer.log(Event::Stopped {
            session: SESSION.to_string(),
            streams: stream_ends(&[(0, 3)]),
        });
        writer.close().unwrap();
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_vmtrail"))
            .args(["verify", "--json"])
            .arg(&path)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["verdict"], verdict);
        assert_eq!(
            json["sessions"][0]["streams"][0]["lost_frames"],
            u64::from(lacks)
        );
        let losses = json["losses"].as_array().map(Vec::len);
        assert_eq!(losses, Some(usize::from(lacks)));
        if lacks {
            assert_eq!(json["losses"][0]["kind"], "frames");
        }
    }
}
