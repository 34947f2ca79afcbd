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

/// Where directories come from.
pub trait Storage: Send + Sync {
    /// The directory at `path`, made (with its parents) when asked to.
    ///
    /// # Errors
    ///
    /// Those of `open(2)` and `mkdir(2)`.
    fn directory(&self, path: &Path, create: bool) -> io::Result<Arc<dyn Medium>>;

    /// Removes an empty directory.
    ///
    /// # Errors
    ///
    /// Those of `rmdir(2)`.
    fn remove_directory(&self, path: &Path) -> io::Result<()>;
}

/// A directory.
pub trait Medium: Send + Sync {
    /// Its path.
    fn path(&self) -> &Path;
    /// Opens a file in it.
    ///
    /// # Errors
    ///
    /// Those of `open(2)`.
    fn open(&self, name: &str, how: Open) -> io::Result<Arc<dyn MediumFile>>;
    /// Removes a file.
    ///
    /// # Errors
    ///
    /// Those of `unlink(2)`.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// The names of its files.
    ///
    /// # Errors
    ///
    /// Those of `readdir(3)`.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Makes the names durable.
    ///
    /// # Errors
    ///
    /// Those of `fsync(2)`.
    fn sync_names(&self) -> io::Result<()>;
    /// Locks the directory, shared or exclusive, until this value is gone. False: another lock
    /// excludes it.
    ///
    /// # Errors
    ///
    /// Those of `flock(2)`.
    fn lock(&self, exclusive: bool) -> io::Result<bool>;
    /// A number that a copy of the directory, made now or later, does not have.
    ///
    /// # Errors
    ///
    /// Those of `fstat(2)`.
    fn identity(&self) -> io::Result<u64>;
    /// Room on the file system.
    ///
    /// # Errors
    ///
    /// Those of `statvfs(3)`.
    fn room(&self) -> io::Result<Room>;
    /// Makes a file with these bytes that counts, see [`Medium::leases`], as long as its descriptor
    /// is open somewhere.
    ///
    /// # Errors
    ///
    /// Those of `open(2)` and `write(2)`.
    fn lease(&self, _bytes: &[u8]) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// The contents of all files of [`Medium::lease`] that count; the others are removed.
    ///
    /// # Errors
    ///
    /// Those of `readdir(3)`, `open(2)` and `read(2)`.
    fn leases(&self) -> io::Result<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }
}

/// One piece of [`MediumFile::read_many`].
pub struct ReadPiece<'a> {
    /// Where in the file.
    pub offset: u64,
    /// Where to.
    pub into: &'a mut [u8],
}

/// A file. All calls may come from many threads.
#[allow(clippy::len_without_is_empty)] // Nobody asks.
pub trait MediumFile: Send + Sync {
    /// Bytes in it.
    ///
    /// # Errors
    ///
    /// Those of `fstat(2)`.
    fn len(&self) -> io::Result<u64>;
    /// Bytes of the medium that it takes.
    ///
    /// # Errors
    ///
    /// Those of `fstat(2)`.
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
    ///
    /// # Errors
    ///
    /// Those of `pread(2)`; `UnexpectedEof`.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `from` at `offset`.
    ///
    /// # Errors
    ///
    /// Those of `pwrite(2)`. Part of it may have been written.
    fn write_at(&self, from: &[u8], offset: u64) -> io::Result<()>;
    /// Makes contents and length durable.
    ///
    /// # Errors
    ///
    /// Those of `fdatasync(2)`; the medium's contents are unknown then.
    fn sync(&self) -> io::Result<()>;
    /// Makes contents and lengths of two files durable, at the same time where the medium can.
    ///
    /// # Errors
    ///
    /// Those of [`MediumFile::sync`], of either.
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
    ///
    /// `ENOSPC`, `EDQUOT`.
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Frees the space of a part, where the file system can. The part is not read before it is
    /// written again.
    ///
    /// # Errors
    ///
    /// Those of `fallocate(2)`.
    fn punch(&self, offset: u64, len: u64) -> io::Result<()>;
    /// Forgets a part that is about to be written, in the page cache too, where the file system
    /// can. Its space stays taken, so that the write finds it.
    ///
    /// # Errors
    ///
    /// Those of `fallocate(2)`.
    fn clear(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    /// Cuts or extends the file.
    ///
    /// # Errors
    ///
    /// Those of `ftruncate(2)`.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reads every piece, several at a time where the medium can.
    ///
    /// # Errors
    ///
    /// Those of [`MediumFile::read_at`].
    fn read_many(&self, pieces: &mut [ReadPiece<'_>]) -> io::Result<()> {
        pieces.iter_mut().try_for_each(|piece| self.read_at(piece.into, piece.offset))
    }

    /// Writes the parts, one behind the other, as [`MediumFile::write_at`], several at a time where
    /// the medium can. Gives each part, in order, to `meanwhile`; while it is being written where
    /// the medium can.
    ///
    /// # Errors
    ///
    /// Those of [`MediumFile::write_at`].
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
    ///
    /// # Errors
    ///
    /// Those of [`MediumFile::read_at`].
    fn read_while(&self, into: &mut [u8], offset: u64, landed: &mut dyn FnMut(usize, &mut [u8])) -> io::Result<()> {
        self.read_at(into, offset)?;
        landed(0, into);
        Ok(())
    }
}
