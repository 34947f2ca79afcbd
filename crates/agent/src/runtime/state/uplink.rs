//! What belongs to the connection with the daemon.

use std::os::fd::{AsFd, OwnedFd};

use kmem::seqpacket::Conn;
use rustix::net::Shutdown;

use crate::runtime::kept::Kept;
use crate::runtime::state::control::ControlPage;
use crate::runtime::state::outbox::Outbox;

/// The connection, the messages that wait for it, and the shared page.
pub(crate) struct Uplink {
    /// The connection. Kept in the shared state so that a forked child can close it.
    pub(crate) conn: Option<Kept<Conn>>,
    /// The descriptor that came with the message that is being handled. Here from the moment of its
    /// receipt, under the same lock, so that a child that is forked meanwhile closes it.
    pub(crate) received: Option<OwnedFd>,
    /// The daemon has welcomed this client. Before, it takes no pool.
    pub(crate) is_welcome: bool,
    /// Messages to be sent.
    pub(crate) outbox: Outbox,
    /// The count of forks, and the page shared with the daemon.
    pub(crate) control: ControlPage,
}

impl Uplink {
    /// No connection.
    pub(crate) const fn new() -> Self {
        Self { conn: None, received: None, is_welcome: false, outbox: Outbox::new(), control: ControlPage::new() }
    }

    /// Whether messages still reach the daemon.
    pub(crate) fn is_usable(&self) -> bool {
        self.conn.is_some() && !self.outbox.has_overflowed()
    }

    /// Closes the connection and forgets the messages that waited for it. A child that inherited
    /// the socket does not keep the connection open.
    pub(crate) fn disconnect(&mut self) {
        if let Some(conn) = self.conn.take().filter(Kept::is_intact) {
            let _ = rustix::net::shutdown(conn.as_fd(), Shutdown::Both);
        }
        self.received = None;
        self.is_welcome = false;
        self.outbox.close();
        self.control.detach();
    }

    /// Closes what a forked child inherited of the connection. The control page stays: the child's
    /// own forks are counted there too.
    pub(crate) fn orphan(&mut self) {
        self.conn = None;
        self.received = None;
        self.outbox.close();
    }
}
