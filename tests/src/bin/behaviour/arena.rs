//! Memory with an oracle: a second copy of what each byte must be, and what is known of each page.

#![allow(unsafe_code)] // Reads and writes memory that is exchanged meanwhile.

use std::ops::Range;
use std::sync::OnceLock;

use kmem::procmem::read_own;

use crate::{finding, sys};

pub(crate) const PAGE: usize = 4096;

/// Contents that programs draw from. Few, so that pages merge, within a client and across clients.
pub(crate) const ALPHABET: u64 = 192;

/// What is known of a page besides its bytes. Times are numbers of operations.
#[derive(Clone, Copy, Default)]
pub(crate) struct Meta {
    /// Not mapped.
    pub(crate) gone: bool,
    /// `PROT_*`, less what the program took away.
    pub(crate) no_write: bool,
    pub(crate) no_read: bool,
    /// A guard page: an access ends the program.
    pub(crate) guard: bool,
    /// The page holds its bytes or zeros, until it is written (`MADV_FREE`, marked as free).
    pub(crate) either: bool,
    /// Marked as free in the pool.
    pub(crate) marked: bool,
    /// Children do not have it.
    pub(crate) no_fork: bool,
    /// The kernel was told so, and answered that it is so.
    pub(crate) surely_no_fork: bool,
    /// Children have zeros.
    pub(crate) wiped: bool,
    /// A device may write it until then: its bytes are unknown, and it stays where it is.
    pub(crate) busy: u64,
    /// The kernel may still look it up to read it: it keeps its bytes, and stays where it is.
    pub(crate) held: u64,
    /// The kernel reads it, wherever it is: its bytes are not written until then.
    pub(crate) kept: u64,
    /// It is pinned until then: it may move, but not be discarded.
    pub(crate) pinned: u64,
}

/// A range of memory and its oracle.
pub(crate) struct Arena {
    pub(crate) start: usize,
    pub(crate) pages: usize,
    shadow: usize,
    meta: Vec<Meta>,
}

/// The bytes of every content, one behind the other.
fn alphabet() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let words = (0..ALPHABET).flat_map(|seed| (0..PAGE / 8).map(move |word| e2e::pattern(seed, word)));
        words.flat_map(u64::to_ne_bytes).collect()
    })
}

/// The bytes of one content; number 0 is zeros.
pub(crate) fn content(number: u64) -> &'static [u8] {
    let at = (number % ALPHABET) as usize * PAGE;
    &alphabet()[at..at + PAGE]
}

/// Where two pages differ first.
fn differ(a: usize, b: usize) -> Option<usize> {
    // SAFETY: the callers name pages that are mapped and readable. Nothing holds a reference.
    unsafe {
        if libc::memcmp(a as *const _, b as *const _, PAGE) == 0 {
            return None;
        }
        // A race may have ended between the two looks; it is a finding all the same.
        let byte = |start: usize, at: usize| ((start + at) as *const u8).read_volatile();
        Some((0..PAGE).find(|&at| byte(a, at) != byte(b, at)).unwrap_or(0))
    }
}

/// Copies bytes between memory that may be exchanged meanwhile.
pub(crate) fn copy(from: usize, to: usize, len: usize) {
    // SAFETY: the callers name ranges of arenas and of their oracles, mapped, in bounds and apart.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) }
}

/// Reads one byte that may be exchanged meanwhile.
pub(crate) fn byte(address: usize) -> u8 {
    // SAFETY: the callers name a byte of a page that is mapped and readable.
    unsafe { (address as *const u8).read_volatile() }
}

/// Writes one byte that may be exchanged meanwhile.
pub(crate) fn set_byte(address: usize, value: u8) {
    // SAFETY: the callers name a byte of a page that is mapped and writable.
    unsafe { (address as *mut u8).write_volatile(value) }
}

impl Arena {
    pub(crate) fn new(pages: usize) -> Self {
        let arena = Self::plain(pages);
        let _ = sys::madvise(arena.shadow, pages, libc::MADV_NOHUGEPAGE);
        alphabet();
        arena.set_up();
        arena
    }

    /// Memory that is never marked.
    pub(crate) fn plain(pages: usize) -> Self {
        let map = || sys::map(0, pages, 0).unwrap_or_else(|e| panic!("no memory for an arena: errno {e}"));
        Self { start: map(), pages, shadow: map(), meta: vec![Meta::default(); pages] }
    }

    fn set_up(&self) {
        let _ = sys::madvise(self.start, self.pages, libc::MADV_NOHUGEPAGE);
        let _ = sys::madvise(self.start, self.pages, libc::MADV_MERGEABLE);
    }

    /// Gives all of it back, and takes new memory at another address.
    pub(crate) fn renew(&mut self) {
        for run in self.runs(0..self.pages, |m| !m.gone) {
            if let Err(errno) = sys::munmap(self.at(run.start), run.len()) {
                finding::report(format_args!("munmap of {run:?} failed: errno {errno}"), self.at(run.start));
            }
        }
        self.start = sys::map(0, self.pages, 0).unwrap_or_else(|e| panic!("no memory for an arena: errno {e}"));
        (0..self.pages).for_each(|page| self.meta[page] = Meta::default());
        self.shadow_zeros(0..self.pages);
        self.set_up();
    }

    pub(crate) fn at(&self, page: usize) -> usize {
        self.start + page * PAGE
    }

    pub(crate) fn shadow_at(&self, page: usize) -> usize {
        self.shadow + page * PAGE
    }

    pub(crate) fn meta(&self, page: usize) -> &Meta {
        &self.meta[page]
    }

    pub(crate) fn set(&mut self, pages: Range<usize>, change: impl Fn(&mut Meta)) {
        self.meta[pages].iter_mut().for_each(change);
    }

    /// The pages from the first of `pages` on, as long as the condition holds.
    pub(crate) fn prefix(&self, pages: Range<usize>, holds: impl Fn(&Meta) -> bool) -> Range<usize> {
        let count = self.meta[pages.clone()].iter().take_while(|meta| holds(meta)).count();
        pages.start..pages.start + count
    }

    /// All runs of pages for which the condition holds.
    pub(crate) fn runs(&self, pages: Range<usize>, holds: impl Fn(&Meta) -> bool) -> Vec<Range<usize>> {
        let mut runs = Vec::new();
        let mut at = pages.start;
        while at < pages.end {
            let run = self.prefix(at..pages.end, &holds);
            at = run.end + 1;
            if !run.is_empty() {
                runs.push(run);
            }
        }
        runs
    }

    pub(crate) fn shadow_zeros(&mut self, pages: Range<usize>) {
        // SAFETY: the oracle's own pages.
        unsafe { std::ptr::write_bytes(self.shadow_at(pages.start) as *mut u8, 0, pages.len() * PAGE) };
    }

    /// The pages became zeros.
    pub(crate) fn zeroed(&mut self, pages: Range<usize>) {
        self.shadow_zeros(pages.clone());
        // A pipe has what was there before.
        self.set(pages, |meta| (meta.either, meta.kept) = (false, 0));
    }

    /// Writes bytes into a page, and notes them.
    pub(crate) fn write(&mut self, page: usize, offset: usize, bytes: &[u8]) {
        if bytes.len() < PAGE {
            self.settle(page);
        }
        copy(bytes.as_ptr() as usize, self.at(page) + offset, bytes.len());
        self.note(page, offset, bytes);
    }

    /// Notes bytes that were written in another way.
    pub(crate) fn note(&mut self, page: usize, offset: usize, bytes: &[u8]) {
        copy(bytes.as_ptr() as usize, self.shadow_at(page) + offset, bytes.len());
        self.meta[page].either = false;
    }

    /// Ends the time in which a page may be zeros: by a write.
    pub(crate) fn settle(&mut self, page: usize) {
        const BYTE: u8 = 0xa5;
        if !self.meta[page].either {
            return;
        }
        let (memory, shadow) = (self.at(page), self.shadow_at(page));
        set_byte(memory, BYTE);
        set_byte(shadow, BYTE);
        if differ(memory, shadow).is_some() {
            self.shadow_zeros(page..page + 1);
            set_byte(shadow, BYTE);
        }
        self.meta[page].either = false;
        self.compare(page, memory, "a page that was freed holds neither its bytes nor zeros");
    }

    /// Compares pages with the oracle, where that is possible at operation `now`.
    pub(crate) fn check(&self, pages: Range<usize>, now: u64, what: &str) -> usize {
        let mut checked = 0;
        for page in pages {
            let meta = self.meta[page];
            if meta.gone || meta.no_read || meta.guard || meta.busy > now {
                continue;
            }
            checked += 1;
            self.compare(page, self.at(page), what);
        }
        checked
    }

    /// Compares one page, which is at this address, with the oracle.
    pub(crate) fn compare(&self, page: usize, memory: usize, what: &str) {
        let Some(at) = differ(memory, self.shadow_at(page)) else { return };
        let zeros = content(0).as_ptr() as usize;
        if !self.meta[page].either || differ(memory, zeros).is_some() {
            finding::bytes(what, memory, self.shadow_at(page), at);
        }
    }

    /// What a child of a fork has: compares that.
    pub(crate) fn check_child(&self, now: u64, what: &str) {
        for page in 0..self.pages {
            let meta = self.meta[page];
            if meta.surely_no_fork && !meta.gone && self.is_there(page) {
                finding::report(format_args!("a child has a page that was kept from it"), self.at(page));
            }
            if meta.gone || meta.no_read || meta.guard || meta.no_fork || meta.busy > now {
                continue;
            }
            if meta.wiped {
                let zeros = content(0).as_ptr() as usize;
                if let Some(at) = differ(self.at(page), zeros) {
                    finding::bytes("a page that is wiped on fork", self.at(page), zeros, at);
                }
            } else {
                self.compare(page, self.at(page), what);
            }
        }
    }

    /// Whether a page is mapped and holds its bytes. Where a child lacks it something else may be
    /// mapped: a chunk of the agent's heap was.
    fn is_there(&self, page: usize) -> bool {
        let mut bytes = [0; PAGE];
        read_own(kmem::range::Range::new(self.at(page), PAGE), &mut bytes) == 1
            && bytes != [0; PAGE]
            && differ(bytes.as_ptr() as usize, self.shadow_at(page)).is_none()
    }

    /// The bytes that a page must have.
    pub(crate) fn wanted(&self, page: usize) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        copy(self.shadow_at(page), bytes.as_mut_ptr() as usize, PAGE);
        bytes
    }
}
