//! The memory of a map: one mapping, whose missing pages a userfaultfd reports.
//!
//! A page appears whole or not at all: it is read elsewhere, checked, and put in its place by
//! `UFFDIO_COPY`. After a page is dropped, the next touch waits for it to be filled again, with the
//! same bytes. So readers see nothing but the mblocks' data, and may hold ordinary references.
//!
//! There are two kinds of memory ([`Backing`]):
//!
//! - **Anonymous.** Scattered pages are dropped by one `process_madvise(2)`, which interrupts the
//!   other processors once, to flush their address caches. Nothing tells which pages were used.
//! - **A memfd.** A page is dropped by punching a hole, which interrupts them for every page: the
//!   page table entries that `UFFDIO_COPY` makes are dirty, and for a dirty entry of a file the
//!   kernel flushes at once. But pages can be taken out of the page tables without being dropped,
//!   which shows the ones that are used. Write-protect mode is registered besides, and never used:
//!   the kernel then maps exactly the page that was touched, and not its neighbours ("fault
//!   around").
//!
//! Sources: `userfaultfd(2)`, `ioctl_userfaultfd(2)`, Documentation/admin-guide/mm/userfaultfd.rst.

#![allow(unsafe_code)] // Mappings and ioctls.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64};

use kmem::pidfd::PidFd;
use kmem::uffd::{CreateError, Features, Uffd};
use kmem::{Range, mm};
use linux_raw_sys::general as sys;
use linux_raw_sys::ioctl as op;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Opcode, Updater, opcode};

use crate::BLOCK;

/// `UFFD_FEATURE_MISSING_SHMEM` (Linux 4.11): missing pages of shared memory.
const MISSING_SHMEM: Features = Features::from_bits_retain(sys::UFFD_FEATURE_MISSING_SHMEM as u64);

const _: () = assert!(size_of::<sys::uffdio_copy>() == 40);
const _: () = assert!(size_of::<sys::uffdio_register>() == 32);

/// `UFFDIO_POISON` = `_IOWR(0xAA, 0x08, struct uffdio_poison)`.
const POISON: Opcode = opcode::read_write::<sys::uffdio_poison>(0xAA, 8);
const _: () = assert!(POISON == 0xC020_AA08);

/// A userfaultfd for windows.
pub(crate) fn userfaultfd() -> Result<Uffd, CreateError> {
    Uffd::new(MISSING_SHMEM | Features::WP | Features::WP_HUGETLBFS_SHMEM | Features::POISON)
}

/// Bytes of a huge page.
pub(crate) const HUGE: usize = 2 << 20;

/// Which memory a window has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backing {
    /// Cheap to drop.
    Anonymous,
    /// Shows which pages are used.
    Memfd,
}

/// One mapping.
#[derive(Debug)]
pub(crate) struct Window {
    /// `None`: anonymous memory.
    memfd: Option<OwnedFd>,
    range: Range,
}

impl Window {
    /// A window of `pages` missing pages, reported to `uffd`.
    pub(crate) fn new(uffd: &Uffd, pages: usize, backing: Backing) -> io::Result<Self> {
        let len = pages * BLOCK;
        let memfd = match backing {
            Backing::Anonymous => None,
            Backing::Memfd => Some(memfd(len)?),
        };
        let window = Self { range: map_aligned(memfd.as_ref(), len, 0)?, memfd };
        // A child would see zeros where its pages are not filled; now it has no mapping there.
        // SAFETY: the range is this window; the advice changes no contents.
        unsafe { mm::advise(window.range, libc::MADV_DONTFORK) }?;
        let range = sys::uffdio_range { start: window.range.start as u64, len: len as u64 };
        let watched = if window.is_shared() { sys::UFFDIO_REGISTER_MODE_WP } else { 0 };
        let mode = u64::from(sys::UFFDIO_REGISTER_MODE_MISSING | watched);
        let mut register = sys::uffdio_register { range, mode, ioctls: 0 };
        // SAFETY: `uffdio_register` is UFFDIO_REGISTER's argument.
        unsafe { ioctl::ioctl(uffd, Updater::<{ op::UFFDIO_REGISTER }, _>::new(&mut register)) }?;
        // With `mlockall(MCL_FUTURE)` the kernel has filled the mapping with zeros by now. No one
        // has seen them; pages that are missing from here on are reported.
        window.drop_pages(0, pages)?;
        Ok(window)
    }

    /// Whether page tables can show which pages are used.
    pub(crate) fn is_shared(&self) -> bool {
        self.memfd.is_some()
    }

    pub(crate) fn range(&self) -> Range {
        self.range
    }

    /// The bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        let start: *const u8 = std::ptr::with_exposed_provenance(self.range.start);
        // SAFETY: mapped and readable as long as `self` lives. Nothing can write to it: the mapping
        // is read-only, and no one else has its memory. Pages come and go, but a reader always
        // finds the same bytes in each (see the module's header).
        unsafe { std::slice::from_raw_parts(start, self.range.len) }
    }

    /// Puts whole pages in their place; [`Window::wake`] wakes the threads that wait for them.
    /// Gives how many from the front were put there; fewer than asked for when the next one is
    /// there already.
    pub(crate) fn fill(&self, uffd: &Uffd, first: usize, pages: &[u8]) -> io::Result<usize> {
        assert!(pages.len().is_multiple_of(BLOCK) && (first * BLOCK).saturating_add(pages.len()) <= self.range.len);
        let mut done = 0;
        while done < pages.len() {
            let mut copy = sys::uffdio_copy {
                dst: (self.range.start + first * BLOCK + done) as u64,
                src: pages[done..].as_ptr().expose_provenance() as u64,
                len: (pages.len() - done) as u64,
                mode: u64::from(sys::UFFDIO_COPY_MODE_DONTWAKE),
                copy: 0,
            };
            // SAFETY: `uffdio_copy` is UFFDIO_COPY's argument; it reads `pages` and writes missing
            // pages of this window.
            let result = unsafe { ioctl::ioctl(uffd, Updater::<{ op::UFFDIO_COPY }, _>::new(&mut copy)) };
            match result {
                Ok(()) => return Ok(pages.len() / BLOCK),
                Err(Errno::EXIST) => return Ok(done / BLOCK),
                // Interrupted, or part of it done: `copy` says how much.
                Err(Errno::AGAIN) => done += usize::try_from(copy.copy).unwrap_or(0),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(done / BLOCK)
    }

    /// Wakes the threads that wait for these pages.
    pub(crate) fn wake(&self, uffd: &Uffd, first: usize, count: usize) {
        let _ = uffd.wake(Range::new(self.range.start + first * BLOCK, count * BLOCK));
    }

    /// Makes every access to a page raise SIGBUS, until it is dropped.
    pub(crate) fn poison(&self, uffd: &Uffd, page: usize) -> io::Result<()> {
        let range = sys::uffdio_range { start: (self.range.start + page * BLOCK) as u64, len: BLOCK as u64 };
        let mut poison = sys::uffdio_poison { range, mode: 0, updated: 0 };
        // SAFETY: `uffdio_poison` is UFFDIO_POISON's argument.
        match unsafe { ioctl::ioctl(uffd, Updater::<POISON, _>::new(&mut poison)) } {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Drops pages; their memory is free. Never a part of a huge page of a memfd: the kernel would
    /// fill the part with zeros first, then split the huge page, and leave the zeros where it
    /// cannot (somebody else has it in hand, a fault is enough).
    pub(crate) fn drop_pages(&self, first: usize, count: usize) -> io::Result<()> {
        let Some(memfd) = &self.memfd else {
            let range = Range::new(self.range.start + first * BLOCK, count * BLOCK);
            // SAFETY: the range is inside this window. A page that is dropped is missing, not zero:
            // the next reader waits until it is filled with the same bytes.
            return Ok(unsafe { mm::advise(range, libc::MADV_DONTNEED_LOCKED) }?);
        };
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        loop {
            match rustix::fs::fallocate(memfd, how, (first * BLOCK) as u64, (count * BLOCK) as u64) {
                Err(Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Drops scattered runs of pages (first page, count). Of anonymous memory all at once, where
    /// Linux allows it (6.13), with one flush of the processors' address caches (6.16).
    pub(crate) fn drop_runs(&self, process: &Process, runs: &[(usize, usize)]) {
        let base = self.range.start;
        for runs in runs.chunks(MOST_RUNS) {
            let done = match &process.0 {
                Some(process) if !self.is_shared() && runs.len() > 1 => {
                    let ranges = runs.iter().map(|&(first, count)| Range::new(base + first * BLOCK, count * BLOCK));
                    // SAFETY: the ranges are inside this window. A page that is dropped is missing,
                    // not zero: the next reader waits until it is filled with the same bytes.
                    unsafe { advise_all(process, ranges, libc::MADV_DONTNEED_LOCKED) }
                }
                _ => 0,
            };
            // The rest one by one. Whether it works or not: a page that stays is found there when
            // it is loaded again.
            let mut end = 0;
            for &(first, count) in runs {
                end += count * BLOCK;
                if end > done {
                    let _ = self.drop_pages(first, count);
                }
            }
        }
    }

    /// Turns a whole huge page's worth of loaded pages into one, where the kernel can
    /// (`MADV_COLLAPSE`, Linux 6.1). It refuses when a page is missing.
    pub(crate) fn collapse(&self, first: usize) -> bool {
        let Some(memfd) = &self.memfd else {
            let range = Range::new(self.range.start + first * BLOCK, HUGE);
            // SAFETY: the range is inside this window; the contents stay the same.
            return unsafe { mm::advise(range, libc::MADV_COLLAPSE) }.is_ok();
        };
        // A mapping that is registered for write-protection cannot be asked for it, but any other
        // one can.
        let Ok(other) = map_aligned(Some(memfd), HUGE, (first * BLOCK) as i64) else { return false };
        // SAFETY: the range was just mapped; the contents stay the same.
        let result = unsafe { mm::advise(other, libc::MADV_COLLAPSE) };
        // SAFETY: no other code has the descriptor or the address.
        let _ = unsafe { mm::unmap(other) };
        result.is_ok()
    }

    /// Takes pages of a memfd out of the page tables, not out of memory: the next touch puts one
    /// back, and that shows.
    pub(crate) fn forget_accesses(&self, first: usize, count: usize) {
        if !self.is_shared() {
            return;
        }
        let range = Range::new(self.range.start + first * BLOCK, count * BLOCK);
        // SAFETY: the range is inside this window. Of a shared mapping this drops page table
        // entries only; the memfd keeps the bytes.
        let _ = unsafe { mm::advise(range, libc::MADV_DONTNEED) };
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and what was borrowed from it is gone.
        let _ = unsafe { mm::unmap(self.range) };
    }
}

/// A new memfd.
fn memfd(len: usize) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC;
    let memfd = match rustix::fs::memfd_create("mcache", flags | MemfdFlags::NOEXEC_SEAL) {
        // NOEXEC_SEAL is there since Linux 6.3.
        Err(Errno::INVAL) => rustix::fs::memfd_create("mcache", flags),
        result => result,
    }?;
    rustix::fs::ftruncate(&memfd, len as u64)?;
    Ok(memfd)
}

/// This process, as `process_madvise(2)` wants it.
#[derive(Debug)]
pub(crate) struct Process(Option<PidFd>);

impl Process {
    pub(crate) fn this() -> Self {
        Self(PidFd::open(std::process::id() as i32).ok())
    }
}

/// Entries of one vector: the kernel's limit (`UIO_MAXIOV`).
const MOST_RUNS: usize = 1024;

/// `process_madvise(2)`; gives how many bytes were advised, from the first range on. 0 where the
/// kernel refuses.
///
/// # Safety
/// No code relies on what the advice changes in any of the ranges.
unsafe fn advise_all(process: &PidFd, ranges: impl Iterator<Item = Range>, advice: i32) -> usize {
    let place = std::ptr::with_exposed_provenance_mut;
    let vector: Vec<libc::iovec> =
        ranges.map(|range| libc::iovec { iov_base: place(range.start), iov_len: range.len }).collect();
    let (fd, advice) = (process.as_fd().as_raw_fd(), libc::c_long::from(advice));
    // SAFETY: the vector lives during the call, and the kernel only reads it. By the contract no
    // code relies on what the advice changes in the ranges that it names.
    let done = unsafe { libc::syscall(libc::SYS_process_madvise, fd, vector.as_ptr(), vector.len(), advice, 0) };
    usize::try_from(done).unwrap_or(0)
}

/// Maps a file, or anonymous memory, for reading, from a huge page's boundary on.
fn map_aligned(file: Option<&OwnedFd>, len: usize, offset: i64) -> io::Result<Range> {
    let map = |at: *mut libc::c_void, len, fd, flags, offset| {
        // SAFETY: either not fixed, then nothing is replaced; or inside of what was reserved here
        // and nobody has used.
        let start = unsafe { libc::mmap(at, len, libc::PROT_READ, flags, fd, offset) };
        if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start) }
    };
    let (fd, kind) = match file {
        Some(file) => (file.as_raw_fd(), libc::MAP_SHARED),
        None => (-1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
    };
    if len < HUGE {
        let start = map(std::ptr::null_mut(), len, fd, kind, offset)?;
        return Ok(Range::new(start.expose_provenance(), len));
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let reserved = Range::new(map(std::ptr::null_mut(), len + HUGE, -1, flags, 0)?.expose_provenance(), len + HUGE);
    let start = reserved.start.next_multiple_of(HUGE);
    let range = Range::new(start, len);
    let at = std::ptr::with_exposed_provenance_mut(start);
    let result = map(at, len, fd, kind | libc::MAP_FIXED, offset);
    let ends =
        [Range::new(reserved.start, start - reserved.start), Range::new(range.end(), reserved.end() - range.end())];
    for end in ends.into_iter().filter(|end| end.len > 0) {
        // SAFETY: the rest of what was reserved here; nobody uses it.
        let _ = unsafe { mm::unmap(end) };
    }
    result.map(|_| range)
}

/// Counters, zero at first; memory is taken as they are written.
pub(crate) fn zeroed_u8(len: usize) -> Box<[AtomicU8]> {
    let plain = Box::into_raw(vec![0u8; len].into_boxed_slice());
    // SAFETY: `AtomicU8` has the size, alignment and valid values of `u8`; the box is handed over
    // whole.
    unsafe { Box::from_raw(plain as *mut [AtomicU8]) }
}

/// As [`zeroed_u8`].
pub(crate) fn zeroed_u64(len: usize) -> Box<[AtomicU64]> {
    let plain = Box::into_raw(vec![0u64; len].into_boxed_slice());
    // SAFETY: on the 64-bit systems that this crate is for, `AtomicU64` is to `u64` what `AtomicU8`
    // is to `u8`.
    unsafe { Box::from_raw(plain as *mut [AtomicU64]) }
}
