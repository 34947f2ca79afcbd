//! The agent's own heap.
//!
//! The program's `malloc` must not be used here. It may hold its locks while it calls `madvise`,
//! which waits for the agent's lock; and its memory may itself be a region, so that the agent would
//! wait for the end of its own merge window when it writes to it. This heap takes chunks straight
//! from the kernel: one free list for each power of two, larger pieces are mappings of their own.

#![allow(unsafe_code)] // A global allocator deals in raw memory.

use kmem::{mm, raw};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr::null_mut;

/// Smallest piece: a free one must hold a pointer.
const MIN_SHIFT: u32 = 4;
/// Largest piece that comes from a chunk, as a power of two; what is larger is mapped on its own.
const MAX_SHIFT: u32 = 16;
/// Bytes asked of the kernel at a time. Untouched they cost nothing; so many last for good, and the
/// agent does not fail (which would end the program) where the kernel refuses another mapping.
const CHUNK: usize = 8 << 20;
const CLASSES: usize = (MAX_SHIFT - MIN_SHIFT + 1) as usize;

/// The allocator; see the module.
pub struct Heap {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    lists: UnsafeCell<Lists>,
}

struct Lists {
    free: [*mut Free; CLASSES],
    next: usize,
    end: usize,
}

struct Free {
    next: *mut Free,
}

// SAFETY: `lists` is only reached with `mutex` held.
unsafe impl Sync for Heap {}

impl Heap {
    /// An empty heap.
    pub const fn new() -> Heap {
        Heap {
            mutex: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
            lists: UnsafeCell::new(Lists { free: [null_mut(); CLASSES], next: 0, end: 0 }),
        }
    }

    /// Keeps every other thread out, so that a fork copies the heap in a whole state.
    pub fn hold(&self) {
        // SAFETY: the mutex is initialised, never moves (the heap is a static) and is not held by this
        // thread.
        unsafe { libc::pthread_mutex_lock(self.mutex.get()) };
    }

    /// Ends [`Heap::hold`]; the same thread, or its copy in the child, calls it.
    pub fn release(&self) {
        // SAFETY: held by this thread.
        unsafe { libc::pthread_mutex_unlock(self.mutex.get()) };
    }

    /// Class of a layout, or `None` when it gets a mapping of its own.
    fn class(layout: &Layout) -> Option<usize> {
        let size = layout.size().max(layout.align()).max(1 << MIN_SHIFT).next_power_of_two();
        let shift = size.trailing_zeros();
        (shift <= MAX_SHIFT).then(|| (shift - MIN_SHIFT) as usize)
    }
}

impl Lists {
    fn take(&mut self, class: usize) -> *mut u8 {
        let head = self.free[class];
        if !head.is_null() {
            // SAFETY: a piece on a free list is unused memory of this heap that starts with its link.
            self.free[class] = unsafe { (*head).next };
            return head.cast();
        }
        let size = 1usize << (class as u32 + MIN_SHIFT);
        // Pieces are aligned to their size, since chunks are aligned to pages and larger pieces to
        // themselves.
        let start = self.next.next_multiple_of(size);
        if start + size <= self.end {
            self.next = start + size;
            return start as *mut u8;
        }
        let Ok(chunk) = mm::map_anonymous(CHUNK) else { return null_mut() };
        self.end = chunk + CHUNK;
        self.next = chunk.next_multiple_of(size);
        let start = self.next;
        self.next += size;
        start as *mut u8
    }
}

// SAFETY: pieces are disjoint, at least as large and as aligned as the layout (a class is a power
// of two and not below either; mappings are aligned to pages, and a larger alignment is refused),
// and live until they are given back.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match Heap::class(&layout) {
            Some(class) => {
                self.hold();
                // SAFETY: the mutex is held.
                let piece = unsafe { (*self.lists.get()).take(class) };
                self.release();
                piece
            }
            None if layout.align() > kmem::PAGE_SIZE => null_mut(),
            None => mm::map_anonymous(layout.size()).map_or(null_mut(), |start| start as *mut u8),
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        match Heap::class(&layout) {
            Some(class) => {
                self.hold();
                // SAFETY: the mutex is held; the piece is unused from now on and large enough for the link.
                unsafe {
                    let lists = &mut *self.lists.get();
                    let free: *mut Free = piece.cast();
                    (*free).next = lists.free[class];
                    lists.free[class] = free;
                }
                self.release();
            }
            None => {
                // SAFETY: a mapping of its own, given back by its only user.
                let _ = unsafe { raw::munmap(piece as usize, layout.size()) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_disjoint_and_used_again() {
        let heap = Heap::new();
        let mut pieces = Vec::new();
        for (size, align) in
            [(1, 1), (16, 16), (24, 8), (4096, 4096), (65536, 65536), (65537, 8), (300_000, 4096), (40, 64)]
        {
            for _ in 0..40 {
                let layout = Layout::from_size_align(size, align).unwrap();
                // SAFETY: the layout is not empty; the piece is written within its size.
                let piece = unsafe {
                    let piece = heap.alloc(layout);
                    piece.write_bytes(0xA5, size);
                    piece
                };
                assert!(!piece.is_null() && (piece as usize).is_multiple_of(align));
                pieces.push((piece as usize, size, layout));
            }
        }
        pieces.sort_by_key(|&(start, ..)| start);
        assert!(pieces.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "pieces overlap");
        let first = pieces.into_iter().find(|&(_, size, _)| size == 24).unwrap();
        // SAFETY: allocated above with the same layout.
        unsafe { heap.dealloc(first.0 as *mut u8, first.2) };
        // SAFETY: as above.
        let again = unsafe { heap.alloc(first.2) };
        assert_eq!(again as usize, first.0, "a freed piece is used again");
    }
}
