//! The page ledger of one region: what is known of each page, and which pages it is time to read.
//!
//! An entry is 4 bytes a page. Ages are three sets: a page that a scan finds written goes into
//! `young`; one that stays clean moves on to `older` with the next scan and to `candidates` with
//! the one after: it did not change for two merge periods, and will be read once. A write at any
//! time takes it back to `young`.
//!
//! ```text
//!   written ──▶ young ──clean──▶ older ──clean──▶ candidates ──read──▶ unshared / pending
//!      ▲                                                                     │ window
//!      └──────────── written, or the window found it different ◀── merged ◀──┘
//! ```
//!
//! *Copied pages rest.* A page that was merged and then written lies, as a copy, in a mapping of
//! the store. There the agent can't check it for pins (`UFFDIO_MOVE` takes anonymous mappings
//! only), and a device that is about to write into it, through a direct I/O request that hangs,
//! would be cut off by a merge. Such pages must stay clean for a further time, longer than
//! any one request takes: they wait in `resting` for one to two turns of it.

pub(crate) mod free_pages;
pub(crate) mod huge;
pub(crate) mod stamps;
pub(crate) mod written;

use dirty::{DirtyTree, NewError};
use kmem::pagemap::PageRun;
use wire::{PageNo, Run};

use crate::content::frame::Frame;
use crate::ledger::free_pages::FreePages;
use crate::ledger::huge::HugePagesOf;
use crate::ledger::stamps::Stamps;

/// What the ledger says of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Entry {
    /// Nothing is known: untouched, changing, or not read yet.
    Fresh,
    /// Read and unique so far; the index knows it under this handle.
    Unshared(u32),
    /// It maps this frame, and counts as one of its users.
    Merged(Frame),
    /// Given back as a zero page.
    Zero,
    /// Part of a batch that is under way; the batch knows the target.
    Pending,
    /// The guest does not need it; taken back, and untouched since.
    Recycled,
}

const LOW: u32 = (1 << 30) - 1;

impl Entry {
    fn word(self) -> u32 {
        match self {
            Entry::Fresh => 0,
            Entry::Unshared(handle) => 1 << 30 | handle & LOW,
            Entry::Merged(frame) => 2 << 30 | frame.0 & LOW,
            Entry::Zero => 3 << 30,
            Entry::Pending => 3 << 30 | 1,
            Entry::Recycled => 3 << 30 | 2,
        }
    }

    fn from_word(word: u32) -> Self {
        match (word >> 30, word & LOW) {
            (0, _) => Entry::Fresh,
            (1, handle) => Entry::Unshared(handle),
            (2, frame) => Entry::Merged(Frame(frame)),
            (_, 0) => Entry::Zero,
            (_, 2) => Entry::Recycled,
            _ => Entry::Pending,
        }
    }
}

/// Pages of a region by what the ledger says of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) unshared: u64,
    pub(crate) merged: u64,
    pub(crate) zero: u64,
    pub(crate) pending: u64,
    pub(crate) recycled: u64,
}

/// One region under management.
pub(crate) struct Region {
    /// First byte in the client's memory.
    pub(crate) start: u64,
    /// Pages, including those that the program has taken back since.
    pub(crate) pages: u32,
    /// Pages still under management.
    pub(crate) managed: u32,
    /// Whether the next scan must look at all pages, and not only at those written since the last.
    pub(crate) first_scan: bool,
    /// Present pages that changed within the last two periods, as of the last scan.
    pub(crate) volatile: u64,
    /// When pages were written, while somebody wants to know.
    pub(crate) stamps: Option<Stamps>,
    /// What the guest has marked as free, if it marks.
    pub(crate) free: Option<FreePages>,
    /// Its huge pages, where these are split only above a share; made when the first is found.
    pub(crate) huge: Option<HugePagesOf>,
    entries: Vec<u32>,
    counts: Counts,
    young: DirtyTree,
    older: DirtyTree,
    candidates: DirtyTree,
    deferred: DirtyTree,
    written: DirtyTree,
    /// Pages whose target is predicted; among the candidates: those that were predicted wrong.
    predicted: DirtyTree,
    /// Pages that lie in a mapping of the store as copies.
    copies: DirtyTree,
    /// Copies that are clean, since this turn and since the one before.
    resting: [DirtyTree; 2],
    /// Pages found written in this turn of rest, and in the one before.
    lately: [DirtyTree; 2],
}

impl Region {
    pub(crate) fn new(start: u64, pages: u32) -> Result<Self, NewError> {
        let set = || DirtyTree::new(pages.into());
        Ok(Self {
            start,
            pages,
            managed: pages,
            first_scan: true,
            volatile: 0,
            stamps: None,
            free: None,
            huge: None,
            entries: vec![0; pages as usize],
            counts: Counts::default(),
            young: set()?,
            older: set()?,
            candidates: set()?,
            deferred: set()?,
            written: set()?,
            predicted: set()?,
            copies: set()?,
            resting: [set()?, set()?],
            lately: [set()?, set()?],
        })
    }

    pub(crate) fn address(&self, page: PageNo) -> usize {
        self.start as usize + page.index() * kmem::PAGE_SIZE
    }

    /// The pages of a run that a scan of this region found.
    pub(crate) fn pages_of(&self, run: PageRun) -> Run {
        let page = |address: usize| PageNo(((address - self.start as usize) / kmem::PAGE_SIZE) as u32);
        Run::between(page(run.start), page(run.end))
    }

    /// All its pages.
    pub(crate) fn all(&self) -> Run {
        Run::new(PageNo(0), self.pages)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes that the ledger takes for this region.
    pub(crate) fn bytes(&self) -> u64 {
        let stamps = self.stamps.as_ref().map_or(0, |stamps| stamps.bytes());
        let huge = self.huge.as_ref().map_or(0, HugePagesOf::bytes);
        (self.entries.len() * 4 + 11 * self.young.bytes() + stamps + huge) as u64
    }

    pub(crate) fn entry(&self, page: PageNo) -> Entry {
        self.entries.get(page.index()).map_or(Entry::Fresh, |&word| Entry::from_word(word))
    }

    fn count(&mut self, entry: Entry) -> Option<&mut u64> {
        match entry {
            Entry::Fresh => None,
            Entry::Unshared(_) => Some(&mut self.counts.unshared),
            Entry::Merged(_) => Some(&mut self.counts.merged),
            Entry::Zero => Some(&mut self.counts.zero),
            Entry::Pending => Some(&mut self.counts.pending),
            Entry::Recycled => Some(&mut self.counts.recycled),
        }
    }

    /// Writes an entry and returns the one before it.
    pub(crate) fn set(&mut self, page: PageNo, entry: Entry) -> Entry {
        let Some(word) = self.entries.get_mut(page.index()) else { return Entry::Fresh };
        let before = Entry::from_word(std::mem::replace(word, entry.word()));
        if let Some(n) = self.count(before) {
            *n -= 1;
        }
        if let Some(n) = self.count(entry) {
            *n += 1;
        }
        before
    }

    /// These pages were recycled; what is pending stays so. Calls `left` with whatever else was
    /// known of them.
    pub(crate) fn recycle(&mut self, run: Run, mut left: impl FnMut(PageNo, Entry)) {
        self.forget_ages(run);
        let Some(words) = self.entries.get_mut(run.page.index()..run.end().index()) else { return };
        let mut fresh = 0;
        let mut others = Vec::new();
        for (page, word) in run.pages().zip(words) {
            match Entry::from_word(*word) {
                // Nearly all: a guest's free pages are read by nobody.
                Entry::Fresh => {
                    *word = Entry::Recycled.word();
                    fresh += 1;
                }
                Entry::Pending | Entry::Recycled => {}
                entry => others.push((page, entry)),
            }
        }
        self.counts.recycled += fresh;
        for (page, entry) in others {
            self.set(page, Entry::Recycled);
            left(page, entry);
        }
    }

    /// A scan found these pages written, or new, in huge pages that are split only above this
    /// share.
    pub(crate) fn found_huge(&mut self, pages: Run, share: f64) {
        if self.huge.is_none() {
            // Without memory for the sets they are as small pages are.
            self.huge = HugePagesOf::new(self.start, self.pages, share).ok();
        }
        if let Some(huge) = &mut self.huge {
            huge.found(pages);
        }
    }

    /// These pages are in no huge page any more: what was left alone for its sake is to be looked
    /// at.
    pub(crate) fn lost_huge(&mut self, pages: Run) {
        for page in self.huge.as_mut().map(|huge| huge.lost(pages)).unwrap_or_default() {
            self.candidates.insert(page.into());
        }
    }

    /// Whether the page is in a huge page that is not to be split yet.
    pub(crate) fn keeps_huge(&self, page: PageNo) -> bool {
        self.huge.as_ref().is_some_and(|huge| huge.keeps(page))
    }

    /// This page of a huge page that was kept can be merged. Whether its huge page is given up with
    /// that; there are candidates then.
    pub(crate) fn can_merge(&mut self, page: PageNo) -> bool {
        let Some(noted) = self.huge.as_mut().and_then(|huge| huge.can_merge(page)) else { return false };
        for page in noted {
            self.candidates.insert(page.into());
        }
        true
    }

    /// A scan found these pages written: they are no candidates any more.
    pub(crate) fn mark_written(&mut self, run: Run) {
        self.written.insert_range(run.page.into(), run.len.into());
        self.candidates.remove_range(run.page.into(), run.len.into());
    }

    /// Whether a scan between two merge periods has found one of these pages written, perhaps since
    /// it was read or planned: such a page must not be merged now, and grows old from the next
    /// period on.
    pub(crate) fn is_written(&self, run: Run) -> bool {
        self.written.iter_from(run.page.into()).next().is_some_and(|page| page < u64::from(run.end()))
    }

    /// The scan is over: every page gets older by a period, or young again.
    pub(crate) fn end_scan(&mut self) {
        let Self { young, older, candidates, deferred, written, copies, resting: [now, before], .. } = self;
        for page in older.iter().filter(|&page| copies.contains(page)) {
            now.insert(page);
        }
        older.subtract(now);
        candidates.unite(older);
        for set in [candidates, deferred, now, before] {
            set.subtract(written);
        }
        std::mem::swap(older, young);
        older.subtract(written);
        std::mem::swap(young, written);
        written.clear();
        self.volatile = self.young.count() + self.older.count();
        self.first_scan = false;
    }

    /// The page was merged and has been written since: it is a copy now.
    pub(crate) fn copied(&mut self, page: PageNo) {
        self.copies.insert(page.into());
    }

    /// A turn of rest is over: copies that were clean all through it become candidates.
    pub(crate) fn end_rest(&mut self) {
        let [now, before] = &mut self.resting;
        self.candidates.unite(before);
        before.clear();
        std::mem::swap(now, before);
        let [now, before] = &mut self.lately;
        before.clear();
        std::mem::swap(now, before);
    }

    /// These pages were written just now, whatever else they are.
    pub(crate) fn written_lately(&mut self, run: Run) {
        self.lately[0].insert_range(run.page.into(), run.len.into());
    }

    /// Pages that were written within the last one or two turns of rest.
    pub(crate) fn lately(&self) -> impl Iterator<Item = PageNo> {
        self.lately.iter().flat_map(|set| set.iter().map(|page| PageNo(page as u32)))
    }

    /// Copies that rest begin again: whether they were written is not known.
    pub(crate) fn rest_anew(&mut self) {
        for set in &mut self.resting {
            self.young.unite(set);
            set.clear();
        }
    }

    /// Starts a page's life again: it will be read when it has been clean for two periods.
    pub(crate) fn restart(&mut self, page: PageNo) {
        self.young.insert(page.into());
    }

    /// Puts a page off until [`Region::retry_deferred`].
    pub(crate) fn defer(&mut self, page: PageNo) {
        self.deferred.insert(page.into());
    }

    /// Whatever was put off becomes a candidate again.
    pub(crate) fn retry_deferred(&mut self) {
        self.candidates.unite(&self.deferred);
        self.deferred.clear();
    }

    /// The pages are not this region's any more, or are untouched memory.
    pub(crate) fn forget_ages(&mut self, run: Run) {
        self.lost_huge(run);
        let [now, before] = &mut self.resting;
        let Self { young, older, candidates, deferred, copies, predicted, .. } = self;
        for set in [young, older, candidates, deferred, copies, predicted, now, before] {
            set.remove_range(run.page.into(), run.len.into());
        }
    }

    /// Pages that are to be looked at.
    pub(crate) fn due(&self) -> u64 {
        self.candidates.count()
    }

    /// Up to `max` candidates at or after `from`, ascending. Pages that the guest has marked as
    /// free are none: they will be recycled, or written before they are used.
    pub(crate) fn candidates(&mut self, from: PageNo, max: usize, into: &mut Vec<PageNo>) {
        into.clear();
        let all = self.candidates.iter_from(from.into()).map(|page| PageNo(page as u32));
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
        left_out.into_iter().for_each(|page| self.looked_at(page));
    }

    /// Whether a page is to be looked at.
    pub(crate) fn is_candidate(&self, page: PageNo) -> bool {
        self.candidates.contains(page.into())
    }

    /// The page has been looked at.
    pub(crate) fn looked_at(&mut self, page: PageNo) {
        self.candidates.remove(page.into());
        self.predicted.remove(page.into());
    }

    /// Takes a candidate without looking at it, unless that was wrong before or it must be read.
    pub(crate) fn predict(&mut self, page: PageNo) -> bool {
        let free = self.free.as_ref().is_some_and(|free| free.contains(page));
        let read = self.keeps_huge(page) || matches!(self.entry(page), Entry::Unshared(_));
        let may = self.candidates.contains(page.into()) && !self.predicted.contains(page.into()) && !free && !read;
        if may {
            self.candidates.remove(page.into());
            self.predicted.insert(page.into());
        }
        may
    }

    /// A planned page has met its outcome. `true`: it differed from what was predicted; it is a
    /// candidate again, to be read.
    pub(crate) fn settle_prediction(&mut self, page: PageNo, differs: bool) -> bool {
        let wrong = self.predicted.contains(page.into()) && differs;
        if wrong {
            self.candidates.insert(page.into());
        } else {
            self.predicted.remove(page.into());
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(region: &mut Region, written: &[u32]) -> Vec<u32> {
        written.iter().for_each(|&page| region.mark_written(run(page, 1)));
        region.end_scan();
        candidates(region)
    }

    fn candidates(region: &mut Region) -> Vec<u32> {
        let mut out = Vec::new();
        region.candidates(PageNo(0), usize::MAX, &mut out);
        out.into_iter().map(|page| page.0).collect()
    }

    fn run(page: u32, len: u32) -> Run {
        Run::new(PageNo(page), len)
    }

    #[test]
    fn a_page_is_a_candidate_when_it_was_clean_for_two_periods() {
        let mut region = Region::new(0, 100).unwrap();
        assert!(scan(&mut region, &[3, 4, 70]).is_empty());
        assert!(scan(&mut region, &[4]).is_empty(), "one period");
        assert_eq!(scan(&mut region, &[]), [3, 70], "two periods");
        assert_eq!(scan(&mut region, &[70]), [3, 4], "a write takes it back");
        region.looked_at(PageNo(3));
        assert_eq!(scan(&mut region, &[]), [4]);
        assert_eq!(scan(&mut region, &[]), [4, 70]);
    }

    #[test]
    fn a_wrong_prediction_is_not_repeated_until_the_page_was_read() {
        let mut region = Region::new(0, 10).unwrap();
        for _ in 0..3 {
            scan(&mut region, &[]);
        }
        (0..10).for_each(|page| region.restart(PageNo(page)));
        scan(&mut region, &[]);
        scan(&mut region, &[]);
        assert!(region.predict(PageNo(3)) && !region.predict(PageNo(3)), "no candidate any more");
        assert!(region.settle_prediction(PageNo(3), true));
        assert!(candidates(&mut region).contains(&3) && !region.predict(PageNo(3)), "to be read");
        region.looked_at(PageNo(3));
        assert!(!region.settle_prediction(PageNo(3), true), "no prediction: what was read was written since");
        assert!(region.predict(PageNo(4)) && !region.settle_prediction(PageNo(4), false));
    }

    #[test]
    fn a_page_found_written_between_two_periods_is_no_candidate_from_then_on() {
        let mut region = Region::new(0, 10).unwrap();
        for _ in 0..3 {
            scan(&mut region, &[]);
        }
        [2, 3, 4].iter().for_each(|&page| region.restart(PageNo(page)));
        scan(&mut region, &[]);
        assert_eq!(scan(&mut region, &[]), [2, 3, 4]);
        region.mark_written(run(3, 1));
        assert_eq!((candidates(&mut region), region.predict(PageNo(3))), (vec![2, 4], false));
        assert!(region.is_written(run(3, 1)) && region.is_written(run(0, 10)));
        assert!(!region.is_written(run(2, 1)) && !region.is_written(run(4, 6)));
        assert_eq!(scan(&mut region, &[]), [2, 4]);
        assert!(!region.is_written(run(0, 10)));
        assert_eq!(scan(&mut region, &[]), [2, 4]);
        assert_eq!(scan(&mut region, &[]), [2, 3, 4]);
    }

    #[test]
    fn deferred_pages_wait_until_they_are_asked_for_or_written() {
        let mut region = Region::new(0, 10).unwrap();
        region.defer(PageNo(1));
        region.defer(PageNo(2));
        assert!(scan(&mut region, &[2]).is_empty());
        region.retry_deferred();
        assert_eq!(scan(&mut region, &[]), [1]);
    }

    #[test]
    fn copies_rest_for_a_whole_turn_more() {
        let mut region = Region::new(0, 100).unwrap();
        region.copied(PageNo(7));
        scan(&mut region, &[7, 8]);
        scan(&mut region, &[]);
        assert_eq!(scan(&mut region, &[]), [8], "the copy rests");
        region.end_rest();
        assert_eq!(scan(&mut region, &[]), [8], "less than a turn, perhaps");
        region.end_rest();
        assert_eq!(scan(&mut region, &[]), [7, 8]);
        scan(&mut region, &[7]);
        scan(&mut region, &[]);
        scan(&mut region, &[]);
        region.end_rest();
        assert_eq!(scan(&mut region, &[7]), [8], "a write while it rests starts everything again");
        region.end_rest();
        assert_eq!(scan(&mut region, &[]), [8]);
    }

    #[test]
    fn after_a_hold_copies_rest_anew() {
        let mut region = Region::new(0, 100).unwrap();
        region.copied(PageNo(7));
        scan(&mut region, &[7]);
        scan(&mut region, &[]);
        scan(&mut region, &[]);
        region.end_rest();
        region.rest_anew();
        region.end_rest();
        assert!(scan(&mut region, &[]).is_empty(), "it would have been due");
        scan(&mut region, &[]);
        region.end_rest();
        assert!(scan(&mut region, &[]).is_empty(), "it rests again");
        region.end_rest();
        assert_eq!(scan(&mut region, &[]), [7]);
    }

    #[test]
    fn pages_written_lately_are_known_for_a_turn_of_rest() {
        let mut region = Region::new(0, 100).unwrap();
        region.written_lately(run(3, 2));
        region.end_rest();
        region.written_lately(run(50, 1));
        assert_eq!(region.lately().map(|page| page.0).collect::<Vec<_>>(), [50, 3, 4]);
        region.end_rest();
        assert_eq!(
            region.lately().map(|page| page.0).collect::<Vec<_>>(),
            [50],
            "those were written longer ago than a turn"
        );
        region.end_rest();
        assert_eq!(region.lately().count(), 0);
    }

    #[test]
    fn discarded_copies_are_copies_no_more() {
        let mut region = Region::new(0, 100).unwrap();
        region.copied(PageNo(7));
        region.forget_ages(run(0, 100));
        scan(&mut region, &[7]);
        scan(&mut region, &[]);
        assert_eq!(scan(&mut region, &[]), [7]);
    }

    #[test]
    fn recycled_pages_are_counted_and_what_was_known_of_them_is_given_back() {
        let mut region = Region::new(0, 8).unwrap();
        region.set(PageNo(1), Entry::Merged(Frame(5)));
        region.set(PageNo(2), Entry::Pending);
        region.set(PageNo(3), Entry::Unshared(9));
        region.set(PageNo(7), Entry::Merged(Frame(6)));
        region.restart(PageNo(4));
        let mut left = Vec::new();
        region.recycle(run(0, 6), |page, entry| left.push((page.0, entry)));
        assert_eq!(left, [(1, Entry::Merged(Frame(5))), (3, Entry::Unshared(9))]);
        assert_eq!(region.counts(), Counts { merged: 1, pending: 1, recycled: 5, ..Counts::default() });
        scan(&mut region, &[]);
        assert!(scan(&mut region, &[]).is_empty(), "recycled pages are no candidates");
        region.recycle(run(0, 6), |_, _| panic!("nothing is left"));
        assert_eq!(region.counts().recycled, 5);
        region.recycle(run(7, 2), |_, _| panic!("past the end: nothing"));
    }

    #[test]
    fn entries_survive_their_word_and_are_counted() {
        let mut region = Region::new(0, 8).unwrap();
        let entries = [
            Entry::Unshared(LOW),
            Entry::Merged(Frame(LOW)),
            Entry::Zero,
            Entry::Pending,
            Entry::Fresh,
            Entry::Recycled,
        ];
        for (page, entry) in entries.into_iter().enumerate() {
            assert_eq!(region.set(PageNo(page as u32), entry), Entry::Fresh);
            assert_eq!(region.entry(PageNo(page as u32)), entry);
        }
        assert_eq!(region.counts(), Counts { unshared: 1, merged: 1, zero: 1, pending: 1, recycled: 1 });
        assert_eq!(region.set(PageNo(1), Entry::Zero), Entry::Merged(Frame(LOW)));
        assert_eq!(region.counts(), Counts { unshared: 1, merged: 0, zero: 2, pending: 1, recycled: 1 });
        assert_eq!(region.set(PageNo(99), Entry::Zero), Entry::Fresh, "past the end: nothing");
        assert_eq!(region.entry(PageNo(99)), Entry::Fresh);
    }
}
