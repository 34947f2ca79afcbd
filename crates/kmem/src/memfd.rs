//! `memfd_create(2)`: sealed stores, and shared mappings that hand out no references.
//!
//! A *store* is a memfd that one process can write and no other ever will. It is first mapped
//! writable and then sealed with [`STORE_SEALS`]. `F_SEAL_FUTURE_WRITE` leaves the existing mapping
//! writable and refuses every other way: `write(2)`, new writable shared mappings, and hole
//! punching (through the mapping too: `MADV_REMOVE` fails with `EPERM`). Private mappings are
//! allowed; a write to one copies the page.
//!
//! A store's memory therefore cannot be given back page by page, but only by dropping every mapping
//! and descriptor of the whole store. A process that has lost its [`SharedMap`] can never write the
//! store again.
//!
//! Sources: `memfd_create(2)`, `fcntl(2)` "File sealing".

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

mod map;

pub use map::{HUGE_PAGE_SIZE, SharedMap, filler, map_readonly, map_shared};

/// The seals of a store: no process can shrink it, grow it, write it in a new way, or change its
/// seals.
pub const STORE_SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Why a memfd cannot be made, mapped or trusted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemfdError {
    /// `memfd_create(2)` failed.
    #[error("creating memfd {name:?}: {errno}")]
    Create {
        /// Its name.
        name: String,
        /// The kernel's error.
        errno: Errno,
    },
    /// Its length cannot be set.
    #[error("resizing a memfd to {len} bytes: {errno}")]
    Resize {
        /// Bytes requested.
        len: usize,
        /// The kernel's error.
        errno: Errno,
    },
    /// It cannot be mapped.
    #[error("mapping {len} bytes of a file: {errno}")]
    Map {
        /// Bytes requested.
        len: usize,
        /// The kernel's error.
        errno: Errno,
    },
    /// It cannot be sealed.
    #[error("sealing a memfd: {0}; F_SEAL_FUTURE_WRITE needs Linux 5.1 or newer")]
    Seal(Errno),
    /// It is not a memfd, and has no seals.
    #[error("not a memfd (its seals cannot be read: {0})")]
    NotAMemfd(Errno),
    /// Another process could still change it.
    #[error("a memfd lacks the seals {missing:?}: its bytes could change or vanish, so it is not used")]
    MissingSeals {
        /// The seals that it lacks.
        missing: SealFlags,
    },
}

/// Creates a store of `len` bytes (a multiple of the page size), all zeros; the module's page says
/// what a store is. The returned map is the only way to write it, for ever. The kernel allocates
/// memory page by page as it is written.
///
/// # Errors
///
/// [`MemfdError`]; no memfd is left behind.
pub fn create_sealed(name: &str, len: usize) -> Result<(OwnedFd, SharedMap), MemfdError> {
    let fd = create(name)?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(|errno| MemfdError::Resize { len, errno })?;
    let map = map_shared(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, STORE_SEALS).map_err(MemfdError::Seal)?;
    Ok((fd, map))
}

fn create(name: &str) -> Result<OwnedFd, MemfdError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux 6.3 has brought NOEXEC_SEAL.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        result => result,
    }
    .map_err(|errno| MemfdError::Create { name: name.to_owned(), errno })
}

/// The seals of a memfd.
///
/// # Errors
///
/// `EINVAL`: the descriptor is not a memfd's.
pub fn seals(fd: impl AsFd) -> io::Result<SealFlags> {
    Ok(rustix::fs::fcntl_get_seals(fd)?)
}

/// Checks that a descriptor from another process is a memfd with at least [`STORE_SEALS`].
///
/// # Errors
///
/// [`MemfdError::NotAMemfd`], [`MemfdError::MissingSeals`].
pub fn require_seals(fd: impl AsFd) -> Result<(), MemfdError> {
    let missing = STORE_SEALS - rustix::fs::fcntl_get_seals(fd).map_err(MemfdError::NotAMemfd)?;
    if missing.is_empty() { Ok(()) } else { Err(MemfdError::MissingSeals { missing }) }
}

/// The identity of a file, unique as long as the file is open somewhere. `/proc/PID/maps` shows the
/// same numbers.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct FileId {
    /// `st_dev`.
    pub dev: u64,
    /// `st_ino`.
    pub ino: u64,
}

/// The identity of an open file.
///
/// # Errors
///
/// Those of `fstat(2)`.
pub fn identity(fd: impl AsFd) -> io::Result<FileId> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(FileId { dev: stat.st_dev, ino: stat.st_ino })
}

/// Allocates the memory (or disk space) of a part of a file now, so that a later write cannot fail
/// (`fallocate(2)` with mode 0). `offset` and `len` are in bytes.
///
/// # Errors
///
/// `ENOSPC`, `ENOMEM`; `EPERM` behind the end of a file sealed against growing.
pub fn allocate(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(&fd, FallocateFlags::empty(), offset, len) {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Bytes of memory (and swap) that a memfd uses, or of disk space that a file uses (`st_blocks`
/// times 512).
///
/// # Errors
///
/// Those of `fstat(2)`.
pub fn resident_bytes(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_blocks as u64 * 512)
}

#[cfg(test)]
mod tests;
