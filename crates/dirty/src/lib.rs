//! Sets of dirty frames: what was written since the last look.
//!
//! [`DirtyTree`] is the set to use: a packed radix tree over a bitmap. One word is one node, 64
//! children to a node, all levels in one piece of memory that never moves; it costs 1.6 % more than
//! the bitmap alone.
//!
//! ```text
//!   level 2      [ . . 1 . . . ]                         one word: which words of level 1 are not zero
//!                      │
//!   level 1      [ 1 . . . . 1 . . ]  [ ... ]            one word for 64 leaves
//!                  │         └──────────┐
//!   leaves       [ ..1..... ] [ 0 ] … [ 1......1 ]       the bitmap, as KVM_GET_DIRTY_LOG lays it out
//! ```
//!
//! - *Insertion*, from any number of threads: the leaf's bit is set, then the bits above it that
//!   are not set. For a frame that is dirty already this is one load a level.
//! - *Harvest*: from the top down, only to leaves that are not empty. With clearing
//!   ([`DirtyTree::take_frames`]) while threads go on inserting: nothing is lost, and no insertion
//!   is reported twice. `tree.rs` has the argument.
//! - Nothing is allocated after construction, and nobody waits for anybody.
//!
//! [`Bitmap`] and [`DirtyList`] do the same at other prices: the bitmap's harvest looks at every
//! word; the list is bounded, and keeps a frame as often as it was inserted. [`DirtySet`] is what
//! the three have in common.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "loom builds model the lock-free steps only"))]

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

/// A set of frame numbers that any number of threads insert into while another one takes out.
pub trait DirtySet: Send + Sync {
    /// How many frame numbers there can be.
    fn frames(&self) -> u64;

    /// Bytes of memory that the set takes when all of it has been touched.
    fn bytes(&self) -> usize;

    /// Adds a frame. `false`: it is not in the set, because there is no such frame, or no room (in
    /// a list).
    ///
    /// What the calling thread wrote before is visible to whoever takes the frame out afterwards;
    /// so write to the page first.
    fn insert(&self, frame: u64) -> bool;

    /// Whether a frame is in the set.
    fn contains(&self, frame: u64) -> bool;

    /// Takes frames that lie in `within` out of the set, writes them to `out`, and returns how
    /// many. `within` becomes empty when all have been found; otherwise there was no room for
    /// more, and the next call goes on. What lies in `out` behind those frames is undefined.
    fn take_frames(&self, within: &mut Range<u64>, out: &mut [u64]) -> usize;

    /// The same, as ranges of frames.
    fn take_ranges(&self, within: &mut Range<u64>, out: &mut [Range<u64>]) -> usize;
}
