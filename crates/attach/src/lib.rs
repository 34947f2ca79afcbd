//! Loads the agent into a program that runs already, and that nobody prepared for it.
//!
//! ```text
//! target    what /proc says of the process: refused, or its C library and what it has loaded
//! image     a function's address, by the dynamic symbols in the process's memory
//! tracee    ptrace(2) on the first thread
//! frame     a signal frame: what the kernel restores when the call returns
//! inject    the safe point, and calls from there
//! ```
//!
//! *Safe point.* The first thread is stopped where it waits in ppoll(2), as QEMU's main loop does:
//! it holds no lock of the C library there. The others run on: one that is inside malloc or the
//! loader gives its locks back, so that the call made here does not wait for ever.
//!
//! *Return.* The functions that are called, dlopen(3) and the agent's own, return into a signal
//! frame, from which the kernel itself (rt_sigreturn(2)) brings back all registers, the signal mask
//! and the system call. So the thread needs nobody to put it right: should this process die, or
//! give up waiting, the call runs to its end, and the program goes on. A thread that waits for a
//! lock inside the loader is never torn out of it. Should this process be stopped while the thread
//! stands, its guard continues it (crate `guard`).
//!
//! The memory of the process may hold anything: all that is read there is bounded and checked.

// Other architectures have no safe point yet, and use a part of the rest only.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

mod error;
#[cfg(target_arch = "x86_64")]
mod frame;
mod image;
#[cfg(target_arch = "x86_64")]
mod inject;
mod reply;
mod target;
#[cfg(target_arch = "x86_64")]
mod tracee;

use std::path::Path;
use std::time::Duration;

use guard::{Guard, PROMISE, Stopped};
use kmem::pidfd::PidFd;

pub use error::AttachError;
pub use reply::Attached;

/// What to load, into what.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The process.
    pub pid: i32,
    /// The agent's library, as the process would name it.
    pub library: &'a Path,
    /// The daemon's socket for agents, as the process would name it.
    pub socket: &'a Path,
    /// How long to wait for the safe point, and then for each call.
    pub timeout: Duration,
    /// What has the process's thread go on if this process does not.
    pub guard: &'a Guard,
    /// Whether nothing uses the program's marked memory until [`attach`] returns: QEMU has stopped
    /// its guest.
    pub stands: bool,
}

/// Loads the agent into a process, and has it take the memory that the program has marked.
///
/// The process's first thread stands still meanwhile, for some milliseconds; the others run.
///
/// # Errors
///
/// [`AttachError`]: each names the reason, and the remedy where there is one. The process runs on
/// as before, with the library in it at most.
pub fn attach(request: &Request<'_>) -> Result<Attached, AttachError> {
    target::examine(request.pid)?;
    let Request { pid, guard, .. } = *request;
    let process = PidFd::open(pid).map_err(|e| target::failed(pid, "the process", e))?;
    guard.watch(Stopped::Trace, pid, &process, &[])?;
    guard.stands(PROMISE)?;
    #[cfg(target_arch = "x86_64")]
    let attached = inject::attach(request);
    #[cfg(not(target_arch = "x86_64"))]
    let attached = target::loaded(request).and(Err(AttachError::NotHere));
    // If the guard had to continue this process, the thread has been let go all the same.
    let _ = guard.runs();
    attached
}
