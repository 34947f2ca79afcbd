//! Bounds on what one user can have of the control socket.
//!
//! A connection costs a thread, and a status costs CPU time in proportion to the number of clients.
//! So each user, with its subordinate uids, has [`CONNECTIONS`] connections at a time, and a
//! [`SHARE`] of a CPU for its requests. Root and the daemon's owner have more connections and all
//! CPU time, and nobody else takes these.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use claims::{Lines, Owner};
use kmem::peer::is_trusted;
use parking_lot::Mutex;

/// Connections of one user at a time: some commands and some checkpoints at once.
pub(super) const CONNECTIONS: u32 = 16;
/// Connections of root and the daemon's owner at a time: monitors of all kinds.
pub(super) const TRUSTED_CONNECTIONS: u32 = 256;
/// Connections of all others at a time, a thread each.
const ALL_CONNECTIONS: u32 = 512;
/// Lines in the log about users that have too many, in a minute.
const LINES: u32 = 10;
/// After a request, a user's next one waits for this many times as long: requests take a tenth of a
/// CPU at most.
const SHARE: u32 = 9;
/// The longest such wait: on a slow machine a request may take long for other reasons.
const LONGEST: Duration = Duration::from_secs(1);

/// One user's part.
#[derive(Default)]
pub(super) struct User {
    connections: AtomicU32,
    /// One connection was refused since this user last had none: the log has a line on it.
    refused: AtomicU32,
    /// When the next request may begin.
    next: Mutex<Option<Instant>>,
}

/// A connection of a user; it counts until it is dropped.
pub(super) struct Connection(Arc<User>);

/// All users that have connections.
pub(super) struct Users {
    users: HashMap<Owner, Arc<User>>,
    lines: Lines,
}

impl Users {
    pub(super) fn new() -> Self {
        Self { users: HashMap::new(), lines: Lines::new(LINES) }
    }

    /// Admits one more connection of this uid's user. `None`: it has as many as it may have, or all
    /// have.
    pub(super) fn admit(&mut self, uid: u32) -> Option<Connection> {
        // Users without connections are forgotten, except for the time that their last one used.
        self.users.retain(|_, user| user.connections.load(Acquire) > 0 || user.is_in_debt());
        let counts = |(owner, _): &(&Owner, _)| !is_trusted(owner.number());
        let others = self.users.iter().filter(counts).map(|(_, user)| user.connections.load(Acquire)).sum::<u32>();
        let user = self.users.entry(Owner::of(uid)).or_default();
        let most = match is_trusted(uid) {
            true => TRUSTED_CONNECTIONS,
            false => CONNECTIONS.min(user.connections.load(Acquire) + ALL_CONNECTIONS.saturating_sub(others)),
        };
        if user.connections.fetch_add(1, AcqRel) >= most {
            user.connections.fetch_sub(1, AcqRel);
            if user.refused.swap(1, AcqRel) == 0 && self.lines.take().is_some() {
                tracing::warn!(uid, "too many control connections of this user, or of all; more are closed");
            }
            return None;
        }
        Some(Connection(user.clone()))
    }
}

impl User {
    /// Whether the next request would have to wait. Never waits itself.
    fn is_in_debt(&self) -> bool {
        self.next.try_lock().is_some_and(|next| next.is_some_and(|next| next > Instant::now()))
    }
}

impl Connection {
    /// Answers a request. One request of a user is answered at a time, and not before its share of
    /// CPU time allows.
    pub(super) fn in_turn<T>(&self, answer: impl FnOnce() -> T) -> T {
        let mut next = self.0.next.lock();
        if let Some(wait) = next.and_then(|next| next.checked_duration_since(Instant::now())) {
            std::thread::sleep(wait);
        }
        let begin = Instant::now();
        let answer = answer();
        *next = Some(Instant::now() + (begin.elapsed() * SHARE).min(LONGEST));
        answer
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.0.connections.fetch_sub(1, AcqRel) == 1 {
            self.0.refused.store(0, Release);
        }
    }
}

#[cfg(test)]
mod tests;
