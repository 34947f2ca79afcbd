//! Opening a pool: lock it, read its metadata, open its classes, remove what a crash left over.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::directory::{read_superblock, refuse_others_data};
use super::{OpenOptions, Pool, lease, logs};
use crate::MediaClass;
use crate::disk::file_system::Disk;
use crate::disk::key::Keys;
use crate::disk::medium::{Access, Medium, Open, Storage};
use crate::disk::record::MblockRecord;
use crate::disk::sealed::over;
use crate::disk::space::Extent;
use crate::disk::superblock::{self, State, Superblock, write_superblock};
use crate::error::{Damage, During, Object, PoolError};
use crate::finding::Finding;
use crate::objects::class::{Class, DATA};
use crate::objects::inner::{Inner, Parts};
use crate::objects::meta::{Journal, Tables};

impl Pool {
    /// Opens the pool whose capacity class is in `path`.
    ///
    /// # Errors
    /// `NotAPool`, `Busy`, `Version`, `NoKey`, `WrongKey`, `KeyLost`, `UnfitKey`, `Damaged`,
    /// `ClassMissing`, `NoData`, `Apart`, `Io`.
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, PoolError> {
        Self::open_on(Arc::new(Disk), path, options)
    }

    /// Opens a pool as [`Pool::open`] does, on the given storage.
    ///
    /// # Errors
    /// Those of [`Pool::open`].
    pub fn open_on(storage: Arc<dyn Storage>, path: &Path, options: OpenOptions) -> Result<Self, PoolError> {
        let access = if options.salvage { Access::Shared } else { options.access };
        let opened = Self::open_with(storage, path, options, access);
        opened.map_err(|e| not_writable(e, access, path))
    }

    fn open_with(
        storage: Arc<dyn Storage>,
        path: &Path,
        options: OpenOptions,
        access: Access,
    ) -> Result<Self, PoolError> {
        let exclusive = access == Access::Exclusive;
        let medium = match storage.directory(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(PoolError::NotAPool(path.into())),
            medium => medium.during("opening", path.display())?,
        };
        let path = medium.path().to_owned();
        if !medium.lock(access).during("locking", path.display())? {
            return Err(PoolError::Busy(path));
        }
        let Some((superblock, damage)) = read_superblock(&*medium)? else { return Err(PoolError::NotAPool(path)) };
        if superblock.class != MediaClass::Capacity {
            return Err(PoolError::NotAPool(path));
        }
        let keys = match superblock.is_encrypted() {
            true => Some(Arc::new(Keys::open(&*medium, Some(superblock.pool))?)),
            false => None,
        };
        let medium = over(medium, keys.as_ref(), MediaClass::Capacity);
        let held = if exclusive { lease::held(&*medium)? } else { lease::Held::new() };
        let mut opening = Opening { access, options, superblock, held, findings: Vec::new() };
        opening.note_copy(damage);
        opening.note_copy(keys.as_ref().and_then(|keys| keys.damage().cloned()));
        let (mut journal, tables, damage) = opening.metadata(&*medium)?;
        let mut found = Vec::new();
        for (&class, class_path) in &tables.classes {
            // The capacity class is where the pool was found, which may have been moved.
            let directory = match class {
                MediaClass::Capacity => Some((superblock, medium.clone())),
                _ => opening.find_class(&tables, class, class_path, storage.directory(class_path).ok())?,
            };
            let directory = directory.map(|(superblock, medium)| match class {
                MediaClass::Capacity => (superblock, medium),
                _ => (superblock, over(medium, keys.as_ref(), class)),
            });
            found.extend(directory.map(|directory| (class, directory)));
        }
        for (_, (_, medium)) in &found {
            match medium.open(DATA, Open { read_only: true, ..Open::default() }) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(PoolError::NoData(medium.path().into())),
                data => drop(data.during("opening data in", medium.path().display())?),
            }
        }
        // A pool that is refused was not written to.
        let mut repaired = false;
        let superblock = if exclusive {
            let home = opening.check(&tables, &found, &[])?;
            keys.iter().try_for_each(|keys| keys.mend(&*medium))?;
            journal.mend(&*medium)?;
            repaired = !damage.is_empty() && journal.compact(&tables.snapshot()).is_ok();
            opening.begin(&found, home)?
        } else {
            superblock
        };
        opening.findings.extend(damage.into_iter().map(|damage| Finding::Damage { damage, repaired }));
        let mut classes = [None, None, None];
        for (class, (_, directory)) in found {
            classes[class as usize] = Some(Arc::new(opening.class(&tables, class, directory)?));
        }
        let findings = opening.findings;
        let inner = Inner::new(Parts { storage, keys, path, superblock, access, classes, tables, journal, findings });
        if exclusive {
            logs::remove_leftovers(&inner)?;
        }
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// The remedy for a medium that is read-only.
fn not_writable(error: PoolError, access: Access, path: &Path) -> PoolError {
    let refused = [io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::PermissionDenied];
    match error {
        PoolError::Io(cause) if access == Access::Exclusive && refused.contains(&cause.os().kind()) => {
            PoolError::NotWritable { path: path.into(), cause }
        }
        error => error,
    }
}

/// A class's directory, with its superblock.
pub(super) type Directory = (Superblock, Arc<dyn Medium>);

/// A pool that is being opened.
pub(super) struct Opening {
    access: Access,
    options: OpenOptions,
    superblock: Superblock,
    /// What is leased, for an exclusive opening.
    held: lease::Held,
    findings: Vec<Finding>,
}

impl Opening {
    /// For writing all superblocks anew.
    pub(super) fn exclusive(superblock: Superblock) -> Self {
        let (options, held, findings) = Default::default();
        Self { access: Access::Exclusive, options, superblock, held, findings }
    }

    /// Notes damage of one copy of a superblock or key. An exclusive opening writes both anew.
    fn note_copy(&mut self, damage: Option<Damage>) {
        self.findings
            .extend(damage.map(|damage| Finding::Damage { damage, repaired: self.access == Access::Exclusive }));
    }

    /// Replays the metadata; gives their damage, too.
    fn metadata(&mut self, medium: &dyn Medium) -> Result<(Journal, Tables, Vec<Damage>), PoolError> {
        let (journal, mut tables, mut found) = Journal::open(medium, self.access)?;
        if let State::Closed(end) = self.superblock.opening.state {
            let now = journal.pair.end();
            if (now.generation, now.number) < (end.generation, end.number) {
                let what = "the records end before those of the last clean close";
                found.damage.push(Damage { object: Object::Metadata(0), offset: now.end, what });
                found.lost += end.number.saturating_sub(now.number).max(1);
            }
        }
        if found.lost > 0 && !self.options.salvage {
            let what = "records are gone, with their copies";
            let damage = found.damage.into_iter().next();
            return Err(damage.unwrap_or(Damage { object: Object::Metadata(0), offset: 0, what }).into());
        }
        self.findings.extend(found.torn.into_iter().map(|(object, offset)| Finding::TornTail { object, offset }));
        if found.lost > 0 {
            self.findings.push(Finding::RecordsLost(found.lost));
        }
        if self.options.salvage {
            tables.assume(medium.path());
        }
        Ok((journal, tables, found.damage))
    }

    /// Finds a class in its directory, and locks it. `None`: it is missing, and the pool can be
    /// opened without it.
    fn find_class(
        &mut self,
        tables: &Tables,
        class: MediaClass,
        path: &Path,
        directory: Option<Arc<dyn Medium>>,
    ) -> Result<Option<Directory>, PoolError> {
        let found = directory.map(|m| Ok::<_, PoolError>((read_superblock(&*m)?, m))).transpose()?;
        let ours = |s: &Superblock| s.pool == self.superblock.pool && s.class == class;
        let found = found.and_then(|(s, m)| Some((s.filter(|(s, _)| ours(s))?, m)));
        let Some(((superblock, damage), medium)) = found else {
            // Adding a class without objects may have been interrupted. What lay in memory only is
            // lost with a restart of the host: no one was promised more.
            let has_objects = !tables.gone_with(class).is_empty();
            if class != MediaClass::Memory && !self.options.salvage && has_objects {
                return Err(PoolError::ClassMissing { class, path: path.into() });
            }
            let mblocks = tables.mblocks.values().filter(|m| m.record.class == class).count() as u64;
            self.findings.push(Finding::ClassMissing { class, path: path.into(), mblocks });
            return Ok(None);
        };
        if !medium.lock(self.access).during("locking", path.display())? {
            return Err(PoolError::Busy(path.into()));
        }
        self.note_copy(damage);
        Ok(Some((superblock, medium)))
    }

    /// Whether a class is of the same opening as the capacity class, as far as that got.
    fn belongs(&self, superblock: &Superblock) -> bool {
        let (ours, other) = (self.superblock.opening, superblock.opening);
        let same = (other.epoch, other.random) == (ours.epoch, ours.random);
        let before = ours.state == State::Opening && (other.epoch + 1, other.random) == (ours.epoch, ours.before);
        // The memory class may have been missing for some time. Nothing was committed to it then.
        same || before || superblock.class == MediaClass::Memory && other.epoch <= ours.epoch
    }

    /// Checks that the directories belong together; gives the identity of the capacity class's. A
    /// class that is `named` was unknown to the pool, which may have been opened without it since.
    pub(super) fn check(
        &self,
        tables: &Tables,
        found: &[(MediaClass, Directory)],
        named: &[MediaClass],
    ) -> Result<u64, PoolError> {
        let Some((_, (_, medium))) = found.iter().find(|(class, _)| *class == MediaClass::Capacity) else {
            let what = "they do not name the capacity class";
            return Err(Damage { object: Object::Metadata(0), offset: 0, what }.into());
        };
        let home = medium.identity().during("looking at", medium.path().display())?;
        let moved = self.superblock.opening.home != home;
        let others = found.iter().filter(|(class, _)| *class != MediaClass::Capacity);
        for (class, (other, directory)) in others.filter(|_| !self.options.adopt) {
            let named = named.contains(class) && other.opening.epoch <= self.superblock.opening.epoch;
            if moved || !(named || self.belongs(other) || self.is_behind(tables, other, &**directory)?) {
                let (path, class_path) = (medium.path().to_owned(), directory.path().to_owned());
                return Err(PoolError::Apart { path, class: *class, class_path });
            }
        }
        Ok(home)
    }

    /// Whether a class without objects and without data missed some openings: its superblock could
    /// not be read then.
    fn is_behind(&self, tables: &Tables, other: &Superblock, directory: &dyn Medium) -> Result<bool, PoolError> {
        let empty = tables.gone_with(other.class).is_empty() && other.opening.epoch <= self.superblock.opening.epoch;
        match refuse_others_data(directory) {
            Err(PoolError::Occupied(_)) => Ok(false),
            result => result.map(|()| empty),
        }
    }

    /// Begins an exclusive opening in all classes; gives the capacity class's superblock.
    pub(super) fn begin(&mut self, found: &[(MediaClass, Directory)], home: u64) -> Result<Superblock, PoolError> {
        let Some((_, (_, medium))) = found.iter().find(|(class, _)| *class == MediaClass::Capacity) else {
            return Ok(self.superblock);
        };
        let others = || found.iter().filter(|(class, _)| *class != MediaClass::Capacity);
        // What is there may have been made before a sync of its name failed.
        for (_, (_, medium)) in found {
            medium.sync_names().during("syncing", medium.path().display())?;
        }
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .during("drawing a number for", medium.path().display())?;
        let last = found.iter().map(|(_, (superblock, _))| superblock.opening.epoch).max().unwrap_or(0);
        let opening = superblock::Opening {
            epoch: last + 1,
            random: u64::from_le_bytes(random),
            before: self.superblock.opening.random,
            home,
            state: State::Opening,
        };
        let superblock = Superblock { opening, ..self.superblock };
        // Where a class was left behind by an opening that got no further, it is behind by two now.
        if self.superblock.opening.state == State::Opening {
            self.finish(others())?;
        }
        write_superblock(&**medium, &superblock)?;
        let superblock = superblock.in_state(State::Open);
        for (class, (_, medium)) in others() {
            write_superblock(&**medium, &Superblock { class: *class, ..superblock })?;
        }
        write_superblock(&**medium, &superblock)?;
        Ok(superblock)
    }

    /// Brings the other classes to the opening that the capacity class has.
    fn finish<'a>(&self, others: impl Iterator<Item = &'a (MediaClass, Directory)>) -> Result<(), PoolError> {
        for (class, (_, medium)) in others {
            write_superblock(&**medium, &Superblock { class: *class, ..self.superblock })?;
        }
        Ok(())
    }

    /// Opens a class in its directory.
    fn class(&mut self, tables: &Tables, class: MediaClass, medium: Arc<dyn Medium>) -> Result<Class, PoolError> {
        let used: Vec<MblockRecord> = tables.mblocks.values().map(|m| m.record).filter(|m| m.class == class).collect();
        let kept: Vec<Extent> = tables.kept.iter().filter(|(of, _)| *of == class).map(|(_, extent)| *extent).collect();
        let leased: Vec<Extent> = self.held.iter().filter(|(of, _)| *of == class).map(|(_, e)| *e).collect();
        let (opened, overlaps) = Class::open(class, medium, &used, &kept, leased, self.access)?;
        if !kept.is_empty() {
            let bytes = kept.iter().map(|extent| extent.len).sum();
            self.findings.push(Finding::SpaceKept { class, bytes });
        }
        self.findings.extend(overlaps.into_iter().filter_map(|extent| {
            let id = used.iter().find(|m| m.offset == extent.offset)?.id;
            let what = "its space overlaps that of another mblock";
            let damage = Damage { object: Object::Mblock(id), offset: 0, what };
            Some(Finding::Damage { damage, repaired: false })
        }));
        Ok(opened)
    }
}
