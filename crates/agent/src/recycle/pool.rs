//! How the agent comes by a pool, and learns where the guest's RAM lies.

#![allow(unsafe_code)] // Descriptors arrive as numbers; exports a function.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;

use kmem::PAGE_SIZE;
use kmem::range::Range;
use rustix::io::FdFlags;
use wire::recycle::{ENV_PERIOD, ENV_POOL, ENV_QMP, Extent};

use crate::runtime::log;
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::runtime::state::recycler::{Recycler, RecyclerError};
use crate::runtime::waker::WAKE;

/// The pool that `pageone run --ppr` left in the environment and among the descriptors.
pub(crate) fn from_environment() -> Option<Recycler> {
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    let fd = number(ENV_POOL)?;
    let take = |number: u32| {
        // SAFETY: the number is only used for two fcntl(2) calls, which fail where it is no open
        // descriptor. The duplicate is checked before its contents are used.
        let fd = unsafe { BorrowedFd::borrow_raw(number as c_int) };
        let own = rustix::io::fcntl_dupfd_cloexec(fd, 3).ok();
        // Programs that this one executes have no use for its own copy.
        let _ = rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC);
        own
    };
    let qmp = number(ENV_QMP).and_then(take);
    let period = number(ENV_PERIOD).unwrap_or(0);
    let recycler = take(fd).ok_or(RecyclerError::Closed).and_then(|fd| Recycler::new(fd, qmp, period));
    recycler.inspect_err(log_error).ok()
}

fn log_error(error: &RecyclerError) {
    log::line(format_args!("free pages are not recycled: {error}"));
}

/// Gives the agent a pool in which this program marks pages of its own: frame `n` of the pool is
/// page `n` from `start` on. The memory must be marked as mergeable. Returns 0, or an errno:
/// `EBADF` if `fd` is no descriptor, `ENOMEM` if the memory is not within one region, `EBUSY` if
/// there is a pool already, `EINVAL` if the file is no pool.
///
/// # Safety
///
/// From the moment that the program marks a page until it has cancelled the mark, it relies on
/// nothing that the page holds: the page may become zeros at any time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pageone_ppr_share(fd: c_int, start: *mut c_void, len: usize) -> c_int {
    // SAFETY: the number is only duplicated, which fails where it is no open descriptor.
    let Ok(own) = rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 3) else {
        return libc::EBADF;
    };
    let mut state = STATE.lock();
    if state.recycler.is_some() {
        return libc::EBUSY;
    }
    let wanted = Range::new(start as usize, len);
    let [(region, run)] = state.regions.pieces(wanted)[..] else { return libc::ENOMEM };
    if state.regions.bytes(region, run) != Some(wanted) {
        return libc::ENOMEM;
    }
    match Recycler::new(own, None, 0) {
        Ok(mut recycler) => {
            recycler.set_extents(vec![Extent { frame: 0, region, run }]);
            // Otherwise it is announced when a daemon welcomes this client.
            if state.uplink.version.is_some() {
                state.uplink.outbox.push(recycler.announcement());
            }
            state.recycler = Some(recycler);
        }
        Err(error) => {
            drop(state);
            log_error(&error);
            return libc::EINVAL;
        }
    }
    drop(state);
    WAKE.wake();
    0
}

/// The daemon has found the guest's RAM. Takes effect once: RAM does not move, and memory that
/// comes later is not recycled. Returns how many MiB are recycled from now on.
pub(crate) fn set_ram(state: &mut State, extents: Vec<Extent>) -> Option<u64> {
    let State { regions, recycler, .. } = state;
    let recycler = recycler.as_mut().filter(|recycler| recycler.extents().is_empty())?;
    let is_managed = |extent: &Extent| regions.managing(extent.region, extent.run).is_some();
    if extents.is_empty() || !extents.iter().all(is_managed) {
        return None;
    }
    let frames: u64 = extents.iter().map(|extent| u64::from(extent.run.len)).sum();
    recycler.set_extents(extents);
    Some((frames * PAGE_SIZE as u64) >> 20)
}

/// QEMU's device is unplugged, or about to be plugged in: the marks go with their pool. Without
/// memory for another pool the daemon gets no answer.
pub(crate) fn renew(state: &mut State) {
    let Some(recycler) = state.recycler.as_mut().filter(|recycler| recycler.qmp.is_some()) else { return };
    match recycler.renewed() {
        Ok(new) => {
            let renewal = new.renewal();
            state.recycler = Some(new);
            state.uplink.outbox.push(renewal);
        }
        Err(error) => log_error(&error),
    }
}
