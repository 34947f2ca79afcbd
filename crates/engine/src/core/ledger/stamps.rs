//! When pages of a region were last found written, for dirty rates (see `report::rates`).

use wire::PageNo;

/// Parts of a heat map at most, and the pages of the smallest part.
const PARTS: u32 = 1024;
const PART_PAGES: usize = 512;
/// Stamps (0.1 s) are counted back from here, by this much; older ones count as never.
pub(crate) const REBASE_AT: u16 = 60_000;
pub(crate) const REBASE_BY: u16 = 50_000;

/// When each page of a region was last found written: in tenths of a second, 0 for never.
///
/// They take 2 bytes a page, in chunks that are made when the first of their pages is found. So
/// memory that nobody touches costs 8 bytes for 2 MiB.
pub(crate) struct Stamps {
    pages: u32,
    /// `None`: none of its pages was found.
    chunks: Vec<Option<Box<[u16; PART_PAGES]>>>,
    made: usize,
    /// What is recorded from now on has this stamp.
    pub(crate) now: u16,
    /// Pages recorded since this was last taken.
    pub(crate) found: u64,
}

impl Stamps {
    /// Of `pages` pages; `now`: the scan under way. `None`: there is no memory.
    pub(crate) fn new(pages: u32, now: u16) -> Option<Self> {
        let (mut chunks, count) = (Vec::new(), (pages as usize).div_ceil(PART_PAGES));
        chunks.try_reserve_exact(count).ok()?;
        chunks.resize_with(count, || None);
        Some(Self { pages, chunks, made: 0, now, found: 0 })
    }

    /// Counts all stamps back by [`REBASE_BY`].
    pub(crate) fn rebase(&mut self) {
        let stamps = self.chunks.iter_mut().flatten().flat_map(|chunk| chunk.iter_mut());
        stamps.for_each(|stamp| *stamp = stamp.saturating_sub(REBASE_BY));
    }

    pub(crate) fn record(&mut self, page: PageNo) {
        if page.0 >= self.pages {
            return;
        }
        let chunk = self.chunks[page.index() / PART_PAGES].get_or_insert_with(|| {
            self.made += 1;
            Box::new([0; PART_PAGES])
        });
        chunk[page.index() % PART_PAGES] = self.now;
        self.found += 1;
    }

    pub(crate) fn bytes(&self) -> usize {
        self.chunks.len() * size_of::<Option<Box<[u16; PART_PAGES]>>>() + self.made * PART_PAGES * size_of::<u16>()
    }

    /// Pages by the age of their stamp; in the last place those that are older than all windows.
    pub(crate) fn ages(&self, histogram: &mut [u64]) {
        let last = histogram.len() - 1;
        let mut left = u64::from(self.pages);
        for &stamp in self.chunks.iter().flatten().flat_map(|chunk| chunk.iter()).filter(|&&stamp| stamp != 0) {
            histogram[usize::from(self.now - stamp).min(last)] += 1;
            left -= 1;
        }
        histogram[last] += left;
    }

    /// Pages of a part, and how many pages of each part have a stamp of this age or younger.
    pub(crate) fn heat(&self, youngest: u16) -> (u32, Vec<u32>) {
        let chunks = self.pages.div_ceil(PARTS).div_ceil(PART_PAGES as u32).max(1) as usize;
        let hot = |stamp: &&u16| **stamp != 0 && self.now - **stamp <= youngest;
        let of_part = |part: &[Option<Box<[u16; PART_PAGES]>>]| {
            part.iter().flatten().flat_map(|chunk| chunk.iter()).filter(hot).count() as u32
        };
        ((chunks * PART_PAGES) as u32, self.chunks.chunks(chunks).map(of_part).collect())
    }
}

#[cfg(test)]
mod tests;
