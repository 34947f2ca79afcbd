//! The time slice of a thread: `sched_setattr(2)`.
//!
//! The kernel runs the thread whose slice would end first. A thread with a short slice therefore
//! waits less for a processor, and gets no larger share of one (Linux 6.12; earlier kernels accept
//! the request and ignore it).

#![allow(unsafe_code)] // System calls that take pointers.

use std::io;
use std::time::Duration;

use crate::raw::syscall;

/// `struct sched_attr` in its first version (`SCHED_ATTR_SIZE_VER0`). The kernel accepts every
/// version that it knows; `size` tells which.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const _: () = assert!(size_of::<Attributes>() == 48);

/// Requests time slices of this length for the calling thread, 0.1 ms to 100 ms. Policy, nice value
/// and flags stay as they are. No privilege is needed.
///
/// # Errors
///
/// Those of `sched_setattr(2)`; a seccomp filter may forbid the call.
pub fn request(length: Duration) -> io::Result<()> {
    let size = size_of::<Attributes>();
    let mut attributes = Attributes::default();
    let pointer = (&raw mut attributes).expose_provenance();
    // SAFETY: the kernel writes at most `size` bytes to `attributes`, a local that outlives the
    // call.
    unsafe { syscall(libc::SYS_sched_getattr, [0, pointer, size, 0]) }?;
    attributes.size = size as u32;
    attributes.runtime = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    let pointer = (&raw mut attributes).expose_provenance();
    // SAFETY: the kernel reads `size` bytes of `attributes`, a local that outlives the call.
    unsafe { syscall(libc::SYS_sched_setattr, [0, pointer, 0]) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_may_request_short_slices() {
        // In a thread of its own: the request stays with the thread.
        let answer = std::thread::spawn(|| request(Duration::from_micros(100))).join().unwrap();
        assert!(
            answer.is_ok() || answer.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied),
            "{answer:?}"
        );
    }
}
