//! Changing the mappings of this process: `mmap(2)`, `munmap(2)`, `mremap(2)`, `madvise(2)`.
//!
//! Every call goes to the kernel by number (`syscall(2)`). A preloaded library that defines `mmap`
//! and `madvise` itself can therefore use this module inside its own definitions without being
//! entered again. `errno` is changed by a failing call, as by the calls themselves.

#![allow(unsafe_code)] // Mapping over addresses is what this module is for.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::Range;
use crate::syscall::syscall;

/// `mmap(2)` by number.
///
/// # Safety
///
/// With `MAP_FIXED` among the flags, see [`map_fixed_private`].
pub(crate) unsafe fn mmap(
    range: Range,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: u64,
) -> Result<usize, Errno> {
    // SAFETY: the kernel checks every argument; what a fixed mapping replaces is the caller's promise.
    unsafe {
        syscall(
            libc::SYS_mmap,
            [range.start, range.len, protection as usize, flags as usize, fd as usize, offset as usize],
        )
    }
}

const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Maps `range.len` bytes of a file from `file_offset` over `range`: readable, writable, private (a
/// write copies the page), with no swap reserved.
///
/// # Safety
///
/// Whatever was mapped there is gone: nobody may hold a reference into the range unless the file's
/// bytes equal what the range held, and nobody may be writing there. The file must stay at least as
/// long as the mapped part.
///
/// # Errors
///
/// `ENOMEM` when the process has `vm.max_map_count` mappings; `EINVAL` when something is not page
/// aligned; `EBADF`, `EACCES` and `EPERM` for the descriptor.
pub unsafe fn map_fixed_private(fd: BorrowedFd<'_>, range: Range, file_offset: u64) -> Result<(), Errno> {
    // SAFETY: as promised by the caller.
    unsafe { mmap(range, READ_WRITE, PRIVATE | libc::MAP_FIXED, fd.as_raw_fd(), file_offset) }.map(drop)
}

/// Maps untouched anonymous memory over `range`: readable, writable, private; it reads as zeros and
/// costs nothing until it is touched.
///
/// # Safety
///
/// Whatever was mapped there is gone: nobody may rely on what the range held.
///
/// # Errors
///
/// As [`map_fixed_private`].
pub unsafe fn map_fixed_anonymous(range: Range) -> Result<(), Errno> {
    // SAFETY: as promised by the caller.
    unsafe { mmap(range, READ_WRITE, PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS, -1, 0) }.map(drop)
}

/// Maps `len` bytes of untouched anonymous memory (readable, writable, private, no swap reserved)
/// where the kernel likes, and returns the address.
///
/// # Safety
///
/// None needed for the call itself; the memory is the caller's to [`unmap`].
///
/// # Errors
///
/// `ENOMEM`; `EINVAL` when `len` is 0.
pub unsafe fn map_anonymous(len: usize) -> Result<usize, Errno> {
    // SAFETY: a mapping that is not fixed replaces nothing.
    unsafe { mmap(Range::new(0, len), READ_WRITE, PRIVATE | libc::MAP_ANONYMOUS, -1, 0) }
}

/// Removes every mapping in `range`.
///
/// # Safety
///
/// Nobody may use the range again before something else is mapped there.
///
/// # Errors
///
/// `EINVAL` when something is not page aligned or the range is empty; `ENOMEM` when a mapping would
/// be cut in two and the process has `vm.max_map_count` of them.
pub unsafe fn unmap(range: Range) -> Result<(), Errno> {
    // SAFETY: as promised by the caller.
    unsafe { syscall(libc::SYS_munmap, [range.start, range.len]) }.map(drop)
}

/// Moves the mapping of `from` to the address `to`, in place of whatever is mapped there
/// (`MREMAP_MAYMOVE | MREMAP_FIXED`, length unchanged).
///
/// # Safety
///
/// Nobody may hold references into either range.
///
/// # Errors
///
/// `EFAULT` when `from` is more than one mapping (before Linux 6.17; since then it may be several);
/// `EINVAL` when something is not page aligned or the two overlap; `ENOMEM`.
pub unsafe fn remap_fixed(from: Range, to: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: as promised by the caller.
    unsafe { syscall(libc::SYS_mremap, [from.start, from.len, from.len, flags as usize, to]) }.map(drop)
}

/// `madvise(2)` with one of the `MADV_*` values.
///
/// # Safety
///
/// Some advice changes memory (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`): nobody may rely on
/// what the range held.
///
/// # Errors
///
/// Those of the manual page; `EAGAIN` is worth a second try.
pub unsafe fn advise(range: Range, advice: i32) -> Result<(), Errno> {
    // SAFETY: as promised by the caller.
    unsafe { syscall(libc::SYS_madvise, [range.start, range.len, advice as usize]) }.map(drop)
}
