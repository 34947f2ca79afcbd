//! Children of a fork past the C library that copied memory in the middle of a window.
//!
//! Pages that a window has taken away are missing in such a child. With `EVENT_FORK` its copy of
//! the window has a userfaultfd of its own, and the fork does not return before that was received:
//! so the child has touched no page. It gets copies from the scratch area.
//!
//! ```text
//! fork      copies the window; from here on the kernel refuses calls on the userfaultfd (EAGAIN)
//! receive   the child's userfaultfd; the fork goes on
//! copy      each page that was taken and is missing in the child
//! release   the child's copy of the window, and close its userfaultfd: its threads go on
//! ```
//!
//! The refusals order both: a window that closes after a fork notices, however late the report.

#![allow(unsafe_code)] // Copies pages to a child.

use std::cell::{Cell, RefCell};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::range::Range;
use kmem::uffd::{Event, Protection, Uffd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::runtime::descriptors::Descriptor;

/// Pause until a fork has copied all memory, and its report can be read.
const PAUSE: Duration = Duration::from_micros(20);
/// The longest wait for a report: such a fork copies many gigabytes of page tables.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often, once in a millisecond, a page is copied to a child while there is no free memory.
const COPY_TRIES: u32 = 1000;

/// Pages in the scratch area, and children that lack them.
pub(super) struct Children {
    scratch: Range,
    /// Spans of open windows.
    open: RefCell<Vec<Range>>,
    /// Addresses of pages that were taken, and of their places in the scratch area.
    taken: RefCell<Vec<(usize, usize)>>,
    has_forked: Cell<bool>,
    /// To receive a child's userfaultfd takes a free descriptor. Closing this one makes room.
    spare: RefCell<Option<Descriptor<OwnedFd>>>,
}

impl Children {
    /// Nothing was taken to this scratch area of a userfaultfd with `EVENT_FORK`. A part of the
    /// area's first page is registered with it.
    pub(super) fn new(uffd: &Uffd, scratch: Range) -> Self {
        Self {
            scratch,
            open: RefCell::new(Vec::with_capacity(1)),
            taken: RefCell::new(Vec::with_capacity(scratch.pages())),
            has_forked: Cell::new(false),
            spare: RefCell::new(keep_spare(uffd)),
        }
    }

    /// A window is about to open over this span.
    pub(super) fn opens(&self, span: Range) {
        self.open.borrow_mut().push(span);
    }

    /// It is closed, and what it made of forks is settled.
    pub(super) fn closed(&self, span: Range) {
        self.open.borrow_mut().retain(|open| *open != span);
    }

    /// Pages of `place` were taken to this offset in the scratch area.
    pub(super) fn note(&self, place: Range, offset: usize) {
        let pages = (0..place.len).step_by(PAGE_SIZE);
        self.taken.borrow_mut().extend(pages.map(|at| (place.start + at, self.scratch.start + offset + at)));
    }

    /// Pages are back in their place.
    pub(super) fn forget(&self, place: Range) {
        self.taken.borrow_mut().retain(|taken| !(place.start..place.end()).contains(&taken.0));
    }

    /// The scratch area is emptied.
    pub(super) fn forget_all(&self) {
        self.taken.borrow_mut().clear();
    }

    /// Whether there were forks since this was last asked.
    pub(super) fn take_forks(&self) -> bool {
        self.has_forked.replace(false)
    }

    /// Receives what forks have copied, if any has, and completes it.
    pub(super) fn settle(&self, uffd: &Uffd) {
        let begin = Instant::now();
        // The area is never protected: this only asks whether a fork is under way.
        while uffd.write_protect(Range::new(self.scratch.start, PAGE_SIZE), Protection::Lift) == Err(Errno::AGAIN) {
            match uffd.read_event() {
                Ok(Some(Event::Fork { child })) => {
                    self.has_forked.set(true);
                    self.complete(&Uffd::from_fd(child));
                }
                // A thread that waits for a page. It goes on when the window closes.
                Ok(Some(_)) => continue,
                Ok(None) => thread::sleep(PAUSE),
                Err(Errno::MFILE | Errno::NFILE) => {
                    drop(self.spare.take());
                    thread::sleep(PAUSE);
                }
                Err(_) => return,
            }
            if begin.elapsed() > PATIENCE {
                return;
            }
        }
        let mut spare = self.spare.borrow_mut();
        if spare.is_none() {
            *spare = keep_spare(uffd);
        }
    }

    /// Gives a child the pages that were taken and that it lacks.
    fn complete(&self, child: &Uffd) {
        for &(place, from) in self.taken.borrow().iter() {
            // SAFETY: the page lies in the scratch area, where nobody writes to it, and stays there
            // while it is noted.
            let page = unsafe { std::slice::from_raw_parts(from as *const u8, PAGE_SIZE) };
            for _ in 0..COPY_TRIES {
                // SAFETY: the page is missing in the child since it was taken from the parent, and
                // the child's threads wait where they touch it. Nobody has seen zeros there. What
                // the child has, or has mapped there by now, stays (EEXIST, ENOENT).
                match unsafe { child.copy(place, page) } {
                    Err(Errno::NOMEM | Errno::AGAIN) => thread::sleep(Duration::from_millis(1)),
                    _ => break,
                }
            }
        }
        // Where a raw `clone` has copied this descriptor, closing it lets nobody go on. This fails
        // where the child has mapped something else by now.
        for &span in self.open.borrow().iter() {
            let _ = child.unregister(span);
        }
    }
}

fn keep_spare(uffd: &Uffd) -> Option<Descriptor<OwnedFd>> {
    fcntl_dupfd_cloexec(uffd.as_fd(), 0).ok().and_then(|fd| Descriptor::new(fd).ok())
}
