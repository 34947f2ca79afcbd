//! Scanning a client: which of its pages were written since the last time, and what that says of
//! each.

use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::memfd::HUGE_PAGE_SIZE;
use kmem::pagemap::{Categories, PageRun, Query};
use kmem::range::Range;
use rustix::io::Errno;
use wire::{RegionId, Run};

use crate::client::{Client, State};
use crate::config::HugePages;
use crate::ledger::{Entry, Region};

/// How long one system call that scans should take, and how much memory it looks at: to begin with,
/// at least, at most.
const SCAN_TIME: Duration = Duration::from_micros(100);
const SCAN_BYTES: usize = 32 << 20;
const LEAST_SCAN_BYTES: usize = HUGE_PAGE_SIZE;
const MOST_SCAN_BYTES: usize = 256 << 20;

impl Client {
    /// Scans every region for pages written since the last time, re-protecting them in the same
    /// step.
    ///
    /// Whether a page is one of a file is asked in a second step, of written pages that the ledger
    /// holds for merged: for that the kernel looks at each page's `struct page`, a cache miss a
    /// page, where all else stands in the page table (8 GiB: 74 ms against a few).
    ///
    /// `ageing`: a merge period has passed. Otherwise what is found is kept for that scan; see
    /// `rates`. Returns how many pages were written, or are new.
    pub(crate) fn scan(&self, state: &mut State, ageing: bool) -> Result<u64, Errno> {
        if state.held {
            return Ok(0);
        }
        if std::mem::take(&mut state.unsure) {
            self.find_unseen(state)?;
        }
        state.stamp_scan(Instant::now());
        // Lost when a scan fails: what it found until then is no more in the kernel's notes.
        let mut since = state.since.take();
        let mut written: Vec<PageRun> = Vec::new();
        let mut found = 0;
        for (&id, region) in &mut state.regions {
            let query = Query {
                write_protect: true,
                required: if region.first_scan && ageing { Categories::empty() } else { Categories::WRITTEN },
                any_of: Categories::PRESENT | Categories::SWAPPED,
                returned: Categories::PRESENT | Categories::PFNZERO | Categories::HUGE,
                ..Query::default()
            };
            let range = Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
            written.clear();
            self.scan_gently(range, &query, &mut |run| written.push(run))?;
            let mut copied = 0;
            for &run in &written {
                let pages = region.pages_of(run);
                region.written_lately(pages);
                found += u64::from(pages.len);
                if let Some(since) = &mut since {
                    since.add(Range::new(run.start, run.end - run.start));
                }
                if region.pages_of(run).pages().any(|page| matches!(region.entry(page), Entry::Merged(_))) {
                    let query = Query {
                        any_of: Categories::PRESENT | Categories::SWAPPED,
                        returned: query.returned | Categories::FILE,
                        ..Query::default()
                    };
                    let range = Range::new(run.start, run.end - run.start);
                    self.pagemap.scan(range, &query, &mut |run| copied += self.found_written(id, region, run))?;
                } else {
                    copied += self.found_written(id, region, run);
                }
            }
            if ageing {
                region.end_scan();
            }
            state.totals.copied += copied;
        }
        state.since = since.and_then(|mut since| (!since.is_too_long()).then_some(since));
        state.totals.full_scans += u64::from(ageing);
        Ok(found)
    }

    /// Scans part by part, each short enough: while the kernel scans, an agent that maps has to
    /// wait, and behind it the program's page faults do. A part's length follows what the one
    /// before took, since many mappings make it slow. Parts end between huge pages: one that is
    /// write-protected in part is split.
    fn scan_gently(&self, range: Range, query: &Query, each: &mut dyn FnMut(PageRun)) -> Result<(), Errno> {
        let (mut start, mut len) = (range.start, SCAN_BYTES);
        while start < range.end() {
            let end = ((start + len) & !(HUGE_PAGE_SIZE - 1)).min(range.end());
            let part = Range::new(start, end - start);
            let begin = Instant::now();
            self.pagemap.scan(part, query, each)?;
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

    /// After a hold: finds what was written while somebody else cleared the notes of writes: merged
    /// pages that were copied, and pages that hold something where nothing was known. What was
    /// written of those that were read before shows when they are compared. A device may be about
    /// to write into copies: these rest anew.
    fn find_unseen(&self, state: &mut State) -> Result<(), Errno> {
        for (&id, region) in &mut state.regions {
            region.rest_anew();
            let query = Query {
                inverted: Categories::FILE,
                required: Categories::PRESENT | Categories::FILE,
                returned: Categories::PRESENT | Categories::PFNZERO | Categories::HUGE,
                ..Query::default()
            };
            let range = Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
            let mut copied = 0;
            self.scan_gently(range, &query, &mut |run| {
                for page in region
                    .pages_of(run)
                    .pages()
                    .filter(|&page| !matches!(region.entry(page), Entry::Unshared(_) | Entry::Pending))
                    .collect::<Vec<_>>()
                {
                    let start = region.address(page);
                    copied += self.found_written(id, region, PageRun { start, end: start + PAGE_SIZE, ..run });
                }
            })?;
            state.totals.copied += copied;
        }
        Ok(())
    }

    /// These pages were written, or first touched, since the last scan. Returns how many left their
    /// frame.
    fn found_written(&self, id: RegionId, region: &mut Region, run: PageRun) -> u64 {
        let is = run.categories;
        let mut copied = 0;
        let zero = is.contains(Categories::PFNZERO);
        let huge = is.contains(Categories::HUGE);
        let kept_huge = huge && self.huge_pages == HugePages::Keep;
        if huge && self.huge_page_share > 0.0 {
            region.found_huge(region.pages_of(run), self.huge_page_share);
        } else {
            region.lost_huge(region.pages_of(run));
        }
        for page in region.pages_of(run).pages() {
            match region.entry(page) {
                Entry::Pending => continue,
                // The frame came into the page table by a read, or the zero page did. A frame that
                // the kernel has swapped out since may show as neither present nor of a file.
                Entry::Merged(_) if is.contains(Categories::FILE) || !is.contains(Categories::PRESENT) => continue,
                Entry::Zero | Entry::Fresh | Entry::Recycled if zero => continue,
                entry @ (Entry::Merged(_) | Entry::Unshared(_) | Entry::Zero | Entry::Recycled) => {
                    if matches!(entry, Entry::Merged(_)) {
                        copied += 1;
                        region.copied(page);
                    }
                    region.set(page, Entry::Fresh);
                    self.drop_entry(id, page, entry);
                }
                Entry::Fresh => {}
            }
            if let Some(stamps) = &mut region.stamps {
                stamps.record(page);
            }
            if is.contains(Categories::PRESENT) && !kept_huge {
                region.mark_written(Run::one(page));
            }
        }
        copied
    }
}
