//! Adding a media class to a pool.

use std::path::Path;
use std::sync::Arc;

use super::Pool;
use super::directory::{create_class, read_superblock, refuse_others_data};
use crate::MediaClass;
use crate::disk::log::Reserve;
use crate::disk::medium::Access;
use crate::disk::record::Record;
use crate::disk::sealed::over;
use crate::disk::superblock::Superblock;
use crate::error::{During, PoolError};
use crate::objects::class::Class;

impl Pool {
    /// Adds a media class, whose directory is made if need be. A memory class that was missing when
    /// the pool was opened (its `tmpfs` went with the host) is made anew, without the objects
    /// that it had; so is any class that has no objects. After an error the class may be known
    /// and missing: then it can be added again.
    ///
    /// # Errors
    /// `ClassExists`; `Exists`: the directory belongs to a pool already, or is the missing class,
    /// back again; `Occupied`, `ReadOnly`, `Failed`, `Io`.
    pub fn add_class(&self, class: MediaClass, path: &Path) -> Result<(), PoolError> {
        self.inner.check_writable()?;
        let medium = self.inner.storage.make_directory(path).during("making", path.display())?;
        let path = medium.path().to_owned();
        let mut classes = self.inner.classes.write();
        let (mut records, known) = {
            let meta = self.inner.meta();
            (meta.tables.gone_with(class), meta.tables.classes.contains_key(&class))
        };
        // Adding a class that is known and has no objects may have been interrupted.
        let missing = classes[class as usize].is_none() && (class == MediaClass::Memory || records.is_empty());
        if known && !missing {
            return Err(PoolError::ClassExists(class));
        }
        let superblock = Superblock { class, ..self.inner.superblock };
        match read_superblock(&*medium)? {
            // The class as an interrupted call left it: it has no data. With data, it is the pool's
            // class and the records that name it are lost.
            Some((found, _)) if found.pool == superblock.pool && found.class == class && records.is_empty() => {
                refuse_others_data(&*medium).map_err(|e| match e {
                    PoolError::Occupied(path) => PoolError::Exists(path),
                    e => e,
                })?;
            }
            Some(_) => return Err(PoolError::Exists(path)),
            None => refuse_others_data(&*medium)?,
        }
        if !medium.lock(Access::Exclusive).during("locking", path.display())? {
            return Err(PoolError::Busy(path));
        }
        // First the record, so that removing the pool finds the directory.
        records.push(Record::Class { class, path });
        self.inner.commit(records, Reserve::Keep)?;
        let medium = over(medium, self.inner.keys.as_ref(), class);
        create_class(&*medium, &superblock)?;
        let (opened, _) = Class::open(class, medium, &[], &[], Vec::new(), Access::Exclusive)?;
        classes[class as usize] = Some(Arc::new(opened));
        Ok(())
    }
}
