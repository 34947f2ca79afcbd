//! Reading another process's memory: by its number (`process_vm_readv(2)`), or through a descriptor
//! that stands for one address space ([`AddressSpace`]).

#![allow(unsafe_code)] // The system call writes through pointers.

use libc::iovec;
use rustix::io::Errno;

use crate::raw::syscall;
use crate::{PAGE_SIZE, Range};

mod space;

pub use space::{AddressSpace, Gone};

/// Why the memory of a process cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// `EPERM`.
    #[error(
        "not permitted to read the memory of process {pid}: run as root or with CAP_SYS_PTRACE, or as its owner with \
         `sysctl kernel.yama.ptrace_scope=0`"
    )]
    NoPermission {
        /// The process's number.
        pid: i32,
    },
    /// `ESRCH`.
    #[error("process {pid} is gone")]
    Gone {
        /// The process's number.
        pid: i32,
    },
    /// Another error.
    #[error("reading the memory of process {pid}: {errno}")]
    Other {
        /// The process's number.
        pid: i32,
        /// The kernel's error.
        errno: Errno,
    },
}

/// Pieces in one call: `UIO_MAXIOV`, the most that the kernel takes. The array takes 16 KiB of
/// stack.
const IOVECS: usize = 1024;

/// Reads whole pages of process `pid` into `out`, one behind the other. Returns how many were read
/// from the front: reading stops at the first page that is not mapped or not readable.
///
/// `addresses` are page aligned and in any order. Pages that are neighbours in the list and in
/// memory are read as one piece, and up to 1024 pieces go into one call. The process is not
/// stopped: a page may change while it is read.
///
/// # Errors
///
/// [`ReadError`]. After an error midway `out` holds the pages read until then; their number is
/// unknown.
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
        // SAFETY: the kernel reads one local and `pieces` remote vectors, which outlive the call.
        // It writes at most `room.len()` bytes to `room`, which is borrowed for writing. The remote
        // memory, of another process or of this one, is only read, and an address that is not
        // mapped is an error.
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

/// Reads memory of this process itself, as another process would: what is not mapped, not readable
/// or poisoned by a memory error is an error and raises no signal. Returns how many whole pages
/// were read from the front; `range` is page aligned.
///
/// # Panics
///
/// When `out` is shorter than the range.
pub fn read_own(range: Range, out: &mut [u8]) -> usize {
    let room = &mut out[..range.len];
    let local = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let remote = iovec { iov_base: std::ptr::without_provenance_mut(range.start), iov_len: range.len };
    let (local, remote) = ((&raw const local).expose_provenance(), (&raw const remote).expose_provenance());
    let args = [std::process::id() as usize, local, 1, remote, 1, 0];
    // SAFETY: the kernel reads one local and one remote vector, which outlive the call. It writes
    // at most `room.len()` bytes to `room`, which is borrowed for writing. The remote memory is
    // only read, and an address that is not mapped is an error.
    unsafe { syscall(libc::SYS_process_vm_readv, args) }.map_or(0, |bytes| bytes / PAGE_SIZE)
}

#[cfg(test)]
mod tests;
