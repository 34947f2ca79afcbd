//! Checkpoints without pages, for measuring: pools of many TiB that take little space.

use mpool::{Allocation, BLOCK, MblockWriter};

use super::list::Data;
use super::{PAGES, StoreError, Writer};

/// Mblocks that are committed at once.
const AT_ONCE: usize = 1 << 12;

#[doc(hidden)]
impl Writer<'_> {
    /// Adds data mblocks whose pages are not there. Gives their identities.
    ///
    /// # Errors
    /// If the pool cannot be written.
    pub fn simulate(&mut self, mblocks: usize) -> Result<Vec<u64>, StoreError> {
        let capacity = BLOCK as u64;
        let mut state = self.store.state.lock();
        let mut ids = Vec::new();
        while ids.len() < mblocks {
            let writers = (ids.len()..mblocks.min(ids.len() + AT_ONCE))
                .map(|_| state.catalog.view.pool.mblock_alloc(Allocation { capacity, ..Allocation::default() }))
                .collect::<Result<Vec<_>, _>>()?;
            ids.extend(MblockWriter::commit_all(writers)?);
        }
        let pages = PAGES as u32;
        state.unrecorded.extend(ids.iter().map(|id| (*id, pages)));
        state.catalog.view.data.extend(ids.iter().map(|&id| (id, Data::plain(pages))));
        Ok(ids)
    }

    /// Says that a page of the checkpoint is a page of a data mblock.
    pub fn place(&mut self, page: u64, mblock: u64, page_of_mblock: u64) {
        self.changes.set(page, mblock << 16 | page_of_mblock);
    }
}
