//! Memory that a scenario marks as mergeable.

use e2e::pattern;

pub(crate) const PAGE: usize = 4096;

/// Pages of a huge page.
pub(crate) const HUGE: usize = 512;

pub(crate) const WORDS: usize = PAGE / 8;

/// Memory marked as mergeable.
pub(crate) struct Region {
    pub(crate) start: *mut u64,
    pub(crate) pages: usize,
}

// SAFETY: the memory is raw and lives until the process ends; threads share it as they would any
// raw memory, each on pages of its own.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) fn new(pages: usize, dontfork: bool) -> Self {
        let region = Self::unmarked(pages);
        if dontfork {
            region.advise(0..pages, libc::MADV_DONTFORK).unwrap();
        }
        region.advise(0..pages, libc::MADV_MERGEABLE).unwrap();
        region
    }

    /// Huge pages, as far as the kernel gives any.
    pub(crate) fn huge(count: usize) -> Self {
        let all = Self::unmarked((count + 1) * HUGE);
        let skipped = all.start.addr().next_multiple_of(HUGE * PAGE) - all.start.addr();
        let region = Self { start: all.start.wrapping_byte_add(skipped), pages: count * HUGE };
        region.advise(0..region.pages, libc::MADV_HUGEPAGE).unwrap();
        region.advise(0..region.pages, libc::MADV_MERGEABLE).unwrap();
        region
    }

    pub(crate) fn unmarked(pages: usize) -> Self {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping; nothing else knows its address.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.cast(), pages }
    }

    pub(crate) fn address(&self, page: usize) -> *mut libc::c_void {
        assert!(page <= self.pages);
        self.start.wrapping_add(page * WORDS).cast()
    }

    pub(crate) fn read(&self, page: usize, word: usize) -> u64 {
        assert!(page < self.pages && word < WORDS);
        // SAFETY: in bounds; volatile, since the memory under it is exchanged while this runs.
        unsafe { self.start.add(page * WORDS + word).read_volatile() }
    }

    pub(crate) fn write(&self, page: usize, word: usize, value: u64) {
        assert!(page < self.pages && word < WORDS);
        // SAFETY: in bounds; see `read`.
        unsafe { self.start.add(page * WORDS + word).write_volatile(value) }
    }

    pub(crate) fn fill(&self, page: usize, seed: u64) {
        (0..WORDS).for_each(|word| self.write(page, word, pattern(seed, word)));
    }

    /// How many of the pages are not as filled.
    pub(crate) fn wrong(&self, pages: std::ops::Range<usize>, seed: impl Fn(usize) -> u64) -> usize {
        pages.filter(|&page| (0..WORDS).any(|word| self.read(page, word) != pattern(seed(page), word))).count()
    }

    pub(crate) fn nonzero(&self, pages: std::ops::Range<usize>) -> usize {
        pages.filter(|&page| (0..WORDS).any(|word| self.read(page, word) != 0)).count()
    }

    pub(crate) fn advise(&self, pages: std::ops::Range<usize>, advice: i32) -> Result<(), i32> {
        // SAFETY: a range of this mapping; what the advice does to its content is what the scenario
        // is about.
        match unsafe { libc::madvise(self.address(pages.start), pages.len() * PAGE, advice) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    }
}
