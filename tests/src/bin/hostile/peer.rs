//! A connection that speaks the wire protocol without an agent.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use kmem::memfd::{self, SharedMap};
use kmem::seqpacket::Conn;
use rustix::event::{PollFd, PollFlags, poll};
use wire::{RegionId, ToAgent, ToDaemon};

use super::Host;

/// How long the daemon may take to welcome an agent. One that refuses it says so, or hangs up.
const WELCOME: Duration = Duration::from_secs(2);

/// A connection to the daemon's agent socket.
pub(super) struct Peer {
    conn: Conn,
    /// The control page, once the daemon has sent it.
    control: Option<SharedMap>,
}

impl Peer {
    /// Connects; waits while the daemon's queue is full.
    pub(super) fn connect(host: &Host) -> Self {
        loop {
            match Conn::connect(&host.agents) {
                Ok(conn) => return Self { conn, control: None },
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Connects and says hello.
    pub(super) fn hello(host: &Host) -> Self {
        Self::hello_as(host, None)
    }

    /// The same, for a domain of this name.
    pub(super) fn hello_as(host: &Host, domain: Option<String>) -> Self {
        let peer = Self::connect(host);
        let hello = ToDaemon::Hello { version: wire::VERSION, domain, name: "hostile".into(), forks: 0 };
        let _ = peer.send(&hello);
        peer
    }

    /// Connects and introduces a client with these regions: address and bytes of each.
    pub(super) fn client(host: &Host, regions: &[(usize, usize)]) -> io::Result<Self> {
        let mut peer = Self::hello(host);
        for (id, &(start, len)) in regions.iter().enumerate() {
            peer.region(id as u32, start as u64, len as u64)?;
        }
        let address = peer.ready()?.range().start as u64;
        peer.send(&ToDaemon::Mapped { address })?;
        Ok(peer)
    }

    /// Says that all regions are told, and maps the control page that the daemon answers with.
    pub(super) fn ready(&mut self) -> io::Result<&SharedMap> {
        self.send(&ToDaemon::Ready)?;
        let mut fds = Vec::new();
        match self.hear_all(WELCOME, &mut fds)? {
            Some(ToAgent::Welcome { .. }) => {
                let fd = fds.first().ok_or(io::ErrorKind::InvalidData)?;
                let control = memfd::map_shared(fd, wire::control::LEN).map_err(io::Error::other)?;
                Ok(self.control.insert(control))
            }
            _ => Err(io::ErrorKind::ConnectionRefused.into()),
        }
    }

    /// The control page, if the daemon has sent it.
    pub(super) fn control(&self) -> Option<&SharedMap> {
        self.control.as_ref()
    }

    pub(super) fn region(&self, id: u32, start: u64, len: u64) -> io::Result<()> {
        self.send(&ToDaemon::RegionAdded { region: RegionId(id), start, len })
    }

    /// Sends a message; waits for room.
    pub(super) fn send(&self, message: &ToDaemon) -> io::Result<()> {
        self.send_bytes(&wire::encode(message), &[])
    }

    /// Sends any bytes, with descriptors; waits for room, up to a second.
    pub(super) fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        for _ in 0..10 {
            match self.conn.send(bytes, fds) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(PollFlags::OUT, Duration::from_millis(100));
                }
                done => return done,
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// The next message, unless none comes in time. `Err`: the daemon has hung up.
    pub(super) fn hear(&self, time: Duration) -> io::Result<Option<ToAgent>> {
        self.hear_all(time, &mut Vec::new())
    }

    /// The same, with the descriptors that come with it.
    pub(super) fn hear_all(&self, time: Duration, fds: &mut Vec<OwnedFd>) -> io::Result<Option<ToAgent>> {
        let mut packet = vec![0; wire::MAX_MESSAGE];
        self.wait(PollFlags::IN, time);
        match self.conn.recv(&mut packet, fds)? {
            None => Ok(None),
            Some(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(len) => Ok(wire::decode_to_agent(&packet[..len]).ok()),
        }
    }

    /// Whether the daemon keeps the connection: what it says is dropped.
    pub(super) fn is_kept(&self) -> bool {
        loop {
            match self.hear(Duration::ZERO) {
                Ok(None) => return true,
                Ok(Some(_)) => {}
                Err(_) => return false,
            }
        }
    }

    fn wait(&self, flags: PollFlags, time: Duration) {
        let time = rustix::event::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        let _ = poll(&mut [PollFd::new(&self.conn.as_fd(), flags)], Some(&time));
    }
}
