//! The sets that `dirty` measures: ours, and what else one could take.
//!
//! | subject | structure | threads insert at once | allocates while inserting |
//! |---|---|---|---|
//! | `pageone` | `dirty::DirtyTree` | yes | no |
//! | `bitmap` | `dirty::Bitmap`: 64 frames a step, the same loop for bits as the tree's | yes | no |
//! | `list` | `dirty::DirtyList`: a bounded ring | yes | no |
//! | `radix-8` | the published tree, rebuilt from its description | yes | no |

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use anyhow::Result;
use dirty::{Bitmap, DirtyList, DirtySet, DirtyTree};

/// A set under measurement. Whole batches, so that no call through a pointer is measured.
pub(crate) trait Subject {
    /// Its name.
    fn name(&self) -> &'static str;
    /// Inserts every frame.
    fn insert(&mut self, frames: &[u64]);
    /// Writes all frames down.
    fn look(&mut self, out: &mut [u64]) -> usize;
    /// Writes all frames down and empties the set.
    fn take(&mut self, out: &mut [u64]) -> usize;
    /// The same for exclusive access, where the set has a faster way for it.
    fn drain(&mut self, _: &mut [u64]) -> Option<usize> {
        None
    }
    /// Memory that it takes now.
    fn bytes(&self) -> usize;
    /// Whether it inserts in constant time without allocating, and can tell which frames it holds.
    fn is_peer(&self) -> bool;
}

/// Their names, in the order of the table.
pub(crate) const NAMES: [&str; 4] = ["pageone", "bitmap", "radix-8", "list"];

/// All of them, for frames below `frames`.
pub(crate) fn all(frames: u64) -> Result<Vec<Box<dyn Subject>>> {
    Ok(vec![
        Box::new(Ours::tree(DirtyTree::new(frames)?)),
        Box::new(Ours::bitmap(Bitmap::new(frames)?)),
        Box::new(Radix8::new(frames)),
        Box::new(Ours::list(DirtyList::new(frames, frames as usize)?)),
    ])
}

/// A set of the crate `dirty`: they differ in how all frames are harvested.
struct Ours<S> {
    name: &'static str,
    set: S,
    harvest: fn(&S, &mut [u64]) -> usize,
    drain: Option<fn(&mut S, &mut [u64]) -> usize>,
    is_peer: bool,
}

impl Ours<DirtyTree> {
    fn tree(set: DirtyTree) -> Self {
        let harvest = |set: &DirtyTree, out: &mut [u64]| set.harvest_frames(&mut (0..set.frames()), out);
        let drain = |set: &mut DirtyTree, out: &mut [u64]| set.drain_frames(&mut (0..set.frames()), out);
        Self { name: "pageone", set, harvest, drain: Some(drain), is_peer: true }
    }
}

impl Ours<Bitmap> {
    fn bitmap(set: Bitmap) -> Self {
        let harvest = |set: &Bitmap, out: &mut [u64]| set.harvest_frames(&mut (0..set.frames()), out);
        Self { name: "bitmap", set, harvest, drain: None, is_peer: true }
    }
}

impl Ours<DirtyList> {
    fn list(set: DirtyList) -> Self {
        Self { name: "list", set, harvest: |set, out| set.harvest_frames(out), drain: None, is_peer: false }
    }
}

impl<S: DirtySet> Subject for Ours<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn insert(&mut self, frames: &[u64]) {
        for &frame in frames {
            self.set.insert(frame);
        }
    }

    fn look(&mut self, out: &mut [u64]) -> usize {
        (self.harvest)(&self.set, out)
    }

    fn take(&mut self, out: &mut [u64]) -> usize {
        self.set.take_frames(&mut (0..self.set.frames()), out)
    }

    fn drain(&mut self, out: &mut [u64]) -> Option<usize> {
        self.drain.map(|drain| drain(&mut self.set, out))
    }

    fn bytes(&self) -> usize {
        self.set.bytes()
    }

    fn is_peer(&self) -> bool {
        self.is_peer
    }
}

/// "Dirty memory tracking for performant checkpointing" (kvm, 2016-05-05): radix 8, preallocated,
/// each level a bitmap of the one below, the lowest the dirty bitmap. A node is a byte. Insertion
/// goes up until a bit is set already.
struct Radix8 {
    levels: Vec<Vec<AtomicU8>>,
}

impl Radix8 {
    fn new(frames: u64) -> Self {
        let mut levels = Vec::new();
        let mut bytes = frames.div_ceil(8) as usize;
        loop {
            levels.push((0..bytes).map(|_| AtomicU8::new(0)).collect());
            if bytes == 1 {
                return Self { levels };
            }
            bytes = bytes.div_ceil(8);
        }
    }

    fn walk<const TAKE: bool>(&self, level: usize, index: usize, out: &mut [u64], filled: &mut usize) {
        let byte = &self.levels[level][index];
        let mut bits = if TAKE { byte.swap(0, AcqRel) } else { byte.load(Acquire) };
        while bits != 0 {
            let child = index * 8 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            if level == 0 {
                out[*filled] = child as u64;
                *filled += 1;
            } else {
                self.walk::<TAKE>(level - 1, child, out, filled);
            }
        }
    }
}

impl Subject for Radix8 {
    fn name(&self) -> &'static str {
        "radix-8"
    }

    fn insert(&mut self, frames: &[u64]) {
        for &frame in frames {
            let mut at = frame as usize;
            for level in &self.levels {
                let bit = 1 << (at % 8);
                at /= 8;
                if level[at].load(Acquire) & bit != 0 {
                    break;
                }
                level[at].fetch_or(bit, AcqRel);
            }
        }
    }

    fn look(&mut self, out: &mut [u64]) -> usize {
        let mut filled = 0;
        self.walk::<false>(self.levels.len() - 1, 0, out, &mut filled);
        filled
    }

    fn take(&mut self, out: &mut [u64]) -> usize {
        let mut filled = 0;
        self.walk::<true>(self.levels.len() - 1, 0, out, &mut filled);
        filled
    }

    fn bytes(&self) -> usize {
        self.levels.iter().map(Vec::len).sum()
    }

    fn is_peer(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_them_are_sets() {
        let frames = [3u64, 64, 4096, 99_999, 12_345, 0];
        let mut sorted = frames;
        assert!(all(100).unwrap().iter().map(|subject| subject.name()).eq(NAMES));
        sorted.sort_unstable();
        for mut subject in all(100_000).unwrap() {
            for _ in 0..2 {
                subject.insert(&frames);
                let mut out = vec![0; 100];
                let n = subject.look(&mut out);
                out[..n].sort_unstable();
                assert_eq!(out[..n], sorted, "{}", subject.name());
                let n = subject.take(&mut out);
                out[..n].sort_unstable();
                assert_eq!(out[..n], sorted, "{}", subject.name());
                assert_eq!(subject.take(&mut out), 0, "{}", subject.name());
            }
        }
    }
}
