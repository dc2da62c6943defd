//! Kernel symbols, from `/proc/kallsyms`.

use std::cell::Cell;

/// Most symbols kept. A distribution kernel with its modules has 150 000 to 250 000.
const MAX_SYMBOLS: usize = 2_000_000;

/// Most bytes of names kept.
const MAX_SYMBOL_BYTES: usize = 128 << 20;

/// Addresses and names, compactly: 12 bytes a symbol and its name, in two allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Symbols {
    // Sorted by address; the name of entry `i` ends where its length says.
    entries: Vec<Entry>,
    names: Vec<u8>,
    truncated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    address: u64,
    name: u32,
    length: u16,
}

/// A symbol that covers an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Where it begins.
    pub address: u64,
    /// Its name, without the module's.
    pub name: &'a [u8],
}

impl Symbols {
    /// Reads the text of kallsyms: `address type name [module]` a line. Lines that are not of this form are skipped;
    /// what is beyond the bounds is dropped and said by [`Symbols::is_truncated`].
    ///
    /// Absolute symbols are left out (x86-64 lists per-CPU offsets among them, which are no code), and so are the `$a`
    /// marks of arm.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let mut symbols = Self::default();
        for line in text.split(|byte| *byte == b'\n') {
            let Some((address, kind, name)) = parse_line(line) else {
                continue;
            };
            if matches!(kind, b'a' | b'A') || name.first() == Some(&b'$') {
                continue;
            }
            let start = symbols.names.len();
            let (Ok(at), Ok(length)) = (u32::try_from(start), u16::try_from(name.len())) else {
                symbols.truncated = true;
                continue;
            };
            if symbols.entries.len() == MAX_SYMBOLS || start + name.len() > MAX_SYMBOL_BYTES {
                symbols.truncated = true;
                break;
            }
            symbols.names.extend_from_slice(name);
            symbols.entries.push(Entry {
                address,
                name: at,
                length,
            });
        }
        // Later lines first among equal addresses. Which of several aliases a reader shows is a matter of taste; trace-cmd
        // keeps its list in this order, and comparing two reports is easier if we show the same (see `index_of`).
        symbols.entries.reverse();
        symbols.entries.sort_by_key(|entry| entry.address);
        symbols.names.shrink_to_fit();
        symbols.entries.shrink_to_fit();
        symbols
    }

    /// Number of symbols.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none (kallsyms not recorded, or `kptr_restrict` hid it).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a bound cut the table.
    #[must_use]
    pub const fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// The symbol that covers `address`: the last one that begins at or before it. Nothing is known of the end of the
    /// last symbol, so it covers its first address only.
    #[must_use]
    pub fn find(&self, address: u64) -> Option<Symbol<'_>> {
        self.symbol(self.index_of(address)?)
    }

    /// The address a symbol of this name begins at.
    #[must_use]
    pub fn address_of(&self, name: &[u8]) -> Option<u64> {
        self.entries
            .iter()
            .enumerate()
            .find(|(index, _)| {
                self.symbol(*index)
                    .is_some_and(|symbol| symbol.name == name)
            })
            .map(|(_, entry)| entry.address)
    }

    fn symbol(&self, index: usize) -> Option<Symbol<'_>> {
        let entry = self.entries.get(index)?;
        let start = entry.name as usize;
        let name = self.names.get(start..start + usize::from(entry.length))?;
        Some(Symbol {
            address: entry.address,
            name,
        })
    }

    /// Plain bisection with the midpoints of C's `bsearch`, and its stop at the first hit: so that of several names for
    /// one address the same is found as by libtraceevent's `find_func`.
    fn index_of(&self, address: u64) -> Option<usize> {
        let (mut low, mut high) = (0, self.entries.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let entry = self.entries.get(middle)?;
            let next = self.entries.get(middle + 1).map(|entry| entry.address);
            if entry.address == address {
                return Some(middle);
            }
            if address < entry.address {
                high = middle;
            } else if next.is_some_and(|next| address < next) {
                return Some(middle);
            } else {
                low = middle + 1;
            }
        }
        None
    }
}

fn parse_line(line: &[u8]) -> Option<(u64, u8, &[u8])> {
    let mut words = line
        .split(|byte| matches!(byte, b' ' | b'\t'))
        .filter(|word| !word.is_empty());
    let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
    if address.len() > 16 {
        return None;
    }
    let address = address.iter().try_fold(0_u64, |value, digit| {
        Some(value << 4 | u64::from(char::from(*digit).to_digit(16)?))
    })?;
    Some((address, *kind.first()?, name))
}

/// Symbols with a memory of the last addresses: traces ask for a few hundred addresses a million times.
#[derive(Debug)]
pub struct SymbolCache<'a> {
    symbols: &'a Symbols,
    slots: Box<[Cell<(u64, u32)>]>,
}

const CACHE_SLOTS: usize = 4096;
const NOT_CACHED: u32 = u32::MAX;
const NO_SYMBOL: u32 = u32::MAX - 1;

impl<'a> SymbolCache<'a> {
    /// An empty memory.
    #[must_use]
    pub fn new(symbols: &'a Symbols) -> Self {
        Self {
            symbols,
            slots: vec![Cell::new((0, NOT_CACHED)); CACHE_SLOTS].into(),
        }
    }

    /// As [`Symbols::find`].
    #[inline]
    #[must_use]
    pub fn find(&self, address: u64) -> Option<Symbol<'a>> {
        // Fibonacci hashing: call sites differ in their low bits, symbols in their middle ones.
        let hash = address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52;
        let slot = self.slots.get(usize::try_from(hash).unwrap_or(0))?;
        let (cached, index) = slot.get();
        let index = if cached == address && index != NOT_CACHED {
            index
        } else {
            let index = self
                .symbols
                .index_of(address)
                .and_then(|index| u32::try_from(index).ok())
                .unwrap_or(NO_SYMBOL);
            slot.set((address, index));
            index
        };
        if index == NO_SYMBOL {
            None
        } else {
            self.symbols.symbol(index as usize)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"0000000000000000 A fixed_percpu_data\n\
        ffffffff81000000 T _text\n\
        ffffffff81000000 T startup_64\n\
        ffffffff81000100 t foo\n\
        garbage\n\
        ffffffffc0000000 t bar\t[mod]\n\
        ffffffffc0000010 t $d\n\
        ffffffffc0000020 t baz\t[mod]\n";

    #[test]
    fn what_covers_an_address() {
        let symbols = Symbols::parse(TEXT);
        assert_eq!(symbols.len(), 5);
        let name = |address| {
            symbols
                .find(address)
                .map(|symbol| String::from_utf8_lossy(symbol.name).into_owned())
        };
        assert_eq!(name(0xffff_ffff_8100_0110).as_deref(), Some("foo"));
        assert_eq!(name(0xffff_ffff_8100_0050).as_deref(), Some("_text"));
        assert_eq!(name(0xffff_ffff_c000_0018).as_deref(), Some("bar"));
        assert_eq!(name(0xffff_ffff_c000_0020).as_deref(), Some("baz"));
        assert_eq!(name(0xffff_ffff_c000_0021), None);
        assert_eq!(name(0), None);
        assert_eq!(symbols.address_of(b"bar"), Some(0xffff_ffff_c000_0000));
    }

    #[test]
    fn the_cache_says_the_same() {
        let symbols = Symbols::parse(TEXT);
        let cache = SymbolCache::new(&symbols);
        for _ in 0..2 {
            for address in
                (0xffff_ffff_80ff_fff0..0xffff_ffff_8100_0200_u64).chain([0, 1, u64::MAX])
            {
                assert_eq!(cache.find(address), symbols.find(address));
            }
        }
    }
}
