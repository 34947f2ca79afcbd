//! Memory for nodes: addressed by index, grown without moving anything.
//!
//! Nodes lie in buckets, each twice as large as the one before; a table of bucket addresses is all that there is
//! to look up. A bucket is allocated zeroed, which for a large one costs nothing until its pages are touched. Buckets
//! live as long as the slab, so a reference to a node stays good whatever happens to the tree.
#![allow(unsafe_code)] // nodes are reached through bucket addresses in atomics

use crate::primitive::{AtomicPtr, AtomicU64, Ordering};
use crate::word::MAX_PAYLOAD;
use std::ptr;

/// Two links. Aligned to its size: a node never straddles cache lines.
#[repr(align(16))]
pub(crate) struct Node(pub(crate) [AtomicU64; 2]);

#[cfg(not(loom))]
const _: () = assert!(size_of::<Node>() == 16 && align_of::<Node>() == 16);

/// log₂ of the number of nodes in the first bucket.
const FIRST_BITS: u32 = if cfg!(loom) { 1 } else { 12 };
/// Buckets for every index that a link can hold (a few under loom, which pays for each atomic).
const BUCKETS: usize = if cfg!(loom) { 4 } else { (MAX_PAYLOAD.ilog2() + 1 - FIRST_BITS + 1) as usize };

/// The buckets.
pub(crate) struct Slab {
    buckets: [AtomicPtr<Node>; BUCKETS],
}

impl Slab {
    pub(crate) fn new() -> Self {
        Slab { buckets: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())) }
    }

    /// Bucket and offset of a node. Bucket `b` holds 2^(FIRST_BITS + b) nodes.
    #[inline]
    fn place(index: u64) -> (usize, usize) {
        let n = index + (1 << FIRST_BITS);
        let log = n.ilog2();
        ((log - FIRST_BITS) as usize, (n - (1 << log)) as usize)
    }

    fn bucket_len(bucket: usize) -> usize {
        1 << (FIRST_BITS as usize + bucket)
    }

    /// The node `index`, in whose bucket [`Slab::ensure`] has returned before.
    #[inline]
    pub(crate) fn get(&self, index: u64) -> &Node {
        let (bucket, offset) = Self::place(index);
        let start = self.buckets[bucket].load(Ordering::Acquire);
        debug_assert!(!start.is_null());
        // SAFETY: an index is given out only after `ensure` made its bucket, and reaches other threads only through
        // release stores after that, so `start` is the bucket's address: acquired here, never changed, freed by
        // `drop` alone. `offset` is below `bucket_len(bucket)` by construction of `place`. The node is two atomics,
        // so shared references are all that is ever made to it.
        unsafe { &*start.add(offset) }
    }

    /// Makes the bucket of `index` if it is not there yet.
    pub(crate) fn ensure(&self, index: u64) {
        let (bucket, _) = Self::place(index);
        let slot = &self.buckets[bucket];
        if !slot.load(Ordering::Acquire).is_null() {
            return;
        }
        let fresh = memory::allocate(Self::bucket_len(bucket));
        if slot.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: `fresh` comes from `allocate` with this length and nobody else has seen it.
            unsafe { memory::free(fresh, Self::bucket_len(bucket)) };
        }
    }

    /// Bytes allocated for nodes.
    pub(crate) fn bytes_reserved(&self) -> u64 {
        let made = |b: &usize| !self.buckets[*b].load(Ordering::Relaxed).is_null();
        (0..BUCKETS).filter(made).map(|b| (Self::bucket_len(b) * size_of::<Node>()) as u64).sum()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        for (bucket, slot) in self.buckets.iter().enumerate() {
            let start = slot.load(Ordering::Relaxed);
            if !start.is_null() {
                // SAFETY: `ensure` stored it, from `allocate` with this length; `&mut self` says nobody uses it.
                unsafe { memory::free(start, Self::bucket_len(bucket)) };
            }
        }
    }
}

#[cfg(not(loom))]
mod memory {
    use super::Node;
    use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

    fn layout(len: usize) -> Layout {
        match Layout::array::<Node>(len).and_then(|layout| layout.align_to(64)) {
            Ok(layout) => layout,
            Err(_) => unreachable!("a bucket has at most 2^40 nodes of 16 bytes"),
        }
    }

    /// `len` nodes of zeros. Ends the program if there is no memory, as every allocation in Rust does.
    pub(super) fn allocate(len: usize) -> *mut Node {
        let layout = layout(len);
        // SAFETY: `len` is a power of two, so the size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        // All bits zero is a valid `Node`: two atomics of value 0. The layout is at least as aligned as `Node`.
        start.cast()
    }

    /// Gives a bucket back.
    ///
    /// # Safety
    /// `start` comes from [`allocate`] with the same `len`, and is used no more.
    pub(super) unsafe fn free(start: *mut Node, len: usize) {
        // SAFETY: the caller's promise; `layout` is a function of `len` alone.
        unsafe { dealloc(start.cast(), layout(len)) }
    }
}

/// Loom's atomics must be constructed.
#[cfg(loom)]
mod memory {
    use super::{AtomicU64, Node};

    pub(super) fn allocate(len: usize) -> *mut Node {
        let nodes: Box<[Node]> = (0..len).map(|_| Node([AtomicU64::new(0), AtomicU64::new(0)])).collect();
        Box::into_raw(nodes).cast()
    }

    /// # Safety
    /// As above.
    pub(super) unsafe fn free(start: *mut Node, len: usize) {
        // SAFETY: `allocate` made it from a boxed slice of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, len)) });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_are_dense_and_inside_their_buckets() {
        let mut expected = (0, 0);
        for index in 0..100_000 {
            assert_eq!(Slab::place(index), expected, "index {index}");
            expected.1 += 1;
            if expected.1 == Slab::bucket_len(expected.0) {
                expected = (expected.0 + 1, 0);
            }
        }
        let (bucket, offset) = Slab::place(MAX_PAYLOAD);
        assert!(bucket < BUCKETS && offset < Slab::bucket_len(bucket));
    }

    #[test]
    fn nodes_stay_where_they_are() {
        let slab = Slab::new();
        slab.ensure(5);
        slab.get(5).0[1].store(55, Ordering::Relaxed);
        let before: *const Node = slab.get(5);
        slab.ensure(1 << 20);
        assert!(ptr::eq(before, slab.get(5)));
        assert_eq!(slab.get(5).0[1].load(Ordering::Relaxed), 55);
        assert_eq!(slab.get(1 << 20).0[0].load(Ordering::Relaxed), 0);
    }
}
