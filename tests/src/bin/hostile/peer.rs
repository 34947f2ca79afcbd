//! A connection that speaks the wire protocol without an agent.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use kmem::seqpacket::Conn;
use rustix::event::{PollFd, PollFlags, poll};
use wire::{RegionId, ToAgent, ToDaemon};

use super::Host;

/// A connection to the daemon's agent socket.
pub(super) struct Peer(Conn);

impl Peer {
    /// Connects; waits while the daemon's queue is full.
    pub(super) fn connect(host: &Host) -> Self {
        loop {
            match Conn::connect(&host.agents) {
                Ok(conn) => return Self(conn),
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
        let peer = Self::hello(host);
        for (id, &(start, len)) in regions.iter().enumerate() {
            peer.region(id as u32, start as u64, len as u64)?;
        }
        peer.send(&ToDaemon::Ready)?;
        Ok(peer)
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
            match self.0.send(bytes, fds) {
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
        let mut packet = vec![0; wire::MAX_MESSAGE];
        let mut fds = Vec::new();
        self.wait(PollFlags::IN, time);
        match self.0.recv(&mut packet, &mut fds)? {
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
        let _ = poll(&mut [PollFd::new(&self.0.as_fd(), flags)], Some(&time));
    }
}
