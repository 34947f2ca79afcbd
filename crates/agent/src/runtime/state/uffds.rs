//! The userfaultfds, one of which each managed page is registered with.
//!
//! *Tracking* (`WP_ASYNC`) is the usual one: the kernel resolves faults itself and notes the
//! writes. A thread that unmaps registered memory waits for the event thread, which needs
//! the agent's lock. So the agent itself unregisters memory before it unmaps it.
//!
//! A *window* is a span in which threads wait: it is taken from the tracking userfaultfd and given
//! to the window's ([`WindowUffd`]). Closing it unregisters the span, which wakes all, and tracks
//! it again. Where pages are compared in place the span is write-protected: writers wait, and
//! readers go on. Where pages are taken away first, only those wait who touch one that was taken,
//! and nothing is protected: each change of protection takes the span's pages out of a virtual
//! machine's stage-2 page tables, whether or not they are merged.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use kmem::range::Range;
use kmem::uffd::{Protection, Uffd};
use rustix::io::Errno;

use crate::runtime::descriptors::Descriptor;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::window_uffd::WindowUffd;

/// Whether a userfaultfd reports forks that bypass the C library.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForkEvents {
    Reported,
    None,
}

pub(crate) struct Userfaultfds {
    tracking: Option<Arc<Descriptor<Uffd>>>,
    window: Option<WindowUffd>,
    /// For a detach: the program may have lost the right to create one.
    filler: Option<Arc<Descriptor<Uffd>>>,
    /// Spans that could not be registered again after a window; tried again later.
    pub(super) untracked: Vec<Range>,
    /// Of the tracking userfaultfd.
    forks: ForkEvents,
}

impl Userfaultfds {
    pub(crate) const fn new() -> Self {
        Self { tracking: None, window: None, filler: None, untracked: Vec::new(), forks: ForkEvents::None }
    }

    /// All are there. The event thread reads the events of `tracking`.
    pub(crate) fn open(
        &mut self,
        tracking: Arc<Descriptor<Uffd>>,
        window: WindowUffd,
        filler: Descriptor<Uffd>,
        forks: ForkEvents,
    ) {
        (self.tracking, self.window) = (Some(tracking), Some(window));
        self.filler = Some(Arc::new(filler));
        self.forks = forks;
    }

    /// Whether the kernel reports forks that bypass the C library.
    pub(super) fn sees_forks(&self) -> bool {
        self.forks == ForkEvents::Reported
    }

    /// Closes all, which unregisters everything and wakes every thread that waits.
    pub(crate) fn close(&mut self) {
        (self.tracking, self.filler) = (None, None);
        self.window.take().into_iter().for_each(WindowUffd::close);
    }

    /// Forgets all in a forked child. Returns the number of the inherited tracking descriptor,
    /// which the caller closes: the event thread does not exist here.
    pub(crate) fn orphan(&mut self) -> Option<RawFd> {
        (self.window, self.filler) = (None, None);
        self.untracked.clear();
        self.tracking.take().map(|tracking| {
            let number = tracking.is_intact().then_some(tracking.number());
            std::mem::forget(tracking);
            number
        })?
    }

    /// Forgets all in a child, and leaves the parent's descriptors open.
    pub(super) fn forsake(&mut self) {
        std::mem::forget(self.window.take());
        std::mem::forget(self.tracking.take());
        std::mem::forget(self.filler.take());
        self.untracked.clear();
    }

    pub(crate) fn window(&self) -> Option<&WindowUffd> {
        self.window.as_ref()
    }

    /// The userfaultfd for a detach, unless the program has taken its descriptor.
    pub(crate) fn filler(&self) -> Option<Arc<Descriptor<Uffd>>> {
        self.filler.clone().filter(|filler| filler.is_intact())
    }

    /// Whether both descriptors are still there.
    pub(super) fn are_intact(&self) -> bool {
        self.tracking.as_ref().is_none_or(|tracking| tracking.is_intact())
            && self.window.as_ref().is_none_or(WindowUffd::is_intact)
    }

    /// The tracking userfaultfd, unless the program has taken its descriptor.
    fn tracking(&self) -> Option<&Uffd> {
        self.tracking.as_ref().filter(|tracking| tracking.is_intact()).map(|tracking| &***tracking)
    }

    /// Registers new memory for tracking. `None`: there is no tracking userfaultfd.
    pub(super) fn register(&self, range: Range) -> Option<Result<(), Errno>> {
        self.tracking().map(|tracking| tracking.register_wp(range))
    }

    /// Opens a window in which writers wait. After an error it is closed.
    pub(crate) fn open_window(&mut self, span: Range) -> Result<(), Errno> {
        let opened = self.begin_window(span).and_then(|window| window.block_writers(span));
        self.opened(span, opened)
    }

    /// Opens a window in which those wait who touch a page that [was
    /// taken](WindowUffd::take_away). After an error it is closed.
    pub(crate) fn open_taking(&mut self, span: Range) -> Result<(), Errno> {
        let opened = self.begin_window(span).and_then(|window| window.await_missing(span));
        self.opened(span, opened)
    }

    /// Takes a span from tracking, so that it can be given to the window's userfaultfd.
    fn begin_window(&mut self, span: Range) -> Result<&WindowUffd, Errno> {
        if !self.window.as_ref().is_some_and(WindowUffd::is_intact) {
            // In a forked child: the parent's works on the parent's memory only. Or the program has
            // taken the descriptor.
            self.window = WindowUffd::new().ok();
        }
        let window = self.window.as_ref().ok_or(Errno::NOMEM)?;
        self.untrack(span)?;
        Ok(window)
    }

    fn opened(&mut self, span: Range, result: Result<(), Errno>) -> Result<(), Errno> {
        if result.is_err() {
            self.close_window(span);
        } else if sabotage::is_on(Sabotage::SlowWindow) {
            std::thread::sleep(Duration::from_millis(50));
        }
        result
    }

    /// Closes a window: all threads go on, and the span is tracked again.
    pub(crate) fn close_window(&mut self, span: Range) {
        if let Some(window) = &self.window {
            window.release(span);
        }
        self.track(span);
    }

    /// Whether a process was made past the C library in the middle of a window, since this was last
    /// asked.
    pub(crate) fn take_forks(&self) -> bool {
        self.window.as_ref().is_some_and(WindowUffd::take_forks)
    }

    /// Registers a span for tracking again.
    pub(crate) fn track(&mut self, span: Range) {
        if let Some(tracking) = self.tracking()
            && tracking.register_wp(span).is_err()
        {
            self.untracked.push(span);
        }
    }

    /// Takes a span away from tracking, so that unmapping it raises no event.
    pub(crate) fn untrack(&self, span: Range) -> Result<(), Errno> {
        self.tracking().map_or(Ok(()), |tracking| tracking.unregister(span))
    }

    /// Marks a span as clean for tracking. Where that fails its pages count as written.
    pub(crate) fn mark_clean(&self, span: Range) {
        if let Some(tracking) = self.tracking() {
            let _ = tracking.write_protect(span, Protection::Set);
        }
    }

    /// Whether some span is to be [tracked](Userfaultfds::track) again.
    pub(crate) fn has_untracked(&self) -> bool {
        !self.untracked.is_empty()
    }
}
