//! `memfd_create(2)`: stores, and shared mappings that hand out no references.
//!
//! A *store* is a memfd that one process writes and all others only read. Its memory can be given
//! back piece by piece, so `F_SEAL_FUTURE_WRITE`, which forbids punching holes too, is not used
//! where something else keeps other processes from writing. That is the owner of the inode:
//!
//! | | kept by its owner | sealed |
//! |---|---|---|
//! | made by | a process with `CAP_CHOWN` | any other process |
//! | others hold | a descriptor opened for reading | a descriptor of any kind |
//! | reopening it for writing | `EACCES`: mode 0, and the owner is [`KEEPER`], no user | `EPERM` on write and map |
//! | memory is given back | by [`StoreFile::punch`] | with the whole file |
//! | may write all the same | processes with `CAP_DAC_OVERRIDE`, `CAP_FOWNER` or ptrace | none |
//!
//! Both kinds carry [`FIXED_SEALS`]: no process can shrink or grow the file or change its seals.
//! Private mappings are allowed; a write to one copies the page.
//!
//! A store may also be a file of a store of `pageonefs` ([`create_store_in`]), which has the seals
//! and mappings of a memfd.
//!
//! A memfd that is [written once](create_written) cannot be changed any more, not even by the
//! process that made it ([`WRITTEN_SEALS`]). So its bytes can be trusted to stay, from any maker.
//!
//! What fails to be made leaves no memfd behind.
//!
//! Sources: `memfd_create(2)`, `fcntl(2)` "File sealing", `fallocate(2)`, `mm/shmem.c` and
//! `mm/truncate.c` of Linux 6.12.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FallocateFlags, Gid, MemfdFlags, Mode, OFlags, SealFlags, Uid};
use rustix::io::Errno;

use crate::PAGE_SIZE;

mod map;

pub use map::{HUGE_PAGE_SIZE, SharedMap, filler, map_readonly, map_shared};

/// Seals of every store: no process can shrink it, grow it, or change its seals.
pub const FIXED_SEALS: SealFlags = SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// Seals of a store that nothing else protects: no process can write it in a new way either.
pub const STORE_SEALS: SealFlags = FIXED_SEALS.union(SealFlags::FUTURE_WRITE);

/// Seals of a memfd that nobody can change any more: `F_SEAL_WRITE` is refused while somebody maps
/// it for writing.
pub const WRITTEN_SEALS: SealFlags = STORE_SEALS.union(SealFlags::WRITE);

/// User and group that own a store. No user has this number, and no user namespace maps it, so the
/// owner's right to change the mode of a file belongs to no process.
pub const KEEPER: u32 = 0xffff_fff0;

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
    /// It lies in huge pages of a pool, or another file system has it.
    #[error("a memfd that does not consist of ordinary pages")]
    OtherPages,
    /// The descriptor for readers cannot be made.
    #[error("opening a memfd for reading: {0}; is /proc mounted?")]
    Reopen(Errno),
}

impl From<MemfdError> for io::Error {
    fn from(error: MemfdError) -> Self {
        Self::other(error)
    }
}

/// A store, as the process has it that made it.
#[derive(Debug)]
pub struct StoreFile {
    /// Opened for writing; it stays with this process.
    pub writer: OwnedFd,
    /// Opened for reading, for other processes.
    pub reader: OwnedFd,
    /// The mapping through which the store is written.
    pub map: SharedMap,
    /// Whether holes can be punched into it.
    pub can_punch: bool,
}

impl StoreFile {
    /// Gives the memory of a part back to the kernel; the part reads as zeros from then on.
    ///
    /// A page that someone else holds a reference on (a pipe, a socket, a device) keeps its bytes
    /// until that reference is dropped: the kernel takes it out of the file as it is. That is so
    /// for whole pages only. Of a huge page that lies partly in the range, the kernel clears that
    /// part *in place* (`truncate_inode_partial_folio`). So the range consists of whole huge pages.
    ///
    /// # Errors
    ///
    /// `EPERM`: the store is sealed.
    ///
    /// # Panics
    ///
    /// When `offset` or `len` is not a multiple of [`HUGE_PAGE_SIZE`].
    pub fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        let huge = HUGE_PAGE_SIZE as u64;
        assert!(offset.is_multiple_of(huge) && len.is_multiple_of(huge), "{offset} and {len} cut a huge page");
        fallocate(&self.writer, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
    }

    /// Gives the memory of one page back, which nobody has used yet: it is zeros, as before.
    ///
    /// # Errors
    ///
    /// `EPERM`: the store is sealed.
    pub fn punch_unused(&self, page: usize) -> io::Result<()> {
        let (punch, len) = (FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, PAGE_SIZE as u64);
        fallocate(&self.writer, punch, page as u64 * len, len)
    }
}

/// Creates a store of `len` bytes (a multiple of the page size), all zeros; the module's page says
/// what a store is. The kernel allocates memory page by page as it is written.
pub fn create_store(name: &str, len: usize) -> Result<StoreFile, MemfdError> {
    store_of(create(name)?, len)
}

/// As [`create_store`], of a file in this directory, which is the root of a store of `pageonefs`
/// ([`crate::pageonefs::Store`]). Its name is taken away at once: `/proc/PID/maps` shows the path
/// of a memfd with the same name, by which stores are told from other files. A `/` in the name
/// becomes `_`.
///
/// # Errors
///
/// [`MemfdError`]; no file is left behind. `EEXIST`: another thread makes one with this name.
pub fn create_store_in(dir: BorrowedFd<'_>, name: &str, len: usize) -> Result<StoreFile, MemfdError> {
    let path = format!("memfd:{}", name.replace('/', "_"));
    let failed = |errno| MemfdError::Create { name: name.to_owned(), errno };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let writer = rustix::fs::openat(dir, path.as_str(), flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    rustix::fs::unlinkat(dir, path.as_str(), AtFlags::empty()).map_err(failed)?;
    store_of(writer, len)
}

/// Makes a store of an empty file that can be sealed.
fn store_of(writer: OwnedFd, len: usize) -> Result<StoreFile, MemfdError> {
    rustix::fs::ftruncate(&writer, len as u64).map_err(|errno| MemfdError::Resize { len, errno })?;
    let map = map_shared(&writer, len)?;
    let reader = reader(&writer)?;
    let can_punch = rustix::fs::fchmod(&writer, Mode::empty()).is_ok()
        && rustix::fs::fchown(&writer, Some(Uid::from_raw(KEEPER)), Some(Gid::from_raw(KEEPER))).is_ok();
    let seals = if can_punch { FIXED_SEALS } else { STORE_SEALS };
    rustix::fs::fcntl_add_seals(&writer, seals).map_err(MemfdError::Seal)?;
    Ok(StoreFile { writer, reader, map, can_punch })
}

/// Creates a store that is sealed, whatever this process may do. The returned map is the only way
/// to write it, for ever.
pub fn create_sealed(name: &str, len: usize) -> Result<(OwnedFd, SharedMap), MemfdError> {
    let fd = create(name)?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(|errno| MemfdError::Resize { len, errno })?;
    let map = map_shared(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, STORE_SEALS).map_err(MemfdError::Seal)?;
    Ok((fd, map))
}

/// Creates a memfd of `len` bytes that `fill` writes, by write(2) alone, and that nobody can change
/// afterwards. What it leaves out takes no memory, and reads as zeros. The descriptor is opened for
/// reading.
///
/// # Errors
///
/// [`MemfdError`], and what `fill` says; no memfd is left behind.
pub fn create_written<E: From<MemfdError>>(
    name: &str,
    len: usize,
    fill: impl FnOnce(&OwnedFd) -> Result<(), E>,
) -> Result<OwnedFd, E> {
    let writer = create(name)?;
    rustix::fs::ftruncate(&writer, len as u64).map_err(|errno| MemfdError::Resize { len, errno })?;
    fill(&writer)?;
    rustix::fs::fcntl_add_seals(&writer, WRITTEN_SEALS).map_err(MemfdError::Seal)?;
    // Before Linux 6.7 only this one can be mapped shared.
    Ok(reader(&writer)?)
}

/// Another descriptor of a memfd, for reading.
fn reader(writer: &OwnedFd) -> Result<OwnedFd, MemfdError> {
    let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
    rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(MemfdError::Reopen)
}

/// Creates a file of zeros that whoever has its descriptor may write, and nobody can shrink or
/// grow.
pub fn create_fixed(name: &str, len: usize) -> Result<(OwnedFd, SharedMap), MemfdError> {
    let fd = create(name)?;
    rustix::fs::ftruncate(&fd, len as u64).map_err(|errno| MemfdError::Resize { len, errno })?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(MemfdError::Seal)?;
    let map = map_shared(&fd, len)?;
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

/// Checks that a descriptor from another process is a store's: it has [`STORE_SEALS`], or it has
/// [`FIXED_SEALS`], is opened for reading and has mode 0.
///
/// # Errors
///
/// [`MemfdError::NotAMemfd`], [`MemfdError::MissingSeals`].
pub fn require_seals(fd: impl AsFd) -> Result<(), MemfdError> {
    require(fd.as_fd(), |_| true)
}

/// As [`require_seals`]; a store that is not sealed must also be owned by [`KEEPER`]. Only a
/// process with `CAP_CHOWN` can have made it.
///
/// # Errors
///
/// Those of [`require_seals`].
pub fn require_kept(fd: impl AsFd) -> Result<(), MemfdError> {
    require(fd.as_fd(), |stat| stat.st_uid == KEEPER && stat.st_gid == KEEPER)
}

/// Checks that nobody can change a memfd of another process any more ([`create_written`]), and that
/// it consists of ordinary pages.
///
/// # Errors
///
/// [`MemfdError::NotAMemfd`], [`MemfdError::MissingSeals`], [`MemfdError::OtherPages`].
pub fn require_written(fd: impl AsFd) -> Result<(), MemfdError> {
    /// `TMPFS_MAGIC` (include/uapi/linux/magic.h).
    const TMPFS: u64 = 0x0102_1994;
    let fd = fd.as_fd();
    let missing = WRITTEN_SEALS - rustix::fs::fcntl_get_seals(fd).map_err(MemfdError::NotAMemfd)?;
    if !missing.is_empty() {
        return Err(MemfdError::MissingSeals { missing });
    }
    let is_plain = rustix::fs::fstatfs(fd).is_ok_and(|stat| stat.f_type as u64 == TMPFS);
    if is_plain { Ok(()) } else { Err(MemfdError::OtherPages) }
}

fn require(fd: BorrowedFd<'_>, is_owned: impl Fn(&rustix::fs::Stat) -> bool) -> Result<(), MemfdError> {
    let missing = STORE_SEALS - rustix::fs::fcntl_get_seals(fd).map_err(MemfdError::NotAMemfd)?;
    let is_read_only = || rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDONLY);
    let is_kept = || rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_mode & 0o7777 == 0 && is_owned(&stat));
    if missing.is_empty() || missing == SealFlags::FUTURE_WRITE && is_read_only() && is_kept() {
        Ok(())
    } else {
        Err(MemfdError::MissingSeals { missing })
    }
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
    fallocate(fd, FallocateFlags::empty(), offset, len)
}

fn fallocate(fd: impl AsFd, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(&fd, mode, offset, len) {
            Err(Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

/// Copies page `index` of a file out, through the descriptor. Memory that has failed (hwpoison) is
/// an error here; through a mapping it would raise SIGBUS.
///
/// # Errors
///
/// `EIO`: the memory has failed; `UnexpectedEof`: the page lies behind the end.
pub fn read_page(fd: impl AsFd, index: usize, page: &mut [u8; PAGE_SIZE]) -> io::Result<()> {
    let mut done = 0;
    while done < PAGE_SIZE {
        match rustix::io::pread(&fd, &mut page[done..], (index * PAGE_SIZE + done) as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Bytes of memory (and swap) that a memfd uses, or of disk space that a file uses (`st_blocks`
/// times 512).
pub fn resident_bytes(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_blocks as u64 * 512)
}

#[cfg(test)]
mod tests;
