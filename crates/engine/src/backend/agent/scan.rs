//! Scanning a client: which of its pages were written since the last time.
//!
//! ```text
//!   for each region:   PAGEMAP_SCAN          of pages reported empty since: which are there, and
//!                      │ Written             protected: they were filled before the report came
//!                      PAGEMAP_SCAN          which pages were written; protects them anew, but
//!                      │                     for hot pages ([`crate::core::ledger`])
//!                      │ Written
//!                      ├──▶ change log, pages written lately
//!                      PAGEMAP_SCAN, FILE    of those that map frames: which were copied
//!                      │ Written
//!                      └──▶ ledger           entries, ages
//! ```
//!
//! The client's lock is held to apply findings, and not while the kernel scans. Meanwhile the
//! state may change:
//!
//! - *Batches* neither begin nor are under way: a scan begins when nothing is outstanding, and
//!   [`Client::send_batch`] waits for its end. No page must become merged: the scan has cleared
//!   the note that it was written or pinned, and only the findings say so.
//! - *Freezes*, and other scans, wait too: a freeze takes the change log, which lacks what was not
//!   applied yet.
//! - *Discarded and recycled pages* are noted, and findings on them are dropped
//!   ([`crate::client::scanning`]). The next scan finds those that were filled meanwhile.
//! - *Regions* may shrink, go, and come, and the client may be reaped. Findings on a region that
//!   is gone, or another one by the same number, are dropped; a new region is scanned next time.
//!
//! The program writes at any time: such a page is found by the next scan, or differs when the
//! agent compares it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use dirty::DirtyTree;
use kmem::PAGE_SIZE;
use kmem::memfd::HUGE_PAGE_SIZE;
use kmem::pagemap::{Categories, PageRun, Query, Spare};
use kmem::range::Range;
use rustix::io::Errno;
use wire::{PageNo, RegionId, Run};

use crate::client::scanning::without;
use crate::client::{Client, State};
use crate::core::ledger::written::Unmerged;
use crate::core::ledger::{Cool, Entry, Region};
use crate::sync::MutexGuard;
use crate::world::stall::touch;

/// How long one system call that scans should take: an agent that maps waits for it.
const SCAN_TIME: Duration = Duration::from_micros(100);
/// Bytes that the first system call of a scan looks at.
const SCAN_BYTES: usize = 32 << 20;
/// Fewest bytes that one looks at.
const LEAST_SCAN_BYTES: usize = HUGE_PAGE_SIZE;
/// Most bytes that one looks at.
const MOST_SCAN_BYTES: usize = 256 << 20;

/// What to report of every page. Whether it is a file's is asked in a second step, of few pages: it
/// costs a cache miss a page, where all else stands in the page table (8 GiB: 74 ms).
const RETURNED: Categories = Categories::PRESENT.union(Categories::PFNZERO).union(Categories::HUGE);
/// Most pages that a scan has brought back from swap, to see what they are.
const MOST_SWAPPED: usize = 1024;
const POPULATED: Categories = Categories::PRESENT.union(Categories::SWAPPED);
/// Pages that a scan has protected and nobody has written since.
const PROTECTED: Query = Query {
    inverted: Categories::WRITTEN,
    required: Categories::WRITTEN,
    any_of: POPULATED,
    returned: RETURNED,
    write_protect: false,
    check_wp_async: false,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScanFor {
    /// A merge period has passed: every page gets older, or young again.
    Period,
    /// Dirty rates: the findings are kept for the next period's scan.
    Watch,
}

/// The findings of a scan in one region: pages that were written, or are new.
struct Written {
    region: RegionId,
    /// The region as it was when the scan began.
    start: u64,
    pages: u32,
    first_scan: bool,
    runs: Vec<PageRun>,
}

impl Written {
    fn of(id: RegionId, region: &Region) -> Self {
        let &Region { start, pages, first_scan, .. } = region;
        Self { region: id, start, pages, first_scan, runs: Vec::new() }
    }

    fn range(&self) -> Range {
        self.range_of(Run::new(PageNo(0), self.pages))
    }

    fn range_of(&self, run: Run) -> Range {
        Range::new(self.start as usize + run.page.index() * PAGE_SIZE, run.len as usize * PAGE_SIZE)
    }

    /// The ledger of the region, if it is still the one that was scanned.
    fn ledger<'s>(&self, regions: &'s mut BTreeMap<RegionId, Region>) -> Option<&'s mut Region> {
        let same = |region: &Region| {
            (region.start, region.pages, region.first_scan) == (self.start, self.pages, self.first_scan)
        };
        regions.get_mut(&self.region).filter(|region| same(region))
    }
}

impl Client {
    /// Scans every region for pages written since the last time, re-protecting them in the same
    /// step. `state` must be [settled](Client::settled); it is unlocked meanwhile.
    /// Returns how many pages were written, or are new.
    ///
    /// `Err`: `PAGEMAP_SCAN`'s; `EBUSY`: this worker was held up in the client's memory. What was
    /// found until then is entered; the change log is lost.
    pub(crate) fn scan(&self, state: &mut MutexGuard<'_, State>, scan_for: ScanFor) -> Result<u64, Errno> {
        if state.tracking.is_frozen() {
            return Ok(0);
        }
        self.while_scanning(state, |state| self.scan_regions(state, scan_for))
    }

    fn scan_regions(&self, state: &mut MutexGuard<'_, State>, scan_for: ScanFor) -> Result<u64, Errno> {
        let is_period = scan_for == ScanFor::Period;
        if state.tracking.resume() {
            self.find_unseen(state)?;
        }
        let State { observers, regions, .. } = &mut **state;
        observers.stamp_scan(regions, Instant::now());
        // If the scan fails the log is dropped: the kernel's notes of pages found until then are
        // cleared.
        let mut changes = state.observers.changes.take();
        let mut found = 0;
        let regions: Vec<RegionId> = state.regions.keys().copied().collect();
        for id in regions {
            let Some(mut written) = state.regions.get(&id).map(|region| Written::of(id, region)) else { continue };
            state.begin_region(id);
            let query = Query {
                write_protect: true,
                required: if written.first_scan && is_period { Categories::empty() } else { Categories::WRITTEN },
                any_of: POPULATED,
                returned: RETURNED,
                ..Query::default()
            };
            let spared = state.regions.get(&id).filter(|_| is_period).and_then(Region::spared);
            let emptied = state.regions.get_mut(&id).map(|region| region.emptied.take()).unwrap_or_default();
            let mut filled = Vec::new();
            MutexGuard::unlocked(state, || {
                let spared = spared;
                for run in emptied {
                    self.scan_gently(written.range_of(run), &PROTECTED, None, &mut filled)?;
                }
                self.scan_gently(written.range(), &query, spared.as_deref(), &mut written.runs)
            })?;
            let pages = written.runs.iter().map(|run| run.pages() as u64).sum::<u64>();
            found += pages;
            if !written.first_scan {
                state.schedule.dirty.found(pages);
            }
            for run in &written.runs {
                if let Some(changes) = &mut changes {
                    changes.add(Range::new(run.start, run.end - run.start));
                }
            }
            if let Some(region) = written.ledger(&mut state.regions) {
                written.runs.iter().for_each(|&run| region.ages.note_recent(region.pages_of(run)));
            }
            // These were counted, and are in the change log, when a scan found them written.
            written.runs.append(&mut filled);
            self.ask_for_copies(state, &mut written)?;
            self.enter(state, &written, scan_for);
        }
        state.observers.changes = changes.and_then(|mut changes| (!changes.is_too_long()).then_some(changes));
        if scan_for == ScanFor::Period {
            state.totals.full_scans += 1;
            state.schedule.dirty.end_period(Instant::now());
        }
        Ok(found)
    }

    /// Asks which written pages that map frames are copies by now. Of a page in swap the kernel
    /// does not tell; such pages are read, which brings them back, and asked for again. What that
    /// leaves out keeps its frame until it is written again.
    fn ask_for_copies(&self, state: &mut MutexGuard<'_, State>, written: &mut Written) -> Result<(), Errno> {
        let Some(region) = written.ledger(&mut state.regions).filter(|region| region.counts().merged > 0) else {
            return Ok(());
        };
        let merged: Vec<PageRun> =
            written.runs.extract_if(.., |run| region.maps_frames(region.pages_of(*run))).collect();
        if merged.is_empty() {
            return Ok(());
        }
        MutexGuard::unlocked(state, || {
            let mut swapped = Vec::new();
            self.scan_again(&merged, &mut |run| match run.categories & (POPULATED | Categories::FILE) {
                Categories::SWAPPED => swapped.push(run),
                _ => written.runs.push(run),
            })?;
            let pages = swapped.iter().flat_map(|run| (run.start..run.end).step_by(PAGE_SIZE));
            for page in pages.take(MOST_SWAPPED) {
                // A failure shows in the next scan: the page is not present then.
                let _ = touch(self.user.owner, || self.memory.space.read(page, &mut [0])).ok_or(Errno::BUSY)?;
            }
            self.scan_again(&swapped, &mut |run| written.runs.push(run))
        })
    }

    /// Asks for the categories of pages that a scan has found, and whether they belong to a file.
    fn scan_again(&self, runs: &[PageRun], found: &mut dyn FnMut(PageRun)) -> Result<(), Errno> {
        let returned = RETURNED | Categories::FILE | Categories::SWAPPED;
        let query = Query { any_of: POPULATED, returned, ..Query::default() };
        runs.iter().try_for_each(|run| {
            let range = Range::new(run.start, run.end - run.start);
            let scan = || self.memory.pagemap.scan(range, &query, &mut |run| found(run)).map(drop);
            touch(self.user.owner, scan).ok_or(Errno::BUSY)?
        })
    }

    /// Enters findings into the ledger, but for pages that the agent has reported on since.
    fn enter(&self, state: &mut State, written: &Written, scan_for: ScanFor) {
        let overtaken = state.overtaken();
        let cool = if state.schedule.direct_io.why().is_some() { Cool::All } else { Cool::Copies };
        let Some(region) = written.ledger(&mut state.regions) else { return };
        let mut unmerged = Unmerged::default();
        for &run in &written.runs {
            without(region.pages_of(run), &overtaken, |part| {
                unmerged += self.found_written(written.region, region, part, run.categories);
            });
        }
        if scan_for == ScanFor::Period {
            region.end_scan(cool);
        }
        state.totals.unmerged(unmerged);
    }

    fn found_written(&self, id: RegionId, region: &mut Region, run: Run, is: Categories) -> Unmerged {
        region.found_written(run, is, self.huge_pages, |page, entry| self.drop_entry(id, page, entry))
    }

    /// Scans part by part: while the kernel scans, an agent that maps has to wait, and the
    /// program's page faults behind it. A part's length follows what the one before took. Parts end
    /// between huge pages: one that is write-protected in part is split.
    fn scan_gently(
        &self,
        range: Range,
        query: &Query,
        spared: Option<&DirtyTree>,
        found: &mut Vec<PageRun>,
    ) -> Result<(), Errno> {
        let (mut start, mut len) = (range.start, SCAN_BYTES);
        // A huge page is protected as one, and for one fault.
        let spare = |page: usize, is: Categories| {
            let page = ((page - range.start) / PAGE_SIZE) as u64;
            !is.contains(Categories::HUGE) && spared.is_some_and(|spared| spared.contains(page))
        };
        let spare = spared.is_some().then_some(&spare as Spare<'_>);
        while start < range.end() {
            let end = ((start + len) & !(HUGE_PAGE_SIZE - 1)).min(range.end());
            let part = Range::new(start, end - start);
            let begin = Instant::now();
            touch(self.user.owner, || self.memory.pagemap.scan_sparing(part, query, spare, &mut |run| found.push(run)))
                .ok_or(Errno::BUSY)??;
            let time = begin.elapsed();
            start = part.end();
            if time > SCAN_TIME {
                len = (len / 2).max(LEAST_SCAN_BYTES);
            } else if time < SCAN_TIME / 4 {
                len = (len * 2).min(MOST_SCAN_BYTES);
            }
        }
        Ok(())
    }

    /// After a freeze: finds pages that were written while somebody else cleared the notes: merged
    /// pages that were copied, and pages that hold something where nothing was known. Others will
    /// differ when they are compared. As a device may be about to write, copies cool down again,
    /// and all pages where it may write into any.
    fn find_unseen(&self, state: &mut MutexGuard<'_, State>) -> Result<(), Errno> {
        let query = Query {
            inverted: Categories::FILE,
            required: Categories::PRESENT | Categories::FILE,
            returned: RETURNED,
            ..Query::default()
        };
        let all_cool = state.schedule.direct_io.why().is_some();
        let regions: Vec<RegionId> = state.regions.keys().copied().collect();
        for id in regions {
            let Some(region) = state.regions.get_mut(&id) else { continue };
            region.ages.restart_cooldown();
            if all_cool {
                region.ages.cool_written();
            }
            let mut unseen = Written::of(id, region);
            state.begin_region(id);
            MutexGuard::unlocked(state, || self.scan_gently(unseen.range(), &query, None, &mut unseen.runs))?;
            let overtaken = state.overtaken();
            let Some(region) = unseen.ledger(&mut state.regions) else { continue };
            let mut unmerged = Unmerged::default();
            for run in &unseen.runs {
                without(region.pages_of(*run), &overtaken, |part| {
                    for page in part.pages() {
                        let stays = match region.entry(page) {
                            Entry::Unshared(_) => !all_cool,
                            entry => matches!(entry, Entry::Pending),
                        };
                        if !stays {
                            unmerged += self.found_written(id, region, Run::one(page), run.categories);
                        }
                    }
                });
            }
            state.totals.unmerged(unmerged);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
