//! Shared mappings of files that hand out no references.

#![allow(unsafe_code)] // Memory shared with other processes is reached through pointers.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use super::MemfdError;
use crate::raw::syscall;
use crate::uffd::{self, Features, Uffd};
use crate::{PAGE_SIZE, Range, mm};

/// Bytes of a huge page of x86-64, and of other processors with pages of 4 KiB.
pub const HUGE_PAGE_SIZE: usize = 2 << 20;

/// Words of eight bytes in a page.
const WORDS: usize = PAGE_SIZE / 8;

/// Words of 64 bits in a set of NUMA nodes: enough for any kernel (`MAX_NUMNODES` is at most 1024).
const NODE_WORDS: usize = 16;

/// The userfaultfd that [`SharedMap::fill`] needs. It never protects a page, so no thread waits for
/// it.
///
/// # Errors
///
/// Those of [`Uffd::new`]; filling needs Linux 5.19.
pub fn filler() -> Result<Uffd, uffd::CreateError> {
    Uffd::new(Features::WP | Features::WP_HUGETLBFS_SHMEM)
}

/// A shared mapping of a file from its start.
///
/// Other processes, and other threads through the same map, may change the memory at any moment.
/// Therefore no references into it are given out, except to atomics. Pages are copied in and out,
/// eight bytes at a time; each eight bytes are copied whole. A page that is written during the copy
/// comes out as a mixture of old and new words; keep readers and writers of a page apart.
///
/// An access behind the end of the file raises SIGBUS: map only files that cannot shrink. A page or
/// an offset that lies outside of the map, or is not aligned as asked, panics. So does writing
/// where the map is for reading only.
#[derive(Debug)]
pub struct SharedMap {
    range: Range,
    writable: bool,
}

/// Maps `len` bytes of a file from its start for reading.
///
/// # Errors
///
/// [`MemfdError::Map`]: `EINVAL` when `len` is 0; `EACCES` for a descriptor that cannot be read;
/// `ENOMEM`.
pub fn map_readonly(fd: impl AsFd, len: usize) -> Result<SharedMap, MemfdError> {
    map(fd, len, libc::PROT_READ)
}

/// Maps `len` bytes of a file from its start for reading and writing.
///
/// # Errors
///
/// Those of [`map_readonly`]; `EPERM` for a file sealed against writing.
pub fn map_shared(fd: impl AsFd, len: usize) -> Result<SharedMap, MemfdError> {
    map(fd, len, libc::PROT_READ | libc::PROT_WRITE)
}

/// Maps the file. A map that can hold a huge page starts at a multiple of a huge page's size;
/// otherwise the kernel could not map huge pages.
fn map(fd: impl AsFd, len: usize, protection: i32) -> Result<SharedMap, MemfdError> {
    let writable = protection & libc::PROT_WRITE != 0;
    let fd = fd.as_fd().as_raw_fd();
    let failed = |errno| MemfdError::Map { len, errno };
    if len < HUGE_PAGE_SIZE {
        // SAFETY: a mapping that is not fixed replaces nothing.
        let start = unsafe { mm::mmap(Range::new(0, len), protection, libc::MAP_SHARED, fd, 0) }.map_err(failed)?;
        return Ok(SharedMap { range: Range::new(start, len), writable });
    }
    let room = len.next_multiple_of(PAGE_SIZE) + HUGE_PAGE_SIZE;
    let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping that is not fixed replaces nothing.
    let reserved = unsafe { mm::mmap(Range::new(0, room), libc::PROT_NONE, reserve, -1, 0) }.map_err(failed)?;
    let range = Range::new(reserved.next_multiple_of(HUGE_PAGE_SIZE), len.next_multiple_of(PAGE_SIZE));
    let (head, tail) =
        (Range::new(reserved, range.start - reserved), Range::new(range.end(), reserved + room - range.end()));
    // SAFETY: the fixed mapping replaces a part of the range that was reserved just now. No other
    // code knows that range.
    let mapped = unsafe { mm::mmap(range, protection, libc::MAP_SHARED | libc::MAP_FIXED, fd, 0) };
    if let Err(errno) = mapped {
        // SAFETY: the range was reserved just now, and no other code knows it.
        let _ = unsafe { mm::unmap(Range::new(reserved, room)) };
        return Err(failed(errno));
    }
    for rest in [head, tail].into_iter().filter(|rest| rest.len > 0) {
        // SAFETY: the rest was reserved just now, and no other code knows it. After a failure it
        // stays reserved: addresses, no memory.
        let _ = unsafe { mm::unmap(rest) };
    }
    Ok(SharedMap { range: Range::new(range.start, len), writable })
}

impl SharedMap {
    /// The address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.range.start)
    }

    /// Bytes mapped.
    #[allow(clippy::len_without_is_empty)] // An empty mapping does not exist.
    pub fn len(&self) -> usize {
        self.range.len
    }

    /// The addresses of the map.
    pub fn range(&self) -> Range {
        self.range
    }

    /// The eight bytes at a byte offset.
    fn word(&self, offset: usize) -> *mut u64 {
        assert!(offset.is_multiple_of(8), "offset {offset} of a word is not a multiple of 8");
        let fits = offset.checked_add(8).is_some_and(|end| end <= self.range.len);
        assert!(fits, "offset {offset} lies outside of {} mapped bytes", self.range.len);
        self.as_ptr().wrapping_add(offset).cast()
    }

    /// The first word of a page.
    fn page(&self, index: usize) -> *mut u64 {
        let pages = self.range.pages();
        assert!(index < pages, "page {index} of {pages} mapped pages");
        self.as_ptr().wrapping_add(index * PAGE_SIZE).cast()
    }

    /// Makes one huge page of the part at byte `offset`, a multiple of [`HUGE_PAGE_SIZE`]. The
    /// system's settings for huge pages of files do not matter, except `deny`. Some page of the
    /// part must have memory already. Its bytes stay as they are; pages without memory become
    /// zeros.
    ///
    /// Source: `madvise(2)`, `MADV_COLLAPSE` (Linux 6.1).
    ///
    /// # Errors
    ///
    /// `EINVAL`: the kernel is too old, or its settings forbid it; `ENOMEM`, `EAGAIN`: there is no
    /// free huge page now.
    pub fn make_huge(&self, offset: usize) -> io::Result<()> {
        assert!(offset.is_multiple_of(HUGE_PAGE_SIZE), "offset {offset} is not a multiple of a huge page");
        let fits = offset.checked_add(HUGE_PAGE_SIZE).is_some_and(|end| end <= self.range.len);
        assert!(fits, "offset {offset} of a huge page lies outside of {} mapped bytes", self.range.len);
        let part = Range::new(self.range.start + offset, HUGE_PAGE_SIZE);
        // SAFETY: MADV_COLLAPSE moves pages to a huge page; every byte stays as it is.
        Ok(unsafe { mm::advise(part, linux_raw_sys::general::MADV_COLLAPSE as i32) }?)
    }

    /// Makes the file's new memory come from this NUMA node, if the node has some free.
    ///
    /// Source: `mbind(2)`, `MPOL_PREFERRED`. On a shared mapping this is the policy of the file.
    ///
    /// # Errors
    ///
    /// `EINVAL`: there is no such node; `ENOSYS`: the kernel was built without NUMA.
    pub fn prefer_node(&self, node: u32) -> io::Result<()> {
        let mut nodes = [0u64; NODE_WORDS];
        let word = nodes.get_mut(node as usize / 64).ok_or(Errno::INVAL)?;
        *word = 1 << (node % 64);
        let mask = nodes.as_ptr().expose_provenance();
        // The kernel reads one bit fewer than the argument says.
        let args = [self.range.start, self.range.len, libc::MPOL_PREFERRED as usize, mask, NODE_WORDS * 64 + 1, 0];
        // SAFETY: the kernel reads at most `NODE_WORDS` words of the mask, a local that outlives
        // the call. No byte of the mapping changes.
        unsafe { syscall(libc::SYS_mbind, args) }?;
        Ok(())
    }

    /// The NUMA node that [`SharedMap::prefer_node`] has set for the file, if it was called.
    ///
    /// Source: `get_mempolicy(2)`, `MPOL_F_ADDR`.
    pub fn preferred_node(&self) -> Option<u32> {
        // `linux/mempolicy.h`.
        const MPOL_F_ADDR: usize = 2;
        let (mut mode, mut nodes) = (0i32, [0u64; NODE_WORDS]);
        let (mode_at, mask) = ((&raw mut mode).expose_provenance(), nodes.as_mut_ptr().expose_provenance());
        let args = [mode_at, mask, NODE_WORDS * 64 + 1, self.range.start, MPOL_F_ADDR];
        // SAFETY: the kernel writes the mode and at most `NODE_WORDS` words of the mask, locals
        // that outlive the call.
        unsafe { syscall(libc::SYS_get_mempolicy, args) }.ok()?;
        let word = nodes.iter().position(|&word| word != 0).filter(|_| mode == libc::MPOL_PREFERRED)?;
        Some(word as u32 * 64 + nodes[word].trailing_zeros())
    }

    /// Copies page `index` out.
    pub fn read_page(&self, index: usize, page: &mut [u8; PAGE_SIZE]) {
        let words = self.page(index);
        for (i, bytes) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            debug_assert!(i < WORDS);
            // SAFETY: `i` is below `WORDS`, so the word lies in the page, which `page` has checked
            // to be mapped; it is aligned. All accesses of this process to the map are atomic. A
            // relaxed load of eight bytes is one plain load, which is allowed on read-only memory.
            *bytes = unsafe { AtomicU64::from_ptr(words.add(i)) }.load(Ordering::Relaxed).to_ne_bytes();
        }
    }

    /// Copies `page` into page `index`.
    pub fn write_page(&self, index: usize, page: &[u8; PAGE_SIZE]) {
        assert!(self.writable, "writing page {index} of a map made for reading only");
        let words = self.page(index);
        for (i, bytes) in page.as_chunks::<8>().0.iter().enumerate() {
            debug_assert!(i < WORDS);
            // SAFETY: `i` is below `WORDS`, so the word lies in the page, which `page` has checked
            // to be mapped; it is aligned, and the map is writable. All accesses of this process to
            // the map are atomic.
            unsafe { AtomicU64::from_ptr(words.add(i)) }.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    }

    /// Whether page `index` has these bytes.
    pub fn page_equals(&self, index: usize, page: &[u8; PAGE_SIZE]) -> bool {
        let words = self.page(index);
        page.as_chunks::<8>().0.iter().enumerate().all(|(i, bytes)| {
            debug_assert!(i < WORDS);
            // SAFETY: `i` is below `WORDS`, so the word lies in the page, which `page` has checked
            // to be mapped; it is aligned. All accesses of this process to the map are atomic. A
            // relaxed load of eight bytes is one plain load, which is allowed on read-only memory.
            unsafe { AtomicU64::from_ptr(words.add(i)) }.load(Ordering::Relaxed) == u64::from_ne_bytes(*bytes)
        })
    }

    /// Makes [`SharedMap::fill`] possible for a part of the file, given in bytes. Make huge pages
    /// ([`SharedMap::make_huge`]) before.
    ///
    /// # Errors
    ///
    /// Those of [`Uffd::register_wp`]; `EINVAL` where the kernel cannot register files.
    pub fn register(&self, filler: &Uffd, part: std::ops::Range<usize>) -> io::Result<()> {
        Ok(filler.register_wp(self.part(part))?)
    }

    /// Undoes [`SharedMap::register`]. Pages that were filled stay as they are.
    pub fn unregister(&self, filler: &Uffd, part: std::ops::Range<usize>) {
        // Fails only where nothing is mapped.
        let _ = filler.unregister(self.part(part));
    }

    fn part(&self, part: std::ops::Range<usize>) -> Range {
        assert!(part.start < part.end && part.end <= self.range.len, "{part:?} of {} mapped bytes", self.range.len);
        Range::new(self.range.start + part.start, part.end - part.start)
    }

    /// Gives the pages from `index` on memory with these bytes, in one step: the kernel neither
    /// clears them first nor takes faults. The pages have no memory yet, and were registered with
    /// the same [`filler`]. Returns how many were written; 0: the kernel refused.
    pub fn fill(&self, filler: &Uffd, index: usize, pages: &[[u8; PAGE_SIZE]]) -> usize {
        let Some(last) = pages.len().checked_sub(1) else { return 0 };
        assert!(self.writable, "writing page {index} of a map made for reading only");
        let (first, _) = (self.page(index), self.page(index + last));
        // SAFETY: both ends were checked to lie in this map, which gives out no references but to
        // atomics. The kernel refuses pages that have memory, so a reader sees zeros or these
        // bytes.
        unsafe { filler.copy(first.expose_provenance(), pages.as_flattened()) }.map_or(0, |bytes| bytes / PAGE_SIZE)
    }

    /// The eight bytes at byte `offset` as an atomic.
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(self.writable, "an atomic in a map made for reading only");
        // SAFETY: `word` has checked that the bytes are aligned and mapped, and they are writable.
        // They stay mapped as long as `self` is borrowed. All accesses of this process to the map
        // are atomic.
        unsafe { AtomicU64::from_ptr(self.word(offset)) }
    }

    /// Loads the eight bytes at byte `offset`, also from a map for reading only.
    pub fn load_u64(&self, offset: usize) -> u64 {
        // SAFETY: `word` has checked that the bytes are aligned and mapped. All accesses of this
        // process to the map are atomic. An acquiring load of eight bytes is one plain load on
        // 64-bit processors, which is allowed on read-only memory.
        unsafe { AtomicU64::from_ptr(self.word(offset)) }.load(Ordering::Acquire)
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: this value made the mapping, and what was borrowed from it cannot outlive it. The
        // call cannot fail: the range is the one that mmap returned, and removing a whole mapping
        // needs no new one.
        let _ = unsafe { mm::unmap(self.range) };
    }
}
