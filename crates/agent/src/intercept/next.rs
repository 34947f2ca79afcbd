//! The C library's own functions, where the agent defines one of the same name.

#![allow(unsafe_code)] // dlsym(3).

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Looks up what the agent's own symbol hides, and remembers it: a signal handler may call the
/// function later, and dlsym(3) is not for signal handlers. Null: there is none.
pub(super) fn next(known: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let mut real = known.load(Ordering::Relaxed);
    if real.is_null() {
        // SAFETY: the name is a C string.
        real = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        known.store(real, Ordering::Relaxed);
    }
    real
}
