//! Reading the program's memory as another process would, so that nothing there can end the
//! program.
//!
//! A dereference could: memory may be gone (glibc unmaps inside `free`, past every guard), and a
//! page may be poisoned by a memory error. The agent's threads block SIGBUS, so the kernel would
//! kill the program, QEMU for instance, instead of letting it handle the error. The system call
//! returns an error in both cases.

use kmem::PAGE_SIZE;
use kmem::procmem::read_own;
use kmem::range::Range;

/// Pages read in one call: with the frames that they are compared with they stay in the cache.
pub(crate) const CHUNK: usize = 32;

/// Room for one [chunk](CHUNK) of pages.
pub(crate) struct Buffer(Vec<u8>);

impl Buffer {
    /// Room for `pages` pages.
    pub(crate) fn new(pages: usize) -> Self {
        Self(vec![0; pages * PAGE_SIZE])
    }

    /// Reads pages; returns those that could be read from the front, one behind the other.
    pub(crate) fn read(&mut self, place: Range) -> &[u8] {
        let pages = read_own(place, &mut self.0);
        &self.0[..pages * PAGE_SIZE]
    }
}
