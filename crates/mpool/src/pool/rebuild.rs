//! Rebuilding a pool of which both copies have lost the same part.
//!
//! Everything is read first. Then the metadata are written anew into the log that is not read, as a
//! compaction does, and then the superblocks: so until the new metadata are whole the pool is what
//! it was, refused by a normal opening, and rebuilding it can be done again.
//!
//! Nothing that may belong to a lost record is given back. Space without an mblock is recorded as
//! *kept*, and stays taken until the pool is rebuilt with [`Rebuild::free_lost`]. Files of logs
//! without a record are entered again. New identities are far above those that may have been lost.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::directory::{locked, read_superblock};
use super::lease;
use super::open::{Directory, Opening};
use super::{Pool, new_superblock};
use crate::disk::file_system::Disk;
use crate::disk::key::{self, Keys};
use crate::disk::log::Log;
use crate::disk::medium::{Access, Medium, Storage};
use crate::disk::pair::Pair;
use crate::disk::record::{LogRecord, MblockRecord, Record};
use crate::disk::sealed::over;
use crate::disk::space::Extent;
use crate::disk::superblock::{State, Superblock};
use crate::error::{Damage, During, Object, ObjectError, PoolError};
use crate::objects::class::{Class, DATA};
use crate::objects::log_files::{mdc_files, mdc_place, mlog_files, mlog_name, mlog_place};
use crate::objects::mblock::Mblock;
use crate::objects::meta::{Journal, Tables};
use crate::{MediaClass, ROOT_MDC};

/// New identities begin so far above the highest known one.
const BEYOND: u64 = 1 << 32;

/// How to rebuild a pool.
#[derive(Clone, Debug, Default)]
pub struct Rebuild {
    /// Gives back the space of lost objects, also what an earlier rebuilding kept.
    pub free_lost: bool,
    /// Where the staging class lies, if the record of that is lost.
    pub staging: Option<PathBuf>,
    /// Where the memory class lies, if the record of that is lost.
    pub memory: Option<PathBuf>,
}

/// What rebuilding a pool found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebuilt {
    /// Classes whose superblock neither file had: it was made anew.
    pub superblocks: Vec<MediaClass>,
    /// Damage of the metadata.
    pub damage: Vec<Damage>,
    /// Metadata records that are gone, as far as that is known.
    pub records_lost: u32,
    /// Objects with a record, but without their own contents: deleted, or lost.
    pub dropped: Vec<Object>,
    /// Logs without a record, which were entered again; some may have been deleted before.
    pub found: Vec<Object>,
    /// mblocks that the pool has.
    pub mblocks: usize,
    /// Bytes of each class that may belong to lost mblocks. They stay taken.
    pub kept: Vec<(MediaClass, u64)>,
}

impl Pool {
    /// Makes the superblocks and the metadata of a pool anew, from all that can be read, where a
    /// normal opening refuses it because both copies have lost the same part. It must not be open.
    ///
    /// # Errors
    /// `NotAPool`: there is neither a superblock nor a data file. `Busy`, `Version`,
    /// `ClassMissing`, `Apart`, `NoDirectory`, `Io`.
    pub fn rebuild(path: &Path, how: Rebuild) -> Result<Rebuilt, PoolError> {
        Self::rebuild_on(Arc::new(Disk), path, how)
    }

    pub(crate) fn rebuild_on(storage: Arc<dyn Storage>, path: &Path, how: Rebuild) -> Result<Rebuilt, PoolError> {
        let medium = locked(&*storage, path)?;
        let path = medium.path().to_owned();
        let superblock = superblock_if_any(&*medium)?;
        if superblock.is_some_and(|s| s.class != MediaClass::Capacity) || superblock.is_none() && !has_data(&*medium)? {
            return Err(PoolError::NotAPool(path));
        }
        let keys = match superblock {
            Some(superblock) if !superblock.is_encrypted() => None,
            Some(superblock) => Some(Keys::open(&*medium, Some(superblock.pool))?),
            None if !key::is_there(&*medium)? => None,
            None => Some(Keys::open(&*medium, None)?),
        };
        let keys = keys.map(Arc::new);
        let medium = over(medium, keys.as_ref(), MediaClass::Capacity);
        lease::refuse(&*medium)?;
        let mut rebuilt = Rebuilt::default();
        let (mut journal, mut tables) = rebuilt.metadata(&*medium, superblock)?;
        tables.assume(&path);
        let mut named = Vec::new();
        for (class, directory) in [(MediaClass::Staging, &how.staging), (MediaClass::Memory, &how.memory)] {
            match directory {
                Some(_) if tables.classes.contains_key(&class) => {}
                Some(directory) => {
                    tables.classes.insert(class, directory.clone());
                    named.push(class);
                }
                None if tables.classes.contains_key(&class) || tables.gone_with(class).is_empty() => {}
                None => return Err(PoolError::NoDirectory(class)),
            }
        }
        if tables.name.is_empty() {
            tables.name = "rebuilt".into();
        }
        let found = rebuilt.directories(&*storage, (&medium, keys.as_ref()), superblock, &tables)?;
        let mut opening = Opening::exclusive(found[0].1.0);
        let home = opening.check(&tables, &found, &named)?;
        keys.iter().try_for_each(|keys| keys.mend(&*medium))?;
        let lost = rebuilt.records_lost > 0;
        if lost {
            for (class, (_, medium)) in &found {
                rebuilt.find_logs(&mut tables, *class, &**medium)?;
            }
            tables.next_id = tables.next_id.saturating_add(BEYOND);
        }
        for (class, (_, medium)) in &found {
            rebuilt.look_at_data(&mut tables, *class, medium, lost, how.free_lost)?;
        }
        rebuilt.mblocks = tables.mblocks.len();
        rebuilt.kept = tables.kept_bytes();
        journal.write_anew(&*medium, &tables.snapshot())?;
        opening.begin(&found, home)?;
        Ok(rebuilt)
    }
}

/// `None`: neither file has one that can be read.
fn superblock_if_any(medium: &dyn Medium) -> Result<Option<Superblock>, PoolError> {
    match read_superblock(medium) {
        Ok(found) => Ok(found.map(|(superblock, _)| superblock)),
        Err(PoolError::Io(_)) => Ok(None),
        Err(e) => Err(e),
    }
}

fn has_data(medium: &dyn Medium) -> Result<bool, PoolError> {
    Ok(medium.list().during("listing", medium.path().display())?.iter().any(|name| name == DATA))
}

impl Rebuilt {
    /// Reads what there is of the metadata.
    fn metadata(
        &mut self,
        medium: &dyn Medium,
        superblock: Option<Superblock>,
    ) -> Result<(Journal, Tables), PoolError> {
        let (journal, tables, found) = match Journal::open(medium, Access::Exclusive) {
            Err(ObjectError::Damaged(damage)) => {
                (self.damage, self.records_lost) = (vec![damage], 1);
                return Ok((Journal::create_empty(medium)?, Tables::new()));
            }
            opened => opened?,
        };
        (self.damage, self.records_lost) = (found.damage, found.lost);
        match superblock.map(|superblock| superblock.opening.state) {
            Some(State::Closed(end)) => {
                let now = journal.pair.end();
                if (now.generation, now.number) < (end.generation, end.number) {
                    self.records_lost += end.number.saturating_sub(now.number).max(1);
                }
            }
            Some(_) => {}
            // It would have said where they end.
            None => self.records_lost = self.records_lost.max(1),
        }
        Ok((journal, tables))
    }

    /// The directories of all classes, the capacity class's first, each with a superblock: its own,
    /// or one that it could have.
    fn directories(
        &mut self,
        storage: &dyn Storage,
        (capacity, keys): (&Arc<dyn Medium>, Option<&Arc<Keys>>),
        superblock: Option<Superblock>,
        tables: &Tables,
    ) -> Result<Vec<(MediaClass, Directory)>, PoolError> {
        let mut others = Vec::new();
        for (&class, path) in tables.classes.iter().filter(|(class, _)| **class != MediaClass::Capacity) {
            let missing = || PoolError::ClassMissing { class, path: path.clone() };
            let needed = !tables.gone_with(class).is_empty();
            let directory = match storage.directory(path) {
                Ok(directory) => directory,
                Err(_) if needed => return Err(missing()),
                Err(_) => continue,
            };
            let own = superblock_if_any(&*directory)?;
            let ours = own.is_none_or(|s| s.class == class && superblock.is_none_or(|ours| ours.pool == s.pool));
            match (ours, own.is_some() || has_data(&*directory)?, needed) {
                (true, true, _) => {}
                (_, _, true) => return Err(missing()),
                _ => continue,
            }
            if !directory.lock(Access::Exclusive).during("locking", path.display())? {
                return Err(PoolError::Busy(path.clone()));
            }
            others.push((class, own, over(directory, keys, class)));
        }
        let known = superblock.or_else(|| others.iter().find_map(|(_, own, _)| *own));
        let ours = match known {
            Some(known) => known,
            None => new_superblock(&**capacity, keys.map(Arc::as_ref))?,
        };
        let make = |class, own: Option<Superblock>| own.unwrap_or(Superblock { class, ..ours });
        let first = (MediaClass::Capacity, superblock, capacity.clone());
        let all: Vec<_> = std::iter::once(first).chain(others).collect();
        self.superblocks = all.iter().filter(|(_, own, _)| own.is_none()).map(|(class, ..)| *class).collect();
        Ok(all.into_iter().map(|(class, own, medium)| (class, (make(class, own), medium))).collect())
    }

    /// Enters logs without a record, and drops records without a log.
    fn find_logs(&mut self, tables: &mut Tables, class: MediaClass, medium: &dyn Medium) -> Result<(), PoolError> {
        let names = medium.list().during("listing", medium.path().display())?;
        let id = |text: &str| u64::from_str_radix(text.get(..16)?, 16).ok();
        for name in &names {
            if let Some(id) = name.strip_prefix("mlog-").and_then(id).filter(|id| !tables.mlogs.contains_key(id)) {
                let record = LogRecord { id, class, capacity: 1 << 30 };
                let name = mlog_name(id);
                let opened = Log::open(&mlog_place(medium, record, &name), Access::Shared, &mut |_| {})?;
                if opened.is_some_and(|(_, opened)| !opened.no_header) {
                    tables.apply(Record::Mlog(record));
                    self.found.push(Object::Mlog(id));
                }
            }
            if let Some(id) = name.strip_prefix("mdc-").and_then(id).filter(|id| !tables.mdcs.contains_key(id)) {
                let record = LogRecord { id, class, capacity: 1 << 30 };
                if Pair::open(&mdc_place(medium, record), Access::Shared, &mut |_| {}).is_ok() {
                    tables.apply(Record::Mdc(record));
                    self.found.push(Object::Mdc(id, 0));
                }
            }
        }
        let is_there = |mut files: Box<dyn Iterator<Item = String>>| files.any(|name| names.contains(&name));
        tables.mlogs.retain(|&id, log| {
            let stays = log.class != class || is_there(Box::new(mlog_files(id)));
            self.dropped.extend((!stays).then_some(Object::Mlog(id)));
            stays
        });
        tables.mdcs.retain(|&id, log| {
            let stays = log.class != class || id == ROOT_MDC || is_there(Box::new(mdc_files(id)));
            self.dropped.extend((!stays).then_some(Object::Mdc(id, 0)));
            stays
        });
        Ok(())
    }

    /// Drops mblocks whose checksums are not their own: they were deleted, and the record of that
    /// is lost. Keeps what no mblock has.
    fn look_at_data(
        &mut self,
        tables: &mut Tables,
        class: MediaClass,
        medium: &Arc<dyn Medium>,
        lost: bool,
        free_lost: bool,
    ) -> Result<(), PoolError> {
        let open = |used: &[MblockRecord]| Class::open(class, medium.clone(), used, &[], Vec::new(), Access::Shared);
        if lost {
            let (opened, _) = open(&[])?;
            let opened = Arc::new(opened);
            let infos: Vec<_> = tables.mblocks.values().filter(|m| m.record.class == class).cloned().collect();
            for info in infos {
                let id = info.record.id;
                let read = Mblock { info, class: opened.clone() }.read_table();
                if matches!(read, Ok((_, Some(_))) | Err(ObjectError::Damaged(_))) {
                    tables.mblocks.remove(&id);
                    self.dropped.push(Object::Mblock(id));
                }
            }
        }
        if free_lost {
            tables.kept.retain(|(of, _)| *of != class);
        } else if lost {
            let used: Vec<_> = tables.mblocks.values().map(|m| m.record).filter(|m| m.class == class).collect();
            let (opened, _) = open(&used)?;
            let len = opened.data.len().during("looking at the data of", class)?.next_multiple_of(crate::BLOCK as u64);
            let (mut free, end) = opened.free();
            free.extend((len > end).then(|| Extent { offset: end, len: len - end }));
            tables.kept.retain(|(of, _)| *of != class);
            tables.kept.extend(free.into_iter().map(|extent| (class, extent)));
        }
        Ok(())
    }
}
