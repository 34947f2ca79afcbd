//! Checking the records against the maps.

use super::list::{Entry, Ids, discount};
use super::{Catalog, Checkpoint, Finding, StoreError};

impl Catalog {
    /// Reads all maps, and compares the data mblocks that they name with those that the records
    /// name, by which data mblocks are kept. With `repair` wrong records are written anew.
    ///
    /// # Errors
    /// If a record cannot be written.
    pub fn check(&mut self, repair: bool) -> Result<Vec<Finding>, StoreError> {
        let repair = repair && self.view.damage.is_none();
        let mut findings = Vec::new();
        for checkpoint in self.view.checkpoints.clone() {
            let needs = match self.view.map(&checkpoint) {
                Ok(map) => Ids::of_map(&map),
                Err(e) => {
                    findings.push(Finding::Unreadable(e));
                    continue;
                }
            };
            if needs == checkpoint.needs {
                continue;
            }
            findings.push(Finding::Needs { name: checkpoint.name.clone(), repaired: repair });
            if repair {
                self.append(&[Entry::Checkpoint(checkpoint.clone(), needs.clone())])?;
                discount(&mut self.view.data, &checkpoint.needs);
                self.enter(Checkpoint { needs, ..checkpoint });
            }
        }
        Ok(findings)
    }
}
