//! Sends what is queued.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use wire::ToDaemon;

use crate::daemon::error::SendError;
use crate::runtime::state::State;

/// Sends until the queue is empty or the socket is full; true if messages are left.
pub(crate) fn flush(state: &mut State) -> Result<bool, SendError> {
    if state.uplink.outbox.has_overflowed() {
        return Err(SendError::Overflow);
    }
    let Some(conn) = &state.uplink.conn else { return Ok(false) };
    while let Some(message) = state.uplink.outbox.queue.front() {
        if !state.uplink.is_known(message) {
            state.uplink.outbox.queue.pop_front();
            continue;
        }
        let fds: Vec<BorrowedFd<'_>> = match message {
            ToDaemon::SegmentHeld { segment } => match state.segments.get(*segment) {
                Some(held) => vec![held.fd.as_fd()],
                // It was closed in the meantime.
                None => {
                    state.uplink.outbox.queue.pop_front();
                    continue;
                }
            },
            ToDaemon::Pool(_) => state.recycler.iter().flat_map(|recycler| recycler.fds()).collect(),
            ToDaemon::PoolRenewed { .. } => state.recycler.iter().map(|recycler| recycler.fd.as_fd()).collect(),
            _ => Vec::new(),
        };
        match conn.send(&wire::encode(message), &fds) {
            Ok(()) => _ = state.uplink.outbox.queue.pop_front(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}

/// Sends what can be sent now. An error shows again, with its reason, in the session's next round.
pub(crate) fn try_flush(state: &mut State) {
    let _ = flush(state);
}
