//! The SD tree (Static and Dynamic tree): a lock-free bit trie that finds whether a key is already known.
//!
//! The tree does not copy keys. It stores a [`Handle`] for each, and asks a [`KeySource`] for the bytes behind a
//! handle when it must compare.
//!
//! # How it works
//!
//! It is a PATRICIA trie (Morrison, 1968). A key is read as a row of bits; an inner node stands for the first
//! position at which two groups of keys differ; a leaf stands for one key. Keys `00`, `01`, `0110` and `10`
//! (as bits, for the picture):
//!
//! ```text
//!   root ── position 0 ─┬ 0 ─ position 1 ─┬ 0 ─ leaf 00
//!                       │                 └ 1 ─ position 2 ─┬ 0 ─ leaf 01
//!                       │                                   └ 1 ─ leaf 0110
//!                       └ 1 ─ leaf 10
//! ```
//!
//! A search looks only at the positions that the nodes name, takes the leaf where it ends as a *prediction*, and
//! compares with that one stored key. A long common prefix costs nothing, whatever its length.
//!
//! **A link is one 64-bit word**; it holds the position (inner node) or a fingerprint (leaf) besides the index or
//! the handle, and two marks. **A node is two links**, 16 bytes; leaves need no node, so *n* keys take *n* − 1
//! nodes. Every change of the tree is one compare-and-swap of one link (after Natarajan and Mittal, "Fast
//! Concurrent Lock-Free Binary Search Trees", PPoPP 2014):
//!
//! ```text
//!  insert X beside T          remove L:   1. flag L    2. tag the     3. swing the link
//!                                         (it is gone)    sibling        above; free P
//!    P ── T                     G ── P ─┬ L             P ─┬ L!           G ── S
//!    P ── N ─┬ T                        └ S                └ S#
//!            └ X
//! ```
//!
//! A *flagged* link leads to a leaf that has been removed; a *tagged* link will never change again because its node
//! is on its way out. A marked link cannot be swung, so no insertion is lost. Whoever meets a mark on the way to
//! a change of its own finishes steps 2 and 3 for the other thread; nobody waits. Queries change nothing.
//!
//! A node that was unlinked is used again only after a grace period: three ticks of an epoch clock (module `nodes`).
//!
//! # Keys that change
//!
//! The bytes behind a handle may change or vanish at any time. A leaf carries a 21-bit fingerprint of the key that
//! it was inserted with. An insertion that meets a leaf whose present bytes no longer fit drops that leaf ("stale")
//! and goes on; a query just answers `None`. So a stale key may cost a missed find, never a wrong answer.
//! `docs/sdtree.md` has the proof sketch.

mod bits;
mod nodes;
mod primitive;
mod slab;
mod tree;
mod word;

#[cfg(test)]
mod tests;

pub use bits::MAX_KEY_LEN;
pub use tree::SdTree;

/// The caller's name for a key: any number up to [`Handle::MAX`] (40 bits).
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Handle(pub u64);

impl Handle {
    /// The greatest handle that a tree can store: 2⁴⁰ − 1.
    pub const MAX: Handle = Handle(word::MAX_PAYLOAD);
}

/// Where the keys live.
///
/// A handle should have its key before it is given to [`SdTree::insert`], and until it was removed. What a thread wrote
/// before it inserted a handle is visible to whoever the tree asks for that handle. Calls that were under way when
/// a handle was removed may still ask for it.
///
/// An answer of `None`, or of other bytes than at insertion, is allowed at any time: such a key may cost a missed find,
/// and an insertion that meets it may drop it from the tree; never a wrong answer, a panic or an endless loop.
pub trait KeySource {
    /// Calls `f` once with the bytes behind `handle`, or with `None` if they cannot be had.
    ///
    /// The bytes must hold still while `f` runs. The tree's memory is not reclaimed meanwhile, so a slow source
    /// delays reclamation, but no other thread's operation.
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R;
}

/// What [`SdTree::insert`] did.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Insert {
    /// The handle is in the tree now.
    Inserted,
    /// The key was there already, under this handle; nothing changed. The bytes were equal when they were compared.
    Exists(Handle),
}

/// Figures of a tree, from [`SdTree::stats`]. Exact while no other thread changes the tree.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Keys in the tree.
    pub keys: u64,
    /// Inner nodes that the tree needs for them.
    pub nodes_live: u64,
    /// Nodes that are free, or wait for the end of their grace period.
    pub nodes_free: u64,
    /// Bytes of memory in use: every node that was ever handed out, and the tree's own fixed part.
    pub bytes: u64,
    /// Bytes of address space allocated for nodes. What lies beyond `bytes` was never touched.
    pub bytes_reserved: u64,
    /// Stale keys that insertions have dropped, since the tree was made.
    pub stale_dropped: u64,
    /// Ticks of the epoch clock that paces the reuse of nodes, since the tree was made.
    pub ticks: u64,
}
