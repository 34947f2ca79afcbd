//! The functions of `include/pageone.h`.

#![allow(unsafe_code)] // Calls a C library.

use std::ffi::{CStr, CString, NulError, c_char, c_int, c_void};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null;

/// Why memory is not merged, or not given back. The program goes on; its memory is right.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket's path cannot be given to a C library.
    #[error("the socket's path has a zero byte: {0}")]
    Path(#[from] NulError),
    /// The library's reason.
    #[error("{0}")]
    Refused(String),
}

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

/// Starts the agent: two threads that sleep until the daemon asks for something. It looks for the
/// daemon at `socket`, else at `PAGEONE_SOCKET` of the environment, else at the system's daemon,
/// every few seconds.
///
/// # Errors
///
/// The agent cannot run here (no userfaultfd, no rights), or has ended.
pub fn start(socket: Option<&Path>) -> Result<(), Error> {
    let socket = socket.map(|path| CString::new(path.as_os_str().as_bytes())).transpose()?;
    let options = Options { size: size_of::<Options>(), socket: socket.as_deref().map_or(null(), CStr::as_ptr) };
    // SAFETY: the options are of their size, and the string ends with a zero byte; both live on.
    result(unsafe { pageone_start(&raw const options) })
}

/// Lets `len` bytes from `address` on be merged, as `madvise(MADV_MERGEABLE)` does. Guests may run
/// meanwhile.
///
/// # Errors
///
/// Part of the range is not fit: it must be private anonymous memory of mmap(2), readable and
/// writable, in pages of 4 KiB, at least 1 MiB, not pinned, not registered with a userfaultfd. What
/// is fit is taken.
///
/// # Safety
///
/// From here on the program changes these mappings (`munmap`, `mremap`, `mprotect`, `madvise`,
/// `mmap` over them) by the functions of the C library only, as the crates `libc`, `nix` and
/// `memmap2` do. System calls of its own, and rustix' with its default back end, are not seen, and
/// pages would change under their eyes.
pub unsafe fn register(address: *mut u8, len: usize) -> Result<(), Error> {
    // SAFETY: the library checks the range; how it is changed later is the caller's promise.
    result(unsafe { pageone_register(address.cast(), len) })
}

/// Makes these bytes plain anonymous memory again. They need not be given back before `munmap`.
///
/// # Errors
///
/// The range does not begin at a page, is not mapped, or there is no memory for the copies.
pub fn unregister(address: *mut u8, len: usize) -> Result<(), Error> {
    // SAFETY: the library checks the range, and changes no byte.
    result(unsafe { pageone_unregister(address.cast(), len) })
}

/// Gives all memory back, and ends the agent's threads. It cannot be started again in this process.
///
/// # Errors
///
/// No agent runs, or the kernel refuses a mapping; then memory stays merged, and guarded.
pub fn stop() -> Result<(), Error> {
    // SAFETY: it takes nothing.
    result(unsafe { pageone_stop() })
}
