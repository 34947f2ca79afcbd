//! Unix sockets of type `SOCK_SEQPACKET`: messages stay whole and in order, and carry descriptors.
//!
//! No call here ever waits: instead of waiting it returns `WouldBlock` or `None`; then `poll(2)`
//! the descriptor. A message is never split. The longest message is about as long as the sender's
//! send buffer (208 KiB by default).
//!
//! Sources: `unix(7)`, `socket(7)`, `recv(2)`, `cmsg(3)`.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// `SCM_MAX_FD`: the most descriptors that one message carries.
pub const MAX_FDS: usize = 253;

/// Clients that may wait to be accepted (listen(2)): all guests of a host, after a restart.
const BACKLOG: i32 = 4096;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

/// A socket that clients connect to.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
}

impl Listener {
    /// Binds `path`, with these permission bits, and listens. Dropping the listener leaves the path
    /// behind.
    ///
    /// # Errors
    ///
    /// `AddrInUse`: the path exists, maybe left over from an earlier process; then remove it first.
    /// `ENAMETOOLONG`: the path has more than 107 bytes. Those of `bind(2)`.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        let fd = socket()?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        // No client can connect before the socket listens, so the permissions hold from the
        // beginning.
        let listens =
            rustix::fs::chmod(path, Mode::from_raw_mode(mode)).and_then(|()| rustix::net::listen(&fd, BACKLOG));
        // Nobody could connect, nor bind it again.
        listens.inspect_err(|_| _ = std::fs::remove_file(path))?;
        Ok(Self { fd })
    }

    /// Takes over a socket that listens already, such as one from a service manager.
    ///
    /// # Errors
    ///
    /// Those of `fcntl(2)`, which makes it non-blocking.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self { fd })
    }

    /// Accepts the next client. `None`: no client waits.
    ///
    /// # Errors
    ///
    /// Those of `accept(2)`, such as `EMFILE`; the client goes on waiting.
    pub fn accept(&self) -> io::Result<Option<Conn>> {
        loop {
            match rustix::net::accept_with(&self.fd, FLAGS) {
                Ok(fd) => return Ok(Some(Conn { fd })),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

as_fd!(Listener);

/// One end of a connection.
#[derive(Debug)]
pub struct Conn {
    fd: OwnedFd,
}

impl Conn {
    /// Connects to a [`Listener`].
    ///
    /// # Errors
    ///
    /// `WouldBlock`: too many clients wait there already; `NotFound`: no such path;
    /// `ConnectionRefused`: no process listens; `PermissionDenied`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd = socket()?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self { fd })
    }

    /// A pair of connected ends.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        Ok((Self { fd: a }, Self { fd: b }))
    }

    /// Takes over a socket that is connected already, such as one that was inherited.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Sends one message, with up to [`MAX_FDS`] descriptors, whole or not at all.
    ///
    /// # Errors
    ///
    /// `WouldBlock`: the buffer is full until the receiver takes messages. `BrokenPipe`,
    /// `ConnectionReset`: the receiver is gone (no SIGPIPE is raised). `EMSGSIZE`: the message is
    /// longer than the send buffer. `ETOOMANYREFS`: too many descriptors are on their way.
    /// `InvalidInput`: too many descriptors, or an empty message, which would look like the end of
    /// the connection.
    pub fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        if message.is_empty() || fds.len() > MAX_FDS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(message)], &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Receives one message into `buffer` and appends its descriptors (close-on-exec) to `fds`.
    /// Returns its length in bytes. `Some(0)`: the other end is closed; `None`: there is no message
    /// now.
    ///
    /// # Errors
    ///
    /// `InvalidData`: the message is longer than `buffer`, or has more descriptors than this
    /// process may open. The message is lost then; `fds` has those of its descriptors that came.
    /// `ConnectionReset`: the other end was closed before it read all messages.
    pub fn recv(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Option<usize>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = loop {
            match rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
                Ok(received) => break received,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message or its descriptors did not fit"));
        }
        Ok(Some(received.bytes))
    }
}

as_fd!(Conn);

#[cfg(test)]
mod tests;
