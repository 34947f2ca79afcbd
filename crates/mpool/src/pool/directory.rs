//! A class's directory: its superblock, and whether the directory may be used.

use std::io;

use crate::disk::medium::{Medium, Open};
use crate::disk::superblock::{self, FORMAT_VERSION, Superblock};
use crate::error::{Damage, During, PoolError};
use crate::objects::class;

pub(super) fn read_superblock(medium: &dyn Medium) -> Result<Option<(Superblock, Option<Damage>)>, PoolError> {
    let path = medium.path();
    let file = match medium.open(superblock::NAME, Open { read_only: true, ..Open::default() }) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.during("opening the superblock in", path.display())?,
    };
    let len = file.len().during("looking at the superblock in", path.display())?.min(superblock::LEN as u64);
    let mut bytes = vec![0; len as usize];
    file.read_at(&mut bytes, 0).during("reading the superblock in", path.display())?;
    let Some((found, damage)) = Superblock::decode(&bytes) else { return Ok(None) };
    if found.version != FORMAT_VERSION {
        return Err(PoolError::Version { path: path.into(), found: found.version, known: FORMAT_VERSION });
    }
    Ok(Some((found, damage)))
}

/// Writes both copies anew.
pub(super) fn repair_superblock(medium: &dyn Medium, superblock: &Superblock) -> Result<(), PoolError> {
    let at = || medium.path().display();
    let file = medium.open(superblock::NAME, Open::default()).during("opening the superblock in", at())?;
    file.write_at(&superblock.encode(), 0).during("repairing the superblock in", at())?;
    Ok(file.sync().during("syncing the superblock in", at())?)
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
    let file = medium.open(superblock::NAME, Open { create: true, ..Open::default() });
    let file = file.during("creating the superblock in", at())?;
    file.write_at(&superblock.encode(), 0).during("writing the superblock in", at())?;
    file.sync().during("syncing the superblock in", at())?;
    Ok(medium.sync_names().during("syncing", at())?)
}
