//! The agent's descriptors among those of the program.
//!
//! A program may close or replace descriptors that it did not open (`closefrom(3)`, `dup2` onto a
//! fixed number). Two rules keep the agent out of the program's files:
//!
//! * The interposed `close` family passes over the numbers in [`Numbers`].
//! * System calls past the C library are noticed: a [`Descriptor`] knows its file's identity, and
//!   is checked before it is used. Once lost it is forgotten, and never closed.
//!
//! The identity is `st_dev` and `st_ino`, unique for sockets, memfds and (Linux 5.13) userfaultfds.

#![allow(unsafe_code)] // Borrows descriptors that are kept as numbers.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use kmem::memfd::{self, FileId};

/// Numbers from here on are not in the table: they cost nothing but the agent's services.
const COUNT: usize = 1 << 16;

pub(crate) static NUMBERS: Numbers = Numbers::new();

/// The numbers of the agent's descriptors.
pub(crate) struct Numbers {
    table: [AtomicU64; COUNT / 64],
    /// Threads that are about to close a descriptor.
    closing: AtomicUsize,
}

impl Numbers {
    pub(crate) const fn new() -> Self {
        Self { table: [const { AtomicU64::new(0) }; COUNT / 64], closing: AtomicUsize::new(0) }
    }

    fn place(&self, number: RawFd) -> Option<(&AtomicU64, u64)> {
        let number = usize::try_from(number).ok()?;
        Some((self.table.get(number / 64)?, 1 << (number % 64)))
    }

    fn insert(&self, number: RawFd) {
        if let Some((word, bit)) = self.place(number) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Removes one; returns whether the caller is the one that did, and may close the descriptor.
    /// True for every number that does not fit.
    pub(crate) fn remove(&self, number: RawFd) -> bool {
        self.place(number).is_none_or(|(word, bit)| word.fetch_and(!bit, Ordering::SeqCst) & bit != 0)
    }

    /// Removes a number and closes it, unless the program has taken it.
    pub(crate) fn close(&self, number: RawFd, file: FileId) {
        self.closing.fetch_add(1, Ordering::SeqCst);
        if self.remove(number) && is_file(number, file) {
            // SAFETY: the number is the agent's descriptor, which its owner gives up. The program
            // takes the number only after it has removed it from the table, or after this.
            unsafe { libc::close(number) };
        }
        self.closing.fetch_sub(1, Ordering::SeqCst);
    }

    /// Gives a number to the program, whose next call replaces the descriptor.
    pub(crate) fn give(&self, number: RawFd) {
        if !self.remove(number) {
            // The agent may be about to close it. A copy of the process that a raw `clone` makes
            // meanwhile never sees that end.
            for _ in 0..1000 {
                if self.closing.load(Ordering::SeqCst) == 0 {
                    break;
                }
                std::thread::yield_now();
            }
        }
    }

    /// Removes all: this process is a child and uses none.
    pub(crate) fn clear(&self) {
        self.table.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.closing.store(0, Ordering::Relaxed);
    }

    pub(crate) fn contains(&self, number: RawFd) -> bool {
        self.place(number).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }

    /// The first of these numbers that is the agent's.
    pub(crate) fn first_in(&self, first: u32, last: u32) -> Option<u32> {
        let mut at = first as usize;
        while at < COUNT && at <= last as usize {
            let word = self.table[at / 64].load(Ordering::Relaxed) >> (at % 64);
            if word != 0 {
                let found = at + word.trailing_zeros() as usize;
                return (found <= last as usize).then_some(found as u32);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}

/// Whether a number is still the descriptor of that file. It is believed where a filter refuses
/// fstat(2): threads would wait if a userfaultfd were given up.
pub(crate) fn is_file(number: RawFd, file: FileId) -> bool {
    if number < 0 {
        return false;
    }
    // SAFETY: the number is only used for fstat(2), which fails where it is no open descriptor.
    match memfd::identity(unsafe { BorrowedFd::borrow_raw(number) }) {
        Ok(now) => now == file,
        Err(error) => error.raw_os_error() != Some(libc::EBADF),
    }
}

/// A descriptor of the agent, which the program shall not close. `T` owns nothing else.
pub(crate) struct Descriptor<T: AsFd> {
    inner: ManuallyDrop<T>,
    file: FileId,
}

impl<T: AsFd> Descriptor<T> {
    pub(crate) fn new(inner: T) -> io::Result<Self> {
        let file = memfd::identity(inner.as_fd())?;
        NUMBERS.insert(inner.as_fd().as_raw_fd());
        Ok(Self { inner: ManuallyDrop::new(inner), file })
    }

    /// Whether the number is still this descriptor's.
    pub(crate) fn is_intact(&self) -> bool {
        is_file(self.number(), self.file)
    }

    pub(crate) fn number(&self) -> RawFd {
        self.inner.as_fd().as_raw_fd()
    }

    pub(crate) fn file(&self) -> FileId {
        self.file
    }
}

impl<T: AsFd> Deref for Descriptor<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsFd> Drop for Descriptor<T> {
    fn drop(&mut self) {
        // Closed by number: it may be a file of the program by now.
        NUMBERS.close(self.number(), self.file);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::IntoRawFd;

    use super::*;

    #[test]
    fn numbers_are_found_in_ranges() {
        let numbers = Numbers::new();
        [3, 64, 1000].into_iter().for_each(|number| numbers.insert(number));
        assert_eq!(numbers.first_in(0, u32::MAX), Some(3));
        assert_eq!(numbers.first_in(4, 63), None);
        assert_eq!(numbers.first_in(4, 64), Some(64));
        assert_eq!(numbers.first_in(65, u32::MAX), Some(1000));
        assert_eq!(numbers.first_in(1001, u32::MAX), None);
        numbers.remove(64);
        assert!(numbers.contains(3) && !numbers.contains(64) && !numbers.contains(-1) && !numbers.contains(i32::MAX));
        numbers.clear();
        assert_eq!(numbers.first_in(0, u32::MAX), None);
    }

    #[test]
    fn a_descriptor_that_was_replaced_is_noticed_and_not_closed() {
        let descriptor = Descriptor::new(File::open("/dev/null").unwrap()).unwrap();
        assert!(descriptor.is_intact());
        let number = descriptor.number();
        let other = File::open("/dev/zero").unwrap().into_raw_fd();
        // SAFETY: replaces the descriptor opened above, which only this test uses.
        unsafe { libc::syscall(libc::SYS_dup3, other, number, 0) };
        assert!(!descriptor.is_intact());
        drop(descriptor);
        // SAFETY: takes numbers only; nothing else uses these descriptors.
        unsafe {
            assert!(libc::fcntl(number, libc::F_GETFD) >= 0, "it is the program's");
            libc::close(number);
            libc::close(other);
        }
    }
}
