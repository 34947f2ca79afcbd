//! System calls by number: the one place of the project that enters the kernel this way.
//!
//! The C library's symbols are not used, because the agent defines some of them itself (`mmap`,
//! `munmap`, `mremap`, `madvise`, `mprotect`, `pkey_mprotect`). Code that serves such a symbol can
//! therefore call this module without entering itself again. For the same reason nothing here
//! allocates, takes a lock, or changes `errno`: the answer holds the error.
//!
//! `syscall(2)` is variadic: an `int` passed to it may leave the upper half of its register
//! undefined, which the kernel reads where it expects a `long`. Here arguments are `usize` by type.
//!
//! The functions named after system calls take and return what the kernel does; their errors are
//! those of the manual pages. Typed ones stand in [`crate::mm`].

#![allow(unsafe_code)] // System calls.

use std::ffi::{c_int, c_long};

use rustix::io::Errno;

/// What the kernel returned: a value or an error.
pub type Answer = Result<usize, Errno>;

/// The calling thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: the function returns the address of this thread's errno, valid while the thread runs.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(value: c_int) {
    // SAFETY: the function returns the address of this thread's errno, which only this thread uses.
    unsafe { *libc::__errno_location() = value }
}

/// Makes system call `number`; `errno` stays as it was.
///
/// # Safety
///
/// - Each argument that is a pointer is null, where the call allows that, or leads to memory that
///   is valid during the call. That memory is as long and as writable as the call's manual page
///   demands. Pointers are exposed (`expose_provenance`).
/// - What the call does to this process's memory, descriptors and threads breaks no assumption of
///   code that runs in it.
pub(crate) unsafe fn syscall<const N: usize>(number: c_long, args: [usize; N]) -> Answer {
    const { assert!(N <= 6) };
    let mut all = [0; 6];
    all[..N].copy_from_slice(&args);
    let [a, b, c, d, e, f] = all;
    let before = errno();
    // SAFETY: this function's contract covers the arguments in `args`; a call that takes fewer than
    // six ignores the zeros behind them.
    let value = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if value == -1 {
        let error = errno();
        set_errno(before);
        return Err(Errno::from_raw_os_error(error));
    }
    Ok(value as usize)
}

/// `mmap(2)`.
///
/// # Safety
///
/// With `MAP_FIXED` among the flags, no code uses what was mapped in `start`..`start + len`, unless
/// the new mapping holds the same bytes with the same access.
pub unsafe fn mmap(start: usize, len: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> Answer {
    let args = [start, len, protection as usize, flags as usize, fd as usize, offset as usize];
    // SAFETY: no argument is a pointer that the kernel follows. A mapping that is not fixed
    // replaces nothing; the contract covers one that is.
    unsafe { syscall(libc::SYS_mmap, args) }
}

/// `munmap(2)`.
///
/// # Safety
///
/// No code uses `start`..`start + len` before something else is mapped there.
pub unsafe fn munmap(start: usize, len: usize) -> Answer {
    // SAFETY: the kernel follows no pointer, and by the contract no code uses the range afterwards.
    unsafe { syscall(libc::SYS_munmap, [start, len]) }
}

/// `mremap(2)`.
///
/// # Safety
///
/// No code uses the old range afterwards where the call moves or shortens it. With `MREMAP_FIXED`
/// no code uses what was mapped in `new`..`new + new_len`.
pub unsafe fn mremap(old: usize, old_len: usize, new_len: usize, flags: c_int, new: usize) -> Answer {
    // SAFETY: the kernel follows no pointer; the contract covers the ranges that change.
    unsafe { syscall(libc::SYS_mremap, [old, old_len, new_len, flags as usize, new]) }
}

/// `madvise(2)`.
///
/// # Safety
///
/// Where the advice discards memory (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`), no code relies
/// on what the range held. Where it forbids access (`MADV_GUARD_INSTALL`), no code uses the range.
pub unsafe fn madvise(start: usize, len: usize, advice: c_int) -> Answer {
    // SAFETY: the kernel follows no pointer; the contract covers what the advice does.
    unsafe { syscall(libc::SYS_madvise, [start, len, advice as usize]) }
}

/// `process_madvise(2)` on this process itself (`PIDFD_SELF`, Linux 6.14): one advice for many
/// ranges. The value is the number of bytes advised, fewer than asked for when a range failed.
///
/// # Safety
///
/// The contract of [`madvise`] holds for each of the ranges.
///
/// # Errors
///
/// Those of the manual page; `EBADF` before Linux 6.14.
pub unsafe fn madvise_many(ranges: &[libc::iovec], advice: c_int) -> Answer {
    /// Not in the `libc` crate yet (include/uapi/linux/pidfd.h).
    const PIDFD_SELF: isize = -10_000;
    let args = [PIDFD_SELF as usize, ranges.as_ptr().expose_provenance(), ranges.len(), advice as usize, 0];
    // SAFETY: the kernel reads `ranges.len()` entries of the list, which is borrowed for the call;
    // the contract covers what the advice does to the ranges.
    unsafe { syscall(libc::SYS_process_madvise, args) }
}

/// `process_madvise(2)` as it is: advice on `count` ranges of the process of a pidfd. The value is
/// the number of bytes advised.
///
/// # Safety
///
/// - `ranges` leads to `count` entries that are valid during the call, and is exposed
///   (`expose_provenance`).
/// - Where the pidfd is this process's, the contract of [`madvise`] holds for each of the ranges.
pub unsafe fn process_madvise(pidfd: c_int, ranges: usize, count: usize, advice: c_int, flags: u32) -> Answer {
    // SAFETY: this function's contract is that of the call.
    unsafe {
        syscall(libc::SYS_process_madvise, [pidfd as isize as usize, ranges, count, advice as usize, flags as usize])
    }
}

/// `mprotect(2)`.
///
/// # Safety
///
/// No code uses the range in a way that the new protection forbids.
pub unsafe fn mprotect(start: usize, len: usize, protection: c_int) -> Answer {
    // SAFETY: the kernel follows no pointer; the contract covers the range's users.
    unsafe { syscall(libc::SYS_mprotect, [start, len, protection as usize]) }
}

/// `pkey_mprotect(2)`.
///
/// # Safety
///
/// No code uses the range in a way that the new protection, or the rights of the key, forbid.
pub unsafe fn pkey_mprotect(start: usize, len: usize, protection: c_int, key: c_int) -> Answer {
    // SAFETY: the kernel follows no pointer; the contract covers the range's users.
    unsafe { syscall(libc::SYS_pkey_mprotect, [start, len, protection as usize, key as usize]) }
}

/// `ioctl(2)`.
///
/// # Safety
///
/// The request does nothing to this process that breaks an assumption of code in it, and `argument`
/// is what it takes.
///
/// # Errors
///
/// Those of the request.
pub unsafe fn ioctl(fd: c_int, request: usize, argument: usize) -> Answer {
    // SAFETY: the contract is the same.
    unsafe { syscall(libc::SYS_ioctl, [fd as usize, request, argument]) }
}

/// `kcmp(2)` of the memory of two processes (`KCMP_VM`): 0, they share it; else they do not.
///
/// # Errors
///
/// Those of the manual page; `ENOSYS` where the kernel has no `kcmp`.
pub fn kcmp_memory(one: c_int, other: c_int) -> Answer {
    /// Not in the `libc` crate (include/uapi/linux/kcmp.h).
    const KCMP_VM: usize = 1;
    // SAFETY: no argument is a pointer, and nothing changes.
    unsafe { syscall(libc::SYS_kcmp, [one as usize, other as usize, KCMP_VM, 0, 0]) }
}

/// Writes `text` to standard error, past every buffer and lock. A failure is ignored: there is
/// nowhere to report it.
pub fn print(text: &[u8]) {
    // SAFETY: the kernel reads `text.len()` bytes of `text`, which is borrowed for the call.
    let _ = unsafe { syscall(libc::SYS_write, [2, text.as_ptr().expose_provenance(), text.len()]) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_stays_as_it_was() {
        set_errno(77);
        // SAFETY: an address that is not page aligned is refused.
        assert_eq!(unsafe { munmap(1, 1) }, Err(Errno::INVAL));
        assert_eq!(errno(), 77);
        print(b"");
        assert_eq!(errno(), 77);
    }
}
