//! A class's directory: its superblock, and whether the directory may be used.

use std::io;

use crate::BLOCK;
use crate::disk::medium::{Medium, Open};
use crate::disk::superblock::{FORMAT_VERSION, NAMES, Superblock, write_superblock};
use crate::error::{Damage, During, IoError, PoolError};
use crate::objects::class;

/// The superblock of a directory, from either of its files; `None`: neither has one.
pub(super) fn read_superblock(medium: &dyn Medium) -> Result<Option<(Superblock, Option<Damage>)>, PoolError> {
    let path = medium.path();
    let read = |name: &str| {
        let file = match medium.open(name, Open { read_only: true, ..Open::default() }) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.during("opening the superblock in", path.display())?,
        };
        let mut block = vec![0; BLOCK];
        // What cannot be read is as good as damaged: there is another one.
        let whole = file.read_at(&mut block, 0).is_ok();
        Ok::<_, IoError>(whole.then(|| Superblock::decode(&block)).flatten())
    };
    let Some((found, damage)) = Superblock::newer([read(NAMES[0])?, read(NAMES[1])?]) else { return Ok(None) };
    if found.version != FORMAT_VERSION {
        return Err(PoolError::Version { path: path.into(), found: found.version, known: FORMAT_VERSION });
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
