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

mod library;

pub use library::{Error, register, start, stop, unregister};
