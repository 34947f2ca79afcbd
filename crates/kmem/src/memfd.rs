//! `memfd_create(2)`: sealed stores, and shared mappings that hand out no references.
//!
//! A *store* is a memfd that one process can write and no other ever will: it is mapped writable
//! first and sealed with [`STORE_SEALS`] then. `F_SEAL_FUTURE_WRITE` leaves the mapping that is
//! there writable and refuses every other way: `write(2)`, new writable shared mappings, hole
//! punching (through the mapping too: `MADV_REMOVE` fails with `EPERM`). Private mappings are
//! allowed, writes to them copy the page.
//!
//! So a store's memory is given back by dropping every mapping and descriptor of the whole store,
//! not page by page, and a process that has lost its [`SharedMap`] can never write the store again.
//!
//! Sources: `memfd_create(2)`, `fcntl(2)` "File sealing".

#![allow(unsafe_code)] // Memory shared with other processes is reached through pointers.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::uffd::{self, Features, Uffd};
use crate::{PAGE_SIZE, Range, mm};

/// What a store is sealed with: nobody can shrink it, grow it, write it anew, or change the seals.
pub const STORE_SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Words of a set of NUMA nodes: as many as any kernel has (`MAX_NUMNODES`).
const NODE_WORDS: usize = 16;

/// Why there is no memfd, or not one to trust.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemfdError {
    /// `memfd_create(2)` failed.
    #[error("creating memfd {name:?}: {errno}")]
    Create {
        /// Its name.
        name: String,
        /// The system's reason.
        errno: Errno,
    },
    /// It cannot be given its length.
    #[error("resizing a memfd to {len} bytes: {errno}")]
    Resize {
        /// Bytes asked for.
        len: usize,
        /// The system's reason.
        errno: Errno,
    },
    /// It cannot be mapped.
    #[error("mapping {len} bytes of a file: {errno}")]
    Map {
        /// Bytes asked for.
        len: usize,
        /// The system's reason.
        errno: Errno,
    },
    /// It cannot be sealed.
    #[error("sealing a memfd: {0}; F_SEAL_FUTURE_WRITE needs Linux 5.1 or newer")]
    Seal(Errno),
    /// It is no memfd, so it has no seals.
    #[error("not a memfd (its seals cannot be read: {0})")]
    NotAMemfd(Errno),
    /// Somebody could still change it.
    #[error("a memfd lacks the seals {missing:?}: its bytes could change or vanish, so it is not used")]
    MissingSeals {
        /// The seals that it lacks.
        missing: SealFlags,
    },
}

/// What [`SharedMap::fill`] goes through: a userfaultfd that is never asked to hold anybody up.
///
/// # Errors
///
/// As [`Uffd::new`]; filling needs Linux 5.19.
pub fn filler() -> Result<Uffd, uffd::CreateError> {
    Uffd::new(Features::WP | Features::WP_HUGETLBFS_SHMEM)
}

/// Creates a store of `len` bytes (a multiple of the page size), all zeros: see the module's page.
/// The map that is returned is the only way to write it, for ever. Memory is taken page by page as
/// it is written.
///
/// # Errors
///
/// [`MemfdError`]; nothing is left behind.
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
        // NOEXEC_SEAL is there since Linux 6.3.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        result => result,
    }
    .map_err(|errno| MemfdError::Create { name: name.to_owned(), errno })
}

/// The seals of a memfd.
///
/// # Errors
///
/// `EINVAL`: it is no memfd.
pub fn seals(fd: impl AsFd) -> io::Result<SealFlags> {
    Ok(rustix::fs::fcntl_get_seals(fd)?)
}

/// Checks that a descriptor from somebody else is a memfd with at least [`STORE_SEALS`].
///
/// # Errors
///
/// [`MemfdError::NotAMemfd`], [`MemfdError::MissingSeals`].
pub fn require_seals(fd: impl AsFd) -> Result<(), MemfdError> {
    let missing = STORE_SEALS - rustix::fs::fcntl_get_seals(fd).map_err(MemfdError::NotAMemfd)?;
    if missing.is_empty() { Ok(()) } else { Err(MemfdError::MissingSeals { missing }) }
}

/// What tells a file from every other one, as long as it is open somewhere; `/proc/PID/maps` shows
/// the same.
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

/// Takes the memory (or disk space) for a part of a file now, so that writing it later cannot fail
/// (`fallocate(2)` with mode 0). `offset` and `len` in bytes.
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

/// Bytes of memory (and swap) that a memfd takes, or of disk that a file takes (`st_blocks` times
/// 512).
///
/// # Errors
///
/// Those of `fstat(2)`.
pub fn resident_bytes(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_blocks as u64 * 512)
}

/// A shared mapping of a file from its start.
///
/// Other processes, and other threads through the same map, may change the memory at any moment. So
/// no references into it are given out, except to atomics: pages are copied in and out, eight bytes
/// at a time, each eight whole. A page that is being written while it is copied comes out as a
/// mixture; keeping writers apart is the caller's business.
///
/// Touching a part that the file does not have (any more) raises SIGBUS: map only files that cannot
/// shrink.
#[derive(Debug)]
pub struct SharedMap {
    range: Range,
    writable: bool,
}

/// Maps `len` bytes of a file from its start for reading.
///
/// # Errors
///
/// [`MemfdError::Map`]: `EINVAL` when `len` is 0; `EACCES` for a descriptor that cannot be read; `ENOMEM`.
pub fn map_readonly(fd: impl AsFd, len: usize) -> Result<SharedMap, MemfdError> {
    map(fd, len, false)
}

/// Maps `len` bytes of a file from its start for reading and writing.
///
/// # Errors
///
/// As [`map_readonly`]; `EPERM` for a file sealed against writing.
pub fn map_shared(fd: impl AsFd, len: usize) -> Result<SharedMap, MemfdError> {
    map(fd, len, true)
}

/// What can hold a huge page is mapped at a multiple of one, or the kernel could not map it as
/// such.
fn map(fd: impl AsFd, len: usize, writable: bool) -> Result<SharedMap, MemfdError> {
    let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
    let fd = fd.as_fd().as_raw_fd();
    let failed = |errno| MemfdError::Map { len, errno };
    if len < HUGE_PAGE_SIZE {
        // SAFETY: a mapping that is not fixed replaces nothing.
        let start = unsafe { mm::mmap(Range::new(0, len), protection, libc::MAP_SHARED, fd, 0) }.map_err(failed)?;
        return Ok(SharedMap { range: Range::new(start, len), writable });
    }
    let room = len.next_multiple_of(PAGE_SIZE) + HUGE_PAGE_SIZE;
    let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping that is not fixed replaces nothing.
    let reserved = unsafe { mm::mmap(Range::new(0, room), libc::PROT_NONE, nothing, -1, 0) }.map_err(failed)?;
    let range = Range::new(reserved.next_multiple_of(HUGE_PAGE_SIZE), len.next_multiple_of(PAGE_SIZE));
    let (head, tail) =
        (Range::new(reserved, range.start - reserved), Range::new(range.end(), reserved + room - range.end()));
    // SAFETY: it replaces a part of what was reserved just now, which nobody knows of.
    let mapped = unsafe { mm::mmap(range, protection, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0) };
    if let Err(errno) = mapped {
        // SAFETY: as above.
        let _ = unsafe { mm::unmap(Range::new(reserved, room)) };
        return Err(failed(errno));
    }
    for rest in [head, tail].into_iter().filter(|rest| rest.len > 0) {
        // SAFETY: as above. Failing, it stays reserved: addresses, no memory.
        let _ = unsafe { mm::unmap(rest) };
    }
    Ok(SharedMap { range: Range::new(range.start, len), writable })
}

const WORDS: usize = PAGE_SIZE / 8;

/// Bytes of a huge page of x86-64, and of other processors with pages of 4 KiB.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

impl SharedMap {
    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.range.start)
    }

    /// Bytes mapped.
    #[allow(clippy::len_without_is_empty)] // An empty mapping does not exist.
    pub fn len(&self) -> usize {
        self.range.len
    }

    /// Where it is mapped.
    pub fn range(&self) -> Range {
        self.range
    }

    /// The eight bytes at a byte offset.
    fn word(&self, offset: usize) -> *mut u64 {
        assert!(offset.is_multiple_of(8), "offset {offset} of a word is not a multiple of 8");
        let fits = offset.checked_add(8).is_some_and(|end| end <= self.range.len);
        assert!(fits, "offset {offset} lies outside of {} mapped bytes", self.range.len);
        self.as_ptr().wrapping_add(offset).cast()
    }

    /// A page's words.
    fn page(&self, index: usize) -> *mut u64 {
        let pages = self.range.pages();
        assert!(index < pages, "page {index} of {pages} mapped pages");
        self.as_ptr().wrapping_add(index * PAGE_SIZE).cast()
    }

    /// Makes one huge page of the part at byte `offset`, a multiple of [`HUGE_PAGE_SIZE`], whatever
    /// the system's settings for huge pages of files are (except `deny`). Some of the part must
    /// have memory already. What it holds stays as it is; the rest becomes zeros.
    ///
    /// Source: `madvise(2)`, `MADV_COLLAPSE` (Linux 6.1).
    ///
    /// # Errors
    ///
    /// `EINVAL`: the kernel knows no such thing, or is told to make none; `ENOMEM`, `EAGAIN`: no
    /// huge page is to be had now.
    ///
    /// # Panics
    ///
    /// When the part lies outside or `offset` is no such multiple.
    pub fn make_huge(&self, offset: usize) -> io::Result<()> {
        assert!(offset.is_multiple_of(HUGE_PAGE_SIZE), "offset {offset} is no multiple of a huge page");
        let fits = offset.checked_add(HUGE_PAGE_SIZE).is_some_and(|end| end <= self.range.len);
        assert!(fits, "offset {offset} of a huge page lies outside of {} mapped bytes", self.range.len);
        let part = Range::new(self.range.start + offset, HUGE_PAGE_SIZE);
        // SAFETY: the bytes of the part stay as they are.
        Ok(unsafe { mm::advise(part, linux_raw_sys::general::MADV_COLLAPSE as i32) }?)
    }

    /// Makes memory that the file is given from now on come from this NUMA node, if the node has
    /// any.
    ///
    /// Source: `mbind(2)`, `MPOL_PREFERRED`: of a shared mapping it is the file's policy.
    ///
    /// # Errors
    ///
    /// `EINVAL`: there is no such node; `ENOSYS`: the kernel knows of none.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        let mut nodes = [0u64; NODE_WORDS];
        let word = nodes.get_mut(node as usize / 64).ok_or(Errno::INVAL)?;
        *word = 1 << (node % 64);
        let mask = nodes.as_ptr().expose_provenance();
        // The kernel takes one bit fewer than it is told.
        let args = [self.range.start, self.range.len, libc::MPOL_PREFERRED as usize, mask, NODE_WORDS * 64 + 1, 0];
        // SAFETY: the kernel reads as many bits of the mask; no byte of the mapping changes.
        unsafe { crate::raw::syscall(libc::SYS_mbind, args) }?;
        Ok(())
    }

    /// The NUMA node that the file's memory should come from, if [`SharedMap::prefer_node`] has
    /// named one.
    ///
    /// Source: `get_mempolicy(2)`, `MPOL_F_ADDR`.
    pub fn preferred_node(&self) -> Option<u32> {
        // `linux/mempolicy.h`.
        const MPOL_F_ADDR: usize = 2;
        let (mut mode, mut nodes) = (0i32, [0u64; NODE_WORDS]);
        let (mode_at, mask) = ((&raw mut mode).expose_provenance(), nodes.as_mut_ptr().expose_provenance());
        let args = [mode_at, mask, NODE_WORDS * 64 + 1, self.range.start, MPOL_F_ADDR];
        // SAFETY: the kernel writes the mode and as many bits of the mask, which live until the call is
        // over.
        unsafe { crate::raw::syscall(libc::SYS_get_mempolicy, args) }.ok()?;
        let word = nodes.iter().position(|&word| word != 0).filter(|_| mode == libc::MPOL_PREFERRED)?;
        Some(word as u32 * 64 + nodes[word].trailing_zeros())
    }

    /// Copies page `index` out.
    ///
    /// # Panics
    ///
    /// When it lies outside.
    pub fn read_page(&self, index: usize, page: &mut [u8; PAGE_SIZE]) {
        let words = self.page(index);
        for (i, bytes) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            debug_assert!(i < WORDS);
            // SAFETY: word `i` of a mapped page, aligned, accessed atomically by everybody in this process; a
            // relaxed load of eight bytes is one plain load, which is allowed on read-only memory.
            *bytes = unsafe { AtomicU64::from_ptr(words.add(i)) }.load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    /// Copies `page` into page `index`.
    ///
    /// # Panics
    ///
    /// When it lies outside, and when the map is for reading only.
    pub fn write_page(&self, index: usize, page: &[u8; PAGE_SIZE]) {
        assert!(self.writable, "writing page {index} of a map made for reading only");
        let words = self.page(index);
        for (i, bytes) in page.as_chunks::<8>().0.iter().enumerate() {
            debug_assert!(i < WORDS);
            // SAFETY: word `i` of a mapped and writable page, aligned, accessed atomically by everybody in this
            // process.
            unsafe { AtomicU64::from_ptr(words.add(i)) }.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    }

    /// Whether page `index` has these bytes.
    ///
    /// # Panics
    ///
    /// When it lies outside.
    pub fn page_equals(&self, index: usize, page: &[u8; PAGE_SIZE]) -> bool {
        let words = self.page(index);
        page.as_chunks::<8>().0.iter().enumerate().all(|(i, bytes)| {
            debug_assert!(i < WORDS);
            // SAFETY: as in `read_page`.
            unsafe { AtomicU64::from_ptr(words.add(i)) }.load(Ordering::Relaxed) == u64::from_ne_bytes(*bytes)
        })
    }

    /// Makes [`SharedMap::fill`] possible for the part of the file between two bytes. Where huge
    /// pages are wanted it must come after them.
    ///
    /// # Errors
    ///
    /// As [`Uffd::register_wp`]: the kernel may know no such thing for files.
    ///
    /// # Panics
    ///
    /// When the part lies outside.
    pub fn register(&self, filler: &Uffd, part: std::ops::Range<usize>) -> io::Result<()> {
        Ok(filler.register_wp(self.part(part))?)
    }

    /// Ends what [`SharedMap::register`] began. What was filled stays.
    ///
    /// # Panics
    ///
    /// When the part lies outside.
    pub fn unregister(&self, filler: &Uffd, part: std::ops::Range<usize>) {
        // Fails only where nothing is mapped.
        let _ = filler.unregister(self.part(part));
    }

    fn part(&self, part: std::ops::Range<usize>) -> Range {
        assert!(part.start < part.end && part.end <= self.range.len, "{part:?} of {} mapped bytes", self.range.len);
        Range::new(self.range.start + part.start, part.end - part.start)
    }

    /// Gives pages from `index` on memory, and these bytes, at one stroke: they are not cleared
    /// first, and take no faults. They have none yet, and were registered with the same
    /// [`filler`]. Returns how many were written; 0: the kernel would not.
    ///
    /// # Panics
    ///
    /// When one lies outside, and when the map is for reading only.
    pub fn fill(&self, filler: &Uffd, index: usize, pages: &[[u8; PAGE_SIZE]]) -> usize {
        let Some(last) = pages.len().checked_sub(1) else { return 0 };
        assert!(self.writable, "writing page {index} of a map made for reading only");
        let (first, _) = (self.page(index), self.page(index + last));
        // SAFETY: pages of this mapping, to which this process holds no references; who reads them
        // meanwhile sees zeros or these bytes.
        unsafe { filler.copy(first.expose_provenance(), pages.as_flattened()) }.map_or(0, |bytes| bytes / PAGE_SIZE)
    }

    /// The eight bytes at byte `offset` as an atomic.
    ///
    /// # Panics
    ///
    /// When `offset` lies outside or is no multiple of 8, and when the map is for reading only (see
    /// [`SharedMap::load_u64`]).
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(self.writable, "an atomic in a map made for reading only");
        // SAFETY: aligned, mapped and writable as long as `self` lives; everybody here accesses it
        // atomically.
        unsafe { AtomicU64::from_ptr(self.word(offset)) }
    }

    /// Loads the eight bytes at byte `offset`; works on maps for reading only too.
    ///
    /// # Panics
    ///
    /// When `offset` lies outside or is no multiple of 8.
    pub fn load_u64(&self, offset: usize) -> u64 {
        // SAFETY: aligned and mapped; an acquiring load of eight bytes is one plain load on 64-bit
        // processors.
        unsafe { AtomicU64::from_ptr(self.word(offset)) }.load(Ordering::Acquire)
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: the map is ours, and what was borrowed from it cannot outlive it. It cannot fail: the
        // range is the one that mmap returned, and taking a whole mapping away needs no new one.
        let _ = unsafe { mm::unmap(self.range) };
    }
}

#[cfg(test)]
mod tests;
