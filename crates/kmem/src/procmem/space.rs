//! An address space, read through `/proc/PID/mem` (`proc_pid_mem(5)`).
//!
//! The descriptor stands for the address space that the process had when it was opened. It is not
//! that of the next program after `execve(2)`, nor of the next process with the same number. It
//! keeps no memory: when the last process that uses the address space has ended, reads return
//! nothing.
//!
//! A read never sleeps in a userfaultfd (the kernel gives up with `EIO`). It does sleep while a
//! page comes from swap, or from a file that is mapped there.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::PAGE_SIZE;

/// The address space of a process is gone.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the address space is gone")]
pub struct Gone;

/// An open `/proc/PID/mem`.
#[derive(Debug)]
pub struct AddressSpace {
    fd: OwnedFd,
}

impl AddressSpace {
    /// Opens the address space that a process has now.
    ///
    /// # Errors
    ///
    /// `NotFound`: there is no such process; `PermissionDenied`: this process may not read it
    /// (`ptrace(2)`, "PTRACE_MODE_ATTACH_FSCREDS").
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self { fd: File::open(format!("/proc/{pid}/mem"))?.into() })
    }

    /// Reads whole pages into `out`, one behind the other. Returns how many were read from the
    /// front: reading stops at the first page that is not mapped or cannot be read.
    ///
    /// `addresses` are page aligned and in any order. Pages that are neighbours in the list and in
    /// memory are read by one system call. The process is not stopped: a page may change while it
    /// is read.
    ///
    /// # Errors
    ///
    /// [`Gone`]: no process uses the address space any more.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let page = vec![7u8; 3 * kmem::PAGE_SIZE];
    /// let start = page.as_ptr().addr().next_multiple_of(kmem::PAGE_SIZE);
    /// let mut copy = [0; kmem::PAGE_SIZE];
    /// let space = kmem::procmem::AddressSpace::open(std::process::id() as i32)?;
    /// assert_eq!((space.read_pages(&[start], &mut copy)?, copy[0]), (1, 7));
    /// # Ok(())
    /// # }
    /// ```
    pub fn read_pages(&self, addresses: &[usize], out: &mut [u8]) -> Result<usize, Gone> {
        assert!(out.len() / PAGE_SIZE >= addresses.len(), "room for {} pages in {} bytes", addresses.len(), out.len());
        let mut done = 0;
        while let Some(&first) = addresses.get(done) {
            let follows = |at: &(usize, &usize)| first.checked_add(at.0 * PAGE_SIZE) == Some(*at.1);
            let pages = addresses[done..].iter().enumerate().take_while(follows).count();
            let read = self.read(first, &mut out[done * PAGE_SIZE..(done + pages) * PAGE_SIZE])? / PAGE_SIZE;
            done += read;
            if read < pages {
                break;
            }
        }
        Ok(done)
    }

    /// Reads bytes from `address` on. Returns how many were read: fewer than `out` has room for
    /// where memory is not mapped or cannot be read.
    ///
    /// # Errors
    ///
    /// [`Gone`]: no process uses the address space any more.
    pub fn read(&self, address: usize, out: &mut [u8]) -> Result<usize, Gone> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            return match rustix::io::pread(&self.fd, &mut *out, address as u64) {
                Ok(0) => Err(Gone),
                Ok(read) => Ok(read),
                Err(Errno::INTR) => continue,
                Err(_) => Ok(0),
            };
        }
    }
}

as_fd!(AddressSpace);

#[cfg(test)]
mod tests;
