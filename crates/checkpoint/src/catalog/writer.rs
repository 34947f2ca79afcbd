//! A checkpoint that is being stored.

use std::collections::{BTreeSet, HashSet};
use std::time::{SystemTime, UNIX_EPOCH};

use mpool::BLOCK;
use output::Progress;

use super::here::{Here, Turns};
use super::index::Index;
use super::index::Known;
use super::list::{Entry, count, replace};
use super::map::{Changes, Root};
use super::pages::{Compared, InPool, Pages};
use super::store::{Place, Store};
use super::{BeginError, Catalog, Checkpoint, ReadError, StoreError, View, Warning};

/// Data mblocks that may be missing from the index when a checkpoint ends: the next one reads their
/// hashes, which takes less than writing them to the index.
const UNCOVERED: usize = 4;

/// A page with the hash of a page in the pool: it is compared later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PutOff {
    /// The place in the pool. The first field, so that sorting gives the pool's order.
    at: u64,
    /// Number of the page in the checkpoint.
    pub page: u64,
}

/// A checkpoint that is being stored. Dropping it before it is committed frees its space, as soon
/// as no other checkpoint is being stored.
pub struct Writer<'a> {
    pub(super) store: &'a Store,
    pub(super) name: String,
    seed: u64,
    /// The map that it goes on from.
    pub(super) base: Root,
    pub(super) changes: Changes,
    off: Vec<PutOff>,
    pub(super) compared: Here<Compared>,
    /// How it takes turns with others, if it does.
    pub(super) turns: Option<Turns<'a>>,
    /// Data mblocks that were in memory when a page was found there.
    used: BTreeSet<u64>,
    new_pages: u64,
    /// What is kept beside it.
    beside: Option<Vec<u8>>,
    shown: Option<&'a Progress>,
    stored: bool,
}

/// The hash of a page; `None` for zeros. `seed` is [`Writer::seed`].
pub fn hash(page: &[u8], seed: u64) -> Option<u128> {
    let zeros = page.as_chunks::<16>().0.iter().all(|word| u128::from_ne_bytes(*word) == 0);
    (!zeros).then(|| xxhash_rust::xxh3::xxh3_128_with_seed(page, seed))
}

impl Catalog {
    /// Opens the index, and adds what it does not have.
    pub(super) fn open_index(&mut self) -> Result<Index, StoreError> {
        let before = self.view.data.range(..self.covered).map(|(_, data)| u64::from(data.pages)).sum();
        let mut index = Index::new(&self.view.pool, self.limits, self.runs.clone(), before);
        let known = InPool { pool: &self.view.pool, data: &self.view.data, pages: None };
        for &mblock in self.view.data.range(self.covered..).map(|(id, _)| id) {
            // One whose hashes cannot be read is damaged; its pages are stored again.
            for (page, hash) in known.hashes(mblock).unwrap_or_default().into_iter().enumerate() {
                index.enter(hash, mblock << 16 | page as u64, &known)?;
            }
        }
        Ok(index)
    }
}

impl Store {
    /// Begins a checkpoint, beside those that have begun. The first one removes the leftovers of an
    /// interrupted one.
    ///
    /// # Errors
    /// If the name is taken or too long, or the catalogue is damaged or cannot be written.
    pub fn begin(&self, name: &str) -> Result<Writer<'_>, BeginError> {
        let (pool, compared) = self.state.lock().begin(name)?;
        Ok(Writer {
            store: self,
            name: name.into(),
            seed: u64::from_le_bytes(pool.props().uuid[..8].try_into().unwrap_or_default()),
            base: Root::default(),
            changes: Changes::default(),
            off: Vec::new(),
            compared: Here::new(compared),
            turns: None,
            used: BTreeSet::new(),
            new_pages: 0,
            beside: None,
            shown: None,
            stored: false,
        })
    }
}

impl<'a> Writer<'a> {
    /// Shows the bytes that are given to it.
    pub fn showing(mut self, progress: &'a Progress) -> Self {
        self.shown = Some(progress);
        self
    }
}

impl Writer<'_> {
    /// Sets the number of pages. All are zeros until they are stored.
    pub fn set_pages(&mut self, pages: usize) {
        (self.base, self.changes) = (Root::default(), Changes::new(pages));
    }

    /// Goes on from the checkpoint with this [`Catalog::label`], if this pool has it and its
    /// regions are these: pages that are not stored from now on are what they are in that
    /// checkpoint, or zeros if their bit in `present` is not set.
    ///
    /// # Errors
    /// If the root of its map cannot be read. Pages are zeros then.
    pub fn go_on(&mut self, label: &str, regions: &[(u64, u64)], present: Vec<u64>) -> Result<bool, ReadError> {
        let state = self.store.state.lock();
        let view = &state.catalog.view;
        let found = view.checkpoints.iter().find(|c| Catalog::label(&view.pool, c) == label);
        let Some(earlier) = found.filter(|c| c.regions == regions) else { return Ok(false) };
        self.base = view.root(earlier).map_err(|flaw| view.damaged(&earlier.name, flaw))?;
        self.changes.keep_present(present);
        Ok(true)
    }

    /// The seed of [`hash`] in this pool.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Stores pages: their numbers, contents and hashes ([`hash`]). A page with the hash of a page
    /// in the pool is put off, to be compared in the pool's order: see [`Writer::put_off`].
    ///
    /// # Errors
    /// If the pool is full or cannot be written.
    pub fn put(&mut self, pages: &[u64], bytes: &[u8], hashes: &[Option<u128>]) -> Result<(), StoreError> {
        self.give_way_if_awaited()?;
        self.shown.iter().for_each(|progress| progress.inc(bytes.len() as u64));
        let mut state = self.store.state.lock();
        let found = state.find_many(hashes)?;
        for (((&page, bytes), &hash), found) in pages.iter().zip(bytes.chunks_exact(BLOCK)).zip(hashes).zip(found) {
            let place = match (hash, found) {
                (None, _) => Place::At(0),
                (Some(_), Some(at)) if !state.has(at) => Place::Compare(at),
                // Looks the hash up again: a page earlier in this batch may be its duplicate.
                (Some(hash), _) => {
                    let place = self.store.keep(&mut state, (bytes, hash), None, &mut self.new_pages)?;
                    if let Place::At(at) = place {
                        self.used.insert(at >> 16);
                    }
                    place
                }
            };
            match place {
                Place::At(at) => self.changes.set(page, at),
                Place::Compare(at) => self.off.push(PutOff { at, page }),
            }
        }
        Ok(())
    }

    /// The pages that were put off, in the order of the pool. They are to be read again and given
    /// to [`Writer::put_again`].
    pub fn put_off(&mut self) -> Vec<PutOff> {
        let mut off = std::mem::take(&mut self.off);
        off.sort_unstable();
        off
    }

    /// Stores pages that were put off, with their contents now.
    ///
    /// # Errors
    /// If the pool is full or cannot be read or written.
    pub fn put_again(&mut self, off: &[PutOff], bytes: &[u8]) -> Result<(), StoreError> {
        self.give_way_if_awaited()?;
        for (i, (&PutOff { at, page }, bytes)) in off.iter().zip(bytes.chunks_exact(BLOCK)).enumerate() {
            self.compared.bring(off[i..].iter().map(|off| off.at))?;
            let at = if self.compared.is(at, bytes)? { at } else { self.keep(bytes, at)? };
            self.changes.set(page, at);
        }
        Ok(())
    }

    /// Finds the place of a page that has been written since it was put off, of which only the hash
    /// was equal to that of the page at `differs`, or that cannot be compared with it.
    fn keep(&mut self, bytes: &[u8], mut differs: u64) -> Result<u64, StoreError> {
        let Some(hash) = hash(bytes, self.seed) else { return Ok(0) };
        loop {
            let mut state = self.store.state.lock();
            let place = self.store.keep(&mut state, (bytes, hash), Some(differs), &mut self.new_pages)?;
            drop(state);
            match place {
                Place::At(at) => {
                    self.used.insert(at >> 16);
                    return Ok(at);
                }
                Place::Compare(at) if self.compared.is(at, bytes)? => return Ok(at),
                Place::Compare(at) => differs = at,
            }
        }
    }

    /// Keeps these bytes beside the checkpoint: see [`View::beside_checkpoint`].
    ///
    /// [`View::beside_checkpoint`]: super::View::beside_checkpoint
    pub fn keep_beside(&mut self, bytes: Vec<u8>) {
        self.beside = Some(bytes);
    }

    /// Warnings of pages that the pool cannot read and that were or will be stored again; each
    /// data mblock is reported once by all checkpoints of a [`Store`].
    pub fn warnings(&mut self) -> Vec<Warning> {
        let compared = self.compared.if_here();
        self.store.warnings(compared.map(Compared::take_damaged).unwrap_or_default())
    }

    /// Commits the checkpoint. `source` describes the process; `regions` are addresses and lengths
    /// in bytes, as many pages as [`Writer::set_pages`] said.
    ///
    /// # Errors
    /// If the pool is full or cannot be written, a part of the map that it goes on from cannot be
    /// read, or another checkpoint has failed to store pages that both have.
    pub fn commit(mut self, source: String, regions: Vec<(u64, u64)>) -> Result<Checkpoint, StoreError> {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let (base, name, new_pages) = (std::mem::take(&mut self.base), self.name.clone(), self.new_pages);
        let describe = |root, map_pages, needs| {
            let number = root;
            Checkpoint { name, created, source, regions, new_pages, map_pages, root, number, needs }
        };
        let beside = self.beside.take();
        let write = |view: &View| {
            let mut map = view.write_map(base, &self.changes)?;
            let attached = beside.map(|bytes| view.write_attached(&bytes, &mut map.writers)).transpose()?;
            Ok((map, attached))
        };
        let checkpoint = self.store.commit(&self.used, write, describe)?;
        self.stored = true;
        Ok(checkpoint)
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        let mut state = self.store.state.lock();
        state.left_over |= !self.stored;
        state.leave(&self.name);
    }
}

impl Catalog {
    /// Takes a recorded checkpoint into the list, in the place of one of the same name.
    pub(super) fn enter(&mut self, checkpoint: Checkpoint) {
        count(&mut self.view.data, &checkpoint.needs.data);
        replace(&mut self.view.checkpoints, checkpoint);
    }

    /// Writes what the index has collected, if that is much, or has the index made anew, if a part
    /// of it cannot be read.
    pub(super) fn write_index(&mut self, index: &mut Index, pages: Option<&Pages>) -> Result<(), StoreError> {
        if index.flaw().is_some() {
            return self.drop_index();
        }
        if self.view.data.range(self.covered..).nth(UNCOVERED).is_none() {
            return Ok(());
        }
        let runs = index.write(&InPool { pool: &self.view.pool, data: &self.view.data, pages })?;
        let covered = self.view.data.last_key_value().map_or(0, |(id, _)| id + 1);
        self.append(&[Entry::Index(runs.clone(), covered)])?;
        (self.runs, self.covered) = (runs, covered);
        // What cannot be removed now is removed when the next checkpoint begins.
        self.delete_parts(index.retired())
    }

    /// Removes the index. The next checkpoint makes it from the hashes in the data mblocks.
    pub(super) fn drop_index(&mut self) -> Result<(), StoreError> {
        self.index = None;
        if self.runs.is_empty() {
            return Ok(());
        }
        self.append_freeing(&[Entry::Index(Vec::new(), 0)])?;
        let gone: Vec<u64> = self.runs.drain(..).flat_map(|run| run.parts).map(|part| part.id).collect();
        self.covered = 0;
        self.delete_parts(gone)
    }

    /// Deletes mblocks of the index. Whatever its record said, nothing else is deleted.
    fn delete_parts(&self, mut ids: Vec<u64>) -> Result<(), StoreError> {
        let maps: HashSet<u64> = self.maps().collect();
        ids.retain(|id| !self.data.contains_key(id) && !maps.contains(id));
        self.delete(&ids)
    }
}
