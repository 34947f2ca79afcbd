//! One worker's part of a target: chunks in, figures out.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::index::{Index, Seen, Taker};

/// Chunks of a target, by what is seen at once; what they share is in the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Chunks looked at, zero ones too.
    pub(super) chunks: u64,
    /// Zero chunks, holes of files too.
    pub(super) zero: u64,
    /// Bytes read and hashed; holes are not.
    pub(super) bytes_read: u64,
    /// Chunks whose content was known, while the index knew all.
    pub(super) repeats: u64,
    /// Mappings that these would take: see [`Counter`].
    pub(super) mappings: u64,
}

impl Tally {
    pub(super) fn add(&mut self, more: &Tally) {
        self.chunks += more.chunks;
        self.zero += more.zero;
        self.bytes_read += more.bytes_read;
        self.repeats += more.repeats;
        self.mappings += more.mappings;
    }
}

/// What the chunk before was.
#[derive(Clone, Copy)]
enum Before {
    Known(u32),
    Other,
}

/// Takes chunks in the order in which they lie.
///
/// It also counts mappings. Frames are placed in the order in which contents are first seen, so a
/// run of known chunks whose contents were first seen one after the other, or that all have one
/// content, can be mapped as one; and where memory of its own follows a run, that becomes a mapping
/// as well.
pub(super) struct Counter<'a> {
    index: &'a Index,
    seed: u64,
    target: u16,
    chunk: usize,
    taker: Taker,
    before: Option<(u64, Before)>,
    /// For each chunk of a block, whether it is zero; for each that is not, its digest, and what
    /// became of that.
    zero: Vec<bool>,
    digests: Vec<u64>,
    seen: Vec<Seen>,
    pub(super) tally: Tally,
}

impl<'a> Counter<'a> {
    pub(super) fn new(index: &'a Index, seed: u64, target: u16, chunk: usize) -> Self {
        Counter {
            index,
            seed,
            target,
            chunk,
            taker: Taker::default(),
            before: None,
            zero: Vec::new(),
            digests: Vec::new(),
            seen: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// What comes next does not lie behind what came last.
    pub(super) fn start(&mut self) {
        self.before = None;
    }

    /// Chunks that are zero and need not be read.
    pub(super) fn zeros(&mut self, chunks: u64) {
        self.tally.chunks += chunks;
        self.tally.zero += chunks;
        self.before = None;
    }

    /// Chunks that were read, whole ones, and where each lies, in chunks.
    pub(super) fn chunks(&mut self, positions: impl Iterator<Item = u64>, bytes: &[u8]) {
        self.zero.clear();
        self.digests.clear();
        for chunk in bytes.chunks_exact(self.chunk) {
            let zero = is_zero(chunk);
            self.zero.push(zero);
            if !zero {
                self.digests.push(xxh3_64_with_seed(chunk, self.seed));
            }
        }
        self.index.see(&self.digests, self.target, &mut self.taker, &mut self.seen);
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
                    let goes_on =
                        matches!(behind, Some(Before::Known(last)) if number == last || number == last.wrapping_add(1));
                    self.tally.mappings += u64::from(!goes_on);
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

/// Most chunks that are not zero show it in their first bytes.
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
