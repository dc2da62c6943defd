//! Options: what a file says about itself.

use super::id;
use super::input::{Input, ReadError, limit};
use crate::{Endian, LongSize};

/// Most CPUs an option may speak of.
const MAX_CPUS: u32 = 8192;

/// Most samples of one CPU's clock.
const MAX_SAMPLES: u32 = 1 << 20;

/// What the options of a file say. Options nobody here needs (hooks, process maps, dates) are passed over.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileOptions {
    /// `uname` of the traced machine.
    pub uname: Option<String>,
    /// Version of the program that wrote the file.
    pub version: Option<String>,
    /// Id of the trace, by which host and guest files name each other.
    pub trace_id: Option<u64>,
    /// CPUs of the traced machine.
    pub cpu_count: Option<u32>,
    /// Ring-buffer statistics of each CPU, as text.
    pub cpu_stats: Vec<CpuStat>,
    /// Constant to add to all times.
    pub offset: i64,
    /// Mapping from this machine's clock to another's; of several the last counts, as in trace-cmd.
    pub time_shift: Option<TimeShift>,
    /// Ticks to nanoseconds: multiplier, shift, offset.
    pub tsc_to_ns: Option<(u32, u32, u64)>,
    /// Clock of the top buffer (version 7 says it here too).
    pub(super) clock: Option<String>,
    pub(super) has_clock: bool,
    pub(super) buffers: Vec<Vec<u8>>,
    pub(super) sections: Vec<(u16, u64)>,
}

/// Text of `per_cpu/cpuN/stats` at the end of the recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuStat {
    /// The text.
    pub text: String,
}

/// A mapping of times to another machine's clock.
#[derive(Clone, Debug, PartialEq)]
pub struct TimeShift {
    /// The trace whose clock is meant.
    pub peer: u64,
    /// Whether offsets between samples are interpolated rather than stepped.
    pub interpolate: bool,
    /// Samples of each CPU.
    pub cpus: Vec<Vec<TimeSample>>,
}

/// One sample: from `time` on, other = (own * scaling >> fraction) + offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeSample {
    /// Own time.
    pub time: u64,
    /// Offset.
    pub offset: i64,
    /// Factor.
    pub scaling: i64,
    /// Bits to shift right after scaling.
    pub fraction: i64,
}

impl FileOptions {
    /// Takes one option in.
    pub(super) fn take(
        &mut self,
        option: u16,
        data: &[u8],
        endian: Endian,
        long_size: LongSize,
    ) -> Result<(), ReadError> {
        let mut input = Input::over(data, endian, long_size);
        let text = || {
            let end = data
                .iter()
                .position(|byte| *byte == 0)
                .unwrap_or(data.len());
            String::from_utf8_lossy(&data[..end]).into_owned()
        };
        match option {
            id::UNAME => self.uname = Some(text()),
            id::VERSION => self.version = Some(text()),
            id::TRACEID => self.trace_id = Some(input.u64("the trace id")?),
            id::CPUCOUNT => self.cpu_count = Some(input.u32("the number of CPUs")?.min(MAX_CPUS)),
            id::CPUSTAT if self.cpu_stats.len() < MAX_CPUS as usize => {
                self.cpu_stats.push(CpuStat { text: text() });
            }
            id::TRACECLOCK => {
                self.has_clock = true;
                if !data.is_empty() {
                    self.clock = Some(text());
                }
            }
            id::OFFSET => self.offset = parse_offset(&text()).unwrap_or(0),
            id::TSC2NSEC => {
                self.tsc_to_ns = Some((
                    input.u32("the clock's multiplier")?,
                    input.u32("the clock's shift")?,
                    input.u64("the clock's offset")?,
                ));
            }
            id::TIME_SHIFT => self.time_shift = Some(TimeShift::read(&mut input)?),
            id::BUFFER if self.buffers.len() < 1024 => {
                self.buffers.push(data.to_vec());
            }
            id::HEADER_INFO
            | id::FTRACE_EVENTS
            | id::EVENT_FORMATS
            | id::KALLSYMS
            | id::PRINTK
            | id::CMDLINES => {
                self.sections
                    .push((option, input.u64("the offset of a section")?));
            }
            _ => {}
        }
        Ok(())
    }

    /// `time` of `cpu` as a report shows it: mapped, converted and moved as the options say.
    #[must_use]
    pub fn correct(&self, cpu: u32, time: u64) -> u64 {
        let mut time = time;
        if let Some(shift) = &self.time_shift {
            time = shift.apply(cpu, time);
        }
        if let Some((multiplier, shift, _)) =
            self.tsc_to_ns.filter(|(multiplier, ..)| *multiplier != 0)
        {
            let product = u128::from(time) * u128::from(multiplier);
            time = u64::try_from(product.checked_shr(shift).unwrap_or(0) & u128::from(u64::MAX))
                .unwrap_or(0);
        }
        time.wrapping_add_signed(self.offset)
    }

    /// Whether [`FileOptions::correct`] changes anything.
    #[must_use]
    pub fn corrects(&self) -> bool {
        self.time_shift.is_some() || self.tsc_to_ns.is_some() || self.offset != 0
    }
}

/// Decimal, or hexadecimal behind `0x`; signed.
fn parse_offset(text: &str) -> Option<i64> {
    let text = text.trim();
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let value = match digits.strip_prefix("0x") {
        Some(hex) => i64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative {
        value.wrapping_neg()
    } else {
        value
    })
}

impl TimeShift {
    /// Layout as in `save_clock_offsets` of trace-cmd; the fractions behind all CPUs are not in its document.
    fn read(input: &mut Input<&[u8]>) -> Result<Self, ReadError> {
        const WHAT: &str = "a time shift";
        let peer = input.u64(WHAT)?;
        let flags = input.u32(WHAT)?;
        let count = input.u32(WHAT)?;
        if count > MAX_CPUS {
            return Err(ReadError::TooLarge {
                what: WHAT,
                size: count.into(),
                limit: MAX_CPUS.into(),
            });
        }
        let mut cpus = Vec::new();
        for _ in 0..count {
            let samples = input.u32(WHAT)?;
            if samples > MAX_SAMPLES {
                return Err(ReadError::TooLarge {
                    what: WHAT,
                    size: samples.into(),
                    limit: MAX_SAMPLES.into(),
                });
            }
            let mut column = || -> Result<Vec<u64>, ReadError> {
                let bytes = input.bytes(WHAT, u64::from(samples) * 8, limit::OPTIONS)?;
                Ok(bytes
                    .chunks_exact(8)
                    .filter_map(|chunk| input.endian.u64(chunk, 0))
                    .collect())
            };
            let (times, offsets, scalings) = (column()?, column()?, column()?);
            let cpu: Vec<TimeSample> = times
                .into_iter()
                .zip(offsets)
                .zip(scalings)
                .map(|((time, offset), scaling)| TimeSample {
                    time,
                    offset: offset.cast_signed(),
                    scaling: scaling.cast_signed(),
                    fraction: 0,
                })
                .collect();
            cpus.push(cpu);
        }
        for cpu in &mut cpus {
            for sample in cpu.iter_mut() {
                // Files of trace-cmd 3.0 end before the fractions.
                let Ok(fraction) = input.u64(WHAT) else { break };
                sample.fraction = fraction.cast_signed();
            }
            cpu.sort_by_key(|sample| sample.time);
        }
        Ok(Self {
            peer,
            interpolate: flags & 1 != 0,
            cpus,
        })
    }

    fn apply(&self, cpu: u32, time: u64) -> u64 {
        let samples = match self.cpus.get(cpu as usize) {
            Some(samples) if !samples.is_empty() => samples,
            _ => return time,
        };
        let scaled = |sample: &TimeSample| {
            let product = i128::from(time) * i128::from(sample.scaling);
            let bits = u32::try_from(sample.fraction).unwrap_or(0).min(127);
            i128::from(sample.offset) + (product >> bits)
        };
        // One sample is an offset; of two the first counts for all times; of more, the last at or before the time.
        let value = match samples.as_slice() {
            [only] => i128::from(time) + i128::from(only.offset),
            [first, _] => scaled(first),
            many => {
                let next = many.partition_point(|sample| sample.time <= time);
                let at = next.saturating_sub(1);
                match (many.get(at), many.get(at + 1)) {
                    (Some(low), Some(high)) if self.interpolate && high.time > low.time => {
                        let span = i128::from(high.time - low.time);
                        let delta = i128::from(high.offset) - i128::from(low.offset);
                        let into = i128::from(time) - i128::from(low.time);
                        i128::from(time) + i128::from(low.offset) + delta * into / span
                    }
                    (Some(low), _) => scaled(low),
                    _ => i128::from(time),
                }
            }
        };
        u64::try_from(value & i128::from(u64::MAX)).unwrap_or(0)
    }
}
