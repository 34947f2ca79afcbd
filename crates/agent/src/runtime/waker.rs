//! Wakes a thread that waits with `poll(2)`.
//!
//! A pair of sockets: all eventfds have one inode, so the agent could not tell its own from one of
//! the program's. `send(2)` writes to nothing but sockets.

#![allow(unsafe_code)] // The descriptors are numbers.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use kmem::memfd::FileId;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::runtime::descriptors::{Descriptor, NUMBERS, is_file};

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
        let descriptor = Descriptor::new(fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        self.dev.store(descriptor.file().dev, Ordering::Relaxed);
        self.ino.store(descriptor.file().ino, Ordering::Relaxed);
        self.number.store(descriptor.number(), Ordering::Release);
        // From here on it is closed by `take`.
        std::mem::forget(descriptor);
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

/// Wakes the agent thread: messages are queued, or it is to leave.
pub(crate) static WAKE: Waker = Waker::new();
/// Ends the event thread.
pub(crate) static STOP: Waker = Waker::new();

/// In a static: threads are woken without the lock, and a child closes it without the thread.
pub(crate) struct Waker {
    sender: End,
    receiver: End,
    /// A byte was sent, and the thread has not looked yet: saves further system calls.
    is_sent: AtomicBool,
    /// Another descriptor for the receiver, which the event thread keeps in reserve; -1: none.
    spare: AtomicI32,
}

impl Waker {
    const fn new() -> Self {
        Self { sender: End::new(), receiver: End::new(), is_sent: AtomicBool::new(false), spare: AtomicI32::new(-1) }
    }

    /// Opens it for a thread. A [`Waker::wake`] after the thread of the last time had looked is
    /// forgotten, or no later call would send anything.
    pub(crate) fn open(&self) -> Result<(), Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (sender, receiver) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        self.sender.set(sender)?;
        self.receiver.set(receiver)?;
        self.is_sent.store(false, Ordering::Release);
        Ok(())
    }

    /// Makes [`Waker::fd`] readable. Without descriptors, or where the program has taken them,
    /// nothing happens.
    pub(crate) fn wake(&self) {
        if !self.is_sent.swap(true, Ordering::AcqRel)
            && let Some(number) = self.sender.get()
        {
            // SAFETY: the kernel reads one byte of a local array.
            unsafe { libc::send(number, [0u8; 1].as_ptr().cast(), 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        }
    }

    /// The descriptor to wait for; -1 when it is lost.
    pub(crate) fn fd(&self) -> RawFd {
        self.receiver.get().unwrap_or(-1)
    }

    /// Makes [`Waker::fd`] unreadable. The thread is about to look at what it was woken for; a
    /// later call of [`Waker::wake`] sends again.
    pub(crate) fn clear(&self) {
        if let Some(number) = self.receiver.get() {
            let mut bytes = [0u8; 64];
            // SAFETY: the kernel writes at most 64 bytes to a local array of that length.
            unsafe { libc::recv(number, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
        }
        self.is_sent.store(false, Ordering::Release);
    }

    /// Another descriptor for the receiver, which a forked child [closes](Waker::take_spare).
    pub(crate) fn keep_spare(&self) -> Option<Descriptor<OwnedFd>> {
        let number = self.receiver.get()?;
        // SAFETY: the number is the receiver's; it is only duplicated.
        let fd = unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().ok()?;
        let spare = Descriptor::new(fd).ok()?;
        self.spare.store(spare.number(), Ordering::Release);
        Some(spare)
    }

    /// The spare descriptor is about to be closed.
    pub(crate) fn forget_spare(&self) {
        self.spare.store(-1, Ordering::Release);
    }

    /// The number of the spare descriptor, if it is still the receiver's.
    pub(crate) fn take_spare(&self) -> Option<RawFd> {
        let number = self.spare.swap(-1, Ordering::AcqRel);
        is_file(number, self.receiver.file()).then_some(number)
    }

    pub(crate) fn close(&self) {
        self.sender.close();
        self.receiver.close();
    }

    /// Forgets both ends and leaves them open.
    pub(crate) fn forget(&self) {
        self.sender.forget();
        self.receiver.forget();
    }

    pub(crate) fn is_intact(&self) -> bool {
        self.sender.get().is_some() && self.receiver.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::poll;

    fn is_woken(waker: &Waker) -> bool {
        let mut fds = [poll::interest(waker.fd(), libc::POLLIN)];
        poll::wait(&mut fds, 0);
        fds[0].revents != 0
    }

    #[test]
    fn a_thread_is_woken_until_it_looks_and_nothing_is_written_to_a_strangers_file() {
        let waker = Waker::new();
        waker.wake();
        waker.open().unwrap();
        assert!(!is_woken(&waker));
        waker.wake();
        waker.wake();
        assert!(is_woken(&waker));
        waker.clear();
        assert!(!is_woken(&waker));
        let file = tempfile::tempfile().unwrap();
        let number = waker.sender.number.load(Ordering::Relaxed);
        // SAFETY: replaces a descriptor of this test's own.
        unsafe { libc::syscall(libc::SYS_dup3, std::os::fd::AsRawFd::as_raw_fd(&file), number, 0) };
        waker.wake();
        assert_eq!(file.metadata().unwrap().len(), 0);
        assert!(!waker.is_intact());
        waker.close();
        assert_eq!(waker.fd(), -1);
    }

    #[test]
    fn a_new_thread_is_woken_although_the_last_one_was_when_it_had_gone() {
        let waker = Waker::new();
        waker.wake();
        waker.open().unwrap();
        waker.wake();
        assert!(is_woken(&waker));
        waker.close();
    }
}
