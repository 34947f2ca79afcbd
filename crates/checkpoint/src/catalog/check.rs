//! Checking the records against the maps.

use super::compressed::{DataMblock, Reader};
use super::list::{Entry, Ids, Needs, discount};
use super::{Catalog, Checkpoint, Finding, Flaw, PageFlaw, Unrepaired, View};

/// What becomes of a wrong record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It stays.
    Report,
    /// It is written anew.
    Repair,
}

impl Catalog {
    /// Reads all maps, and compares the data mblocks that they name with those that the records
    /// name, by which data mblocks are kept.
    ///
    /// # Errors
    /// If a record cannot be written: the rest is looked at, and stays.
    pub fn check(&mut self, wrong: Wrong) -> Result<Vec<Finding>, Unrepaired> {
        let repair = wrong == Wrong::Repair && self.view.damage.is_none();
        let (mut findings, mut written) = (Vec::new(), Ok(()));
        for checkpoint in self.view.checkpoints.clone() {
            let data = match self.view.named(&checkpoint) {
                Ok(data) => data,
                Err(flaw) => {
                    findings.push(Finding::Unreadable(self.view.damaged(&checkpoint.name, flaw)));
                    continue;
                }
            };
            if data == checkpoint.needs.data {
                continue;
            }
            let needs = Needs { data, ..checkpoint.needs.clone() };
            if repair && written.is_ok() {
                written = self.append(&[Entry::Checkpoint(checkpoint.clone(), needs.clone())]);
            }
            let repaired = repair && written.is_ok();
            findings.push(Finding::Needs { name: checkpoint.name.clone(), repaired });
            if repaired {
                discount(&mut self.view.data, &checkpoint.needs.data);
                self.enter(Checkpoint { needs, ..checkpoint });
            }
        }
        match written {
            Ok(()) => Ok(findings),
            Err(source) => Err(Unrepaired { findings, source }),
        }
    }
}

impl View {
    /// Decodes all compressed data mblocks.
    pub fn check_compressed(&self) -> Vec<Finding> {
        let mut reader = Reader::default();
        let mut check = |id: u64, data| -> Result<(), PageFlaw> {
            match DataMblock::new(self.pool.mblock(id)?, data) {
                DataMblock::Compressed(mblock) => mblock.hashes().and_then(|_| mblock.check(&mut reader)),
                DataMblock::Plain(_) => Ok(()),
            }
        };
        self.data.iter().filter_map(|(id, data)| check(*id, *data).err()).map(Finding::Compressed).collect()
    }

    /// The data mblocks that a map names. All of the map is read.
    fn named(&self, checkpoint: &Checkpoint) -> Result<Ids, Flaw> {
        let root = self.root(checkpoint)?;
        self.leaves(root.named()).try_for_each(|(_, leaf)| leaf.map(drop))?;
        Ok(root.data())
    }
}
