//! What the agent knows of each region. Pure tables: no mapping is changed here.
//!
//! Page numbers count from the region's original start. A region can be cut: it keeps its name and
//! its numbering, and a list of the parts that are still managed.

#![allow(unsafe_code)] // The bitmap lies in memory mapped for it, so that parts never touched cost nothing.

use kmem::range::Range;
use kmem::{PAGE_SIZE, mm, raw};
use wire::{PageNo, RegionId, Run};

/// Consecutive pages of a region: from `start` up to and without `end`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pages {
    /// First page.
    pub start: u32,
    /// The page behind the last.
    pub end: u32,
}

impl Pages {
    /// `len` pages from `start` on.
    pub const fn new(start: u32, len: u32) -> Pages {
        Pages { start, end: start + len }
    }

    /// How many.
    pub const fn len(&self) -> u32 {
        self.end - self.start
    }

    /// The pages in both, if any.
    pub fn intersect(&self, other: Pages) -> Option<Pages> {
        let both = Pages { start: self.start.max(other.start), end: self.end.min(other.end) };
        (both.start < both.end).then_some(both)
    }

    /// Whether all of `other` is in it.
    pub const fn contains(&self, other: Pages) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

impl From<Run> for Pages {
    fn from(run: Run) -> Pages {
        Pages::new(run.page.0, run.len)
    }
}

impl From<Pages> for Run {
    fn from(pages: Pages) -> Run {
        Run::new(PageNo(pages.start), pages.len())
    }
}

/// Advice of the program that belongs to mappings, so that every mapping which the agent puts there
/// needs it again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sticky {
    /// `MADV_DONTFORK`.
    pub dont_fork: bool,
    /// `MADV_DONTDUMP`.
    pub dont_dump: bool,
    /// `MADV_HUGEPAGE` (true) or `MADV_NOHUGEPAGE` (false).
    pub huge: Option<bool>,
    /// The memory was mapped with `MAP_NORESERVE`.
    pub no_reserve: bool,
}

/// Memory under management.
pub struct Region {
    /// Its name on the wire.
    pub id: RegionId,
    /// What was marked.
    pub range: Range,
    /// Pages that are covered by a mapping of a segment, also after a write has copied them.
    pub mapped: Bitmap,
    /// See [`Sticky`].
    pub sticky: Sticky,
    /// Some mapping inside may lack `MADV_DONTFORK` although the program gave it.
    pub leaks_into_children: bool,
    managed: Vec<Pages>,
}

impl Region {
    /// A region, all of it managed, nothing of it merged. `None` if there is no memory for its
    /// bitmap.
    pub fn new(id: RegionId, range: Range, sticky: Sticky) -> Option<Region> {
        let pages = u32::try_from(range.pages()).ok()?;
        Some(Region {
            id,
            range,
            mapped: Bitmap::new(pages)?,
            sticky,
            leaks_into_children: false,
            managed: vec![Pages::new(0, pages)],
        })
    }

    /// The addresses of pages.
    pub fn bytes(&self, pages: Pages) -> Range {
        Range::new(self.range.start + pages.start as usize * PAGE_SIZE, pages.len() as usize * PAGE_SIZE)
    }

    /// The managed parts, ascending.
    pub fn managed(&self) -> &[Pages] {
        &self.managed
    }

    /// The managed parts inside a range of addresses.
    pub fn managed_in(&self, range: Range) -> impl Iterator<Item = Pages> {
        let wanted = self.range.intersect(&range).map(|both| {
            let start = (both.start - self.range.start) / PAGE_SIZE;
            Pages::new(start as u32, both.pages() as u32)
        });
        self.managed.iter().filter_map(move |part| part.intersect(wanted?))
    }

    /// Whether all these pages are managed.
    pub fn manages(&self, pages: Pages) -> bool {
        self.managed.iter().any(|part| part.contains(pages))
    }

    /// Whether children that the program forks get a copy of some of its mappings.
    pub fn is_inherited(&self) -> bool {
        !self.sticky.dont_fork || self.leaks_into_children
    }

    /// Takes pages out of management and forgets what they map.
    pub fn drop_pages(&mut self, pages: Pages) {
        let mut left = Vec::with_capacity(self.managed.len() + 1);
        for part in &self.managed {
            let before = Pages { start: part.start, end: part.end.min(pages.start) };
            let after = Pages { start: part.start.max(pages.end), end: part.end };
            left.extend([before, after].into_iter().filter(|rest| rest.start < rest.end));
        }
        self.managed = left;
        self.mapped.clear(pages);
    }

    /// How many mappings more there are at most when these pages get one of their own: it takes the
    /// place of what lies between two others, or leaves rests of it on its sides.
    pub fn new_maps(&self, pages: Pages) -> usize {
        if self.mapped.any(pages) {
            return 2;
        }
        let before = pages.start.checked_sub(1).map(|page| Pages::new(page, 1));
        let behind = (pages.end < self.mapped.bits).then_some(Pages::new(pages.end, 1));
        [before, behind].into_iter().flatten().filter(|&page| !self.mapped.any(page)).count()
    }

    /// The parts that are not managed any more, ascending.
    pub fn holes(&self) -> impl Iterator<Item = Pages> {
        let ends = self.managed.iter().map(|part| part.end);
        let starts = self.managed.iter().map(|part| part.start);
        std::iter::once(0)
            .chain(ends)
            .zip(starts.chain(std::iter::once(self.range.pages() as u32)))
            .map(|(start, end)| Pages { start, end })
            .filter(|hole| hole.start < hole.end)
    }
}

/// One bit a page.
pub struct Bitmap {
    words: *mut u64,
    bits: u32,
}

// SAFETY: the words belong to the bitmap alone.
unsafe impl Send for Bitmap {}

impl Bitmap {
    /// All clear.
    pub fn new(bits: u32) -> Option<Bitmap> {
        let words = mm::map_anonymous(Bitmap::size(bits)).ok()? as *mut u64;
        Some(Bitmap { words, bits })
    }

    fn size(bits: u32) -> usize {
        (bits as usize).div_ceil(64).max(1) * 8
    }

    fn words(&self) -> &[u64] {
        // SAFETY: that many words were mapped, and are changed only through `&mut self`.
        unsafe { std::slice::from_raw_parts(self.words, Bitmap::size(self.bits) / 8) }
    }

    fn change(&mut self, pages: Pages, change: impl Fn(&mut u64, u64)) {
        // SAFETY: as in `words`; borrowed for writing.
        let words = unsafe { std::slice::from_raw_parts_mut(self.words, Bitmap::size(self.bits) / 8) };
        let (mut at, end) = (pages.start, pages.end.min(self.bits));
        while at < end {
            let count = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << (at % 64);
            let word = &mut words[(at / 64) as usize];
            // Not written when it stays as it is: clearing must not touch parts that never had a bit.
            let mut changed = *word;
            change(&mut changed, mask);
            if changed != *word {
                *word = changed;
            }
            at += count;
        }
    }

    /// Sets the bits of these pages.
    pub fn set(&mut self, pages: Pages) {
        self.change(pages, |word, mask| *word |= mask);
    }

    /// Clears the bits of these pages.
    pub fn clear(&mut self, pages: Pages) {
        self.change(pages, |word, mask| *word &= !mask);
    }

    /// The first page from `start` up to `end` whose bit is `value`; `end` if there is none.
    fn find(&self, start: u32, end: u32, value: bool) -> u32 {
        let end = end.min(self.bits);
        let mut at = start;
        while at < end {
            let word = self.words()[(at / 64) as usize];
            let wanted = if value { word } else { !word } >> (at % 64);
            if wanted != 0 {
                return (at + wanted.trailing_zeros()).min(end);
            }
            at = at.saturating_add(64 - at % 64);
        }
        end
    }

    /// Whether any bit of these pages is set.
    pub fn any(&self, pages: Pages) -> bool {
        self.next_run(pages).is_some()
    }

    /// The first maximal run of set bits within these pages.
    pub fn next_run(&self, within: Pages) -> Option<Pages> {
        let start = self.find(within.start, within.end, true);
        let end = self.find(start, within.end, false);
        (start < end).then_some(Pages { start, end })
    }

    /// The first maximal run of clear bits within these pages.
    pub fn next_gap(&self, within: Pages) -> Option<Pages> {
        let start = self.find(within.start, within.end, false);
        let end = self.find(start, within.end, true);
        (start < end).then_some(Pages { start, end })
    }
}

impl Drop for Bitmap {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` for this bitmap alone.
        let _ = unsafe { raw::munmap(self.words as usize, Bitmap::size(self.bits)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(pages: usize) -> Region {
        Region::new(RegionId(1), Range::new(0x10_0000, pages * PAGE_SIZE), Sticky::default()).unwrap()
    }

    #[test]
    fn a_mapping_more_is_what_lies_beside_it() {
        let mut region = region(10);
        assert_eq!(region.new_maps(Pages::new(0, 10)), 0, "all of it");
        assert_eq!(region.new_maps(Pages::new(0, 1)), 1, "a rest behind");
        assert_eq!(region.new_maps(Pages::new(4, 2)), 2, "a rest on either side");
        region.mapped.set(Pages::new(4, 2));
        assert_eq!(region.new_maps(Pages::new(6, 1)), 1);
        assert_eq!(region.new_maps(Pages::new(6, 4)), 0, "all between two, and at the end");
        assert_eq!(region.new_maps(Pages::new(4, 1)), 2, "in a mapping: as if in its middle");
    }

    #[test]
    fn a_region_is_cut_and_keeps_its_numbering() {
        let mut region = region(100);
        region.mapped.set(Pages::new(0, 100));
        region.drop_pages(Pages::new(10, 20));
        region.drop_pages(Pages::new(25, 10));
        region.drop_pages(Pages::new(90, 10));
        assert_eq!(region.managed(), [Pages::new(0, 10), Pages::new(35, 55)]);
        assert_eq!(region.holes().collect::<Vec<_>>(), [Pages::new(10, 25), Pages::new(90, 10)]);
        assert!(
            region.manages(Pages::new(35, 55))
                && !region.manages(Pages::new(9, 2))
                && !region.manages(Pages::new(5, 40))
        );
        assert!(!region.mapped.any(Pages::new(10, 25)) && region.mapped.any(Pages::new(9, 2)));
        assert_eq!(region.bytes(Pages::new(35, 1)), Range::new(0x10_0000 + 35 * PAGE_SIZE, PAGE_SIZE));
        let around = Range::new(0x10_0000 + 5 * PAGE_SIZE, 40 * PAGE_SIZE);
        assert_eq!(region.managed_in(around).collect::<Vec<_>>(), [Pages::new(5, 5), Pages::new(35, 10)]);
        assert_eq!(region.managed_in(Range::new(0, 0x10_0000)).count(), 0);
        region.drop_pages(Pages::new(0, 100));
        assert!(region.managed().is_empty());
        assert_eq!(region.holes().collect::<Vec<_>>(), [Pages::new(0, 100)]);
    }

    #[test]
    fn bitmap_agrees_with_a_vector() {
        let bits = 1000u32;
        let mut bitmap = Bitmap::new(bits).unwrap();
        let mut model = vec![false; bits as usize];
        let mut seed = 12345u64;
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as u32 % below
        };
        for _ in 0..3000 {
            let start = random(bits);
            let pages = Pages::new(start, random(bits - start) + 1);
            let pages = if random(3) == 0 { pages } else { Pages::new(start, pages.len().min(7)) };
            let value = random(2) == 0;
            if value {
                bitmap.set(pages)
            } else {
                bitmap.clear(pages)
            }
            model[pages.start as usize..pages.end as usize].fill(value);
            let start = random(bits);
            let within = Pages::new(start, random(bits - start) + 1);
            let slice = &model[within.start as usize..within.end as usize];
            for value in [true, false] {
                let expected = slice.iter().position(|&bit| bit == value).map(|first| {
                    let len = slice[first..].iter().take_while(|&&bit| bit == value).count();
                    Pages::new(within.start + first as u32, len as u32)
                });
                let found = if value { bitmap.next_run(within) } else { bitmap.next_gap(within) };
                assert_eq!(found, expected);
            }
        }
    }
}
