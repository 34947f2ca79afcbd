//! The daemon's heart: sockets, clients coming and going, periods, workers.
//!
//! One thread waits for everything that comes from outside: new connections, messages, the ends of
//! processes. It applies what agents report to the ledgers and never waits for a client. Every
//! merge period it asks the workers for a merge pass of each client. An idle daemon wakes once a
//! period.

mod handshake;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};

use kmem::pidfd::PidFd;
use kmem::seqpacket::Listener;
use parking_lot::Mutex;
use rustix::event::epoll;
use wire::{SegmentId, ToAgent};

use self::handshake::{GREETING_TIME, Greeting};
use crate::client::link::Link;
use crate::client::{Client, Next};
use crate::config::Config;
use crate::content::index::ClientId;
use crate::merge::pass::{self, Buffers};
use crate::recycle::{policy, ram};
use crate::world::shared::Shared;
use crate::world::state_file::{STATE_FILE, StateFile};

/// When no worker has done anything for so long, another scan begins though the last is not over.
const STUCK: Duration = Duration::from_secs(2);
/// How soon to try again to begin a scan, at the latest.
const LATER: Duration = Duration::from_millis(50);
/// Messages taken from one client before others get their turn.
const FAIR_SHARE: usize = 64;

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

/// What an epoll token stands for: kind in the upper half, number in the lower.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const GREETING: u64 = 1 << 32;
const CLIENT: u64 = 2 << 32;
const PROCESS: u64 = 3 << 32;

struct Service {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    listener: Listener,
    wake: Arc<OwnedFd>,
    greetings: HashMap<u32, Greeting>,
    next_greeting: u32,
    last_client: ClientId,
    packet: Vec<u8>,
    empty_since: Instant,
    /// When pools are to be looked at.
    next_reclaim: Option<Instant>,
}

/// A running engine.
pub struct Engine {
    pub(crate) shared: Arc<Shared>,
    wake: Arc<OwnedFd>,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    _lock: OwnedFd,
}

impl Engine {
    /// Starts the engine in `config.directory`, which is made if it is missing.
    pub fn start(config: Config) -> Result<Engine, StartError> {
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
        let errno = |e: rustix::io::Errno| io_error("watch", &socket)(e.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(errno)?;
        let wake =
            rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(errno)?);
        for (fd, token) in [(listener.as_fd(), LISTENER), (wake.as_fd(), WAKE)] {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN).map_err(errno)?;
        }
        let workers = config.workers();
        let shared = Arc::new(Shared::new(config, state_file));
        let mut service = Service {
            shared: shared.clone(),
            epoll,
            listener,
            wake: wake.clone(),
            greetings: HashMap::new(),
            next_greeting: 0,
            last_client: ClientId(0),
            packet: vec![0; wire::MAX_MESSAGE],
            empty_since: Instant::now(),
            next_reclaim: None,
        };
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name).spawn(body).map_err(io_error("start threads for", &directory))
        };
        let mut threads = vec![spawn("service".into(), Box::new(move || service.run()))?];
        for n in 0..workers {
            let shared = shared.clone();
            threads.push(spawn(format!("merge-{n}"), Box::new(move || work(&shared)))?);
        }
        Ok(Engine { shared, wake, threads: Mutex::new(threads), _lock: lock })
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

    /// Asks a client's agent to unmerge everything and give its regions back. Poll
    /// [`Engine::is_client`] for the end.
    pub fn detach(&self, pid: i32) -> Result<(), DetachError> {
        let client = self.shared.clients().into_iter().find(|c| c.pid == pid).ok_or(DetachError::NotAClient(pid))?;
        client.conn.send(&wire::encode(&ToAgent::Detach), &[]).map_err(|source| DetachError::Agent { pid, source })
    }

    /// The owner of a client process.
    pub fn owner(&self, pid: i32) -> Option<u32> {
        self.shared.clients().iter().find(|c| c.pid == pid).map(|c| c.uid)
    }

    /// Whether this process has regions under management.
    pub fn is_client(&self, pid: i32) -> bool {
        self.shared.clients().iter().any(|c| c.pid == pid && c.state().link != Link::Detached)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why a client could not be detached.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    /// No such client.
    #[error("process {0} is no client of this daemon; `pageone status` lists them")]
    NotAClient(i32),
    /// Its agent can't be reached.
    #[error("the agent in process {pid} can't be reached: {source}")]
    Agent {
        /// The process.
        pid: i32,
        /// Why not.
        source: std::io::Error,
    },
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

fn work(shared: &Shared) {
    let mut buffers = Buffers::new();
    while let Some((client, scan)) = shared.queue.take() {
        pass::run(shared, &client, &mut buffers, scan);
        shared.charge_agents();
        shared.pacer.pause(|| shared.stopping());
        shared.queue.done(client);
    }
}

impl Service {
    fn run(&mut self) {
        let period = self.shared.config.period();
        let mut next_scan = Instant::now() + period;
        let mut events = Vec::with_capacity(64);
        while !self.shared.stopping() {
            let next = self.next_reclaim.map_or(next_scan, |next| next.min(next_scan));
            let wait = next.saturating_duration_since(Instant::now());
            let timeout =
                rustix::event::Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    tracing::error!("cannot wait for events: {e}");
                    break;
                }
            }
            for event in &events {
                self.handle(event.data.u64());
            }
            let now = Instant::now();
            if self.next_reclaim.is_some_and(|next| now >= next) {
                self.next_reclaim = policy::tick(&self.shared);
            }
            if now < next_scan {
                continue;
            }
            // A scan that the CPU limit holds up puts the next one off; a worker that is stuck does
            // not.
            if self.shared.queue.is_idle() || !self.shared.pacer.is_busy(STUCK) {
                next_scan = (next_scan + period).max(now);
                self.period();
            } else {
                next_scan = now + (period / 64).min(LATER);
            }
        }
    }

    fn handle(&mut self, token: u64) {
        let number = token as u32;
        match token {
            LISTENER => self.accept(),
            WAKE => drop(rustix::io::read(&*self.wake, &mut [0u8; 8])),
            _ if token >> 32 == GREETING >> 32 => self.greet(number),
            _ if token >> 32 == CLIENT >> 32 => {
                self.serve(ClientId(number));
                self.shared.charge_agents();
            }
            _ => self.process_ended(ClientId(number)),
        }
    }

    fn watch(&self, fd: impl AsFd, token: u64) -> bool {
        let added = epoll::add(&self.epoll, &fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
        added.inspect_err(|e| tracing::warn!("cannot watch descriptor {}: {e}", fd.as_fd().as_raw_fd())).is_ok()
    }

    fn unwatch(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    fn period(&mut self) {
        let now = Instant::now();
        self.greetings.retain(|_, g| now.duration_since(g.since) < GREETING_TIME);
        let clients = self.shared.clients();
        self.shared.pacer.begin_scan();
        for client in &clients {
            self.shared.queue.ask(client, true);
        }
        let mut all_closed = Vec::new();
        for domain in self.shared.domains() {
            domain.tidy_replicas();
            let closed = domain.store.tidy(now);
            for &segment in &closed {
                clients.iter().filter(|c| Arc::ptr_eq(&c.domain, &domain)).for_each(|c| c.drop_segment(segment));
            }
            all_closed.extend(closed);
        }
        self.record_segments(&all_closed);
        if !clients.is_empty() {
            self.empty_since = now;
        }
        let idle = self.shared.config.exit_when_idle;
        if idle > 0.0 && now.duration_since(self.empty_since).as_secs_f64() >= idle {
            tracing::info!("no client for {idle} s; the daemon ends");
            self.shared.stop();
        }
    }

    /// Keeps the list of segments that a later daemon may take back.
    fn record_segments(&self, closed: &[SegmentId]) {
        let mut all = BTreeMap::new();
        for domain in self.shared.domains() {
            for segment in domain.store.segment_ids() {
                all.insert(segment, domain.key.to_string());
            }
        }
        if let Err(e) = self.shared.state_file.lock().record(all, closed) {
            tracing::warn!("cannot write the state file; a restarted daemon could not take this store back: {e}");
        }
    }

    fn serve(&mut self, number: ClientId) {
        let Some(client) = self.shared.client(number) else { return };
        for _ in 0..FAIR_SHARE {
            let mut fds = Vec::new();
            let result = match client.conn.recv(&mut self.packet, &mut fds) {
                Ok(None) => return,
                Ok(Some(0)) => Err(String::new()),
                Ok(Some(len)) => match wire::decode_to_daemon(&self.packet[..len]) {
                    Ok(message) => client.apply(message, fds).map_err(|e| e.to_string()),
                    Err(e) => Err(e.to_string()),
                },
                // The agent closed with messages of ours unread; its own last words are still in
                // the queue behind this.
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => continue,
                Err(e) => Err(e.to_string()),
            };
            match result {
                Ok(next) => self.follow(&client, next),
                Err(why) => return self.disconnect(&client, &why),
            }
        }
    }

    /// Does what a client's message led to.
    fn follow(&mut self, client: &Arc<Client>, next: Next) {
        match next {
            Next::Nothing => {}
            Next::Pass => self.shared.queue.ask(client, false),
            Next::Reclaim => self.next_reclaim = Some(Instant::now()),
            Next::FindRam(socket) => {
                ram::locate(&self.shared, client, socket);
                self.next_reclaim = Some(Instant::now());
            }
        }
    }

    /// A connection has ended, or has to. `why`: what was wrong with it, if anything was.
    fn disconnect(&mut self, client: &Arc<Client>, why: &str) {
        self.unwatch(client.conn.as_fd());
        if !why.is_empty() {
            tracing::warn!(pid = client.pid, "connection closed: {why}");
            let _ = rustix::net::shutdown(client.conn.as_fd(), rustix::net::Shutdown::Both);
        }
        client.disconnect();
        let detached = client.state().link == Link::Detached;
        if detached || client.pidfd.has_exited() {
            tracing::info!(pid = client.pid, "client gone");
            self.bury(client.number);
        }
    }

    fn process_ended(&mut self, number: ClientId) {
        if let Some(client) = self.shared.client(number) {
            tracing::info!(pid = client.pid, name = client.name, "client ended");
            self.bury(number);
        }
    }

    fn bury_pid(&mut self, pid: i32) {
        let old: Vec<ClientId> = self.shared.clients().iter().filter(|c| c.pid == pid).map(|c| c.number).collect();
        old.into_iter().for_each(|number| self.bury(number));
    }

    fn bury(&mut self, number: ClientId) {
        let client = self.shared.remove_client(number);
        if let Some(client) = client {
            self.unwatch(client.conn.as_fd());
            self.unwatch(pidfd_of(&client));
            let (totals, recycled) = {
                let state = client.state();
                (state.totals, state.recycling.as_ref().map_or(0, |recycling| recycling.totals.pages))
            };
            self.shared.buried_recycled.fetch_add(recycled, Relaxed);
            self.shared.buried_cpu_ns.fetch_add(totals.agent_cpu_ns, Relaxed);
            self.shared.buried_merged.fetch_add(totals.merged + totals.zeroed, Relaxed);
            client.reap();
        }
    }
}

fn pidfd_of(client: &Client) -> &PidFd {
    &client.pidfd
}
