//! Merging of guest memory for virtual machine monitors in Rust.
//!
//! A program that is linked with this crate is linked with `libpageone_agent.so` (Debian package
//! `libpageone-dev`; or name its directory in `PAGEONE_LIB_DIR` when you build). Nothing is
//! preloaded. The program registers guest memory, and PageONE's daemon merges it:
//!
//! ```no_run
//! # fn guest_memory() -> (*mut u8, usize) { unimplemented!() }
//! let (memory, len) = guest_memory(); // mmap(2): private, anonymous
//! if let Err(error) = pageone_vmm::start(None) {
//!     eprintln!("memory is not merged: {error}");
//! }
//! // SAFETY: the memory stays mapped, and rustix is not used to change its mapping.
//! if let Err(error) = unsafe { pageone_vmm::register(memory, len) } {
//!     eprintln!("memory is not merged: {error}");
//! }
//! ```
//!
//! Each function is one of `include/pageone.h`, which says more of them.

#![deny(unsafe_code)]

use std::ffi::{CString, NulError};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

mod library;

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

/// Starts the agent: two threads that sleep until the daemon asks for something. It looks for the
/// daemon at `socket`, else at `PAGEONE_SOCKET` of the environment, else at the system's daemon,
/// every few seconds.
///
/// # Errors
///
/// The agent cannot run here (no userfaultfd, no rights), or has ended.
pub fn start(socket: Option<&Path>) -> Result<(), Error> {
    let socket = socket.map(|path| CString::new(path.as_os_str().as_bytes())).transpose()?;
    library::start(socket.as_deref())
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
#[allow(unsafe_code)] // Its contract is the caller's.
pub unsafe fn register(address: *mut u8, len: usize) -> Result<(), Error> {
    // SAFETY: the contract is the same.
    unsafe { library::register(address, len) }
}

/// Makes these bytes plain anonymous memory again. They need not be given back before `munmap`.
///
/// # Errors
///
/// The range does not begin at a page, is not mapped, or there is no memory for the copies.
pub fn unregister(address: *mut u8, len: usize) -> Result<(), Error> {
    library::unregister(address, len)
}

/// Gives all memory back, and ends the agent's threads. It cannot be started again in this process.
///
/// # Errors
///
/// No agent runs, or the kernel refuses a mapping; then memory stays merged, and guarded.
pub fn stop() -> Result<(), Error> {
    library::stop()
}
