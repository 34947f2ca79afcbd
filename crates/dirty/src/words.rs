//! Zeroed atomic words that take no memory until they are touched.
//!
//! Small sets come from the heap. Large ones are mapped without reserving memory (`MAP_NORESERVE`):
//! a set of 2^40 frames spans 130 GiB of addresses, of which a sparse set touches little.

#![allow(unsafe_code)] // Zeroed memory is used as atomic words without writing them one by one.

use std::ops::{Deref, DerefMut};

use crate::primitive::AtomicU64;

/// Requests the cache line of a word that is needed soon. Any index is allowed.
#[inline]
pub(crate) fn prefetch(words: &[AtomicU64], index: usize) {
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    if let Some(word) = words.get(index) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the address is that of a word of the slice; a prefetch changes nothing but the
        // caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom))))]
    let _ = (words, index);
}

/// The number of words from which on memory is mapped: 32 KiB, a GiB of pages. The heap would fill
/// them with zeros.
#[cfg(not(loom))]
const MAPPED_FROM: usize = 1 << 12;

#[cfg(not(loom))]
pub(crate) struct Words {
    start: std::ptr::NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the value owns its words, as a boxed slice of atomics does.
#[cfg(not(loom))]
unsafe impl Send for Words {}
// SAFETY: shared access gives out `&[AtomicU64]` only, which is `Sync`.
#[cfg(not(loom))]
unsafe impl Sync for Words {}

#[cfg(not(loom))]
impl Words {
    /// `len` words, all 0. `None`: there is no memory for them.
    pub(crate) fn new(len: usize) -> Option<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        use std::ptr::NonNull;

        if len == 0 {
            return Some(Self { start: NonNull::dangling(), len });
        }
        let start = if len >= MAPPED_FROM {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let bytes = len.checked_mul(8)?;
            // SAFETY: a mapping that is not fixed replaces nothing.
            let map = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) };
            map.ok()?.cast()
        } else {
            // SAFETY: `len` is not 0 here, so the layout is not empty.
            unsafe { std::alloc::alloc_zeroed(layout(len)) }.cast()
        };
        Some(Self { start: NonNull::new(start)?, len })
    }
}

#[cfg(not(loom))]
fn layout(len: usize) -> std::alloc::Layout {
    // A cache line's alignment keeps neighbouring words together. 32 KiB are far below the limit
    // of a layout.
    std::alloc::Layout::from_size_align(len * 8, 64).expect("at most 32 KiB, aligned to a power of two")
}

#[cfg(not(loom))]
impl Drop for Words {
    fn drop(&mut self) {
        if self.len >= MAPPED_FROM {
            // SAFETY: the range is the whole mapping that `new` made, and no reference to it
            // outlives this value.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len * 8) };
        } else if self.len > 0 {
            // SAFETY: `new` allocated the memory with this layout, and no reference to it outlives
            // this value.
            unsafe { std::alloc::dealloc(self.start.as_ptr().cast(), layout(self.len)) }
        }
    }
}

#[cfg(not(loom))]
impl Deref for Words {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `start` leads to `len` words, aligned, which were zeroed (a valid AtomicU64),
        // belong to this value and live as long as it; or `len` is 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

#[cfg(not(loom))]
impl DerefMut for Words {
    #[inline]
    fn deref_mut(&mut self) -> &mut [AtomicU64] {
        // SAFETY: `start` leads to `len` words, aligned, which were zeroed (a valid AtomicU64),
        // belong to this value and live as long as it; or `len` is 0. `&mut self`: no other
        // reference to them exists.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(loom)]
pub(crate) struct Words(Box<[AtomicU64]>);

#[cfg(loom)]
impl Words {
    pub(crate) fn new(len: usize) -> Option<Self> {
        Some(Self((0..len).map(|_| AtomicU64::new(0)).collect()))
    }
}

#[cfg(loom)]
impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        &self.0
    }
}

#[cfg(loom)]
impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut [AtomicU64] {
        &mut self.0
    }
}
