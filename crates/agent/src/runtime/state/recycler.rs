//! The pool in which the guest marks its free pages, and the agent's record of the guest's RAM.

#![allow(unsafe_code)] // Maps the pool.

use std::io;
use std::ops::Range as Frames;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use kmem::memfd::{self, MemfdError, SharedMap};
use rustix::fs::SealFlags;
use wire::ToDaemon;
use wire::recycle::Extent;

use crate::runtime::descriptors::Descriptor;

/// Why free pages are not recycled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecyclerError {
    #[error("its descriptor is closed")]
    Closed,
    #[error("the pool is no memfd: {0}")]
    NotAMemfd(io::Error),
    /// Touching a page that the file no longer has would raise SIGBUS.
    #[error("the pool is not sealed against shrinking")]
    CanShrink,
    #[error("the pool: {0}")]
    Stat(io::Error),
    #[error("the pool: {0}")]
    Map(#[from] MemfdError),
    #[error("the pool: {0}")]
    Pool(#[from] ppr::PoolError),
}

/// A pool, and the record of which pages its frames are.
pub(crate) struct Recycler {
    pub(crate) fd: Descriptor<OwnedFd>,
    /// The agent's end of a QMP socket, which each daemon gets. The device may be unplugged with
    /// it.
    pub(crate) qmp: Option<Descriptor<OwnedFd>>,
    /// Reclaim period that the program asks for, in milliseconds; 0: the daemon's.
    period_ms: u32,
    pool: Arc<ppr::Pool>,
    host: ppr::Host<Arc<ppr::Pool>>,
    /// Where the guest's RAM lies, ascending by frame. Empty: not known yet.
    extents: Vec<Extent>,
    /// The guest has overwritten the header.
    dropped: bool,
    /// Declared last: fields are dropped in this order, and the pool lies in the map.
    map: SharedMap,
}

impl Recycler {
    pub(crate) fn new(fd: OwnedFd, qmp: Option<OwnedFd>, period_ms: u32) -> Result<Self, RecyclerError> {
        let seals = memfd::seals(&fd).map_err(RecyclerError::NotAMemfd)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(RecyclerError::CanShrink);
        }
        let size = rustix::fs::fstat(&fd).map_err(|error| RecyclerError::Stat(error.into()))?.st_size;
        let map = memfd::map_shared(&fd, usize::try_from(size).unwrap_or(0))?;
        let start = NonNull::new(map.as_ptr()).ok_or(RecyclerError::CanShrink)?;
        // SAFETY: `start` is page aligned and mapped for reading and writing for `map.len()` bytes.
        // The recycler owns the map and both owners of the pool, none of which leaves it, and drops
        // the map last; and the file cannot shrink.
        let pool = unsafe { ppr::Pool::from_mapping(start, map.len()) }?;
        pool.validate()?;
        let pool = Arc::new(pool);
        let host = ppr::Host::new(pool.clone(), ppr::Ram::default());
        let fd = Descriptor::new(fd).map_err(RecyclerError::Stat)?;
        let qmp = qmp.map(Descriptor::new).transpose().map_err(RecyclerError::Stat)?;
        Ok(Self { fd, qmp, period_ms, pool, host, extents: Vec::new(), dropped: false, map })
    }

    /// The same with a new, empty pool: no mark of the old one is ever looked at again. After an
    /// error the old one stays.
    pub(crate) fn renewed(&mut self) -> Result<Self, RecyclerError> {
        let (fd, map) = memfd::create_fixed("pageone-ppr", self.map.len())?;
        let start = NonNull::new(map.as_ptr()).ok_or(RecyclerError::CanShrink)?;
        // SAFETY: `map.len()` bytes are mapped for reading and writing until `map` is dropped,
        // after the pool, which lives in this statement only. The file cannot shrink.
        unsafe { ppr::Pool::from_mapping(start, map.len()) }?.initialise();
        let mut new = Self::new(fd, None, self.period_ms)?;
        new.qmp = self.qmp.take();
        if !self.extents.is_empty() {
            new.set_extents(std::mem::take(&mut self.extents));
        }
        Ok(new)
    }

    pub(crate) fn renewal(&self) -> ToDaemon {
        ToDaemon::PoolRenewed { descriptor: self.fd.as_fd().as_raw_fd() as u32 }
    }

    /// Sets where the guest's RAM lies, and tells the guest that the host is active.
    pub(crate) fn set_extents(&mut self, extents: Vec<Extent>) {
        self.host = ppr::Host::new(self.pool.clone(), ppr::Ram::new(extents.iter().map(Extent::frames)));
        self.extents = extents;
        self.pool.set_host_state(ppr::HostState::Active);
    }

    /// Where the guest's RAM lies; empty if that is not known yet.
    pub(crate) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Whether the header is still the host's. A guest that overwrites it once is dropped for good.
    pub(crate) fn check_header(&mut self) -> bool {
        self.dropped |= self.pool.validate().is_err();
        !self.dropped
    }

    /// Claims the next batch of marked frames `within`, which becomes the part that was not looked
    /// at, gives them to `take` and releases them.
    pub(crate) fn recycle<E>(
        &mut self,
        within: &mut Frames<u64>,
        most: u64,
        mut take: impl FnMut(&[Extent], &[Frames<u64>]) -> Result<(), E>,
    ) -> Result<ppr::Recycled, E> {
        let Self { host, extents, .. } = self;
        host.recycle(within, most, |runs| take(extents, runs))
    }

    pub(crate) fn announcement(&self) -> ToDaemon {
        ToDaemon::Pool(wire::recycle::Pool { extents: self.extents.clone(), period_ms: self.period_ms })
    }

    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.fd.as_fd()).chain(self.qmp.as_ref().map(|qmp| qmp.as_fd())).collect()
    }

    /// Whether its descriptors are still the pool's and the socket's.
    pub(super) fn is_intact(&self) -> bool {
        self.fd.is_intact() && self.qmp.as_ref().is_none_or(Descriptor::is_intact)
    }
}
