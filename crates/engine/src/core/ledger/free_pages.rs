//! The pages of a region that its guest has marked as free.
//!
//! The guest marks them in a pool, memory that it shares with its agent and with the daemon (see
//! [`ppr`]). The daemon only reads: it looks at a mark just before it picks a page for merging, and
//! leaves marked pages out. A mark may change at any time. At worst a page is merged that is free,
//! or one is left out that is in use again and comes back when it is written.

#![allow(unsafe_code)] // A pool is made of a mapping that the guest writes to.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use kmem::memfd::{self, SharedMap};
use rustix::fs::SealFlags;
use wire::PageNo;
use wire::recycle::Extent;

#[derive(Debug, thiserror::Error)]
pub(crate) enum MarksError {
    #[error("its pool is no memfd: {0}")]
    NoMemfd(std::io::Error),
    #[error("its pool can shrink or grow")]
    Unsealed,
    #[error("its pool cannot be mapped: {0}")]
    Map(memfd::MemfdError),
    #[error(transparent)]
    Pool(#[from] ppr::PoolError),
}

/// The marks of one guest, mapped read-only.
pub(crate) struct Marks {
    /// Declared before the map: fields are dropped in this order, and the pool lies in the map.
    host: ppr::Host<Box<ppr::Pool>>,
    map: SharedMap,
}

impl Marks {
    /// Maps a pool that an agent sent.
    pub(crate) fn open(fd: &OwnedFd) -> Result<Self, MarksError> {
        let seals = memfd::seals(fd).map_err(MarksError::NoMemfd)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(MarksError::Unsealed);
        }
        let len = rustix::fs::fstat(fd).map_err(|e| MarksError::NoMemfd(e.into()))?.st_size;
        let map = memfd::map_readonly(fd, usize::try_from(len).unwrap_or(0)).map_err(MarksError::Map)?;
        // The kernel maps nothing at address 0 by itself.
        let nowhere = || memfd::MemfdError::Map { len: map.len(), errno: rustix::io::Errno::FAULT };
        let start = NonNull::new(map.as_ptr()).ok_or_else(nowhere).map_err(MarksError::Map)?;
        // SAFETY: `map.len()` bytes from `start` are mapped for as long as `map` lives. `Marks`
        // owns both and drops the pool first; neither leaves it. The seals keep the file from
        // shrinking, so no access raises SIGBUS. Nothing else in this process uses the mapping. It
        // is read-only, and a store to it would fault: of the pool only `layout` and `read`, of the
        // host only `is_free`, `pending` and `pool` are called, and these load and never store.
        let pool = unsafe { ppr::Pool::from_mapping(start, map.len()) }?;
        Ok(Self { host: ppr::Host::new(Box::new(pool), ppr::Ram::default()), map })
    }

    pub(crate) fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Bytes of the pool that are in use.
    pub(crate) fn bytes(&self) -> u64 {
        self.host.pool().layout().bytes as u64
    }

    /// How often the guest says that its driver has started.
    pub(crate) fn guest_starts(&self) -> u64 {
        self.host.pool().read(ppr::Field::GuestStarts)
    }

    /// Whether some of the guest's frames below `end` may be marked. Reads the pool's summary only.
    pub(crate) fn any_below(&self, end: u64) -> bool {
        self.host.pending(end) > 0
    }
}

#[derive(Clone)]
pub(crate) struct FreePages {
    marks: Arc<Marks>,
    /// Of this region, ascending by page.
    extents: Vec<Extent>,
}

impl FreePages {
    /// The free pages of the region that `extents` lie in, in any order.
    pub(crate) fn new(marks: Arc<Marks>, mut extents: Vec<Extent>) -> Self {
        extents.sort_by_key(|extent| extent.run.page);
        Self { marks, extents }
    }

    pub(crate) fn contains(&self, page: PageNo) -> bool {
        let at = self.extents.partition_point(|extent| extent.run.end() <= page);
        let found = self.extents.get(at).filter(|extent| extent.run.page <= page);
        found.is_some_and(|extent| self.marks.host.is_free(extent.frame + u64::from(page - extent.run.page)))
    }
}

#[cfg(test)]
pub(crate) mod tests;
