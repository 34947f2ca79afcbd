//! Unix sockets that a person names, for programs of the same user.
//!
//! The directory is opened as an output file's is. The socket has mode 0600 before it has its
//! name, and nothing is changed by that name afterwards. In the end its own name goes.
//!
//! Sources: unix(7); bind(2). That a socket's mode at bind(2) is its file's: `unix_bind_bsd()` of
//! the kernel.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::file::place;

/// Programs that may wait to be accepted (listen(2)).
const BACKLOG: i32 = 128;

/// Why nothing listens on a socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another program does.
    #[error("somebody listens on {} already; name another path, or end that program", .0.display())]
    Taken(PathBuf),
    /// The system's refusal.
    #[error("cannot listen on {}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A socket that listens. Dropping it removes its name.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    directory: OwnedFd,
    name: OsString,
    /// Device and inode of its file.
    made: (u64, u64),
}

impl Socket {
    /// Makes a socket. One that nobody listens to any more is replaced.
    ///
    /// # Errors
    ///
    /// [`SocketError`].
    pub fn listen(path: &Path) -> Result<Self, SocketError> {
        let failed = |source: io::Error| SocketError::Io { path: path.into(), source };
        let (directory, name) = place(path).map_err(failed)?;
        let at = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
        // One of another type hears nothing of it.
        match UnixDatagram::unbound().and_then(|probe| probe.connect(&at)) {
            // To connect to a file or a directory is refused, too, and these stay.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && made(&directory, name).is_some() => {
                rustix::fs::unlinkat(&directory, name, AtFlags::empty()).map_err(|e| failed(e.into()))?;
            }
            Err(e) if e.raw_os_error() != Some(libc::EPROTOTYPE) => {}
            _ => return Err(SocketError::Taken(path.into())),
        }
        let listener = || -> Result<UnixListener, rustix::io::Errno> {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
            rustix::net::bind(&socket, &SocketAddrUnix::new(&at)?)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok(socket.into())
        };
        let listener = listener().map_err(|e| failed(e.into()))?;
        let made = made(&directory, name).ok_or_else(|| failed(rustix::io::Errno::NOENT.into()))?;
        Ok(Self { listener, name: name.to_owned(), directory, made })
    }

    /// Waits for the next program.
    ///
    /// # Errors
    ///
    /// Those of accept(2), such as `EMFILE`.
    pub fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if made(&self.directory, &self.name) == Some(self.made) {
            let _ = rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty());
        }
    }
}

/// Device and inode, if a name is a socket's.
fn made(directory: &OwnedFd, name: &OsStr) -> Option<(u64, u64)> {
    let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::Socket).then_some((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_to_is_replaced_and_only_its_own_name_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, file) = (dir.path().join("socket"), dir.path().join("file"));
        let error = |path: &Path| Socket::listen(path).unwrap_err();
        let first = Socket::listen(&socket).unwrap();
        assert_eq!(std::fs::metadata(&socket).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(error(&socket), SocketError::Taken(_)));
        first.listener.set_nonblocking(true).unwrap();
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "it heard nothing of that");
        // Its file stays, as after a kill.
        std::fs::rename(&socket, dir.path().join("moved")).unwrap();
        drop(first);
        std::fs::rename(dir.path().join("moved"), &socket).unwrap();
        let second = Socket::listen(&socket).unwrap();
        UnixStream::connect(&socket).unwrap();
        std::fs::write(&file, "kept").unwrap();
        std::fs::rename(&file, &socket).unwrap();
        drop(second);
        for path in [&*socket, dir.path()] {
            assert!(matches!(error(path), SocketError::Io { .. }), "{path:?}");
        }
        assert_eq!(std::fs::read(&socket).unwrap(), b"kept");
        drop(Socket::listen(&file).unwrap());
        assert!(!file.exists());
    }

    #[test]
    fn no_link_is_followed_when_it_gets_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, victim) = (dir.path().join("socket"), dir.path().join("victim"));
        std::fs::write(&victim, "").unwrap();
        rustix::fs::chmod(&victim, Mode::from_raw_mode(0o644)).unwrap();
        std::os::unix::fs::symlink(&victim, &socket).unwrap();
        assert!(matches!(Socket::listen(&socket).unwrap_err(), SocketError::Io { .. }));
        assert_eq!(std::fs::metadata(&victim).unwrap().mode() & 0o777, 0o644);
    }
}
