//! Writing a file, version 6 or 7, page by page: memory does not grow with the trace.
//!
//! A buffer's pages are written CPU after CPU. Sizes that stand before what they count are patched when it has been
//! written, so the output must seek. A file is whole only after [`Writer::finish`]: up to then version 7 has no options
//! (offset 0, which readers refuse) and version 6 an empty table of CPUs, so a half-written file never looks whole.

use std::io::{self, Seek, SeekFrom, Write};

use super::compression::Compression;
use super::options::TimeShift;
use super::{MAGIC, SECTION_COMPRESSED, id};
use crate::ring_buffer::PageLayout;
use crate::{Endian, LongSize};

/// Which file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Version 6: read by every trace-cmd, KernelShark and Trace Compass. One buffer.
    V6,
    /// Version 7: trace-cmd 3.1 and later.
    V7(Compression),
}

/// The kernel's own texts, as they stood in tracefs.
#[derive(Clone, Debug, Default)]
pub struct KernelTexts<'a> {
    /// `events/header_event`.
    pub header_event: &'a str,
    /// `events/ftrace/*/format`.
    pub ftrace_formats: Vec<&'a str>,
    /// `events/<system>/*/format`, by system.
    pub event_formats: Vec<(&'a str, Vec<&'a str>)>,
    /// `/proc/kallsyms`.
    pub kallsyms: &'a [u8],
    /// `printk_formats`.
    pub printk_formats: &'a [u8],
    /// `saved_cmdlines`.
    pub saved_cmdlines: &'a [u8],
}

/// What the file says about itself.
#[derive(Clone, Debug, Default)]
pub struct FileInfo<'a> {
    /// CPUs of the traced machine.
    pub cpu_count: u32,
    /// Text of `trace_clock`, the clock in use in brackets.
    pub clock: &'a str,
    /// `uname` of the traced machine.
    pub uname: Option<&'a str>,
    /// The program that writes.
    pub writer: Option<&'a str>,
    /// Id of this trace; others name it by this.
    pub trace_id: Option<u64>,
    /// Text of each CPU's `stats`.
    pub cpu_stats: Vec<&'a str>,
    /// Mapping to another machine's clock.
    pub time_shift: Option<&'a TimeShift>,
    /// Guests of this (host) trace, for KernelShark's combined view.
    pub guests: Vec<GuestInfo<'a>>,
}

/// A guest whose trace belongs to a host's.
#[derive(Clone, Debug)]
pub struct GuestInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// Id of its trace.
    pub trace_id: u64,
    /// Thread of the host that runs each vCPU: (vCPU, TID).
    pub vcpus: Vec<(u32, u32)>,
}

/// Why a file cannot be written. Finishes "failed to …".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The output.
    #[error("write the trace file")]
    Io(#[from] io::Error),
    /// A text beyond what the format's length field holds.
    #[error("write {what}: too long for the format")]
    TooLong {
        /// Which.
        what: &'static str,
    },
    /// Calls out of order, or more buffers than the version has.
    #[error("write a trace file: {what}")]
    Order {
        /// What was wrong.
        what: &'static str,
    },
    /// A page of another size than its buffer's.
    #[error("write a page of {size} bytes to a buffer of {expected}-byte pages")]
    PageSize {
        /// Its size.
        size: usize,
        /// The buffer's.
        expected: usize,
    },
}

/// trace-cmd packs ten pages a block, and reads whole blocks: more would make seeking coarse.
const PAGES_PER_BLOCK: usize = 10;

/// Writes one file.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    version: Version,
    endian: Endian,
    cpu_count: u32,
    position: u64,
    // Version 6: where the table of CPUs is. Version 7: where the offset of the options goes.
    patch: u64,
    clock_of_v6: bool,
    options: Vec<u8>,
    buffers: Vec<WrittenBuffer>,
    cpu: Option<OpenCpu>,
}

#[derive(Debug)]
struct WrittenBuffer {
    name: String,
    clock: String,
    page_size: usize,
    section: u64,
    cpus: Vec<(u32, u64, u64)>,
}

#[derive(Debug)]
struct OpenCpu {
    cpu: u32,
    start: u64,
    blocks: u32,
    block: Vec<u8>,
}

impl<W: Write + Seek> Writer<W> {
    /// Writes the beginning of a file: everything but pages.
    pub fn create(
        out: W,
        version: Version,
        layout: PageLayout,
        texts: &KernelTexts<'_>,
        info: &FileInfo<'_>,
    ) -> Result<Self, WriteError> {
        let endian = layout.endian();
        let mut writer = Self {
            out,
            version,
            endian,
            cpu_count: info.cpu_count,
            position: 0,
            patch: 0,
            clock_of_v6: !info.clock.is_empty(),
            options: Vec::new(),
            buffers: Vec::new(),
            cpu: None,
        };
        writer.write_beginning(layout)?;
        match version {
            Version::V6 => writer.write_v6(layout, texts, info)?,
            Version::V7(compression) => writer.write_v7(compression, layout, texts, info)?,
        }
        Ok(writer)
    }

    /// Begins a ring buffer: the top one has an empty name. Version 6 has only that.
    pub fn begin_buffer(
        &mut self,
        name: &str,
        clock: &str,
        layout: PageLayout,
    ) -> Result<(), WriteError> {
        self.end_buffer()?;
        if self.version == Version::V6 && !self.buffers.is_empty() {
            return Err(WriteError::Order {
                what: "version 6 holds one buffer",
            });
        }
        let section = self.position;
        if let Version::V7(compression) = self.version {
            let flags = if compression == Compression::None {
                0
            } else {
                SECTION_COMPRESSED
            };
            self.section_header(id::BUFFER, flags, 0)?;
        }
        self.buffers.push(WrittenBuffer {
            name: name.to_owned(),
            clock: clock.to_owned(),
            page_size: layout.page_size(),
            section,
            cpus: Vec::new(),
        });
        Ok(())
    }

    /// Begins the pages of a CPU, each CPU once and in rising order.
    pub fn begin_cpu(&mut self, cpu: u32) -> Result<(), WriteError> {
        self.end_cpu()?;
        let Some(buffer) = self.buffers.last() else {
            return Err(WriteError::Order {
                what: "a CPU begun before its buffer",
            });
        };
        if buffer.cpus.last().is_some_and(|(last, ..)| *last >= cpu) {
            return Err(WriteError::Order {
                what: "CPUs not in rising order",
            });
        }
        if cpu >= self.cpu_count {
            return Err(WriteError::Order {
                what: "a CPU beyond the number of CPUs",
            });
        }
        let page_size = u64::try_from(buffer.page_size).unwrap_or(u64::MAX);
        if self.is_compressed() {
            self.cpu = Some(OpenCpu {
                cpu,
                start: self.position,
                blocks: 0,
                block: Vec::new(),
            });
            // The number of blocks, when it is known.
            return self.put(&[0; 4]);
        }
        // Readers map pages: they lie at multiples of their size.
        let padding = self.position.next_multiple_of(page_size) - self.position;
        self.pad(padding)?;
        self.cpu = Some(OpenCpu {
            cpu,
            start: self.position,
            blocks: 0,
            block: Vec::new(),
        });
        Ok(())
    }

    /// Writes one page of the CPU begun last. A page cut short is filled with zeros.
    pub fn page(&mut self, page: &[u8]) -> Result<(), WriteError> {
        let Some(expected) = self.buffers.last().map(|buffer| buffer.page_size) else {
            return Err(WriteError::Order {
                what: "a page before its buffer",
            });
        };
        if page.len() > expected {
            return Err(WriteError::PageSize {
                size: page.len(),
                expected,
            });
        }
        let padding = expected - page.len();
        if !self.is_compressed() {
            if self.cpu.is_none() {
                return Err(WriteError::Order {
                    what: "a page before its CPU",
                });
            }
            self.put(page)?;
            return self.pad(u64::try_from(padding).unwrap_or(0));
        }
        let Some(cpu) = &mut self.cpu else {
            return Err(WriteError::Order {
                what: "a page before its CPU",
            });
        };
        cpu.block.extend_from_slice(page);
        cpu.block.resize(cpu.block.len() + padding, 0);
        if cpu.block.len() >= PAGES_PER_BLOCK * expected {
            self.flush_block()?;
        }
        Ok(())
    }

    /// Ends the file and gives the output back.
    pub fn finish(mut self) -> Result<W, WriteError> {
        self.end_buffer()?;
        match self.version {
            Version::V6 => self.finish_v6()?,
            Version::V7(_) => self.finish_v7()?,
        }
        self.out.flush()?;
        Ok(self.out)
    }

    fn is_compressed(&self) -> bool {
        matches!(
            self.version,
            Version::V7(Compression::Zstd | Compression::Zlib)
        )
    }

    fn end_cpu(&mut self) -> Result<(), WriteError> {
        if self.is_compressed() {
            self.flush_block()?;
        }
        let Some(cpu) = self.cpu.take() else {
            return Ok(());
        };
        let size = self.position - cpu.start;
        if self.is_compressed() {
            self.patch(cpu.start, &self.u32(cpu.blocks))?;
        }
        // A CPU without pages is left out: readers take a size of zero for "nothing".
        let empty = if self.is_compressed() {
            cpu.blocks == 0
        } else {
            size == 0
        };
        if let (Some(buffer), false) = (self.buffers.last_mut(), empty) {
            buffer.cpus.push((cpu.cpu, cpu.start, size));
        }
        Ok(())
    }

    fn flush_block(&mut self) -> Result<(), WriteError> {
        let Version::V7(compression) = self.version else {
            return Ok(());
        };
        let Some(cpu) = &mut self.cpu else {
            return Ok(());
        };
        if cpu.block.is_empty() {
            return Ok(());
        }
        let block = std::mem::take(&mut cpu.block);
        cpu.blocks += 1;
        let packed = compression.pack(&block);
        let header = [
            self.u32(length32(packed.len(), "a block")?),
            self.u32(length32(block.len(), "a block")?),
        ];
        self.put(&header.concat())?;
        self.put(&packed)?;
        // The allocation is kept for the next block.
        let mut block = block;
        block.clear();
        if let Some(cpu) = &mut self.cpu {
            cpu.block = block;
        }
        Ok(())
    }

    fn end_buffer(&mut self) -> Result<(), WriteError> {
        self.end_cpu()?;
        if let (Version::V7(_), Some(section)) = (
            self.version,
            self.buffers.last().map(|buffer| buffer.section),
        ) {
            let size = self.position - section - SECTION_HEADER;
            self.patch(section + 8, &self.u64(size))?;
        }
        Ok(())
    }

    fn write_beginning(&mut self, layout: PageLayout) -> Result<(), WriteError> {
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(if self.version == Version::V6 {
            b"6\0"
        } else {
            b"7\0"
        });
        head.push(u8::from(self.endian == Endian::Big));
        head.push(if layout.long_size() == LongSize::Four {
            4
        } else {
            8
        });
        let page_size = u32::try_from(layout.page_size()).unwrap_or(0);
        head.extend_from_slice(&self.u32(page_size));
        self.put(&head)
    }

    fn write_v6(
        &mut self,
        layout: PageLayout,
        texts: &KernelTexts<'_>,
        info: &FileInfo<'_>,
    ) -> Result<(), WriteError> {
        for part in [
            self.header_info(layout, texts),
            self.ftrace_formats(texts)?,
            self.event_formats(texts)?,
            self.sized32(texts.kallsyms, "kallsyms")?,
            self.sized32(texts.printk_formats, "printk_formats")?,
            self.sized64(texts.saved_cmdlines),
            self.u32(info.cpu_count).to_vec(),
        ] {
            self.put(&part)?;
        }
        self.put(b"options  \0")?;
        let options = self.info_options(info)?;
        self.put(&options)?;
        self.put(&self.u16(id::DONE))?;
        self.put(b"flyrecord\0")?;
        self.patch = self.position;
        for _ in 0..info.cpu_count {
            self.put(&[0; 16])?;
        }
        if self.clock_of_v6 {
            let clock = self.sized64(info.clock.as_bytes());
            self.put(&clock)?;
        }
        Ok(())
    }

    fn finish_v6(&mut self) -> Result<(), WriteError> {
        let Some(buffer) = self.buffers.first() else {
            return Ok(());
        };
        let page_size = u64::try_from(buffer.page_size).unwrap_or(1);
        // CPUs without pages point to where theirs would be: trace-cmd checks the offset against the file.
        let end = self.position.next_multiple_of(page_size.max(1));
        let mut table = Vec::new();
        for cpu in 0..self.cpu_count {
            let found = buffer
                .cpus
                .iter()
                .find(|(with_pages, ..)| *with_pages == cpu);
            let (offset, size) = found.map_or((end, 0), |(_, offset, size)| (*offset, *size));
            table.extend_from_slice(&self.u64(offset));
            table.extend_from_slice(&self.u64(size));
        }
        self.pad(end - self.position)?;
        self.patch(self.patch, &table)
    }

    fn write_v7(
        &mut self,
        compression: Compression,
        layout: PageLayout,
        texts: &KernelTexts<'_>,
        info: &FileInfo<'_>,
    ) -> Result<(), WriteError> {
        self.put(compression.name().as_bytes())?;
        self.put(b"\0")?;
        self.put(if compression == Compression::None {
            b"\0"
        } else {
            b"1\0"
        })?;
        self.patch = self.position;
        self.put(&[0; 8])?;
        let mut options = Vec::new();
        for (section, content) in [
            (id::HEADER_INFO, self.header_info(layout, texts)),
            (id::FTRACE_EVENTS, self.ftrace_formats(texts)?),
            (id::EVENT_FORMATS, self.event_formats(texts)?),
            (id::KALLSYMS, self.sized32(texts.kallsyms, "kallsyms")?),
            (
                id::PRINTK,
                self.sized32(texts.printk_formats, "printk_formats")?,
            ),
            (id::CMDLINES, self.sized64(texts.saved_cmdlines)),
        ] {
            let offset = self.position;
            self.section(compression, section, &content)?;
            self.option(&mut options, section, &self.u64(offset))?;
        }
        options.extend(self.info_options(info)?);
        self.options = options;
        Ok(())
    }

    fn finish_v7(&mut self) -> Result<(), WriteError> {
        let mut options = std::mem::take(&mut self.options);
        for buffer in std::mem::take(&mut self.buffers) {
            let mut data = self.u64(buffer.section).to_vec();
            data.extend_from_slice(buffer.name.as_bytes());
            data.push(0);
            data.extend_from_slice(buffer.clock.as_bytes());
            data.push(0);
            data.extend_from_slice(&self.u32(length32(buffer.page_size, "a page")?));
            data.extend_from_slice(&self.u32(length32(buffer.cpus.len(), "the CPUs")?));
            for (cpu, offset, size) in buffer.cpus {
                data.extend_from_slice(&self.u32(cpu));
                data.extend_from_slice(&self.u64(offset));
                data.extend_from_slice(&self.u64(size));
            }
            self.option(&mut options, id::BUFFER, &data)?;
        }
        self.option(&mut options, id::DONE, &self.u64(0))?;
        let offset = self.position;
        self.section(Compression::None, 0, &options)?;
        self.patch(self.patch, &self.u64(offset))
    }

    /// Options both versions have.
    fn info_options(&self, info: &FileInfo<'_>) -> Result<Vec<u8>, WriteError> {
        let mut options = Vec::new();
        let text = |text: &str| [text.as_bytes(), b"\0"].concat();
        for stats in &info.cpu_stats {
            self.option(&mut options, id::CPUSTAT, &text(stats))?;
        }
        if !info.clock.is_empty() {
            // Version 6 only announces the clock here; its text follows the table of CPUs.
            let clock = if self.version == Version::V6 {
                Vec::new()
            } else {
                text(info.clock)
            };
            self.option(&mut options, id::TRACECLOCK, &clock)?;
        }
        if let Some(uname) = info.uname {
            self.option(&mut options, id::UNAME, &text(uname))?;
        }
        if let Some(writer) = info.writer {
            self.option(&mut options, id::VERSION, &text(writer))?;
        }
        if let Some(trace_id) = info.trace_id {
            self.option(&mut options, id::TRACEID, &self.u64(trace_id))?;
        }
        // KernelShark 2.2 calls a version 7 file without it empty.
        self.option(&mut options, id::CPUCOUNT, &self.u32(info.cpu_count))?;
        if let Some(shift) = info.time_shift {
            self.option(&mut options, id::TIME_SHIFT, &self.time_shift(shift)?)?;
        }
        for guest in &info.guests {
            let mut data = text(guest.name);
            data.extend_from_slice(&self.u64(guest.trace_id));
            data.extend_from_slice(&self.u32(length32(guest.vcpus.len(), "the vCPUs")?));
            for (vcpu, thread) in &guest.vcpus {
                data.extend_from_slice(&self.u32(*vcpu));
                data.extend_from_slice(&self.u32(*thread));
            }
            self.option(&mut options, id::GUEST, &data)?;
        }
        Ok(options)
    }

    fn time_shift(&self, shift: &TimeShift) -> Result<Vec<u8>, WriteError> {
        let mut data = self.u64(shift.peer).to_vec();
        data.extend_from_slice(&self.u32(u32::from(shift.interpolate)));
        data.extend_from_slice(&self.u32(length32(shift.cpus.len(), "a time shift")?));
        for samples in &shift.cpus {
            data.extend_from_slice(&self.u32(length32(samples.len(), "a time shift")?));
            for sample in samples {
                data.extend_from_slice(&self.u64(sample.time));
            }
            for sample in samples {
                data.extend_from_slice(&self.u64(sample.offset.cast_unsigned()));
            }
            for sample in samples {
                data.extend_from_slice(&self.u64(sample.scaling.cast_unsigned()));
            }
        }
        for sample in shift.cpus.iter().flatten() {
            data.extend_from_slice(&self.u64(sample.fraction.cast_unsigned()));
        }
        Ok(data)
    }

    fn header_info(&self, layout: PageLayout, texts: &KernelTexts<'_>) -> Vec<u8> {
        let mut part = b"header_page\0".to_vec();
        part.extend(self.sized64(layout.header_page_text().as_bytes()));
        part.extend_from_slice(b"header_event\0");
        part.extend(self.sized64(texts.header_event.as_bytes()));
        part
    }

    fn ftrace_formats(&self, texts: &KernelTexts<'_>) -> Result<Vec<u8>, WriteError> {
        let mut part = self
            .u32(length32(texts.ftrace_formats.len(), "the ftrace formats")?)
            .to_vec();
        for format in &texts.ftrace_formats {
            part.extend(self.sized64(format.as_bytes()));
        }
        Ok(part)
    }

    fn event_formats(&self, texts: &KernelTexts<'_>) -> Result<Vec<u8>, WriteError> {
        let mut part = self
            .u32(length32(texts.event_formats.len(), "the event systems")?)
            .to_vec();
        for (system, formats) in &texts.event_formats {
            part.extend_from_slice(system.as_bytes());
            part.push(0);
            part.extend_from_slice(&self.u32(length32(formats.len(), "the event formats")?));
            for format in formats {
                part.extend(self.sized64(format.as_bytes()));
            }
        }
        Ok(part)
    }

    fn sized32(&self, text: &[u8], what: &'static str) -> Result<Vec<u8>, WriteError> {
        Ok([&self.u32(length32(text.len(), what)?), text].concat())
    }

    fn sized64(&self, text: &[u8]) -> Vec<u8> {
        [&self.u64(u64::try_from(text.len()).unwrap_or(0)), text].concat()
    }

    fn option(&self, options: &mut Vec<u8>, option: u16, data: &[u8]) -> Result<(), WriteError> {
        options.extend_from_slice(&self.u16(option));
        options.extend_from_slice(&self.u32(length32(data.len(), "an option")?));
        options.extend_from_slice(data);
        Ok(())
    }

    fn section(
        &mut self,
        compression: Compression,
        section: u16,
        content: &[u8],
    ) -> Result<(), WriteError> {
        if compression == Compression::None {
            self.section_header(section, 0, u64::try_from(content.len()).unwrap_or(0))?;
            return self.put(content);
        }
        let packed = compression.pack(content);
        let sizes = [
            self.u32(length32(packed.len(), "a section")?),
            self.u32(length32(content.len(), "a section")?),
        ];
        let size = u64::try_from(packed.len()).unwrap_or(0) + 8;
        self.section_header(section, SECTION_COMPRESSED, size)?;
        self.put(&sizes.concat())?;
        self.put(&packed)
    }

    fn section_header(&mut self, section: u16, flags: u16, size: u64) -> Result<(), WriteError> {
        let mut header = self.u16(section).to_vec();
        header.extend_from_slice(&self.u16(flags));
        header.extend_from_slice(&self.u32(0));
        header.extend_from_slice(&self.u64(size));
        self.put(&header)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.out.write_all(bytes)?;
        self.position += u64::try_from(bytes.len()).unwrap_or(0);
        Ok(())
    }

    fn pad(&mut self, mut count: u64) -> Result<(), WriteError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while count > 0 {
            let step = usize::try_from(count)
                .unwrap_or(usize::MAX)
                .min(ZEROS.len());
            self.put(&ZEROS[..step])?;
            count -= u64::try_from(step).unwrap_or(0);
        }
        Ok(())
    }

    fn patch(&mut self, offset: u64, bytes: &[u8]) -> Result<(), WriteError> {
        self.out.seek(SeekFrom::Start(offset))?;
        self.out.write_all(bytes)?;
        self.out.seek(SeekFrom::Start(self.position))?;
        Ok(())
    }

    fn u16(&self, value: u16) -> [u8; 2] {
        if self.endian == Endian::Big {
            value.to_be_bytes()
        } else {
            value.to_le_bytes()
        }
    }

    fn u32(&self, value: u32) -> [u8; 4] {
        if self.endian == Endian::Big {
            value.to_be_bytes()
        } else {
            value.to_le_bytes()
        }
    }

    fn u64(&self, value: u64) -> [u8; 8] {
        if self.endian == Endian::Big {
            value.to_be_bytes()
        } else {
            value.to_le_bytes()
        }
    }
}

const SECTION_HEADER: u64 = 16;

fn length32(length: usize, what: &'static str) -> Result<u32, WriteError> {
    u32::try_from(length).map_err(|_| WriteError::TooLong { what })
}
