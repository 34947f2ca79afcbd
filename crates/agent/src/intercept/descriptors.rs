//! The program's calls that close or replace descriptors pass over those of the agent.
//!
//! To the program they are not open: `close` answers `EBADF`, and ranges leave them out. A program
//! that puts a file of its own onto such a number gets it, and management ends: its memory stays as
//! it is, and guarded. A child of `vfork` has descriptors of its own.

#![allow(unsafe_code)] // Defines symbols of the C library.
#![allow(clippy::missing_safety_doc)] // The manual pages of the same names.

use std::ffi::c_int;
use std::fmt::Arguments;
use std::ptr::null_mut;

use crate::intercept::next::{Next, fails};
use crate::runtime::descriptors::NUMBERS;
use crate::runtime::lifecycle::{Phase, set_phase};
use crate::runtime::lineage;
use crate::runtime::log;
use crate::runtime::state::STATE;

// SAFETY: the type is that of close(2).
static CLOSE: Next<unsafe extern "C" fn(c_int) -> c_int> = unsafe { Next::new(c"close") };
// SAFETY: the type is that of dup2(2).
static DUP2: Next<unsafe extern "C" fn(c_int, c_int) -> c_int> = unsafe { Next::new(c"dup2") };
// SAFETY: the type is that of dup3(2).
static DUP3: Next<unsafe extern "C" fn(c_int, c_int, c_int) -> c_int> = unsafe { Next::new(c"dup3") };
// SAFETY: the type is that of close_range(2).
static CLOSE_RANGE: Next<unsafe extern "C" fn(u32, u32, c_int) -> c_int> = unsafe { Next::new(c"close_range") };
// SAFETY: the type is that of closefrom(3).
static CLOSEFROM: Next<unsafe extern "C" fn(c_int)> = unsafe { Next::new(c"closefrom") };

/// Looks all up when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    let _ = [CLOSE.address(), DUP2.address(), DUP3.address(), CLOSE_RANGE.address(), CLOSEFROM.address()];
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if NUMBERS.contains(fd) {
        return fails(libc::EBADF);
    }
    // SAFETY: the program makes this call.
    CLOSE.get().map_or_else(|| fails(libc::ENOSYS), |real| unsafe { real(fd) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if old != new {
        give_way(new);
    }
    // SAFETY: the program makes this call.
    DUP2.get().map_or_else(|| fails(libc::ENOSYS), |real| unsafe { real(old, new) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if old != new {
        give_way(new);
    }
    // SAFETY: the program makes this call.
    DUP3.get().map_or_else(|| fails(libc::ENOSYS), |real| unsafe { real(old, new, flags) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: u32, last: u32, flags: c_int) -> c_int {
    let Some(real) = CLOSE_RANGE.get() else { return fails(libc::ENOSYS) };
    let mut at = first;
    while let Some(own) = NUMBERS.first_in(at, last) {
        // SAFETY: a part of the range that the program closes.
        if own > at && unsafe { real(at, own - 1, flags) } != 0 {
            return -1;
        }
        at = own + 1;
        if own == last {
            return 0;
        }
    }
    // SAFETY: the rest of the range that the program closes.
    unsafe { real(at, last, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    let first = u32::try_from(first).unwrap_or(0);
    if let (None, Some(real)) = (NUMBERS.first_in(first, u32::MAX), CLOSEFROM.get()) {
        // SAFETY: the program makes this very call.
        return unsafe { real(first as c_int) };
    }
    // SAFETY: the same as the program asks for, but for the agent's own.
    unsafe { close_range(first, u32::MAX, 0) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit(resource: c_int, limit: *const libc::rlimit64) -> c_int {
    // SAFETY: prlimit(2) with process 0 and no place for the old limit is this call.
    unsafe { prlimit(0, resource, limit, null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setrlimit64(resource: c_int, limit: *const libc::rlimit64) -> c_int {
    // SAFETY: `setrlimit` has the same contract: both limits have 64 bits.
    unsafe { prlimit(0, resource, limit, null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit64(
    process: libc::pid_t,
    resource: c_int,
    limit: *const libc::rlimit64,
    old: *mut libc::rlimit64,
) -> c_int {
    // SAFETY: `prlimit` has the same contract: both limits have 64 bits.
    unsafe { prlimit(process, resource, limit, old) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn prlimit(
    process: libc::pid_t,
    resource: c_int,
    limit: *const libc::rlimit64,
    old: *mut libc::rlimit64,
) -> c_int {
    // SAFETY: the program passes null, or a limit that the kernel would read.
    let allowed = unsafe { limit.as_ref() }.map(|limit| limit.rlim_cur);
    let is_own = process == 0 || process == lineage::owner();
    if is_own && resource as u32 == libc::RLIMIT_NOFILE && allowed.is_some_and(is_too_low) && lineage::is_owner() {
        // Reading a fork's event takes a descriptor: without one the forking thread would never
        // return.
        end(format_args!("the program allows itself too few descriptors (RLIMIT_NOFILE)"));
    }
    // SAFETY: the program makes this very call.
    unsafe { libc::syscall(libc::SYS_prlimit64, process, resource, limit, old) as c_int }
}

/// Whether under this limit the numbers of the agent's descriptors could not be used again.
fn is_too_low(allowed: u64) -> bool {
    NUMBERS.first_in(u32::try_from(allowed).unwrap_or(u32::MAX), u32::MAX).is_some()
}

fn end(reason: Arguments<'_>) {
    set_phase(Phase::Ended);
    STATE.lock().end();
    log::line(format_args!("management ends: {reason}"));
}

/// Ends management if a number that the program is about to use is the agent's.
fn give_way(number: c_int) {
    if !lineage::is_owner() {
        return;
    }
    let was_ours = NUMBERS.contains(number);
    NUMBERS.give(number);
    if was_ours {
        end(format_args!("the program puts a file of its own onto descriptor {number}"));
    }
}
