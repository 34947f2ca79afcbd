//! Wakes a thread that waits with `poll(2)`.
//!
//! A pair of sockets, and not an eventfd: all eventfds have one inode, so the agent could not tell
//! its own from one of the program's. `send(2)` writes to nothing but sockets.

#![allow(unsafe_code)] // The descriptors are numbers.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use kmem::memfd::FileId;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::runtime::globals::NUMBERS;
use crate::runtime::kept::{Kept, is_file};

/// One end of the pair: its number, -1 without one, and its file.
struct End {
    number: AtomicI32,
    dev: AtomicU64,
    ino: AtomicU64,
}

impl End {
    const fn new() -> Self {
        Self { number: AtomicI32::new(-1), dev: AtomicU64::new(0), ino: AtomicU64::new(0) }
    }

    fn set(&self, fd: OwnedFd) -> Result<(), Errno> {
        let kept = Kept::new(fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        self.dev.store(kept.file().dev, Ordering::Relaxed);
        self.ino.store(kept.file().ino, Ordering::Relaxed);
        self.number.store(kept.number(), Ordering::Release);
        // From here on it is closed by `take`.
        std::mem::forget(kept);
        Ok(())
    }

    /// Its number, if that is still this socket's.
    fn get(&self) -> Option<RawFd> {
        let number = self.number.load(Ordering::Acquire);
        is_file(number, self.file()).then_some(number)
    }

    fn close(&self) {
        if let Some(number) = self.get() {
            NUMBERS.close(number, self.file());
        }
        self.forget();
    }

    fn file(&self) -> FileId {
        FileId { dev: self.dev.load(Ordering::Relaxed), ino: self.ino.load(Ordering::Relaxed) }
    }

    fn forget(&self) {
        self.number.store(-1, Ordering::Release);
    }
}

/// See the module. It lives in a static: it is rung without the agent's lock, and a forked child
/// closes it although it does not have the thread that listens.
pub(crate) struct Bell {
    ring: End,
    hear: End,
}

impl Bell {
    /// Without descriptors.
    pub(crate) const fn new() -> Self {
        Self { ring: End::new(), hear: End::new() }
    }

    /// Opens it.
    ///
    /// # Errors
    ///
    /// Those of `socketpair(2)`.
    pub(crate) fn open(&self) -> Result<(), Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ring, hear) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        self.ring.set(ring)?;
        self.hear.set(hear)
    }

    /// Makes [`Bell::ear`] readable. Without descriptors, or where the program has taken them,
    /// nothing happens.
    pub(crate) fn ring(&self) {
        if let Some(number) = self.ring.get() {
            // SAFETY: the kernel reads one byte of a local array.
            unsafe { libc::send(number, [0u8; 1].as_ptr().cast(), 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        }
    }

    /// The descriptor to wait for; -1 when it is lost.
    pub(crate) fn ear(&self) -> RawFd {
        self.hear.get().unwrap_or(-1)
    }

    /// Makes [`Bell::ear`] unreadable until the next ring.
    pub(crate) fn silence(&self) {
        if let Some(number) = self.hear.get() {
            let mut bytes = [0u8; 64];
            // SAFETY: the kernel writes at most 64 bytes to a local array of that length.
            unsafe { libc::recv(number, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
        }
    }

    /// Another descriptor for the end that listens.
    pub(crate) fn spare(&self) -> Option<Kept<OwnedFd>> {
        let number = self.hear.get()?;
        // SAFETY: the number is this end's; it is only duplicated.
        let fd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().ok()?;
        Kept::new(fd).ok()
    }

    /// Closes both ends.
    pub(crate) fn close(&self) {
        self.ring.close();
        self.hear.close();
    }

    /// Forgets both ends and leaves them open.
    pub(crate) fn forget(&self) {
        self.ring.forget();
        self.hear.forget();
    }

    /// Whether a number is the end that listens, by whichever descriptor.
    pub(crate) fn hears_by(&self, number: RawFd) -> bool {
        is_file(number, self.hear.file())
    }

    /// Whether both ends are open.
    pub(crate) fn is_intact(&self) -> bool {
        self.ring.get().is_some() && self.hear.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::poll;

    #[test]
    fn rings_until_it_is_silenced_and_never_in_a_strangers_file() {
        let bell = Bell::new();
        bell.ring();
        bell.open().unwrap();
        let is_heard = || {
            let mut fds = [poll::interest(bell.ear(), libc::POLLIN)];
            poll::wait(&mut fds, 0);
            fds[0].revents != 0
        };
        assert!(!is_heard());
        bell.ring();
        bell.ring();
        assert!(is_heard());
        bell.silence();
        assert!(!is_heard());
        let file = tempfile::tempfile().unwrap();
        let number = bell.ring.number.load(Ordering::Relaxed);
        // SAFETY: replaces a descriptor of this test's own.
        unsafe { libc::syscall(libc::SYS_dup3, std::os::fd::AsRawFd::as_raw_fd(&file), number, 0) };
        bell.ring();
        assert_eq!(file.metadata().unwrap().len(), 0);
        assert!(!bell.is_intact());
        bell.close();
        assert_eq!(bell.ear(), -1);
    }
}
