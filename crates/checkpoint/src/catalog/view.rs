//! Reading the checkpoints of a pool.

use std::collections::BTreeMap;
use std::io;

use mpool::{Advice, BLOCK, MapError, Mcache, Pool, Temperature};

use super::list::Data;
use super::{CatalogDamage, Checkpoint, FindError, Flaw, PageFlaw, ReadError, Warning};

/// Bound on the bytes of a checkpoint's regions: an address space with 5-level page tables.
const MOST_BYTES: u64 = 1 << 57;
/// Pages given to the caller of [`View::each_run`] at a time, at most.
const RUN: usize = 256;

/// The checkpoints of a pool, to be read.
#[derive(Clone)]
pub struct View {
    pub(super) pool: Pool,
    /// The data mblocks, by identity.
    pub(super) data: BTreeMap<u64, Data>,
    pub(super) checkpoints: Vec<Checkpoint>,
    /// The first damage of the list; the catalogue must not be changed then.
    pub(super) damage: Option<String>,
}

impl View {
    /// The damage of the list of checkpoints, if any; its message names the remedy.
    pub fn damage(&self) -> Option<CatalogDamage> {
        let damage = self.damage.clone()?;
        Some(CatalogDamage { pool: self.pool.props().name, damage })
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
    pub(super) fn damaged(&self, name: &str, source: Flaw) -> ReadError {
        ReadError::Damaged { name: name.into(), pool: self.pool.props().name, source }
    }

    /// The map of a checkpoint: the place of each page, `id << 16 | page`, or 0 for zeros. Every
    /// page that it names exists.
    ///
    /// # Errors
    /// If the map cannot be read, or does not fit the records.
    pub fn map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>, ReadError> {
        self.read_map(checkpoint).map_err(|flaw| self.damaged(&checkpoint.name, flaw))
    }

    pub(super) fn read_map(&self, checkpoint: &Checkpoint) -> Result<Vec<u64>, Flaw> {
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
        let mut known = (0, 0);
        for &at in map.iter().filter(|&&at| at != 0) {
            if known.0 != at >> 16 {
                known = (at >> 16, self.data.get(&(at >> 16)).map_or(0, |data| data.pages));
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

    /// The warning that pages of this data mblock are stored again.
    pub(super) fn warning(&self, id: u64, why: PageFlaw) -> Warning {
        let needs = |c: &&Checkpoint| c.needs.contains(id);
        let checkpoints = self.checkpoints.iter().filter(needs).map(|c| c.name.clone()).collect();
        Warning::Damaged { pool: self.pool.props().name, checkpoints, why }
    }
}

/// The flaw of a map with this place.
fn no_page(at: u64) -> Flaw {
    Flaw::NoPage { page: at & 0xFFFF, mblock: at >> 16 }
}
