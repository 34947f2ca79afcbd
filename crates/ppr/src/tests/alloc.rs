//! The allocator, against a recycler that takes its pages.

#![allow(unsafe_code)] // Allocators are called as the language calls them.

use std::alloc::{GlobalAlloc, Layout};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::{Guest, Host, PageAlloc, Pool, Ram};

const PAGES: usize = 2048;

/// Memory for a test that is never unmapped.
fn arena() -> NonNull<u8> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a mapping that is not fixed replaces nothing.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGES * 4096, prot, MapFlags::PRIVATE) };
    NonNull::new(start.unwrap().cast()).unwrap()
}

fn leak(pages: usize) -> &'static Pool {
    Box::leak(Box::new(Pool::private(pages as u64).unwrap()))
}

/// Allocates, fills, checks and frees pieces of memory until `stop`.
fn use_memory(alloc: &PageAlloc, seed: u64, stop: impl Fn() -> bool) {
    let mut state = seed;
    let mut held: Vec<(*mut u64, Layout, u64)> = Vec::new();
    while !stop() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed);
        let layout = Layout::from_size_align(4096 + (state >> 48) as usize % 80_000, 64).unwrap();
        // SAFETY: the layout is not empty.
        let words: *mut u64 = unsafe { alloc.alloc(layout) }.cast();
        // SAFETY: the allocator has just returned this many words, aligned to 64 bytes.
        (0..layout.size() / 8).for_each(|at| unsafe { words.add(at).write(state + at as u64) });
        held.push((words, layout, state));
        if held.len() > 24 {
            let (words, layout, first) = held.swap_remove((state >> 33) as usize % 24);
            for at in 0..layout.size() / 8 {
                // SAFETY: allocated by this thread, and not freed yet.
                assert_eq!(unsafe { words.add(at).read() }, first + at as u64, "word {at}");
            }
            // SAFETY: allocated by this thread with this layout, and not used any more.
            unsafe { alloc.dealloc(words.cast(), layout) };
        }
    }
    for (words, layout, _) in held {
        // SAFETY: allocated by this thread with this layout, and not used any more.
        unsafe { alloc.dealloc(words.cast(), layout) };
    }
}

#[test]
fn what_is_freed_is_recycled_and_what_is_not_keeps_its_bytes() {
    let (start, pool, alloc) = (arena(), leak(PAGES), PageAlloc::new());
    // SAFETY: the mapping is new, known to this test alone, and never unmapped. The recycler
    // discards pages, which then read as zeros.
    assert!(unsafe { alloc.serve(start, PAGES, pool) });
    let stop = AtomicBool::new(false);
    let base = start.as_ptr() as usize;
    let recycled = std::thread::scope(|scope| {
        for seed in 1..4u64 {
            let (alloc, stop) = (&alloc, &stop);
            scope.spawn(move || {
                use_memory(alloc, seed, || stop.load(Relaxed));
            });
        }
        let mut host = Host::new(pool, Ram::new(std::iter::once(0..PAGES as u64)));
        let zero = |runs: &[Range<u64>]| {
            runs.iter().try_for_each(|run| {
                let (at, len) = (base + run.start as usize * 4096, (run.end - run.start) as usize * 4096);
                // SAFETY: claimed pages of the arena, which have no owner.
                unsafe { madvise(at as *mut _, len, Advice::LinuxDontNeed) }
            })
        };
        let start = Instant::now();
        let mut recycled = 0;
        while start.elapsed() < Duration::from_secs(2) {
            recycled += host.recycle(&mut (0..PAGES as u64), u64::MAX, zero).unwrap().pages;
        }
        stop.store(true, Relaxed);
        recycled
    });
    println!("{recycled} pages recycled");
    assert!(recycled > 1000);
    // Everything was freed: each page is marked, or recycled and zero.
    let host = Host::new(pool, Ram::new(std::iter::once(0..PAGES as u64)));
    for page in 0..PAGES {
        // SAFETY: within the arena, which is mapped and not used any more.
        let content = unsafe { std::slice::from_raw_parts(start.as_ptr().add(page * 4096), 4096) };
        assert!(host.is_free(page as u64) || content.iter().all(|byte| *byte == 0), "page {page}");
    }
}

#[test]
fn small_and_oversized_requests_go_to_the_system() {
    let (start, pool, alloc) = (arena(), leak(PAGES), PageAlloc::default());
    // SAFETY: the mapping is new, known to this test alone, and never unmapped. The recycler
    // discards pages, which then read as zeros.
    assert!(unsafe { alloc.serve(start, PAGES, pool) });
    // SAFETY: the mapping stays; the call is refused, so the memory gets no second user.
    assert!(!unsafe { alloc.serve(start, PAGES, pool) });
    let inside =
        |at: *mut u8| (start.as_ptr() as usize..start.as_ptr() as usize + PAGES * 4096).contains(&(at as usize));
    let cases = [
        (64, 8, false),
        (4096, 4096, true),
        (5000, 8, true),
        (PAGES * 4096, 8, true),
        (PAGES * 4096 + 1, 8, false),
        (8192, 8192, false),
    ];
    for (size, align, expected) in cases {
        let layout = Layout::from_size_align(size, align).unwrap();
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc.alloc(layout) };
        assert_eq!(inside(at), expected, "{size} aligned to {align}");
        // SAFETY: allocated here with this layout, and not used any more.
        unsafe { alloc.dealloc(at, layout) };
        // Exactly the freed pages are marked.
        let pages = if expected { size.div_ceil(4096) } else { 0 };
        assert_eq!(Guest::new(pool).cancel(0..PAGES as u64, || false).unwrap().won, pages as u64);
    }
}
