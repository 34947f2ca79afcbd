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
use std::io::{self, Read};
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
/// Bytes before the terms, and of the checksum.
const ROUND: u64 = 16 + 4;
/// Bytes of the longest lease: whoever may write beside the pool can make one of any length.
const MOST: u64 = 4 << 30;
/// Bytes of the longest terms, 20 for an mblock: all are in memory at once.
const MOST_TERMS: u64 = 16 << 20;
/// Bytes of a note that are read at once.
const PART: usize = 64 << 10;

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

    /// Reads a lease of this length but for its note, which may be long: of that only the sum is
    /// made, and the length given. `None`: it is not understood.
    fn read(from: &mut dyn Read, len: u64) -> io::Result<Option<(Self, usize)>> {
        let (mut magic, mut terms, mut end) = ([0; 8], [0; 8], [0; 4]);
        let Some(rest) = len.checked_sub(ROUND).filter(|_| len <= MOST) else { return Ok(None) };
        from.read_exact(&mut magic)?;
        from.read_exact(&mut terms)?;
        let len = u64::from_le_bytes(terms);
        if magic != *MAGIC || len > rest.min(MOST_TERMS) {
            return Ok(None);
        }
        let mut sum = crc32c::crc32c(&[magic, terms].concat());
        let (terms, note) = (claims::exactly(&mut *from, len, len)?, (rest - len) as usize);
        sum = crc32c::crc32c_append(sum, &terms);
        let mut buffer = vec![0; note.min(PART)];
        for at in (0..note).step_by(PART) {
            let part = &mut buffer[..(note - at).min(PART)];
            from.read_exact(part)?;
            sum = crc32c::crc32c_append(sum, part);
        }
        from.read_exact(&mut end)?;
        let terms = postcard::from_bytes::<Self>(&terms).ok().filter(|_| end == sum.to_le_bytes());
        let possible = |record: &MblockRecord| Record::Mblock(*record).is_possible();
        Ok(terms.filter(|terms| terms.mblocks.iter().all(possible)).map(|terms| (terms, note)))
    }

    fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (terms, note) = Self::read(&mut &*bytes, bytes.len() as u64).ok()??;
        let end = bytes.len() - 4;
        Some((terms, &bytes[end - note..end]))
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
    let (mut held, mut understood) = (Held::new(), true);
    let each = &mut |_: &str, len, from: &mut dyn Read| {
        if !understood || is_keep(len, from)? {
            return Ok(());
        }
        let terms = Terms::read(from, len)?.map(|(terms, _)| terms.mblocks);
        understood = terms.is_some();
        let extent = |record: MblockRecord| (record.class, MblockInfo::new(record).extent());
        held.extend(terms.into_iter().flatten().map(extent));
        held.sort_by_key(|(class, extent)| (*class as usize, extent.offset));
        held.dedup();
        Ok(())
    };
    medium.leases(each).during("reading the leases in", medium.path().display())?;
    if understood { Ok(held) } else { Err(PoolError::Leased(medium.path().into())) }
}

/// Whether a lease is one of [`Pool::keep`].
fn is_keep(len: u64, from: &mut dyn Read) -> io::Result<bool> {
    let mut bytes = [0; KEEP.len()];
    Ok(len == KEEP.len() as u64 && from.read_exact(&mut bytes).map(|()| bytes == *KEEP)?)
}

/// Refuses a pool of which something is leased.
pub(super) fn refuse(medium: &dyn Medium) -> Result<(), PoolError> {
    let mut none = true;
    let each = &mut |_: &str, _, _: &mut dyn Read| {
        none = false;
        Ok(())
    };
    medium.leases(each).during("reading the leases in", medium.path().display())?;
    if none { Ok(()) } else { Err(PoolError::Leased(medium.path().into())) }
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
        let refused = |why| Err(IoError::new("leasing mblocks of", at(), io::Error::other(why)).into());
        if self.inner.access == Access::Exclusive {
            return refused("it is open for writing");
        }
        let records = ids.iter().map(|id| Ok(self.mblock(*id)?.info.record));
        let mblocks = records.collect::<Result<Vec<_>, crate::ObjectError>>()?;
        let classes = self.inner.classes.read();
        let place = |class: &Arc<Class>| (class.class, class.medium.path().to_owned());
        let classes: Vec<_> = classes.iter().flatten().map(place).collect();
        let bytes = Terms { classes, mblocks }.encode(note);
        if bytes.len() as u64 > MOST || (bytes.len() - note.len()) as u64 > MOST_TERMS {
            return refused("they are too many, or pages lie too scattered in them");
        }
        Ok(self.medium().and_then(|medium| medium.lease(&bytes)).during("leasing mblocks of", at())?)
    }

    /// Has others that open this pool, which is open exclusively, delete none of its mblocks: they
    /// ask [`Pool::is_kept`].
    ///
    /// # Errors
    /// `Io`, if the medium cannot be written.
    pub fn keep(&self) -> Result<Kept, PoolError> {
        let kept = self.medium().and_then(|medium| medium.lease(KEEP)).map(Kept);
        // Without room others are refused, and not asked.
        let kept = kept.and_then(|kept| if kept.holds() { Ok(kept) } else { Err(io::ErrorKind::StorageFull.into()) });
        Ok(kept.during("keeping the mblocks of", self.inner.path.display())?)
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
        let mut keeping = Vec::new();
        self.medium()?.leases(&mut |name, len, from| {
            keeping.extend(is_keep(len, from)?.then(|| self.inner.path.join(name)));
            Ok(())
        })?;
        Ok(keeping)
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
            let len = Some(lease.metadata()?.len()).filter(|len| *len <= MOST);
            let mut bytes = claims::zeroed(len.ok_or(io::ErrorKind::InvalidData)?)?;
            lease.read_exact_at(&mut bytes, 0)?;
            Ok(bytes)
        };
        let mut bytes = read().during("reading", "a lease")?;
        let mut keys = None;
        if let Some((sealed, start, len)) = SealedLease::decode(&bytes, bytes.len() as u64) {
            let medium = Disk.directory(&sealed.path).during("opening", sealed.path.display())?;
            let of_pool = keys.insert(Arc::new(Keys::open(&*medium, None)?));
            bytes = sealed.plain(bytes.split_off(start), len, of_pool);
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
