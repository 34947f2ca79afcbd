//! The segments of the store that the daemon has sent.

#![allow(unsafe_code)] // Advises on the mapping of a segment.

use std::io;
use std::os::fd::OwnedFd;

use kmem::memfd::{self, MemfdError, SharedMap};
use kmem::raw;
use wire::{SEGMENT_PAGES, SegmentId, Target};

use crate::runtime::descriptors::Descriptor;

const SEGMENT_LEN: usize = SEGMENT_PAGES as usize * kmem::PAGE_SIZE;

/// A segment of a store, kept to map frames of it.
pub(crate) struct Segment {
    /// Its name on the wire.
    pub(crate) id: SegmentId,
    /// Its memfd, sealed.
    pub(crate) fd: Descriptor<OwnedFd>,
    /// All of it, to compare with. Its bytes never change while a page maps them.
    pub(crate) map: SharedMap,
}

/// Why a segment is not accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SegmentError {
    #[error("segment: {0}")]
    Memfd(#[from] MemfdError),
    #[error("a segment that is not what its message says")]
    Mismatch,
    #[error("segment: {0}")]
    Stat(#[from] io::Error),
}

/// What became of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepted {
    Held,
    /// It is not: the program may have no more than `most`.
    LeftOut {
        most: u32,
    },
}

#[derive(Debug)]
pub(crate) struct NotHeld;

pub(crate) struct Segments(Vec<Segment>);

impl Segments {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.0.iter()
    }

    pub(crate) fn get(&self, id: SegmentId) -> Option<&Segment> {
        self.0.iter().find(|segment| segment.id == id)
    }

    /// Where the frames of a target begin; for zeros `None`. An error: the segment is not held.
    pub(crate) fn frames(&self, target: Target) -> Result<Option<*const u8>, NotHeld> {
        let Target::Frames { segment, slot } = target else { return Ok(None) };
        let held = self.get(segment).ok_or(NotHeld)?;
        Ok(Some(held.map.as_ptr().wrapping_add(slot.index() * kmem::PAGE_SIZE)))
    }

    /// Checks a segment and maps it. It is left out where the program has few descriptors: merges
    /// with it fail then, and nothing else.
    pub(crate) fn accept(&mut self, id: SegmentId, fd: OwnedFd) -> Result<Accepted, SegmentError> {
        if self.get(id).is_some() {
            return Ok(Accepted::Held);
        }
        memfd::require_seals(&fd)?;
        let stat = rustix::fs::fstat(&fd).map_err(io::Error::from)?;
        if stat.st_ino != id || stat.st_size != SEGMENT_LEN as i64 {
            return Err(SegmentError::Mismatch);
        }
        let most = most_segments();
        if self.0.len() >= most {
            return Ok(Accepted::LeftOut { most: u32::try_from(most).unwrap_or(u32::MAX) });
        }
        let map = memfd::map_readonly(&fd, SEGMENT_LEN)?;
        // SAFETY: MADV_DONTFORK leaves the memory as it is. No code expects the mapping in a child:
        // a forked child forgets its segments.
        let _ = unsafe { raw::madvise(map.as_ptr() as usize, SEGMENT_LEN, libc::MADV_DONTFORK) };
        self.0.push(Segment { id, fd: Descriptor::new(fd)?, map });
        Ok(Accepted::Held)
    }

    /// Whether all descriptors are still the segments'.
    pub(super) fn are_intact(&self) -> bool {
        self.0.iter().all(|segment| segment.fd.is_intact())
    }

    /// Closes one segment. Pages that map its frames keep them.
    pub(crate) fn remove(&mut self, id: SegmentId) {
        self.0.retain(|segment| segment.id != id);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Closes the descriptors in a forked child, which did not inherit the mappings.
    pub(crate) fn orphan(&mut self) {
        for segment in self.0.drain(..) {
            std::mem::forget(segment.map);
        }
    }

    /// Forgets the segments, and leaves their descriptors open.
    pub(super) fn forsake(&mut self) {
        self.0.drain(..).for_each(std::mem::forget);
    }
}

/// A quarter of the descriptors that the program may open: the others are the program's.
fn most_segments() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    (limit.unwrap_or(u64::MAX) / 4) as usize
}
