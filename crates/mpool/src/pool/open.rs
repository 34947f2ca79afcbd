//! Opening a pool: lock it, read its metadata, open its classes, remove what a crash left over.

use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::directory::{read_superblock, repair_superblock};
use super::{OpenOptions, Pool, logs};
use crate::MediaClass;
use crate::disk::file_system::Disk;
use crate::disk::medium::{Medium, Open, Storage};
use crate::disk::record::MblockRecord;
use crate::disk::superblock::{self, Superblock};
use crate::error::{Damage, During, Object, PoolError};
use crate::finding::Finding;
use crate::objects::class::Class;
use crate::objects::inner::{Access, Inner};
use crate::objects::meta::Meta;

impl Pool {
    /// Opens the pool whose capacity class is in `path`.
    ///
    /// # Errors
    ///
    /// `NotAPool`, `Busy`, `Version`, `Damaged`, `ClassMissing`, `Io`.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, PoolError> {
        Self::open_on(Arc::new(Disk), path, options)
    }

    /// Opens a pool as [`Pool::open`] does, on the given storage.
    ///
    /// # Errors
    ///
    /// Those of [`Pool::open`].
    pub fn open_on(storage: Arc<dyn Storage>, path: &Path, options: OpenOptions) -> Result<Self, PoolError> {
        let access = if options.salvage { Access::Shared } else { options.access };
        let exclusive = access == Access::Exclusive;
        let medium = match storage.directory(path, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(PoolError::NotAPool(path.into())),
            medium => medium.during("opening", path.display())?,
        };
        let path = medium.path().to_owned();
        let Some((superblock, damage)) = read_superblock(&*medium)? else { return Err(PoolError::NotAPool(path)) };
        if superblock.class != MediaClass::Capacity {
            return Err(PoolError::NotAPool(path));
        }
        let how = Open { read_only: !exclusive, ..Open::default() };
        let lock = medium.open(superblock::NAME, how).during("opening the superblock in", path.display())?;
        if !lock.lock(exclusive).during("locking", path.display())? {
            return Err(PoolError::Busy(path));
        }
        let mut opening = Opening { exclusive, salvage: options.salvage, superblock, findings: Vec::new() };
        opening.note_superblock(&*medium, &superblock, damage)?;
        let meta = opening.metadata(&*medium)?;
        let mut classes = [None, None, None];
        for (&class, class_path) in &meta.tables.classes {
            // The capacity class is where the pool was found, which may have been moved.
            let directory = match class {
                MediaClass::Capacity => Some(medium.clone()),
                _ => storage.directory(class_path, false).ok(),
            };
            classes[class as usize] = opening.class(&meta, class, class_path, directory)?.map(Arc::new);
        }
        let inner = Inner {
            storage,
            path,
            superblock,
            access,
            classes: RwLock::new(classes),
            metadata: Mutex::new(meta),
            findings: opening.findings,
            _lock: lock,
        };
        if exclusive {
            logs::remove_leftovers(&inner)?;
        }
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// A pool that is being opened.
struct Opening {
    exclusive: bool,
    salvage: bool,
    superblock: Superblock,
    findings: Vec<Finding>,
}

impl Opening {
    /// Notes damage of one copy of a superblock, and repairs it where the pool may be written.
    fn note_superblock(
        &mut self,
        medium: &dyn Medium,
        superblock: &Superblock,
        damage: Option<Damage>,
    ) -> Result<(), PoolError> {
        let Some(damage) = damage else { return Ok(()) };
        if self.exclusive {
            repair_superblock(medium, superblock)?;
        }
        self.findings.push(Finding::Damage { damage, repaired: self.exclusive });
        Ok(())
    }

    /// Replays the metadata.
    fn metadata(&mut self, medium: &dyn Medium) -> Result<Meta, PoolError> {
        let (mut meta, found) = Meta::open(medium, self.exclusive)?;
        if found.lost > 0 && !self.salvage {
            let what = "records are gone, with their copies";
            let damage = found.damage.into_iter().next();
            return Err(damage.unwrap_or(Damage { object: Object::Metadata(0), offset: 0, what }).into());
        }
        let repaired = self.exclusive && !found.damage.is_empty() && meta.compact().is_ok();
        self.findings.extend(found.damage.into_iter().map(|damage| Finding::Damage { damage, repaired }));
        self.findings.extend(found.torn.into_iter().map(|(object, offset)| Finding::TornTail { object, offset }));
        if found.lost > 0 {
            self.findings.push(Finding::RecordsLost(found.lost));
        }
        Ok(meta)
    }

    /// Opens a class in its directory. `None`: it is missing, and the pool can be opened without
    /// it.
    fn class(
        &mut self,
        meta: &Meta,
        class: MediaClass,
        path: &Path,
        directory: Option<Arc<dyn Medium>>,
    ) -> Result<Option<Class>, PoolError> {
        let used: Vec<MblockRecord> =
            meta.tables.mblocks.values().map(|m| m.record).filter(|m| m.class == class).collect();
        let found = directory.map(|m| Ok::<_, PoolError>((read_superblock(&*m)?, m))).transpose()?;
        let ours = |s: &Superblock| s.pool == self.superblock.pool && s.class == class;
        let found = found.and_then(|(s, m)| Some((s.filter(|(s, _)| ours(s))?, m)));
        let Some(((superblock, damage), medium)) = found else {
            // Adding a class without objects may have been interrupted. What lay in memory only is
            // lost with a restart of the host: no one was promised more.
            let has_objects = !meta.tables.gone_with(class).is_empty();
            if class != MediaClass::Memory && !self.salvage && has_objects {
                return Err(PoolError::ClassMissing { class, path: path.into() });
            }
            self.findings.push(Finding::ClassMissing { class, path: path.into(), mblocks: used.len() as u64 });
            return Ok(None);
        };
        if class != MediaClass::Capacity {
            self.note_superblock(&*medium, &superblock, damage)?;
        }
        let (opened, overlaps) = Class::open(class, medium, &used, !self.exclusive)?;
        self.findings.extend(overlaps.into_iter().filter_map(|extent| {
            let id = used.iter().find(|m| m.offset == extent.offset)?.id;
            let what = "its space overlaps that of another mblock";
            let damage = Damage { object: Object::Mblock(id), offset: 0, what };
            Some(Finding::Damage { damage, repaired: false })
        }));
        Ok(Some(opened))
    }
}
