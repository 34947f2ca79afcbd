//! What several tests need: memory of their own, children, and a userfaultfd or a reason why not.

#![allow(unsafe_code)] // Tests of unsafe interfaces.
#![allow(clippy::unwrap_used)] // For tests only.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::uffd::{CreateError, Features, Uffd};
use crate::{PAGE_SIZE, Range, mm};

/// Private anonymous memory, reached through pointers only.
pub struct Memory(pub Range);

impl Memory {
    pub fn new(pages: usize) -> Memory {
        let len = pages * PAGE_SIZE;
        let start = mm::map_anonymous(len).unwrap();
        let range = Range::new(start, len);
        // No huge pages: they would blur what is said of single pages. Kernels without them refuse the
        // advice.
        // SAFETY: this advice changes no memory.
        let _ = unsafe { mm::advise(range, libc::MADV_NOHUGEPAGE) };
        Memory(range)
    }

    pub fn pages(&self, first: usize, count: usize) -> Range {
        assert!(first + count <= self.0.pages());
        Range::new(self.0.start + first * PAGE_SIZE, count * PAGE_SIZE)
    }

    /// Makes a hole of one page.
    pub fn unmap(&self, page: usize) -> Result<(), rustix::io::Errno> {
        // SAFETY: nobody holds references, and the test touches it no more.
        unsafe { mm::unmap(self.pages(page, 1)) }
    }

    fn word(&self, page: usize) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(self.pages(page, 1).start)
    }

    /// Writes a page's first word.
    pub fn write(&self, page: usize, value: u64) {
        // SAFETY: mapped and writable; nobody holds references.
        unsafe { self.word(page).write_volatile(value) }
    }

    /// Reads a page's first word.
    pub fn read(&self, page: usize) -> u64 {
        // SAFETY: mapped and readable; nobody holds references.
        unsafe { self.word(page).read_volatile() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the test is done with it.
        let _ = unsafe { mm::unmap(self.0) };
    }
}

/// A userfaultfd, or `None` when this machine has none to give; says so then.
pub fn uffd(features: Features) -> Option<Uffd> {
    match Uffd::new(features) {
        Ok(uffd) => Some(uffd),
        Err(CreateError::Os(errno)) => panic!("userfaultfd: {errno}"),
        Err(why) => {
            println!("SKIPPED: {why}");
            None
        }
    }
}

/// Held by every test that forks: a fork waits for whoever has fork events to read.
pub fn forking() -> MutexGuard<'static, ()> {
    static FORKING: Mutex<()> = Mutex::new(());
    FORKING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A forked child; killed and waited for when dropped.
pub struct Child(pub i32);

impl Child {
    /// Forks; the child runs `body` and exits with what it returns. The parent's other threads do
    /// not exist there, so `body` does little: it must not panic, print, or take locks.
    pub fn fork(body: impl FnOnce() -> u8) -> Child {
        // SAFETY: the child keeps to what is said above and leaves by _exit.
        match unsafe { libc::fork() } {
            -1 => panic!("fork: {}", std::io::Error::last_os_error()),
            0 => {
                let code = body();
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(code.into()) }
            }
            pid => Child(pid),
        }
    }

    /// A child that does nothing.
    pub fn idle() -> Child {
        Child::fork(|| pause_for_ever())
    }

    /// Waits for the child's end and gives its exit code.
    pub fn code(self) -> u8 {
        let mut status = 0;
        // SAFETY: a child of ours, and a place for its status.
        let pid = unsafe { libc::waitpid(self.0, &mut status, 0) };
        assert_eq!(pid, self.0);
        std::mem::forget(self);
        assert!(libc::WIFEXITED(status), "the child was killed: status {status:#x}");
        libc::WEXITSTATUS(status) as u8
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: a child of ours that was not waited for, so the number is still its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

/// What a forked child does that only has to be there.
pub fn pause_for_ever() -> ! {
    loop {
        // SAFETY: waits for a signal.
        unsafe { libc::pause() };
    }
}

/// Makes a forked child run as nobody, for good.
pub fn become_nobody() {
    // SAFETY: by number, so that only this (the only) thread is told.
    unsafe {
        libc::syscall(libc::SYS_setgroups, 0usize, 0usize);
        libc::syscall(libc::SYS_setresgid, 65534usize, 65534usize, 65534usize);
        libc::syscall(libc::SYS_setresuid, 65534usize, 65534usize, 65534usize);
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
