//! What prctl(2) says and changes about this process, past the agent's own symbol of that name.

#![allow(unsafe_code)] // prctl(2).

use std::ffi::{c_int, c_ulong};
use std::sync::atomic::{AtomicBool, Ordering};

/// The program has chosen who may trace it (`PR_SET_PTRACER`): the agent leaves that alone.
static TRACER_CHOSEN: AtomicBool = AtomicBool::new(false);

/// The agent has permitted the daemon to trace this process, and withdraws that.
static TRACER_OURS: AtomicBool = AtomicBool::new(false);

fn prctl(option: c_int, value: c_ulong) -> isize {
    let errno = kmem::raw::errno();
    // SAFETY: the options used here take numbers only, and change no memory.
    let answer = unsafe { libc::syscall(libc::SYS_prctl, option as c_ulong, value, 0usize, 0usize, 0usize) };
    kmem::raw::set_errno(errno);
    answer as isize
}

/// Whether the kernel's KSM has all memory of the process.
pub(crate) fn has_process() -> bool {
    prctl(libc::PR_GET_MEMORY_MERGE, 0) > 0
}

/// Whether the process may look at itself in `/proc` without privileges (`PR_SET_DUMPABLE`).
pub(crate) fn is_dumpable() -> bool {
    prctl(libc::PR_GET_DUMPABLE, 0) == 1
}

/// The program has chosen who may trace it, or may have.
pub(crate) fn note_tracer_chosen() {
    TRACER_CHOSEN.store(true, Ordering::Release);
}

/// Permits the daemon to read this process where Yama asks for that, or withdraws what was
/// permitted. The program's own choice stays. Without Yama the call fails.
pub(crate) fn permit_tracer(daemon: Option<i32>) {
    let was_ours = TRACER_OURS.swap(daemon.is_some(), Ordering::AcqRel);
    if (daemon.is_some() || was_ours) && !TRACER_CHOSEN.load(Ordering::Acquire) {
        prctl(libc::PR_SET_PTRACER, daemon.unwrap_or(0) as c_ulong);
    }
}
