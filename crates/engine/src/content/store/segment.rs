//! One memfd of a store, and its slots' counts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use kmem::PAGE_SIZE;
use kmem::memfd::{self, SharedMap, StoreFile};
use wire::{SEGMENT_PAGES, SegmentId};

use crate::content::frame::NO_HANDLE;

/// The memory of a segment.
pub(super) enum Memory {
    /// This daemon made it, and writes it.
    Own(StoreFile),
    /// It came back from an earlier daemon: it is read, and never written or punched.
    Adopted(OwnedFd, SharedMap),
    /// It is a part of a snapshot's RAM, which nobody can change any more, in the order of the
    /// pages.
    Snapshot(OwnedFd, SharedMap),
}

/// One memfd.
pub(crate) struct Segment {
    pub(crate) id: SegmentId,
    memory: Memory,
    /// The NUMA node that it lies on, where nodes are kept apart.
    pub(super) node: Option<u32>,
    /// Users of each slot, and [`super::PINNED`].
    pub(super) refs: Box<[AtomicU32]>,
    /// The handle in the index that stands for each slot, or [`NO_HANDLE`].
    pub(super) handles: Box<[AtomicU32]>,
}

impl Segment {
    pub(super) fn new(id: SegmentId, memory: Memory, node: Option<u32>) -> Arc<Self> {
        let atomics = |value| (0..SEGMENT_PAGES).map(|_| AtomicU32::new(value)).collect();
        Arc::new(Self { id, memory, node, refs: atomics(0), handles: atomics(NO_HANDLE) })
    }

    /// Its descriptor, to send to clients.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match &self.memory {
            Memory::Own(file) => file.reader.as_fd(),
            Memory::Adopted(fd, _) | Memory::Snapshot(fd, _) => fd.as_fd(),
        }
    }

    /// Its file, if this daemon made it.
    pub(super) fn own(&self) -> Option<&StoreFile> {
        match &self.memory {
            Memory::Own(file) => Some(file),
            Memory::Adopted(..) | Memory::Snapshot(..) => None,
        }
    }

    /// Its mapping: for writing, if this daemon made it.
    pub(super) fn map(&self) -> &SharedMap {
        match &self.memory {
            Memory::Own(file) => &file.map,
            Memory::Adopted(_, map) | Memory::Snapshot(_, map) => map,
        }
    }

    /// Whether it is a part of a snapshot's RAM: its frames have their bytes, and their place in
    /// the index, as long as it is there, with users or without.
    pub(super) fn is_snapshot(&self) -> bool {
        matches!(self.memory, Memory::Snapshot(..))
    }

    /// Whether pieces of it can be given back to the kernel; otherwise only the whole.
    pub(crate) fn can_punch(&self) -> bool {
        self.own().is_some_and(|file| file.can_punch)
    }

    /// Copies a slot's bytes. `false`: the memory has failed (hwpoison). The bytes are read through
    /// the descriptor, where that is an error; through the mapping it would be a SIGBUS.
    pub(super) fn read(&self, slot: usize, into: &mut [u8; PAGE_SIZE]) -> bool {
        memfd::read_page(self.fd(), slot, into).is_ok()
    }
}
