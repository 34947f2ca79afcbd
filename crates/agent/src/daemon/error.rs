//! Why a connection with the daemon fails.

use std::io;

use rustix::io::Errno;

use crate::runtime::state::control::ControlError;
use crate::runtime::state::segments::SegmentError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LinkError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Send(#[from] SendError),
    #[error("the peer runs as uid {0}, not as root or this user")]
    Peer(u32),
    #[error("closed by the daemon")]
    ClosedByDaemon,
    /// The program has closed or replaced descriptors that it did not open.
    #[error("the program has closed descriptors of the agent: its memory leaves management as it is")]
    LostDescriptors,
    /// The program has called prctl(2) past the C library.
    #[error("the kernel's KSM has all of this process (PR_SET_MEMORY_MERGE): its memory leaves management as it is")]
    Ksm,
    #[error("closed")]
    Closed,
    #[error("poll: {0}")]
    Poll(Errno),
    #[error(transparent)]
    Decode(#[from] wire::DecodeError),
    #[error("a message with the wrong number of descriptors")]
    Descriptors,
    #[error("a message out of order")]
    OutOfOrder,
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

/// Why nothing more can be sent on a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    #[error("the daemon does not read; starting over")]
    Overflow,
    #[error(transparent)]
    Io(#[from] io::Error),
}
