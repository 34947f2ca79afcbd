//! Bounds on what one user can have of the control socket.
//!
//! A connection costs a thread, and a status costs CPU time in proportion to the number of clients.
//! So each user has [`CONNECTIONS`] connections at a time, and a [`SHARE`] of a CPU for its
//! requests. Root and the daemon's owner have more connections and all CPU time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Connections of one user at a time: some commands and some checkpoints at once.
pub(super) const CONNECTIONS: u32 = 16;
/// Connections of root and the daemon's owner at a time: monitors of all kinds.
pub(super) const TRUSTED_CONNECTIONS: u32 = 256;
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
#[derive(Default)]
pub(super) struct Users(HashMap<u32, Arc<User>>);

impl Users {
    /// Admits one more connection of this user, if it has less than `most`.
    pub(super) fn admit(&mut self, uid: u32, most: u32) -> Option<Connection> {
        // Users without connections are forgotten, except for the time that their last one used.
        self.0.retain(|_, user| user.connections.load(Acquire) > 0 || user.is_in_debt());
        let user = self.0.entry(uid).or_default();
        if user.connections.fetch_add(1, AcqRel) >= most {
            user.connections.fetch_sub(1, AcqRel);
            if user.refused.swap(1, AcqRel) == 0 {
                tracing::warn!(uid, "over {most} control connections of one user at a time; more are closed");
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
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_the_connections_of_another() {
        let mut users = Users::default();
        let mut kept: Vec<_> = (0..CONNECTIONS).map_while(|_| users.admit(7, CONNECTIONS)).collect();
        assert_eq!(kept.len(), CONNECTIONS as usize);
        assert!(users.admit(7, CONNECTIONS).is_none(), "too many");
        assert!(
            users.admit(8, CONNECTIONS).is_some() && users.admit(0, TRUSTED_CONNECTIONS).is_some(),
            "others have theirs"
        );
        kept.pop();
        assert!(users.admit(7, CONNECTIONS).is_some());
        drop(kept);
        users.admit(9, CONNECTIONS);
        assert!(!users.0.contains_key(&7), "who has no connection is forgotten");
    }

    #[test]
    fn requests_of_a_user_leave_most_of_the_time_to_others() {
        let connection = Users::default().admit(7, CONNECTIONS).unwrap();
        let begin = Instant::now();
        let mut answering = Duration::ZERO;
        for _ in 0..5 {
            answering += connection.in_turn(|| {
                let begin = Instant::now();
                std::thread::sleep(Duration::from_millis(4));
                begin.elapsed()
            });
        }
        // The last wait is still to come.
        assert!(begin.elapsed() >= answering * 4, "{answering:?} of {:?}", begin.elapsed());
    }
}
