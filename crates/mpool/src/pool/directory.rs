//! A class's directory: its superblock, and whether the directory may be used.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::disk::medium::{Access, Medium, Open, Storage};
use crate::disk::superblock::{ENCRYPTED_VERSION, FORMAT_VERSION, Superblock, read_copies, write_superblock};
use crate::error::{Damage, During, PoolError};
use crate::objects::class;

/// The directory of a pool that nobody has open, locked for as long as it lives.
pub(super) fn locked(storage: &dyn Storage, path: &Path) -> Result<Arc<dyn Medium>, PoolError> {
    let medium = match storage.directory(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(PoolError::NotAPool(path.into())),
        medium => medium.during("opening", path.display())?,
    };
    if medium.lock(Access::Exclusive).during("locking", medium.path().display())? {
        Ok(medium)
    } else {
        Err(PoolError::Busy(medium.path().into()))
    }
}

/// The superblock of a directory, from either of its files; `None`: neither has one.
pub(super) fn read_superblock(medium: &dyn Medium) -> Result<Option<(Superblock, Option<Damage>)>, PoolError> {
    let path = medium.path();
    let Some((found, damage)) = Superblock::newer(read_copies(medium)?) else { return Ok(None) };
    let known = [FORMAT_VERSION, ENCRYPTED_VERSION];
    if !known.contains(&found.version) {
        return Err(PoolError::Version { path: path.into(), found: found.version, known });
    }
    Ok(Some((found, damage)))
}

/// Refuses a directory whose `data` file has contents but no superblock: it belongs to a damaged
/// pool, or is no pool's, and must not be emptied.
pub(super) fn refuse_others_data(medium: &dyn Medium) -> Result<(), PoolError> {
    let at = || medium.path().display();
    let file = match medium.open(class::DATA, Open { read_only: true, ..Open::default() }) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file.during("opening data in", at())?,
    };
    let len = file.len().during("looking at data in", at())?;
    if len == 0 { Ok(()) } else { Err(PoolError::Occupied(medium.path().into())) }
}

/// Makes the files of a class; the superblock last.
pub(super) fn create_class(medium: &dyn Medium, superblock: &Superblock) -> Result<(), PoolError> {
    let path = medium.path().to_owned();
    let at = || path.display();
    let data = medium.open(class::DATA, Open { create: true, ..Open::default() }).during("creating data in", at())?;
    data.set_len(0).during("emptying data in", at())?;
    data.sync().during("syncing data in", at())?;
    medium.sync_names().during("syncing", at())?;
    write_superblock(medium, superblock)?;
    Ok(medium.sync_names().during("syncing", at())?)
}
