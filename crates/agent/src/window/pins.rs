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

use crate::runtime::raw;
use crate::window::MAX_PAGES;
use kmem::PAGE_SIZE;
use kmem::range::Range;
use kmem::uffd::{Features, Uffd};
use linux_raw_sys::general::{self as sys, uffdio_move, uffdio_register};
use linux_raw_sys::ioctl::UFFDIO_REGISTER;
use rustix::io::Errno;
use rustix::ioctl::{self, Updater};
use std::os::unix::fs::FileExt;

/// `_IOWR(0xAA, _UFFDIO_MOVE, struct uffdio_move)`; the bindings leave it out.
const UFFDIO_MOVE: ioctl::Opcode = ioctl::opcode::read_write::<uffdio_move>(0xAA, sys::_UFFDIO_MOVE as u8);
/// `UFFDIO_MOVE_MODE_DONTWAKE | UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`; the bindings leave out values
/// written as shifts.
const MOVE_MODE: u64 = 1 | 2;
/// How often a page that the kernel is busy with is tried again.
const TRIES: u32 = 16;

const _: () = assert!(size_of::<uffdio_move>() == 40 && UFFDIO_MOVE == 0xC028_AA05);

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
        let scratch = raw::map_anonymous(MAX_PAGES as usize * PAGE_SIZE)
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
        let mode = u64::from(sys::UFFDIO_REGISTER_MODE_MISSING | sys::UFFDIO_REGISTER_MODE_WP);
        let range = sys::uffdio_range { start: span.start as u64, len: span.len as u64 };
        let mut register = uffdio_register { range, mode, ioctls: 0 };
        // SAFETY: `uffdio_register` is UFFDIO_REGISTER's argument.
        unsafe { ioctl::ioctl(&self.uffd, Updater::<{ UFFDIO_REGISTER }, _>::new(&mut register)) }
    }

    /// Takes pages away, from the first on; returns how many bytes were taken, and why the page
    /// behind these was not. `EBUSY`: it may be pinned.
    ///
    /// They go to the scratch area from `offset` on, which must be empty there.
    ///
    /// # Safety
    /// Nobody may miss the pages.
    pub unsafe fn take_away(&self, from: Range, offset: usize) -> (usize, Result<(), Errno>) {
        let Some(scratch) = self.scratch.filter(|scratch| offset + from.len <= scratch.len) else {
            return (0, Err(Errno::NOSYS));
        };
        let (mut done, mut tries, mut most) = (0, 0, from.len);
        while done < from.len {
            let len = most.min(from.len - done);
            let mut request = uffdio_move {
                dst: (scratch.start + offset + done) as u64,
                src: (from.start + done) as u64,
                len: len as u64,
                mode: MOVE_MODE,
                move_: 0,
            };
            // SAFETY: `uffdio_move` is UFFDIO_MOVE's argument; the pages are the caller's to give.
            let result = unsafe { ioctl::ioctl(&self.uffd, Updater::<{ UFFDIO_MOVE }, _>::new(&mut request)) };
            match result {
                Ok(()) => (done, tries, most) = (done + len, 0, from.len),
                // Pages of two mappings: there, by halves, is the border.
                Err(Errno::INVAL) if len > PAGE_SIZE => most = (len / 2).next_multiple_of(PAGE_SIZE),
                // As far as it came; the next call says why no further.
                Err(Errno::AGAIN) if request.move_ > 0 => (done, tries) = (done + request.move_ as usize, 0),
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
            let mut request = uffdio_move {
                dst: (to.start + at) as u64,
                src: (scratch.start + offset + at) as u64,
                len: PAGE_SIZE as u64,
                mode: MOVE_MODE,
                move_: 0,
            };
            (0..TRIES).any(|_| {
                // SAFETY: `uffdio_move` is UFFDIO_MOVE's argument; the scratch area is the agent's own, and where a
                // page is in place already nothing is moved.
                let result = unsafe { ioctl::ioctl(&self.uffd, Updater::<{ UFFDIO_MOVE }, _>::new(&mut request)) };
                matches!(result, Ok(()) | Err(Errno::EXIST))
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
