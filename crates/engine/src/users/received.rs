//! Descriptors that a client sends.
//!
//! Closing a descriptor may never return: `close(2)` waits for the file system (FUSE), or for the
//! other end of a connection (`SO_LINGER`). So a separate thread closes unused descriptors, one for
//! each user while there is something to close. It closes connections, too: a connection may have
//! unread messages, and their descriptors are closed with it.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kmem::seqpacket::Conn;

use super::{Claim, User};
use crate::config::bounds::CLOSING_OF_USER;

/// Descriptors of a user that are not closed yet.
#[derive(Default)]
pub(super) struct Closing {
    waiting: Vec<Open>,
    /// Descriptors that came with messages, with those that the thread has taken.
    count: usize,
    runs: bool,
}

enum Open {
    Fd(OwnedFd),
    /// Its [`Connection`] is about to be gone.
    Conn(Arc<Conn>),
}

/// A connection of a user's client. Dropping it does not wait.
pub(crate) struct Connection {
    conn: Arc<Conn>,
    user: Arc<User>,
    /// What it counts for its user.
    _claim: Option<Claim>,
}

impl Connection {
    pub(crate) fn new(conn: Conn, user: Arc<User>) -> Self {
        Self { conn: Arc::new(conn), user, _claim: None }
    }

    /// The same, of a client.
    pub(crate) fn claimed(mut self, claim: Claim) -> Self {
        self._claim = Some(claim);
        self
    }
}

impl Deref for Connection {
    type Target = Conn;
    fn deref(&self) -> &Conn {
        &self.conn
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.user.close_all([Open::Conn(self.conn.clone())]);
    }
}

/// Descriptors that came with a message. Those that are not taken out are closed elsewhere.
pub(crate) struct Received {
    user: Arc<User>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Received {
    /// An empty list, for a client of this user. `None`: too many of the user are open.
    pub(crate) fn of(user: &Arc<User>) -> Option<Self> {
        (user.closing.lock().count < CLOSING_OF_USER).then(|| Self { user: user.clone(), fds: Vec::new() })
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.user.close(std::mem::take(&mut self.fds));
    }
}

impl User {
    /// Closes descriptors that a client of this user sent. Does not wait.
    pub(crate) fn close(self: &Arc<Self>, fds: Vec<OwnedFd>) {
        self.close_all(fds.into_iter().map(Open::Fd));
    }

    fn close_all(self: &Arc<Self>, open: impl IntoIterator<Item = Open>) {
        let mut closing = self.closing.lock();
        let before = closing.waiting.len();
        closing.waiting.extend(open);
        closing.count += closing.waiting[before..].iter().filter(|open| matches!(open, Open::Fd(_))).count();
        if !closing.runs && !closing.waiting.is_empty() {
            let user = self.clone();
            // Without a thread they wait for the next ones.
            closing.runs =
                std::thread::Builder::new().name("closer".into()).spawn(move || user.close_waiting()).is_ok();
        }
    }

    fn close_waiting(&self) {
        let mut closing = self.closing.lock();
        loop {
            let Some(open) = closing.waiting.pop() else {
                closing.runs = false;
                return;
            };
            drop(closing);
            let count = match open {
                Open::Fd(fd) => {
                    drop(fd);
                    1
                }
                // The other holder is a connection that is being dropped, at this very moment.
                Open::Conn(conn) => {
                    while Arc::strong_count(&conn) > 1 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    0
                }
            };
            closing = self.closing.lock();
            closing.count -= count;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
