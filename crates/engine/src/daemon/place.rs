//! The daemon's directory: a lock, so that one daemon serves it, and the agents' socket.
//!
//! Somebody may delete these files: `rm` in `/run`, a cleaner of old files. They are made again.
//! Else no guest would find the daemon, and a second one could begin beside it. A daemon that has
//! taken the place meanwhile keeps it.

use std::fs::DirBuilder;
use std::io::ErrorKind::NotFound;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kmem::memfd::{FileId, identity};
use kmem::seqpacket::Listener;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

use crate::sync::Mutex;

const LOCK: &str = "daemon.lock";
/// The name of the agents' socket in the daemon's directory.
pub const AGENT_SOCKET: &str = "agent.sock";

/// Why the engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another daemon serves this directory.
    #[error("another daemon is running in {0}; stop it first, or give this one a directory of its own (--dir)")]
    SecondDaemon(PathBuf),
    /// Something about the directory or the sockets.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

pub(super) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StartError {
    let path = path.to_path_buf();
    move |source| StartError::Io { what, path, source }
}

/// The daemon's hold on its directory.
pub(crate) struct Place {
    pub(super) directory: PathBuf,
    /// `None`: the daemon ends, and another may begin.
    lock: Mutex<Option<OwnedFd>>,
    /// Whether the log has told that the socket cannot be made again.
    told: AtomicBool,
}

impl Place {
    /// Makes the directory if it is missing. The lock goes with the process.
    pub(super) fn take(directory: PathBuf) -> Result<Self, StartError> {
        let lock = Mutex::new(Some(take_lock(&directory)?));
        Ok(Self { directory, lock, told: AtomicBool::new(false) })
    }

    /// Listens for agents, instead of who did so before.
    pub(super) fn listen(&self) -> Result<Listener, StartError> {
        let socket = self.directory.join(AGENT_SOCKET);
        match std::fs::remove_file(&socket) {
            Err(e) if e.kind() != NotFound => return Err(io_error("replace", &socket)(e)),
            _ => {}
        }
        // Any user may connect: each gets a domain of its own.
        Listener::bind(&socket, 0o666).map_err(io_error("listen on", &socket))
    }

    /// A new listener, where the file of the one before is gone.
    pub(super) fn listen_again(&self) -> Option<Listener> {
        let socket = self.directory.join(AGENT_SOCKET);
        // The lock is looked at, and taken again, whatever else is there.
        if !self.is_ours() || !is_gone(&socket) {
            return None;
        }
        match Listener::bind(&socket, 0o666) {
            Ok(listener) => {
                tracing::warn!("somebody has deleted {}: made again", socket.display());
                self.told.store(false, Relaxed);
                Some(listener)
            }
            Err(e) => {
                if !self.told.swap(true, Relaxed) {
                    tracing::error!("somebody has deleted {}, and it cannot be made again: {e}", socket.display());
                }
                None
            }
        }
    }

    /// Whether this daemon has the place. Takes the lock again where its file is gone.
    pub(crate) fn is_ours(&self) -> bool {
        let mut lock = self.lock.lock();
        let Some(ours) = &mut *lock else { return false };
        match std::fs::symlink_metadata(self.directory.join(LOCK)) {
            Ok(there) => identity(&*ours).is_ok_and(|ours| ours == FileId { dev: there.dev(), ino: there.ino() }),
            Err(e) if e.kind() == NotFound => take_lock(&self.directory).map(|new| *ours = new).is_ok(),
            Err(_) => false,
        }
    }

    /// Another daemon may begin. A thread that is held up in a client's memory keeps the process,
    /// and its descriptors: the lock would stay.
    pub(super) fn leave(&self) {
        if let Some(lock) = self.lock.lock().take() {
            let _ = flock(&lock, FlockOperation::Unlock);
        }
    }
}

fn is_gone(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == NotFound)
}

fn take_lock(directory: &Path) -> Result<OwnedFd, StartError> {
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
    made.map_err(io_error("create", directory))?;
    let path = directory.join(LOCK);
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| io_error("open", &path)(e.into()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(StartError::SecondDaemon(directory.to_path_buf())),
        Err(e) => Err(io_error("lock", &path)(e.into())),
    }
}
