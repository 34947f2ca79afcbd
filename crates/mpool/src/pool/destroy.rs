//! Removing a pool.

use std::path::Path;
use std::sync::Arc;

use super::Pool;
use super::directory::{read_superblock, refuse_others_data};
use super::lease;
use crate::MediaClass;
use crate::disk::file_system::Disk;
use crate::disk::key::{self, Keys};
use crate::disk::medium::{Access, Medium, Storage};
use crate::disk::sealed::over;
use crate::disk::superblock;
use crate::error::{During, PoolError};
use crate::objects::class;
use crate::objects::meta::Journal;

impl Pool {
    /// Removes a pool with everything in it. It must not be open. Of an encrypted pool the wrapped
    /// key is erased first; without the user's key the directories of its other classes are not
    /// known, and stay.
    ///
    /// # Errors
    /// Those of [`Pool::open`].
    pub fn destroy(path: &Path) -> Result<(), PoolError> {
        Self::destroy_on(Arc::new(Disk), path)
    }

    pub(crate) fn destroy_on(storage: Arc<dyn Storage>, path: &Path) -> Result<(), PoolError> {
        // A damaged pool can be removed, an open one cannot. The lock outlives the reading of the
        // metadata.
        let medium = storage.directory(path).during("opening", path.display())?;
        let Some((superblock, _)) = read_superblock(&*medium)? else {
            return Err(PoolError::NotAPool(medium.path().into()));
        };
        if !medium.lock(Access::Exclusive).during("locking", path.display())? {
            return Err(PoolError::Busy(medium.path().into()));
        }
        let keys = || Keys::open(&*medium, Some(superblock.pool)).ok().map(Arc::new);
        let keys = superblock.is_encrypted().then(keys).flatten();
        let medium = over(medium, keys.as_ref(), MediaClass::Capacity);
        lease::refuse(&*medium)?;
        let classes = Journal::open(&*medium, Access::Shared).map(|(_, tables, _)| tables.classes).unwrap_or_default();
        // The capacity class last, and in each class the superblock last: an interrupted removal
        // can be repeated.
        let mut media: Vec<Arc<dyn Medium>> = Vec::new();
        for path in classes.iter().filter(|(class, _)| **class != MediaClass::Capacity).map(|(_, path)| path) {
            let Ok(other) = storage.directory(path) else { continue };
            match read_superblock(&*other) {
                Ok(Some((found, _))) if found.pool == superblock.pool => media.push(other),
                // Adding or removing it was interrupted: there is at most an unfinished superblock
                // and an empty data file.
                Ok(None) if refuse_others_data(&*other).is_ok() => media.push(other),
                _ => {}
            }
        }
        media.push(medium);
        for medium in media {
            let at = medium.path().display();
            let names = medium.list().during("listing", &at)?;
            let finished = read_superblock(&*medium)?.is_some();
            key::erase(&*medium)?;
            let ours = |name: &str| {
                name == class::DATA
                    || finished && ["meta-", "mlog-", "mdc-"].iter().any(|start| name.starts_with(start))
            };
            for name in names.iter().filter(|name| ours(name)) {
                medium.remove(name).during("removing a file in", &at)?;
            }
            medium.sync_names().during("syncing", &at)?;
            for name in superblock::NAMES.iter().rev().filter(|name| names.iter().any(|there| there == *name)) {
                medium.remove(name).during("removing the superblock in", &at)?;
                medium.sync_names().during("syncing", &at)?;
            }
            // The directory may hold other files.
            let _ = storage.remove_directory(medium.path());
        }
        Ok(())
    }
}
