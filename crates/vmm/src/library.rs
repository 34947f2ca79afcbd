//! The functions of `include/pageone.h`.

#![allow(unsafe_code)] // Calls a C library.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr::null;

use crate::Error;

/// `struct pageone_options`.
#[repr(C)]
struct Options {
    size: usize,
    socket: *const c_char,
}

const _: () = assert!(size_of::<Options>() == 16 && offset_of!(Options, socket) == 8);

#[link(name = "pageone_agent")]
unsafe extern "C" {
    fn pageone_start(options: *const Options) -> c_int;
    fn pageone_register(address: *mut c_void, length: usize) -> c_int;
    fn pageone_unregister(address: *mut c_void, length: usize) -> c_int;
    fn pageone_stop() -> c_int;
    fn pageone_error() -> *const c_char;
}

fn result(returned: c_int) -> Result<(), Error> {
    if returned == 0 {
        return Ok(());
    }
    // SAFETY: the library's string is this thread's own, until its next call.
    let text = unsafe { CStr::from_ptr(pageone_error()) };
    Err(Error::Refused(text.to_string_lossy().into_owned()))
}

pub(crate) fn start(socket: Option<&CStr>) -> Result<(), Error> {
    let options = Options { size: size_of::<Options>(), socket: socket.map_or(null(), CStr::as_ptr) };
    // SAFETY: the options are of their size, and the string ends with a zero byte; both live on.
    result(unsafe { pageone_start(&raw const options) })
}

/// See [`crate::register`], whose contract this has.
pub(crate) unsafe fn register(address: *mut u8, len: usize) -> Result<(), Error> {
    // SAFETY: the library checks the range; how it is changed later is the caller's promise.
    result(unsafe { pageone_register(address.cast(), len) })
}

pub(crate) fn unregister(address: *mut u8, len: usize) -> Result<(), Error> {
    // SAFETY: the library checks the range, and changes no byte.
    result(unsafe { pageone_unregister(address.cast(), len) })
}

pub(crate) fn stop() -> Result<(), Error> {
    // SAFETY: it takes nothing.
    result(unsafe { pageone_stop() })
}
