//! The engine as the program has it: starting and stopping.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use kmem::seqpacket::Listener;
use parking_lot::Mutex;

use crate::config::Config;
use crate::daemon::service::Service;
use crate::merge::pass::{self, Buffers};
use crate::world::shared::Shared;
use crate::world::state_file::{STATE_FILE, StateFile};

/// The name of the agents' socket in the daemon's directory.
pub const AGENT_SOCKET: &str = "agent.sock";

/// Why the engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another daemon serves this directory.
    #[error("another daemon is running in {0}; stop it first, or give this one a directory of its own (--dir)")]
    SecondDaemon(std::path::PathBuf),
    /// Something about the directory or the sockets.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: std::path::PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> StartError {
    let path = path.to_path_buf();
    move |source| StartError::Io { what, path, source }
}

/// A running engine.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    _lock: OwnedFd,
}

impl Engine {
    /// Starts the engine in `config.directory`, which is created if it is missing.
    ///
    /// # Errors
    ///
    /// [`StartError`]: another daemon serves the directory, or something there cannot be made.
    pub fn start(config: Config) -> Result<Self, StartError> {
        use std::os::unix::fs::DirBuilderExt;
        let directory = config.directory.clone();
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&directory)
            .map_err(io_error("create", &directory))?;
        let lock = take_lock(&directory)?;
        let socket = directory.join(AGENT_SOCKET);
        match std::fs::remove_file(&socket) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io_error("replace", &socket)(e)),
            _ => {}
        }
        // Any user may connect: each gets a domain of its own.
        let listener = Listener::bind(&socket, 0o666).map_err(io_error("listen on", &socket))?;
        let state_file = StateFile::load(&directory).map_err(io_error("read", &directory.join(STATE_FILE)))?;
        let watch = |e: rustix::io::Errno| io_error("watch", &socket)(e.into());
        let wake =
            rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(watch)?);
        let workers = config.workers();
        let shared = Arc::new(Shared::new(config, state_file));
        let mut service = Service::new(shared.clone(), listener, wake.clone()).map_err(watch)?;
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name).spawn(body).map_err(io_error("start threads for", &directory))
        };
        let mut threads = vec![spawn("service".into(), Box::new(move || service.run()))?];
        for n in 0..workers {
            let shared = shared.clone();
            threads.push(spawn(format!("merge-{n}"), Box::new(move || work(&shared)))?);
        }
        Ok(Self { shared, wake, threads: Mutex::new(threads), _lock: lock })
    }

    /// Whether the engine has ended by itself (`exit_when_idle`).
    pub fn ended(&self) -> bool {
        self.shared.stopping()
    }

    /// Ends every thread. Merged memory stays merged; clients wait for the next daemon.
    pub fn stop(&self) {
        self.shared.stop();
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        for thread in self.threads.lock().drain(..) {
            let _ = thread.join();
        }
    }

    /// The owner of a client process.
    pub fn owner(&self, pid: i32) -> Option<u32> {
        self.shared.clients().iter().find(|c| c.pid == pid).map(|c| c.uid)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Only one daemon serves a directory; the lock goes with its process.
fn take_lock(directory: &Path) -> Result<OwnedFd, StartError> {
    use rustix::fs::{FlockOperation, Mode, OFlags};
    let path = directory.join("daemon.lock");
    let file = rustix::fs::open(&path, OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
        .map_err(|e| io_error("open", &path)(e.into()))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(StartError::SecondDaemon(directory.to_path_buf())),
        Err(e) => Err(io_error("lock", &path)(e.into())),
    }
}

/// A worker: takes one client after the other, for one pass each.
fn work(shared: &Shared) {
    let mut buffers = Buffers::new();
    while let Some((client, scan)) = shared.queue.take() {
        pass::run(shared, &client, &mut buffers, scan);
        shared.charge_agents();
        shared.pacer.pause(|| shared.stopping());
        shared.queue.done(client);
    }
}
