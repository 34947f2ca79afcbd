//! Counting chunks: one worker's part of a target.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::index::{Index, Reserved, Seen};

/// The chunks of a target, as far as they can be counted without the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Chunks scanned, those of zeros included.
    pub(crate) chunks: u64,
    /// Chunks of zeros, holes of files included.
    pub(crate) zero: u64,
    /// Bytes read and hashed; holes are not.
    pub(crate) bytes_read: u64,
    /// Chunks with a known content, counted while the index had all contents.
    pub(crate) repeats: u64,
    /// Mappings for these chunks, see [`Counter`].
    pub(crate) mappings: u64,
}

impl Tally {
    /// Adds another worker's chunks.
    pub(crate) fn add(&mut self, more: &Tally) {
        self.chunks += more.chunks;
        self.zero += more.zero;
        self.bytes_read += more.bytes_read;
        self.repeats += more.repeats;
        self.mappings += more.mappings;
    }
}

/// The previous chunk.
#[derive(Clone, Copy)]
enum Before {
    /// A known content with this number.
    Known(u32),
    Other,
}

/// Counts chunks in address order, and the mappings that PageONE would need.
///
/// PageONE places frames in the order in which contents are first seen. So a run of known chunks
/// needs one mapping if their contents were first seen one after the other, or if all have the same
/// content. Private memory after a run needs a mapping of its own.
pub(crate) struct Counter<'a> {
    index: &'a Index,
    seed: u64,
    target: u16,
    chunk: usize,
    reserved: Reserved,
    /// Position of the previous chunk, in chunks.
    before: Option<(u64, Before)>,
    /// Whether each chunk of a block is zeros.
    zero: Vec<bool>,
    /// Digest of each chunk that is not.
    digests: Vec<u64>,
    /// The index's answer for each digest.
    seen: Vec<Seen>,
    pub(crate) tally: Tally,
}

impl<'a> Counter<'a> {
    /// A counter of chunks of `chunk` bytes in target `target`.
    pub(crate) fn new(index: &'a Index, seed: u64, target: u16, chunk: usize) -> Self {
        Self {
            index,
            seed,
            target,
            chunk,
            reserved: Reserved::default(),
            before: None,
            zero: Vec::new(),
            digests: Vec::new(),
            seen: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// The next chunk is not adjacent to the last one.
    pub(crate) fn start(&mut self) {
        self.before = None;
    }

    /// Counts chunks of zeros that need not be read.
    pub(crate) fn zeros(&mut self, chunks: u64) {
        self.tally.chunks += chunks;
        self.tally.zero += chunks;
        self.before = None;
    }

    /// Counts chunks that were read: their positions, in chunks, and their bytes.
    pub(crate) fn chunks(&mut self, positions: impl Iterator<Item = u64>, bytes: &[u8]) {
        self.zero.clear();
        self.digests.clear();
        for chunk in bytes.chunks_exact(self.chunk) {
            let zero = is_zero(chunk);
            self.zero.push(zero);
            if !zero {
                self.digests.push(xxh3_64_with_seed(chunk, self.seed));
            }
        }
        self.index.see(&self.digests, self.target, &mut self.reserved, &mut self.seen);
        self.tally.chunks += self.zero.len() as u64;
        self.tally.zero += (self.zero.len() - self.digests.len()) as u64;
        self.tally.bytes_read += bytes.len() as u64;
        let mut seen = self.seen.iter();
        for (position, &zero) in positions.zip(&self.zero) {
            let known = if zero { None } else { seen.next().copied() };
            let behind = self.before.filter(|&(last, _)| last + 1 == position).map(|(_, before)| before);
            let now = match known {
                Some(Seen::Known(number)) => {
                    self.tally.repeats += 1;
                    let continues =
                        matches!(behind, Some(Before::Known(last)) if number == last || number == last.wrapping_add(1));
                    self.tally.mappings += u64::from(!continues);
                    Before::Known(number)
                }
                _ => {
                    self.tally.mappings += u64::from(matches!(behind, Some(Before::Known(_))));
                    Before::Other
                }
            };
            self.before = Some((position, now));
        }
    }
}

/// Whether all bytes are zero. Most other chunks differ in their first 256 bytes.
fn is_zero(chunk: &[u8]) -> bool {
    chunk.chunks(256).all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_means_every_byte() {
        assert!(is_zero(&[0; 512]) && is_zero(&[0; 4096]));
        for at in [0, 255, 256, 4095] {
            let mut chunk = [0; 4096];
            chunk[at] = 1;
            assert!(!is_zero(&chunk), "{at}");
        }
    }

    /// Pages named by letters; `.` is zero.
    fn mappings(first: &str, second: &str) -> (u64, u64) {
        let index = Index::new(1 << 24);
        let mut tally = Tally::default();
        for (target, pages) in [first, second].into_iter().enumerate() {
            let mut counter = Counter::new(&index, 0, target as u16, 512);
            let bytes: Vec<u8> = pages.bytes().flat_map(|b| [if b == b'.' { 0 } else { b }; 512]).collect();
            counter.chunks(0..pages.len() as u64, &bytes);
            tally = counter.tally;
        }
        (tally.repeats, tally.mappings)
    }

    #[test]
    fn mappings_are_runs_and_what_follows_them() {
        assert_eq!(mappings("abcdef", "abcdef"), (6, 1));
        assert_eq!(mappings("abcdef", "defabc"), (6, 2));
        assert_eq!(mappings("abcdef", "abxdef"), (5, 3), "two runs and the page between them");
        assert_eq!(mappings("abcdef", "ab.def"), (5, 3));
        assert_eq!(mappings("abcdef", "cccccc"), (6, 1), "one content, kept in replicas");
        assert_eq!(mappings("abcdef", "fdbece"), (6, 6));
        assert_eq!(mappings("abcdef", "uvwxyz"), (0, 0));
    }

    #[test]
    fn zero_chunks_are_counted_and_not_looked_up() {
        let index = Index::new(1 << 24);
        let mut counter = Counter::new(&index, 0, 0, 512);
        counter.chunks(0..2, &[0; 1024]);
        counter.zeros(5);
        assert_eq!(counter.tally, Tally { chunks: 7, zero: 7, bytes_read: 1024, repeats: 0, mappings: 0 });
        index.for_each(|_, _| panic!("nothing is in the index"));
    }
}
