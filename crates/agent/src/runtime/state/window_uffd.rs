//! The userfaultfd of merge windows: blocks writers, and tells pinned pages from others.
//!
//! A device that reads into guest RAM (`O_DIRECT`, as QEMU does with `cache=none`) writes to the
//! physical page, past every protection. If something else is mapped there by then, what it read is
//! lost. `VmPin` does not count such short pins. `UFFDIO_MOVE` (Linux 6.8) refuses pages that may
//! be pinned, or that another process shares, and checks again after it has unmapped the page. So a
//! window moves its pages to a *scratch* area before it replaces them, and discards them there.
//! Meanwhile readers wait too: the span is registered for missing pages.
//!
//! A page that was merged and has been copied since lies in a mapping of the store, and cannot be
//! checked. Before Linux 6.8 no page can.

#![allow(unsafe_code)] // Moves pages of the program's memory.

use kmem::range::Range;
use kmem::uffd::{CreateError, Features, Protection, Uffd};
use kmem::{PAGE_SIZE, mm, raw};
use rustix::io::Errno;

use self::children::Children;
use crate::runtime::descriptors::Descriptor;
use crate::runtime::sabotage::{self, Sabotage};

mod children;

/// Bytes of the scratch area: a whole window.
pub(crate) const SCRATCH_LEN: usize = wire::MAX_WINDOW_PAGES as usize * PAGE_SIZE;
/// How often a page that the kernel is busy with is tried again.
const TRIES: u32 = 16;

fn keep(uffd: Uffd) -> Result<Descriptor<Uffd>, CreateError> {
    Descriptor::new(uffd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO).into())
}

/// What became of pages that were to be put back; of several the last of these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum PutBack {
    /// They are in their place.
    Done,
    /// The program has unmapped some meanwhile, or mapped something else there.
    Gone,
    /// Some could not be put back. It may be tried again.
    Failed,
}

/// The userfaultfd, and the place where pages go.
pub(crate) struct WindowUffd {
    uffd: Descriptor<Uffd>,
    scratch: Option<Range>,
    /// Where the kernel reports forks.
    children: Option<Children>,
}

impl WindowUffd {
    /// A userfaultfd that also stops faults from inside the kernel (no `UFFD_USER_MODE_ONLY`): the
    /// kernel writes to guest RAM too, and would get `EFAULT`.
    pub(crate) fn new() -> Result<Self, CreateError> {
        let features = Features::WP | Features::WP_UNPOPULATED;
        let taking = features | Features::MOVE | Features::POISON;
        let with_forks = Uffd::new(taking | Features::EVENT_FORK);
        let sees_forks = with_forks.is_ok();
        let Ok(uffd) = with_forks.or_else(|_| Uffd::new(taking)) else {
            return Ok(Self { uffd: keep(Uffd::new(features)?)?, scratch: None, children: None });
        };
        let scratch = mm::map_anonymous(SCRATCH_LEN).ok().map(|start| Range::new(start, SCRATCH_LEN));
        let scratch = scratch.filter(|range| {
            // SAFETY: the memory was mapped just now and nobody else knows of it. Both advices
            // leave its bytes as they are, and no child needs it.
            unsafe {
                let _ = raw::madvise(range.start, range.len, libc::MADV_DONTFORK);
                let _ = raw::madvise(range.start, range.len, libc::MADV_NOHUGEPAGE);
            }
            uffd.register_wp(*range).is_ok()
        });
        let uffd = keep(uffd)?;
        let children = scratch.filter(|_| sees_forks).map(|scratch| Children::new(&uffd, scratch));
        Ok(Self { uffd, scratch, children })
    }

    pub(super) fn is_intact(&self) -> bool {
        self.uffd.is_intact()
    }

    /// Blocks writers to a span, once it is no longer registered with another userfaultfd.
    pub(super) fn block_writers(&self, span: Range) -> Result<(), Errno> {
        self.children.iter().for_each(|children| children.opens(span));
        self.uffd.register_wp(span)?;
        if sabotage::is_on(Sabotage::NoProtect) { Ok(()) } else { self.uffd.write_protect(span, Protection::Set) }
    }

    /// Lets blocked threads go on. An error means that nothing is mapped in the span any more: then
    /// nothing is registered either.
    pub(super) fn release(&self, span: Range) {
        let _ = self.uffd.unregister(span);
        let _ = self.uffd.wake(span);
        // From here on no fork copies anything that is registered.
        self.settle_children();
        self.children.iter().for_each(|children| children.closed(span));
    }

    /// Lets forks go on that have copied memory of an open window. Their children get the pages
    /// that are in the scratch area.
    fn settle_children(&self) {
        self.children.iter().for_each(|children| children.settle(&self.uffd));
    }

    /// Whether the kernel has reported forks since this was last asked.
    pub(super) fn take_forks(&self) -> bool {
        self.children.as_ref().is_some_and(Children::take_forks)
    }

    /// Whether pinned pages can be told from others.
    pub(crate) fn can_check_pins(&self) -> bool {
        self.scratch.is_some()
    }

    /// Makes threads wait that touch pages which are taken away, until the window closes; the agent
    /// must not touch the span either. Nothing in it is protected, and no other userfaultfd has it.
    pub(super) fn await_missing(&self, span: Range) -> Result<(), Errno> {
        if sabotage::is_on(Sabotage::NoProtect) {
            return Ok(());
        }
        self.children.iter().for_each(|children| children.opens(span));
        self.uffd.register_missing(span)
    }

    /// Where writers are [blocked](WindowUffd::block_writers): blocks readers too of pages that are
    /// taken away. From here on the agent itself must not touch the span.
    pub(crate) fn block_readers(&self, span: Range) -> Result<(), Errno> {
        self.uffd.register_missing_wp(span)
    }

    /// Moves pages to the scratch area, from the first on; returns how many bytes were moved, and
    /// why the next page was not. `EBUSY`: it may be pinned.
    ///
    /// They go to `offset` bytes behind the area's start, where it must be empty.
    ///
    /// # Safety
    ///
    /// - `from` lies in an open window in which whoever touches a missing page waits.
    /// - Before the window closes, the caller maps the same bytes there, or [puts the pages
    ///   back](WindowUffd::put_back).
    /// - The agent holds no reference into `from`.
    pub(crate) unsafe fn take_away(&self, from: Range, offset: usize) -> (usize, Result<(), Errno>) {
        let Some(scratch) = self.scratch.filter(|scratch| offset + from.len <= scratch.len) else {
            return (0, Err(Errno::NOSYS));
        };
        let (mut done, mut tries, mut most) = (0, 0, from.len);
        let mut emptied = None;
        while done < from.len {
            let len = most.min(from.len - done);
            let part = Range::new(from.start + done, len);
            // SAFETY: by the contract no thread reaches the pages of `from` before their bytes are
            // back, and no reference into them exists. Nothing refers to the scratch area, which is
            // the agent's own.
            match unsafe { self.uffd.move_pages(part, scratch.start + offset + done) } {
                Ok(moved) if moved == len => {
                    self.note(Range::new(part.start, moved), offset + done);
                    (done, tries, most) = (done + len, 0, from.len);
                }
                // The pages lie in two mappings: halving finds the border.
                Err(Errno::INVAL) if len > PAGE_SIZE => most = (len / 2).next_multiple_of(PAGE_SIZE),
                // A part was moved. The next call says why it ended.
                Ok(moved) => {
                    self.note(Range::new(part.start, moved), offset + done);
                    (done, tries) = (done + moved, 0);
                }
                Err(Errno::AGAIN) if tries < TRIES => {
                    self.settle_children();
                    tries += 1;
                }
                // Somebody touched the scratch area: a debugger, say, or `mlockall`.
                Err(Errno::EXIST) if emptied != Some(done) => {
                    emptied = Some(done);
                    self.empty(Range::new(scratch.start + offset + done, len));
                }
                Err(Errno::AGAIN) => return (done, Err(Errno::BUSY)),
                Err(error) => return (done, Err(error)),
            }
        }
        (done, Ok(()))
    }

    /// Notes that pages of `place` are in the scratch area.
    fn note(&self, place: Range, offset: usize) {
        self.children.iter().for_each(|children| children.note(place, offset));
    }

    /// Where pages are that were taken to `offset`.
    pub(crate) fn taken_at(&self, offset: usize) -> Option<usize> {
        self.scratch.filter(|scratch| offset < scratch.len).map(|scratch| scratch.start + offset)
    }

    /// Moves pages back that were taken from `to`, to `offset`. In what replaced their mapping
    /// nothing is changed.
    ///
    /// A page that came back is not write-protected: its writers do not wait for the end of the
    /// window, and the kernel counts it as written.
    pub(crate) fn put_back(&self, to: Range, offset: usize) -> PutBack {
        let Some(scratch) = self.scratch else { return PutBack::Failed };
        let from = Range::new(scratch.start + offset, to.len);
        // SAFETY: the scratch area is the agent's own, and nothing refers to it. At `to` a page
        // that is in place already ends the call, and missing ones get their own bytes back.
        let done = if to.len > PAGE_SIZE { unsafe { self.uffd.move_pages(from, to.start) }.unwrap_or(0) } else { 0 };
        self.children.iter().for_each(|children| children.forget(Range::new(to.start, done)));
        // The others page by page: the place may consist of several mappings.
        let pages = (done..to.len).step_by(PAGE_SIZE);
        let backs = pages.map(|at| self.put_page_back(to.start + at, scratch.start + offset + at));
        backs.max().unwrap_or(PutBack::Done)
    }

    fn put_page_back(&self, to: usize, from: usize) -> PutBack {
        for _ in 0..TRIES {
            // SAFETY: the scratch area is the agent's own, and nothing refers to it. At `to` a page
            // that is in place already stays (EEXIST), and a missing one gets its own bytes back.
            match unsafe { self.uffd.move_pages(Range::new(from, PAGE_SIZE), to) } {
                Ok(_) => {
                    self.children.iter().for_each(|children| children.forget(Range::new(to, PAGE_SIZE)));
                    return PutBack::Done;
                }
                Err(Errno::EXIST) => return PutBack::Done,
                Err(Errno::AGAIN) => self.settle_children(),
                Err(Errno::BUSY) => {}
                Err(_) => break,
            }
        }
        // Nothing is mapped there, or the mapping is protected or locked by now: a page cannot be
        // moved between mappings that differ in this, but copied.
        //
        // SAFETY: the scratch area is the agent's own, and holds the page that was taken. Nobody
        // writes to it, and only the kernel reads it, which answers with an error where it cannot.
        let page = unsafe { std::slice::from_raw_parts(from as *const u8, PAGE_SIZE) };
        // SAFETY: a missing page gets its own bytes. Nobody saw zeros there, since the place is
        // registered for missing pages. The agent has no reference into it.
        match unsafe { self.uffd.copy(to, page) } {
            Ok(_) | Err(Errno::EXIST) => PutBack::Done,
            Err(Errno::NOENT) => PutBack::Gone,
            // The page's memory failed while it was away. The program is told when it reads it.
            //
            // SAFETY: the agent reads no memory of the program without asking the kernel first.
            Err(Errno::FAULT) => match unsafe { self.uffd.poison(to) } {
                Ok(()) => PutBack::Done,
                Err(_) => PutBack::Failed,
            },
            Err(_) => PutBack::Failed,
        }
    }

    /// Discards what was moved to this part of the scratch area, which starts at 0 here.
    pub(crate) fn discard_taken(&self, part: Range) {
        self.children.iter().for_each(Children::forget_all);
        if let Some(scratch) = self.scratch.filter(|scratch| part.end() <= scratch.len) {
            // Each page in it was replaced by a mapping with the same bytes, or was moved back.
            self.empty(Range::new(scratch.start + part.start, part.len));
        }
    }

    /// Discards a part of the scratch area that nothing relies on.
    fn empty(&self, part: Range) {
        // SAFETY: the scratch area is the agent's own. By the callers nothing relies on what the
        // part holds: its pages were replaced or moved back, or none was taken to it yet.
        let _ = unsafe { raw::madvise(part.start, part.len, libc::MADV_DONTNEED) };
    }

    /// Releases every blocked thread, and unmaps the scratch area, which a child did not inherit.
    pub(super) fn close(self) {
        if let Some(scratch) = self.scratch {
            // SAFETY: the scratch area is the agent's own, and nothing refers to it any more.
            let _ = unsafe { raw::munmap(scratch.start, scratch.len) };
        }
    }
}
