//! How much the store costs over writing the same bytes to a file.
//!
//! `cargo run --release -p vmtrail --example trail_throughput -- [DIR] [MIB] [ROUNDS]`
//!
//! The same frames of 64 pages go, by turns, into a trail (a commit, and so a sync, every 4 MiB, on a thread of its own as in a
//! recorder), into a file with a sync every 4 MiB, and into a file with one sync at the end, as `cat > file; sync` would do.
//! The content is noise. Medians over the rounds are printed, and the ratios of trail over file.

use std::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use vmtrail::trail::{Batch, StoreError, TrailWriter, VmIdentity, WriterOptions};
use vmtrail_wire::{Epoch, FrameHeader, HEADER_SIZE, Kind, Sequence, SessionId, StreamId};

const PAGES: u32 = 64;
const PAGE: u32 = 4096;
/// Bytes between two syncs: what a recorder under load commits at once.
const BATCH: usize = 4 << 20;

type Run = fn(&Path, usize, &[u8]) -> Result<(), Box<dyn Error>>;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments
        .next()
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let mib: usize = arguments.next().map_or(Ok(512), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let place = dir.join(format!("vmtrail-throughput-{}", std::process::id()));
    fs::create_dir(&place)?;
    let result = compare(&place, mib, rounds.max(1));
    fs::remove_dir_all(&place)?;
    result
}

fn compare(place: &Path, mib: usize, rounds: usize) -> Result<(), Box<dyn Error>> {
    let payload = noise(usize::try_from(PAGES * PAGE)?);
    let frames = (mib << 20) / payload.len();
    let runs: [(&str, Run); 3] = [
        ("trail", trail),
        ("file, a sync every 4 MiB", file_synced),
        ("file, one sync", file_once),
    ];
    let mut figures = vec![(Vec::new(), Vec::new()); runs.len()];
    for _ in 0..rounds {
        for ((_, run), (rates, cpu)) in runs.iter().zip(&mut figures) {
            let target = place.join("target");
            let (start, cpu_before) = (Instant::now(), cpu_seconds()?);
            run(&target, frames, &payload)?;
            rates.push(f64::from(u32::try_from(mib)?) / start.elapsed().as_secs_f64());
            cpu.push(cpu_seconds()? - cpu_before);
            if target.is_dir() {
                fs::remove_dir_all(&target)?;
            } else {
                fs::remove_file(&target)?;
            }
        }
    }
    println!(
        "{mib} MiB in {}, {rounds} rounds by turns\n",
        place.display()
    );
    println!(
        "{:<26} {:>12} {:>21} {:>14}",
        "", "MiB/s", "(slowest - fastest)", "CPU s a GiB"
    );
    let gib = f64::from(u32::try_from(mib)?) / 1024.0;
    let mut medians = Vec::new();
    for ((name, _), (mut rates, mut cpu)) in runs.iter().zip(figures) {
        rates.sort_by(f64::total_cmp);
        cpu.sort_by(f64::total_cmp);
        let (rate, cpu) = (rates[rounds / 2], cpu[rounds / 2] / gib);
        let spread = format!("({:.0} - {:.0})", rates[0], rates[rounds - 1]);
        println!("{name:<26} {rate:>12.0} {spread:>21} {cpu:>14.2}");
        medians.push((rate, cpu));
    }
    println!();
    for (name, other) in [("synced-file", medians[1]), ("file", medians[2])] {
        println!(
            "ratio trail-throughput-{name} {:.3}",
            medians[0].0 / other.0
        );
        println!("ratio trail-cpu-{name} {:.3}", medians[0].1 / other.1);
    }
    Ok(())
}

fn trail(target: &Path, frames: usize, payload: &[u8]) -> Result<(), Box<dyn Error>> {
    let mut writer = TrailWriter::create(target, WriterOptions::default(), VmIdentity::default())?;
    // A decoder hands a frame over in one piece; making it is not the store's cost, taking it over is.
    let mut frame = [&[0; HEADER_SIZE], payload].concat();
    let mut flight: Option<JoinHandle<Result<Batch, StoreError>>> = None;
    for sequence in 0..u64::try_from(frames)? {
        let header = FrameHeader {
            sequence: Sequence(sequence),
            first_page: sequence * u64::from(PAGES),
            page_size: PAGE,
            page_count: PAGES,
            payload_len: PAGES * PAGE,
            ..FrameHeader::new(Kind::Pages, SessionId(1), Epoch(1), StreamId(0))
        };
        frame[..HEADER_SIZE].copy_from_slice(&header.encode(&[]));
        writer.append(&header, &frame);
        if writer.pending_bytes() >= BATCH {
            land(&mut writer, flight.take())?;
            // As a recorder does it: one batch is on its way to the disk while the next one fills.
            flight = writer
                .take_batch()
                .map(|mut batch| thread::spawn(move || batch.commit().map(|()| batch)));
        }
    }
    land(&mut writer, flight)?;
    writer.close()?;
    Ok(())
}

fn land(
    writer: &mut TrailWriter,
    flight: Option<JoinHandle<Result<Batch, StoreError>>>,
) -> Result<(), Box<dyn Error>> {
    if let Some(flight) = flight {
        let batch = flight
            .join()
            .map_err(|_| "the committing thread panicked")??;
        writer.finish_batch(batch);
    }
    Ok(())
}

fn file_synced(target: &Path, frames: usize, payload: &[u8]) -> Result<(), Box<dyn Error>> {
    file(target, frames, payload, BATCH)
}

fn file_once(target: &Path, frames: usize, payload: &[u8]) -> Result<(), Box<dyn Error>> {
    file(target, frames, payload, usize::MAX)
}

fn file(target: &Path, frames: usize, payload: &[u8], every: usize) -> Result<(), Box<dyn Error>> {
    let mut file = File::create(target)?;
    let mut unsynced = 0;
    for _ in 0..frames {
        file.write_all(payload)?;
        unsynced += payload.len();
        if unsynced >= every {
            file.sync_data()?;
            unsynced = 0;
        }
    }
    file.sync_data()?;
    Ok(())
}

/// User and system time of this process, from `/proc/self/stat` (fields 14 and 15 of proc(5), in 1/100 s on every Linux).
fn cpu_seconds() -> Result<f64, Box<dyn Error>> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The name of the program, in parentheses, may hold spaces.
    let behind_name = stat.rsplit_once(')').ok_or("no name in /proc/self/stat")?.1;
    let mut ticks = 0;
    for field in behind_name.split_whitespace().skip(11).take(2) {
        ticks += field.parse::<u32>()?;
    }
    Ok(f64::from(ticks) / 100.0)
}

/// Bytes that no filesystem stores for less.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
