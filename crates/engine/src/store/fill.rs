//! Filling: memory and bytes for several reserved slots in one system call (`UFFDIO_COPY`).

use std::sync::Arc;

use kmem::PAGE_SIZE;
use kmem::uffd::Uffd;

use super::frames::Store;
use super::segment::Segment;
use crate::core::content::frame::Frame;

/// Reserved slots that are registered for filling while this lives. Afterwards the segment is one
/// mapping again: the number of the daemon's mappings is limited too.
pub(super) struct Filling<'s> {
    filler: &'s Uffd,
    segment: Arc<Segment>,
    part: std::ops::Range<usize>,
}

impl<'s> Filling<'s> {
    /// `None`: the kernel does not offer it, or refuses now.
    pub(super) fn new(store: &'s Store, slots: std::ops::Range<u32>) -> Option<Self> {
        let (filler, segment) = (store.filler.as_ref()?, store.segment(Frame(slots.start))?);
        let start = Frame(slots.start).slot().index() * PAGE_SIZE;
        let part = start..start + (slots.end - slots.start) as usize * PAGE_SIZE;
        segment.map().register(filler, part.clone()).ok()?;
        Some(Self { filler, segment, part })
    }

    /// Gives slots without memory these bytes; returns how many.
    pub(super) fn fill(&self, first: Frame, pages: &[[u8; PAGE_SIZE]]) -> usize {
        self.segment.map().fill(self.filler, first.slot().index(), pages)
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.segment.map().unregister(self.filler, self.part.clone());
    }
}
