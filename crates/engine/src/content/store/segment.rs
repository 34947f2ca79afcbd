//! One sealed memfd of a store, and its slots' counts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use kmem::memfd::SharedMap;
use wire::{SEGMENT_PAGES, SegmentId};

use crate::content::frame::NO_HANDLE;

/// One sealed memfd.
pub(crate) struct Segment {
    pub(crate) id: SegmentId,
    pub(super) fd: OwnedFd,
    pub(super) map: SharedMap,
    /// The NUMA node that it lies on, where nodes are kept apart.
    pub(super) node: Option<u32>,
    /// Whether this daemon made it; one that came back from an earlier daemon can only be read.
    pub(super) writable: bool,
    /// Users of each slot, and [`super::PINNED`].
    pub(super) refs: Box<[AtomicU32]>,
    /// The handle in the index that stands for each slot, or [`NO_HANDLE`].
    pub(super) handles: Box<[AtomicU32]>,
}

impl Segment {
    pub(super) fn new(id: SegmentId, fd: OwnedFd, map: SharedMap, node: Option<u32>, writable: bool) -> Arc<Self> {
        let atomics = |value| (0..SEGMENT_PAGES).map(|_| AtomicU32::new(value)).collect();
        Arc::new(Self { id, fd, map, node, writable, refs: atomics(0), handles: atomics(NO_HANDLE) })
    }

    /// Its descriptor, to send to clients.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
