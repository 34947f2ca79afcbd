//! How long a thread runs at a stretch: `sched_setattr(2)`.
//!
//! Among threads that want to run the kernel takes the one whose turn would end first. So who asks
//! for short turns waits less for them, and gets no more time than others (Linux 6.12; earlier
//! kernels take the wish and do nothing).

#![allow(unsafe_code)] // System calls that take pointers.

use std::io;
use std::time::Duration;

use crate::syscall::syscall;

/// `struct sched_attr`, as it was first (`SCHED_ATTR_SIZE_VER0`); the kernel takes any known size.
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

/// Asks for turns of this length for the calling thread: 0.1 ms to 100 ms. All else stays as it is.
/// No privilege is needed.
///
/// # Errors
///
/// Those of `sched_setattr(2)`; a filter may forbid it.
pub fn request_turns(of: Duration) -> io::Result<()> {
    let size = size_of::<Attributes>();
    let mut attributes = Attributes::default();
    let pointer = (&raw mut attributes).expose_provenance();
    // SAFETY: the kernel writes at most `size` bytes, all of `attributes`, which is ours for the time
    // of the call.
    unsafe { syscall(libc::SYS_sched_getattr, [0, pointer, size, 0]) }?;
    attributes.size = size as u32;
    attributes.runtime = u64::try_from(of.as_nanos()).unwrap_or(u64::MAX);
    let pointer = (&raw mut attributes).expose_provenance();
    // SAFETY: the kernel reads `size` bytes of `attributes`.
    unsafe { syscall(libc::SYS_sched_setattr, [0, pointer, 0]) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_may_ask_for_short_turns() {
        // In a thread of its own: the wish stays with it.
        let asked = std::thread::spawn(|| request_turns(Duration::from_micros(100))).join().unwrap();
        assert!(
            asked.is_ok() || asked.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied),
            "{asked:?}"
        );
    }
}
