//! The agent's own heap.
//!
//! The program's `malloc` may hold its locks while it calls `madvise`, which waits for the agent's
//! lock; and its memory may be a region, in a window of which the agent would wait for itself. So
//! this heap takes chunks from the kernel, with one free list for each power of two; a larger piece
//! is a mapping of its own. The first chunk is the library's own.

#![allow(unsafe_code)] // A global allocator deals in raw memory.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr::null_mut;

use kmem::{mm, raw};

/// Smallest piece, as a power of two of bytes: a free one must hold a pointer.
const MIN_SHIFT: u32 = 4;
/// Largest piece that is cut from a chunk, as a power of two of bytes.
const MAX_SHIFT: u32 = 16;
/// Bytes of the largest piece that is cut from a chunk. Larger ones are made without the lock.
pub(crate) const LARGEST: usize = 1 << MAX_SHIFT;
/// Bytes taken from the kernel at a time. The agent's tables fit into the first chunk: it does not
/// fail later (which would end the program) when the kernel refuses another mapping.
const CHUNK: usize = 8 << 20;
/// Bytes that the library brings with it: enough to find out, and say, that the kernel gives none.
const RESERVE: usize = 256 << 10;
const CLASSES: usize = (MAX_SHIFT - MIN_SHIFT + 1) as usize;

/// Fork handlers hold it too.
#[global_allocator]
pub(crate) static HEAP: Heap = Heap::new();

pub(crate) struct Heap {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    lists: UnsafeCell<Lists>,
    reserve: UnsafeCell<Reserve>,
}

#[repr(C, align(4096))]
struct Reserve([u8; RESERVE]);

/// Who held the heap when a process was copied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    /// A thread that forks, and changed nothing.
    Fork,
    /// Perhaps a thread that was changing the lists: what they held is lost.
    Unknown,
}

struct Lists {
    /// A list of free pieces for each class.
    free: [*mut Free; CLASSES],
    /// The unused part of the current chunk.
    next: usize,
    end: usize,
    /// The reserve was the current chunk.
    has_used_reserve: bool,
    /// There was a chunk after it.
    has_grown: bool,
}

/// What a free piece holds.
struct Free {
    next: *mut Free,
}

// SAFETY: `lists` is only reached by the thread that holds `mutex`, and its pointers are to memory
// that belongs to the heap and to no thread.
unsafe impl Sync for Heap {}

impl Heap {
    /// An empty heap. It lives in a static, or does not move once it is used.
    pub(crate) const fn new() -> Self {
        Self {
            mutex: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
            lists: UnsafeCell::new(Lists::EMPTY),
            reserve: UnsafeCell::new(Reserve([0; RESERVE])),
        }
    }

    /// Takes a chunk from the kernel, unless it has. False: there is none (`RLIMIT_AS`), and
    /// allocations may fail.
    pub(crate) fn grow(&self) -> bool {
        self.hold();
        // SAFETY: this thread holds the mutex, so no other reference to the lists exists.
        let lists = unsafe { &mut *self.lists.get() };
        let has_grown = lists.has_grown || lists.grow();
        self.release();
        has_grown
    }

    /// Locks the heap. A fork handler does so, that the child gets consistent lists.
    pub(crate) fn hold(&self) {
        // SAFETY: the mutex is initialised and does not move. This thread does not hold it: the
        // heap calls nothing that allocates while it does.
        unsafe { libc::pthread_mutex_lock(self.mutex.get()) };
    }

    /// Ends [`Heap::hold`]; called by the same thread, or by its copy in the child.
    pub(crate) fn release(&self) {
        // SAFETY: the mutex is initialised, and this thread locked it in `hold`.
        unsafe { libc::pthread_mutex_unlock(self.mutex.get()) };
    }

    /// Unlocks the heap in a child that no fork handler prepared, whoever of the parent's threads
    /// may have held it.
    pub(crate) fn reset(&self, holder: Holder) {
        // SAFETY: the mutex is initialised. The caller is the only thread of this process that uses
        // the heap: the thread that held the mutex at the fork is the parent's.
        unsafe {
            if libc::pthread_mutex_trylock(self.mutex.get()) != 0 {
                if holder == Holder::Unknown {
                    *self.lists.get() = Lists { has_used_reserve: true, ..Lists::EMPTY };
                }
                self.mutex.get().write(libc::PTHREAD_MUTEX_INITIALIZER);
            } else {
                libc::pthread_mutex_unlock(self.mutex.get());
            }
        }
    }

    /// Class of a layout; `None` when it gets a mapping of its own.
    fn class(layout: &Layout) -> Option<usize> {
        let size = layout.size().max(layout.align()).max(1 << MIN_SHIFT).next_power_of_two();
        let shift = size.trailing_zeros();
        (shift <= MAX_SHIFT).then(|| (shift - MIN_SHIFT) as usize)
    }
}

impl Lists {
    const EMPTY: Self =
        Self { free: [null_mut(); CLASSES], next: 0, end: 0, has_used_reserve: false, has_grown: false };

    /// `reserve` is the address of the heap's reserve.
    fn take(&mut self, class: usize, reserve: usize) -> *mut u8 {
        let head = self.free[class];
        if !head.is_null() {
            // SAFETY: `dealloc` wrote a `Free` to the start of every piece on a free list, and
            // nobody has used the piece since. Pieces are aligned to 16 bytes at least.
            self.free[class] = unsafe { (*head).next };
            return head.cast();
        }
        let size = 1usize << (class as u32 + MIN_SHIFT);
        if !self.has_used_reserve {
            (self.next, self.end, self.has_used_reserve) = (reserve, reserve + RESERVE, true);
        }
        self.cut(size).or_else(|| self.grow().then(|| self.cut(size))?).map_or(null_mut(), |start| start as *mut u8)
    }

    /// Cuts a piece from the current chunk. Pieces are aligned to their size: chunks begin at a
    /// page, and where a class is larger than a page, the piece begins at the next multiple of its
    /// size.
    fn cut(&mut self, size: usize) -> Option<usize> {
        let start = self.next.next_multiple_of(size);
        (start + size <= self.end).then(|| {
            self.next = start + size;
            start
        })
    }

    fn grow(&mut self) -> bool {
        let Ok(chunk) = mm::map_anonymous(CHUNK) else { return false };
        (self.next, self.end) = (chunk, chunk + CHUNK);
        (self.has_used_reserve, self.has_grown) = (true, true);
        true
    }
}

// SAFETY: pieces are disjoint and live until they are given back. A piece is at least as large and
// as aligned as its layout: its class is a power of two not below size and alignment. Mappings are
// aligned to pages, and a large piece with a larger alignment is refused.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match Self::class(&layout) {
            Some(class) => {
                self.hold();
                // SAFETY: this thread holds the mutex, so no other reference to the lists exists.
                let piece = unsafe { (*self.lists.get()).take(class, self.reserve.get() as usize) };
                self.release();
                piece
            }
            None if layout.align() > kmem::PAGE_SIZE => null_mut(),
            None => mm::map_anonymous(layout.size()).map_or(null_mut(), |start| start as *mut u8),
        }
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        match Self::class(&layout) {
            Some(class) => {
                self.hold();
                // SAFETY: this thread holds the mutex, so no other reference to the lists exists.
                // By the contract of `dealloc` nobody uses the piece any more. It has 16 bytes at
                // least and is aligned to as many, so it can hold the link.
                unsafe {
                    let lists = &mut *self.lists.get();
                    let free: *mut Free = piece.cast();
                    (*free).next = lists.free[class];
                    lists.free[class] = free;
                }
                self.release();
            }
            None => {
                // SAFETY: `alloc` mapped the piece for this layout alone, and by the contract of
                // `dealloc` nobody uses it any more.
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
                // SAFETY: the layout is not empty. The piece has `size` bytes, and is this test's
                // alone.
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
        // SAFETY: this heap allocated the piece with the same layout, and the test uses it no more.
        unsafe { heap.dealloc(first.0 as *mut u8, first.2) };
        // SAFETY: the layout is not empty.
        let again = unsafe { heap.alloc(first.2) };
        assert_eq!(again as usize, first.0, "a freed piece is used again");
    }
}
