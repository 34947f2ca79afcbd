//! A media class at work: its directory, its data file, and the free space in it.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::disk::checksum;
use crate::disk::group::Group;
use crate::disk::log::full_or;
use crate::disk::medium::{Access, Medium, MediumFile, Open, Room};
use crate::disk::record::MblockRecord;
use crate::disk::space::{Extent, Space};
use crate::error::{During, IoError, Object, ObjectError};
use crate::{BLOCK, MediaClass};

/// What a class holds, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassUsage {
    /// Which.
    pub class: MediaClass,
    /// Its directory.
    pub path: PathBuf,
    /// Whether the directory is there.
    pub present: bool,
    /// Whether reads and writes go past the page cache.
    pub direct_io: bool,
    /// Whether space that is freed goes back to the file system, as far as that is known: a pool
    /// that was opened for reading has not tried.
    pub gives_back: bool,
    /// Committed mblocks.
    pub mblocks: u64,
    /// Their data.
    pub data_bytes: u64,
    /// What the data file takes on the medium.
    pub used_bytes: u64,
    /// All and free on the file system.
    pub room: Room,
}

/// The data file's name.
pub(crate) const DATA: &str = "data";

/// A class at work.
pub(crate) struct Class {
    pub(crate) class: MediaClass,
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) data: Arc<dyn MediumFile>,
    space: Mutex<Space>,
    /// Leased: it stays as it is.
    leased: Vec<Extent>,
    /// A sync failed: the medium's contents are unknown, and the kernel reports that only once.
    failed: Mutex<bool>,
    syncs: Group<Object, Result<(), ObjectError>>,
}

impl Class {
    /// Opens the data file. `used` are the committed mblocks; gives those that overlap others.
    /// `kept`: what else is taken. `leased`: what must stay as it is, in use or not.
    pub(crate) fn open(
        class: MediaClass,
        medium: Arc<dyn Medium>,
        used: &[MblockRecord],
        kept: &[Extent],
        leased: Vec<Extent>,
        access: Access,
    ) -> Result<(Self, Vec<Extent>), IoError> {
        let name = format!("{}/{DATA}", medium.path().display());
        let read_only = access == Access::Shared;
        let data = medium.open(DATA, Open { create: false, direct: true, read_only }).during("opening", &name)?;
        let mut extents: Vec<Extent> =
            used.iter().map(|m| Extent { offset: m.offset, len: checksum::stored_len(m.len) }).collect();
        extents.extend(kept);
        let mut starts: Vec<u64> = extents.iter().map(|extent| extent.offset).collect();
        starts.sort_unstable();
        extents.extend(leased.iter().filter(|extent| starts.binary_search(&extent.offset).is_err()));
        let (space, bad) = Space::new(&mut extents);
        let (space, failed, syncs) = (Mutex::new(space), Mutex::new(false), Group::default());
        let this = Self { class, medium, data, space, leased, failed, syncs };
        if !read_only && bad.is_empty() {
            this.give_back_leftovers()?;
        }
        Ok((this, bad))
    }

    /// Opens the data file for reading mblocks that are known.
    pub(crate) fn open_to_read(class: MediaClass, medium: Arc<dyn Medium>) -> Result<Self, IoError> {
        Ok(Self::open(class, medium, &[], &[], Vec::new(), Access::Shared)?.0)
    }

    /// Frees the space that uncommitted mblocks left behind.
    fn give_back_leftovers(&self) -> Result<(), IoError> {
        let space = self.space();
        let name = self.medium.path().join(DATA);
        if self.data.len().during("looking at", name.display())? > space.end() {
            self.data.set_len(space.end()).during("cutting", name.display())?;
        }
        // Nothing is there: this only tells whether the file system can do it.
        self.data.punch(space.end(), BLOCK as u64).during("punching", name.display())?;
        for hole in space.holes() {
            self.data.punch(hole.offset, hole.len).during("punching", name.display())?;
        }
        Ok(())
    }

    fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock()
    }

    /// Makes all that was written durable, for all threads that ask for it meanwhile.
    pub(crate) fn sync(&self, object: Object) -> Result<(), ObjectError> {
        self.syncs.run(object, |objects| {
            let mut failed = self.failed.lock();
            let mut result = if *failed { Err(None) } else { self.data.sync().during("syncing", object).map_err(Some) };
            *failed |= result.is_err();
            let failed = |object| ObjectError::Failed(object);
            objects
                .into_iter()
                .map(|object| match &mut result {
                    Ok(()) => Ok(()),
                    Err(error) => Err(error.take().map_or_else(|| failed(object), ObjectError::from)),
                })
                .collect()
        })
    }

    /// What is free below the end of the last extent in use, and that end.
    pub(crate) fn free(&self) -> (Vec<Extent>, u64) {
        let space = self.space();
        (space.holes(), space.end())
    }

    /// Bytes that mblocks, also those being written, hold of the data file.
    pub(crate) fn held(&self) -> u64 {
        self.space().held()
    }

    /// Space for `capacity` bytes of data and their checksums.
    pub(crate) fn take(&self, capacity: u64) -> Result<Extent, ObjectError> {
        let taken = self.space().take(checksum::stored_len(capacity));
        let extent = taken.ok_or(ObjectError::Full { class: self.class, bytes: capacity })?;
        if extent.len == 0 {
            return Ok(extent);
        }
        let name = self.medium.path().join(DATA);
        match self.data.allocate(extent.offset, extent.len).during("allocating in", name.display()) {
            Ok(()) => Ok(extent),
            Err(e) => {
                // Nothing was written there, so the space is free whether this works or not (no
                // file may be that long).
                let _ = self.data.punch(extent.offset, extent.len);
                self.space().give(extent);
                Err(full_or(e, self.class, capacity))
            }
        }
    }

    /// Gives the space of an extent back, unless it is leased. An error only leaves it taken until
    /// the pool is opened again.
    pub(crate) fn give(&self, extent: Extent) {
        let is_leased = |leased: &Extent| leased.offset < extent.end() && extent.offset < leased.end();
        if self.leased.iter().any(is_leased) {
            return;
        }
        if extent.len > 0 && self.data.punch(extent.offset, extent.len).is_ok() {
            self.space().give(extent);
        }
    }
}
