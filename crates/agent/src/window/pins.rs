//! Telling pinned pages from others.
//!
//! A device that reads into guest RAM (`O_DIRECT`, as QEMU does with `cache=none`) writes to the
//! physical page, past every protection, also when something else is mapped there by then: what it
//! read would be lost. Such short pins are not counted in `VmPin`. What does look is `UFFDIO_MOVE`
//! (Linux 6.8): it refuses pages that may be pinned, or that another process shares,
//! and looks again once nobody can reach the page any more. So the pages of a merge are moved to a
//! *scratch* area first, and thrown away there. For that moment readers wait too, as the span is
//! registered for missing pages.
//!
//! It works on anonymous mappings only. A page that was merged before and has been copied since
//! lies in a mapping of the store, and cannot be checked; so it is with every page before Linux
//! 6.8.

#![allow(unsafe_code)] // ioctls on the program's memory.

use crate::window::MAX_PAGES;
use kmem::range::Range;
use kmem::uffd::{Features, Uffd};
use kmem::{PAGE_SIZE, mm, raw};
use rustix::io::Errno;
use std::os::unix::fs::FileExt;

/// How often a page that the kernel is busy with is tried again.
const TRIES: u32 = 16;

/// After a fork the kernel takes pages for shared until they are written, also when the child is
/// gone, and refuses to move them. This settles it for a page that nobody else maps any more: a
/// write fault, without a write (`MADV_POPULATE_WRITE`), after which it counts as written. A page
/// that a child still maps stays as it is, since this would copy it.
pub fn own(page: Range) {
    /// Bit 56: the page is mapped only here (Documentation/admin-guide/mm/pagemap.rst).
    const EXCLUSIVE: u64 = 1 << 56;
    let mut entry = [0; 8];
    let offset = (page.start / PAGE_SIZE * entry.len()) as u64;
    let file = std::fs::File::open("/proc/self/pagemap");
    if file.and_then(|file| file.read_exact_at(&mut entry, offset)).is_ok()
        && u64::from_ne_bytes(entry) & EXCLUSIVE != 0
    {
        // SAFETY: changes no bytes.
        let _ = unsafe { raw::madvise(page.start, page.len, libc::MADV_POPULATE_WRITE) };
    }
}

/// The userfaultfd of the windows, and the place where pages go.
pub struct Waiting {
    uffd: Uffd,
    scratch: Option<Range>,
}

impl Waiting {
    /// Without user-mode only: the kernel writes to guest RAM too, and would get `EFAULT`.
    pub fn new() -> Result<Waiting, kmem::uffd::CreateError> {
        let features = Features::WP | Features::WP_UNPOPULATED;
        let Ok(uffd) = Uffd::new(features | Features::MOVE) else {
            return Ok(Waiting { uffd: Uffd::new(features)?, scratch: None });
        };
        let scratch = mm::map_anonymous(MAX_PAGES as usize * PAGE_SIZE)
            .map(|start| Range::new(start, MAX_PAGES as usize * PAGE_SIZE));
        let scratch = scratch.ok().filter(|&range| {
            // SAFETY: neither changes memory.
            unsafe {
                let _ = raw::madvise(range.start, range.len, libc::MADV_DONTFORK);
                let _ = raw::madvise(range.start, range.len, libc::MADV_NOHUGEPAGE);
            }
            uffd.register_wp(range).is_ok()
        });
        Ok(Waiting { uffd, scratch })
    }

    /// The userfaultfd.
    pub fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// Whether pins can be seen.
    pub fn can_check(&self) -> bool {
        self.scratch.is_some()
    }

    /// Makes readers of pages that are taken away wait, until the span is unregistered. From here
    /// on the agent itself must not touch the span either.
    pub fn hold_readers(&self, span: Range) -> Result<(), Errno> {
        self.uffd.register_missing_wp(span)
    }

    /// Takes pages away, from the first on; returns how many bytes were taken, and why the page
    /// behind these was not. `EBUSY`: it may be pinned.
    ///
    /// They go to the scratch area from `offset` on, which must be empty there.
    ///
    /// # Safety
    /// No code relies on the pages of `from`, or refers to them: afterwards the range has none.
    pub unsafe fn take_away(&self, from: Range, offset: usize) -> (usize, Result<(), Errno>) {
        let Some(scratch) = self.scratch.filter(|scratch| offset + from.len <= scratch.len) else {
            return (0, Err(Errno::NOSYS));
        };
        let (mut done, mut tries, mut most) = (0, 0, from.len);
        while done < from.len {
            let len = most.min(from.len - done);
            let part = Range::new(from.start + done, len);
            // SAFETY: by the contract no code misses the pages; the scratch area is the agent's own.
            match unsafe { self.uffd.move_pages(part, scratch.start + offset + done) } {
                Ok(moved) if moved == len => (done, tries, most) = (done + len, 0, from.len),
                // Pages of two mappings: there, by halves, is the border.
                Err(Errno::INVAL) if len > PAGE_SIZE => most = (len / 2).next_multiple_of(PAGE_SIZE),
                // As far as it came; the next call says why no further.
                Ok(moved) => (done, tries) = (done + moved, 0),
                Err(Errno::AGAIN) if tries < TRIES => tries += 1,
                Err(Errno::AGAIN) => return (done, Err(Errno::BUSY)),
                Err(error) => return (done, Err(error)),
            }
        }
        (done, Ok(()))
    }

    /// Puts pages that were taken away from `to`, to `offset`, back into the mapping that they came
    /// from. `false`: not all could be.
    pub fn put_back(&self, to: Range, offset: usize) -> bool {
        let Some(scratch) = self.scratch else { return false };
        // Page by page: the place may consist of several mappings.
        (0..to.len).step_by(PAGE_SIZE).all(|at| {
            let page = Range::new(scratch.start + offset + at, PAGE_SIZE);
            (0..TRIES).any(|_| {
                // SAFETY: the scratch area is the agent's own, and no code refers to it. Where a page is in
                // place already nothing is moved.
                matches!(unsafe { self.uffd.move_pages(page, to.start + at) }, Ok(_) | Err(Errno::EXIST))
            })
        })
    }

    /// Throws away what was taken to the first `len` bytes of the scratch area.
    pub fn throw_away(&self, len: usize) {
        if let Some(scratch) = self.scratch {
            // SAFETY: the scratch area is the agent's own.
            let _ = unsafe { raw::madvise(scratch.start, len.min(scratch.len), libc::MADV_DONTNEED) };
        }
    }

    /// Gives everything back. (A forked child did not inherit the scratch area, and just drops
    /// this.)
    pub fn close(self) {
        if let Some(scratch) = self.scratch {
            // SAFETY: as above.
            let _ = unsafe { raw::munmap(scratch.start, scratch.len) };
        }
    }
}
