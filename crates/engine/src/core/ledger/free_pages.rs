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
pub(crate) mod tests {
    use rustix::fs::MemfdFlags;

    use wire::{RegionId, Run};

    use super::*;
    use crate::core::ledger::Region;

    /// A pool in a memfd, and the guest's side of it.
    pub(crate) fn pool(seals: SealFlags) -> (OwnedFd, SharedMap) {
        let fd = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        let map = memfd::map_shared(&fd, 1 << 20).unwrap();
        (fd, map)
    }

    pub(crate) fn guest_side(map: &SharedMap) -> ppr::Pool {
        // SAFETY: mapped until the end of the test.
        unsafe { ppr::Pool::from_mapping(NonNull::new(map.as_ptr()).unwrap(), map.len()) }.unwrap()
    }

    #[test]
    fn pages_that_are_marked_are_no_candidates() {
        let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        let pool = guest_side(&map);
        let guest = ppr::Guest::new(&pool);
        let extents = vec![
            Extent { frame: 256, region: RegionId(1), run: Run::new(PageNo(0), 50) },
            Extent { frame: 1000, region: RegionId(1), run: Run::new(PageNo(60), 40) },
        ];
        let mut region = Region::<crate::core::content::frame::Frame>::new(0, 100).unwrap();
        region.free = Some(FreePages::new(Arc::new(Marks::open(&fd).unwrap()), extents));
        region.ages.found_written(Run::new(PageNo(0), 100));
        (0..3).for_each(|_| region.end_scan(crate::core::ledger::Cool::Copies));
        guest.mark(256 + 10..256 + 20);
        guest.mark(1000..1005);
        guest.mark(1050..1100);
        let mut found = Vec::new();
        region.candidates(PageNo(0), 12, &mut found);
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21].map(PageNo), "as many as were asked for");
        region.candidates(PageNo(0), 100, &mut found);
        let expected: Vec<PageNo> = (0..10).chain(20..60).chain(65..100).map(PageNo).collect();
        assert_eq!(found, expected);
        assert!(region.predict(PageNo(3)), "in use");
        guest.mark(256 + 5..256 + 6);
        assert!(!region.predict(PageNo(5)), "freed since");
        // What was marked, and is used again, comes back when it is written.
        guest.cancel(256 + 10..256 + 20, || true).unwrap();
        region.ages.found_written(Run::new(PageNo(12), 1));
        (0..3).for_each(|_| region.end_scan(crate::core::ledger::Cool::Copies));
        region.candidates(PageNo(8), 4, &mut found);
        assert_eq!(found, [8, 9, 12, 20].map(PageNo));
    }

    #[test]
    fn a_pool_that_can_shrink_is_refused() {
        let (fd, _map) = pool(SealFlags::GROW);
        assert!(matches!(Marks::open(&fd), Err(MarksError::Unsealed)));
        // Nor is what is no pool taken.
        let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
        assert!(matches!(Marks::open(&pipe), Err(MarksError::NoMemfd(_))));
        let empty = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert!(matches!(Marks::open(&empty), Err(MarksError::Map(_))), "nothing is there to be mapped");
    }
}
