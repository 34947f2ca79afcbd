//! Notices that this process is a copy of the one in which the agent began.
//!
//! A raw `clone` runs no handlers of the C library's. The mark is one byte in a page that the
//! kernel wipes in every child (`MADV_WIPEONFORK`, Linux 4.14). A process that shares the memory
//! (`vfork`, `CLONE_VM`) sees the parent's mark, as it uses the parent's tables.

#![allow(unsafe_code)] // Reads and writes a page of its own.

use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, Ordering};

use kmem::{PAGE_SIZE, mm, raw};
use rustix::io::Errno;

/// What the kernel leaves in a child.
const WIPED: u8 = 0;
/// The tables are this process's own.
const SETTLED: u8 = 1;
/// A thread of a child is about to settle the tables.
const SETTLING: u8 = 2;

pub(crate) static LINEAGE: Lineage = Lineage::new();

/// The process in which the agent runs; 0: none. A child of `vfork` shares this static.
static OWNER: AtomicI32 = AtomicI32::new(0);

pub(crate) fn set_owner() {
    OWNER.store(rustix::process::getpid().as_raw_pid(), Ordering::Release);
}

/// The process in which the agent runs; 0: it has not started in any.
pub(crate) fn owner() -> i32 {
    OWNER.load(Ordering::Acquire)
}

/// Whether this is the process that the agent runs in: a child of `vfork` is another.
pub(crate) fn is_owner() -> bool {
    owner() == rustix::process::getpid().as_raw_pid()
}

/// The mark. It lives in a static; without a page every process counts as settled.
pub(crate) struct Lineage(AtomicPtr<AtomicU8>);

impl Lineage {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// Maps the page. Fails where the kernel has no `MADV_WIPEONFORK`.
    pub(crate) fn begin(&self) -> Result<(), Errno> {
        if self.mark().is_some() {
            return Ok(());
        }
        let page = mm::map_anonymous(PAGE_SIZE)?;
        // SAFETY: the page was mapped just now, and nobody else knows of it.
        if let Err(error) = unsafe { raw::madvise(page, PAGE_SIZE, libc::MADV_WIPEONFORK) } {
            // SAFETY: nothing refers to the page.
            let _ = unsafe { raw::munmap(page, PAGE_SIZE) };
            return Err(error);
        }
        self.0.store(page as *mut AtomicU8, Ordering::Release);
        self.settled();
        Ok(())
    }

    fn mark(&self) -> Option<&AtomicU8> {
        // SAFETY: the pointer is null, or to a page that is readable and writable and is never
        // unmapped, in children neither. Any byte is a valid `AtomicU8`.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Whether the tables are this process's own. Callers check this first.
    pub(crate) fn is_settled(&self) -> bool {
        self.mark().is_none_or(|mark| mark.load(Ordering::Acquire) == SETTLED)
    }

    /// Whether this process is an unsettled child. True for one thread only, which calls
    /// [`Lineage::settled`]; others wait for that.
    pub(crate) fn is_unsettled(&self) -> bool {
        let Some(mark) = self.mark() else { return false };
        loop {
            match mark.load(Ordering::Acquire) {
                SETTLED => return false,
                WIPED if mark.compare_exchange(WIPED, SETTLING, Ordering::AcqRel, Ordering::Acquire).is_ok() => {
                    return true;
                }
                _ => std::thread::yield_now(),
            }
        }
    }

    pub(crate) fn settled(&self) {
        if let Some(mark) = self.mark() {
            mark.store(SETTLED, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_child_is_unsettled_and_only_until_it_settles() {
        let lineage = Lineage::new();
        assert!(!lineage.is_unsettled(), "without a page");
        lineage.begin().unwrap();
        assert!(!lineage.is_unsettled());
        // SAFETY: the child makes system calls and uses atomics only.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        if child == 0 {
            let was = lineage.is_unsettled();
            lineage.settled();
            // SAFETY: ends the child; no destructor runs.
            unsafe { libc::_exit(i32::from(was && !lineage.is_unsettled())) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 1);
        assert!(!lineage.is_unsettled(), "the parent");
    }
}
