//! The keys of the bench: pages in one mapping, all subjects alike.
//!
//! `keys` pages are what gets stored. `hits` are copies of them in other places, as a page that is
//! looked up lies somewhere else than the one that is known; `misses` are drawn like the keys and
//! equal none of them. A query of any subject therefore reads two different places of memory when
//! it compares.
#![allow(unsafe_code)] // one mapping, reached by raw pointers, because rivals want keys that live for ever

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};
use std::ptr;

use anyhow::{Context, Result};
use bench_common::random::mix;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// A page as a key: compares and hashes by its bytes.
#[derive(Copy, Clone)]
pub(super) struct Key(*const [u8; PAGE]);

// SAFETY: a key points into the mapping of a `Pages`, which is never unmapped, and which is written
// only by `Pages::fill`, whose caller holds it alone and has no subjects.
unsafe impl Send for Key {}
// SAFETY: a key points to memory that is mapped until the program ends; sharing allows reading
// only.
unsafe impl Sync for Key {}

impl Key {
    /// A page of zeros.
    pub(super) const ZERO: Key = Key(&[0; PAGE]);

    #[inline]
    pub(super) fn bytes(&self) -> &'static [u8] {
        // SAFETY: the page is mapped until the program ends, and not written while keys are in use.
        unsafe { &*self.0 }
    }
}

impl Key {
    /// Asks the processor for the start of the page.
    #[inline]
    pub(super) fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in 0..4 {
            // SAFETY: a prefetch has no effect but on speed, whatever the address.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                    self.0.cast::<i8>().add(line * 64),
                )
            };
        }
    }
}

impl PartialEq for Key {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Key {}

impl Ord for Key {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        self.bytes().cmp(other.bytes()) // memcmp
    }
}

impl PartialOrd for Key {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Hash for Key {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(self.bytes());
    }
}

/// The mapping.
pub(super) struct Pages {
    start: *mut [u8; PAGE],
    pages: usize,
}

// SAFETY: writing needs `&mut`.
unsafe impl Sync for Pages {}
// SAFETY: it is memory of the process, not of a thread.
unsafe impl Send for Pages {}

impl Pages {
    /// Memory for `pages` pages, on huge pages where the kernel has them. It is kept until the
    /// process ends.
    pub(super) fn new(pages: usize) -> Result<Self> {
        let len = (pages * PAGE).next_multiple_of(HUGE);
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping replaces nothing.
        let mapped = unsafe { mmap_anonymous(ptr::null_mut(), len + HUGE, protection, flags) };
        let start = mapped.with_context(|| format!("no {} MiB of memory for keys", len >> 20))?;
        let start = start.map_addr(|addr| addr.next_multiple_of(HUGE));
        // SAFETY: inside the mapping. Advice only: without huge pages the bench works too.
        let _ = unsafe { madvise(start, len, Advice::LinuxHugepage) };
        Ok(Self { start: start.cast(), pages })
    }

    /// Pages in it.
    pub(super) fn len(&self) -> usize {
        self.pages
    }

    /// Writes every page, `f(number, page)`, from several threads. No keys of before may be in use
    /// any more.
    pub(super) fn fill(&mut self, f: impl Fn(usize, &mut [u8; PAGE]) + Sync) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        // SAFETY: the mapping is ours alone (`&mut self`), and has this many pages.
        let all = unsafe { std::slice::from_raw_parts_mut(self.start, self.pages) };
        let share = self.pages.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (part, pages) in all.chunks_mut(share).enumerate() {
                let f = &f;
                scope.spawn(move || pages.iter_mut().enumerate().for_each(|(i, page)| f(part * share + i, page)));
            }
        });
    }

    /// The page of this number as a key.
    #[inline]
    pub(super) fn key(&self, number: usize) -> Key {
        assert!(number < self.pages);
        // SAFETY: inside the mapping.
        Key(unsafe { self.start.add(number) })
    }

    /// The number of a key's page.
    #[inline]
    pub(super) fn number(&self, key: Key) -> usize {
        (key.0.addr() - self.start.addr()) / PAGE
    }
}

/// What the keys look like.
#[derive(Copy, Clone, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Case {
    /// The first 8 bytes differ, the rest is the same everywhere
    Easy,
    /// Zero bytes of random length, 128 on average, then 8 bytes that differ, then the same
    /// everywhere
    ZeroPrefix,
    /// Only the last 8 bytes differ
    Late,
    /// The memory of booted guests
    Pages,
    /// 100,000,000 keys of 8 bytes: the tree alone
    Scale,
}

/// Where things lie in the mapping, in pages: keys, then hits, then misses.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Keys that are there all the time; hits ask for these.
    pub(super) fixed: usize,
    /// Keys, those that come and go while measuring included.
    pub(super) keys: usize,
    /// Hits, and as many misses.
    pub(super) queries: usize,
}

impl Layout {
    /// The key that hit `i` is a copy of.
    pub(super) fn asked(&self, i: usize) -> usize {
        mix(0x5eed + i as u64) as usize % self.fixed
    }

    pub(super) fn hit(&self, i: usize) -> usize {
        self.keys + i
    }

    pub(super) fn miss(&self, i: usize) -> usize {
        self.keys + self.queries + i
    }

    pub(super) fn pages(&self) -> usize {
        self.keys + 2 * self.queries
    }
}

/// Fills the mapping with a made-up case.
pub(super) fn make(case: Case, pages: &mut Pages, layout: Layout) {
    pages.fill(|number, page| {
        // Which identity the page has: that of a key, or one of its own.
        let id = match number {
            n if n < layout.keys => n,
            n if n < layout.keys + layout.queries => layout.asked(n - layout.keys),
            n => n,
        };
        write(case, id as u64, page);
    });
}

fn write(case: Case, id: u64, page: &mut [u8; PAGE]) {
    let (words, _) = page.as_chunks_mut::<8>();
    words.iter_mut().enumerate().for_each(|(i, word)| *word = mix(i as u64).to_le_bytes());
    let unique = mix(1 << 40 | id).to_be_bytes(); // the mixer is a bijection
    match case {
        Case::Easy => page[..8].copy_from_slice(&unique),
        Case::Late => page[PAGE - 8..].copy_from_slice(&unique),
        _ => {
            let zeros = mix(2 << 40 | id) as usize % 257;
            page[..zeros].fill(0);
            page[zeros..zeros + 8].copy_from_slice(&unique);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_distinct_hits_are_copies_and_misses_are_new() {
        let layout = Layout { fixed: 400, keys: 500, queries: 100 };
        let mut pages = Pages::new(layout.pages()).unwrap();
        for case in [Case::Easy, Case::ZeroPrefix, Case::Late] {
            make(case, &mut pages, layout);
            let mut all: Vec<Key> = (0..500).map(|i| pages.key(i)).collect();
            all.extend((0..100).map(|i| pages.key(layout.miss(i))));
            all.sort();
            all.dedup();
            assert_eq!(all.len(), 600, "{case:?}");
            for i in 0..100 {
                assert!(pages.key(layout.hit(i)) == pages.key(layout.asked(i)));
            }
        }
    }
}
