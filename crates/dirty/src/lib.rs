//! Sets of dirty frames: the pages that were written since the last look.
//!
//! [`DirtyTree`] is the set to use: a packed radix tree over a bitmap. One word is one node with 64
//! children. All levels lie in one piece of memory that never moves and takes 1.6 % more than the
//! bitmap alone.
//!
//! ```text
//!   level 2      [ . . 1 . . . ]                     one word: which words of level 1 are not 0
//!                      │
//!   level 1      [ 1 . . . . 1 . . ]  [ ... ]        one word for 64 leaves
//!                  │         └──────────┐
//!   leaves       [ ..1..... ] [ 0 ] … [ 1......1 ]   the bitmap, as KVM_GET_DIRTY_LOG lays it out
//! ```
//!
//! - *Insertion*, from any number of threads: the leaf's bit is set, then the bits above it that
//!   are not set yet. For a frame that is dirty already this is one load on each level.
//! - *Harvest*: from the top down, only to leaves that are not empty. A harvest may clear the set
//!   ([`DirtyTree::take_frames`]) while threads go on inserting: no frame is lost, and no insertion
//!   is reported twice. `tree.rs` has the argument.
//! - Nothing is allocated after construction, and no thread waits for another.
//!
//! [`Bitmap`] and [`DirtyList`] serve the same purpose at other costs. The bitmap's harvest reads
//! every word. The list is bounded, and keeps a frame as often as it was inserted. [`DirtySet`] is
//! the trait of all three.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "loom builds model the lock-free steps only"))]

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod barrier;
mod bitmap;
mod harvest;
mod list;
#[cfg(not(loom))]
mod owned;
mod primitive;
mod sink;
mod tree;
mod words;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use bitmap::Bitmap;
pub use list::DirtyList;
pub use tree::{DirtyTree, Iter, MAX_FRAMES, NewError};

/// A set of frame numbers. Any number of threads insert while another one takes frames out.
pub trait DirtySet: Send + Sync {
    /// The number of frames that the set is for: frame numbers are below it.
    fn frames(&self) -> u64;

    /// Bytes of memory that the set takes when all of it was touched.
    fn bytes(&self) -> usize;

    /// Adds a frame. `false`: the frame was not added, because there is no such frame or the list
    /// is full.
    ///
    /// Earlier writes of the calling thread are visible to the thread that takes the frame out
    /// afterwards; so write to the page first.
    fn insert(&self, frame: u64) -> bool;

    /// Whether a frame is in the set.
    fn contains(&self, frame: u64) -> bool;

    /// Takes frames that lie in `within` out of the set and writes them to `out`. Returns their
    /// number. `within` becomes empty when all frames were found. Otherwise `out` was full, and the
    /// next call goes on. The content of `out` behind the frames is undefined.
    fn take_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize;

    /// [`DirtySet::take_frames`], as ranges of frames.
    fn take_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize;
}
