//! Reading another process's memory: by its number (`process_vm_readv(2)`), or through a descriptor
//! that stands for one address space ([`AddressSpace`]). Too little room for the pages asked for
//! panics.

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
    let mut done = 0;
    while done < addresses.len() {
        let mut pieces = Pieces::new();
        let pages = pieces.add_pages(&addresses[done..]);
        let room = &mut out[done * PAGE_SIZE..(done + pages) * PAGE_SIZE];
        let read = pieces.read(pid, &mut [], room)? / PAGE_SIZE;
        done += read;
        if read < pages {
            break;
        }
    }
    Ok(done)
}

/// As [`read_pages`], of the address space that holds `word` at the address `proof`, and of no
/// other: the word is read in the same system call, which looks the address space up once. Reads as
/// many pages as fit into one call. `None`: the process has another address space now.
pub fn read_pages_of(
    pid: i32,
    (proof, word): (usize, u64),
    addresses: &[usize],
    out: &mut [u8],
) -> Result<Option<usize>, ReadError> {
    assert!(out.len() / PAGE_SIZE >= addresses.len(), "room for {} pages in {} bytes", addresses.len(), out.len());
    let mut seen = [0; size_of::<u64>()];
    let mut pieces = Pieces::new();
    pieces.add(proof, seen.len());
    let pages = pieces.add_pages(addresses);
    let read = pieces.read(pid, &mut seen, &mut out[..pages * PAGE_SIZE])?;
    let is_it = read >= seen.len() && u64::from_ne_bytes(seen) == word;
    Ok(is_it.then(|| (read - seen.len()) / PAGE_SIZE))
}

/// Pieces of another process's memory that are read by one call.
struct Pieces {
    remote: [iovec; IOVECS],
    count: usize,
}

impl Pieces {
    fn new() -> Self {
        Self { remote: [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; IOVECS], count: 0 }
    }

    /// Adds a piece. `false`: there is no room.
    fn add(&mut self, address: usize, len: usize) -> bool {
        let Some(place) = self.remote.get_mut(self.count) else { return false };
        *place = iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: len };
        self.count += 1;
        true
    }

    /// Adds pages, neighbours as one piece; returns how many there was room for.
    fn add_pages(&mut self, addresses: &[usize]) -> usize {
        let first = self.count;
        for (pages, &address) in addresses.iter().enumerate() {
            match self.remote[first..self.count].last_mut() {
                Some(piece) if piece.iov_base.addr().checked_add(piece.iov_len) == Some(address) => {
                    piece.iov_len += PAGE_SIZE;
                }
                _ => {
                    if !self.add(address, PAGE_SIZE) {
                        return pages;
                    }
                }
            }
        }
        addresses.len()
    }

    /// Reads the pieces to `head` and, behind it, to `room`. Returns how many bytes were read.
    fn read(&self, pid: i32, head: &mut [u8], room: &mut [u8]) -> Result<usize, ReadError> {
        let local = [head, room].map(|part| iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() });
        let (ours, theirs) = (local.as_ptr().expose_provenance(), self.remote.as_ptr().expose_provenance());
        let args = [pid as usize, ours, local.len(), theirs, self.count, 0];
        // SAFETY: the kernel reads two local and `count` remote vectors, which outlive the call. It
        // writes only to `head` and `room`, as much as fits, and both are borrowed for writing. The
        // remote memory, of another process or of this one, is only read, and an address that is
        // not mapped is an error.
        match unsafe { syscall(libc::SYS_process_vm_readv, args) } {
            Ok(bytes) => Ok(bytes),
            Err(Errno::FAULT) => Ok(0),
            Err(Errno::PERM) => Err(ReadError::NoPermission { pid }),
            Err(Errno::SRCH) => Err(ReadError::Gone { pid }),
            Err(errno) => Err(ReadError::Other { pid, errno }),
        }
    }
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

/// Asks the processor for a line of memory that will be read soon. Where the memory cannot be read,
/// nothing happens. Lines on many pages come from memory at the same time, and not one by one as
/// the kernel, or a comparison, would read them.
pub fn prefetch(address: *const u8) {
    // SAFETY: the instruction is a hint: it changes nothing and raises no fault, whatever is there
    // (Intel SDM, volume 2, PREFETCHh).
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Most parts of one [`read_own_parts`].
pub const OWN_PARTS: usize = 128;

/// Reads parts of `len` bytes of this process's memory into `out`, one behind the other. A part
/// that is not mapped or readable, or lies on a page with a memory error, ends the reading. Returns
/// how many whole parts were read from the front.
///
/// The process *writes* them to itself: what `process_vm_writev(2)` is given to write the kernel
/// reads as any argument of a system call, and holds pages only where they are written to. For
/// short parts on many pages that takes a fifth of the time of [`read_own`].
///
/// # Errors
///
/// Those of `process_vm_writev(2)`, where the call is not to be had: a filter of the process
/// refuses it, say.
///
/// # Panics
///
/// When there are more than [`OWN_PARTS`], or `out` has no room for all.
pub fn read_own_parts(parts: impl Iterator<Item = usize>, len: usize, out: &mut [u8]) -> Result<usize, Errno> {
    let mut local = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; OWN_PARTS];
    let mut count = 0;
    for address in parts {
        local[count] = iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: len };
        count += 1;
        prefetch(std::ptr::without_provenance(address));
    }
    let room = &mut out[..count * len];
    let remote = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let (local, remote) = (local.as_ptr().expose_provenance(), (&raw const remote).expose_provenance());
    let args = [std::process::id() as usize, local, count, remote, 1, 0];
    // SAFETY: the kernel reads `count` local vectors and one remote vector, which outlive the call.
    // It writes at most `room.len()` bytes to `room`, which is borrowed for writing. The memory of
    // the local vectors is only read, and an address that is not mapped is an error.
    match unsafe { syscall(libc::SYS_process_vm_writev, args) } {
        Ok(bytes) => Ok(bytes / len),
        Err(Errno::FAULT) => Ok(0),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
