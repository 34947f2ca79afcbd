//! Harvesting a tree: top down, into a buffer, with or without clearing.
//!
//! A node that lies in the range as a whole is read, or taken, as one word; below it no bounds are
//! checked. Of a node at an edge of the range, the bits of children inside are taken. The bits of
//! children that are only partly inside stay.
//!
//! The processor cannot predict the number of bits in a word, and each wrong prediction costs as
//! much as ten right steps. Therefore the nodes just above the leaves first list the leaves that
//! they lead to, and one long loop visits these. The loop also knows early enough which leaves to
//! prefetch. If all 64 leaves of a node have frames, a plain loop visits them, as over a bitmap.

use std::ops::Range;

use crate::barrier;
use crate::primitive::AtomicU64;
use crate::primitive::Ordering::{AcqRel, Acquire, Relaxed};
use crate::sink::{Frames, Nowhere, Ranges, Sink, positions};
use crate::tree::{DirtyTree, mask};
use crate::words::prefetch;

/// The frame at which the room ended.
struct Full(u64);

/// How words are read. `LOOK`: they stay; `TAKE`: they are taken while threads insert; `DRAIN`:
/// they are taken by a thread that owns the tree alone.
const LOOK: u8 = 0;
const TAKE: u8 = 1;
const DRAIN: u8 = 2;

/// Leaves that are visited in one loop: as many as one node has.
const BATCH: usize = 64;
/// Leaves between the visited one and the one that is prefetched: about as long as memory takes to
/// answer.
const AHEAD: usize = 8;

/// A harvest under way. The sink is passed from call to call: the compiler then knows that nothing
/// else refers to it.
struct Walk<'a> {
    tree: &'a DirtyTree,
    /// Leaves to visit, ascending. Fewer than `BATCH` wait when a node adds its own. Those behind
    /// the waiting ones are only prefetched.
    leaves: [usize; BATCH + 64 + AHEAD],
    waiting: usize,
}

impl DirtyTree {
    /// Writes the frames of the set that lie in `within` to `out`, ascending. Returns their number.
    /// `within` becomes the rest that was not searched: empty, unless `out` was too small. The
    /// content of `out` behind the frames is undefined.
    pub fn harvest_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize {
        let mut sink = Frames { out, filled: 0 };
        self.harvest::<LOOK, _>(within, &mut sink);
        sink.filled
    }

    /// [`DirtyTree::harvest_frames`], as ranges.
    pub fn harvest_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize {
        let mut sink = Ranges { out, filled: 0 };
        self.harvest::<LOOK, _>(within, &mut sink);
        sink.filled
    }

    /// Harvests and clears: takes frames out of the set; only one harvest gets each of them. The
    /// writes of threads before they inserted such a frame are visible now. See
    /// [`DirtyTree::harvest_frames`] for the arguments.
    pub fn take_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize {
        let mut sink = Frames { out, filled: 0 };
        self.harvest::<TAKE, _>(within, &mut sink);
        if sink.filled > 0 {
            barrier::heavy();
        }
        sink.filled
    }

    /// [`DirtyTree::take_frames`], as ranges.
    pub fn take_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize {
        let mut sink = Ranges { out, filled: 0 };
        self.harvest::<TAKE, _>(within, &mut sink);
        if sink.filled > 0 {
            barrier::heavy();
        }
        sink.filled
    }

    /// Harvests and clears while no thread inserts: for a stopped guest. Without atomic exchanges
    /// it takes half the time of [`DirtyTree::take_frames`].
    pub fn drain_frames(&mut self, within: &mut Range<u64>, out: &mut [u64]) -> usize {
        let mut sink = Frames { out, filled: 0 };
        self.harvest::<DRAIN, _>(within, &mut sink);
        sink.filled
    }

    /// Empties the set. It costs as much as a harvest: next to nothing for clean memory.
    pub fn clear(&mut self) {
        self.harvest::<DRAIN, _>(&mut (0..u64::MAX), &mut Nowhere);
    }

    fn harvest<const HOW: u8, S: Sink>(&self, within: &mut Range<u64>, sink: &mut S) {
        let end = within.end.min(self.frames());
        if within.start < end {
            // The last word, and every node above it, ends with the set.
            let bounds = within.start..if end == self.frames() { u64::MAX } else { end };
            let mut walk = Walk { tree: self, leaves: [0; BATCH + 64 + AHEAD], waiting: 0 };
            let top = self.levels - 1;
            let done = if bounds == (0..u64::MAX) {
                walk.whole::<HOW, S>(top, 0, sink)
            } else {
                walk.part::<HOW, S>(top, 0, &bounds, sink)
            };
            if let Err(Full(at)) = done.and_then(|()| walk.visit_waiting::<HOW, S>(sink)) {
                within.start = at;
                return;
            }
        }
        within.start = within.end;
    }

    /// Visits all leaves of a node. A separate function, so that the loop has all registers.
    #[inline(never)]
    fn visit_64<const HOW: u8, S: Sink>(&self, node: usize, sink: &mut S) -> Result<(), Full> {
        let first = node * 64;
        for (index, word) in (first..).zip(&self.words[first..first + 64]) {
            visit::<HOW, S>(word, index, u64::MAX, sink)?;
        }
        Ok(())
    }
}

/// Visits a leaf. Frames without room are put back; the bits that lead there are put back by the
/// callers that took them.
#[inline(always)]
fn visit<const HOW: u8, S: Sink>(word: &AtomicU64, index: usize, wanted: u64, sink: &mut S) -> Result<(), Full> {
    let bits = read::<HOW>(word, wanted) & wanted;
    let base = index as u64 * 64;
    let left = sink.put(base, bits);
    if left == 0 {
        return Ok(());
    }
    put_back::<HOW>(word, left);
    Err(Full(base + u64::from(left.trailing_zeros())))
}

/// A word's bits. If the harvest clears, it removes those of `cleared` from the word.
#[inline(always)]
fn read<const HOW: u8>(word: &AtomicU64, cleared: u64) -> u64 {
    match (HOW, cleared) {
        (LOOK, _) => word.load(Acquire),
        (TAKE, u64::MAX) => word.swap(0, AcqRel),
        (TAKE, _) => word.fetch_and(!cleared, AcqRel),
        _ => {
            let bits = word.load(Relaxed);
            word.store(bits & !cleared, Relaxed);
            bits
        }
    }
}

/// Sets cleared bits again.
#[inline(always)]
fn put_back<const HOW: u8>(word: &AtomicU64, bits: u64) {
    match HOW {
        LOOK => {}
        TAKE => drop(word.fetch_or(bits, AcqRel)),
        _ => word.store(word.load(Relaxed) | bits, Relaxed),
    }
}

impl Walk<'_> {
    /// Visits a node that lies in the range as a whole.
    fn whole<const HOW: u8, S: Sink>(&mut self, level: usize, index: usize, sink: &mut S) -> Result<(), Full> {
        let tree = self.tree;
        if level == 0 {
            self.visit_waiting::<HOW, S>(sink)?;
            return visit::<HOW, S>(&tree.words[index], index, u64::MAX, sink);
        }
        let word = &tree.words[tree.starts[level] + index];
        let mut rest = read::<HOW>(word, u64::MAX);
        let done = if level > 1 {
            self.children::<HOW, S>(level, index, &mut rest, sink)
        } else if rest == u64::MAX {
            let done = self.visit_waiting::<HOW, S>(sink).and_then(|()| tree.visit_64::<HOW, S>(index, sink));
            if let Err(Full(at)) = done {
                // The room ended in this node or before it.
                rest <<= (at / 64).saturating_sub(index as u64 * 64);
            }
            done
        } else {
            // From here on the leaves wait, or the bits that lead to them have been set again.
            let room = self.leaves[self.waiting..].first_chunk_mut().expect("room for a node's leaves");
            self.waiting += positions(rest, index * 64, room);
            return if self.waiting >= BATCH { self.visit_waiting::<HOW, S>(sink) } else { Ok(()) };
        };
        if done.is_err() {
            put_back::<HOW>(word, rest);
        }
        done
    }

    /// Visits the nodes below a node. `rest` loses the bits of visited nodes.
    fn children<const HOW: u8, S: Sink>(
        &mut self,
        level: usize,
        index: usize,
        rest: &mut u64,
        sink: &mut S,
    ) -> Result<(), Full> {
        while *rest != 0 {
            self.whole::<HOW, S>(level - 1, index * 64 + rest.trailing_zeros() as usize, sink)?;
            *rest &= *rest - 1;
        }
        Ok(())
    }

    /// Visits the leaves that wait. If the room ends, the bits that lead to the others are set
    /// again.
    fn visit_waiting<const HOW: u8, S: Sink>(&mut self, sink: &mut S) -> Result<(), Full> {
        let waiting = std::mem::take(&mut self.waiting);
        for at in 0..waiting {
            prefetch(&self.tree.words, self.leaves[at + AHEAD]);
            let index = self.leaves[at];
            let done = visit::<HOW, S>(&self.tree.words[index], index, u64::MAX, sink);
            if done.is_err() {
                if HOW != LOOK {
                    self.leaves[at..waiting].iter().for_each(|&leaf| self.tree.raise(0, leaf));
                }
                return done;
            }
        }
        Ok(())
    }

    /// Visits a node that lies in the range only partly.
    fn part<const HOW: u8, S: Sink>(
        &mut self,
        level: usize,
        index: usize,
        bounds: &Range<u64>,
        sink: &mut S,
    ) -> Result<(), Full> {
        // A bit stands for 2^shift frames. Bounds count from the node's first.
        let shift = 6 * level as u32;
        let first = (index as u64) << (shift + 6);
        let (start, end) = (bounds.start.saturating_sub(first), bounds.end - first);
        let touched = mask(end.div_ceil(1 << shift)) & !mask(start >> shift);
        if level == 0 {
            self.visit_waiting::<HOW, S>(sink)?;
            return visit::<HOW, S>(&self.tree.words[index], index, touched, sink);
        }
        let inside = mask(end >> shift) & !mask(start.div_ceil(1 << shift));
        let word = &self.tree.words[self.tree.starts[level] + index];
        let mut rest = read::<HOW>(word, inside) & touched;
        while rest != 0 {
            let bit = rest.trailing_zeros();
            let child = index * 64 + bit as usize;
            let done = if inside >> bit & 1 == 1 {
                self.whole::<HOW, S>(level - 1, child, sink)
            } else {
                self.part::<HOW, S>(level - 1, child, bounds, sink)
            };
            if done.is_err() {
                put_back::<HOW>(word, rest);
                return done;
            }
            rest &= rest - 1;
        }
        Ok(())
    }
}
