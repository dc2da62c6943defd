//! Reading a file: metadata at once, pages as they are asked for.

use std::io::{Read, Seek, SeekFrom};
use std::sync::{Mutex, PoisonError};

use super::compression::Compression;
use super::input::{Input, ReadError, limit};
use super::options::FileOptions;
use super::{MAGIC, SECTION_COMPRESSED, id};
use crate::merge::{Merge, PageSource, Pull};
use crate::metadata::{Clock, Comms, Metadata, PrintkFormats, Symbols};
use crate::ring_buffer::{MAX_PAGE_SIZE, PageLayout};
use crate::{Endian, LongSize};

/// Most CPUs of one file.
const MAX_CPUS: u32 = 8192;

/// Most options sections followed: a chain that leads back to itself must end.
const MAX_OPTION_SECTIONS: u32 = 10_000;

/// Bytes of pages read at once for each CPU.
const READ_AHEAD: usize = 128 << 10;

/// An open `trace.dat`.
#[derive(Debug)]
pub struct TraceFile<R> {
    source: Mutex<R>,
    version: u8,
    compression: Compression,
    metadata: Metadata,
    options: FileOptions,
    buffers: Vec<Buffer>,
    warnings: Vec<String>,
}

/// One ring buffer of the recording: the top one (with an empty name) or an instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Name of the instance; empty for the top buffer.
    pub name: String,
    /// Its clock.
    pub clock: Clock,
    /// Layout of its pages.
    pub layout: PageLayout,
    /// Its CPUs that have pages.
    pub cpus: Vec<CpuData>,
}

/// Where the pages of a CPU are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuData {
    /// The CPU.
    pub cpu: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub size: u64,
    /// Whether they are compressed blocks.
    pub compressed: bool,
}

impl<R: Read + Seek> TraceFile<R> {
    /// Reads everything but the pages.
    pub fn open(mut source: R) -> Result<Self, ReadError> {
        source.seek(SeekFrom::Start(0))?;
        let mut input = Input {
            source,
            endian: Endian::Little,
            long_size: LongSize::Eight,
        };
        if input.array::<10>("the file's first bytes").ok().as_ref() != Some(MAGIC) {
            return Err(ReadError::Magic);
        }
        let version = input.string("the version")?;
        let version = match version.as_str() {
            "6" => 6,
            "7" => 7,
            _ => {
                return Err(ReadError::Version {
                    version: version.chars().take(16).collect(),
                });
            }
        };
        if input.u8("the byte order")? != 0 {
            input.endian = Endian::Big;
        }
        let size = input.u8("the size of a long")?;
        input.long_size =
            LongSize::from_bytes(usize::from(size)).ok_or(ReadError::LongSize { size })?;
        let page_size = input.u32("the page size")?;
        let mut building = Building::new(&input, page_size);
        if version == 6 {
            building.read_v6(&mut input)?;
        } else {
            building.read_v7(&mut input)?;
        }
        building.finish(input.source, version)
    }

    /// 6 or 7.
    #[must_use]
    pub const fn version(&self) -> u8 {
        self.version
    }

    /// How its pages are compressed.
    #[must_use]
    pub const fn compression(&self) -> Compression {
        self.compression
    }

    /// What is needed to read its records.
    #[must_use]
    pub const fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// What it says about itself.
    #[must_use]
    pub const fn options(&self) -> &FileOptions {
        &self.options
    }

    /// Its ring buffers, the top one first.
    #[must_use]
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// CPUs of the traced machine, as far as the file says.
    #[must_use]
    pub fn cpu_count(&self) -> u32 {
        self.options.cpu_count.unwrap_or_else(|| {
            let highest = self
                .buffers
                .iter()
                .flat_map(|buffer| &buffer.cpus)
                .map(|cpu| cpu.cpu)
                .max();
            highest.map_or(0, |cpu| cpu + 1)
        })
    }

    /// What is wrong with the file and did not keep it from being read.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The pages of one CPU, in order.
    pub fn pages(&self, buffer: &Buffer, cpu: &CpuData) -> CpuPages<'_, R> {
        CpuPages {
            source: &self.source,
            compression: if cpu.compressed {
                self.compression
            } else {
                Compression::None
            },
            endian: self.metadata.layout.endian(),
            page_size: buffer.layout.page_size(),
            at: cpu.offset,
            left: cpu.size,
            blocks: None,
            ready: Vec::new(),
            ready_at: 0,
            packed: Vec::new(),
            cut_short: false,
        }
    }

    /// The records of one buffer in time order.
    pub fn merge(&self, buffer: &Buffer) -> Merge<CpuPages<'_, R>> {
        Merge::new(
            buffer.layout,
            buffer
                .cpus
                .iter()
                .map(|cpu| (cpu.cpu, self.pages(buffer, cpu))),
        )
    }
}

/// Pages of one CPU of a file.
#[derive(Debug)]
pub struct CpuPages<'a, R> {
    source: &'a Mutex<R>,
    compression: Compression,
    endian: Endian,
    page_size: usize,
    at: u64,
    left: u64,
    // Compressed blocks still to come; unknown before the first read.
    blocks: Option<u32>,
    ready: Vec<u8>,
    ready_at: usize,
    packed: Vec<u8>,
    cut_short: bool,
}

impl<R: Read + Seek> CpuPages<'_, R> {
    /// Whether the file ended before these pages did.
    #[must_use]
    pub const fn is_cut_short(&self) -> bool {
        self.cut_short
    }

    /// More pages into `ready`; false at the end.
    fn refill(&mut self) -> Result<bool, ReadError> {
        self.ready.clear();
        self.ready_at = 0;
        if self.compression == Compression::None {
            let pages = (READ_AHEAD / self.page_size).max(1) * self.page_size;
            let want = u64::try_from(pages).unwrap_or(u64::MAX).min(self.left);
            if want == 0 {
                return Ok(false);
            }
            let source = self.source;
            let mut guard = source.lock().unwrap_or_else(PoisonError::into_inner);
            guard.seek(SeekFrom::Start(self.at))?;
            let got = guard.by_ref().take(want).read_to_end(&mut self.ready)?;
            let got = u64::try_from(got).unwrap_or(0);
            self.at += got;
            self.left -= got;
            if got < want {
                self.cut_short = true;
                self.left = 0;
            }
            return Ok(!self.ready.is_empty());
        }
        let blocks = match self.blocks {
            Some(blocks) => blocks,
            None if self.left == 0 => 0,
            None => match self.header::<4>()? {
                Some(count) => self.endian.u32(&count, 0).unwrap_or(0),
                None => 0,
            },
        };
        self.blocks = Some(blocks.saturating_sub(1));
        if blocks == 0 {
            return Ok(false);
        }
        let Some(header) = self.header::<8>()? else {
            return Ok(false);
        };
        let packed = u64::from(self.endian.u32(&header, 0).unwrap_or(0));
        let size = u64::from(self.endian.u32(&header, 4).unwrap_or(0));
        if packed > limit::BLOCK || size > limit::BLOCK {
            let size = packed.max(size);
            return Err(ReadError::TooLarge {
                what: "a block of pages",
                size,
                limit: limit::BLOCK,
            });
        }
        let mut block = std::mem::take(&mut self.packed);
        let whole = self.read(packed, &mut block)?;
        self.packed = block;
        if !whole {
            return Ok(false);
        }
        let size = usize::try_from(size).unwrap_or(0);
        self.compression
            .unpack(&self.packed, size, &mut self.ready)?;
        Ok(!self.ready.is_empty())
    }

    fn header<const N: usize>(&mut self) -> Result<Option<[u8; N]>, ReadError> {
        let mut bytes = Vec::new();
        let whole = self.read(u64::try_from(N).unwrap_or(0), &mut bytes)?;
        Ok(if whole {
            bytes.first_chunk::<N>().copied()
        } else {
            None
        })
    }

    /// Exactly `size` bytes of this CPU's data; false, and `cut_short`, if there are fewer.
    fn read(&mut self, size: u64, out: &mut Vec<u8>) -> Result<bool, ReadError> {
        out.clear();
        let source = self.source;
        let mut guard = source.lock().unwrap_or_else(PoisonError::into_inner);
        guard.seek(SeekFrom::Start(self.at))?;
        let got = guard.by_ref().take(size).read_to_end(out)?;
        let got = u64::try_from(got).unwrap_or(0);
        self.at += got;
        self.left = self.left.saturating_sub(got);
        self.cut_short |= got < size;
        Ok(got == size)
    }
}

impl<R: Read + Seek> PageSource for CpuPages<'_, R> {
    type Error = ReadError;

    fn next_page(&mut self, page: &mut Vec<u8>) -> Result<Pull, ReadError> {
        page.clear();
        if self.ready_at >= self.ready.len() && !self.refill()? {
            return Ok(Pull::End);
        }
        let rest = self.ready.get(self.ready_at..).unwrap_or_default();
        let bytes = rest.get(..self.page_size).unwrap_or(rest);
        page.extend_from_slice(bytes);
        self.ready_at += bytes.len();
        Ok(Pull::Page)
    }
}

/// What has been read so far.
struct Building {
    endian: Endian,
    long_size: LongSize,
    page_size: u32,
    compression: Compression,
    header_page: Option<String>,
    metadata: Option<Metadata>,
    options: FileOptions,
    buffers: Vec<Buffer>,
    warnings: Vec<String>,
}

impl Building {
    fn new<R>(input: &Input<R>, page_size: u32) -> Self {
        Self {
            endian: input.endian,
            long_size: input.long_size,
            page_size,
            compression: Compression::None,
            header_page: None,
            metadata: None,
            options: FileOptions::default(),
            buffers: Vec::new(),
            warnings: Vec::new(),
        }
    }

    fn read_v6<R: Read + Seek>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        self.read_header_info(input)?;
        self.read_ftrace_formats(input)?;
        self.read_event_formats(input)?;
        self.read_kallsyms(input)?;
        self.read_printk(input)?;
        self.read_cmdlines(input)?;
        let cpus = input.u32("the number of CPUs")?;
        if cpus > MAX_CPUS {
            return Err(ReadError::TooLarge {
                what: "CPUs",
                size: cpus.into(),
                limit: MAX_CPUS.into(),
            });
        }
        self.options.cpu_count = Some(cpus);
        self.read_v6_data(input, cpus, "")?;
        // Instances are options that point to further data headers.
        for option in std::mem::take(&mut self.options.buffers) {
            let mut head = Input::over(&option, self.endian, self.long_size);
            let offset = head.u64("the offset of an instance")?;
            let name = head.string("the name of an instance")?;
            input.seek(offset)?;
            let before = std::mem::take(&mut self.options);
            let result = self.read_v6_data(input, cpus, &name);
            self.options = before;
            if let Err(error) = result {
                self.warnings.push(format!(
                    "failed to read the instance {name}: failed to {error}"
                ));
            }
        }
        Ok(())
    }

    /// Options, the table of CPUs, the clock: what stands before the pages of one buffer.
    fn read_v6_data<R: Read + Seek>(
        &mut self,
        input: &mut Input<R>,
        cpus: u32,
        name: &str,
    ) -> Result<(), ReadError> {
        let mut kind = input.array::<10>("the kind of data")?;
        if &kind == b"options  \0" {
            loop {
                let option = input.u16("an option")?;
                if option == id::DONE {
                    break;
                }
                let size = input.u32("an option")?;
                let data = input.bytes("an option", size.into(), limit::OPTIONS)?;
                self.take_option(option, &data);
            }
            kind = input.array::<10>("the kind of data")?;
        }
        if &kind == b"latency  \0" {
            return Err(ReadError::Missing {
                what: "ring-buffer pages (it is a latency trace, plain text)",
            });
        }
        if &kind != b"flyrecord\0" {
            return Err(ReadError::Expected {
                wanted: "flyrecord",
            });
        }
        let mut table = Vec::new();
        for cpu in 0..cpus {
            let offset = input.u64("the table of CPUs")?;
            let size = input.u64("the table of CPUs")?;
            if size > 0 {
                table.push(CpuData {
                    cpu,
                    offset,
                    size,
                    compressed: false,
                });
            }
        }
        let mut clock = Clock::default();
        if self.options.has_clock {
            let size = input.u64("the clock")?;
            clock = Clock::parse(&input.text("the clock", size, limit::SMALL)?);
        }
        let layout = self.layout()?;
        self.buffers.push(Buffer {
            name: name.to_owned(),
            clock,
            layout,
            cpus: table,
        });
        Ok(())
    }

    fn read_v7<R: Read + Seek>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        let name = input.string("the compression")?;
        self.compression = Compression::by_name(&name)?;
        input.string("the version of the compression")?;
        let mut offset = input.u64("the offset of the options")?;
        if offset == 0 {
            return Err(ReadError::Missing {
                what: "options (the recording was not finished)",
            });
        }
        let mut sections = 0;
        while offset != 0 {
            sections += 1;
            if sections > MAX_OPTION_SECTIONS {
                return Err(ReadError::TooLarge {
                    what: "options sections",
                    size: sections.into(),
                    limit: MAX_OPTION_SECTIONS.into(),
                });
            }
            let content = self.section(input, offset, 0, "an options section", limit::OPTIONS)?;
            offset = self.read_options(&content)?;
        }
        let mut wanted = std::mem::take(&mut self.options.sections);
        // In the order in which they build on each other.
        wanted.sort_by_key(|(section, _)| *section);
        for (section, offset) in wanted {
            let what = match section {
                id::HEADER_INFO => "the page header",
                id::FTRACE_EVENTS => "the ftrace formats",
                id::EVENT_FORMATS => "the event formats",
                id::KALLSYMS => "the symbols",
                id::PRINTK => "the printk formats",
                _ => "the command lines",
            };
            let content =
                self.section(input, offset, section, what, limit::SYMBOLS + limit::SMALL)?;
            let mut content = Input::over(&content, self.endian, self.long_size);
            match section {
                id::HEADER_INFO => self.read_header_info(&mut content)?,
                id::FTRACE_EVENTS => self.read_ftrace_formats(&mut content)?,
                id::EVENT_FORMATS => self.read_event_formats(&mut content)?,
                id::KALLSYMS => self.read_kallsyms(&mut content)?,
                id::PRINTK => self.read_printk(&mut content)?,
                _ => self.read_cmdlines(&mut content)?,
            }
        }
        for option in std::mem::take(&mut self.options.buffers) {
            let buffer = self.read_buffer(input, &option)?;
            self.buffers.push(buffer);
        }
        self.buffers.sort_by_key(|buffer| !buffer.name.is_empty());
        Ok(())
    }

    /// The content of the section at `offset`, unpacked.
    fn section<R: Read + Seek>(
        &self,
        input: &mut Input<R>,
        offset: u64,
        wanted: u16,
        what: &'static str,
        limit: u64,
    ) -> Result<Vec<u8>, ReadError> {
        input.seek(offset)?;
        let (section, flags) = (input.u16(what)?, input.u16(what)?);
        let _name = input.u32(what)?;
        let size = input.u64(what)?;
        if section != wanted {
            return Err(ReadError::Missing { what });
        }
        let content = input.bytes(what, size, limit)?;
        if flags & SECTION_COMPRESSED == 0 {
            return Ok(content);
        }
        let mut head = Input::over(&content, self.endian, self.long_size);
        let packed = head.u32(what)?;
        let size = u64::from(head.u32(what)?);
        if size > limit {
            return Err(ReadError::TooLarge { what, size, limit });
        }
        let packed = head.bytes(what, packed.into(), limit)?;
        let mut unpacked = Vec::new();
        self.compression
            .unpack(&packed, usize::try_from(size).unwrap_or(0), &mut unpacked)?;
        Ok(unpacked)
    }

    /// The options of one section; the offset of the next.
    fn read_options(&mut self, content: &[u8]) -> Result<u64, ReadError> {
        let mut input = Input::over(content, self.endian, self.long_size);
        while !input.source.is_empty() {
            let option = input.u16("an option")?;
            let size = input.u32("an option")?;
            let data = input.bytes("an option", size.into(), limit::OPTIONS)?;
            if option == id::DONE {
                return Ok(self.endian.u64(&data, 0).unwrap_or(0));
            }
            self.take_option(option, &data);
        }
        Ok(0)
    }

    fn take_option(&mut self, option: u16, data: &[u8]) {
        if let Err(error) = self.options.take(option, data, self.endian, self.long_size)
            && self.warnings.len() < 100
        {
            self.warnings
                .push(format!("failed to read option {option}: failed to {error}"));
        }
    }

    fn read_buffer<R: Read + Seek>(
        &self,
        input: &mut Input<R>,
        option: &[u8],
    ) -> Result<Buffer, ReadError> {
        const WHAT: &str = "a buffer option";
        let mut head = Input::over(option, self.endian, self.long_size);
        let section = head.u64(WHAT)?;
        let name = head.string(WHAT)?;
        let clock = Clock::parse(&head.string(WHAT)?);
        let page_size = head.u32(WHAT)?;
        let count = head.u32(WHAT)?;
        if count > MAX_CPUS {
            return Err(ReadError::TooLarge {
                what: "CPUs",
                size: count.into(),
                limit: MAX_CPUS.into(),
            });
        }
        input.seek(section)?;
        let _id = input.u16(WHAT)?;
        let compressed = input.u16(WHAT)? & SECTION_COMPRESSED != 0;
        let mut cpus = Vec::new();
        for _ in 0..count {
            let (cpu, offset, size) = (head.u32(WHAT)?, head.u64(WHAT)?, head.u64(WHAT)?);
            if cpu >= MAX_CPUS {
                return Err(ReadError::TooLarge {
                    what: "a CPU number",
                    size: cpu.into(),
                    limit: MAX_CPUS.into(),
                });
            }
            if size > 0 {
                cpus.push(CpuData {
                    cpu,
                    offset,
                    size,
                    compressed,
                });
            }
        }
        let mut layout = self.layout()?;
        if page_size != 0 && page_size <= MAX_PAGE_SIZE {
            layout = layout.with_page_size(page_size)?;
        }
        Ok(Buffer {
            name,
            clock,
            layout,
            cpus,
        })
    }

    fn layout(&self) -> Result<PageLayout, ReadError> {
        let text = self.header_page.as_deref().ok_or(ReadError::Missing {
            what: "the page header",
        })?;
        let layout = PageLayout::parse(text, self.endian)?;
        if self.page_size != 0 && self.page_size <= MAX_PAGE_SIZE {
            return Ok(layout.with_page_size(self.page_size)?);
        }
        Ok(layout)
    }

    fn read_header_info<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        input.expect("header_page\0")?;
        let size = input.u64("the page header")?;
        self.header_page = Some(input.text("the page header", size, limit::SMALL)?);
        input.expect("header_event\0")?;
        let size = input.u64("the event header")?;
        input.bytes("the event header", size, limit::SMALL)?;
        // The size of the kernel's long is that of the commit word, not the one in the file's header: a 32-bit
        // trace-cmd on a 64-bit kernel writes its own.
        self.metadata = Some(Metadata::bare(self.layout()?));
        Ok(())
    }

    fn metadata(&mut self) -> Result<&mut Metadata, ReadError> {
        self.metadata.as_mut().ok_or(ReadError::Missing {
            what: "the page header",
        })
    }

    fn add_format(&mut self, system: &str, text: &str) -> Result<(), ReadError> {
        if let Err(error) = self.metadata()?.events.add(system, text)
            && self.warnings.len() < 100
        {
            self.warnings
                .push(format!("failed to {error} (system {system})"));
        }
        Ok(())
    }

    fn read_ftrace_formats<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        const WHAT: &str = "the ftrace formats";
        let count = input.u32(WHAT)?;
        let mut left = limit::FORMATS;
        for _ in 0..count {
            let size = input.u64(WHAT)?;
            let text = input.text(WHAT, size, left)?;
            left -= size;
            self.add_format("ftrace", &text)?;
        }
        Ok(())
    }

    fn read_event_formats<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        const WHAT: &str = "the event formats";
        let systems = input.u32(WHAT)?;
        let mut left = limit::FORMATS;
        for _ in 0..systems {
            let system = input.string(WHAT)?;
            let count = input.u32(WHAT)?;
            for _ in 0..count {
                let size = input.u64(WHAT)?;
                let text = input.text(WHAT, size, left)?;
                left -= size;
                self.add_format(&system, &text)?;
            }
        }
        Ok(())
    }

    fn read_kallsyms<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        let size = input.u32("the symbols")?;
        let text = input.bytes("the symbols", size.into(), limit::SYMBOLS)?;
        self.metadata()?.symbols = Symbols::parse(&text);
        Ok(())
    }

    fn read_printk<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        let size = input.u32("the printk formats")?;
        let text = input.bytes("the printk formats", size.into(), limit::SYMBOLS)?;
        self.metadata()?.printk = PrintkFormats::parse(&text);
        Ok(())
    }

    fn read_cmdlines<R: Read>(&mut self, input: &mut Input<R>) -> Result<(), ReadError> {
        let size = input.u64("the command lines")?;
        let text = input.bytes("the command lines", size, limit::CMDLINES)?;
        self.metadata()?.comms = Comms::parse(&text);
        Ok(())
    }

    fn finish<R: Read + Seek>(self, source: R, version: u8) -> Result<TraceFile<R>, ReadError> {
        let mut metadata = self.metadata.ok_or(ReadError::Missing {
            what: "the page header",
        })?;
        if let Some(top) = self.buffers.first() {
            metadata.clock = top.clock.clone();
        }
        if self
            .options
            .tsc_to_ns
            .is_some_and(|(multiplier, ..)| multiplier != 0)
        {
            metadata.clock = Clock::default();
        }
        Ok(TraceFile {
            source: Mutex::new(source),
            version,
            compression: self.compression,
            metadata,
            options: self.options,
            buffers: self.buffers,
            warnings: self.warnings,
        })
    }
}
