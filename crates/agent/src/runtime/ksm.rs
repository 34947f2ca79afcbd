//! What prctl(2) says and changes about this process, past the agent's own symbol of that name.

#![allow(unsafe_code)] // prctl(2).

use std::ffi::{c_int, c_ulong};

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

/// Permits a process to read this one where Yama asks for it; 0 withdraws that. Without Yama it
/// fails.
pub(crate) fn set_tracer(pid: i32) {
    prctl(libc::PR_SET_PTRACER, pid as c_ulong);
}
