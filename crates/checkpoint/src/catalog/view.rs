//! The checkpoints of a pool: which there are, and what they need.

use std::collections::BTreeMap;

use mpool::Pool;

use super::compressed::DataMblock;
use super::list::{Attached, Data};
use super::{CatalogDamage, Checkpoint, FindError, Flaw, PageFlaw, ReadError, Warning};

/// Bytes of an mblock that are read at once.
const AT_ONCE: usize = 1 << 20;

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

    /// The pool, which stays open as long as this.
    pub fn pool(&self) -> &Pool {
        &self.pool
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
    pub(super) fn damaged(&self, name: &str, flaw: Flaw) -> ReadError {
        let (name, pool) = (name.into(), self.pool.props().name);
        match flaw {
            Flaw::Claim(source) => ReadError::Claim { name, pool, source },
            source => ReadError::Damaged { name, pool, source },
        }
    }

    /// Opens a data mblock.
    pub(super) fn data_mblock(&self, id: u64) -> Result<DataMblock, Flaw> {
        let gone = Flaw::NoPage { page: 0, mblock: id };
        Ok(DataMblock::new(self.pool.mblock(id)?, *self.data.get(&id).ok_or(gone)?))
    }

    /// All bytes of an mblock. Memory is taken as they are read, and checked.
    pub(super) fn whole(&self, id: u64) -> Result<Vec<u8>, Flaw> {
        let mblock = self.pool.mblock(id)?;
        let (len, mut bytes) = (mblock.props().len, Vec::new());
        claims::memory(len)?;
        while (bytes.len() as u64) < len {
            let start = bytes.len();
            bytes.resize(len.min((start + AT_ONCE) as u64) as usize, 0);
            mblock.read(start as u64, &mut bytes[start..])?;
        }
        Ok(bytes)
    }

    /// The warning that pages of this data mblock are stored again.
    pub(super) fn warning(&self, id: u64, why: PageFlaw) -> Warning {
        let needs = |c: &&Checkpoint| c.needs.data.contains(id);
        let checkpoints = self.checkpoints.iter().filter(needs).map(|c| c.name.clone()).collect();
        Warning::Damaged { pool: self.pool.props().name, checkpoints, why }
    }
}
