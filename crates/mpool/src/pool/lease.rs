//! Leases: reading some mblocks without having the pool open, so that others may write to it.
//!
//! A lease is a file beside the superblock, with the records of the mblocks and a note of its
//! owner's. It holds as long as somebody has its descriptor, or a copy of it: that is a lock, which
//! ends with the last process that has it, however that ends. An mblock with a lease can be
//! deleted; its space stays as it is. An opening for writing looks which leases hold,
//! and removes the files of the others. That must not happen while a lease is being made, so it is
//! made by a program that has the pool open, shared. A lease that is not understood is obeyed: the
//! pool is not opened.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Pool;
use crate::MediaClass;
use crate::disk::file_system::Disk;
use crate::disk::key::Keys;
use crate::disk::medium::{Access, Medium, Storage};
use crate::disk::record::{MblockRecord, Record};
use crate::disk::sealed::{SealedLease, over};
use crate::disk::space::Extent;
use crate::error::{During, IoError, PoolError};
use crate::objects::class::Class;
use crate::objects::info::MblockInfo;
use crate::objects::mblock::Mblock;

const MAGIC: &[u8; 8] = b"PGLEASE1";
/// All that is in a file of [`Pool::keep`]. Programs that do not know it refuse the pool.
const KEEP: &[u8; 8] = b"PGKEEP01";

/// What a lease says, before the note.
#[derive(Serialize, Deserialize)]
struct Terms {
    /// Where the classes lie.
    classes: Vec<(MediaClass, PathBuf)>,
    mblocks: Vec<MblockRecord>,
}

impl Terms {
    /// `MAGIC`, length of the terms (8), terms, note, crc32c of all that (4).
    fn encode(&self, note: &[u8]) -> Vec<u8> {
        let terms = postcard::to_allocvec(self).unwrap_or_default();
        let mut all = [MAGIC, &(terms.len() as u64).to_le_bytes()[..], &terms, note].concat();
        all.extend(crc32c::crc32c(&all).to_le_bytes());
        all
    }

    fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (all, sum) = bytes.split_last_chunk::<4>()?;
        let (len, rest) = all.strip_prefix(MAGIC)?.split_first_chunk::<8>()?;
        let (terms, note) = rest.split_at_checked(u64::from_le_bytes(*len) as usize)?;
        if crc32c::crc32c(all) != u32::from_le_bytes(*sum) {
            return None;
        }
        let terms: Self = postcard::from_bytes(terms).ok()?;
        let possible = |record: &MblockRecord| Record::Mblock(*record).is_possible();
        terms.mblocks.iter().all(possible).then_some((terms, note))
    }
}

/// Whether a lease is understood.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn decode(bytes: &[u8]) -> bool {
    Terms::decode(bytes).is_some_and(|(terms, note)| terms.encode(note) == bytes)
}

/// The space that leases hold.
pub(super) type Held = Vec<(MediaClass, Extent)>;

/// Finds the leases that hold, and removes the files of the others. The pool must be locked.
pub(super) fn held(medium: &dyn Medium) -> Result<Held, PoolError> {
    let mut held = Held::new();
    for (_, bytes) in medium.leases().during("reading the leases in", medium.path().display())? {
        if bytes == KEEP {
            continue;
        }
        let (terms, _) = Terms::decode(&bytes).ok_or_else(|| PoolError::Leased(medium.path().into()))?;
        held.extend(terms.mblocks.into_iter().map(|record| (record.class, MblockInfo::new(record).extent())));
    }
    held.sort_by_key(|(class, extent)| (*class as usize, extent.offset));
    held.dedup();
    Ok(held)
}

/// Refuses a pool of which something is leased.
pub(super) fn refuse(medium: &dyn Medium) -> Result<(), PoolError> {
    let leases = medium.leases().during("reading the leases in", medium.path().display())?;
    if leases.is_empty() { Ok(()) } else { Err(PoolError::Leased(medium.path().into())) }
}

/// Mblocks that can be read without their pool.
pub struct Leased {
    mblocks: HashMap<u64, Mblock>,
    note: Vec<u8>,
}

impl Pool {
    /// Leases mblocks. The pool, which must be open with [`Access::Shared`], may be closed then;
    /// what is leased can be read ([`Leased`]) as long as the descriptor or a copy of it is open.
    ///
    /// # Errors
    /// `Io`, if the medium cannot be written; `NotFound`.
    pub fn lease(&self, ids: &[u64], note: &[u8]) -> Result<OwnedFd, PoolError> {
        let at = || self.inner.path.display();
        if self.inner.access == Access::Exclusive {
            let why = "it is open for writing";
            return Err(IoError::new("leasing mblocks of", at(), io::Error::other(why)).into());
        }
        let records = ids.iter().map(|id| Ok(self.mblock(*id)?.info.record));
        let mblocks = records.collect::<Result<Vec<_>, crate::ObjectError>>()?;
        let classes = self.inner.classes.read();
        let place = |class: &Arc<Class>| (class.class, class.medium.path().to_owned());
        let classes: Vec<_> = classes.iter().flatten().map(place).collect();
        let bytes = Terms { classes, mblocks }.encode(note);
        Ok(self.medium().and_then(|medium| medium.lease(&bytes)).during("leasing mblocks of", at())?)
    }

    /// Has others that open this pool, which is open exclusively, delete none of its mblocks: they
    /// ask [`Pool::is_kept`].
    ///
    /// # Errors
    /// `Io`, if the medium cannot be written.
    pub fn keep(&self) -> Result<Kept, PoolError> {
        let kept = self.medium().and_then(|medium| medium.lease(KEEP));
        Ok(Kept(kept.during("keeping the mblocks of", self.inner.path.display())?))
    }

    /// Whether somebody keeps all mblocks ([`Pool::keep`]) of this pool, which is open exclusively;
    /// also if that cannot be seen.
    pub fn is_kept(&self) -> bool {
        self.keeping().map_or(true, |files| !files.is_empty())
    }

    /// The files that those have locked who keep all mblocks of this pool, which is open
    /// exclusively.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn keeping(&self) -> io::Result<Vec<PathBuf>> {
        let keeping = self.medium()?.leases()?.into_iter().filter(|(_, bytes)| bytes == KEEP);
        Ok(keeping.map(|(name, _)| self.inner.path.join(name)).collect())
    }

    /// The directory that is open, whatever has its name now.
    fn medium(&self) -> io::Result<Arc<dyn Medium>> {
        self.inner.class(MediaClass::Capacity).map(|class| class.medium.clone()).map_err(io::Error::other)
    }
}

/// Keeps all mblocks of a pool until it is dropped ([`Pool::keep`]).
pub struct Kept(OwnedFd);

impl Kept {
    /// Whether it does: nobody has removed its file.
    pub fn holds(&self) -> bool {
        rustix::fs::fstat(&self.0).is_ok_and(|stat| stat.st_nlink > 0)
    }
}

impl Leased {
    /// Reads a lease, which must be held as long as this is used. That of an encrypted pool says
    /// where the pool is, and the pool where its key is.
    ///
    /// # Errors
    /// `Io`, if it is none, or a class is not where it was; those of [`Pool::open`] about keys.
    pub fn open(lease: &File) -> Result<Self, PoolError> {
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = claims::zeroed(lease.metadata()?.len())?;
            lease.read_exact_at(&mut bytes, 0)?;
            Ok(bytes)
        };
        let mut bytes = read().during("reading", "a lease")?;
        let mut keys = None;
        if let Some((sealed, rest)) = SealedLease::decode(&bytes) {
            let medium = Disk.directory(&sealed.path).during("opening", sealed.path.display())?;
            let of_pool = keys.insert(Arc::new(Keys::open(&*medium, None)?));
            bytes = sealed.plain(rest, of_pool);
        }
        let foreign = || io::Error::from(io::ErrorKind::InvalidData);
        let (terms, note) = Terms::decode(&bytes).ok_or_else(foreign).during("reading", "a lease")?;
        let mut classes = HashMap::new();
        for (class, path) in &terms.classes {
            let medium = Disk.directory(path).during("opening", path.display())?;
            let medium = over(medium, keys.as_ref(), *class);
            classes.insert(*class as usize, Arc::new(Class::open_to_read(*class, medium)?));
        }
        let mblock = |record: MblockRecord| {
            let class = classes.get(&(record.class as usize)).ok_or(crate::ObjectError::NoClass(record.class))?;
            Ok((record.id, Mblock { info: Arc::new(MblockInfo::new(record)), class: class.clone() }))
        };
        let mblocks = terms.mblocks.into_iter().map(mblock).collect::<Result<_, crate::ObjectError>>()?;
        Ok(Self { mblocks, note: note.to_vec() })
    }

    /// The note.
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    /// The mblocks, by identity.
    pub fn into_mblocks(self) -> HashMap<u64, Mblock> {
        self.mblocks
    }
}
