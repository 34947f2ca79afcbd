//! Pools: create, open, change, destroy.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::check::Finding;
use crate::class::{self, Class, ClassUsage, MediaClass};
use crate::error::{Damage, During, Object, ObjectError, PoolError};
use crate::mblock::{Allocation, Mblock, MblockProps, MblockWriter};
use crate::medium::{Disk, Medium, MediumFile, Open, Room, Storage};
use crate::meta::Meta;
use crate::record::{MblockRecord, Record};
use crate::superblock::{self, FORMAT_VERSION, Superblock};
use crate::{mlog, registry};

/// Who may open the pool besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Nobody; reading and writing.
    #[default]
    Exclusive,
    /// Any number of others, all of them for reading only.
    Shared,
}

/// How to open a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Alone or with others.
    pub access: Access,
    /// Opens what is left of a pool whose metadata lost records, or a class. Implies
    /// [`Access::Shared`].
    pub salvage: bool,
}

/// What a pool is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolProps {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: [u8; 16],
    /// When it was made, in seconds since 1970.
    pub created: u64,
    /// The format of its files.
    pub version: u32,
    /// How it was opened.
    pub access: Access,
}

/// What a pool holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Of each class.
    pub classes: Vec<ClassUsage>,
    /// mlogs.
    pub mlogs: u64,
    /// MDCs, the root MDC too.
    pub mdcs: u64,
    /// Bytes of metadata records.
    pub metadata_bytes: u64,
    /// Bytes that the metadata take on the medium.
    pub metadata_used: u64,
}

/// An open pool. Clones are the same pool; it is closed when the last one, and the last handle of
/// its objects, is gone.
#[derive(Clone)]
pub struct Pool {
    pub(crate) inner: Arc<Inner>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pool").field(&self.inner.path).finish()
    }
}

pub(crate) struct Inner {
    storage: Arc<dyn Storage>,
    pub(crate) path: PathBuf,
    superblock: Superblock,
    access: Access,
    classes: RwLock<[Option<Arc<Class>>; 3]>,
    meta: Mutex<Meta>,
    /// What opening found.
    pub(crate) findings: Vec<Finding>,
    /// Holds the lock.
    _lock: Arc<dyn MediumFile>,
}

impl Inner {
    pub(crate) fn meta(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn class(&self, class: MediaClass) -> Result<Arc<Class>, ObjectError> {
        let classes = self.classes.read().unwrap_or_else(PoisonError::into_inner);
        classes[class as usize].clone().ok_or(ObjectError::NoClass(class))
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn check_writable(&self) -> Result<(), ObjectError> {
        if self.access == Access::Shared { Err(ObjectError::ReadOnly) } else { Ok(()) }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.access == Access::Exclusive {
            self.meta().close();
        }
    }
}

fn read_superblock(medium: &dyn Medium) -> Result<Option<(Superblock, Option<Damage>)>, PoolError> {
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
fn repair_superblock(medium: &dyn Medium, superblock: &Superblock) -> Result<(), PoolError> {
    let at = || medium.path().display();
    let file = medium.open(superblock::NAME, Open::default()).during("opening the superblock in", at())?;
    file.write_at(&superblock.encode(), 0).during("repairing the superblock in", at())?;
    Ok(file.sync().during("syncing the superblock in", at())?)
}

/// A `data` file with contents, but without a superblock, belongs to a damaged pool or to somebody
/// else: neither is to be emptied.
fn refuse_others_data(medium: &dyn Medium) -> Result<(), PoolError> {
    let at = || medium.path().display();
    let file = match medium.open(class::DATA, Open { read_only: true, ..Open::default() }) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file.during("opening data in", at())?,
    };
    let len = file.len().during("looking at data in", at())?;
    if len == 0 { Ok(()) } else { Err(PoolError::Occupied(medium.path().into())) }
}

/// Makes the files of a class; the superblock last.
fn create_class(medium: &dyn Medium, superblock: &Superblock) -> Result<(), PoolError> {
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

impl Pool {
    /// Makes a pool with its capacity class in `path`, which is made if need be, and opens it.
    ///
    /// # Errors
    ///
    /// `Exists`, `Occupied`, `Busy`, `Name`, `Io`.
    pub fn create(path: &Path, name: &str) -> Result<Self, PoolError> {
        Self::create_on(Arc::new(Disk), path, name)
    }

    /// As [`Pool::create`], on a storage of the caller's.
    ///
    /// # Errors
    ///
    /// As [`Pool::create`].
    pub fn create_on(storage: Arc<dyn Storage>, path: &Path, name: &str) -> Result<Self, PoolError> {
        registry::check_name(name)?;
        let medium = storage.directory(path, true).during("making", path.display())?;
        let path = medium.path().to_owned();
        let is_free = || match read_superblock(&*medium)? {
            Some(_) => Err(PoolError::Exists(path.clone())),
            None => refuse_others_data(&*medium),
        };
        is_free()?;
        // Two that make a pool in the same directory: one is first.
        let lock = medium.open(superblock::NAME, Open { create: true, ..Open::default() });
        let lock = lock.during("creating the superblock in", path.display())?;
        if !lock.lock(true).during("locking", path.display())? {
            return Err(PoolError::Busy(path));
        }
        is_free()?;
        let mut uuid = [0; 16];
        rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .during("drawing an identity for", path.display())?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
        let superblock = Superblock { version: FORMAT_VERSION, class: MediaClass::Capacity, pool: uuid, created };
        let mut meta = Meta::create(&*medium, name, path.clone())?;
        mlog::create_root(&*medium, &mut meta)?;
        meta.close();
        drop(meta);
        create_class(&*medium, &superblock)?;
        drop(lock);
        Self::open_on(storage, &path, OpenOptions::default())
    }

    /// Opens the pool whose capacity class is in `path`.
    ///
    /// # Errors
    ///
    /// `NotAPool`, `Busy`, `Version`, `Damaged`, `ClassMissing`, `Io`.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, PoolError> {
        Self::open_on(Arc::new(Disk), path, options)
    }

    /// As [`Pool::open`], on a storage of the caller's.
    ///
    /// # Errors
    ///
    /// As [`Pool::open`].
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
        let mut findings: Vec<Finding> = Vec::new();
        if let Some(damage) = damage {
            if exclusive {
                repair_superblock(&*medium, &superblock)?;
            }
            findings.push(Finding::Damage { damage, repaired: exclusive });
        }
        let (mut meta, found) = Meta::open(&*medium, exclusive)?;
        if found.lost > 0 && !options.salvage {
            let what = "records are gone, with their copies";
            let damage = found.damage.into_iter().next();
            return Err(damage.unwrap_or(Damage { object: Object::Metadata(0), offset: 0, what }).into());
        }
        let repaired = exclusive && !found.damage.is_empty() && meta.compact().is_ok();
        findings.extend(found.damage.into_iter().map(|damage| Finding::Damage { damage, repaired }));
        findings.extend(found.torn.into_iter().map(|(object, offset)| Finding::TornTail { object, offset }));
        if found.lost > 0 {
            findings.push(Finding::RecordsLost(found.lost));
        }

        let mut classes = [None, None, None];
        for (&class, class_path) in &meta.tables.classes {
            let used: Vec<MblockRecord> =
                meta.tables.mblocks.values().map(|m| m.record).filter(|m| m.class == class).collect();
            // The capacity class is where the pool was found, which may have been moved.
            let found = match class {
                MediaClass::Capacity => Some(medium.clone()),
                _ => storage.directory(class_path, false).ok(),
            };
            // Adding one without may have been cut short.
            let has_objects = !meta.tables.gone_with(class).is_empty();
            let found = found.map(|m| Ok::<_, PoolError>((read_superblock(&*m)?, m))).transpose()?;
            let ours = |s: &Superblock| s.pool == superblock.pool && s.class == class;
            let found = found.and_then(|(s, m)| Some((s.filter(|(s, _)| ours(s))?, m)));
            let Some(((its_superblock, its_damage), class_medium)) = found else {
                // What lay in memory only is gone after a restart of the host, and nobody was promised more.
                if class != MediaClass::Memory && !options.salvage && has_objects {
                    return Err(PoolError::ClassMissing { class, path: class_path.clone() });
                }
                findings.push(Finding::ClassMissing { class, path: class_path.clone(), mblocks: used.len() as u64 });
                continue;
            };
            if class != MediaClass::Capacity
                && let Some(damage) = its_damage
            {
                if exclusive {
                    repair_superblock(&*class_medium, &its_superblock)?;
                }
                findings.push(Finding::Damage { damage, repaired: exclusive });
            }
            let (opened, overlaps) = Class::open(class, class_medium, &used, !exclusive)?;
            findings.extend(overlaps.into_iter().filter_map(|extent| {
                let id = used.iter().find(|m| m.offset == extent.offset)?.id;
                let what = "its space overlaps that of another mblock";
                Some(Finding::Damage {
                    damage: Damage { object: Object::Mblock(id), offset: 0, what },
                    repaired: false,
                })
            }));
            classes[class as usize] = Some(Arc::new(opened));
        }
        let inner = Inner {
            storage,
            path,
            superblock,
            access,
            classes: RwLock::new(classes),
            meta: Mutex::new(meta),
            findings,
            _lock: lock,
        };
        if exclusive {
            mlog::remove_leftovers(&inner)?;
        }
        Ok(Self { inner: Arc::new(inner) })
    }

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

    /// Adds a media class, whose directory is made if need be. A memory class that was missing when
    /// the pool was opened (its `tmpfs` went with the host) is made anew, without the objects
    /// that it had; so is any class that has no objects. After an error the class may be known
    /// and missing: then it can be added again.
    ///
    /// # Errors
    ///
    /// `ClassExists`; `Exists`: the directory belongs to a pool already, or is the missing class,
    /// back again; `Occupied`, `ReadOnly`, `Failed`, `Io`.
    pub fn add_class(&self, class: MediaClass, path: &Path) -> Result<(), PoolError> {
        self.inner.check_writable()?;
        let medium = self.inner.storage.directory(path, true).during("making", path.display())?;
        let path = medium.path().to_owned();
        let mut meta = self.inner.meta();
        let mut records = meta.tables.gone_with(class);
        // One that is known and has no objects may have been cut short when it was added.
        let known = meta.tables.classes.contains_key(&class);
        let missing = self.inner.class(class).is_err() && (class == MediaClass::Memory || records.is_empty());
        if known && !missing {
            return Err(PoolError::ClassExists(class));
        }
        let superblock = Superblock { class, ..self.inner.superblock };
        match read_superblock(&*medium)? {
            Some((found, _)) if found == superblock && records.is_empty() => {}
            Some(_) => return Err(PoolError::Exists(path)),
            None => refuse_others_data(&*medium)?,
        }
        // First the record, so that whoever removes the pool knows where to look.
        records.push(Record::Class { class, path });
        meta.commit(&records, false)?;
        create_class(&*medium, &superblock)?;
        let (opened, _) = Class::open(class, medium, &[], false)?;
        let mut classes = self.inner.classes.write().unwrap_or_else(PoisonError::into_inner);
        classes[class as usize] = Some(Arc::new(opened));
        Ok(())
    }

    /// Gives the pool another name.
    ///
    /// # Errors
    ///
    /// `Name`, `ReadOnly`, `Failed`, `Io`.
    pub fn rename(&self, name: &str) -> Result<(), PoolError> {
        registry::check_name(name)?;
        self.inner.check_writable()?;
        Ok(self.inner.meta().commit(&[Record::Name(name.into())], false)?)
    }

    /// What it is.
    pub fn props(&self) -> PoolProps {
        let Superblock { version, pool: uuid, created, .. } = self.inner.superblock;
        PoolProps { name: self.inner.meta().tables.name.clone(), uuid, created, version, access: self.inner.access }
    }

    /// The directory of its capacity class.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// What opening it found.
    pub fn findings(&self) -> &[Finding] {
        &self.inner.findings
    }

    /// What it holds.
    ///
    /// # Errors
    ///
    /// `Io`.
    pub fn usage(&self) -> Result<Usage, PoolError> {
        let meta = self.inner.meta();
        let mut classes = Vec::new();
        for (&class, path) in &meta.tables.classes {
            let of_class = || meta.tables.mblocks.values().filter(|m| m.record.class == class);
            let open = self.inner.class(class).ok();
            let (used_bytes, room) = match &open {
                Some(open) => (
                    open.data.used().during("looking at", path.display())?,
                    open.medium.room().during("looking at", path.display())?,
                ),
                None => (0, Room::default()),
            };
            classes.push(ClassUsage {
                class,
                // Where it was found, which is not what the metadata say when a pool was moved.
                path: open.as_ref().map_or_else(|| path.clone(), |open| open.medium.path().into()),
                present: open.is_some(),
                direct_io: open.is_some_and(|c| c.data.is_direct()),
                mblocks: of_class().count() as u64,
                data_bytes: of_class().map(|m| m.record.len).sum(),
                used_bytes,
                room,
            });
        }
        let (mlogs, mdcs) = (meta.tables.mlogs.len() as u64, meta.tables.mdcs.len() as u64);
        Ok(Usage { classes, mlogs, mdcs, metadata_bytes: meta.len(), metadata_used: meta.used()? })
    }

    /// Allocates an mblock, to be written and committed.
    ///
    /// # Errors
    ///
    /// `Full`, `NoClass`, `ReadOnly`, `Io`.
    pub fn mblock_alloc(&self, allocation: Allocation) -> Result<MblockWriter, ObjectError> {
        self.inner.check_writable()?;
        let mut first_error = None;
        for class in allocation.classes() {
            let taken = self.inner.class(class).and_then(|class| Ok((class.take(allocation.capacity)?, class)));
            match taken {
                Ok((extent, class)) => {
                    let id = self.inner.meta().new_id();
                    return Ok(MblockWriter::new(self.inner.clone(), class, id, allocation.capacity, extent));
                }
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        Err(first_error.unwrap_or(ObjectError::NoClass(allocation.class)))
    }

    /// Finds a committed mblock.
    ///
    /// # Errors
    ///
    /// `NotFound`; `NoClass`: its class is missing.
    pub fn mblock(&self, id: u64) -> Result<Mblock, ObjectError> {
        let info = self.inner.meta().tables.mblocks.get(&id).cloned();
        let info = info.ok_or(ObjectError::NotFound(Object::Mblock(id)))?;
        Ok(Mblock { class: self.inner.class(info.record.class)?, info })
    }

    /// All committed mblocks, by identity.
    pub fn mblocks(&self) -> Vec<MblockProps> {
        let mut all: Vec<_> = self.inner.meta().tables.mblocks.values().map(|m| m.props()).collect();
        all.sort_by_key(|m| m.id);
        all
    }

    /// Deletes mblocks: all of them, or after an error none. When this returns, they stay deleted
    /// and their space is free.
    ///
    /// # Errors
    ///
    /// `NotFound`, `Mapped`, `ReadOnly`, `Failed`, `Io`.
    pub fn mblock_delete(&self, ids: &[u64]) -> Result<(), ObjectError> {
        self.inner.check_writable()?;
        let mut meta = self.inner.meta();
        let mut infos = Vec::new();
        for &id in ids {
            let object = Object::Mblock(id);
            let info = meta.tables.mblocks.get(&id).cloned().ok_or(ObjectError::NotFound(object))?;
            let times = info.maps.load(Ordering::Acquire);
            if times > 0 {
                return Err(ObjectError::Mapped { object, times });
            }
            infos.push(info);
        }
        // One that is named twice must not be given back twice.
        infos.sort_by_key(|info| info.record.id);
        infos.dedup_by_key(|info| info.record.id);
        let records: Vec<Record> = infos.iter().map(|info| Record::MblockGone(info.record.id)).collect();
        meta.commit(&records, true)?;
        for info in infos {
            info.deleted.store(true, Ordering::Release);
            if let Ok(class) = self.inner.class(info.record.class) {
                class.give(info.extent());
            }
        }
        Ok(())
    }
}
