//! The tree: layout, insertion, and reading by many threads at once. `harvest.rs` empties it;
//! `owned.rs` is for a thread that owns it alone.
//!
//! # Order of things
//!
//! An insertion sets the leaf's bit first and then the bits above it, upward. It looks at every
//! level, and changes only bits that are not set. A harvest that clears goes downward: it takes a
//! word (exchanges it for 0) and then the words below it. The claim: *when an insertion returns,
//! the frame can be found from the root, or a harvest that is under way will report it.*
//!
//! Look at one level: a harvest does `P: parent ← 0`, then `L: leaf ← 0`; an insertion sets or sees
//! the leaf's bit (`l`), then looks at the parent's (`p`). If `l` comes before `L` in the leaf's
//! order of changes, the harvest gets the frame. If it comes after, `l` has read from `L` or from a
//! later read-modify-write; those are all acquire and release, so `P` happened before `p`. Then `p`
//! sees the parent cleared, or set again since, and sets it if it is not set. The same argument
//! holds between any two neighbouring levels, with "the bit was seen set or was set" in place of
//! the leaf's. No sequentially consistent order is needed, and loom, which has none, can check the
//! compiled code.
//!
//! A frame is reported once for any number of insertions between two harvests, since only the
//! thread that takes a word gets its bits. A harvest that runs out of room puts the rest back like
//! an insertion: the leaf first, then the levels above.
//!
//! A bit above the leaves may stay set with no frame below it: after a harvest of a part of a node,
//! or of one that passed between an insertion's two steps. That costs a look, and the next harvest
//! of the whole set clears it. A frame without a bit above it never lasts beyond its insertion.

use std::ops::Range;

use crate::primitive::Ordering::{AcqRel, Acquire};
use crate::words::Words;
use crate::{DirtySet, barrier};

/// The most frames that a set can have: 2^40, or 4 PiB of 4 KiB pages.
pub const MAX_FRAMES: u64 = 1 << 40;

/// Levels of a tree of [`MAX_FRAMES`].
pub(crate) const MAX_LEVELS: usize = 7;

/// Why a set of that size cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NewError {
    /// Over [`MAX_FRAMES`].
    #[error("a set of {0} frames was requested; a set has at most 2^40: track the memory in several sets")]
    TooLarge(u64),
    /// No memory.
    #[error("no memory for {bytes} bytes of a set of dirty frames: is an address-space or memory limit too low?")]
    Memory {
        /// Bytes requested.
        bytes: usize,
    },
}

/// The words of a set, all 0.
pub(crate) fn zeroed(len: usize) -> Result<Words, NewError> {
    Words::new(len).ok_or(NewError::Memory { bytes: len.saturating_mul(8) })
}

/// A set of frame numbers below a fixed size: a packed radix tree.
///
/// Any number of threads may call the methods with `&self` at once. None of these methods waits or
/// allocates.
///
/// ```
/// let tree = dirty::DirtyTree::new(1000)?;
/// std::thread::scope(|scope| {
///     scope.spawn(|| (0..10).for_each(|frame| assert!(tree.insert(frame * 100))));
///     scope.spawn(|| tree.insert_range(500, 4));
/// });
/// assert!(tree.contains(503) && !tree.insert(1000), "there is no such frame");
/// let mut ranges = [const { 0..0 }; 2];
/// let mut within = 450..1000;
/// assert_eq!(tree.take_ranges(&mut within, &mut ranges), 2);
/// assert_eq!((&ranges, within), (&[500..504, 600..601], 700..1000), "the room ended");
/// assert_eq!(tree.iter().collect::<Vec<_>>(), [0, 100, 200, 300, 400, 700, 800, 900]);
/// # Ok::<(), dirty::NewError>(())
/// ```
pub struct DirtyTree {
    /// All levels in one piece, the leaves first: level 0 is the bitmap itself.
    pub(crate) words: Words,
    pub(crate) frames: u64,
    /// The index of each level's first word.
    pub(crate) starts: [usize; MAX_LEVELS + 1],
    pub(crate) levels: usize,
}

impl DirtyTree {
    /// The empty set of frames below `frames`.
    ///
    /// # Errors
    ///
    /// [`NewError`].
    pub fn new(frames: u64) -> Result<Self, NewError> {
        if frames > MAX_FRAMES {
            return Err(NewError::TooLarge(frames));
        }
        barrier::set_up();
        let mut starts = [0; MAX_LEVELS + 1];
        let (mut levels, mut total) = (0, 0);
        let mut words = frames.div_ceil(64) as usize;
        while words > 0 {
            starts[levels] = total;
            total += words;
            levels += 1;
            words = if words == 1 { 0 } else { words.div_ceil(64) };
        }
        starts[levels..].fill(total);
        Ok(Self { words: zeroed(total)?, frames, starts, levels })
    }

    /// The number of frames that the set is for: frame numbers are below it.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Bytes of memory that the set takes when every word was touched.
    pub fn bytes(&self) -> usize {
        self.words.len() * 8 + size_of::<Self>()
    }

    /// Adds a frame. `false`: there is no such frame, and nothing was added.
    ///
    /// Earlier writes of the calling thread are visible to the thread that takes the frame out
    /// afterwards; so write to the page first.
    #[inline]
    pub fn insert(&self, frame: u64) -> bool {
        if frame >= self.frames {
            return false;
        }
        self.set(frame as usize / 64, 1 << (frame % 64));
        true
    }

    /// Adds `len` frames from `first` on. Those past the end are left out.
    pub fn insert_range(&self, first: u64, len: u64) {
        each_mask(first, len, self.frames, |index, mask| self.set(index, mask));
    }

    /// Sets bits of a leaf, and the bits that lead to it.
    #[inline]
    pub(crate) fn set(&self, index: usize, bits: u64) {
        let leaf = &self.words[index];
        if !barrier::light() || leaf.load(Acquire) & bits != bits {
            leaf.fetch_or(bits, AcqRel);
        }
        self.raise(0, index);
    }

    /// Sets the bits that lead to word `index` of `level`.
    #[inline]
    pub(crate) fn raise(&self, level: usize, mut index: usize) {
        for &start in &self.starts[level + 1..self.levels.max(level + 1)] {
            let bit = 1u64 << (index % 64);
            index /= 64;
            let word = &self.words[start + index];
            if word.load(Acquire) & bit == 0 {
                word.fetch_or(bit, AcqRel);
            }
        }
    }

    /// Whether a frame is in the set.
    #[inline]
    pub fn contains(&self, frame: u64) -> bool {
        frame < self.frames && self.leaf(frame as usize / 64) >> (frame % 64) & 1 == 1
    }

    #[inline]
    pub(crate) fn leaf(&self, index: usize) -> u64 {
        self.words[index].load(Acquire)
    }

    /// The number of leaves.
    pub(crate) fn leaves(&self) -> usize {
        self.starts[1].min(self.words.len())
    }

    /// Adds the frames of a bitmap in the layout of `KVM_GET_DIRTY_LOG`: bit `i % 64` of `bitmap[i
    /// / 64]` stands for frame `first + i`. Frames past the end are left out.
    pub fn merge(&self, first: u64, bitmap: &[u64]) {
        if first >= self.frames {
            return;
        }
        let shift = (first % 64) as u32;
        for (i, &word) in bitmap.iter().enumerate().filter(|(_, word)| **word != 0) {
            let at = first + i as u64 * 64;
            self.merge_word(at / 64, word << shift);
            if shift > 0 {
                self.merge_word(at / 64 + 1, word >> (64 - shift));
            }
        }
    }

    /// Adds every frame of `other` that is below this set's size.
    pub fn unite(&self, other: &DirtyTree) {
        other.words_at(0).for_each(|(index, word)| self.merge_word(index as u64, word));
    }

    fn merge_word(&self, index: u64, word: u64) {
        let start = index * 64;
        let bits = word & mask(self.frames.saturating_sub(start).min(64));
        if bits != 0 {
            self.set(index as usize, bits);
        }
    }

    /// Copies the set into a bitmap in the layout of `KVM_GET_DIRTY_LOG`, from frame 0 on, as far
    /// as the bitmap reaches. Words behind the set's end become 0.
    pub fn export(&self, bitmap: &mut [u64]) {
        let (whole, rest) = bitmap.split_at_mut(self.leaves().min(bitmap.len()));
        for (to, from) in whole.iter_mut().zip(self.words.iter()) {
            *to = from.load(Acquire);
        }
        rest.fill(0);
    }

    /// The first leaf at or after `index` that is not empty.
    pub(crate) fn next_leaf(&self, mut index: usize) -> Option<usize> {
        if self.levels == 1 {
            return (index == 0 && self.leaf(0) != 0).then_some(0);
        }
        loop {
            // Up, until a bit leads to a later leaf. `at` counts words of the level below.
            let (mut level, mut at) = (1, index);
            loop {
                if level >= self.levels {
                    return None;
                }
                let words = &self.words[self.starts[level]..self.starts[level + 1]];
                let bits = words.get(at / 64).map_or(0, |w| w.load(Acquire)) & u64::MAX << (at % 64);
                if bits != 0 {
                    at = at / 64 * 64 + bits.trailing_zeros() as usize;
                    break;
                }
                (level, at) = (level + 1, at / 64 + 1);
            }
            // Down to the leaf. A node that is empty after all is skipped.
            loop {
                level -= 1;
                let bits = self.words[self.starts[level] + at].load(Acquire);
                match (bits, level) {
                    (0, _) => break index = (at + 1) << (6 * level),
                    (_, 0) => return Some(at),
                    _ => at = at * 64 + bits.trailing_zeros() as usize,
                }
            }
        }
    }

    /// The first frame at or after `from`.
    pub fn next(&self, from: u64) -> Option<u64> {
        self.iter_from(from).next()
    }

    /// All frames, ascending. A frame that comes or goes meanwhile may be missing.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.iter_from(0)
    }

    /// All frames at or after `from`, ascending.
    pub fn iter_from(&self, from: u64) -> Iter<'_> {
        let index = (from / 64) as usize;
        let word = if from < self.frames { self.leaf(index) & u64::MAX << (from % 64) } else { 0 };
        Iter { tree: self, index, word }
    }

    /// The number of frames in the set.
    pub fn count(&self) -> u64 {
        self.words_at(0).map(|(_, word)| u64::from(word.count_ones())).sum()
    }

    /// Whether no frame is in the set.
    pub fn is_empty(&self) -> bool {
        self.next_leaf(0).is_none()
    }

    /// The leaves that are not empty, from `index` on.
    pub(crate) fn words_at(&self, index: usize) -> impl Iterator<Item = (usize, u64)> + '_ {
        let step = move |from| self.next_leaf(from).map(|index| (index, self.leaf(index)));
        std::iter::successors(step(index), move |&(last, _)| step(last + 1))
    }
}

/// Frames of a [`DirtyTree`], ascending.
pub struct Iter<'a> {
    tree: &'a DirtyTree,
    index: usize,
    word: u64,
}

impl Iterator for Iter<'_> {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        while self.word == 0 {
            self.index = self.tree.next_leaf(self.index + 1)?;
            self.word = self.tree.leaf(self.index);
        }
        let frame = self.index as u64 * 64 + u64::from(self.word.trailing_zeros());
        self.word &= self.word - 1;
        Some(frame)
    }
}

/// The lowest `n` bits, up to 64.
#[inline]
pub(crate) fn mask(n: u64) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

/// Calls `each` with the index of every word of the frames `first..first + len`, and with their
/// bits in it.
pub(crate) fn each_mask(first: u64, len: u64, frames: u64, mut each: impl FnMut(usize, u64)) {
    let end = first.saturating_add(len).min(frames);
    let mut frame = first;
    while frame < end {
        let bit = frame % 64;
        let n = (64 - bit).min(end - frame);
        each(frame as usize / 64, mask(n) << bit);
        frame += n;
    }
}

impl DirtySet for DirtyTree {
    fn frames(&self) -> u64 {
        self.frames()
    }

    fn bytes(&self) -> usize {
        self.bytes()
    }

    fn insert(&self, frame: u64) -> bool {
        self.insert(frame)
    }

    fn contains(&self, frame: u64) -> bool {
        self.contains(frame)
    }

    fn take_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize {
        self.take_frames(within, out)
    }

    fn take_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize {
        self.take_ranges(within, out)
    }
}

impl std::fmt::Debug for DirtyTree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirtyTree").field("frames", &self.frames).field("dirty", &self.count()).finish()
    }
}
