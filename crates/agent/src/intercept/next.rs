//! The C library's own functions, where the agent defines one of the same name.

#![allow(unsafe_code)] // dlsym(3).

use std::ffi::{CStr, c_int, c_void};
use std::marker::PhantomData;
use std::mem::transmute_copy;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use kmem::raw;

/// A function of type `F`, looked up once: a signal handler may call it later, and dlsym(3) is not
/// for signal handlers.
pub(super) struct Next<F> {
    name: &'static CStr,
    known: AtomicPtr<c_void>,
    kind: PhantomData<F>,
}

impl<F: Copy> Next<F> {
    /// # Safety
    ///
    /// `F` is the type of the C library's function of that name, as a pointer to a function.
    pub(super) const unsafe fn new(name: &'static CStr) -> Self {
        Self { name, known: AtomicPtr::new(null_mut()), kind: PhantomData }
    }

    /// Its address. Null: there is none.
    pub(super) fn address(&self) -> *mut c_void {
        let mut known = self.known.load(Ordering::Relaxed);
        if known.is_null() {
            // SAFETY: the name is a C string.
            known = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            self.known.store(known, Ordering::Relaxed);
        }
        known
    }

    /// The function. `None`: there is none.
    pub(super) fn get(&self) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.address();
        // SAFETY: by the contract of `new` this is a function of that type.
        (!address.is_null()).then(|| unsafe { transmute_copy(&address) })
    }
}

/// The answer of a call that fails with this error.
pub(super) fn fails(errno: c_int) -> c_int {
    raw::set_errno(errno);
    -1
}
