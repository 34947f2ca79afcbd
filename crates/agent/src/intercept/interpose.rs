//! The symbols that the program calls instead of the C library's.
//!
//! Most calls are about memory that the agent does not manage: then one look at a small table is
//! all, and the system call is made as the C library would. No `dlsym`, no lock, no allocation:
//! these functions run before constructors and inside allocators.

#![allow(unsafe_code)] // Defines symbols of the C library.
#![allow(clippy::missing_safety_doc)] // The manual pages of the same names.

use std::ffi::{c_int, c_void};

use kmem::raw::{self, Answer};

use crate::intercept::{guard, mark};
use crate::runtime::globals::WATCH;

/// Answers as the C library does: -1 and `errno`, or the value with `errno` as it was.
fn answer(before: c_int, answer: Answer) -> isize {
    match answer {
        Ok(value) => {
            raw::set_errno(before);
            value as isize
        }
        Err(error) => {
            raw::set_errno(error.raw_os_error());
            -1
        }
    }
}

/// mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    start: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    let errno = raw::errno();
    let replaces = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) == libc::MAP_FIXED;
    // SAFETY: the program makes this very call, so it has met the system call's contract. The guard
    // asks for no more than that.
    let result = unsafe {
        if replaces && WATCH.overlaps(start as usize, len) {
            guard::mmap(start as usize, len, prot, flags, fd, offset)
        } else {
            raw::mmap(start as usize, len, prot, flags, fd, offset)
        }
    };
    answer(errno, result) as *mut c_void
}

/// mmap(2), by its other name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    start: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: `mmap` has the same contract.
    unsafe { mmap(start, len, prot, flags, fd, offset) }
}

/// munmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(start: *mut c_void, len: usize) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, so it has met the system call's contract. The guard
    // asks for no more than that.
    let result = unsafe {
        if WATCH.overlaps(start as usize, len) {
            guard::munmap(start as usize, len)
        } else {
            raw::munmap(start as usize, len)
        }
    };
    answer(errno, result) as c_int
}

/// mremap(2). Its last parameter is variadic in C; on the supported architectures it is passed as a
/// fixed one is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let errno = raw::errno();
    // Only with these flags does the caller pass it.
    let has_new = flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) != 0;
    let (old, new) = (old as usize, if has_new { new as usize } else { 0 });
    let onto = flags & libc::MREMAP_FIXED != 0 && WATCH.overlaps(new, new_len);
    // SAFETY: the program makes this very call, so it has met the system call's contract. The guard
    // asks for no more than that.
    let result = unsafe {
        if onto || WATCH.overlaps(old, old_len) {
            guard::mremap(old, old_len, new_len, flags, new)
        } else {
            raw::mremap(old, old_len, new_len, flags, new)
        }
    };
    answer(errno, result) as *mut c_void
}

/// madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(start: *mut c_void, len: usize, advice: c_int) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, so it has met the system call's contract. The guard
    // asks for no more than that.
    let result = unsafe {
        if advice == libc::MADV_MERGEABLE {
            if mark::mergeable(start as usize, len) { Ok(0) } else { raw::madvise(start as usize, len, advice) }
        } else if WATCH.overlaps(start as usize, len) {
            guard::madvise(start as usize, len, advice)
        } else {
            raw::madvise(start as usize, len, advice)
        }
    };
    answer(errno, result) as c_int
}

/// mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(start: *mut c_void, len: usize, prot: c_int) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, so it has met the system call's contract. The guard
    // asks for no more than that.
    let call = || unsafe { raw::mprotect(start as usize, len, prot) };
    let watched = WATCH.overlaps(start as usize, len);
    answer(errno, if watched { guard::mprotect(start as usize, len, prot, call) } else { call() }) as c_int
}

/// pkey_mprotect(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(start: *mut c_void, len: usize, prot: c_int, key: c_int) -> c_int {
    let errno = raw::errno();
    // SAFETY: the program makes this very call, so it has met the system call's contract. The guard
    // asks for no more than that.
    let call = || unsafe { raw::pkey_mprotect(start as usize, len, prot, key) };
    // A key can forbid what the protection allows, so memory with one leaves management.
    let effective = if key > 0 { libc::PROT_NONE } else { prot };
    let watched = WATCH.overlaps(start as usize, len);
    answer(errno, if watched { guard::mprotect(start as usize, len, effective, call) } else { call() }) as c_int
}
