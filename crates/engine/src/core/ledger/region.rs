//! One region under management.

use std::collections::TryReserveError;
use std::sync::Arc;

use dirty::{DirtyTree, NewError};
use kmem::pagemap::PageRun;
use wire::{PageNo, Run};

use super::ages::{Ages, Cool};
use super::emptied::Emptied;
use super::entries::{Counts, Entries, Entry, MergedWith};
use super::free_pages::FreePages;
use super::huge::HugePagesOf;
use super::stamps::Stamps;
use crate::core::content::frame::Frame;
use crate::users::Claim;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerError {
    #[error(transparent)]
    Set(#[from] NewError),
    #[error("no memory for the entries of a region: {0}")]
    Entries(#[from] TryReserveError),
}

pub(crate) struct Region<S = Frame> {
    /// First byte in the client's memory.
    pub(crate) start: u64,
    /// Pages, including those that the program has taken back since.
    pub(crate) pages: u32,
    /// Pages still under management.
    pub(crate) managed: u32,
    /// Whether the next scan must look at all pages, and not only at those written since the last.
    pub(crate) first_scan: bool,
    /// When pages were written, while a dirty rate is measured.
    pub(crate) stamps: Option<Stamps>,
    /// What the guest has marked as free, if it marks.
    pub(crate) free: Option<FreePages>,
    /// Its huge pages, where these are split only above a share; made when the first is found.
    pub(crate) huge: Option<HugePagesOf>,
    /// What the agent has reported empty since the last scan began. It may have been filled, and
    /// found, before the report came: then only these pages' being there shows it.
    pub(crate) emptied: Emptied,
    /// Whether its memory was found among the mappings of the process.
    pub(crate) verified: bool,
    /// Pages that are not managed any more; made when the first is.
    gone: Option<DirtyTree>,
    entries: Entries<S>,
    /// How long its pages have been clean.
    pub(crate) ages: Ages,
    /// What the region counts for its user.
    _claim: Option<Claim>,
}

impl<S: MergedWith> Region<S> {
    /// A region of which nothing is known yet. `start`: its first byte.
    pub(crate) fn new(start: u64, pages: u32) -> Result<Self, LedgerError> {
        Ok(Self {
            start,
            pages,
            managed: pages,
            first_scan: true,
            stamps: None,
            free: None,
            huge: None,
            emptied: Emptied::default(),
            verified: false,
            gone: None,
            entries: Entries::new(pages)?,
            ages: Ages::new(start / kmem::PAGE_SIZE as u64, pages)?,
            _claim: None,
        })
    }

    pub(crate) fn counted(self, claim: Claim) -> Self {
        Self { _claim: Some(claim), ..self }
    }

    /// Address of a page in the client's memory.
    pub(crate) fn address(&self, page: PageNo) -> usize {
        self.start as usize + page.index() * kmem::PAGE_SIZE
    }

    /// The pages of a run that a scan of this region found.
    pub(crate) fn pages_of(&self, run: PageRun) -> Run {
        let page = |address: usize| PageNo(((address - self.start as usize) / kmem::PAGE_SIZE) as u32);
        Run::between(page(run.start), page(run.end))
    }

    pub(crate) fn all(&self) -> Run {
        Run::new(PageNo(0), self.pages)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.entries.counts()
    }

    pub(crate) fn bytes(&self) -> u64 {
        let stamps = self.stamps.as_ref().map_or(0, |stamps| stamps.bytes());
        let huge = self.huge.as_ref().map_or(0, HugePagesOf::bytes);
        (self.entries.bytes() + self.ages.bytes() + self.emptied.bytes() + stamps + huge) as u64
    }

    /// These pages are not managed any more. Pages that were not managed before do not count again,
    /// whatever the agent says.
    pub(crate) fn shrink(&mut self, run: Run) -> Result<(), NewError> {
        if self.managed == 0 {
            return Ok(());
        }
        if run == self.all() {
            (self.managed, self.gone) = (0, None);
            return Ok(());
        }
        if self.gone.is_none() {
            self.gone = Some(DirtyTree::new(self.pages.into())?);
        }
        let Some(gone) = &self.gone else { return Ok(()) };
        let end = u64::from(run.end());
        let before = gone.iter_from(run.page.into()).take_while(|&page| page < end).count() as u32;
        gone.insert_range(run.page.into(), run.len.into());
        self.managed = self.managed.saturating_sub(run.len - before);
        Ok(())
    }

    pub(crate) fn known(&self, run: Run) -> impl Iterator<Item = PageNo> {
        self.entries.known(run)
    }

    pub(crate) fn entry(&self, page: PageNo) -> Entry<S> {
        self.entries.get(page)
    }

    pub(crate) fn set(&mut self, page: PageNo, entry: Entry<S>) -> Entry<S> {
        self.entries.set(page, entry)
    }

    /// These pages were recycled, but pending ones. Calls `left` with what else was known of them.
    /// Of those that no scan has ever found to hold memory `most` more count, and are taken off it.
    pub(crate) fn recycle(&mut self, run: Run, most: &mut u64, left: impl FnMut(PageNo, Entry<S>)) {
        let Self { entries, ages, .. } = self;
        entries.recycle(run, |page| ages.is_held(page, most), left);
        self.forget_ages(run);
    }

    /// These pages were given back as zeros: those of which nothing else is known count, as those
    /// of [`Region::recycle`] do.
    pub(crate) fn count_zeros(&mut self, run: Run, most: &mut u64) {
        for page in run.pages() {
            if self.entry(page) == Entry::Fresh && self.ages.is_held(page, most) {
                self.set(page, Entry::Zero);
            }
        }
    }

    /// Pages that count as recycled are ordinary ones again.
    pub(crate) fn forget_recycled(&mut self, run: Run) {
        let recycled: Vec<PageNo> = self.known(run).filter(|&page| self.entry(page) == Entry::Recycled).collect();
        for page in recycled {
            self.set(page, Entry::Fresh);
        }
    }

    /// Pages were found written, or new, in huge pages that are split only above this share.
    pub(crate) fn found_huge(&mut self, pages: Run, share: f64) {
        if self.huge.is_none() {
            // Without memory for the sets they are treated as small pages are.
            self.huge = HugePagesOf::new(self.start, self.pages, share).ok();
        }
        if let Some(huge) = &mut self.huge {
            huge.found(pages);
        }
    }

    /// These pages are in no huge page any more: those that were kept become candidates.
    pub(crate) fn lost_huge(&mut self, pages: Run) {
        for page in self.huge.as_mut().map(|huge| huge.lost(pages)).unwrap_or_default() {
            self.ages.add_candidate(page);
        }
    }

    /// Whether the page is in a huge page that is not to be split yet.
    pub(crate) fn keeps_huge(&self, page: PageNo) -> bool {
        self.huge.as_ref().is_some_and(|huge| huge.keeps(page))
    }

    /// This page of a huge page can be merged. Whether the huge page is given up: new candidates.
    pub(crate) fn can_merge(&mut self, page: PageNo) -> bool {
        let Some(noted) = self.huge.as_mut().and_then(|huge| huge.can_merge(page)) else { return false };
        noted.into_iter().for_each(|page| self.ages.add_candidate(page));
        true
    }

    /// A merge period's scan is over: every page gets older by a period, or young again.
    pub(crate) fn end_scan(&mut self, cool: Cool) {
        self.ages.end_period(cool);
        self.first_scan = false;
    }

    /// Pages that the next scan leaves writable, if any. None while dirty rates are measured.
    pub(crate) fn spared(&self) -> Option<Arc<DirtyTree>> {
        let spared = self.ages.spared();
        (self.stamps.is_none() && !spared.is_empty()).then_some(spared)
    }

    /// These pages are not this region's any more, or are untouched memory.
    pub(crate) fn forget_ages(&mut self, run: Run) {
        self.lost_huge(run);
        self.ages.forget(run);
    }

    /// Up to `max` candidates at or after `from`, ascending. Pages that the guest has marked as
    /// free are left out: they will be recycled, or written before they are used.
    pub(crate) fn candidates(&mut self, from: PageNo, max: usize, into: &mut Vec<PageNo>) {
        into.clear();
        let all = self.ages.candidates(from);
        let Some(free) = &self.free else { return into.extend(all.take(max)) };
        let mut left_out = Vec::new();
        for page in all {
            if free.contains(page) {
                left_out.push(page);
            } else {
                into.push(page);
            }
            if into.len() == max {
                break;
            }
        }
        left_out.into_iter().for_each(|page| self.ages.looked_at(page));
    }

    /// Takes a candidate unread, unless it was predicted wrong or must be read. Whether it did.
    pub(crate) fn predict(&mut self, page: PageNo) -> bool {
        let free = self.free.as_ref().is_some_and(|free| free.contains(page));
        let read = self.keeps_huge(page) || matches!(self.entry(page), Entry::Unshared(_));
        !free && !read && self.ages.predict(page)
    }
}

#[cfg(test)]
mod tests;
