//! Reading another process's memory: `process_vm_readv(2)`.

#![allow(unsafe_code)] // The system call writes through pointers.

use libc::iovec;
use rustix::io::Errno;

use crate::PAGE_SIZE;
use crate::raw::syscall;

/// Why nothing can be read of a process.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// `EPERM`.
    #[error(
        "not permitted to read the memory of process {pid}: run as root or with CAP_SYS_PTRACE, or as its owner with \
         `sysctl kernel.yama.ptrace_scope=0`"
    )]
    NoPermission {
        /// The process.
        pid: i32,
    },
    /// `ESRCH`.
    #[error("process {pid} is gone")]
    Gone {
        /// The process.
        pid: i32,
    },
    /// Something else.
    #[error("reading the memory of process {pid}: {errno}")]
    Other {
        /// The process.
        pid: i32,
        /// The system's reason.
        errno: Errno,
    },
}

/// `IOV_MAX` (`UIO_MAXIOV`): as many as the kernel takes in one call. The array takes 16 KiB of
/// stack.
const IOVECS: usize = 1024;

/// Reads whole pages of process `pid` into `out`, one behind the other, and returns how many were
/// read from the front: reading stops at the first page that cannot be read (not mapped, or not
/// readable).
///
/// `addresses` are page aligned and in any order; neighbours in memory that follow each other are
/// read as one piece, and up to 1024 pieces go into one call. The process runs on: a page may
/// change while it is read.
///
/// # Errors
///
/// [`ReadError`]. When it happens midway, `out` holds what was read until then, but not how much.
///
/// # Panics
///
/// When `out` has no room for all pages.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), kmem::procmem::ReadError> {
/// let page = vec![7u8; 3 * kmem::PAGE_SIZE];
/// let start = page.as_ptr().addr().next_multiple_of(kmem::PAGE_SIZE);
/// let mut copy = [0; kmem::PAGE_SIZE];
/// let read = kmem::procmem::read_pages(std::process::id() as i32, &[start], &mut copy)?;
/// assert_eq!((read, copy[0]), (1, 7));
/// # Ok(())
/// # }
/// ```
pub fn read_pages(pid: i32, addresses: &[usize], out: &mut [u8]) -> Result<usize, ReadError> {
    assert!(out.len() / PAGE_SIZE >= addresses.len(), "room for {} pages in {} bytes", addresses.len(), out.len());
    let mut remote = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; IOVECS];
    let mut done = 0;
    while done < addresses.len() {
        let mut pieces = 0;
        let mut pages = 0;
        for &address in &addresses[done..] {
            match remote[..pieces].last_mut() {
                Some(piece) if piece.iov_base.addr().checked_add(piece.iov_len) == Some(address) => {
                    piece.iov_len += PAGE_SIZE;
                }
                _ if pieces == IOVECS => break,
                _ => {
                    remote[pieces] = iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: PAGE_SIZE };
                    pieces += 1;
                }
            }
            pages += 1;
        }
        let room = &mut out[done * PAGE_SIZE..(done + pages) * PAGE_SIZE];
        let local = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let local = (&raw const local).expose_provenance();
        let args = [pid as usize, local, 1, remote.as_ptr().expose_provenance(), pieces, 0];
        // SAFETY: the kernel writes at most `room.len()` bytes to `room`, which is ours alone; the remote
        // addresses are another process's, or this one's, which are only read.
        let read = unsafe { syscall(libc::SYS_process_vm_readv, args) };
        match read {
            Ok(bytes) => {
                done += bytes / PAGE_SIZE;
                if bytes < pages * PAGE_SIZE {
                    return Ok(done);
                }
            }
            Err(Errno::FAULT) => return Ok(done),
            Err(Errno::PERM) => return Err(ReadError::NoPermission { pid }),
            Err(Errno::SRCH) => return Err(ReadError::Gone { pid }),
            Err(errno) => return Err(ReadError::Other { pid, errno }),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests;
