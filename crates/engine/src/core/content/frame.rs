//! A frame of a store: memory of one page that clients share.

use wire::{SEGMENT_PAGES, Slot};

/// No handle: the frame is not in the index.
pub(crate) const NO_HANDLE: u32 = u32::MAX;

/// A frame of one store: number of the segment in the store times [`SEGMENT_PAGES`], plus the slot.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Frame(pub(crate) u32);

impl Frame {
    pub(crate) fn slot(self) -> Slot {
        Slot(self.0 % SEGMENT_PAGES)
    }

    pub(crate) fn segment(self) -> usize {
        (self.0 / SEGMENT_PAGES) as usize
    }
}
