//! An allocator that gives its freed pages back to the host at once: the guest's side in a
//! user-space program.
//!
//! It allocates whole pages of one piece of memory, the *arena*, and marks each freed page. A
//! recycler takes the marked pages, in the same process or in the one that runs the guest.
//! Allocations that are smaller than a page, or do not fit, go to the system's allocator.
//!
//! The order is essential: pages are marked **before** the map shows them as free, and cancelled
//! **after** it shows them as taken. A marked page therefore has no owner.

#![allow(unsafe_code)] // `GlobalAlloc` is an unsafe trait.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::pool::Pool;

/// Bytes of a page.
const PAGE: usize = 4096;
/// How long an allocation waits for a recycler before it gives up the pages for ever and takes
/// others. A recycler needs microseconds; after a second it is likely dead.
const PATIENCE: Duration = Duration::from_secs(1);

/// The allocator. `#[global_allocator] static HEAP: PageAlloc = PageAlloc::new();` is the system's
/// allocator until [`PageAlloc::serve`] gives it an arena.
pub struct PageAlloc {
    arena: OnceLock<Arena>,
}

struct Arena {
    start: usize,
    pages: usize,
    pool: &'static Pool,
    /// A bit for each page that has an owner. Allocated once, by the system's allocator.
    taken: Mutex<Box<[u64]>>,
}

impl PageAlloc {
    /// An allocator without an arena.
    pub const fn new() -> Self {
        Self { arena: OnceLock::new() }
    }

    /// Serves allocations of a page and more from `pages` pages at `start`; page `i` is frame `i`
    /// of the pool. At most as many pages as the pool has frames are used. Only the first call has
    /// an effect; returns whether this was the first.
    ///
    /// # Safety
    /// - The memory is mapped, readable, writable and aligned to pages, and stays so for ever.
    /// - No other code uses the memory.
    /// - A recycler of this pool makes pages read as zeros or leaves them as they are.
    pub unsafe fn serve(&self, start: NonNull<u8>, pages: usize, pool: &'static Pool) -> bool {
        let pages = pages.min(pool.frames() as usize);
        let taken = Mutex::new(vec![0; pages.div_ceil(64)].into_boxed_slice());
        self.arena.set(Arena { start: start.as_ptr() as usize, pages, pool, taken }).is_ok()
    }
}

impl Default for PageAlloc {
    fn default() -> Self {
        Self::new()
    }
}

impl Arena {
    /// Takes the first `n` free pages in a row.
    fn take(&self, n: usize) -> Option<usize> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut first, mut at) = (0, 0);
        while at - first < n {
            if at == self.pages {
                return None;
            }
            let word = taken[at / 64];
            if at % 64 == 0 && word == u64::MAX {
                at += 64.min(self.pages - at);
                first = at;
            } else {
                at += 1;
                if word >> ((at - 1) % 64) & 1 == 1 {
                    first = at;
                }
            }
        }
        (first..at).for_each(|page| taken[page / 64] |= 1 << (page % 64));
        Some(first)
    }

    fn alloc(&self, n: usize) -> Option<NonNull<u8>> {
        loop {
            let first = self.take(n)?;
            let start = Instant::now();
            let cancelled = Guest::new(self.pool).cancel(first as u64..(first + n) as u64, || {
                std::thread::yield_now();
                start.elapsed() < PATIENCE
            });
            if cancelled.is_ok() {
                return NonNull::new((self.start + first * PAGE) as *mut u8);
            }
            // The recycler may still zero the pages: they stay taken, and are never used again.
        }
    }

    fn free(&self, address: usize, n: usize) {
        let first = (address - self.start) / PAGE;
        Guest::new(self.pool).mark(first as u64..(first + n) as u64);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        (first..first + n).for_each(|page| taken[page / 64] &= !(1 << (page % 64)));
    }

    fn contains(&self, address: usize) -> bool {
        (self.start..self.start + self.pages * PAGE).contains(&address)
    }
}

// SAFETY: the map gives each page of the arena one owner at a time. After `Guest::cancel` no
// recycler zeroes the page until it is marked again. A piece is as large as requested and aligned
// to pages, and `alloc` uses the arena only for alignments up to a page. All other requests go to
// the system's allocator. The code neither panics nor allocates.
unsafe impl GlobalAlloc for PageAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let arena = self.arena.get().filter(|_| layout.size() >= PAGE && layout.align() <= PAGE);
        match arena.and_then(|arena| arena.alloc(layout.size().div_ceil(PAGE))) {
            Some(start) => start.as_ptr(),
            // SAFETY: the contract of `alloc` is the same for the system's allocator.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        match self.arena.get().filter(|arena| arena.contains(start as usize)) {
            Some(arena) => arena.free(start as usize, layout.size().div_ceil(PAGE)),
            // SAFETY: memory outside of the arena came from the system's allocator, with this
            // layout.
            None => unsafe { System.dealloc(start, layout) },
        }
    }
}
