//! Whether the library came late: into a program that runs already (`pageone attach`).
//!
//! Such a library interposes nothing by itself. The loader looks for symbols in the program and the
//! libraries that it was started with, and finds the C library's.

#![allow(unsafe_code)] // dlsym(3).

use std::sync::atomic::{AtomicU8, Ordering};

const UNKNOWN: u8 = 0;
const EARLY: u8 = 1;
const LATE: u8 = 2;

/// Whether the library came late. Asked for the first time when it is loaded.
pub(crate) fn is_late() -> bool {
    static KIND: AtomicU8 = AtomicU8::new(UNKNOWN);
    let known = KIND.load(Ordering::Relaxed);
    if known != UNKNOWN {
        return known == LATE;
    }
    let name = c"madvise".as_ptr();
    // SAFETY: the name is a C string.
    let (first, next) = unsafe { (libc::dlsym(libc::RTLD_DEFAULT, name), libc::dlsym(libc::RTLD_NEXT, name)) };
    // A preloaded library stands before the C library.
    let is_late = first == next;
    KIND.store(if is_late { LATE } else { EARLY }, Ordering::Relaxed);
    is_late
}
