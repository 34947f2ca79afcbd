//! Turns: a checkpoint that is being stored lets others have the pool.
//!
//! At the end of a turn all of its pages are on the medium, in data mblocks that the list has and
//! no checkpoint needs. The pool is closed, and opened again when the others are done. What the
//! checkpoint's places and its map will name must still be there then, whatever the others remove:
//! from the first turn on it *keeps* all mblocks ([`mpool::Pool::keep`]), and nobody deletes any.
//! So they append to the list what is gone, and the mblocks are swept when the last one that keeps
//! them has ended, in whatever way.
//!
//! What is found then is looked at before anything is done with it: it must be the same pool, with
//! a whole list, and all that was kept. Else the checkpoint fails, and the next one sweeps what it
//! has stored. A pool that cannot be kept stays open.

use std::time::{Duration, Instant};

use mpool::{Kept, Pool};

use super::classes::Holds;
use super::here::{Others, Turns};
use super::list::Entry;
use super::pages::{Compared, Pages};
use super::store::State;
use super::{Catalog, Store, StoreError, Writer};

impl<'a> Writer<'a> {
    /// Gives the pool to those that wait for it, between batches of pages, until
    /// [`Writer::keep_pool`]. Nobody else may have it open in this process.
    pub fn in_turns(mut self, others: &'a dyn Others) -> Self {
        self.turns = Some(Turns { others, next: Instant::now() + others.least() });
        self
    }

    /// Keeps the pool from now on to the end: what waits for the pool now waits for a guest.
    pub fn keep_pool(&mut self) {
        self.turns = None;
    }

    pub(super) fn give_way_if_awaited(&mut self) -> Result<(), StoreError> {
        let Some(Turns { others, next }) = self.turns else { return Ok(()) };
        if Instant::now() < next || !others.wait(&self.store.state.lock().catalog.pool) {
            return Ok(());
        }
        let next = |took: Duration| Instant::now() + others.least().max(took * 3);
        self.turns = self.give_way(others)?.map(|took| Turns { others, next: next(took) });
        Ok(())
    }

    /// Gives the pool to others. Gives the time of that, without theirs; `None`: the pool stays
    /// open, since it cannot be kept. Beside other writers it does nothing: they have pages in
    /// memory.
    pub(super) fn give_way(&mut self, others: &dyn Others) -> Result<Option<Duration>, StoreError> {
        let start = Instant::now();
        let store: &Store = self.store;
        let mut state = store.state.lock();
        if state.names.len() > 1 {
            return Ok(Some(Duration::ZERO));
        }
        if state.keep.is_none() {
            let Ok(keep) = state.catalog.pool.keep() else { return Ok(None) };
            state.keep = Some(keep);
        }
        store.flush(&mut state)?;
        let State { catalog, pages, keep, .. } = &mut *state;
        let (limits, uuid) = (catalog.limits, catalog.pool.props().uuid);
        // What a pool has lost before is no sign of others.
        let is_there = |pool: &Pool, id: u64| pool.mblock(id).is_ok();
        let mut before = std::mem::take(&mut catalog.view.data);
        before.retain(|id, _| is_there(&catalog.pool, *id));
        let leaves = self.base.named().map(|(_, leaf)| leaf.mblock);
        let leaves: Vec<u64> = leaves.filter(|id| is_there(&catalog.pool, *id)).collect();
        let damaged = std::mem::take(&mut self.compared.damaged);
        (catalog.0, pages.0, self.compared.0) = (None, None, None);
        let closing = start.elapsed();
        let pool = others.again().map_err(StoreError::Again)?;
        let start = Instant::now();
        if pool.props().uuid != uuid {
            return Err(StoreError::Again("another pool has its place".into()));
        }
        let mut new = Catalog::open_with(&pool, limits).map_err(|error| StoreError::Again(error.into()))?;
        new.ensure_whole()?;
        if new.view.find(&self.name).is_ok() {
            return Err(StoreError::Taken(self.name.clone()));
        }
        let same = |id: &u64, pages| new.view.data.get(id).is_some_and(|data| data.pages == pages);
        let data = before.iter().all(|(id, data)| same(id, data.pages) && is_there(&pool, *id));
        if !data || !leaves.iter().all(|id| is_there(&pool, *id)) || !keep.as_ref().is_some_and(Kept::holds) {
            return Err(StoreError::Removed);
        }
        new.index = Some(new.open_index()?);
        let mut compared = Compared::new(&pool, &new.view.data);
        compared.damaged = damaged;
        let new_pages = Pages::new(&pool, Holds::Soon);
        (catalog.0, pages.0, self.compared.0) = (Some(new), Some(new_pages), Some(compared));
        Ok(Some(closing + start.elapsed()))
    }
}

impl Store {
    /// Writes and records all pages in memory, and what the index has collected.
    fn flush(&self, state: &mut State) -> Result<(), StoreError> {
        if let Some(full) = state.take(Pages::take_open) {
            let (id, count) = (full.contents.id, full.contents.hashes.len() as u32);
            let stored = full.store();
            self.land(state, id, count, stored)?;
        }
        if !state.unrecorded.is_empty() {
            let data = Entry::Data(std::mem::take(&mut state.unrecorded));
            state.catalog.append(&[data]).map_err(|error| match error {
                // It is no checkpoint that may be there.
                StoreError::Unknown(error) => error.into(),
                error => error,
            })?;
        }
        if let Some(mut index) = state.catalog.index.take() {
            // What it lacks, if this fails, is read again.
            let _ = state.catalog.write_index(&mut index, None);
        }
        Ok(())
    }
}
