//! Why a connection with the daemon fails.

use std::io;

use rustix::io::Errno;

use crate::runtime::state::control::ControlError;
use crate::runtime::state::segments::SegmentError;

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Messages cannot be sent.
    #[error(transparent)]
    Send(#[from] SendError),
    /// Another user's process listens on the socket.
    #[error("the peer runs as uid {0}, not as root or this user")]
    Peer(u32),
    /// The daemon closed the connection.
    #[error("closed by the daemon")]
    ClosedByDaemon,
    /// The program has closed or replaced descriptors that it did not open.
    #[error("the program has closed descriptors of the agent: its memory leaves management as it is")]
    LostDescriptors,
    /// The program has called prctl(2) past the C library.
    #[error("the kernel's KSM has all of this process (PR_SET_MEMORY_MERGE): its memory leaves management as it is")]
    Ksm,
    /// The agent closed the connection.
    #[error("closed")]
    Closed,
    /// `poll(2)` failed.
    #[error("poll: {0}")]
    Poll(Errno),
    /// A packet is no message.
    #[error(transparent)]
    Decode(#[from] wire::DecodeError),
    /// A message came with descriptors that do not belong to it, or without those that do.
    #[error("a message with the wrong number of descriptors")]
    Descriptors,
    /// A message came before the handshake, or is not for agents to get.
    #[error("a message out of order")]
    OutOfOrder,
    /// The control page is not accepted.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A segment is not accepted.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

/// Why nothing more can be sent on a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SendError {
    /// The queue overflowed.
    #[error("the daemon does not read; starting over")]
    Overflow,
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}
