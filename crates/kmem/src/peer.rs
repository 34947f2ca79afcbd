//! The process at the other end of a unix socket (`unix(7)`, `socket(7)`).

#![allow(unsafe_code)] // Socket options that rustix lacks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::pidfd::PidFd;

/// Pause before another try to connect.
const PAUSE: Duration = Duration::from_millis(10);

/// The process at the other end, as it was when that end connected or began to listen.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Process; 0: it lies outside of this process's PID namespace.
    pub pid: i32,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

impl Peer {
    /// The process at the other end of a socket (`SO_PEERCRED`).
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
        // SAFETY: the value of SO_PEERCRED is a `ucred`.
        unsafe { option(socket, libc::SO_PEERCRED, &mut cred) }?;
        Ok(Self { pid: cred.pid, uid: cred.uid, gid: cred.gid })
    }
}

/// Connects to a socket, within a limit. A listener's queue may be full, and `connect(2)` blocks
/// until the listener accepts a connection, which it may never do.
///
/// # Errors
/// `WouldBlock`: the queue stayed full. Those of `connect(2)`.
pub fn connect_within(address: &SocketAddr, limit: Duration) -> io::Result<UnixStream> {
    let start = Instant::now();
    let named = |name| SocketAddrUnix::new_abstract_name(name);
    let path = || address.as_pathname().ok_or(Errno::INVAL).and_then(SocketAddrUnix::new);
    let address = address.as_abstract_name().map_or_else(path, named)?;
    loop {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match net::connect(&stream, &address) {
            Ok(()) => {
                let stream = UnixStream::from(stream);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(Errno::AGAIN) if start.elapsed() < limit => std::thread::sleep(PAUSE),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a user's processes are believed, and may see and do everything here: root, and this
/// process's user.
pub fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// Whether a user's daemon is asked for what it says of its own clients. Root meets another's only
/// where it has named the directory; nothing of what that says is done in another's place.
pub fn may_be_asked(uid: u32) -> bool {
    is_trusted(uid) || rustix::process::geteuid().is_root()
}

/// The process at the other end, as a descriptor (`SO_PEERPIDFD`, Linux 6.5). On older kernels this
/// opens the process's number, which another process may have by then: compare what matters, such
/// as the owner, afterwards.
///
/// # Errors
///
/// `ESRCH` or `EINVAL`: the process has ended.
pub fn pidfd(socket: impl AsFd) -> io::Result<PidFd> {
    /// Not in every version of the C library.
    const SO_PEERPIDFD: libc::c_int = 77;
    let (socket, mut fd) = (socket.as_fd(), -1);
    // SAFETY: the value of SO_PEERPIDFD is a descriptor, an `int`.
    match unsafe { option::<RawFd>(socket, SO_PEERPIDFD, &mut fd) } {
        // SAFETY: the kernel has just opened this descriptor, and no other code knows it.
        Ok(()) => Ok(PidFd::from_fd(unsafe { OwnedFd::from_raw_fd(fd) })),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => PidFd::open(Peer::of(socket)?.pid),
        Err(error) => Err(error),
    }
}

/// Reads an option of `SOL_SOCKET`.
///
/// # Safety
///
/// `T` is the type of this option's value, or a type for which all bytes of it are valid.
unsafe fn option<T>(socket: impl AsFd, option: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let (socket, value) = (socket.as_fd().as_raw_fd(), (&raw mut *value).cast());
    // SAFETY: the kernel writes at most `len` bytes to `value`, which is borrowed for writing and
    // as long. By the contract the result is a valid `T`.
    if unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, value, &mut len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
