//! A pool in which the client marks pages of its first arena as free, as a guest's driver would.

#![allow(unsafe_code)] // Calls the agent, and shares memory with it.

use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use kmem::memfd::{self, SharedMap};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::arena::{Arena, PAGE};
use crate::finding;

/// The longest wait for the host: it may be stopped with the client for a second.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Pool {
    pool: ppr::Pool,
    _map: SharedMap,
}

impl Pool {
    /// Shares a pool for an arena with the agent; `None` without an agent.
    pub(crate) fn share(arena: &Arena) -> Option<Self> {
        // SAFETY: looks a symbol up.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"pageone_ppr_share".as_ptr()) };
        let symbol = NonNull::new(symbol)?;
        let bytes = ppr::Layout::for_frames(arena.pages as u64).ok()?.pool_bytes();
        let fd = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
        rustix::fs::ftruncate(&fd, bytes as u64).ok()?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).ok()?;
        let map = memfd::map_shared(&fd, bytes).ok()?;
        // SAFETY: mapped as long as the map is kept beside it; the file cannot shrink.
        let pool = unsafe { ppr::Pool::from_mapping(NonNull::new(map.as_ptr())?, map.len()) }.ok()?;
        pool.initialise();
        // SAFETY: the agent's function, with this signature. It takes a descriptor and marked
        // memory of this process, whose pages are marked only while nothing relies on them.
        let answer = unsafe {
            let share: extern "C" fn(i32, *mut libc::c_void, usize) -> i32 = std::mem::transmute(symbol);
            share(fd.as_raw_fd(), arena.start as *mut _, arena.pages * PAGE)
        };
        pool.set_guest_state(ppr::GuestState::Active);
        (answer == 0).then_some(Self { pool, _map: map })
    }

    pub(crate) fn mark(&self, page: usize) {
        ppr::Guest::new(&self.pool).mark(page as u64..page as u64 + 1);
    }

    /// Takes a page back.
    pub(crate) fn cancel(&self, page: usize) {
        let begin = Instant::now();
        let patience = || begin.elapsed() < PATIENCE;
        if ppr::Guest::new(&self.pool).cancel(page as u64..page as u64 + 1, patience).is_err() {
            finding::report(format_args!("the host does not release page {page} of the pool"), 0);
        }
    }
}
