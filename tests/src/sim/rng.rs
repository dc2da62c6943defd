//! Chance that comes from a seed and from nothing else.

/// SplitMix64 (Steele, Lea, Flood 2014): tiny, and good enough to shake a machine.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// The chance of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number from `low` to `high`, both included.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.any() % (high.saturating_sub(low) + 1)
    }

    /// A length from `low` to `high`, both included.
    pub fn len(&mut self, low: usize, high: usize) -> usize {
        let (low, high) = (low as u64, high as u64);
        usize::try_from(self.within(low, high)).unwrap_or(usize::MAX)
    }

    /// True `per_mille` times in a thousand.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.any() % 1000 < per_mille
    }

    /// One of them.
    pub fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.len(0, of.len() - 1)]
    }
}

/// Spreads the bits of a number over all of it.
#[must_use]
pub fn mix(number: u64) -> u64 {
    let mut z = number;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
