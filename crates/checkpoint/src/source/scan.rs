//! Scans of the page map: which pages are present, written, tracked.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use dirty::DirtyTree;
use guard::First;
use kmem::pagemap::{Categories, PageRun, Query};
use kmem::{PAGE_SIZE, Range};

use super::{FilePart, Source, SourceError};

/// Bytes that a thread scans before it takes the next part. A scan of 8 GiB takes 20 ms.
const PART: usize = 256 << 20;
/// Threads that scan, at most: the process stands meanwhile, and its processors are free.
const THREADS: usize = 4;

impl Source {
    /// Whether the kernel notes writes to every page. While an agent merges pages, they are not
    /// tracked.
    pub(crate) fn is_all_tracked(&self) -> Result<bool, SourceError> {
        let mut tracked = true;
        let query = Query { inverted: Categories::WPALLOWED, required: Categories::WPALLOWED, ..Query::default() };
        for region in &self.regions {
            self.scan_region(*region, &query, &mut |_| tracked = false)?;
        }
        Ok(tracked)
    }

    fn scan_region(&self, region: Range, query: &Query, each: &mut dyn FnMut(PageRun)) -> Result<(), SourceError> {
        let scanned = self.pagemap.scan(region, query, each);
        scanned.map(drop).map_err(|e| SourceError::Scan { pid: self.pid, source: e.into() })
    }

    fn scan(&self, query: &Query, into: &DirtyTree) -> Result<(), SourceError> {
        for (region, first) in self.regions.iter().zip(&self.firsts) {
            self.scan_region(*region, query, &mut |run| {
                let start = first + ((run.start - region.start) / PAGE_SIZE) as u64;
                into.insert_range(start, run.pages() as u64);
            })?;
        }
        Ok(())
    }

    /// Adds the pages that are present or swapped out. The pages of mapped files (`files`: merged
    /// pages) exist even without a page table entry.
    pub(crate) fn populated(&self, files: &HashSet<FilePart>, into: &DirtyTree) -> Result<(), SourceError> {
        files.iter().for_each(|file| into.insert_range(file.first, file.pages));
        self.scan(&Query { any_of: Categories::PRESENT | Categories::SWAPPED, ..Query::default() }, into)
    }

    /// Adds the pages that were written since they were last protected, and protects them again.
    pub(crate) fn written(&self, into: &DirtyTree) -> Result<(), SourceError> {
        let any_of = Categories::PRESENT | Categories::SWAPPED;
        self.scan(&Query { write_protect: true, required: Categories::WRITTEN, any_of, ..Query::default() }, into)
    }

    /// In one scan, for a stopped process: adds the pages that were written since they were last
    /// protected, and those of [`Source::populated`].
    pub(crate) fn written_and_populated(
        &self,
        files: &HashSet<FilePart>,
        written: &DirtyTree,
        populated: &DirtyTree,
    ) -> Result<(), SourceError> {
        files.iter().for_each(|file| populated.insert_range(file.first, file.pages));
        let any_of = Categories::PRESENT | Categories::SWAPPED;
        let query = Query { any_of, returned: Categories::WRITTEN, ..Query::default() };
        let parts = self.regions.iter().zip(&self.firsts).flat_map(|(region, first)| {
            let starts = (0..region.len).step_by(PART);
            starts.map(move |at| {
                let part = Range::new(region.start + at, (region.len - at).min(PART));
                (part, first + (at / PAGE_SIZE) as u64)
            })
        });
        let (parts, next) = (parts.collect::<Vec<_>>(), AtomicUsize::new(0));
        let scan = || {
            while let Some((part, first)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.scan_region(*part, &query, &mut |run| {
                    let (start, pages) = (first + ((run.start - part.start) / PAGE_SIZE) as u64, run.pages() as u64);
                    populated.insert_range(start, pages);
                    if run.categories.contains(Categories::WRITTEN) {
                        written.insert_range(start, pages);
                    }
                })?;
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS).min(parts.len());
        std::thread::scope(|scope| {
            let help = || {
                let _first = First::begin(None);
                scan()
            };
            let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(help)).collect();
            let own = scan();
            let ended =
                helpers.into_iter().map(|helper| helper.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
            ended.fold(own, Result::and)
        })
    }
}
