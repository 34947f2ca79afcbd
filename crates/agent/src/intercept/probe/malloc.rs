//! Memory of the GNU C library's allocator, which unmaps it by system calls of its own.
//!
//! ```text
//! a large block    a mapping. Its header lies 16 bytes before the block: what precedes the header,
//!                  the size, and a flag (IS_MMAPPED). A plain block's header begins the mapping
//! a thread's heap  at a multiple of 64 MiB: its arena, the heap before it, two sizes
//! ```
//!
//! Only pages that have memory are read: a read would give the others a page of zeros.
//!
//! Other allocators unmap by symbols, which the agent sees. Memory is read as a stranger would: it
//! may be unmapped meanwhile.

#![allow(unsafe_code)] // process_vm_readv(2).

use std::fs::File;
use std::os::unix::fs::FileExt;

use kmem::PAGE_SIZE;
use kmem::range::Range;

use crate::runtime::denied::{self, Need};

/// Alignment and most bytes of a thread's heap (`HEAP_MAX_SIZE`).
const HEAP: usize = 64 << 20;
/// How far before the range a block's header is looked for, in bytes: takes some 10 ms.
const REACH: usize = 64 << 20;
/// Where in its first page, or before its second, a block's header lies: at the start, or before
/// the first multiple of its alignment (32 to 4,096 bytes; larger ones are multiples of pages).
const OFFSETS: [usize; 9] = [0, 16, 48, 112, 240, 496, 1008, 2032, 4080];
const HEADER: usize = 16;
/// The flag of a block with a mapping of its own, and all flags.
const IS_MMAPPED: usize = 2;
const FLAGS: usize = 7;
/// Headers that are read at a time: `UIO_MAXIOV`.
const AT_ONCE: usize = 1024;

/// Whether the range belongs to a block of malloc, as far as memory from `before` on tells. `None`:
/// the kernel does not say.
pub(super) fn owns(range: Range, before: usize) -> Option<bool> {
    Some(is_in_heap(range)? || is_in_block(range, before.max(range.start.saturating_sub(REACH)))?)
}

/// Whether a thread's heap holds the range.
fn is_in_heap(range: Range) -> Option<bool> {
    let heap = range.start & !(HEAP - 1);
    let mut words = [0; 4];
    if heap == 0 || touched(heap, heap)?.is_empty() || read(&[heap], &mut words) < size_of_val(&words) {
        return Some(false);
    }
    let [arena, previous, size, writable] = words;
    let is_size = |size: usize| size > 0 && size <= HEAP && size.is_multiple_of(PAGE_SIZE);
    let is_heap = arena != 0
        && arena % HEAP < PAGE_SIZE
        && previous.is_multiple_of(HEAP)
        && is_size(size)
        && is_size(writable)
        && size <= writable
        && heap + writable > range.start;
    Some(is_heap)
}

/// Whether a block with a mapping of its own reaches into the range. `from` is where to begin.
fn is_in_block(range: Range, from: usize) -> Option<bool> {
    let mut pages = touched(from.next_multiple_of(PAGE_SIZE), range.start)?.into_iter().peekable();
    while pages.peek().is_some() {
        let group = pages.by_ref().take(AT_ONCE / OFFSETS.len());
        let places: Vec<usize> = group.flat_map(|page| OFFSETS.map(|offset| page + offset)).collect();
        let mut words = vec![0; places.len() * 2];
        let mut left: &[usize] = &places;
        let mut into: &mut [usize] = &mut words;
        // The kernel stops at the first place that is not mapped, which is left out.
        while !left.is_empty() {
            let done = (read(left, into) / HEADER + 1).min(left.len());
            left = &left[done..];
            into = &mut into[2 * done..];
        }
        if places.iter().zip(words.chunks_exact(2)).any(|(&place, words)| is_header(place, words[0], words[1], range)) {
            return Some(true);
        }
    }
    Some(false)
}

/// The pages from `from` to `last` that have memory, or are swapped out. `None`: the kernel does
/// not say.
fn touched(from: usize, last: usize) -> Option<Vec<usize>> {
    /// Present, or swapped (Documentation/admin-guide/mm/pagemap.rst).
    const HAS_MEMORY: u64 = 3 << 62;
    const ENTRY: usize = size_of::<u64>();
    let pages = (last - from) / PAGE_SIZE + 1;
    let mut entries = vec![0; pages * ENTRY];
    let file = File::open("/proc/self/pagemap").inspect_err(|error| denied::tell(Need::Pagemap, error)).ok()?;
    file.read_exact_at(&mut entries, (from / PAGE_SIZE * ENTRY) as u64).ok()?;
    let has_memory = |entry: &[u8]| entry.try_into().is_ok_and(|entry| u64::from_ne_bytes(entry) & HAS_MEMORY != 0);
    let touched = entries.chunks_exact(ENTRY).enumerate().filter(|(_, entry)| has_memory(entry));
    Some(touched.map(|(i, _)| from + i * PAGE_SIZE).collect())
}

/// Whether these words, at this place, are the header of a block that reaches into the range.
fn is_header(place: usize, before: usize, size: usize, range: Range) -> bool {
    let (flags, size) = (size & FLAGS, size & !FLAGS);
    let Some(end) = place.checked_add(size) else { return false };
    let begins = place.checked_sub(before).is_some_and(|start| start.is_multiple_of(PAGE_SIZE));
    // The block fills its mapping. One that begins with the range holds all of it.
    let reaches = end > range.start && (place + HEADER <= range.start || end >= range.end());
    flags == IS_MMAPPED && size >= PAGE_SIZE && begins && end.is_multiple_of(PAGE_SIZE) && reaches
}

/// Reads as many bytes at each place as there are for it; returns how many were read.
fn read(places: &[usize], into: &mut [usize]) -> usize {
    let each = size_of_val(into) / places.len();
    let remote: Vec<libc::iovec> =
        places.iter().map(|&place| libc::iovec { iov_base: place as *mut _, iov_len: each }).collect();
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: size_of_val(into) };
    let errno = kmem::raw::errno();
    // SAFETY: the kernel writes at most the length of `into`, and checks the places as it would
    // those of a stranger. Both lists live until the call returns.
    let read =
        unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
    kmem::raw::set_errno(errno);
    usize::try_from(read).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use kmem::{mm, raw};

    use super::*;

    const LEN: usize = 8 << 20;

    fn pages_of(block: usize) -> Range {
        let start = block.next_multiple_of(PAGE_SIZE);
        Range::new(start, (block + LEN - start) & !(PAGE_SIZE - 1))
    }

    #[test]
    fn blocks_of_malloc_are_known() {
        // SAFETY: the C library's allocator; the blocks are only looked at.
        unsafe {
            let plain = libc::malloc(LEN) as usize;
            assert_eq!(Some(true), owns(pages_of(plain), plain & !(PAGE_SIZE - 1)), "rounded up");
            let inner = Range::new(pages_of(plain).start + (4 << 20), 1 << 20);
            assert_eq!(Some(true), owns(inner, plain & !(PAGE_SIZE - 1)), "in its middle");
            for align in [64, 4096, 2 << 20] {
                let mut aligned = std::ptr::null_mut();
                assert_eq!(libc::posix_memalign(&mut aligned, align, LEN), 0);
                let before = (aligned as usize - HEADER) & !(PAGE_SIZE - 1);
                assert_eq!(Some(true), owns(pages_of(aligned as usize), before), "aligned to {align}");
                libc::free(aligned);
            }
            libc::free(plain as *mut _);
        }
        // A thread's heap.
        std::thread::spawn(|| {
            // SAFETY: the C library's allocator; the block is only looked at.
            unsafe {
                let block = libc::malloc(100 << 10) as usize;
                assert_eq!(
                    Some(true),
                    owns(Range::new(block.next_multiple_of(PAGE_SIZE), PAGE_SIZE), block & !(HEAP - 1))
                );
                libc::free(block as *mut _);
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn mapped_memory_is_nobodys() {
        let start = mm::map_anonymous(LEN).unwrap();
        assert_eq!(Some(false), owns(Range::new(start, LEN), start));
        assert_eq!(Some(false), owns(Range::new(start + PAGE_SIZE, LEN / 2), start));
        // SAFETY: the memory was mapped above, and nothing refers to it.
        unsafe { raw::munmap(start, LEN) }.unwrap();
    }
}
