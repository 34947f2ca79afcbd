//! The SD tree (Static and Dynamic tree): a lock-free hash trie that finds out whether a key is
//! known already.
//!
//! The tree does not copy keys. It stores a [`Handle`] for each, and asks a [`KeySource`] for the
//! bytes behind a handle when it must compare.
//!
//! # How it works
//!
//! A key has a *head*: 48 bits, mixed from a few of its words (module `key`). The first bits of the
//! head choose a slot of the *directory*, the static upper tree. A PATRICIA trie (Morrison, 1968)
//! begins in each slot: the dynamic lower tree, usually of no, one or two keys. An inner node
//! stands for the first position at which two groups of keys differ, a leaf for one key. An example
//! with heads that begin `00`, `0100`, `0101`, `0111` and `10`, and a directory for one bit:
//!
//! ```text
//!   directory   0 ── position 1 ─┬ 0 ─ leaf 00
//!                                └ 1 ─ position 2 ─┬ 0 ─ position 3 ─┬ 0 ─ leaf 0100
//!                                                  │                 └ 1 ─ leaf 0101
//!                                                  └ 1 ─ leaf 0111
//!               1 ── leaf 10
//! ```
//!
//! A search looks only at the positions that the nodes name. The leaf where it ends is a
//! *prediction*, which the search compares with its key. Heads decide where keys part, so the trie
//! is balanced whatever the keys look like, and a long common prefix costs nothing. Keys with equal
//! heads branch in a keyed hash of all their bytes, so that none can be made to form a comb.
//!
//! [`SdTree`] is therefore a hash trie, and knows no order. [`OrderedTree`] is the same tree with
//! keys as they are in place of heads; it has ranges, prefixes, and iteration in order.
//!
//! **A link is one 64-bit word**; it holds the position (inner node) or a fingerprint (leaf)
//! besides the address or the handle, and two marks. **A node is two links**, 16 bytes; leaves need
//! no node. Every change of the tree is one compare-and-swap of one link (after Natarajan and
//! Mittal, "Fast Concurrent Lock-Free Binary Search Trees", PPoPP 2014):
//!
//! ```text
//!  insert X beside T          remove L:   1. flag L    2. tag the     3. swing the link
//!                                         (it is gone)    sibling        above; free P
//!    P ── T                     G ── P ─┬ L             P ─┬ L!           G ── S
//!    P ── N ─┬ T                        └ S                └ S#
//!            └ X
//! ```
//!
//! A *flagged* link leads to a removed leaf. A *tagged* link never changes again, because its node
//! is being unlinked. A marked link cannot be swung, so no insertion is lost. A thread that meets a
//! mark on the way to its own change finishes steps 2 and 3 for the other thread; no thread waits.
//! Queries change nothing.
//!
//! When there are too many or too few keys for the directory, one of another size takes its place.
//! The operations that change the tree move it, a few slots at a time (module `resize`). Memory is
//! used again, or given back to the system, only after a grace period: three ticks of an epoch
//! clock (module `epoch`).
//!
//! # Keys that change
//!
//! The bytes behind a handle may change or vanish at any time. A leaf carries a 20-bit fingerprint
//! of the key that it was inserted with, a piece of its head. An insertion may meet a leaf whose
//! present bytes no longer fit. It drops that *stale* leaf and goes on; a query just answers
//! `None`. A stale key may therefore cost a missed find, never a wrong answer.
//! `docs/design/sdtree.md` has the proof sketch.

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod batch;
#[cfg(any(test, fuzzing, feature = "check"))]
mod check;
mod directory;
mod entry;
mod epoch;
mod key;
mod memory;
mod ordered;
mod pool;
mod prefetch;
mod primitive;
mod resize;
mod tree;
mod word;

#[cfg(test)]
mod tests;

pub use entry::Entry;
pub use key::MAX_KEY_LEN;
pub use ordered::{OrderedTree, Range};
pub use prefetch::prefetch;
pub use tree::SdTree;
pub use tree::iter::Iter;

/// The number by which the user of the tree names a key: up to [`Handle::MAX`] (40 bits).
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Handle(pub u64);

impl Handle {
    /// The greatest handle that a tree can store: 2⁴⁰ − 1.
    pub const MAX: Handle = Handle(word::MAX_HANDLE);
}

/// Where the keys live.
///
/// A handle should have its key before it is given to [`SdTree::insert`], and until it was removed.
/// Writes of a thread before it inserted a handle are visible to every call of the source for that
/// handle. Calls that ran when a handle was removed may still ask for it.
///
/// The source may answer `None`, or with other bytes than at insertion, at any time. Such a key may
/// cost a missed find, and an insertion that meets it may drop it from the tree. It never causes a
/// wrong answer, a panic or an endless loop.
pub trait KeySource {
    /// Calls `f` once with the bytes behind `handle`, or with `None` if they cannot be had.
    ///
    /// The bytes must not change while `f` runs. The tree's memory is not reclaimed meanwhile, so a
    /// slow source delays reclamation, but no other thread's operation.
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R;

    /// The key will probably be asked for soon: a hint, from calls that look up many keys at once.
    /// A source in memory may tell the processor to fetch the key's first cache lines; by
    /// default nothing is done.
    fn prefetch(&self, handle: Handle) {
        let _ = handle;
    }
}

/// What [`SdTree::insert`] did.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Insert {
    /// The handle is in the tree now.
    Inserted,
    /// The key was there already, under this handle; nothing changed. The bytes were equal when
    /// they were compared.
    Exists(Handle),
}

/// The cost of a look-up, from [`SdTree::examine`].
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Examined {
    /// Inner nodes on the way.
    pub nodes: u64,
    /// Bits of the key that were looked at: for its head, on the way, and in the comparison. A bit
    /// that is looked at twice counts twice.
    pub key_bits: u64,
}

/// Figures of a tree, from [`SdTree::stats`]. Exact while no other thread changes the tree.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Keys in the tree.
    pub keys: u64,
    /// Inner nodes in memory: in use, free, or waiting for the end of their grace period.
    pub nodes: u64,
    /// log₂ of the number of slots of the directory.
    pub directory_bits: u32,
    /// Bytes of memory in use: every node that was ever handed out, directories, and the tree's own
    /// fixed part.
    pub bytes: u64,
    /// Bytes of address space. The part beyond `bytes` was never touched, except for the rest of a
    /// huge page.
    pub bytes_reserved: u64,
    /// Stale keys that insertions have dropped, since the tree was made.
    pub stale_dropped: u64,
    /// Ticks of the epoch clock that paces the reuse of memory, since the tree was made.
    pub ticks: u64,
    /// How often the tree has grown or shrunk.
    pub resizes: u64,
}
