//! The ledger of a file of any length: parts of 8 MiB, each made when a page of it is found.
//!
//! A part goes when nothing is known of its pages any more, and is a list while it has few of them
//! ([`super::few`]). So what a ledger costs follows what is there, whatever the file's length and
//! wherever its pages lie.

use std::cell::Cell;
use std::ops::ControlFlow;

use wire::{PageNo, Run};

use super::ages::Cool;
use super::entries::{Counts, Entry, MergedWith};
use super::few::{self, Few};
use super::free_pages::FreePages;
use super::region::{LedgerError, Region};

/// Pages of a part; a word of `all_written` has a bit for each 64 of them.
const PART: u32 = 64 * u32::BITS;

/// Pages whose numbers a ledger can tell, in whole windows of scans: 16 TiB. What a file has behind
/// them is not merged.
pub(crate) const PAGES: u32 = u32::MAX / (1 << 15) * (1 << 15);

/// All of them.
pub(crate) const ALL: Run = Run::new(PageNo(0), PAGES);

enum Pages<S> {
    Few(Few<S>),
    Many(Box<Region<S>>),
}

use Pages::{Few as List, Many};

struct Part<S> {
    number: u32,
    /// For each word of dirty bits whether the last harvest of it found all of them.
    all_written: u32,
    pages: Pages<S>,
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

    /// It becomes a region if it has too many pages for a list with those of the run, its own.
    fn make_room(&mut self, run: Run, period: u64) -> Result<(), LedgerError> {
        if let List(list) = &self.pages
            && !list.has_room(Run::new(PageNo(run.page.0 % PART), run.len))
        {
            let mut region = Region::new(u64::from(self.first()) * kmem::PAGE_SIZE as u64, PART)?;
            region.ages.at_period(period);
            list.enter(&mut region);
            self.pages = Many(Box::new(region));
        }
        Ok(())
    }

    /// Every page gets older by a period. Whether anything is known of the part.
    fn end_scan(&mut self, period: u64) -> bool {
        let first = self.first();
        match &mut self.pages {
            List(list) => list.end_scan(period, first),
            Many(region) => {
                region.end_scan(Cool::Copies);
                if let Some(list) = Few::of(region) {
                    self.pages = List(list);
                }
            }
        }
        match &self.pages {
            List(list) => !list.is_idle(),
            Many(region) => region.counts() != Counts::default() || !region.ages.is_idle(),
        }
    }

    fn bytes(&self) -> u64 {
        match &self.pages {
            List(list) => list.bytes() as u64,
            Many(region) => region.bytes() + size_of::<Region<S>>() as u64,
        }
    }

    fn counts(&self) -> Counts {
        match &self.pages {
            List(list) => list.counts(),
            Many(region) => region.counts(),
        }
    }

    /// Words all of whose pages the next scan spares, if all of them were found written last.
    fn spared(&self) -> Vec<Run> {
        let mut full = Vec::new();
        let (mut word, mut count) = (0, 0);
        let mut each = |page: u32| {
            count = if page / 64 == word { count + 1 } else { 1 };
            word = page / 64;
            let is_full = count == 64 && self.all_written >> word & 1 == 1;
            full.extend(is_full.then(|| self.in_file(Run::new(PageNo(word * 64), 64))));
        };
        match &self.pages {
            List(list) => list.spared().for_each(|page| each(page.0)),
            Many(region) => region.spared().iter().flat_map(|set| set.iter()).for_each(|page| each(page as u32)),
        }
        full
    }

    /// Pages of which something may be known, by their numbers in the file.
    fn known(&self, run: Run) -> impl Iterator<Item = PageNo> {
        let (list, region) = match &self.pages {
            List(list) => (Some(list.known(run)), None),
            Many(region) => (None, Some(region.known(run))),
        };
        let first = self.first();
        list.into_iter().flatten().chain(region.into_iter().flatten()).map(move |page| page + first)
    }

    fn entry(&self, page: PageNo) -> Entry<S> {
        match &self.pages {
            List(list) => list.entry(page),
            Many(region) => region.entry(page),
        }
    }
}

pub(crate) struct Sparse<S> {
    /// In the order of the file.
    parts: Vec<Part<S>>,
    /// The part that was asked for last: pages come in their order.
    last: Cell<usize>,
    /// Parts that there may be.
    pub(crate) most: usize,
    /// Scans so far.
    period: u64,
    /// Pages that changed within the last two periods, as of the last scan.
    volatile: u64,
    /// What the guest has marked as free, if it marks.
    pub(crate) free: Option<FreePages>,
}

impl<S: MergedWith> Sparse<S> {
    pub(crate) fn new() -> Self {
        Self { parts: Vec::new(), last: Cell::new(0), most: usize::MAX, period: 0, volatile: 0, free: None }
    }

    fn find(&self, number: u32) -> Result<usize, usize> {
        let last = self.last.get();
        if self.parts.get(last).is_some_and(|part| part.number == number) {
            return Ok(last);
        }
        let found = self.parts.binary_search_by_key(&number, |part| part.number);
        found.inspect(|&at| self.last.set(at))
    }

    /// What is known of a page's part, and the page's number there.
    fn of(&self, page: PageNo) -> Option<(&Part<S>, PageNo)> {
        let at = self.find(page.0 / PART).ok()?;
        Some((&self.parts[at], PageNo(page.0 % PART)))
    }

    fn of_mut(&mut self, page: PageNo) -> Option<(&mut Pages<S>, PageNo)> {
        let at = self.find(page.0 / PART).ok()?;
        Some((&mut self.parts[at].pages, PageNo(page.0 % PART)))
    }

    /// The part of a run that ends in it, with room for it. `None`: the file has as many parts
    /// as it may have, or the run is behind [`PAGES`].
    fn make(&mut self, run: Run) -> Result<Option<&mut Pages<S>>, LedgerError> {
        let number = run.page.0 / PART;
        let at = match self.find(number) {
            Ok(at) => at,
            Err(_) if run.page.0 >= PAGES || self.parts.len() >= self.most => return Ok(None),
            Err(at) => {
                few::room_for_one(&mut self.parts)?;
                self.parts.insert(at, Part { number, all_written: 0, pages: List(Few::new()) });
                at
            }
        };
        self.parts[at].make_room(run, self.period)?;
        Ok(Some(&mut self.parts[at].pages))
    }

    /// The parts in which a run has pages.
    fn parts(&self, run: Run) -> impl Iterator<Item = (&Part<S>, Run)> {
        let first = self.parts.partition_point(|part| part.number < run.page.0 / PART);
        self.parts[first..].iter().map_while(move |part| Some((part, part.of(run)?)))
    }

    fn parts_mut(&mut self, run: Run) -> impl Iterator<Item = (&mut Part<S>, Run)> {
        let first = self.parts.partition_point(|part| part.number < run.page.0 / PART);
        self.parts[first..].iter_mut().map_while(move |part| {
            let of = part.of(run)?;
            Some((part, of))
        })
    }

    /// A scan found these pages written: they are no candidates any more.
    pub(crate) fn found_written(&mut self, run: Run) -> Result<(), LedgerError> {
        for run in pieces(run) {
            let here = Run::new(PageNo(run.page.0 % PART), run.len);
            match self.make(run)? {
                Some(List(list)) => list.found_written(here)?,
                Some(Many(region)) => region.ages.found_written(here),
                None => {}
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
        self.period += 1;
        let period = self.period;
        self.parts.retain_mut(|part| part.end_scan(period));
        few::give_room_back(&mut self.parts);
        let of = |part: &Part<S>| match &part.pages {
            List(list) => list.volatile(),
            Many(region) => region.ages.volatile,
        };
        self.volatile = self.parts.iter().map(of).sum();
    }

    /// Pages that were put off become candidates again.
    pub(crate) fn retry_deferred(&mut self) {
        for part in &mut self.parts {
            match &mut part.pages {
                List(list) => list.retry_deferred(),
                Many(region) => region.ages.retry_deferred(),
            }
        }
    }

    /// Up to `max` candidates at or after `from`, as [`Region::candidates`].
    pub(crate) fn candidates(&mut self, from: PageNo, max: usize, into: &mut Vec<PageNo>) {
        into.clear();
        let mut left_out = Vec::new();
        let rest = Run::between(from, PageNo(PAGES));
        let mut take = |page: PageNo| {
            if self.free.as_ref().is_some_and(|free| free.contains(page)) {
                left_out.push(page);
            } else {
                into.push(page);
            }
            if into.len() < max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        };
        let _ = self.parts(rest).try_for_each(|(part, of)| match &part.pages {
            List(list) => list.candidates(of.page).try_for_each(|page| take(page + part.first())),
            Many(region) => region.ages.candidates(of.page).try_for_each(|page| take(page + part.first())),
        });
        left_out.into_iter().for_each(|page| self.looked_at(page));
    }

    pub(crate) fn due(&self) -> u64 {
        let of = |part: &Part<S>| match &part.pages {
            List(list) => list.due(),
            Many(region) => region.ages.due(),
        };
        self.parts.iter().map(of).sum()
    }

    pub(crate) fn volatile(&self) -> u64 {
        self.volatile
    }

    pub(crate) fn bytes(&self) -> u64 {
        let parts = self.parts.iter().map(|part| part.bytes()).sum::<u64>();
        parts + (self.parts.capacity() * size_of::<Part<S>>() + size_of::<Self>()) as u64
    }

    pub(crate) fn counts(&self) -> Counts {
        self.parts.iter().fold(Counts::default(), |sum, part| sum + part.counts())
    }

    /// Pages of the run of which something may be known.
    pub(crate) fn known(&self, run: Run) -> impl Iterator<Item = PageNo> {
        self.parts(run).flat_map(|(part, of)| part.known(of))
    }

    /// Pages of the run that count as recycled.
    pub(crate) fn recycled(&self, run: Run) -> impl Iterator<Item = PageNo> {
        let parts = self.parts(run).filter(|(part, _)| part.counts().recycled > 0);
        parts.flat_map(|(part, of)| part.known(of).filter(|&page| part.entry(PageNo(page.0 % PART)) == Entry::Recycled))
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
        self.of(page).map_or(Entry::Fresh, |(part, page)| part.entry(page))
    }

    /// Does nothing where the page's part is missing: nobody has found the page.
    pub(crate) fn set(&mut self, page: PageNo, entry: Entry<S>) -> Entry<S> {
        match self.of_mut(page) {
            Some((List(list), page)) => list.set(page, entry),
            Some((Many(region), page)) => region.set(page, entry),
            None => Entry::Fresh,
        }
    }

    /// These pages were recycled. Calls `left` with what else was known of them.
    pub(crate) fn recycle(&mut self, run: Run, mut left: impl FnMut(PageNo, Entry<S>)) {
        for run in pieces(run) {
            let first = run.page.0 / PART * PART;
            let of = Run::new(PageNo(run.page.0 % PART), run.len);
            let left = |page: PageNo, entry| left(page + first, entry);
            match self.make(run) {
                Ok(Some(List(list))) => list.recycle(of, left),
                Ok(Some(Many(region))) => region.recycle(of, &mut u64::from(of.len), left),
                _ => {}
            }
        }
    }

    /// Nothing is known of these pages' ages any more.
    pub(crate) fn forget_ages(&mut self, run: Run) {
        self.parts_mut(run).for_each(|(part, of)| match &mut part.pages {
            List(list) => list.forget_ages(of),
            Many(region) => region.forget_ages(of),
        });
    }

    pub(crate) fn looked_at(&mut self, page: PageNo) {
        match self.of_mut(page) {
            Some((List(list), page)) => list.looked_at(page),
            Some((Many(region), page)) => region.ages.looked_at(page),
            None => {}
        }
    }

    pub(crate) fn restart(&mut self, page: PageNo) {
        match self.of_mut(page) {
            Some((List(list), page)) => list.restart(page),
            Some((Many(region), page)) => region.ages.restart(page),
            None => {}
        }
    }

    pub(crate) fn defer(&mut self, page: PageNo) {
        match self.of_mut(page) {
            Some((List(list), page)) => list.defer(page),
            Some((Many(region), page)) => region.ages.defer(page),
            None => {}
        }
    }

    pub(crate) fn differs(&mut self, page: PageNo) -> bool {
        match self.of_mut(page) {
            Some((List(list), page)) => list.differs(page),
            Some((Many(region), page)) => region.ages.differs(page),
            None => false,
        }
    }

    /// As [`Region::predict`].
    pub(crate) fn predict(&mut self, page: PageNo) -> bool {
        if self.free.as_ref().is_some_and(|free| free.contains(page)) {
            return false;
        }
        match self.of_mut(page) {
            Some((List(list), page)) => list.predict(page),
            Some((Many(region), page)) => region.predict(page),
            None => false,
        }
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
