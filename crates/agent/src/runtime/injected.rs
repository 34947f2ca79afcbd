//! Whether the library was injected into a program that ran already (`pageone attach`), and not
//! preloaded.
//!
//! Such a library interposes nothing by itself: the loader finds the C library's symbols first.

#![allow(unsafe_code)] // dlsym(3).

use std::sync::atomic::{AtomicU8, Ordering};

const UNKNOWN: u8 = 0;
const PRELOADED: u8 = 1;
const INJECTED: u8 = 2;

/// Whether the library was injected. Asked for the first time when it is loaded.
pub(crate) fn is_injected() -> bool {
    static KIND: AtomicU8 = AtomicU8::new(UNKNOWN);
    let known = KIND.load(Ordering::Relaxed);
    if known != UNKNOWN {
        return known == INJECTED;
    }
    let name = c"madvise".as_ptr();
    // SAFETY: the name is a C string.
    let (first, next) = unsafe { (libc::dlsym(libc::RTLD_DEFAULT, name), libc::dlsym(libc::RTLD_NEXT, name)) };
    // A preloaded library stands before the C library.
    let is_injected = first == next;
    KIND.store(if is_injected { INJECTED } else { PRELOADED }, Ordering::Relaxed);
    is_injected
}
