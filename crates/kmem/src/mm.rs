//! Changing the mappings of this process: `mmap(2)`, `munmap(2)`, `mremap(2)`, `madvise(2)`,
//! `mincore(2)`.
//!
//! Every call goes through [`crate::raw`]: by number, with no allocation, and `errno` stays as it
//! was. A preloaded library that defines `mmap` and `madvise` itself can therefore use this module
//! inside its own definitions without being entered again.

#![allow(unsafe_code)] // Mapping over addresses is what this module is for.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::raw::{self, syscall};
use crate::{PAGE_SIZE, Range};

/// `mmap(2)` of a range.
///
/// # Safety
///
/// The contract of [`raw::mmap`].
pub(crate) unsafe fn mmap(
    range: Range,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: u64,
) -> Result<usize, Errno> {
    // SAFETY: the contract is the same.
    unsafe { raw::mmap(range.start, range.len, protection, flags, fd, offset as i64) }
}

const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Maps `range.len` bytes of a file from byte `file_offset` over `range`: readable, writable,
/// private (a write copies the page), with no swap reserved.
///
/// # Safety
///
/// - No code uses what was mapped in the range, unless the file's bytes equal what the range held
///   and no thread writes there during the call.
/// - The file stays at least as long as the mapped part; otherwise access raises SIGBUS.
///
/// # Errors
///
/// `ENOMEM` when the process has `vm.max_map_count` mappings; `EINVAL` when an address, length or
/// offset is not page aligned; `EBADF`, `EACCES` and `EPERM` for the descriptor.
pub unsafe fn map_fixed_private(fd: BorrowedFd<'_>, range: Range, file_offset: u64) -> Result<(), Errno> {
    // SAFETY: by the contract no code can tell the file's bytes from those that the mapping
    // replaces.
    unsafe { mmap(range, READ_WRITE, PRIVATE | libc::MAP_FIXED, fd.as_raw_fd(), file_offset) }.map(drop)
}

/// Maps untouched anonymous memory over `range`: readable, writable, private. It reads as zeros and
/// takes no memory until it is touched.
///
/// # Safety
///
/// No code relies on what the range held.
///
/// # Errors
///
/// Those of [`map_fixed_private`] that are not about a descriptor.
pub unsafe fn map_fixed_anonymous(range: Range) -> Result<(), Errno> {
    // SAFETY: by the contract no code relies on the mappings that this replaces.
    unsafe { mmap(range, READ_WRITE, PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS, -1, 0) }.map(drop)
}

/// Maps `len` bytes of untouched anonymous memory (readable, writable, private, no swap reserved)
/// at a free place and returns its address. The kernel rounds `len` up to whole pages. The memory
/// stays mapped until [`unmap`].
///
/// # Errors
///
/// `ENOMEM`; `EINVAL` when `len` is 0.
pub fn map_anonymous(len: usize) -> Result<usize, Errno> {
    // SAFETY: a mapping that is not fixed replaces nothing.
    unsafe { mmap(Range::new(0, len), READ_WRITE, PRIVATE | libc::MAP_ANONYMOUS, -1, 0) }
}

/// Has malloc map large pieces and unmap them when they are freed, for as long as the process
/// lives. By itself it soon keeps them; and zeroed ones, of which little is used, it then fills.
pub fn map_large_pieces() {
    // SAFETY: the call changes a setting of malloc's.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
}

/// Gives whole pages back to the kernel that malloc keeps and nobody uses. Other threads'
/// allocations may wait meanwhile.
pub fn trim_heap() {
    // SAFETY: malloc touches only memory that it has and nobody uses.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Removes every mapping in `range`.
///
/// # Safety
///
/// No code uses the range before something else is mapped there.
///
/// # Errors
///
/// `EINVAL` when the range is not page aligned or is empty; `ENOMEM` when a mapping would be cut in
/// two and the process has `vm.max_map_count` of them.
pub unsafe fn unmap(range: Range) -> Result<(), Errno> {
    // SAFETY: the contract is the same.
    unsafe { raw::munmap(range.start, range.len) }.map(drop)
}

/// Moves the mapping of `from` to the address `to`, in place of whatever is mapped there
/// (`MREMAP_MAYMOVE | MREMAP_FIXED`, length unchanged).
///
/// # Safety
///
/// No code uses `from` afterwards, and none relies on what was mapped at `to`. No reference into
/// either range exists.
///
/// # Errors
///
/// `EFAULT` when `from` is more than one mapping (before Linux 6.17; since then it may be several);
/// `EINVAL` when an address or the length is not page aligned or the two ranges overlap; `ENOMEM`.
pub unsafe fn remap_fixed(from: Range, to: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the contract covers both ranges.
    unsafe { raw::mremap(from.start, from.len, from.len, flags, to) }.map(drop)
}

/// Moves the pages of `from` to the address `to`, in place of whatever is mapped there, and leaves
/// an empty mapping where they were (`MREMAP_DONTUNMAP`): there is no hole, which another thread
/// could be given memory in. In a mapping of a file the place has the file's bytes then.
///
/// # Safety
///
/// The contract of [`remap_fixed`]; and no code uses `from` before something else is mapped there.
///
/// # Errors
///
/// Those of [`remap_fixed`]; `EINVAL` before Linux 5.13 where it is a mapping of a file.
pub unsafe fn remap_and_keep(from: Range, to: usize) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    // SAFETY: the contract covers both ranges.
    unsafe { raw::mremap(from.start, from.len, from.len, flags, to) }.map(drop)
}

/// `madvise(2)` with one of the `MADV_*` values.
///
/// # Safety
///
/// Where the advice discards memory (`MADV_DONTNEED`, `MADV_FREE`, `MADV_REMOVE`), no code relies
/// on what the range held.
///
/// # Errors
///
/// Those of the manual page; `EAGAIN` is worth a second try.
pub unsafe fn advise(range: Range, advice: i32) -> Result<(), Errno> {
    // SAFETY: the contract is the same.
    unsafe { raw::madvise(range.start, range.len, advice) }.map(drop)
}

/// Whether some page of the range is not mapped at all (`mincore(2)` answers `ENOMEM`).
pub fn has_hole(range: Range) -> bool {
    let mut residency = [0u8; 512];
    (range.start..range.end()).step_by(residency.len() * PAGE_SIZE).any(|start| {
        let len = (range.end() - start).min(residency.len() * PAGE_SIZE);
        let vector = residency.as_mut_ptr().expose_provenance();
        // SAFETY: the kernel writes one byte for each page of `len`, and `len` is at most as many
        // pages as `residency` has bytes.
        let answer = unsafe { syscall(libc::SYS_mincore, [start, len, vector]) };
        answer == Err(Errno::NOMEM)
    })
}

/// The parts of a range that are not mapped, ascending.
pub fn holes(range: Range) -> Vec<Range> {
    let pieces = |range: Range, len: usize| {
        (range.start..range.end()).step_by(len).map(move |start| Range::new(start, len.min(range.end() - start)))
    };
    let mut holes: Vec<Range> = Vec::new();
    let pages =
        pieces(range, 512 * PAGE_SIZE).filter(|&piece| has_hole(piece)).flat_map(|piece| pieces(piece, PAGE_SIZE));
    for page in pages.filter(|&page| has_hole(page)) {
        match holes.last_mut() {
            Some(last) if last.end() == page.start => last.len += page.len,
            _ => holes.push(page),
        }
    }
    holes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Memory;

    #[test]
    fn a_hole_is_found() {
        let memory = Memory::new(1030);
        assert!(!has_hole(memory.0));
        memory.unmap(1029).unwrap();
        assert!(has_hole(memory.0) && !has_hole(memory.pages(0, 1029)));
        (511..514).for_each(|page| memory.unmap(page).unwrap());
        assert_eq!(holes(memory.0), [memory.pages(511, 3), memory.pages(1029, 1)]);
        assert_eq!(holes(Range::new(0, 0)), []);
    }
}
