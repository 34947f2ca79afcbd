//! One memfd of a store, and its slots' counts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};

use kmem::PAGE_SIZE;
use kmem::memfd::{self, SharedMap, StoreFile};
use wire::{SEGMENT_PAGES, SegmentId};

use super::place::Lending;
use crate::core::content::frame::NO_HANDLE;

/// In a reference count: somebody unknown may map it, so its piece is never punched.
pub(super) const PINNED: u32 = 1 << 31;
/// Segments of a store: a frame's number has 30 bits.
pub(super) const MOST_SEGMENTS: usize = (1 << 30) / SEGMENT_PAGES as usize;

pub(super) enum Memory {
    /// This daemon made it, and writes it.
    Own(StoreFile),
    /// It came back from an earlier daemon: it is read, and never written or punched.
    Adopted(OwnedFd, SharedMap),
    /// A part of a snapshot's RAM, in the order of its pages, which nobody can change.
    Snapshot(OwnedFd, SharedMap),
}

/// One memfd, or a file of the kernel's store.
pub(crate) struct Segment {
    pub(crate) id: SegmentId,
    memory: Memory,
    /// The NUMA node that it lies on, where nodes are kept apart.
    pub(super) node: Option<u32>,
    /// What it takes to lend its slots to files, if its file is of the kernel's store.
    pub(crate) lending: Option<Lending>,
    /// Users of each slot, and [`PINNED`].
    pub(super) refs: Box<[AtomicU32]>,
    /// The handle in the index that stands for each slot, or [`NO_HANDLE`].
    pub(super) handles: Box<[AtomicU32]>,
}

impl Segment {
    pub(super) fn new(id: SegmentId, memory: Memory, node: Option<u32>, lending: Option<Lending>) -> Arc<Self> {
        let atomics = |value| (0..SEGMENT_PAGES).map(|_| AtomicU32::new(value)).collect();
        let (refs, handles) = (atomics(0), atomics(NO_HANDLE));
        Arc::new(Self { id, memory, node, lending, refs, handles })
    }

    /// Whether its file is of the kernel's store.
    pub(super) fn is_lent(&self) -> bool {
        self.lending.as_ref().is_some_and(|lending| lending.store.is_some())
    }

    /// Whether a slot is a frame that has users.
    pub(crate) fn is_frame(&self, slot: usize) -> bool {
        self.refs.get(slot).is_some_and(|refs| refs.load(Acquire) & !PINNED != 0)
    }

    /// All slots that are frames count as changed.
    pub(crate) fn changes_all(&self) {
        (0..self.refs.len()).filter(|&slot| self.is_frame(slot)).for_each(|slot| self.changes(slot));
    }

    /// A slot became a frame, or lost its last user.
    pub(super) fn changes(&self, slot: usize) {
        if let Some(lending) = &self.lending {
            lending.changes(slot);
        }
    }

    /// Its descriptor, to send to clients.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match &self.memory {
            Memory::Own(file) => file.reader.as_fd(),
            Memory::Adopted(fd, _) | Memory::Snapshot(fd, _) => fd.as_fd(),
        }
    }

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
