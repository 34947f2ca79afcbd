//! A growing array. An element never moves, and growing takes no lock that a reader would wait for.
//!
//! Elements lie in chunks. A directory of buckets, each twice as long as the one before, leads to
//! the chunks. Unused memory is therefore at most one chunk, and the directory takes a sixteenth of
//! a byte for each element.

use std::sync::OnceLock;

/// Elements in a chunk: a few pages of entries. Four in a model, so that chunks are met.
const CHUNK: u64 = if cfg!(loom) { 4 } else { 4096 };
/// Buckets of the directory, enough for 2⁴⁰ elements.
const BUCKETS: usize = 30;

type Chunk<T> = OnceLock<Box<[T]>>;

/// A growing array of up to 2⁴⁰ elements.
pub(crate) struct Table<T> {
    buckets: [OnceLock<Box<[Chunk<T>]>>; BUCKETS],
}

impl<T: Default> Table<T> {
    pub(crate) fn new() -> Self {
        Self { buckets: [const { OnceLock::new() }; BUCKETS] }
    }

    fn place(index: u64) -> (usize, usize, usize) {
        let chunk = index / CHUNK + 1;
        let bucket = chunk.ilog2();
        (bucket as usize, (chunk - (1 << bucket)) as usize, (index % CHUNK) as usize)
    }

    /// The element, if [`Table::ensure`] has been called for it, or for a neighbour.
    pub(crate) fn get(&self, index: u64) -> Option<&T> {
        let (bucket, chunk, element) = Self::place(index);
        self.buckets.get(bucket)?.get()?[chunk].get()?.get(element)
    }

    /// The element, made if it is not there yet.
    ///
    /// # Panics
    ///
    /// Beyond 2⁴⁰ elements.
    pub(crate) fn ensure(&self, index: u64) -> &T {
        let (bucket, chunk, element) = Self::place(index);
        let chunks = self.buckets[bucket].get_or_init(|| (0..1u64 << bucket).map(|_| OnceLock::new()).collect());
        &chunks[chunk].get_or_init(|| (0..CHUNK).map(|_| T::default()).collect())[element]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_are_dense() {
        let mut expected = (0, 0, 0);
        for index in 0..20 * CHUNK {
            assert_eq!(Table::<u8>::place(index), expected, "{index}");
            expected.2 += 1;
            if expected.2 == CHUNK as usize {
                expected = (expected.0, expected.1 + 1, 0);
                if expected.1 == 1 << expected.0 {
                    expected = (expected.0 + 1, 0, 0);
                }
            }
        }
        assert!(Table::<u8>::place((1 << 40) - 1).0 < BUCKETS);
    }

    #[test]
    fn what_is_not_there_is_none() {
        let table = Table::<std::sync::atomic::AtomicU64>::new();
        assert!(table.get(5).is_none() && table.get(u64::MAX / 2).is_none());
        let there: *const _ = table.ensure(CHUNK);
        assert!(std::ptr::eq(there, table.ensure(CHUNK)));
        assert!(table.get(CHUNK + 1).is_some() && table.get(0).is_none() && table.get(3 * CHUNK).is_none());
    }
}
