//! A guest's pool, of which this daemon is the host: the only one, in any process.

#![allow(unsafe_code)] // A pool is made of a mapping.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use kmem::memfd::{self, SharedMap};
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, fallocate};
use rustix::io::Errno;

use crate::core::ledger::free_pages::{Marks, MarksError};

#[derive(Debug, thiserror::Error)]
pub(super) enum TakeError {
    #[error("its pool cannot be opened: {0}")]
    Open(io::Error),
    #[error("another process works on its pool")]
    Busy,
    #[error(transparent)]
    Marks(#[from] MarksError),
}

pub(super) struct Pool {
    pub(super) pool: Arc<ppr::Pool>,
    /// What the ledgers of its guest's files look at.
    pub(super) marks: Arc<Marks>,
    /// Declared behind the pool, which lies in it: fields are dropped in this order.
    _map: SharedMap,
    file: OwnedFd,
}

impl Pool {
    /// Locks and maps the pool behind a descriptor of another process, and releases what a host
    /// that died has left claimed.
    /// `Err`: it is no pool. [`TakeError::Busy`]: it has a host, which may be about to end.
    pub(super) fn take(theirs: &OwnedFd) -> Result<Self, TakeError> {
        let marks = Marks::open(theirs)?;
        // It is a memfd, as its seals say. A lock belongs to an open file: to one that no other
        // process has, so that it ends with this one.
        let path = format!("/proc/self/fd/{}", theirs.as_raw_fd());
        let open = |errno: Errno| TakeError::Open(errno.into());
        let own = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(open)?;
        match rustix::fs::flock(&own, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Err(TakeError::Busy),
            locked => locked.map_err(open)?,
        }
        let map = memfd::map_shared(&own, marks.len() as usize).map_err(MarksError::Map)?;
        let start = NonNull::new(map.as_ptr()).ok_or(TakeError::Open(Errno::FAULT.into()))?;
        // SAFETY: `map.len()` bytes from `start` are mapped for reading and writing for as long as
        // `map` lives. `Pool` keeps both; whoever clones `pool` lives no longer than it, or only
        // drops its reference (`Sweeper`, whose fields are dropped in this order). The seals, which
        // `Marks::open` has seen, keep the file from shrinking, so no access raises SIGBUS. This
        // process uses the mapping through the pool only.
        let pool = unsafe { ppr::Pool::from_mapping(start, map.len()) }.map_err(MarksError::Pool)?;
        pool.validate().map_err(MarksError::Pool)?;
        let pool = Arc::new(pool);
        // The lock is ours: an earlier holder is dead, and its last system call has ended.
        ppr::Host::new(pool.clone(), ppr::Ram::default()).recover();
        Ok(Self { pool, marks: Arc::new(marks), _map: map, file: own })
    }

    /// Clears all marks, for when there is no device: nobody marks then. The header stays, so that
    /// a daemon that is killed here leaves a pool.
    pub(super) fn clear(&self) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let header = self.pool.layout().free as u64;
        while let Err(why) = fallocate(&self.file, flags, header, self.marks.len() - header) {
            if why != Errno::INTR {
                return Err(why);
            }
        }
        self.pool.set_guest_state(ppr::GuestState::Absent);
        Ok(())
    }

    /// Whether a daemon has worked on it.
    pub(super) fn is_used(&self) -> bool {
        self.pool.read(ppr::Field::HostStarts) > 0
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::convert::Infallible;

    use rustix::fs::SealFlags;

    use super::*;
    use crate::core::ledger::free_pages::tests::{guest_side, pool};

    /// Takes a pool that nobody has. Another test that starts a process may have its lock until
    /// that runs its program.
    pub(in super::super) fn take(fd: &OwnedFd) -> Pool {
        loop {
            match Pool::take(fd) {
                Err(TakeError::Busy) => std::thread::yield_now(),
                taken => return taken.unwrap(),
            }
        }
    }

    #[test]
    fn one_daemon_works_on_a_pool_and_the_next_releases_what_it_left_claimed() {
        let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        let side = guest_side(&map);
        assert!(matches!(Pool::take(&fd), Err(TakeError::Marks(MarksError::Pool(_)))), "nobody has made it");
        side.initialise();
        let first = take(&fd);
        assert!(matches!(Pool::take(&fd), Err(TakeError::Busy)));
        let guest = ppr::Guest::new(&side);
        guest.mark(300..310);
        let ram = ppr::Ram::new(std::iter::once(256..512));
        let host = ppr::Host::new(first.pool.clone(), ram.clone());
        // It dies in the midst.
        std::mem::forget(host.claim(4, u64::MAX).unwrap());
        assert!(guest.cancel(300..301, || false).is_err(), "the guest would wait");
        drop((host, first));
        let next = take(&fd);
        guest.cancel(300..301, || false).unwrap();
        let mut host = ppr::Host::new(next.pool.clone(), ram);
        guest.mark(300..310);
        let done = host.recycle(&mut (0..512), u64::MAX, |_| Ok::<(), Infallible>(())).unwrap();
        assert_eq!(done.pages, 10);
    }

    #[test]
    fn a_pool_that_is_cleared_has_no_marks_and_is_a_pool_that_was_used() {
        let (fd, map) = pool(SealFlags::SHRINK | SealFlags::GROW);
        let side = guest_side(&map);
        side.initialise();
        let pool = take(&fd);
        assert!(!pool.is_used());
        pool.pool.set_host_state(ppr::HostState::Active);
        ppr::Guest::new(&side).mark(300..310);
        side.set_guest_state(ppr::GuestState::Active);
        pool.clear().unwrap();
        assert!(pool.is_used() && pool.pool.validate().is_ok());
        let host = ppr::Host::new(pool.pool.clone(), ppr::Ram::new(std::iter::once(256..512)));
        assert_eq!((host.marked(), host.pending(512)), (0, 0));
        assert_eq!(pool.pool.read(ppr::Field::GuestState), ppr::GuestState::Absent as u64);
    }
}
