//! Sets of dirty frames: what was written since the last look.
//!
//! [`Bitmap`] is the plain form: one bit a page, 64 to a word, the layout of `KVM_GET_DIRTY_LOG` (bit `i % 64` of
//! little-endian word `i / 64`). A page of zero words is never touched, so an idle set costs a walk over its words and
//! nothing else: 32 KiB for each GiB of guest memory.

/// A set of page numbers below a fixed size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bitmap {
    words: Vec<u64>,
    len: u32,
}

impl Bitmap {
    /// The empty set of page numbers below `len`.
    pub fn new(len: u32) -> Self {
        Self { words: vec![0; len.div_ceil(64) as usize], len }
    }

    /// How many page numbers there can be.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&w| w == 0)
    }

    /// How many pages are in the set.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }

    /// Bytes of memory that the set takes.
    pub fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    /// Whether `page` is in the set. Pages past the end are not.
    pub fn contains(&self, page: u32) -> bool {
        self.words.get(page as usize / 64).is_some_and(|w| w >> (page % 64) & 1 == 1)
    }

    /// Adds one page. Pages past the end are left out.
    pub fn insert(&mut self, page: u32) {
        self.insert_range(page, 1);
    }

    /// Takes one page out.
    pub fn remove(&mut self, page: u32) {
        self.remove_range(page, 1);
    }

    /// Adds `len` pages from `first` on. Pages past the end are left out.
    pub fn insert_range(&mut self, first: u32, len: u32) {
        self.each_mask(first, len, |word, mask| *word |= mask);
    }

    /// Takes `len` pages from `first` on out of the set.
    pub fn remove_range(&mut self, first: u32, len: u32) {
        self.each_mask(first, len, |word, mask| *word &= !mask);
    }

    fn each_mask(&mut self, first: u32, len: u32, mut change: impl FnMut(&mut u64, u64)) {
        let end = first.saturating_add(len).min(self.len);
        let mut page = first;
        while page < end {
            let bit = page % 64;
            let n = (64 - bit).min(end - page);
            change(&mut self.words[page as usize / 64], (u64::MAX >> (64 - n)) << bit);
            page += n;
        }
    }

    /// Empties the set.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Takes every page of `other` out of this set.
    pub fn subtract(&mut self, other: &Bitmap) {
        for (w, o) in self.words.iter_mut().zip(&other.words) {
            *w &= !o;
        }
    }

    /// Adds every page of `other`.
    pub fn unite(&mut self, other: &Bitmap) {
        for (w, o) in self.words.iter_mut().zip(&other.words) {
            *w |= o;
        }
    }

    /// The first page at or after `from`.
    pub fn next(&self, from: u32) -> Option<u32> {
        let mut index = from as usize / 64;
        let mut word = self.words.get(index)? & (u64::MAX << (from % 64));
        while word == 0 {
            index += 1;
            word = *self.words.get(index)?;
        }
        Some(index as u32 * 64 + word.trailing_zeros())
    }

    /// All pages, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(self.next(0), |&page| self.next(page + 1))
    }

    /// Up to `max` pages at or after `from`, ascending.
    pub fn collect_from(&self, from: u32, max: usize, into: &mut Vec<u32>) {
        into.clear();
        let mut at = from;
        while into.len() < max
            && let Some(page) = self.next(at)
        {
            into.push(page);
            at = page + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(bitmap: &Bitmap) -> BTreeSet<u32> {
        let mut out = Vec::new();
        bitmap.collect_from(0, usize::MAX, &mut out);
        out.into_iter().collect()
    }

    proptest! {
        #[test]
        fn behaves_as_a_set(len in 1u32..300, steps in prop::collection::vec((any::<bool>(), 0u32..320, 0u32..150), 0..40)) {
            let (mut bitmap, mut model) = (Bitmap::new(len), BTreeSet::new());
            for (add, first, n) in steps {
                for page in first..(first + n).min(len) {
                    if add { model.insert(page); } else { model.remove(&page); }
                }
                if add { bitmap.insert_range(first, n) } else { bitmap.remove_range(first, n) }
            }
            prop_assert_eq!(set(&bitmap), model.clone());
            prop_assert_eq!(bitmap.count() as usize, model.len());
            for page in 0..len + 70 {
                prop_assert_eq!(bitmap.contains(page), model.contains(&page));
                prop_assert_eq!(bitmap.next(page), model.range(page..).next().copied());
            }
        }

        #[test]
        fn unites_and_subtracts(a in prop::collection::btree_set(0u32..200, 0..50), b in prop::collection::btree_set(0u32..200, 0..50)) {
            let make = |pages: &BTreeSet<u32>| { let mut m = Bitmap::new(200); pages.iter().for_each(|&p| m.insert(p)); m };
            let (mut union, mut difference) = (make(&a), make(&a));
            union.unite(&make(&b));
            difference.subtract(&make(&b));
            prop_assert_eq!(set(&union), &a | &b);
            prop_assert_eq!(set(&difference), &a - &b);
        }
    }
}
