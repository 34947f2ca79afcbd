//! Dirty frames from a synchronous userfaultfd, for kernels before 6.7.
//!
//! The memory is write-protected. A thread that writes to a protected page sleeps until its fault
//! is served: the page is noted and its protection lifted. [`Source::collect`] hands over the noted
//! pages and protects them again.
//!
//! Serving and collecting exclude each other. A collector that ran between the noting of a page and
//! the lifting of its protection would protect a page that is protected already. Then the server
//! would lift the protection, and later writes would go unnoticed.

#![allow(unsafe_code)] // madvise(2), which populates memory.

use std::os::fd::{AsFd, BorrowedFd};

use dirty::DirtyTree;
use kmem::uffd::{Event, Features, Protection, Uffd};
use kmem::{PAGE_SIZE, Range, mm};
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::{Extent, Source, SourceError};

/// Ranges of frames taken from the set at a time: as many as a small array on the stack holds.
const BATCH: usize = 64;

/// Pages of this process that any of its threads wrote to. Shared by reference: one thread serves
/// faults, another collects.
#[derive(Debug)]
pub struct UffdSource {
    uffd: Uffd,
    extents: Vec<Extent>,
    noted: DirtyTree,
    /// Held while a fault is served, and during a collection.
    exclusive: Mutex<()>,
}

fn failed(call: &'static str) -> impl FnOnce(Errno) -> SourceError {
    move |errno| SourceError::Uffd { call, errno }
}

impl UffdSource {
    /// Protects these pieces of memory of this process (private and anonymous). From now on a
    /// thread must call [`UffdSource::serve`] whenever the descriptor is readable; until then
    /// writers sleep.
    ///
    /// Before Linux 6.4 only populated pages can be protected. There all of the memory is populated
    /// first, with zero pages where it is untouched.
    ///
    /// # Errors
    ///
    /// [`SourceError`]; no memory is protected then.
    pub fn new(extents: Vec<Extent>) -> Result<Self, SourceError> {
        let unpopulated = Uffd::supported_features()? & Features::WP_UNPOPULATED;
        let uffd = Uffd::new(Features::WP | unpopulated)?;
        let frames = extents.iter().map(|extent| extent.first + extent.memory.pages() as u64).max().unwrap_or(0);
        let source = Self { uffd, extents, noted: DirtyTree::new(frames)?, exclusive: Mutex::new(()) };
        for extent in &source.extents {
            if unpopulated.is_empty() {
                // SAFETY: populating for reading changes no byte and removes no mapping.
                unsafe { mm::advise(extent.memory, libc::MADV_POPULATE_READ) }.map_err(failed("MADV_POPULATE_READ"))?;
            }
            source.uffd.register_wp(extent.memory).map_err(failed("UFFDIO_REGISTER"))?;
            source.uffd.write_protect(extent.memory, Protection::Set).map_err(failed("UFFDIO_WRITEPROTECT"))?;
        }
        Ok(source)
    }

    /// Serves the faults that wait now, and returns how many. Wait for faults with `poll(2)` on the
    /// descriptor (`POLLIN`).
    ///
    /// # Errors
    ///
    /// [`SourceError::Uffd`]; writers may still sleep then. Dropping the source wakes them.
    pub fn serve(&self) -> Result<u64, SourceError> {
        let mut served = 0;
        while let Some(event) = self.uffd.read_event().map_err(failed("reading a userfaultfd"))? {
            if let Event::Pagefault { address, .. } = event {
                let page = Range::new(address & !(PAGE_SIZE - 1), PAGE_SIZE);
                let _exclusive = self.exclusive.lock();
                if let Some(extent) = self.extents.iter().find(|extent| extent.memory.contains(&page)) {
                    self.noted.insert(extent.first + ((page.start - extent.memory.start) / PAGE_SIZE) as u64);
                }
                self.uffd.write_protect(page, Protection::Lift).map_err(failed("UFFDIO_WRITEPROTECT"))?;
                served += 1;
            }
        }
        Ok(served)
    }

    /// The memory of a range of frames, in the parts that lie in one extent each.
    fn memory(&self, frames: std::ops::Range<u64>) -> impl Iterator<Item = Range> + '_ {
        self.extents.iter().filter_map(move |extent| {
            let start = frames.start.max(extent.first);
            let end = frames.end.min(extent.first + extent.memory.pages() as u64);
            let at = |frame: u64| extent.memory.start + (frame - extent.first) as usize * PAGE_SIZE;
            (start < end).then(|| Range::new(at(start), at(end) - at(start)))
        })
    }
}

impl AsFd for UffdSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

impl Source for &UffdSource {
    fn collect(&mut self, into: &DirtyTree) -> Result<u64, SourceError> {
        let _exclusive = self.exclusive.lock();
        let mut ranges = [const { 0..0 }; BATCH];
        let (mut pages, mut all) = (0, 0..self.noted.frames());
        while !all.is_empty() {
            let n = self.noted.take_ranges(&mut all, &mut ranges);
            for frames in &ranges[..n] {
                // Reported before it is protected again: if that fails, no write is lost.
                into.insert_range(frames.start, frames.end - frames.start);
                pages += frames.end - frames.start;
                for memory in self.memory(frames.clone()) {
                    self.uffd.write_protect(memory, Protection::Set).map_err(failed("UFFDIO_WRITEPROTECT"))?;
                }
            }
        }
        Ok(pages)
    }
}
