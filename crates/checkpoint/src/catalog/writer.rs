//! A checkpoint that is being stored.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::io::IoSlice;
use std::time::{SystemTime, UNIX_EPOCH};

use mpool::{Allocation, BLOCK, MblockWriter};
use one::{ObjectId, One};

use super::pages::{self, Pages};
use super::{BeginError, Catalog, Checkpoint, Entry, ReadError, StoreError, Warning};

/// Bytes of the longest name.
const LONGEST_NAME: usize = 127;

/// A page with the hash of a page in the pool: it is compared later.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PutOff {
    /// The page in the pool. The first field, so that sorting gives the pool's order.
    object: ObjectId,
    /// Number of the page in the checkpoint.
    pub page: u64,
}

/// A checkpoint that is being stored.
pub struct Writer {
    catalog: Catalog,
    name: String,
    /// All pages of the pool by their hashes. References are never released: a page stays in the
    /// pool as long as its data mblock does.
    one: LazyCell<One<Pages>, Box<dyn FnOnce() -> One<Pages>>>,
    seed: u64,
    map: Vec<u64>,
    off: Vec<PutOff>,
    /// Data mblocks with a warning.
    damaged: HashSet<u64>,
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
        let (pool, data) = (self.pool.clone(), self.data.clone());
        // Reading the hashes takes as long as finding the changed pages, which happens meanwhile.
        let opening = std::thread::spawn(move || pages::open(&pool, &data));
        let join = || opening.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let one = LazyCell::new(Box::new(join) as Box<dyn FnOnce() -> One<Pages>>);
        let seed = u64::from_le_bytes(self.pool.props().uuid[..8].try_into().unwrap_or_default());
        let (name, map, off, damaged) = (name.into(), Vec::new(), Vec::new(), HashSet::new());
        Ok(Writer { catalog: self, name, one, seed, map, off, damaged })
    }
}

impl Writer {
    /// Sets the number of pages. All are zeros until they are stored.
    pub fn set_pages(&mut self, pages: usize) {
        self.map = vec![0; pages];
    }

    /// The map of the checkpoint with this [`Catalog::label`], if this pool has it and its regions
    /// are these.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub fn earlier(&self, label: &str, regions: &[(u64, u64)]) -> Result<Option<Vec<u64>>, ReadError> {
        let catalog = &self.catalog;
        let found = catalog.checkpoints.iter().find(|c| Catalog::label(&catalog.pool, c) == label);
        found.filter(|c| c.regions == regions).map(|c| catalog.map(c)).transpose()
    }

    /// Takes over a page's place from an earlier checkpoint's map.
    pub fn carry(&mut self, page: u64, at: u64) {
        self.map[page as usize] = at;
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
        let digests: Vec<u128> = hashes.iter().flatten().copied().collect();
        let mut found = self.one.find_many(&digests).into_iter();
        for ((&page, bytes), &hash) in pages.iter().zip(bytes.chunks_exact(BLOCK)).zip(hashes) {
            match hash.map(|hash| (hash, found.next().flatten())) {
                None => self.map[page as usize] = 0,
                Some((_, Some(object))) if !self.one.store().is_open(object) => self.off.push(PutOff { object, page }),
                // Looks the hash up again: a page earlier in this batch may be its duplicate.
                Some((hash, _)) => self.keep(page, bytes, hash)?,
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
        for (i, (&PutOff { object, page }, bytes)) in off.iter().zip(bytes.chunks_exact(BLOCK)).enumerate() {
            self.one.store().bring(off[i..].iter().map(|off| off.object))?;
            if self.one.claim(object, bytes) {
                self.map[page as usize] = self.one.store().place(object);
                continue;
            }
            // The page has been written since, only its hash was equal, or it cannot be compared.
            match hash(bytes, self.seed) {
                None => self.map[page as usize] = 0,
                Some(hash) => self.keep(page, bytes, hash)?,
            }
        }
        Ok(())
    }

    /// Stores the page unless the pool has it.
    fn keep(&mut self, page: u64, bytes: &[u8], hash: u128) -> Result<(), StoreError> {
        let put = self.one.put_by(hash, bytes)?;
        self.map[page as usize] = self.one.store().place(put.id);
        if put.new {
            self.one.store().put_hash(hash)?;
        }
        Ok(())
    }

    /// Warnings of pages that the pool cannot read and that were or will be stored again; each
    /// data mblock is reported once.
    pub fn warnings(&mut self) -> Vec<Warning> {
        let mut new = self.one.store().take_damaged();
        new.retain(|(id, _)| self.damaged.insert(*id));
        new.into_iter().map(|(id, why)| self.catalog.warning(id, why)).collect()
    }

    /// Ends the checkpoint without storing it, and frees its space.
    pub fn abandon(self) {
        let Self { mut catalog, one, .. } = self;
        LazyCell::force(&one); // Ends the thread that reads hashes, which has the pool open.
        drop(one);
        // Mblocks that cannot be removed now are removed when the next checkpoint begins.
        let _ = catalog.sweep();
    }

    /// Commits the checkpoint. `source` describes the process; `regions` are addresses and lengths
    /// in bytes, as many pages as [`Writer::set_pages`] said.
    ///
    /// # Errors
    /// If the pool is full or cannot be written.
    pub fn commit(mut self, source: String, regions: Vec<(u64, u64)>) -> Result<Checkpoint, StoreError> {
        let mut writers: Vec<MblockWriter> = self.one.store().finish()?.into_iter().collect();
        let bytes: Vec<u8> = self.map.iter().flat_map(|at| at.to_le_bytes()).collect();
        let mut writer =
            self.catalog.pool.mblock_alloc(Allocation { capacity: bytes.len() as u64, ..Allocation::default() })?;
        writer.write(&[IoSlice::new(&bytes)])?;
        let map = writer.id();
        writers.push(writer);
        MblockWriter::commit_all(writers)?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let filled = self.one.store().filled();
        let new_pages = filled.iter().map(|(_, pages)| u64::from(*pages)).sum();
        let mut entries: Vec<Entry> = filled.into_iter().map(|(id, pages)| Entry::Data { id, pages }).collect();
        let checkpoint = Checkpoint { name: self.name, created, source, regions, new_pages, map };
        entries.push(Entry::Checkpoint(checkpoint.clone()));
        self.catalog.append(&entries)?;
        Ok(checkpoint)
    }
}
