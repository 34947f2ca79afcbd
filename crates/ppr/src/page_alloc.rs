//! An allocator whose freed pages are back with the host at once: the guest's side in a user-space
//! program.
//!
//! It hands out whole pages of one piece of memory, the *arena*, and marks each that it gets back.
//! A recycler, in the same process or in the one that runs the guest, takes them. What is smaller
//! than a page, or does not fit, goes to the system's allocator.
//!
//! The order is what matters: pages are marked **before** the map says that they are free, and
//! cancelled **after** it says that they are taken; so a marked page has no owner.

#![allow(unsafe_code)] // `GlobalAlloc` is an unsafe trait.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::pool::Pool;

const PAGE: usize = 4096;
/// How long an allocation waits for a recycler before it leaves the pages alone for good and takes
/// others.
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
    /// A bit for each page: it has an owner. In memory of the system's allocator, made once.
    taken: Mutex<Box<[u64]>>,
}

impl PageAlloc {
    /// Without an arena.
    pub const fn new() -> Self {
        Self { arena: OnceLock::new() }
    }

    /// Serves allocations of a page and more from `pages` pages at `start`; page `i` is frame `i`
    /// of the pool. Only the first call counts; returns whether this was it. At most as many
    /// pages as the pool has frames are used.
    ///
    /// # Safety
    /// The memory is mapped, readable, writable, aligned to pages, stays so for ever, and nobody
    /// else uses it. A recycler of this pool makes pages zero or leaves them as they are.
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
    /// Takes `n` pages in a row: first fit.
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
            // The recycler may zero them yet: they keep their owner, which is nobody.
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

// SAFETY: memory of the arena has one owner at a time, by its map, and is not zeroed while it has
// one, by `Guest::cancel`; it is as large as asked for and aligned to pages. The rest is the
// system's allocator. Nothing here panics or allocates.
unsafe impl GlobalAlloc for PageAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let arena = self.arena.get().filter(|_| layout.size() >= PAGE && layout.align() <= PAGE);
        match arena.and_then(|arena| arena.alloc(layout.size().div_ceil(PAGE))) {
            Some(start) => start.as_ptr(),
            // SAFETY: as our caller promised.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        match self.arena.get().filter(|arena| arena.contains(start as usize)) {
            Some(arena) => arena.free(start as usize, layout.size().div_ceil(PAGE)),
            // SAFETY: what is not in the arena came from there, with this layout.
            None => unsafe { System.dealloc(start, layout) },
        }
    }
}
