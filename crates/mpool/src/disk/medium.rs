//! The I/O interface under everything: a directory with files.
//!
//! All of the pool's reads and writes go through [`Storage`], [`Medium`] and [`MediumFile`], so
//! that tests can put a medium below it that fails, fills up, tears writes and loses data that was
//! not synced.
//!
//! What the pool relies on, and no more: a write that was followed by a successful
//! [`MediumFile::sync`] survives a crash, with the file's length; a name that was made or removed
//! before a successful [`Medium::sync_names`] stays so. Everything else may be there after a crash,
//! or not, or in part.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// Whether others may open the pool at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// No: for reading and writing.
    #[default]
    Exclusive,
    /// Yes, any number; all for reading only.
    Shared,
}

/// How to open a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Open {
    /// Make it when it is not there.
    pub create: bool,
    /// Past the page cache, where the file system allows.
    pub direct: bool,
    /// For reading only.
    pub read_only: bool,
}

/// Room on a medium, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// All.
    pub total: u64,
    /// Free.
    pub free: u64,
}

/// Where directories come from. Errors are those of the system calls that the file system takes.
pub trait Storage: Send + Sync {
    /// The directory at `path`.
    fn directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>>;

    /// The same, made if need be, with its parents, durably.
    fn make_directory(&self, path: &Path) -> io::Result<Arc<dyn Medium>>;

    /// Removes an empty directory.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;
}

/// A directory. Errors are those of the system calls that the file system takes.
pub trait Medium: Send + Sync {
    /// Its path.
    fn path(&self) -> &Path;
    /// Opens a file in it.
    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// The names of its files.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Makes the names durable.
    fn sync_names(&self) -> io::Result<()>;
    /// Locks the directory until this value is gone. False: another lock
    /// excludes it.
    fn lock(&self, access: Access) -> io::Result<bool>;
    /// A number that a copy of the directory, made now or later, does not have.
    fn identity(&self) -> io::Result<u64>;
    /// Room on the file system.
    fn room(&self) -> io::Result<Room>;
    /// Makes a file with these bytes that counts, see [`Medium::leases`], as long as its descriptor
    /// is open somewhere. It belongs to the directory's owner, who could not look at it else.
    fn lease(&self, _bytes: &[u8]) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Gives `each` the files of [`Medium::lease`] that count, one after the other: name, length,
    /// contents. Anything may be in them. The others are removed.
    fn leases(&self, _each: &mut EachLease<'_>) -> io::Result<()> {
        Ok(())
    }
}

/// See [`Medium::leases`].
pub type EachLease<'a> = dyn FnMut(&str, u64, &mut dyn io::Read) -> io::Result<()> + 'a;

/// One piece of [`MediumFile::read_many`].
pub struct ReadPiece<'a> {
    /// Where in the file.
    pub offset: u64,
    /// Where to.
    pub into: &'a mut [u8],
}

/// A file. All calls may come from many threads. Errors are those of the system calls that the file
/// system takes, and `UnexpectedEof` of a read; a full medium gives `ENOSPC` or `EDQUOT`. After a
/// failed sync the medium's contents are unknown; of a failed write a part may be there.
#[allow(clippy::len_without_is_empty)] // Nobody asks.
pub trait MediumFile: Send + Sync {
    /// Bytes in it.
    fn len(&self) -> io::Result<u64>;
    /// Bytes of the medium that it takes.
    fn used(&self) -> io::Result<u64>;
    /// Whether reads and writes go past the page cache; then memory, offsets and lengths are whole
    /// blocks.
    fn is_direct(&self) -> bool;
    /// Whether freed space goes back to the medium. A file system that cannot punch holes says so
    /// when it is asked to.
    fn punches(&self) -> bool {
        true
    }
    /// Fills `into` from `offset` on.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `from` at `offset`.
    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()>;
    /// Makes contents and length durable.
    fn sync(&self) -> io::Result<()>;
    /// Makes contents and lengths of two files durable, at the same time where the medium can.
    fn sync_both(&self, other: &dyn MediumFile) -> io::Result<()> {
        self.sync()?;
        other.sync()
    }

    /// The file's descriptor, where it has one.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Takes the space for a part now; the file grows to hold it, new bytes read as zeros.
    ///
    /// # Errors
    /// `ENOSPC`, `EDQUOT`.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Frees the space of a part, where the file system can. The part is not read before it is
    /// written again.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Forgets a part that is about to be written, in the page cache too, where the file system
    /// can. Its space stays taken, so that the write finds it.
    fn clear(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Cuts or extends the file.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reads every piece, several at a time where the medium can.
    fn read_many(&self, pieces: &mut [ReadPiece<'_>]) -> io::Result<()> {
        pieces.iter_mut().try_for_each(|piece| self.read_at(piece.into, piece.offset))
    }

    /// Writes the parts, one behind the other, as [`MediumFile::write_at`], several at a time where
    /// the medium can. Gives each part, in order, to `meanwhile`; while it is being written where
    /// the medium can.
    fn write_while(&self, parts: &[&[u8]], mut offset: u64, meanwhile: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        for part in parts {
            meanwhile(part);
            self.write_at(part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// Reads as [`MediumFile::read_at`] and gives each part, with its place in `into`, to `landed`
    /// as soon as it is there, while the others are under way where the medium can. Parts are
    /// whole blocks when `into` is. `landed` may change them.
    fn read_while(&self, into: &mut [u8], offset: u64, landed: &mut dyn FnMut(usize, &mut [u8])) -> io::Result<()> {
        self.read_at(into, offset)?;
        landed(0, into);
        Ok(())
    }
}
