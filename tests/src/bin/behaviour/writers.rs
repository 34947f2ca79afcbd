//! Threads that write to pages of their own all the time, and notice each write that is lost.

#![allow(unsafe_code)] // Reads and writes memory that is exchanged meanwhile.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread::JoinHandle;

use crate::arena::{PAGE, content, copy};
use crate::random::Random;
use crate::{finding, sys};

pub(crate) const PAGES: usize = 512;
const THREADS: usize = 2;
const LAST: usize = PAGE - 8;

static STOP: AtomicBool = AtomicBool::new(false);
/// The last word of each page.
static WANTED: [AtomicU64; PAGES] = [const { AtomicU64::new(0) }; PAGES];

pub(crate) struct Writers {
    pub(crate) start: usize,
    threads: Vec<JoinHandle<u64>>,
}

fn word(page: usize, start: usize) -> *mut u64 {
    (start + page * PAGE + LAST) as *mut u64
}

fn differs(start: usize, page: usize) -> bool {
    let (memory, wanted) = (start + page * PAGE, content(page as u64 / 2));
    // SAFETY: the writers' memory is mapped and readable, and the content a page long.
    unsafe { libc::memcmp(memory as *const _, wanted.as_ptr().cast(), LAST) != 0 }
}

impl Writers {
    pub(crate) fn new() -> Self {
        let start = sys::map(0, PAGES, 0).unwrap_or_else(|e| panic!("no memory for writers: errno {e}"));
        for page in 0..PAGES {
            copy(content(page as u64 / 2).as_ptr() as usize, start + page * PAGE, LAST);
        }
        let _ = sys::madvise(start, PAGES, libc::MADV_MERGEABLE);
        Self { start, threads: Vec::new() }
    }

    pub(crate) fn start(&mut self) {
        let start = self.start;
        let spawn = |number| std::thread::spawn(move || write(start, number));
        self.threads = (0..THREADS).map(spawn).collect();
    }

    /// Ends the threads; returns how often they wrote.
    pub(crate) fn stop(&mut self) -> u64 {
        STOP.store(true, Release);
        self.threads.drain(..).map(|thread| thread.join().unwrap_or_default()).sum()
    }

    /// Compares what no thread writes.
    pub(crate) fn check(&self, what: &str) {
        if let Some(page) = (0..PAGES).find(|&page| differs(self.start, page)) {
            let wanted = content(page as u64 / 2).as_ptr() as usize;
            finding::bytes(what, self.start + page * PAGE, wanted, 0);
        }
    }
}

fn write(start: usize, number: usize) -> u64 {
    let mut random = Random::new(number as u64 + 1);
    let mut writes = 0;
    while !STOP.load(Acquire) {
        let page = random.below((PAGES / THREADS) as u64) as usize * THREADS + number;
        // Most writes put back what others have there, so that pages come and go.
        let value = if random.once_in(4) { random.next() } else { 0 };
        let (word, wanted) = (word(page, start), &WANTED[page]);
        // SAFETY: a word that only this thread writes.
        let found = unsafe { word.read_volatile() };
        let before = wanted.load(Relaxed);
        if found != before || differs(start, page) {
            let what = format_args!("a thread's write to page {page} is lost: want {before:#x}, found {found:#x}");
            finding::report(what, word as usize);
        }
        wanted.store(value, Relaxed);
        // SAFETY: a word that only this thread writes.
        unsafe { word.write_volatile(value) };
        writes += 1;
        if writes % 16 == 0 {
            sys::sleep_ms(1 + random.below(8));
        }
    }
    writes
}
