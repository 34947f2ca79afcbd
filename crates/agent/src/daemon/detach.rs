//! Management ends, and everything becomes plain anonymous memory, as far as it may.
//!
//! ```text
//! at once       pages that map frames are replaced; pages that were never merged are not touched
//! cooling       copies in mappings of segments wait until they were not written for a cooldown
//! at the end    what is still written, or pinned, is retained: it stays where it is, guarded,
//!               and the daemon keeps its frames
//! ```
//!
//! The daemon does not scan meanwhile, so the kernel's notes of writes are the agent's.

#![allow(unsafe_code)] // Advises on the program's memory.

use std::os::fd::{AsFd, AsRawFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kmem::range::Range;
use kmem::raw;
use rustix::io::Errno;
use wire::{Detaching, RegionId, ToDaemon};

use crate::daemon::send::{flush, try_flush};
use crate::runtime::injected::is_injected;
use crate::runtime::lifecycle::{Phase, set_phase};
use crate::runtime::log;
use crate::runtime::poll;
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::window::filler::Filler;
use crate::window::gate;
use crate::window::restore::{Cooling, note_writes, restore_region};

const SEND_TRIES: u32 = 50;
/// How long each try waits for a slow daemon, in milliseconds.
const SEND_WAIT_MS: i32 = 100;
/// Cooldowns that copies are given: those that are written in the first may be calm in the second.
const COOLDOWNS: u32 = 2;
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Gives all regions back. False after an error: they stay managed, and the daemon is told.
pub(super) fn detach() -> bool {
    // No memory is taken from here on.
    set_phase(Phase::Ended);
    if let Err(errno) = restore_all() {
        log::line(format_args!("not detached: memory could not be given back: {errno}"));
        set_phase(Phase::Running);
        let mut state = STATE.lock();
        state.uplink.outbox.push(ToDaemon::DetachFailed { errno: errno.raw_os_error() });
        try_flush(&mut state);
        return false;
    }
    let mut state = STATE.lock();
    for (id, run) in state.regions.pieces(Range::new(0, usize::MAX)) {
        if let Some(bytes) = state.regions.bytes(id, run) {
            // Fails only where nothing is mapped.
            let _ = state.uffds.untrack(bytes);
            state.leave(id, run, None);
            mark_again(&state, bytes);
        }
    }
    state.uplink.outbox.push(ToDaemon::Detached);
    state.uffds.close();
    state.files.close();
    state.segments.clear();
    state.recycler = None;
    let conn = state.uplink.conn.as_ref().map(|conn| conn.as_fd().as_raw_fd());
    drop(state);
    for _ in 0..SEND_TRIES {
        let flushed = flush(&mut STATE.lock());
        let (Ok(true), Some(conn)) = (flushed, conn) else { break };
        poll::wait(&mut [poll::interest(conn, libc::POLLOUT)], SEND_WAIT_MS);
    }
    true
}

/// In a program that was attached the kernel's mark comes back, which the program has set
/// (`MADV_MERGEABLE`). What is retained maps frames: the kernel's KSM gets nothing of it.
fn mark_again(state: &State, bytes: Range) {
    if !is_injected() {
        return;
    }
    let mut at = bytes.start;
    let mut retained = state.regions.retained().within(bytes);
    retained.sort_by_key(|(part, _)| part.start);
    for part in retained.into_iter().map(|(part, _)| part).chain([Range::new(bytes.end(), 0)]) {
        if part.start > at {
            // SAFETY: the advice changes no bytes and no access.
            let _ = unsafe { raw::madvise(at, part.start - at, libc::MADV_MERGEABLE) };
        }
        at = at.max(part.end());
    }
}

fn restore_all() -> Result<(), Errno> {
    let state = STATE.lock();
    let direct_io = state.direct_io.unwrap_or_default();
    let regions: Vec<(RegionId, u32)> = state.regions.iter().map(|region| (region.id, region.all().len)).collect();
    let filler = state.uffds.filler();
    drop(state);
    let filler = Filler::new(filler.ok_or(Errno::BADF)?)?;
    let restore = |cooling| -> Result<u64, Errno> {
        regions.iter().try_fold(0, |left, &(id, pages)| Ok(left + restore_region(id, pages, cooling, &filler)?))
    };
    let mut left = restore(Cooling::Unknown)?;
    // Without direct I/O all that may go has gone.
    if direct_io.is_zero() {
        return Ok(());
    }
    for round in 0..COOLDOWNS {
        // No time helps against a pin that lasts.
        if left == 0 || gate::is_pinned(&STATE.lock().files) {
            break;
        }
        regions.iter().try_for_each(|&(id, _)| note_writes(id))?;
        cool_down(left, direct_io, direct_io * (COOLDOWNS - 1 - round));
        left = restore(Cooling::Over)?;
    }
    Ok(())
}

/// Waits for a cooldown, after which others may follow, and tells the daemon.
fn cool_down(cooling: u64, time: Duration, behind: Duration) {
    let end = Instant::now() + time;
    while let left = end.saturating_duration_since(Instant::now())
        && !left.is_zero()
    {
        let mut state = STATE.lock();
        state
            .uplink
            .outbox
            .push(ToDaemon::Detaching(Detaching { cooling, wait_ms: (left + behind).as_millis() as u64 }));
        try_flush(&mut state);
        drop(state);
        sleep(left.min(TELL_EVERY));
    }
}
