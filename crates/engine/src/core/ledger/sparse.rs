//! The ledger of a file of any length: parts of 8 MiB, each made when a page of it is found.
//!
//! A part goes when nothing is known of its pages any more. So what a ledger costs follows what is
//! there, whatever the file's length. There are at most [`Sparse::most`] parts: else one page in
//! each 8 MiB would cost its user less than the daemon.

use std::cell::Cell;

use wire::{PageNo, Run};

use super::ages::Cool;
use super::entries::{Counts, Entry, MergedWith};
use super::free_pages::FreePages;
use super::region::{LedgerError, Region};

/// Pages of a part; a word of `all_written` has a bit for each 64 of them.
const PART: u32 = 64 * u32::BITS;

/// Pages whose numbers a ledger can tell, in whole windows of scans: 16 TiB. What a file has behind
/// them is not merged.
pub(crate) const PAGES: u32 = u32::MAX / (1 << 15) * (1 << 15);

/// All of them.
pub(crate) const ALL: Run = Run::new(PageNo(0), PAGES);

struct Part<S> {
    number: u32,
    region: Region<S>,
    /// For each word of dirty bits whether the last harvest of it found all of them.
    all_written: u32,
}

impl<S: MergedWith> Part<S> {
    fn first(&self) -> u32 {
        self.number * PART
    }

    /// Which of its pages are in the run, by their numbers here.
    fn of(&self, run: Run) -> Option<Run> {
        let Run { page, len } = run.intersect(Run::new(PageNo(self.first()), PART))?;
        Some(Run::new(PageNo(page.0 - self.first()), len))
    }

    /// A run of its pages, by their numbers in the file.
    fn in_file(&self, run: Run) -> Run {
        Run::new(run.page + self.first(), run.len)
    }

    /// Words all of whose pages the next scan spares, if all of them were found written last.
    fn spared(&self) -> Vec<Run> {
        let Some(spared) = self.region.spared() else { return Vec::new() };
        let mut full = Vec::new();
        let (mut word, mut count) = (0, 0);
        for page in spared.iter().map(|page| page as u32) {
            count = if page / 64 == word { count + 1 } else { 1 };
            word = page / 64;
            let is_full = count == 64 && self.all_written >> word & 1 == 1;
            full.extend(is_full.then(|| self.in_file(Run::new(PageNo(word * 64), 64))));
        }
        full
    }
}

pub(crate) struct Sparse<S> {
    /// In the order of the file.
    #[expect(clippy::vec_box, reason = "a part is 2 KiB, and may come among others")]
    parts: Vec<Box<Part<S>>>,
    /// The part that was asked for last: pages come in their order.
    last: Cell<usize>,
    /// Parts that there may be.
    pub(crate) most: usize,
    /// What the guest has marked as free, if it marks.
    pub(crate) free: Option<FreePages>,
}

impl<S: MergedWith> Sparse<S> {
    pub(crate) fn new() -> Self {
        Self { parts: Vec::new(), last: Cell::new(0), most: usize::MAX, free: None }
    }

    fn find(&self, number: u32) -> Result<usize, usize> {
        let last = self.last.get();
        if self.parts.get(last).is_some_and(|part| part.number == number) {
            return Ok(last);
        }
        let found = self.parts.binary_search_by_key(&number, |part| part.number);
        found.inspect(|&at| self.last.set(at))
    }

    /// The part of a page, and the page's number there.
    fn of(&self, page: PageNo) -> Option<(&Part<S>, PageNo)> {
        let at = self.find(page.0 / PART).ok()?;
        Some((&self.parts[at], PageNo(page.0 % PART)))
    }

    fn of_mut(&mut self, page: PageNo) -> Option<(&mut Region<S>, PageNo)> {
        let at = self.find(page.0 / PART).ok()?;
        Some((&mut self.parts[at].region, PageNo(page.0 % PART)))
    }

    /// `None`: the file has as many parts as it may have, or the page is behind [`PAGES`].
    fn make(&mut self, page: PageNo) -> Result<Option<&mut Region<S>>, LedgerError> {
        let number = page.0 / PART;
        let at = match self.find(number) {
            Ok(at) => at,
            Err(_) if page.0 >= PAGES || self.parts.len() >= self.most => return Ok(None),
            Err(at) => {
                let start = u64::from(number) * u64::from(PART) * kmem::PAGE_SIZE as u64;
                let part = Part { number, region: Region::new(start, PART)?, all_written: 0 };
                self.parts.try_reserve(1)?;
                self.parts.insert(at, Box::new(part));
                at
            }
        };
        Ok(Some(&mut self.parts[at].region))
    }

    /// The parts in which a run has pages.
    fn parts(&self, run: Run) -> impl Iterator<Item = (&Part<S>, Run)> {
        let first = self.parts.partition_point(|part| part.number < run.page.0 / PART);
        self.parts[first..].iter().map_while(move |part| Some((&**part, part.of(run)?)))
    }

    fn parts_mut(&mut self, run: Run) -> impl Iterator<Item = (&mut Part<S>, Run)> {
        let first = self.parts.partition_point(|part| part.number < run.page.0 / PART);
        self.parts[first..].iter_mut().map_while(move |part| {
            let of = part.of(run)?;
            Some((&mut **part, of))
        })
    }

    /// A scan found these pages written: they are no candidates any more.
    pub(crate) fn found_written(&mut self, run: Run) -> Result<(), LedgerError> {
        for run in pieces(run) {
            if let Some(region) = self.make(run.page)? {
                region.ages.found_written(Run::new(PageNo(run.page.0 % PART), run.len));
            }
        }
        Ok(())
    }

    /// The dirty bits of the pages from `from` on were taken.
    pub(crate) fn took(&mut self, from: PageNo, bits: &[u64]) {
        let run = Run::new(from, bits.len() as u32 * 64);
        for (part, of) in self.parts_mut(run) {
            let skip = (part.first() + of.page.0 - from.0) / 64;
            for (word, bits) in (of.page.0 / 64..of.end().0 / 64).zip(&bits[skip as usize..]) {
                part.all_written = part.all_written & !(1 << word) | u32::from(*bits == u64::MAX) << word;
            }
        }
    }

    /// Words of pages that the next scan leaves writable, in their order.
    pub(crate) fn spared(&self) -> Vec<Run> {
        self.parts.iter().flat_map(|part| part.spared()).collect()
    }

    /// A merge period's scan is over: every page gets older by a period, or young again.
    pub(crate) fn end_scan(&mut self) {
        self.parts.retain_mut(|part| {
            part.region.end_scan(Cool::Copies);
            part.region.counts() != Counts::default() || !part.region.ages.is_idle()
        });
    }

    /// Pages that were put off become candidates again.
    pub(crate) fn retry_deferred(&mut self) {
        self.parts.iter_mut().for_each(|part| part.region.ages.retry_deferred());
    }

    /// Up to `max` candidates at or after `from`, as [`Region::candidates`].
    pub(crate) fn candidates(&mut self, from: PageNo, max: usize, into: &mut Vec<PageNo>) {
        into.clear();
        let mut left_out = Vec::new();
        let rest = Run::between(from, PageNo(PAGES));
        let all = self
            .parts(rest)
            .flat_map(|(part, of)| part.region.ages.candidates(of.page).map(|page| page + part.first()));
        for page in all {
            if self.free.as_ref().is_some_and(|free| free.contains(page)) {
                left_out.push(page);
            } else {
                into.push(page);
            }
            if into.len() == max {
                break;
            }
        }
        left_out.into_iter().for_each(|page| self.looked_at(page));
    }

    pub(crate) fn due(&self) -> u64 {
        self.parts.iter().map(|part| part.region.ages.due()).sum()
    }

    pub(crate) fn volatile(&self) -> u64 {
        self.parts.iter().map(|part| part.region.ages.volatile).sum()
    }

    pub(crate) fn bytes(&self) -> u64 {
        let parts = self.parts.iter().map(|part| part.region.bytes() + size_of::<Part<S>>() as u64 + 8);
        parts.sum::<u64>() + size_of::<Self>() as u64
    }

    pub(crate) fn counts(&self) -> Counts {
        self.parts.iter().fold(Counts::default(), |sum, part| sum + part.region.counts())
    }

    /// Pages of the run of which something may be known.
    pub(crate) fn known(&self, run: Run) -> impl Iterator<Item = PageNo> {
        self.parts(run).flat_map(|(part, of)| part.region.known(of).map(|page| page + part.first()))
    }

    /// Pages of the run that count as recycled.
    pub(crate) fn recycled(&self, run: Run) -> impl Iterator<Item = PageNo> {
        let parts = self.parts(run).filter(|(part, _)| part.region.counts().recycled > 0);
        parts.flat_map(|(part, of)| {
            let known = part.region.known(of).filter(|&page| part.region.entry(page) == Entry::Recycled);
            known.map(|page| page + part.first())
        })
    }

    /// Up to `max` recycled pages from `from` on are ordinary ones again. Returns where to go on.
    pub(crate) fn forget_recycled(&mut self, from: PageNo, max: usize) -> Option<PageNo> {
        let pages: Vec<PageNo> = self.recycled(Run::between(from, PageNo(PAGES))).take(max).collect();
        for &page in &pages {
            self.set(page, Entry::Fresh);
        }
        pages.last().map(|&last| last + 1)
    }

    pub(crate) fn entry(&self, page: PageNo) -> Entry<S> {
        self.of(page).map_or(Entry::Fresh, |(part, page)| part.region.entry(page))
    }

    /// Does nothing where the page's part is missing: nobody has found the page.
    pub(crate) fn set(&mut self, page: PageNo, entry: Entry<S>) -> Entry<S> {
        self.of_mut(page).map_or(Entry::Fresh, |(region, page)| region.set(page, entry))
    }

    /// These pages were recycled. Calls `left` with what else was known of them.
    pub(crate) fn recycle(&mut self, run: Run, mut left: impl FnMut(PageNo, Entry<S>)) {
        for run in pieces(run) {
            if let Ok(Some(region)) = self.make(run.page) {
                let first = run.page.0 / PART * PART;
                let of = Run::new(PageNo(run.page.0 % PART), run.len);
                region.recycle(of, |page, entry| left(page + first, entry));
            }
        }
    }

    /// Nothing is known of these pages' ages any more.
    pub(crate) fn forget_ages(&mut self, run: Run) {
        self.parts_mut(run).for_each(|(part, of)| part.region.forget_ages(of));
    }

    pub(crate) fn looked_at(&mut self, page: PageNo) {
        if let Some((region, page)) = self.of_mut(page) {
            region.ages.looked_at(page);
        }
    }

    pub(crate) fn restart(&mut self, page: PageNo) {
        if let Some((region, page)) = self.of_mut(page) {
            region.ages.restart(page);
        }
    }

    pub(crate) fn defer(&mut self, page: PageNo) {
        if let Some((region, page)) = self.of_mut(page) {
            region.ages.defer(page);
        }
    }

    pub(crate) fn differs(&mut self, page: PageNo) -> bool {
        self.of_mut(page).is_some_and(|(region, page)| region.ages.differs(page))
    }

    /// As [`Region::predict`].
    pub(crate) fn predict(&mut self, page: PageNo) -> bool {
        let free = self.free.as_ref().is_some_and(|free| free.contains(page));
        !free && self.of_mut(page).is_some_and(|(region, page)| region.predict(page))
    }
}

/// A run, cut where parts end.
fn pieces(run: Run) -> impl Iterator<Item = Run> {
    let (mut page, mut left) = (run.page, run.len);
    std::iter::from_fn(move || {
        let piece = Run::new(page, left.min(PART - page.0 % PART));
        left -= piece.len;
        if left > 0 {
            page = piece.end();
        }
        (piece.len > 0).then_some(piece)
    })
}

#[cfg(test)]
mod tests;
