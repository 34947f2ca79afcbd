//! Dirty frames from `PAGEMAP_SCAN`.

use dirty::DirtyTree;
use kmem::PAGE_SIZE;
use kmem::pagemap::{Categories, Pagemap, Query};

use crate::{Extent, Source, SourceError};

/// Pages that a process wrote to, in memory that is registered for asynchronous write-protection.
/// The scan that finds them protects them again, in one step.
#[derive(Debug)]
pub struct PagemapSource {
    pagemap: Pagemap,
    extents: Vec<Extent>,
}

impl PagemapSource {
    /// A source of these pieces of a process's memory.
    pub fn new(pagemap: Pagemap, extents: Vec<Extent>) -> Self {
        Self { pagemap, extents }
    }
}

impl Source for PagemapSource {
    fn collect(&mut self, into: &DirtyTree) -> Result<u64, SourceError> {
        let query = Query {
            write_protect: true,
            check_wp_async: true,
            required: Categories::WRITTEN,
            any_of: Categories::PRESENT | Categories::SWAPPED,
            ..Query::default()
        };
        let mut pages = 0;
        for extent in &self.extents {
            let scanned = self.pagemap.scan(extent.memory, &query, &mut |run| {
                let page = (run.start - extent.memory.start) / PAGE_SIZE;
                into.insert_range(extent.first + page as u64, run.pages() as u64);
            });
            pages += scanned.map_err(SourceError::Scan)?.pages;
        }
        Ok(pages)
    }
}
