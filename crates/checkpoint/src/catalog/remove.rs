//! Removing checkpoints, and what no checkpoint needs.

use std::collections::HashSet;

use mpool::ObjectError;

use super::index::Index;
use super::list::{Entry, discount};
use super::{Catalog, Checkpoint, RemoveError, StoreError};

/// Data mblocks that are removed at once.
const REMOVED_AT_ONCE: usize = 256;

impl Catalog {
    /// Removes a checkpoint, and the data that no other checkpoint needs. That takes time for what
    /// this checkpoint needs; nothing of the others is read.
    ///
    /// # Errors
    /// If there is no such checkpoint, or the pool is damaged or cannot be written.
    pub fn remove(&mut self, name: &str) -> Result<(), RemoveError> {
        self.ensure_whole()?;
        let checkpoint = self.find(name)?.clone();
        // What it has in memory may be gone then.
        self.index = None;
        self.append_freeing(&[Entry::Gone(name.into())])?;
        self.view.checkpoints.retain(|c| c.name != name);
        let unneeded = discount(&mut self.view.data, &checkpoint.needs.data);
        // It is removed. What an error leaves of it is swept when the next checkpoint begins.
        let _ = self.remove_unneeded(&checkpoint, &unneeded);
        self.view.attached.remove(&checkpoint.number);
        Ok(())
    }

    fn remove_unneeded(&mut self, gone: &Checkpoint, data: &[u64]) -> Result<(), StoreError> {
        self.remove_data(data)?;
        if self.checkpoints.is_empty() {
            self.drop_index()?;
        }
        self.delete_map(gone)
    }

    /// Deletes the root of a checkpoint that is not in the list any more, and the leaves that no
    /// other checkpoint needs; of one that was removed, also what was kept beside it.
    pub(super) fn delete_map(&self, gone: &Checkpoint) -> Result<(), StoreError> {
        let needed: HashSet<u64> = self.maps().collect();
        let all = gone.needs.leaves.iter().chain([&gone.root]).copied().chain(self.beside(gone));
        // Whatever its record said, no data are deleted.
        let unneeded: Vec<u64> = all.filter(|id| !needed.contains(id) && !self.data.contains_key(id)).collect();
        self.delete(&unneeded)
    }

    /// The mblocks of all maps, and of what is kept beside checkpoints.
    pub(super) fn maps(&self) -> impl Iterator<Item = u64> {
        self.checkpoints.iter().flat_map(|c| c.needs.leaves.iter().copied().chain([c.root]).chain(self.beside(c)))
    }

    /// Removes data mblocks that no checkpoint needs.
    pub(super) fn remove_data(&mut self, unneeded: &[u64]) -> Result<(), StoreError> {
        if self.pool.is_kept() {
            // A checkpoint that is stored in turns may need them. They are swept when it ends.
            return Ok(());
        }
        // A few at a time, for which a full pool has room too: each frees space for the next. What
        // an error leaves is swept by the next checkpoint.
        for some in unneeded.chunks(REMOVED_AT_ONCE) {
            self.append_freeing(&[Entry::DataGone(some.to_vec())])?;
            self.delete(some)?;
            some.iter().for_each(|id| {
                self.view.data.remove(id);
            });
        }
        Ok(())
    }

    /// Deletes mblocks, as far as they are there: the records that name them may be older.
    pub(super) fn delete(&self, ids: &[u64]) -> Result<(), StoreError> {
        self.ensure_known()?;
        if self.pool.is_kept() {
            return Ok(());
        }
        let is_there = |id: &u64| !matches!(self.pool.mblock(*id), Err(ObjectError::NotFound(_)));
        let there: Vec<u64> = ids.iter().copied().filter(is_there).collect();
        Ok(self.pool.mblock_delete(&there)?)
    }

    /// Removes mblocks that no checkpoint needs: those of an interrupted checkpoint.
    pub(super) fn sweep(&mut self) -> Result<(), StoreError> {
        // What a lost record names looks like leftovers.
        self.ensure_whole()?;
        let unneeded: Vec<u64> = self.data.iter().filter(|(_, data)| data.needed == 0).map(|(id, _)| *id).collect();
        self.remove_data(&unneeded)?;
        let open = self.index.iter().flat_map(Index::runs);
        let index = self.runs.iter().chain(open).flat_map(|run| &run.parts).map(|part| part.id);
        let known: HashSet<u64> = self.maps().chain(index).collect();
        let needed = |id: &u64| known.contains(id) || self.data.contains_key(id);
        let leftovers: Vec<u64> = self.pool.mblocks().iter().map(|m| m.id).filter(|id| !needed(id)).collect();
        self.delete(&leftovers)
    }
}
