//! Bounds on the daemon's resources for one user and one connection.
//!
//! Every bound is per user, who may have many uids ([`claims::Owner`]): one that reaches it does
//! not affect others. Bounds that an operator may have to change are settings (`user_memory`,
//! `user_clients`, `user_domains`).

use std::time::Duration;

/// Connections of one user that have not finished their handshake; those of further guests, after a
/// restart, try again.
pub(crate) const HANDSHAKES_OF_USER: u64 = 512;
/// All connections that have not finished their handshake, for the memory that they take. Above
/// this, the oldest of the user with the most is closed.
pub(crate) const HANDSHAKES: usize = 4096;
/// How long a handshake may take.
pub(crate) const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// New connections taken in one round of the service thread.
pub(crate) const ACCEPTS: usize = 32;
/// Descriptors of segments that wait in unfinished handshakes of one user: as many as a store has.
pub(crate) const SEGMENTS_OF_USER: u64 = 4096;
/// Unrequested descriptors that one user's clients sent and that are not closed yet. Above this,
/// connections that send more are closed.
pub(crate) const CLOSING_OF_USER: usize = 256;
/// A process that connects again is looked at when this many times what the last look took has
/// passed, of CPU time, and at most so long: a tenth of a CPU for each.
pub(crate) const REST_OF_PROCESS: (u32, Duration) = (9, Duration::from_secs(5));
/// Time of the service thread for one user in one round; then the others have theirs. Other
/// messages wait in the sockets. One message, or one slice of it, is not interrupted.
pub(crate) const ROUND: Duration = Duration::from_millis(1);
/// Pages of a message on discarded, recycled or shrunk memory that are applied in one step: some
/// 0.5 ms where each of them was merged.
pub(crate) const SLICE: u32 = 4096;
/// Time of a worker for a client while one of another user waits. Long enough for runs of pages,
/// which make few windows.
pub(crate) const TURN: Duration = Duration::from_millis(100);
/// Lines in the log about one user's clients in a minute.
pub(crate) const LINES_OF_USER: u32 = 60;
/// The same of all users together, without those of root and of the daemon's owner.
pub(crate) const LINES: u32 = 240;
/// Refused clients of one user that `status` lists: the latest.
pub(crate) const REFUSALS_OF_USER: usize = 16;
/// The same of all users together, which share it.
pub(crate) const REFUSALS: usize = 256;
/// Regions of a client that it announced and does not map. An honest agent has one for a moment:
/// the program has unmapped it, and the message is on its way.
pub(crate) const UNMAPPED_REGIONS: usize = 16;
