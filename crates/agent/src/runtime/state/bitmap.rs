//! One bit for each page of a region.

#![allow(unsafe_code)] // The words lie in a mapping of their own.

use kmem::{mm, raw};
use wire::{PageNo, Run};

/// A bitmap in memory mapped for it, so that parts which never had a bit set cost nothing.
pub(crate) struct Bitmap {
    words: *mut u64,
    bits: u32,
}

// SAFETY: the mapping behind `words` belongs to this bitmap alone, and is reached through it only.
unsafe impl Send for Bitmap {}

impl Bitmap {
    /// A bitmap of `bits` clear bits; `None` if there is no memory.
    pub(crate) fn new(bits: u32) -> Option<Self> {
        let words = mm::map_anonymous(Self::size(bits)).ok()? as *mut u64;
        Some(Self { words, bits })
    }

    pub(crate) fn bits(&self) -> u32 {
        self.bits
    }

    fn size(bits: u32) -> usize {
        (bits as usize).div_ceil(64).max(1) * 8
    }

    fn words(&self) -> &[u64] {
        // SAFETY: `new` mapped `size(bits)` bytes, page aligned and zeroed, which stay mapped until
        // `drop`. They are written through `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.words, Self::size(self.bits) / 8) }
    }

    fn change(&mut self, run: Run, change: impl Fn(&mut u64, u64)) {
        // SAFETY: `new` mapped `size(bits)` bytes, page aligned and zeroed, which stay mapped until
        // `drop`. `&mut self` excludes every other reference to them.
        let words = unsafe { std::slice::from_raw_parts_mut(self.words, Self::size(self.bits) / 8) };
        let (mut at, end) = (run.page.0, run.end().0.min(self.bits));
        while at < end {
            let count = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << (at % 64);
            let word = &mut words[(at / 64) as usize];
            // Only a word that changes is written: clearing must not touch parts that never had a
            // bit set.
            let mut changed = *word;
            change(&mut changed, mask);
            if changed != *word {
                *word = changed;
            }
            at += count;
        }
    }

    pub(crate) fn set(&mut self, run: Run) {
        self.change(run, |word, mask| *word |= mask);
    }

    pub(crate) fn clear(&mut self, run: Run) {
        self.change(run, |word, mask| *word &= !mask);
    }

    /// The first page from `start` up to `end` whose bit differs from the bits of `others`, which
    /// are all alike; `end` if there is none.
    fn find(&self, start: u32, end: u32, others: u64) -> u32 {
        let end = end.min(self.bits);
        let mut at = start;
        while at < end {
            let word = self.words()[(at / 64) as usize];
            let wanted = (word ^ others) >> (at % 64);
            if wanted != 0 {
                return (at + wanted.trailing_zeros()).min(end);
            }
            at = at.saturating_add(64 - at % 64);
        }
        end
    }

    pub(crate) fn any(&self, run: Run) -> bool {
        self.runs(run).next().is_some()
    }

    /// The maximal runs of set bits within these pages, ascending.
    pub(crate) fn runs(&self, within: Run) -> impl Iterator<Item = Run> {
        self.parts(within, 0)
    }

    /// The maximal runs of clear bits within these pages, ascending.
    pub(crate) fn gaps(&self, within: Run) -> impl Iterator<Item = Run> {
        self.parts(within, u64::MAX)
    }

    /// The maximal runs of bits that differ from those of `others`.
    fn parts(&self, within: Run, others: u64) -> impl Iterator<Item = Run> {
        let (mut at, end) = (within.page.0, within.end().0);
        std::iter::from_fn(move || {
            let start = self.find(at, end, others);
            at = self.find(start, end, !others);
            (start < at).then_some(Run::between(PageNo(start), PageNo(at)))
        })
    }
}

impl Drop for Bitmap {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this memory for the bitmap, which nobody refers to any more.
        let _ = unsafe { raw::munmap(self.words as usize, Self::size(self.bits)) };
    }
}

#[cfg(test)]
mod tests;
