//! `poll(2)` on descriptors kept as numbers.

#![allow(unsafe_code)] // poll(2) of rustix borrows descriptors, for which the lock would be held.

use std::os::fd::RawFd;

/// Waits for at most `timeout_ms` (-1: for ever). False after an error other than `EINTR`.
pub(crate) fn wait(fds: &mut [libc::pollfd], timeout_ms: i32) -> bool {
    // SAFETY: the kernel reads and writes `fds.len()` entries of the slice, which is borrowed for
    // the call. A number that is no open descriptor is reported as POLLNVAL.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
    ready >= 0 || kmem::raw::errno() == libc::EINTR
}

/// An entry for [`wait`].
pub(crate) fn interest(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}
