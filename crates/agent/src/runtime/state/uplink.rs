//! What belongs to the connection with the daemon.

use std::os::fd::{AsFd, OwnedFd};

use kmem::seqpacket::Conn;
use rustix::net::Shutdown;
use wire::ToDaemon;

use crate::runtime::descriptors::Descriptor;
use crate::runtime::state::control::ControlPage;
use crate::runtime::state::outbox::Outbox;

/// The connection, the messages that wait for it, and the shared page.
pub(crate) struct Uplink {
    /// The connection. Kept in the shared state so that a forked child can close it.
    pub(crate) conn: Option<Descriptor<Conn>>,
    /// The descriptor of the message that is being handled: a child that is forked meanwhile closes
    /// it.
    pub(crate) received: Option<OwnedFd>,
    /// The version of the protocol, once the daemon has welcomed this client.
    pub(crate) version: Option<u16>,
    pub(crate) outbox: Outbox,
    pub(crate) control: ControlPage,
}

impl Uplink {
    pub(crate) const fn new() -> Self {
        Self { conn: None, received: None, version: None, outbox: Outbox::new(), control: ControlPage::new() }
    }

    /// Whether the daemon knows this message. Before the welcome it knows those of every version.
    pub(crate) fn is_known(&self, message: &ToDaemon) -> bool {
        message.since() <= self.version.unwrap_or(wire::OLDEST)
    }

    /// Whether messages still reach the daemon.
    pub(crate) fn is_usable(&self) -> bool {
        self.conn.is_some() && !self.outbox.has_overflowed()
    }

    /// Closes the connection and forgets the messages that waited for it. A child that inherited
    /// the socket does not keep the connection open.
    pub(crate) fn disconnect(&mut self) {
        if let Some(conn) = self.conn.take().filter(Descriptor::is_intact) {
            let _ = rustix::net::shutdown(conn.as_fd(), Shutdown::Both);
        }
        self.received = None;
        self.version = None;
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
