//! Checkpoints in a pool: pages stored once, and for each checkpoint a map of pages.
//!
//! A *data* mblock holds up to 8192 pages, followed by their hashes. A *map* mblock holds 8 bytes
//! for each page of a checkpoint: the data mblock's identity and the page in it (`id << 16 |
//! page`), or 0 for zeros. The pool's root MDC lists the mblocks and their kinds. A data mblock
//! counts only if the record of a checkpoint follows its own. An mblock without a record is left
//! over from an interrupted checkpoint; it is removed when the next checkpoint begins.
//!
//! A page is looked up by its hash (128 bits of XXH3, seeded with the pool's identity) and then
//! compared with the pool's page byte by byte; only this comparison decides. ONE does both
//! ([`one`]): its store is the pool (`pages`), and its objects come from a checkpoint
//! (`writer`).
//!
//! *Damage.* mpool detects bytes that differ from what was written. The catalogue checks its
//! records against the mblocks before it uses them. A damaged checkpoint is an error that says so;
//! the others remain readable. A catalogue that has lost records is never changed, because an
//! mblock without a record may be needed. A page of the pool that cannot be read is stored again.

mod error;
mod pages;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::{HashMap, HashSet};
use std::io;

use mpool::{Access, Advice, BLOCK, MapError, Mcache, Mdc, ObjectError, Pool, ROOT_MDC, Temperature};
use serde::{Deserialize, Serialize};

pub use error::{
    BeginError, CatalogDamage, FindError, Flaw, OpenError, PageFlaw, ReadError, RemoveError, StoreError, Warning,
};
pub use writer::{PutOff, Writer, hash};

/// Pages of a data mblock.
const PAGES: usize = 8192;
/// Bytes of a hash on the medium.
const HASH: usize = 16;
/// Version of the format, in the root MDC's first record.
const FORMAT: u32 = 1;
/// Bound on the bytes of a checkpoint's regions: an address space with 5-level page tables.
const MOST_BYTES: u64 = 1 << 57;
/// Bytes of the root MDC from which it is compacted when a checkpoint begins.
const COMPACT_FROM: u64 = 1 << 20;
/// Bytes of the root MDC below which it has no records.
const EMPTY_BELOW: u64 = 128;
/// Pages given to the caller of [`Catalog::each_run`] at a time, at most.
const RUN: usize = 256;

/// Entries of removed data that are appended at once.
const REMOVED_AT_ONCE: usize = 256;

/// A record of the root MDC.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Entry {
    /// The pool holds checkpoints of this format.
    Format(u32),
    /// A data mblock, which counts if a checkpoint's record follows.
    Data { id: u64, pages: u32 },
    /// A checkpoint.
    Checkpoint(Checkpoint),
    /// The checkpoint of this name is removed.
    Gone(String),
    /// This data mblock is removed.
    DataGone(u64),
}

/// A stored checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its name.
    pub name: String,
    /// When it was taken, seconds since 1970.
    pub created: u64,
    /// The process: its program's name and its number.
    pub source: String,
    /// Address and length in bytes of each region.
    pub regions: Vec<(u64, u64)>,
    /// Number of pages that the pool did not have.
    pub new_pages: u64,
    /// The map mblock.
    map: u64,
}

impl Checkpoint {
    /// Bytes of memory in all regions.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().fold(0, |sum, (_, len)| sum.saturating_add(*len))
    }

    /// Pages ([`BLOCK`]) of the map mblock.
    pub fn map_pages(&self) -> u64 {
        (self.bytes() / BLOCK as u64 * 8).div_ceil(BLOCK as u64)
    }
}

/// The checkpoints of a pool.
pub struct Catalog {
    pool: Pool,
    mdc: Mdc,
    /// Identity and number of pages of each data mblock.
    data: Vec<(u64, u32)>,
    /// Data mblocks that no checkpoint's record follows.
    orphans: Vec<u64>,
    checkpoints: Vec<Checkpoint>,
    /// The first damage of the list; the catalogue must not be changed then.
    damage: Option<String>,
}

fn encode(entries: &[Entry]) -> Result<Vec<Vec<u8>>, StoreError> {
    entries.iter().map(|entry| Ok(postcard::to_allocvec(entry)?)).collect()
}

/// The records of a root MDC.
#[derive(Default)]
struct List {
    data: Vec<(u64, u32)>,
    /// Data mblocks since the last checkpoint's record.
    orphans: Vec<(u64, u32)>,
    checkpoints: Vec<Checkpoint>,
    format: Option<u32>,
    damage: Option<String>,
}

impl List {
    /// Reads all records.
    fn read(mdc: &mut Mdc) -> Result<Self, OpenError> {
        let mut list = Self::default();
        loop {
            match mdc.read() {
                Ok(Some(record)) => list.apply(postcard::from_bytes(&record).map_err(|_| OpenError::Foreign)?),
                Ok(None) => break,
                Err(e @ ObjectError::Damaged(_)) => {
                    list.damage = list.damage.or(Some(e.to_string()));
                    mdc.skip_damaged().map_err(StoreError::from)?;
                }
                Err(e) => return Err(OpenError::Read(e)),
            }
        }
        list.damage = list.damage.or_else(|| mdc.damage().first().map(ToString::to_string));
        Ok(list)
    }

    fn apply(&mut self, entry: Entry) {
        match entry {
            Entry::Format(found) => self.format = Some(found),
            Entry::Data { id, pages } => self.orphans.push((id, pages)),
            Entry::Checkpoint(checkpoint) => {
                self.data.append(&mut self.orphans);
                self.checkpoints.push(checkpoint);
            }
            Entry::Gone(name) => self.checkpoints.retain(|c| c.name != name),
            Entry::DataGone(gone) => {
                self.data.retain(|(id, _)| *id != gone);
                self.orphans.retain(|(id, _)| *id != gone);
            }
        }
    }
}

impl Catalog {
    /// Reads the catalogue of a pool. An empty pool that is open exclusively becomes one of
    /// checkpoints.
    ///
    /// # Errors
    /// If the list of checkpoints cannot be read, or the pool holds something else.
    pub fn open(pool: &Pool) -> Result<Self, OpenError> {
        let mut mdc = pool.mdc_open(ROOT_MDC).map_err(StoreError::from)?;
        let List { mut data, mut orphans, checkpoints, format, damage } = List::read(&mut mdc)?;
        let empty = mdc.usage() < EMPTY_BELOW && pool.mblocks().is_empty();
        if format != Some(FORMAT) && (format.is_some() || !(empty || damage.is_some())) {
            return Err(OpenError::Format);
        }
        if checkpoints.is_empty() {
            // No checkpoint needs them, even if the records of their removal are lost.
            orphans.append(&mut data);
        }
        if format.is_none() && damage.is_none() && pool.props().access == Access::Exclusive {
            let first = encode(&[Entry::Format(FORMAT)])?;
            mdc.append(&[&first[0]], true).map_err(StoreError::from)?;
        }
        let orphans = orphans.into_iter().map(|(id, _)| id).collect();
        Ok(Self { pool: pool.clone(), mdc, data, orphans, checkpoints, damage })
    }

    /// The damage of the list of checkpoints, if any; its message names the remedy.
    pub fn damage(&self) -> Option<CatalogDamage> {
        let damage = self.damage.clone()?;
        Some(CatalogDamage { pool: self.pool.props().name, damage })
    }

    fn ensure_whole(&self) -> Result<(), CatalogDamage> {
        self.damage().map_or(Ok(()), Err)
    }

    /// All checkpoints, the oldest first.
    pub fn checkpoints(&self) -> &[Checkpoint] {
        &self.checkpoints
    }

    /// The checkpoint of this name.
    ///
    /// # Errors
    /// If the list does not have it.
    pub fn find(&self, name: &str) -> Result<&Checkpoint, FindError> {
        let found = self.checkpoints.iter().find(|c| c.name == name);
        found.ok_or_else(|| match self.damage() {
            None => FindError::Missing(name.into()),
            Some(damage) => FindError::MissingFromDamaged { name: name.into(), damage },
        })
    }

    /// The error of a checkpoint that cannot be read.
    fn damaged(&self, name: &str, source: Flaw) -> ReadError {
        ReadError::Damaged { name: name.into(), pool: self.pool.props().name, source }
    }

    fn append(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        let records = encode(entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        Ok(self.mdc.append(&records, true)?)
    }

    /// Appends entries because of which space will be free.
    fn append_freeing(&mut self, entries: &[Entry]) -> Result<(), StoreError> {
        let records = encode(entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        Ok(self.mdc.append_freeing(&records, true)?)
    }

    /// The map of a checkpoint: the place of each page, `id << 16 | page`, or 0 for zeros. Every
    /// page that it names exists.
    ///
    /// # Errors
    /// If the map cannot be read, or does not fit the records.
    pub fn map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>, ReadError> {
        self.read_map(checkpoint).map_err(|flaw| self.damaged(&checkpoint.name, flaw))
    }

    fn read_map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>, Flaw> {
        let len = checkpoint.bytes();
        let whole = checkpoint.regions.iter().all(|(_, len)| len % BLOCK as u64 == 0);
        if !whole || len >= MOST_BYTES {
            return Err(Flaw::Regions(len));
        }
        let mblock = self.pool.mblock(checkpoint.map)?;
        let (expected, is) = (len / BLOCK as u64 * 8, mblock.props().len);
        if expected != is {
            return Err(Flaw::MapLength { is, expected });
        }
        let mut bytes = vec![0; expected as usize];
        mblock.read(0, &mut bytes)?;
        let map: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let data: HashMap<u64, u32> = self.data.iter().copied().collect();
        let mut known = (0, 0);
        for &at in map.iter().filter(|&&at| at != 0) {
            if known.0 != at >> 16 {
                known = (at >> 16, data.get(&(at >> 16)).copied().unwrap_or(0));
            }
            if at & 0xFFFF >= u64::from(known.1) {
                return Err(no_page(at));
            }
        }
        Ok(map)
    }

    /// Calls `each` for every run of pages of a checkpoint, ascending, with its offset in bytes and
    /// its contents. Between the runs are zeros. The pages come from one mcache map of all data
    /// mblocks that the checkpoint needs.
    ///
    /// # Errors
    /// If the checkpoint cannot be read, or `each` fails.
    pub fn each_run(
        &self,
        cache: &Mcache,
        checkpoint: &Checkpoint,
        mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        let map = self.map(checkpoint)?;
        let damaged = |error: MapError| self.damaged(&checkpoint.name, error.into());
        let mut ids: Vec<u64> = map.iter().filter(|&&at| at != 0).map(|at| at >> 16).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            return Ok(());
        }
        let pages = cache.map(&self.pool, &ids, Temperature::Cold).map_err(damaged)?;
        pages.advise(0, 0, 0, Advice::Sequential)?;
        let mut at = 0;
        while at < map.len() {
            if map[at] == 0 {
                at += 1;
                continue;
            }
            // Pages with consecutive places are one run.
            let run = (1..RUN).take_while(|&i| map.get(at + i) == Some(&map[at].wrapping_add(i as u64))).count() + 1;
            let index = ids.binary_search(&(map[at] >> 16));
            let index = index.map_err(|_| self.damaged(&checkpoint.name, no_page(map[at])))?;
            let bytes = pages.get(index, (map[at] & 0xFFFF) * BLOCK as u64, run * BLOCK).map_err(damaged)?;
            each((at * BLOCK) as u64, bytes)?;
            at += run;
        }
        Ok(())
    }

    /// Identifies a checkpoint and its pool, for [`Writer::earlier`].
    pub fn label(pool: &Pool, checkpoint: &Checkpoint) -> String {
        format!("{:032x}/{:x}", u128::from_be_bytes(pool.props().uuid), checkpoint.map)
    }

    /// Removes a checkpoint, and the data that no other checkpoint needs.
    ///
    /// # Errors
    /// If there is no such checkpoint, or the pool is damaged or cannot be written.
    pub fn remove(&mut self, name: &str) -> Result<(), RemoveError> {
        self.ensure_whole()?;
        let map = self.find(name)?.map;
        let mut needed = HashSet::new();
        for other in self.checkpoints.iter().filter(|c| c.name != name) {
            needed.extend(self.map(other)?.into_iter().filter(|&at| at != 0).map(|at| at >> 16));
        }
        let unneeded: Vec<u64> = self.data.iter().map(|(id, _)| *id).filter(|id| !needed.contains(id)).collect();
        self.append_freeing(&[Entry::Gone(name.into())])?;
        self.checkpoints.retain(|c| c.name != name);
        // After a crash, the record of an earlier removal may be lost though the mblock is gone.
        let there: HashSet<u64> = self.pool.mblocks().iter().map(|m| m.id).collect();
        // A few at a time, for which a full pool has room too: each frees space for the next. What
        // an error leaves is swept by the next checkpoint.
        for some in unneeded.chunks(REMOVED_AT_ONCE) {
            let entries: Vec<Entry> = some.iter().map(|&id| Entry::DataGone(id)).collect();
            self.append_freeing(&entries)?;
            let gone: Vec<u64> = some.iter().copied().filter(|id| there.contains(id)).collect();
            self.pool.mblock_delete(&gone).map_err(StoreError::from)?;
        }
        self.data.retain(|(id, _)| !unneeded.contains(id));
        let map = [map].into_iter().filter(|id| there.contains(id)).collect::<Vec<u64>>();
        Ok(self.pool.mblock_delete(&map).map_err(StoreError::from)?)
    }

    /// Removes mblocks that no checkpoint needs: those of an interrupted checkpoint.
    fn sweep(&mut self) -> Result<(), StoreError> {
        if !self.orphans.is_empty() {
            let gone: Vec<Entry> = self.orphans.drain(..).map(Entry::DataGone).collect();
            gone.chunks(REMOVED_AT_ONCE).try_for_each(|some| self.append_freeing(some))?;
        }
        let known: HashSet<u64> =
            self.data.iter().map(|(id, _)| *id).chain(self.checkpoints.iter().map(|c| c.map)).collect();
        let leftovers: Vec<u64> = self.pool.mblocks().iter().map(|m| m.id).filter(|id| !known.contains(id)).collect();
        Ok(self.pool.mblock_delete(&leftovers)?)
    }

    /// The warning that pages of this data mblock are stored again.
    fn warning(&self, id: u64, why: PageFlaw) -> Warning {
        let needs = |c: &&Checkpoint| self.read_map(c).map_or(true, |map| map.iter().any(|at| at >> 16 == id));
        let checkpoints = self.checkpoints.iter().filter(needs).map(|c| c.name.clone()).collect();
        Warning::Damaged { pool: self.pool.props().name, checkpoints, why }
    }

    /// Rewrites the list, if it has become long.
    fn compact(&mut self) -> Result<(), StoreError> {
        if self.mdc.usage() <= COMPACT_FROM {
            return Ok(());
        }
        let mut entries = vec![Entry::Format(FORMAT)];
        entries.extend(self.data.iter().map(|&(id, pages)| Entry::Data { id, pages }));
        entries.extend(self.checkpoints.iter().cloned().map(Entry::Checkpoint));
        let records = encode(&entries)?;
        let records: Vec<&[u8]> = records.iter().map(Vec::as_slice).collect();
        self.mdc.start_compaction()?;
        self.mdc.append(&records, false)?;
        Ok(self.mdc.end_compaction()?)
    }
}

/// The flaw of a map with this place.
fn no_page(at: u64) -> Flaw {
    Flaw::NoPage { page: at & 0xFFFF, mblock: at >> 16 }
}
