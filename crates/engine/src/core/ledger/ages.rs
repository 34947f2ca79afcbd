//! How long pages have been clean, and so which are to be read next.
//!
//! ```text
//!   written ──▶ young ──clean──▶ older ──clean──▶ candidates ──read──▶ looked at
//!      ▲                           │                  ▲   ▲                │ window
//!      │                           │ of a copy        │   └── deferred ◀───┤ no mappings left
//!      │                           └──▶ cooling ──────┘                    │
//!      └──────────── written, or the window found it different ◀───────────┘
//! ```
//!
//! A page that a scan finds written goes into `young`. One that stays clean moves on to `older`
//! with the next scan of a merge period, and to `candidates` with the one after, to be read once.
//! A write at any time takes it back to `young`.
//!
//! *Cooldown.* A page that was merged and then written lies, as a copy, in a mapping of the store,
//! where the agent cannot check it for pins (`UFFDIO_MOVE` takes anonymous mappings only). A
//! direct I/O request under way could be about to write into it, and a merge would cut it off. So
//! a copy has to stay clean longer than any one request takes: it is in `cooling` for one to two
//! cooldown periods. Where devices write unseen by `UFFDIO_MOVE` elsewhere, too
//! ([`kmem::procfs::unpinned_io`]), *every* page that was written lately cools down.

use std::sync::Arc;

use dirty::{DirtyTree, NewError};
use wire::{PageNo, Run};

use super::hot::Hot;

const SETS: usize = 12 + Hot::SETS;

/// Which pages cool down, of those that were written lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cool {
    Copies,
    All,
}

/// The pages of one region, by age.
pub(crate) struct Ages {
    /// Written between the last two scans of merge periods.
    young: DirtyTree,
    /// Clean for one period.
    older: DirtyTree,
    /// Clean for two periods: to be read.
    candidates: DirtyTree,
    deferred: DirtyTree,
    /// Found written since the last merge period began.
    written: DirtyTree,
    /// Pages whose target is predicted; among the candidates: those that were predicted wrong.
    predicted: DirtyTree,
    /// Pages that lie in a mapping of the store as copies.
    copies: DirtyTree,
    /// Copies that are clean, since this cooldown period and since the one before.
    cooling: [DirtyTree; 2],
    /// Pages found written in this cooldown period, and in the one before.
    recent: [DirtyTree; 2],
    /// Pages that a scan has ever found to hold memory of their own, or that may have between two.
    pub(super) held: DirtyTree,
    /// The next period moves all pages found written to `cooling`: their time is not known.
    cool_written: bool,
    /// Present pages that changed within the last two periods, as of the last scan.
    pub(crate) volatile: u64,
    hot: Hot,
}

fn pages(set: impl Iterator<Item = u64>) -> impl Iterator<Item = PageNo> {
    set.map(|page| PageNo(page as u32))
}

impl Ages {
    /// Of `pages` pages, none written. `first`: the first one's number in its address space.
    pub(crate) fn new(first: u64, pages: u32) -> Result<Self, NewError> {
        let set = || DirtyTree::new(pages.into());
        Ok(Self {
            young: set()?,
            older: set()?,
            candidates: set()?,
            deferred: set()?,
            written: set()?,
            predicted: set()?,
            copies: set()?,
            cooling: [set()?, set()?],
            recent: [set()?, set()?],
            held: set()?,
            cool_written: false,
            volatile: 0,
            hot: Hot::new(first, pages)?,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        SETS * self.young.bytes()
    }

    /// Those that pages of files are in; none of these cools down. [`super::few`] has a bit for
    /// each, in this order.
    pub(super) fn sets(&self) -> [&DirtyTree; 11] {
        let Self { young, older, candidates, deferred, written, predicted, hot, .. } = self;
        let [one, two, three] = &hot.levels;
        [young, older, candidates, deferred, written, predicted, &hot.spared, &hot.left, one, two, three]
    }

    /// So many periods have ended before.
    pub(super) fn at_period(&mut self, period: u64) {
        self.hot.period = period;
    }

    /// A scan found these pages written: they are no candidates any more.
    pub(crate) fn found_written(&mut self, run: Run) {
        self.written.insert_range(run.page.into(), run.len.into());
        self.candidates.remove_range(run.page.into(), run.len.into());
    }

    /// Whether a scan has ever found this page to hold memory. Of others `most` more count as if
    /// one had, and are taken off it.
    pub(super) fn is_held(&self, page: PageNo, most: &mut u64) -> bool {
        let held = self.held.contains(page.into());
        let counts = !held && *most > 0;
        if counts {
            *most -= 1;
            self.held.insert(page.into());
        }
        held || counts
    }

    /// Whether one of these pages was found written since the merge period began.
    pub(crate) fn is_written(&self, run: Run) -> bool {
        self.written.iter_from(run.page.into()).next().is_some_and(|page| page < u64::from(run.end()))
    }

    /// A period's scan is over: every page gets older, or young.
    pub(crate) fn end_period(&mut self, cool: Cool) {
        self.hot.end_period(&self.written, &self.young, &self.older);
        let Self { young, older, candidates, deferred, written, copies, cooling: [now, before], .. } = self;
        let recent = |page| self.recent.iter().any(|set| set.contains(page));
        for page in older.iter().filter(|&page| copies.contains(page) || cool == Cool::All && recent(page)) {
            now.insert(page);
        }
        older.subtract(now);
        candidates.unite(older);
        for set in [candidates, deferred, now, before] {
            set.subtract(written);
        }
        std::mem::swap(older, young);
        older.subtract(written);
        if std::mem::take(&mut self.cool_written) {
            now.unite(written);
            young.clear();
        } else {
            std::mem::swap(young, written);
        }
        written.clear();
        self.volatile = self.young.count() + self.older.count();
    }

    /// Pages that the next scan of a merge period need not protect.
    pub(crate) fn spared(&self) -> Arc<DirtyTree> {
        self.hot.spared.clone()
    }

    /// The page was merged and has been written since: it is a copy now.
    pub(crate) fn copied(&mut self, page: PageNo) {
        self.copies.insert(page.into());
    }

    /// A cooldown period is over: copies that were clean all through it become candidates.
    pub(crate) fn end_cooldown(&mut self) {
        let [now, before] = &mut self.cooling;
        self.candidates.unite(before);
        before.clear();
        std::mem::swap(now, before);
        let [now, before] = &mut self.recent;
        before.clear();
        std::mem::swap(now, before);
    }

    /// Copies that are cooling begin again: whether they were written is not known.
    pub(crate) fn restart_cooldown(&mut self) {
        for set in &mut self.cooling {
            self.young.unite(set);
            set.clear();
        }
    }

    /// Pages found written up to the end of this period cool down: devices may still be writing.
    pub(crate) fn cool_written(&mut self) {
        self.cool_written = true;
    }

    /// Notes that these pages were written just now, whatever else they are.
    pub(crate) fn note_recent(&mut self, run: Run) {
        self.recent[0].insert_range(run.page.into(), run.len.into());
    }

    pub(crate) fn recent(&self) -> impl Iterator<Item = PageNo> {
        pages(self.recent.iter().flat_map(|set| set.iter()))
    }

    /// Pages that changed within two periods, and for how many periods each was written at least.
    pub(crate) fn written_lately(&self, run: Run) -> impl Iterator<Item = (PageNo, u32)> {
        let (first, end) = (u64::from(run.page), u64::from(run.end()));
        let of = move |set: &DirtyTree| set.iter_from(first).take_while(move |&page| page < end).collect::<Vec<u64>>();
        let older = of(&self.older).into_iter().filter(|&page| !self.young.contains(page));
        let all = of(&self.young).into_iter().chain(older.collect::<Vec<u64>>());
        all.map(|page| (PageNo(page as u32), self.hot.periods(page)))
    }

    /// The page becomes young: it will be read when it has been clean for two periods.
    pub(crate) fn restart(&mut self, page: PageNo) {
        self.young.insert(page.into());
    }

    /// Puts a page off until [`Ages::retry_deferred`].
    pub(crate) fn defer(&mut self, page: PageNo) {
        self.deferred.insert(page.into());
    }

    /// Pages that were put off become candidates again.
    pub(crate) fn retry_deferred(&mut self) {
        self.candidates.unite(&self.deferred);
        self.deferred.clear();
    }

    /// These pages are not the region's any more, or are untouched memory.
    pub(crate) fn forget(&mut self, run: Run) {
        let [now, before] = &mut self.cooling;
        let Self { young, older, candidates, deferred, copies, predicted, .. } = self;
        for set in [young, older, candidates, deferred, copies, predicted, now, before] {
            set.remove_range(run.page.into(), run.len.into());
        }
    }

    /// The page is to be read.
    pub(crate) fn add_candidate(&mut self, page: PageNo) {
        self.candidates.insert(page.into());
    }

    pub(crate) fn due(&self) -> u64 {
        self.candidates.count()
    }

    /// Whether all pages are at rest: none is a candidate, and none will be by itself.
    pub(crate) fn is_idle(&self) -> bool {
        let Self { young, older, candidates, deferred, written, cooling: [now, before], .. } = self;
        [young, older, candidates, deferred, written, now, before].iter().all(|set| set.is_empty())
    }

    /// Candidates at or after `from`, ascending.
    pub(crate) fn candidates(&self, from: PageNo) -> impl Iterator<Item = PageNo> {
        pages(self.candidates.iter_from(from.into()))
    }

    pub(crate) fn is_candidate(&self, page: PageNo) -> bool {
        self.candidates.contains(page.into())
    }

    /// The page was read.
    pub(crate) fn looked_at(&mut self, page: PageNo) {
        self.candidates.remove(page.into());
        self.predicted.remove(page.into());
    }

    /// Takes a candidate without reading it, unless it was predicted wrong. Whether it did.
    pub(crate) fn predict(&mut self, page: PageNo) -> bool {
        let may = self.candidates.contains(page.into()) && !self.predicted.contains(page.into());
        if may {
            self.candidates.remove(page.into());
            self.predicted.insert(page.into());
        }
        may
    }

    /// A planned page differs. `true`: it was predicted, and is a candidate again, to be read.
    pub(crate) fn differs(&mut self, page: PageNo) -> bool {
        let predicted = self.predicted.contains(page.into());
        if predicted {
            self.candidates.insert(page.into());
        }
        predicted
    }

    /// A planned page has another outcome.
    pub(crate) fn settled(&mut self, page: PageNo) {
        self.predicted.remove(page.into());
    }
}
