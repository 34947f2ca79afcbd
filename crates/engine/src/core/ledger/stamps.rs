//! When pages of a region were last found written, for dirty rates (see `report::rates`).

use wire::PageNo;

/// Parts of a heat map at most, and the pages of the smallest part.
const PARTS: u32 = 1024;
const PART_PAGES: u32 = 512;
/// Stamps (0.1 s) are counted back from here, by this much; older ones count as never.
pub(crate) const REBASE_AT: u16 = 60_000;
pub(crate) const REBASE_BY: u16 = 50_000;

/// When each page of a region was last found written: in tenths of a second, 0 for never.
pub(crate) struct Stamps {
    pages: Box<[u16]>,
    /// What is recorded from now on has this stamp.
    pub(crate) now: u16,
    /// Pages recorded since this was last taken.
    pub(crate) found: u64,
}

impl Stamps {
    /// Of `pages` pages; `now`: the scan under way. `None`: there is no memory.
    pub(crate) fn new(pages: u32, now: u16) -> Option<Self> {
        let mut all = Vec::new();
        all.try_reserve_exact(pages as usize).ok()?;
        all.resize(pages as usize, 0);
        Some(Self { pages: all.into(), now, found: 0 })
    }

    /// Counts all stamps back by [`REBASE_BY`].
    pub(crate) fn rebase(&mut self) {
        self.pages.iter_mut().for_each(|stamp| *stamp = stamp.saturating_sub(REBASE_BY));
    }

    pub(crate) fn record(&mut self, page: PageNo) {
        if let Some(stamp) = self.pages.get_mut(page.index()) {
            *stamp = self.now;
            self.found += 1;
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pages.len() * 2
    }

    /// Pages by the age of their stamp; in the last place those that are older than all windows.
    pub(crate) fn ages(&self, histogram: &mut [u64]) {
        let last = histogram.len() - 1;
        for &stamp in &self.pages {
            let age = if stamp == 0 { last } else { usize::from(self.now - stamp).min(last) };
            histogram[age] += 1;
        }
    }

    /// Pages of a part, and how many pages of each part have a stamp of this age or younger.
    pub(crate) fn heat(&self, youngest: u16) -> (u32, Vec<u32>) {
        let part = (self.pages.len() as u32).div_ceil(PARTS).next_multiple_of(PART_PAGES).max(PART_PAGES);
        let hot = |stamp: &&u16| **stamp != 0 && self.now - **stamp <= youngest;
        (part, self.pages.chunks(part as usize).map(|pages| pages.iter().filter(hot).count() as u32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamps(pages: &[u16], now: u16) -> Stamps {
        Stamps { pages: pages.into(), now, found: 0 }
    }

    #[test]
    fn pages_are_counted_by_the_age_of_their_stamp() {
        let mut histogram = [0; 601];
        stamps(&[0, 700, 699, 690, 100, 1], 700).ages(&mut histogram);
        assert_eq!((histogram[0], histogram[1], histogram[10], histogram[600]), (1, 1, 1, 3));
    }

    #[test]
    fn heat_is_counted_by_parts() {
        let mut pages = vec![0; 1300];
        pages[511] = 100;
        pages[512] = 95;
        pages[513] = 2;
        pages[1299] = 100;
        assert_eq!(stamps(&pages, 100).heat(90), (512, vec![1, 1, 1]));
        let (part, parts) = stamps(&vec![7; 512 * 1024 + 1], 7).heat(90);
        assert_eq!((part, parts.len(), parts[0], parts[512]), (1024, 513, 1024, 1));
    }

    #[test]
    fn a_page_is_recorded_once_a_scan() {
        let mut one = stamps(&[0; 4], 5);
        [3, 3, 9].into_iter().for_each(|page| one.record(PageNo(page)));
        assert_eq!((one.pages.as_ref(), one.found), (&[0, 0, 0, 5][..], 2));
    }
}
