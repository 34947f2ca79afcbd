//! Dirty frames from a synchronous userfaultfd, for kernels before 6.7.
//!
//! The memory is write-protected. A thread that writes to a protected page sleeps until somebody
//! has served its fault: the page is noted, its protection lifted. [`Source::collect`] hands over
//! what was noted and protects it again.
//!
//! Serving and collecting exclude each other: between noting a page and lifting its protection, a
//! collector would protect what is protected, then the server would lift it, and later writes would
//! go unnoticed.

#![allow(unsafe_code)] // Populating memory is advice to the kernel.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use dirty::DirtyTree;
use rustix::io::Errno;

use super::{Extent, Source, SourceError};
use crate::uffd::{Event, Features, Uffd};
use crate::{PAGE_SIZE, Range, mm};

/// Ranges of frames that are protected again in one go.
const BATCH: usize = 64;

/// Pages of this process that any of its threads wrote to. Shared by reference: one thread serves
/// faults, another collects.
#[derive(Debug)]
pub struct UffdSource {
    uffd: Uffd,
    extents: Vec<Extent>,
    noted: DirtyTree,
    turn: Mutex<()>,
}

fn failed(call: &'static str) -> impl FnOnce(Errno) -> SourceError {
    move |errno| SourceError::Uffd { call, errno }
}

impl UffdSource {
    /// Protects these pieces of memory of this process (private and anonymous). From now on
    /// somebody must call [`UffdSource::serve`] whenever the descriptor is readable, or writers
    /// sleep.
    ///
    /// Before Linux 6.4 only populated pages can be protected; there all of the memory is populated
    /// first (with zero pages, where it is untouched).
    ///
    /// # Errors
    ///
    /// [`SourceError`]; nothing is protected then.
    pub fn new(extents: Vec<Extent>) -> Result<Self, SourceError> {
        let unpopulated = Uffd::supported_features()? & Features::WP_UNPOPULATED;
        let uffd = Uffd::new(Features::WP | unpopulated)?;
        let frames = extents.iter().map(|extent| extent.first + extent.memory.pages() as u64).max().unwrap_or(0);
        let source = Self { uffd, extents, noted: DirtyTree::new(frames)?, turn: Mutex::new(()) };
        for extent in &source.extents {
            if unpopulated.is_empty() {
                // SAFETY: populating changes no content.
                unsafe { mm::advise(extent.memory, libc::MADV_POPULATE_READ) }.map_err(failed("MADV_POPULATE_READ"))?;
            }
            source.uffd.register_wp(extent.memory).map_err(failed("UFFDIO_REGISTER"))?;
            source.uffd.write_protect(extent.memory, true).map_err(failed("UFFDIO_WRITEPROTECT"))?;
        }
        Ok(source)
    }

    /// Serves the faults that wait now, and returns how many. Wait with `poll(2)` on the descriptor
    /// (`POLLIN`).
    ///
    /// # Errors
    ///
    /// [`SourceError::Uffd`]; threads may sleep still: dropping the source wakes them.
    pub fn serve(&self) -> Result<u64, SourceError> {
        let mut served = 0;
        while let Some(event) = self.uffd.read_event().map_err(failed("reading a userfaultfd"))? {
            if let Event::Pagefault { address, .. } = event {
                let page = Range::new(address & !(PAGE_SIZE - 1), PAGE_SIZE);
                let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(extent) = self.extents.iter().find(|extent| extent.memory.contains(&page)) {
                    self.noted.insert(extent.first + ((page.start - extent.memory.start) / PAGE_SIZE) as u64);
                }
                self.uffd.write_protect(page, false).map_err(failed("UFFDIO_WRITEPROTECT"))?;
                served += 1;
            }
        }
        Ok(served)
    }

    /// Where a range of frames lies, in its parts.
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
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ranges = [const { 0..0 }; BATCH];
        let (mut pages, mut all) = (0, 0..self.noted.frames());
        while !all.is_empty() {
            let n = self.noted.take_ranges(&mut all, &mut ranges);
            for frames in &ranges[..n] {
                // Reported first: if protecting fails, nothing is lost.
                into.insert_range(frames.start, frames.end - frames.start);
                pages += frames.end - frames.start;
                for memory in self.memory(frames.clone()) {
                    self.uffd.write_protect(memory, true).map_err(failed("UFFDIO_WRITEPROTECT"))?;
                }
            }
        }
        Ok(pages)
    }
}
