//! The page ledger of one region: what is known of each page, and which pages it is time to read.
//!
//! An entry is 4 bytes a page. Ages are three sets: a page that a scan finds written goes into `young`; one that stays
//! clean moves on to `older` with the next scan and to `candidates` with the one after: it did not change for two merge
//! periods, and will be read once. A write at any time takes it back to `young`.
//!
//! ```text
//!   written ──▶ young ──clean──▶ older ──clean──▶ candidates ──read──▶ unshared / pending
//!      ▲                                                                     │ window
//!      └──────────── written, or the window found it different ◀── merged ◀──┘
//! ```
//!
//! *Copied pages rest.* A page that was merged and then written lies, as a copy, in a mapping of the store. There the agent
//! can't check it for pins (`UFFDIO_MOVE` takes anonymous mappings only), and a device that is about to write into it, through
//! a direct I/O request that hangs, would be cut off by a merge. Such pages must stay clean for a further time, longer than
//! any one request takes: they wait in `resting` for one to two turns of it.

use dirty::Bitmap;
use kmem::pagemap::PageRun;

use crate::store::Frame;

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
        }
    }

    fn from_word(word: u32) -> Self {
        match (word >> 30, word & LOW) {
            (0, _) => Entry::Fresh,
            (1, handle) => Entry::Unshared(handle),
            (2, frame) => Entry::Merged(Frame(frame)),
            (_, 0) => Entry::Zero,
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
    entries: Vec<u32>,
    counts: Counts,
    young: Bitmap,
    older: Bitmap,
    candidates: Bitmap,
    deferred: Bitmap,
    written: Bitmap,
    /// Pages that lie in a mapping of the store as copies.
    copies: Bitmap,
    /// Copies that are clean, since this turn and since the one before.
    resting: [Bitmap; 2],
}

impl Region {
    pub(crate) fn new(start: u64, pages: u32) -> Self {
        let set = || Bitmap::new(pages);
        Self {
            start,
            pages,
            managed: pages,
            first_scan: true,
            volatile: 0,
            entries: vec![0; pages as usize],
            counts: Counts::default(),
            young: set(),
            older: set(),
            candidates: set(),
            deferred: set(),
            written: set(),
            copies: set(),
            resting: [set(), set()],
        }
    }

    pub(crate) fn address(&self, page: u32) -> usize {
        self.start as usize + page as usize * kmem::PAGE_SIZE
    }

    /// The pages of a run that a scan of this region found.
    pub(crate) fn pages_of(&self, run: PageRun) -> std::ops::Range<u32> {
        let page = |address: usize| ((address - self.start as usize) / kmem::PAGE_SIZE) as u32;
        page(run.start)..page(run.end)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes that the ledger takes for this region.
    pub(crate) fn bytes(&self) -> u64 {
        (self.entries.len() * 4 + 8 * self.young.bytes()) as u64
    }

    pub(crate) fn entry(&self, page: u32) -> Entry {
        self.entries.get(page as usize).map_or(Entry::Fresh, |&word| Entry::from_word(word))
    }

    fn count(&mut self, entry: Entry) -> Option<&mut u64> {
        match entry {
            Entry::Fresh => None,
            Entry::Unshared(_) => Some(&mut self.counts.unshared),
            Entry::Merged(_) => Some(&mut self.counts.merged),
            Entry::Zero => Some(&mut self.counts.zero),
            Entry::Pending => Some(&mut self.counts.pending),
        }
    }

    /// Writes an entry and returns the one before it.
    pub(crate) fn set(&mut self, page: u32, entry: Entry) -> Entry {
        let Some(word) = self.entries.get_mut(page as usize) else { return Entry::Fresh };
        let before = Entry::from_word(std::mem::replace(word, entry.word()));
        if let Some(n) = self.count(before) {
            *n -= 1;
        }
        if let Some(n) = self.count(entry) {
            *n += 1;
        }
        before
    }

    /// A scan begins.
    pub(crate) fn begin_scan(&mut self) {
        self.written.clear();
    }

    /// The scan found these pages written.
    pub(crate) fn mark_written(&mut self, first: u32, len: u32) {
        self.written.insert_range(first, len);
    }

    /// The scan is over: every page gets older by a period, or young again.
    pub(crate) fn end_scan(&mut self) {
        let mut clean = std::mem::take(&mut self.older);
        for page in clean.iter().filter(|&page| self.copies.contains(page)) {
            self.resting[0].insert(page);
        }
        clean.subtract(&self.resting[0]);
        self.candidates.unite(&clean);
        self.older = clean;
        let [now, before] = &mut self.resting;
        for set in [&mut self.candidates, &mut self.deferred, now, before] {
            set.subtract(&self.written);
        }
        std::mem::swap(&mut self.older, &mut self.young);
        self.older.subtract(&self.written);
        std::mem::swap(&mut self.young, &mut self.written);
        self.volatile = u64::from(self.young.count()) + u64::from(self.older.count());
        self.first_scan = false;
    }

    /// The page was merged and has been written since: it is a copy now.
    pub(crate) fn copied(&mut self, page: u32) {
        self.copies.insert(page);
    }

    /// A turn of rest is over: copies that were clean all through it become candidates.
    pub(crate) fn end_rest(&mut self) {
        let [now, before] = &mut self.resting;
        self.candidates.unite(before);
        before.clear();
        std::mem::swap(now, before);
    }

    /// Starts a page's life again: it will be read when it has been clean for two periods.
    pub(crate) fn restart(&mut self, page: u32) {
        self.young.insert(page);
    }

    /// Puts a page off until [`Region::retry_deferred`].
    pub(crate) fn defer(&mut self, page: u32) {
        self.deferred.insert(page);
    }

    /// Whatever was put off becomes a candidate again.
    pub(crate) fn retry_deferred(&mut self) {
        self.candidates.unite(&self.deferred);
        self.deferred.clear();
    }

    /// The pages are not this region's any more, or are untouched memory.
    pub(crate) fn forget_ages(&mut self, first: u32, len: u32) {
        let [now, before] = &mut self.resting;
        for set in
            [&mut self.young, &mut self.older, &mut self.candidates, &mut self.deferred, &mut self.copies, now, before]
        {
            set.remove_range(first, len);
        }
    }

    /// Up to `max` candidates at or after `from`, ascending.
    pub(crate) fn candidates(&self, from: u32, max: usize, into: &mut Vec<u32>) {
        self.candidates.collect_from(from, max, into);
    }

    /// The page has been looked at.
    pub(crate) fn looked_at(&mut self, page: u32) {
        self.candidates.remove(page);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(region: &mut Region, written: &[u32]) -> Vec<u32> {
        region.begin_scan();
        written.iter().for_each(|&p| region.mark_written(p, 1));
        region.end_scan();
        let mut out = Vec::new();
        region.candidates(0, usize::MAX, &mut out);
        out
    }

    #[test]
    fn a_page_is_a_candidate_when_it_was_clean_for_two_periods() {
        let mut region = Region::new(0, 100);
        assert!(scan(&mut region, &[3, 4, 70]).is_empty());
        assert!(scan(&mut region, &[4]).is_empty(), "one period");
        assert_eq!(scan(&mut region, &[]), [3, 70], "two periods");
        assert_eq!(scan(&mut region, &[70]), [3, 4], "a write takes it back");
        region.looked_at(3);
        assert_eq!(scan(&mut region, &[]), [4]);
        assert_eq!(scan(&mut region, &[]), [4, 70]);
    }

    #[test]
    fn deferred_pages_wait_until_they_are_asked_for_or_written() {
        let mut region = Region::new(0, 10);
        region.defer(1);
        region.defer(2);
        assert!(scan(&mut region, &[2]).is_empty());
        region.retry_deferred();
        assert_eq!(scan(&mut region, &[]), [1]);
    }

    #[test]
    fn copies_rest_for_a_whole_turn_more() {
        let mut region = Region::new(0, 100);
        region.copied(7);
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
    fn discarded_copies_are_copies_no_more() {
        let mut region = Region::new(0, 100);
        region.copied(7);
        region.forget_ages(0, 100);
        scan(&mut region, &[7]);
        scan(&mut region, &[]);
        assert_eq!(scan(&mut region, &[]), [7]);
    }

    #[test]
    fn entries_survive_their_word_and_are_counted() {
        let mut region = Region::new(0, 8);
        let entries = [Entry::Unshared(LOW), Entry::Merged(Frame(LOW)), Entry::Zero, Entry::Pending, Entry::Fresh];
        for (page, entry) in entries.into_iter().enumerate() {
            assert_eq!(region.set(page as u32, entry), Entry::Fresh);
            assert_eq!(region.entry(page as u32), entry);
        }
        assert_eq!(region.counts(), Counts { unshared: 1, merged: 1, zero: 1, pending: 1 });
        assert_eq!(region.set(1, Entry::Zero), Entry::Merged(Frame(LOW)));
        assert_eq!(region.counts(), Counts { unshared: 1, merged: 0, zero: 2, pending: 1 });
        assert_eq!(region.set(99, Entry::Zero), Entry::Fresh, "past the end: nothing");
        assert_eq!(region.entry(99), Entry::Fresh);
    }
}
