//! A part of a file's ledger with few pages: a list of those of which something is known, 8 bytes
//! for each. A [`Region`] takes 12 KiB at once. Each page goes the way that [`super::ages`] and
//! [`super::hot`] have for sets of pages.

use std::collections::TryReserveError;
use std::marker::PhantomData;

use wire::{PageNo, Run};

use super::entries::{Counts, Entry, MergedWith};
use super::hot::is_spared;
use super::region::{LedgerError, Region};

/// Pages that a list has at most: it becomes a region then.
const MOST: usize = 256;
/// A region with no more than these becomes a list again.
const FEWER: u64 = 160;

/// Which of a region's sets a page is in: a bit for each, in the order of `Ages::sets`.
pub(super) type Sets = u16;
const YOUNG: Sets = 1;
const OLDER: Sets = 1 << 1;
const CANDIDATE: Sets = 1 << 2;
const DEFERRED: Sets = 1 << 3;
const WRITTEN: Sets = 1 << 4;
const PREDICTED: Sets = 1 << 5;
const SPARED: Sets = 1 << 6;
const LEFT: Sets = 1 << 7;
/// The first of three levels of hot pages.
const HOT: Sets = 1 << 8;
const LEVELS: Sets = HOT | HOT << 1 | HOT << 2;
/// A page in none of these is at rest.
const MOVING: Sets = YOUNG | OLDER | CANDIDATE | DEFERRED | WRITTEN;

#[derive(Clone, Copy, Default)]
struct Page {
    at: u16,
    sets: Sets,
    /// 0: fresh.
    entry: u32,
}

impl Page {
    fn number(self) -> PageNo {
        PageNo(self.at.into())
    }

    /// `page`: its number in the file.
    fn end_period(&mut self, period: u64, page: u64) {
        let before = self.sets;
        let is = |set: Sets| before & set != 0;
        let level = match before & LEVELS {
            _ if !is(WRITTEN | YOUNG) => 0,
            // Of one that the last scan left writable it is not known when it was written.
            level if !is(WRITTEN) || is(LEFT) || !is(YOUNG | OLDER) => level,
            0 => HOT,
            level => (level << 1 & LEVELS).max(level),
        };
        let also = |set: Sets, whether: bool| if whether { set } else { 0 };
        self.sets = before & PREDICTED
            | level
            | also(SPARED, level != 0 && is_spared(period, page, (level / HOT).ilog2() + 1))
            | also(LEFT, is(SPARED) && is(WRITTEN))
            | also(CANDIDATE, is(CANDIDATE | OLDER) && !is(WRITTEN))
            | also(DEFERRED, is(DEFERRED) && !is(WRITTEN))
            | also(OLDER, is(YOUNG) && !is(WRITTEN))
            | also(YOUNG, is(WRITTEN));
    }
}

/// Pages by their numbers in the part, in their order.
pub(super) struct Few<S> {
    pages: Vec<Page>,
    with: PhantomData<S>,
}

/// A quarter more at a time: room that nothing uses is memory, too.
pub(super) fn room_for_one<T>(list: &mut Vec<T>) -> Result<(), TryReserveError> {
    if list.len() < list.capacity() { Ok(()) } else { list.try_reserve_exact(1 + list.len() / 4) }
}

/// What went may have been most of it.
pub(super) fn give_room_back<T>(list: &mut Vec<T>) {
    if list.capacity() > 2 * list.len() + 8 {
        list.shrink_to_fit();
    }
}

impl<S: MergedWith> Few<S> {
    pub(super) fn new() -> Self {
        Self { pages: Vec::new(), with: PhantomData }
    }

    /// `None`: it has too many pages.
    pub(super) fn of(region: &Region<S>) -> Option<Self> {
        let known = region.counts().sum();
        if known > FEWER || region.ages.sets().iter().any(|set| set.count() > FEWER) {
            return None;
        }
        let mut pages: Vec<PageNo> =
            region.ages.sets().iter().flat_map(|set| set.iter()).map(|page| PageNo(page as u32)).collect();
        if known > 0 {
            pages.extend(region.known(region.all()).filter(|&page| region.entry(page) != Entry::Fresh));
        }
        pages.sort_unstable();
        pages.dedup();
        let of = |page: PageNo| {
            let is_in = region.ages.sets().map(|set| set.contains(page.into()));
            let sets = (0..).zip(is_in).map(|(bit, is_in)| Sets::from(is_in) << bit).sum();
            Page { at: page.0 as u16, sets, entry: region.entry(page).word() }
        };
        (pages.len() as u64 <= FEWER).then(|| Self { pages: pages.into_iter().map(of).collect(), with: PhantomData })
    }

    /// They go into a region, of which nothing is known.
    pub(super) fn enter(&self, region: &mut Region<S>) {
        for page in &self.pages {
            region.set(page.number(), Entry::from_word(page.entry));
            let sets = (0..).zip(region.ages.sets()).filter(|(bit, _)| page.sets >> bit & 1 == 1);
            sets.for_each(|(_, set)| _ = set.insert(page.at.into()));
        }
    }

    /// Whether all pages of the run have room, too.
    pub(super) fn has_room(&self, run: Run) -> bool {
        self.pages.len() + run.len as usize - self.of_run(run).len() <= MOST
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.capacity() * size_of::<Page>()
    }

    fn find(&self, page: PageNo) -> Result<usize, usize> {
        self.pages.binary_search_by_key(&page, |known| known.number())
    }

    /// What is known of a page, in a place of its own.
    fn page(&mut self, page: PageNo) -> Result<&mut Page, TryReserveError> {
        let at = match self.find(page) {
            Ok(at) => at,
            Err(at) => {
                room_for_one(&mut self.pages)?;
                self.pages.insert(at, Page { at: page.0 as u16, ..Page::default() });
                at
            }
        };
        Ok(&mut self.pages[at])
    }

    /// Adds a page to these sets. Without memory for it, it is as a page that no scan has found.
    fn add(&mut self, page: PageNo, sets: Sets) {
        if let Ok(page) = self.page(page) {
            page.sets |= sets;
        }
    }

    /// What is known of pages of a run, ascending.
    fn of_run(&self, run: Run) -> &[Page] {
        let [from, to] = [run.page, run.end()].map(|page| self.find(page).unwrap_or_else(|at| at));
        &self.pages[from..to]
    }

    fn of_run_mut(&mut self, run: Run) -> &mut [Page] {
        let [from, to] = [run.page, run.end()].map(|page| self.find(page).unwrap_or_else(|at| at));
        &mut self.pages[from..to]
    }

    fn in_sets(&self, sets: Sets) -> impl Iterator<Item = PageNo> {
        self.pages.iter().filter(move |page| page.sets & sets != 0).map(|page| page.number())
    }

    pub(super) fn found_written(&mut self, run: Run) -> Result<(), LedgerError> {
        for page in run.pages() {
            let page = self.page(page)?;
            page.sets = page.sets & !CANDIDATE | WRITTEN;
        }
        Ok(())
    }

    /// Every page gets older by a period, or young again. `first`: the part's, in the file.
    pub(super) fn end_scan(&mut self, period: u64, first: u32) {
        self.pages.iter_mut().for_each(|page| page.end_period(period, (first + u32::from(page.at)).into()));
        self.pages.retain(|page| page.sets != 0 || page.entry != 0);
        give_room_back(&mut self.pages);
    }

    /// Whether nothing is known of its pages, and none will be a candidate by itself.
    pub(super) fn is_idle(&self) -> bool {
        self.pages.iter().all(|page| page.entry == 0 && page.sets & MOVING == 0)
    }

    pub(super) fn retry_deferred(&mut self) {
        for page in self.pages.iter_mut().filter(|page| page.sets & DEFERRED != 0) {
            page.sets = page.sets & !DEFERRED | CANDIDATE;
        }
    }

    pub(super) fn spared(&self) -> impl Iterator<Item = PageNo> {
        self.in_sets(SPARED)
    }

    pub(super) fn candidates(&self, from: PageNo) -> impl Iterator<Item = PageNo> {
        self.in_sets(CANDIDATE).skip_while(move |&page| page < from)
    }

    pub(super) fn due(&self) -> u64 {
        self.in_sets(CANDIDATE).count() as u64
    }

    pub(super) fn volatile(&self) -> u64 {
        self.pages.iter().map(|page| u64::from((page.sets & (YOUNG | OLDER)).count_ones())).sum()
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for page in &self.pages {
            if let Some(count) = counts.of(Entry::<S>::from_word(page.entry)) {
                *count += 1;
            }
        }
        counts
    }

    pub(super) fn known(&self, run: Run) -> impl Iterator<Item = PageNo> {
        self.of_run(run).iter().filter(|page| page.entry != 0).map(|page| page.number())
    }

    pub(super) fn entry(&self, page: PageNo) -> Entry<S> {
        self.find(page).map_or(Entry::Fresh, |at| Entry::from_word(self.pages[at].entry))
    }

    pub(super) fn set(&mut self, page: PageNo, entry: Entry<S>) -> Entry<S> {
        if entry == Entry::Fresh && self.find(page).is_err() {
            return Entry::Fresh;
        }
        let Ok(page) = self.page(page) else { return Entry::Fresh };
        Entry::from_word(std::mem::replace(&mut page.entry, entry.word()))
    }

    pub(super) fn recycle(&mut self, run: Run, mut left: impl FnMut(PageNo, Entry<S>)) {
        self.forget_ages(run);
        for page in run.pages() {
            match self.entry(page) {
                Entry::Pending | Entry::Recycled => {}
                before => {
                    self.set(page, Entry::Recycled);
                    if before != Entry::Fresh {
                        left(page, before);
                    }
                }
            }
        }
    }

    pub(super) fn forget_ages(&mut self, run: Run) {
        let forgotten = YOUNG | OLDER | CANDIDATE | DEFERRED | PREDICTED;
        self.of_run_mut(run).iter_mut().for_each(|page| page.sets &= !forgotten);
    }

    pub(super) fn looked_at(&mut self, page: PageNo) {
        self.forget(page, CANDIDATE | PREDICTED);
    }

    fn forget(&mut self, page: PageNo, sets: Sets) {
        if let Ok(at) = self.find(page) {
            self.pages[at].sets &= !sets;
        }
    }

    pub(super) fn restart(&mut self, page: PageNo) {
        self.add(page, YOUNG);
    }

    pub(super) fn defer(&mut self, page: PageNo) {
        self.add(page, DEFERRED);
    }

    pub(super) fn differs(&mut self, page: PageNo) -> bool {
        let predicted = self.find(page).is_ok_and(|at| self.pages[at].sets & PREDICTED != 0);
        if predicted {
            self.add(page, CANDIDATE);
        }
        predicted
    }

    pub(super) fn predict(&mut self, page: PageNo) -> bool {
        let Ok(at) = self.find(page) else { return false };
        let page = &mut self.pages[at];
        let may = page.sets & (CANDIDATE | PREDICTED) == CANDIDATE;
        if may && !matches!(Entry::<S>::from_word(page.entry), Entry::Unshared(_)) {
            page.sets = page.sets & !CANDIDATE | PREDICTED;
            return true;
        }
        false
    }
}
