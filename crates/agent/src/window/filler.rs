//! Memory becomes plain again, in one mapping with its neighbours.
//!
//! Fresh anonymous memory joins the mapping beside it, if no page of it was touched before it is in
//! its place. It comes there registered with a userfaultfd: readers wait until it is filled, and
//! see no zeros.
//!
//! ```text
//! open      the window's span goes to the filler's userfaultfd: writers wait
//! read      the pages that may go
//! move      untouched, registered memory over them (`mremap`)
//! fill      their bytes, page by page (`UFFDIO_COPY`)
//! close     the span is tracked again; the kernel joins the mappings
//! ```
//!
//! Memory stays registered when it moves only with `EVENT_REMAP`. Then `mremap` waits until the
//! event is read, by a thread of the filler's own.
//!
//! A child of a fork past the C library lacks what is not filled yet. Where the kernel reports
//! forks, its copy of the window is registered too, and gets the same bytes.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kmem::range::Range;
use kmem::uffd::{CreateError, Event, Features, Protection, Uffd};
use kmem::{PAGE_SIZE, raw};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use wire::Run;

use crate::runtime::descriptors::Descriptor;
use crate::runtime::poll;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::region::Region;
use crate::window::anonymous::{Backing, advise};
use crate::window::{ZEROS, gate};

/// Bytes of the reader's stack.
const STACK: usize = 64 << 10;
/// How often, once in a millisecond, filling a page is tried before the program is ended.
const FILL_TRIES: u32 = 1000;

pub(crate) struct Filler {
    uffd: Arc<Descriptor<Uffd>>,
    stop: Arc<Descriptor<OwnedFd>>,
    forks: Arc<Forks>,
    reader: Option<JoinHandle<()>>,
}

/// Forks that copied an open window.
#[derive(Default)]
struct Forks {
    /// The userfaultfds of children that lack something. `None`: nothing is lacking now.
    children: Mutex<Option<Vec<Uffd>>>,
    /// Such children were made, and are not counted yet.
    uncounted: AtomicBool,
}

impl Forks {
    /// The reader receives a child with this held, so what was reported is in the list.
    fn children(&self) -> MutexGuard<'_, Option<Vec<Uffd>>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads events. A child that lacks nothing goes on at once.
    fn receive(&self, uffd: &Uffd) {
        let mut children = self.children();
        while let Ok(Some(event)) = uffd.read_event() {
            if let Event::Fork { child } = event {
                self.uncounted.store(true, Ordering::Release);
                if let Some(children) = children.as_mut() {
                    children.push(Uffd::from_fd(child));
                }
            }
        }
    }
}

fn keep<T: AsFd>(fd: T) -> Result<Descriptor<T>, Errno> {
    Descriptor::new(fd).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

pub(crate) fn create() -> Result<Uffd, CreateError> {
    let features = Features::WP | Features::WP_UNPOPULATED | Features::EVENT_REMAP;
    Uffd::new(features | Features::EVENT_FORK).or_else(|_| Uffd::new(features))
}

impl Filler {
    /// Starts the reader of a userfaultfd that [`create`] made, with this thread's signal mask.
    pub(crate) fn new(uffd: Arc<Descriptor<Uffd>>) -> Result<Self, Errno> {
        let forks = Arc::new(Forks::default());
        let stop = Arc::new(keep(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?);
        let (events, end, received) = (uffd.clone(), stop.clone(), forks.clone());
        let reader = thread::Builder::new().name("pageone-filler".into()).stack_size(STACK);
        let reader = reader.spawn(move || read_events(&events, &end, &received)).map_err(|_| Errno::AGAIN)?;
        Ok(Self { uffd, stop, forks, reader: Some(reader) })
    }

    /// Opens a window over a span that no other userfaultfd has: writers wait, and readers of pages
    /// without memory.
    pub(crate) fn open(&self, span: Range) -> Result<(), Errno> {
        self.uffd.register_missing_wp(span)?;
        self.uffd.write_protect(span, Protection::Set)
    }

    pub(crate) fn close(&self, span: Range) {
        // Fails only where nothing is mapped.
        let _ = self.uffd.unregister(span);
    }

    /// Replaces pages by anonymous memory with these bytes. After an error they are as they were.
    ///
    /// # Safety
    ///
    /// The pages lie in the open window `span` of this filler, may be taken away, and hold these
    /// bytes.
    pub(crate) unsafe fn replace(&self, region: &mut Region, span: Range, run: Run, bytes: &[u8]) -> Result<(), Errno> {
        let place = region.bytes(run);
        let memory = Range::new(gate::map_anywhere(place.len, region.sticky)?, place.len);
        *self.forks.children() = Some(Vec::new());
        let moved = self.uffd.register_missing_wp(memory).and_then(|()| {
            advise(region, memory, Backing::Anonymous);
            // SAFETY: `memory` was mapped above, and nobody else knows it. It takes the place with
            // no page in it and registered, so readers wait until it is filled below.
            unsafe { gate::move_over(memory, place.start) }
        });
        if let Err(error) = moved {
            // SAFETY: nobody refers to the memory, which stayed where it was.
            unsafe { gate::unmap_own(memory) };
            *self.forks.children() = None;
            return Err(error);
        }
        region.mapped.clear(run);
        if sabotage::is_on(Sabotage::SlowTake) {
            thread::sleep(Duration::from_secs(1));
        }
        for (i, page) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
            // Pages of zeros stay untouched.
            if page != ZEROS && !fill(&self.uffd, place.start + i * PAGE_SIZE, page) {
                // Going on would leave the program zeros where its memory was.
                raw::print(b"pageone-agent: out of memory while giving memory back\n");
                std::process::abort();
            }
        }
        self.complete(span, place.start, bytes);
        Ok(())
    }

    /// Gives children that were made meanwhile what they lack. The last page was filled after they
    /// were received: until then the kernel refuses that.
    fn complete(&self, span: Range, place: usize, bytes: &[u8]) {
        for child in self.forks.children().take().into_iter().flatten() {
            for (i, page) in bytes.chunks_exact(PAGE_SIZE).enumerate().filter(|(_, page)| *page != ZEROS) {
                fill(&child, place + i * PAGE_SIZE, page);
            }
            // Where a raw `clone` has copied this descriptor, closing it lets nobody go on.
            if !sabotage::is_on(Sabotage::NoUnregister) {
                let _ = child.unregister(span);
            }
        }
    }

    /// Whether there were forks since this was last asked.
    pub(crate) fn take_forks(&self) -> bool {
        self.forks.uncounted.swap(false, Ordering::AcqRel)
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = rustix::io::write(&**self.stop, &1u64.to_ne_bytes());
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Gives a page its bytes. False if that fails for long.
fn fill(uffd: &Uffd, place: usize, page: &[u8]) -> bool {
    for _ in 0..FILL_TRIES {
        // SAFETY: the place has no page, and readers of it wait: no thread has seen zeros there. No
        // reference into that memory is held.
        match unsafe { uffd.copy(place, page) } {
            // The program has mapped something else there, past the C library, or is gone.
            Ok(_) | Err(Errno::EXIST | Errno::NOENT | Errno::SRCH) => return true,
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
    false
}

/// Reads events until it is stopped: threads that move memory, or fork, wait for that.
fn read_events(uffd: &Descriptor<Uffd>, stop: &Descriptor<OwnedFd>, forks: &Forks) {
    loop {
        let mut fds = [uffd.number(), stop.number()].map(|fd| poll::interest(fd, libc::POLLIN));
        if !poll::wait(&mut fds, -1) || !uffd.is_intact() || fds[1].revents != 0 || fds[0].revents & !libc::POLLIN != 0
        {
            return;
        }
        forks.receive(uffd);
    }
}
