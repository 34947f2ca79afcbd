//! A checkpoint that is being stored.

use std::collections::HashSet;
use std::time::{SystemTime, UNIX_EPOCH};

use mpool::{BLOCK, MblockWriter};

use super::index::{Index, Known, key};
use super::list::{Data, Entry, count, replace};
use super::map::{Changes, NewMap, Root};
use super::pages::{InPool, Pages};
use super::{BeginError, Catalog, Checkpoint, ReadError, StoreError, Warning};

/// Bytes of the longest name.
const LONGEST_NAME: usize = 127;
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

/// A checkpoint that is being stored.
pub struct Writer {
    pub(super) catalog: Catalog,
    name: String,
    index: Index,
    pages: Pages,
    seed: u64,
    /// The map that it goes on from.
    base: Root,
    pub(super) changes: Changes,
    /// Data mblocks without pages, for measuring.
    pub(super) simulated: Vec<(u64, u32)>,
    off: Vec<PutOff>,
    /// Data mblocks with a warning.
    damaged: HashSet<u64>,
    /// Whether there was a warning of the index.
    flawed: bool,
}

/// The hash of a page; `None` for zeros. `seed` is [`Writer::seed`].
pub fn hash(page: &[u8], seed: u64) -> Option<u128> {
    let zeros = page.as_chunks::<16>().0.iter().all(|word| u128::from_ne_bytes(*word) == 0);
    (!zeros).then(|| xxhash_rust::xxh3::xxh3_128_with_seed(page, seed))
}

impl Catalog {
    /// Begins a checkpoint. Removes the leftovers of an interrupted one.
    ///
    /// # Errors
    /// If the name is taken or too long, or the catalogue is damaged or cannot be written.
    pub fn begin(mut self, name: &str) -> Result<Writer, BeginError> {
        if self.checkpoints.iter().any(|c| c.name == name) {
            return Err(BeginError::Exists(name.into()));
        }
        if name.is_empty() || name.len() > LONGEST_NAME {
            return Err(BeginError::Name);
        }
        self.ensure_whole()?;
        self.sweep()?;
        self.compact()?;
        let index = match self.index.take() {
            Some(index) => index,
            None => self.open_index()?,
        };
        let pages = Pages::new(&self.view.pool);
        let seed = u64::from_le_bytes(self.view.pool.props().uuid[..8].try_into().unwrap_or_default());
        let (name, off, damaged) = (name.into(), Vec::new(), HashSet::new());
        let (base, changes, simulated) = (Root::default(), Changes::default(), Vec::new());
        Ok(Writer { catalog: self, name, index, pages, seed, base, changes, simulated, off, damaged, flawed: false })
    }

    /// Opens the index, and adds what it does not have.
    pub(super) fn open_index(&mut self) -> Result<Index, StoreError> {
        let before = self.view.data.range(..self.covered).map(|(_, data)| u64::from(data.pages)).sum();
        let mut index = Index::new(&self.view.pool, self.limits, self.runs.clone(), before);
        let known = InPool { pool: &self.view.pool, data: &self.view.data, open: None };
        for &mblock in self.view.data.range(self.covered..).map(|(id, _)| id) {
            // One whose hashes cannot be read is damaged; its pages are stored again.
            for (page, hash) in known.hashes(mblock).unwrap_or_default().into_iter().enumerate() {
                index.enter(hash, mblock << 16 | page as u64, &known)?;
            }
        }
        Ok(index)
    }
}

impl Writer {
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
        let view = &self.catalog.view;
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
        let known = InPool { pool: &self.catalog.view.pool, data: &self.catalog.view.data, open: self.pages.open() };
        let found = self.index.find_many(hashes, &known);
        for (((&page, bytes), &hash), found) in pages.iter().zip(bytes.chunks_exact(BLOCK)).zip(hashes).zip(found) {
            match (hash, found) {
                (None, _) => self.changes.set(page, 0),
                (Some(_), Some(at)) if !self.pages.is_open(at) => self.off.push(PutOff { at, page }),
                // Looks the hash up again: a page earlier in this batch may be its duplicate.
                (Some(hash), _) => self.keep(page, bytes, hash)?,
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
        for (i, (&PutOff { at, page }, bytes)) in off.iter().zip(bytes.chunks_exact(BLOCK)).enumerate() {
            self.pages.bring(off[i..].iter().map(|off| off.at))?;
            if self.pages.is(at, bytes)? {
                self.changes.set(page, at);
                continue;
            }
            // The page has been written since, only its hash was equal, or it cannot be compared.
            match hash(bytes, self.seed) {
                None => self.changes.set(page, 0),
                Some(hash) => self.keep(page, bytes, hash)?,
            }
        }
        Ok(())
    }

    /// Stores the page unless the pool has it.
    fn keep(&mut self, page: u64, bytes: &[u8], hash: u128) -> Result<(), StoreError> {
        let data = &self.catalog.view.data;
        let known = InPool { pool: &self.catalog.view.pool, data, open: self.pages.open() };
        let found = self.index.find(key(hash), &known);
        if let Some(at) = found
            && self.pages.is(at, bytes)?
        {
            self.changes.set(page, at);
            return Ok(());
        }
        let at = self.pages.put(bytes, hash)?;
        self.changes.set(page, at);
        let known = InPool { open: self.pages.open(), ..known };
        self.index.add(hash, at, &known)?;
        if let Some((id, pages)) = self.pages.finish_full()? {
            self.index.filled();
            self.catalog.view.data.insert(id, Data { pages, needed: 0 });
        }
        Ok(())
    }

    /// Warnings of pages that the pool cannot read and that were or will be stored again; each
    /// data mblock is reported once.
    pub fn warnings(&mut self) -> Vec<Warning> {
        let mut new = self.pages.take_damaged();
        new.append(&mut self.index.take_damaged());
        new.retain(|(id, _)| self.damaged.insert(*id));
        let mut warnings: Vec<Warning> = new.into_iter().map(|(id, why)| self.catalog.warning(id, why)).collect();
        if let Some(flaw) = self.index.flaw().filter(|_| !std::mem::replace(&mut self.flawed, true)) {
            warnings.push(Warning::Index { pool: self.catalog.pool.props().name, why: crate::chain(flaw) });
        }
        warnings
    }

    /// Ends the checkpoint without storing it, and frees its space. Gives the catalogue for the
    /// next one.
    pub fn abandon(self) -> Catalog {
        let Self { mut catalog, index, pages, .. } = self;
        drop((index, pages));
        // Mblocks that cannot be removed now are removed when the next checkpoint begins.
        let _ = catalog.sweep();
        catalog
    }

    /// Commits the checkpoint. `source` describes the process; `regions` are addresses and lengths
    /// in bytes, as many pages as [`Writer::set_pages`] said.
    ///
    /// # Errors
    /// If the pool is full or cannot be written, or a part of the map that it goes on
    /// from cannot be read.
    pub fn commit(self, source: String, regions: Vec<(u64, u64)>) -> Result<Checkpoint, StoreError> {
        self.commit_and_go_on(source, regions).map(|(checkpoint, _)| checkpoint)
    }

    /// Commits the checkpoint, as [`Writer::commit`] does. Gives the catalogue for the next one.
    ///
    /// # Errors
    /// Those of [`Writer::commit`].
    pub fn commit_and_go_on(
        mut self,
        source: String,
        regions: Vec<(u64, u64)>,
    ) -> Result<(Checkpoint, Catalog), StoreError> {
        let mut writers: Vec<MblockWriter> = self.pages.finish()?.into_iter().collect();
        self.index.filled();
        let map = self.catalog.write_map(self.base, &self.changes)?;
        let map_pages = map.blocks();
        let NewMap { id, needs, writers: new, .. } = map;
        writers.extend(new);
        MblockWriter::commit_all(writers)?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let filled = self.pages.filled().to_vec();
        let new_pages = filled.iter().map(|(_, pages)| u64::from(*pages)).sum();
        let (root, number) = (id, id);
        let checkpoint = Checkpoint {
            name: self.name,
            created,
            source,
            regions,
            new_pages,
            map_pages,
            root,
            number,
            needs: needs.clone(),
        };
        let data = filled.iter().map(|&(id, pages)| (id, Data { pages, needed: 0 }));
        self.catalog.view.data.extend(data);
        self.catalog.append(&[
            Entry::Data(self.simulated),
            Entry::Data(filled),
            Entry::Checkpoint(checkpoint.clone(), needs),
        ])?;
        self.catalog.enter(checkpoint.clone());
        // The checkpoint is stored. What the index lacks, if this fails, the next one adds.
        if self.catalog.write_index(&mut self.index).is_ok() && self.index.flaw().is_none() {
            self.catalog.index = Some(self.index);
        }
        Ok((checkpoint, self.catalog))
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
    pub(super) fn write_index(&mut self, index: &mut Index) -> Result<(), StoreError> {
        if index.flaw().is_some() {
            return self.drop_index();
        }
        if self.view.data.range(self.covered..).nth(UNCOVERED).is_none() {
            return Ok(());
        }
        let runs = index.write(&InPool { pool: &self.view.pool, data: &self.view.data, open: None })?;
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
