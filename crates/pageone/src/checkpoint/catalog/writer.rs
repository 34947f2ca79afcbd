//! A checkpoint that is being stored.

use std::cell::LazyCell;
use std::collections::HashSet;
use std::io::IoSlice;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};
use mpool::{Allocation, BLOCK, MblockWriter};
use one::{ObjectId, One};

use super::pages::{self, Pages};
use super::{Catalog, Checkpoint, Entry};

/// A page that looks like one that the pool has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PutOff {
    /// The pool's. First, so that sorted ones are in the order in which the pool has them.
    object: ObjectId,
    /// Its number.
    pub(crate) page: u64,
}

/// See the module's page.
pub(crate) struct Writer {
    catalog: Catalog,
    name: String,
    /// Knows all pages of the pool by their hashes. References are taken and never given back: a
    /// page is in the pool as long as its data mblock is, whatever becomes of the memory that
    /// it was found in.
    one: LazyCell<One<Pages>, Box<dyn FnOnce() -> One<Pages>>>,
    seed: u64,
    map: Vec<u64>,
    off: Vec<PutOff>,
    /// Data mblocks of which something could not be read.
    damaged: HashSet<u64>,
}

/// What a page is known by; `None` for zeros.
pub(crate) fn hash(page: &[u8], seed: u64) -> Option<u128> {
    let zeros = page.as_chunks::<16>().0.iter().all(|word| u128::from_ne_bytes(*word) == 0);
    (!zeros).then(|| xxhash_rust::xxh3::xxh3_128_with_seed(page, seed))
}

impl Catalog {
    /// Begins a checkpoint.
    pub(crate) fn begin(mut self, name: &str) -> Result<Writer> {
        ensure!(!self.checkpoints.iter().any(|c| c.name == name), "there is a checkpoint called {name:?} already");
        ensure!(!name.is_empty() && name.len() < 128, "a checkpoint's name has 1 to 127 bytes");
        self.ensure_whole()?;
        self.sweep()?;
        if self.mdc.usage() > 1 << 20 {
            self.compact()?;
        }
        let (pool, data) = (self.pool.clone(), self.data.clone());
        // It takes as long as finding out what has changed, and nobody needs it before.
        let opening = std::thread::spawn(move || pages::open(&pool, &data));
        let join = || opening.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let one = LazyCell::new(Box::new(join) as Box<dyn FnOnce() -> One<Pages>>);
        let seed = u64::from_le_bytes(self.pool.props().uuid[..8].try_into().unwrap_or_default());
        let (name, map, off, damaged) = (name.into(), Vec::new(), Vec::new(), HashSet::new());
        Ok(Writer { catalog: self, name, one, seed, map, off, damaged })
    }
}

impl Writer {
    /// Says how many pages there are. All are zeros until they are stored.
    pub(crate) fn set_pages(&mut self, pages: usize) {
        self.map = vec![0; pages];
    }

    /// The map of the checkpoint of that [`Catalog::label`], if it is in this pool and of the same
    /// regions.
    pub(crate) fn earlier(&self, label: &str, regions: &[(u64, u64)]) -> Result<Option<Vec<u64>>> {
        let catalog = &self.catalog;
        let found = catalog.checkpoints.iter().find(|c| Catalog::label(&catalog.pool, c) == label);
        found.filter(|c| c.regions == regions).map(|c| catalog.map(c)).transpose()
    }

    /// The page is what an earlier checkpoint's map says.
    pub(crate) fn carry(&mut self, page: u64, at: u64) {
        self.map[page as usize] = at;
    }

    /// For [`hash`].
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Stores pages; `hashes` are their hashes, `None` for zeros. What looks like a page of the
    /// pool is put off: it is given back by [`Writer::put_off`] in the order in which the pool
    /// has it.
    pub(crate) fn put(&mut self, pages: &[u64], bytes: &[u8], hashes: &[Option<u128>]) -> Result<()> {
        let digests: Vec<u128> = hashes.iter().flatten().copied().collect();
        let mut found = self.one.find_many(&digests).into_iter();
        for ((&page, bytes), &hash) in pages.iter().zip(bytes.chunks_exact(BLOCK)).zip(hashes) {
            match hash.map(|hash| (hash, found.next().flatten())) {
                None => self.map[page as usize] = 0,
                Some((_, Some(object))) if !self.one.store().is_open(object) => self.off.push(PutOff { object, page }),
                // Also where it was found missing: one before it may have been its like.
                Some((hash, _)) => self.keep(page, bytes, hash)?,
            }
        }
        Ok(())
    }

    /// The pages that were put off, sorted.
    pub(crate) fn put_off(&mut self) -> Vec<PutOff> {
        let mut off = std::mem::take(&mut self.off);
        off.sort_unstable();
        off
    }

    /// Stores pages that were put off; `bytes` is what they are now. Sorted, the pool is read from
    /// front to back.
    pub(crate) fn put_again(&mut self, off: &[PutOff], bytes: &[u8]) -> Result<()> {
        for (i, (&PutOff { object, page }, bytes)) in off.iter().zip(bytes.chunks_exact(BLOCK)).enumerate() {
            self.one.store().bring(off[i..].iter().map(|off| off.object))?;
            if self.one.claim(object, bytes) {
                self.map[page as usize] = self.one.store().place(object);
                continue;
            }
            // It has been written since, was only like it, or cannot be compared.
            match hash(bytes, self.seed) {
                None => self.map[page as usize] = 0,
                Some(hash) => self.keep(page, bytes, hash)?,
            }
        }
        self.warn();
        Ok(())
    }

    /// Makes sure that the pool has the page.
    fn keep(&mut self, page: u64, bytes: &[u8], hash: u128) -> Result<()> {
        let put = self.one.put_by(hash, bytes)?;
        self.map[page as usize] = self.one.store().place(put.id);
        if put.new {
            self.one.store().put_hash(hash)?;
        }
        Ok(())
    }

    fn warn(&mut self) {
        for (id, why) in self.one.store().take_damaged() {
            if self.damaged.insert(id) {
                self.catalog.warn_of(id, &why);
            }
        }
    }

    /// Gives up: frees what was stored.
    pub(crate) fn abandon(self) {
        let Self { mut catalog, one, .. } = self;
        LazyCell::force(&one); // the other thread has the pool no more
        drop(one);
        // What cannot be removed now is when the next checkpoint begins.
        let _ = catalog.sweep();
    }

    /// Commits the checkpoint.
    pub(crate) fn commit(mut self, source: String, regions: Vec<(u64, u64)>) -> Result<Checkpoint> {
        self.warn();
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
