//! The system calls that the agent passes on or needs for itself, past the C library's symbols
//! (which are the agent's own).

#![allow(unsafe_code)] // System calls.

use std::ffi::c_int;

/// What the kernel answered: a value, or an errno.
pub type Answer = Result<usize, c_int>;

/// This thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: the C library gives every thread its own.
    unsafe { *libc::__errno_location() }
}

/// Sets this thread's `errno`.
pub fn set_errno(value: c_int) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}

/// One raw system call; leaves `errno` alone.
///
/// # Safety
/// As the system call demands.
unsafe fn call(number: libc::c_long, args: [usize; 6]) -> Answer {
    let before = errno();
    // SAFETY: the caller's.
    let value = unsafe { libc::syscall(number, args[0], args[1], args[2], args[3], args[4], args[5]) };
    if value == -1 {
        let error = errno();
        set_errno(before);
        return Err(error);
    }
    Ok(value as usize)
}

/// `mmap(2)`.
///
/// # Safety
/// With `MAP_FIXED` it replaces what is there.
pub unsafe fn mmap(start: usize, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> Answer {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_mmap, [start, len, prot as usize, flags as usize, fd as usize, offset as usize]) }
}

/// `munmap(2)`.
///
/// # Safety
/// Nobody may use the memory afterwards.
pub unsafe fn munmap(start: usize, len: usize) -> Answer {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_munmap, [start, len, 0, 0, 0, 0]) }
}

/// `mremap(2)`.
///
/// # Safety
/// As for [`munmap`] of the old range, and of the new one with `MREMAP_FIXED`.
pub unsafe fn mremap(old: usize, old_len: usize, new_len: usize, flags: c_int, new: usize) -> Answer {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_mremap, [old, old_len, new_len, flags as usize, new, 0]) }
}

/// `madvise(2)`.
///
/// # Safety
/// Some advice discards what is there.
pub unsafe fn madvise(start: usize, len: usize, advice: c_int) -> Answer {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_madvise, [start, len, advice as usize, 0, 0, 0]) }
}

/// `process_madvise(2)` on this process itself (`PIDFD_SELF`, Linux 6.14). Returns how many bytes
/// were advised.
///
/// # Safety
/// As for [`madvise`] of each part.
pub unsafe fn madvise_many(parts: &[libc::iovec], advice: c_int) -> Answer {
    /// Not in the `libc` crate yet (include/uapi/linux/pidfd.h).
    const PIDFD_SELF: isize = -10_000;
    let (pidfd, vectors) = (PIDFD_SELF as usize, parts.as_ptr() as usize);
    // SAFETY: the caller's; the list is readable for its length.
    unsafe { call(libc::SYS_process_madvise, [pidfd, vectors, parts.len(), advice as usize, 0, 0]) }
}

/// `mprotect(2)`.
///
/// # Safety
/// The memory's users must cope.
pub unsafe fn mprotect(start: usize, len: usize, prot: c_int) -> Answer {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_mprotect, [start, len, prot as usize, 0, 0, 0]) }
}

/// `pkey_mprotect(2)`.
///
/// # Safety
/// As for [`mprotect`].
pub unsafe fn pkey_mprotect(start: usize, len: usize, prot: c_int, key: c_int) -> Answer {
    // SAFETY: the caller's.
    unsafe { call(libc::SYS_pkey_mprotect, [start, len, prot as usize, key as usize, 0, 0]) }
}

/// Maps fresh anonymous memory; `len` is rounded up to pages by the kernel.
pub fn map_anonymous(len: usize) -> Answer {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: replaces nothing: the kernel chooses a free place.
    unsafe { mmap(0, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }
}

/// Writes to standard error, past every buffer and lock. Nobody can be told when that fails.
pub fn print(text: &[u8]) {
    // SAFETY: the buffer is readable for its length.
    let _ = unsafe { call(libc::SYS_write, [2, text.as_ptr() as usize, text.len(), 0, 0, 0]) };
}

/// Whether any page of the range is not mapped at all (`mincore(2)` answers `ENOMEM`).
pub fn has_hole(range: kmem::range::Range) -> bool {
    let mut residency = [0u8; 512];
    (range.start..range.end()).step_by(residency.len() * kmem::PAGE_SIZE).any(|start| {
        let len = (range.end() - start).min(residency.len() * kmem::PAGE_SIZE);
        // SAFETY: the vector has a byte for each page asked about.
        let answer = unsafe { call(libc::SYS_mincore, [start, len, residency.as_mut_ptr() as usize, 0, 0, 0]) };
        answer == Err(libc::ENOMEM)
    })
}
