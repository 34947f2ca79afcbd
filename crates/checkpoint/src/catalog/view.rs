//! Reading the checkpoints of a pool.

use std::collections::{BTreeMap, HashMap};
use std::io;

use mpool::{Advice, BLOCK, MapError, Mcache, Pool, Temperature};

use super::attached::Attached;
use super::compressed::{DataMblock, Reader};
use super::list::Data;
use super::map::LEAF;
use super::{CatalogDamage, Checkpoint, FindError, Flaw, PageFlaw, ReadError, Warning};

/// Pages given to the caller of [`View::each_run`] at a time, at most.
const RUN: usize = 256;

/// The checkpoints of a pool, to be read.
#[derive(Clone)]
pub struct View {
    pub(super) pool: Pool,
    /// The data mblocks, by identity.
    pub(super) data: BTreeMap<u64, Data>,
    pub(super) checkpoints: Vec<Checkpoint>,
    /// What is kept beside checkpoints, by their numbers.
    pub(super) attached: BTreeMap<u64, Attached>,
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
        let flawed = |flaw: Flaw| self.damaged(&checkpoint.name, flaw);
        let unreadable = |error: MapError| flawed(error.into());
        let root = self.root(checkpoint).map_err(flawed)?;
        let (compressed, ids): (Vec<u64>, Vec<u64>) =
            root.data().of(&self.data).partition(|id| self.data.get(id).is_some_and(|data| data.compressed));
        let open = |id: u64| Ok((id, self.data_mblock(id)?));
        let compressed: HashMap<u64, DataMblock> =
            compressed.into_iter().map(open).collect::<Result<_, Flaw>>().map_err(flawed)?;
        let map = (!ids.is_empty()).then(|| cache.map(&self.pool, &ids, Temperature::Cold));
        let map = map.transpose().map_err(unreadable)?;
        map.iter().try_for_each(|map| map.advise(0, 0, 0, Advice::Sequential))?;
        let (mut reader, mut decoded) = (Reader::default(), vec![0; RUN * BLOCK]);
        for (number, places) in self.leaves(root.named()) {
            let places = places.map_err(flawed)?;
            let mut page = 0;
            while page < LEAF {
                let at = places[page];
                if at == 0 {
                    page += 1;
                    continue;
                }
                // Pages with consecutive places are one run.
                let run =
                    (1..RUN).take_while(|&i| places.get(page + i) == Some(&at.wrapping_add(i as u64))).count() + 1;
                let bytes = if let Some(mblock) = compressed.get(&(at >> 16)) {
                    let bytes = &mut decoded[..run * BLOCK];
                    mblock.read(at & 0xFFFF, bytes, &mut reader).map_err(|flaw| flawed(flaw.into()))?;
                    &*bytes
                } else if let (Some(map), Ok(index)) = (&map, ids.binary_search(&(at >> 16))) {
                    map.get(index, (at & 0xFFFF) * BLOCK as u64, run * BLOCK).map_err(unreadable)?
                } else {
                    return Err(flawed(Flaw::NoPage { page: at & 0xFFFF, mblock: at >> 16 }));
                };
                each(((number * LEAF + page) * BLOCK) as u64, bytes)?;
                page += run;
            }
        }
        Ok(())
    }

    /// Opens a data mblock.
    pub(super) fn data_mblock(&self, id: u64) -> Result<DataMblock, Flaw> {
        let gone = Flaw::NoPage { page: 0, mblock: id };
        Ok(DataMblock::new(self.pool.mblock(id)?, *self.data.get(&id).ok_or(gone)?))
    }

    /// The warning that pages of this data mblock are stored again.
    pub(super) fn warning(&self, id: u64, why: PageFlaw) -> Warning {
        let needs = |c: &&Checkpoint| c.needs.data.contains(id);
        let checkpoints = self.checkpoints.iter().filter(needs).map(|c| c.name.clone()).collect();
        Warning::Damaged { pool: self.pool.props().name, checkpoints, why }
    }
}
