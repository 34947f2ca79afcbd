//! Zeroed memory from the kernel, for nodes and directories.
//!
//! Pages that were never touched take no memory. Large pieces lie on huge pages where the kernel
//! has some, since every look-up reads random places of them.
#![allow(unsafe_code)] // mmap(2), and slices of its memory.

use std::ops::Deref;

/// Types that can be made by zeroing memory, and freed without a drop.
///
/// # Safety
/// All bytes zero is a valid value of the type, and the type needs no drop.
pub(crate) unsafe trait Zeroable {
    /// The value that is all zeros.
    #[cfg(loom)]
    fn zero() -> Self;
}

// SAFETY: zeroed bytes are an atomic of value 0, and atomics need no drop.
unsafe impl Zeroable for crate::primitive::AtomicU64 {
    #[cfg(loom)]
    fn zero() -> Self {
        Self::new(0)
    }
}

#[cfg(not(loom))]
mod backing {
    use super::Zeroable;
    use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
    use std::alloc::{Layout, handle_alloc_error};
    use std::ptr;

    /// Bytes of a huge page.
    const HUGE: usize = 2 << 20;

    /// Memory for `len` elements, all zeros. Ends the program if there is no memory, as every
    /// allocation in Rust does.
    pub(super) fn allocate<T: Zeroable>(len: usize) -> *mut T {
        const { assert!(align_of::<T>() <= 4096) };
        let Ok(layout) = Layout::array::<T>(len) else { unreachable!("lengths are bounded by the link word") };
        // More than is needed, so that the piece can start at a multiple of a huge page; the excess
        // is given back.
        let slack = if layout.size() >= 2 * HUGE && layout.size().is_multiple_of(HUGE) { HUGE } else { 0 };
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a mapping that is not fixed replaces nothing.
        let mapped = unsafe {
            mmap_anonymous(ptr::null_mut(), layout.size() + slack, ProtFlags::READ | ProtFlags::WRITE, flags)
        };
        let Ok(mapped) = mapped else { handle_alloc_error(layout) };
        if slack == 0 {
            return mapped.cast();
        }
        let start = mapped.map_addr(|address| address.next_multiple_of(HUGE));
        let before = start.addr() - mapped.addr();
        // SAFETY: all three pieces are parts of the mapping just made, which no other code knows. A
        // failure leaves a little address space in use, or small pages.
        unsafe {
            if before > 0 {
                let _ = munmap(mapped, before);
            }
            let _ = munmap(start.byte_add(layout.size()), slack - before);
            let _ = madvise(start, layout.size(), Advice::LinuxHugepage);
        }
        start.cast()
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// `start` comes from [`allocate`] with the same `len`, and no code uses the memory any more.
    pub(super) unsafe fn free<T: Zeroable>(start: *mut T, len: usize) {
        let (start, size) = (start.cast(), len * size_of::<T>());
        if cfg!(test) {
            // A late access must fail, and must not meet memory that was mapped here since.
            // SAFETY: by the contract the range is a mapping of `allocate` that is not used any
            // more.
            let kept = unsafe {
                madvise(start, size, Advice::LinuxDontNeed).and(mprotect(start, size, MprotectFlags::empty()))
            };
            if kept.is_ok() {
                return;
            } // else there are too many mappings
        }
        // SAFETY: by the contract the range is a mapping of `allocate` that is not used any more.
        let _ = unsafe { munmap(start, size) };
    }
}

/// Loom's atomics must be constructed.
#[cfg(loom)]
mod backing {
    use super::Zeroable;

    pub(super) fn allocate<T: Zeroable>(len: usize) -> *mut T {
        let all: Box<[T]> = (0..len).map(|_| T::zero()).collect();
        Box::into_raw(all).cast()
    }

    /// # Safety
    /// `start` comes from [`allocate`] with the same `len`, and no code uses the memory any more.
    pub(super) unsafe fn free<T: Zeroable>(start: *mut T, len: usize) {
        // SAFETY: `allocate` made the pointer from a boxed slice of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, len)) });
    }
}

pub(crate) struct Zeroed<T: Zeroable> {
    start: *mut T,
    len: usize,
}

// SAFETY: it owns its elements, as a boxed slice does.
unsafe impl<T: Zeroable + Send> Send for Zeroed<T> {}
// SAFETY: it gives out shared references to its elements only, as a boxed slice does.
unsafe impl<T: Zeroable + Sync> Sync for Zeroed<T> {}

impl<T: Zeroable> Zeroed<T> {
    pub(crate) fn new(len: usize) -> Self {
        Self { start: backing::allocate(len), len }
    }

    /// The start of the slice, which is not dropped: [`Zeroed::from_raw`] takes it back.
    pub(crate) fn into_raw(self) -> *mut T {
        std::mem::ManuallyDrop::new(self).start
    }

    /// The slice that [`Zeroed::into_raw`] has given up.
    ///
    /// # Safety
    /// `start` comes from [`Zeroed::into_raw`] of a slice of this length, and no other code uses it
    /// from now on.
    pub(crate) unsafe fn from_raw(start: *mut T, len: usize) -> Self {
        Self { start, len }
    }
}

impl<T: Zeroable> Deref for Zeroed<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `allocate` returned memory for `len` elements, aligned to a page, whose zeros are
        // valid values. Only `drop` frees it.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T: Zeroable> Drop for Zeroed<T> {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this length, and no reference to it outlives this
        // value.
        unsafe { backing::free(self.start, self.len) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::primitive::{AtomicU64, Ordering};

    #[test]
    fn zeros_of_all_sizes() {
        for len in [3, 256, 1 << 17, 1 << 19, (1 << 19) + 5] {
            let memory = Zeroed::<AtomicU64>::new(len);
            assert_eq!(memory.len(), len);
            for i in [0, len / 2, len - 1] {
                assert_eq!(memory[i].swap(i as u64 + 1, Ordering::Relaxed), 0);
                assert_eq!(memory[i].load(Ordering::Relaxed), i as u64 + 1);
            }
        }
    }
}
