//! Everything becomes plain anonymous memory, and management ends.

use std::os::fd::{AsFd, AsRawFd};

use kmem::range::Range;
use rustix::io::Errno;
use wire::ToDaemon;

use crate::daemon::send::flush;
use crate::runtime::globals::{Phase, STATE, set_phase};
use crate::runtime::poll;
use crate::window::twin::restore_region;

/// How often the last messages are tried to be sent.
const SEND_TRIES: u32 = 50;
/// How long each try waits for a slow daemon, in milliseconds.
const SEND_WAIT_MS: i32 = 100;

/// Unmerges all regions and gives them back. After an error they stay managed.
pub(super) fn detach() -> Result<(), Errno> {
    // No memory is taken from here on.
    set_phase(Phase::Ended);
    let regions: Vec<_> = STATE.lock().regions.iter().map(|region| (region.id, region.all().len)).collect();
    for (id, pages) in regions {
        if let Err(error) = restore_region(id, pages) {
            set_phase(Phase::Running);
            return Err(error);
        }
    }
    let mut state = STATE.lock();
    for (id, run) in state.regions.pieces(Range::new(0, usize::MAX)) {
        if let Some(bytes) = state.regions.bytes(id, run) {
            // Fails only where nothing is mapped.
            let _ = state.uffds.untrack(bytes);
        }
        state.give_up(id, run);
    }
    state.tell(ToDaemon::Detached);
    state.uffds.close();
    state.segments.clear();
    state.recycler = None;
    let conn = state.uplink.conn.as_ref().map(|conn| conn.as_fd().as_raw_fd());
    drop(state);
    for _ in 0..SEND_TRIES {
        let flushed = flush(&mut STATE.lock());
        let (Ok(true), Some(conn)) = (flushed, conn) else { break };
        poll::wait(&mut [poll::interest(conn, libc::POLLOUT)], SEND_WAIT_MS);
    }
    Ok(())
}
