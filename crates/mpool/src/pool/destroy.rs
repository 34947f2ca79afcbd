//! Removing a pool.

use std::path::Path;
use std::sync::Arc;

use super::Pool;
use super::directory::{read_superblock, refuse_others_data};
use crate::MediaClass;
use crate::disk::medium::{Disk, Medium, Open, Storage};
use crate::disk::superblock;
use crate::error::{During, PoolError};
use crate::objects::class;
use crate::objects::meta::Meta;

impl Pool {
    /// Removes a pool with all that is in it. Nobody may have it open.
    ///
    /// # Errors
    ///
    /// As [`Pool::open`].
    pub fn destroy(path: &Path) -> Result<(), PoolError> {
        Self::destroy_on(Arc::new(Disk), path)
    }

    /// As [`Pool::destroy`], on a storage of the caller's.
    ///
    /// # Errors
    ///
    /// As [`Pool::destroy`].
    pub fn destroy_on(storage: Arc<dyn Storage>, path: &Path) -> Result<(), PoolError> {
        // Damage must not keep anybody from that; but somebody who has it open must. The lock outlives the
        // salvage opening.
        let medium = storage.directory(path, false).during("opening", path.display())?;
        if read_superblock(&*medium)?.is_none() {
            return Err(PoolError::NotAPool(medium.path().into()));
        }
        let lock =
            medium.open(superblock::NAME, Open::default()).during("opening the superblock in", path.display())?;
        if !lock.lock(true).during("locking", path.display())? {
            return Err(PoolError::Busy(medium.path().into()));
        }
        let classes = Meta::open(&*medium, false).map(|(meta, _)| meta.tables.classes).unwrap_or_default();
        // The capacity class last, and of each class the superblock: what was cut short can be done again.
        let mut media: Vec<Arc<dyn Medium>> = Vec::new();
        let uuid = read_superblock(&*medium)?.map(|(s, _)| s.pool);
        for path in classes.iter().filter(|(class, _)| **class != MediaClass::Capacity).map(|(_, path)| path) {
            let Ok(other) = storage.directory(path, false) else { continue };
            match read_superblock(&*other) {
                Ok(Some((found, _))) if Some(found.pool) == uuid => media.push(other),
                // Adding it was cut short, or removing it: at most a superblock in the making is there, and an empty
                // data file.
                Ok(None) if refuse_others_data(&*other).is_ok() => media.push(other),
                _ => {}
            }
        }
        media.push(medium);
        for medium in media {
            let at = medium.path().display();
            let names = medium.list().during("listing", &at)?;
            let finished = read_superblock(&*medium)?.is_some();
            let ours = |name: &str| {
                name == class::DATA
                    || finished && ["meta-", "mlog-", "mdc-"].iter().any(|start| name.starts_with(start))
            };
            for name in names.iter().filter(|name| ours(name)) {
                medium.remove(name).during("removing a file in", &at)?;
            }
            medium.sync_names().during("syncing", &at)?;
            if names.iter().any(|name| name == superblock::NAME) {
                medium.remove(superblock::NAME).during("removing the superblock in", &at)?;
                medium.sync_names().during("syncing", &at)?;
            }
            // Somebody else's files may be there too.
            let _ = storage.remove_directory(medium.path());
        }
        Ok(())
    }
}
