//! The event loop: sockets, clients that come and go, periods.
//!
//! One thread waits for new connections, messages, and the ends of processes. It applies what
//! agents report to the ledgers and never waits for a client. Every merge period it requests a
//! scan of each client from the workers ([`periods`]). An idle daemon wakes once a period.
//!
//! *Rounds.* Each user's connections have [`ROUND`](crate::config::bounds::ROUND) of the thread's
//! time in a round; further messages wait, and large ones are applied in slices. So one user's
//! messages delay others by little. Clients that are gone are reaped by a thread of its own.

mod handshake;
mod periods;
mod proof;
mod rounds;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use claims::Owner;
use kmem::seqpacket::{Conn, Listener};
use rustix::event::epoll;
use rustix::io::Errno;
use wire::{SegmentId, ToDaemon};

use self::handshake::{Admissions, Handshake, HandshakeError};
use self::periods::{Periods, Scans};
use self::rounds::Ready;
use crate::backend::agent::{ram, sweeps};
use crate::backend::module::{self, Files};
use crate::client::link::Link;
use crate::client::{Client, Next, ProtocolError};
use crate::config::bounds::CLOSING_OF_USER;
use crate::core::content::index::ClientId;
use crate::daemon::place::Place;
use crate::users::{Received, User, log_of};
use crate::world::queue::Pass;
use crate::world::shared::Shared;

/// A user whose workers did nothing for so long is scanned again though the last is not over.
const STUCK: Duration = Duration::from_secs(2);

/// Events taken at a time: connections that are ready take turns in the kernel's list.
const EVENTS: usize = 256;
/// How long nothing is accepted after that has failed.
const REST: Duration = Duration::from_secs(1);

/// What an epoll token stands for: kind in the upper half, number in the lower.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const NEWS: u64 = 2;
const HANDSHAKE: u64 = 1 << 32;
const CLIENT: u64 = 2 << 32;
const PROCESS: u64 = 3 << 32;

#[derive(Debug, thiserror::Error)]
enum Ended {
    /// By the agent; nobody is told.
    #[error("closed")]
    Closed,
    #[error(transparent)]
    Decode(#[from] wire::DecodeError),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error(
        "its user's clients sent {CLOSING_OF_USER} descriptors without a request, and closing these does not return; an agent sends none"
    )]
    Descriptors,
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Receives a message, and its descriptors, in this version; `None`: none has come yet.
fn receive(
    conn: &Conn,
    version: u16,
    packet: &mut [u8],
    user: &Arc<User>,
) -> Result<Option<(ToDaemon, Received)>, Ended> {
    let mut received = Received::of(user).ok_or(Ended::Descriptors)?;
    match conn.recv(packet, &mut received.fds)? {
        None => Ok(None),
        Some(0) => Err(Ended::Closed),
        Some(len) => Ok(Some((wire::decode_to_daemon(&packet[..len], version)?, received))),
    }
}

/// How agents reach the daemon.
struct Accepting {
    listener: Listener,
    /// Nothing is accepted until then.
    rests: Option<Instant>,
    /// Where another listener is made if somebody deletes this one's file.
    place: Option<Arc<Place>>,
}

pub(super) struct Service {
    shared: Arc<Shared>,
    files: Arc<Files>,
    epoll: OwnedFd,
    accepting: Accepting,
    wake: Arc<OwnedFd>,
    handshakes: HashMap<u32, Handshake>,
    next_handshake: u32,
    admissions: Admissions,
    /// Clients with a message that is applied in part.
    unfinished: BTreeSet<ClientId>,
    /// Takes clients that are gone.
    reaper: Sender<Arc<Client>>,
    packet: Vec<u8>,
    empty_since: Instant,
    /// When the pools are to be looked at.
    next_reclaim: Option<Instant>,
}

impl Service {
    /// Opens the event loop. `wake`: an eventfd that ends it. `news`: one by which mounts of
    /// `pageonefs` tell of news.
    /// `reaper`: takes clients that are gone.
    pub(super) fn new(
        shared: Arc<Shared>,
        files: Arc<Files>,
        listener: Listener,
        [wake, news]: [Arc<OwnedFd>; 2],
        reaper: Sender<Arc<Client>>,
    ) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (fd, token) in [(listener.as_fd(), LISTENER), (wake.as_fd(), WAKE), (news.as_fd(), NEWS)] {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            shared,
            files,
            epoll,
            accepting: Accepting { listener, rests: None, place: None },
            wake,
            handshakes: HashMap::new(),
            next_handshake: 0,
            admissions: Admissions::new(),
            unfinished: BTreeSet::new(),
            reaper,
            packet: vec![0; wire::MAX_MESSAGE],
            empty_since: Instant::now(),
            next_reclaim: None,
        })
    }

    /// If somebody deletes the listener's file, another listener is made in this place.
    pub(super) fn listens_in(&mut self, place: Arc<Place>) {
        self.accepting.place = Some(place);
    }

    pub(super) fn run(&mut self) {
        let mut periods = Periods::new(self.shared.config().period(), Instant::now());
        let mut events = Vec::with_capacity(EVENTS);
        while !self.shared.stopping() {
            periods.set(self.shared.config().period(), Instant::now());
            let scans = periods.wake(Instant::now());
            let next = [self.next_reclaim, self.next_expiry(), self.accepting.rests]
                .into_iter()
                .flatten()
                .fold(scans, Instant::min);
            let busy = !self.unfinished.is_empty();
            let wait = if busy { Duration::ZERO } else { next.saturating_duration_since(Instant::now()) };
            let timeout =
                rustix::event::Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => {
                    tracing::error!("cannot wait for events: {e}");
                    break;
                }
            }
            let mut ready = Ready::default();
            for event in &events {
                self.handle(event.data.u64(), &mut ready);
            }
            self.round(ready);
            self.expire_handshakes();
            let now = Instant::now();
            if self.accepting.rests.is_some_and(|until| now >= until) {
                self.watch_listener();
            }
            if self.next_reclaim.is_some_and(|next| now >= next) {
                self.next_reclaim = sweeps::tick(&self.shared);
            }
            if periods.begin(now, || self.users()) {
                self.period();
            }
            if let Some(scans) = periods.scans(|owner| self.has_passes(owner)) {
                self.scan(&scans);
            }
        }
    }

    /// The users that have something to scan.
    fn users(&self) -> BTreeSet<Owner> {
        let clients = self.shared.clients().into_iter().map(|client| client.user.owner);
        clients.chain(Files::has_mounts().then_some(module::USER)).collect()
    }

    /// Whether passes of a user's clients wait or are under way. A scan that the CPU limit holds up
    /// puts the user's next one off; a worker that is stuck does not.
    fn has_passes(&self, owner: Owner) -> bool {
        let files = owner == module::USER && self.files.is_busy();
        (files || self.shared.queue.is_busy(owner)) && self.shared.pacer.is_busy(owner, STUCK)
    }

    /// Requests scans of these users' clients.
    fn scan(&self, scans: &Scans) {
        self.shared.pacer.begin_scan(&scans.users, scans.round, |owner| self.shared.queue.is_busy(owner));
        for client in self.shared.clients().iter().filter(|client| scans.users.contains(&client.user.owner)) {
            self.shared.queue.ask(client, Pass::Scan);
        }
        if scans.users.contains(&module::USER) {
            self.files.ask();
        }
    }

    fn handle(&mut self, token: u64, ready: &mut Ready) {
        let number = token as u32;
        match token {
            LISTENER => self.apart(Self::accept),
            WAKE => {
                let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
                self.apart(Self::take_admitted);
            }
            NEWS => self.files.news(),
            _ if token >> 32 == HANDSHAKE >> 32 => ready.handshakes.push(number),
            _ if token >> 32 == CLIENT >> 32 => ready.clients.push(ClientId(number)),
            _ => self.process_ended(ClientId(number)),
        }
    }

    /// Does what strangers may cause: merging does not wait for it.
    fn apart<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let shared = self.shared.clone();
        shared.pacer.apart(|| act(self))
    }

    fn watch(&self, fd: impl AsFd, token: u64) -> bool {
        let added = epoll::add(&self.epoll, &fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
        added.inspect_err(|e| tracing::warn!("cannot watch descriptor {}: {e}", fd.as_fd().as_raw_fd())).is_ok()
    }

    /// A connection cannot be accepted, for want of descriptors or memory. It waits: a socket that
    /// is watched would wake this thread again at once.
    fn rest(&mut self, why: &std::io::Error) {
        tracing::warn!("no connection can be accepted: {why}; tried again in {} s", REST.as_secs());
        self.unwatch(&self.accepting.listener);
        self.accepting.rests = Some(Instant::now() + REST);
    }

    /// Accepts from now on, or tries again after a rest.
    fn watch_listener(&mut self) {
        let is_watched = self.watch(&self.accepting.listener, LISTENER);
        self.accepting.rests = (!is_watched).then(|| Instant::now() + REST);
    }

    fn unwatch(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// A merge period begins: tidies stores.
    fn period(&mut self) {
        let now = Instant::now();
        if let Some(listener) = self.accepting.place.as_ref().and_then(|place| place.listen_again()) {
            self.unwatch(&self.accepting.listener);
            self.accepting.listener = listener;
            self.watch_listener();
        }
        self.reap_the_gone(&self.shared.clients());
        self.shared.users.tidy();
        let clients = self.shared.clients();
        clients.iter().for_each(|client| client.drop_others());
        let mut all_closed = Vec::new();
        for domain in self.shared.domains() {
            let closed = domain.tidy(now, self.shared.config().period());
            for &segment in &closed {
                clients.iter().filter(|c| Arc::ptr_eq(&c.domain, &domain)).for_each(|c| c.drop_segment(segment));
            }
            all_closed.extend(closed);
        }
        self.record_segments(&all_closed);
        self.shared.tidy_domains();
        // The log tells of it though nothing may be there to merge.
        self.shared.headroom();
        if !clients.is_empty() || !self.files.is_empty() {
            self.empty_since = now;
        }
        let idle = self.shared.config().exit_when_idle;
        if idle > 0.0 && now.duration_since(self.empty_since).as_secs_f64() >= idle {
            tracing::info!("no client for {idle} s; the daemon ends");
            self.shared.stop();
        }
    }

    /// Writes down the segments that a later daemon may take back.
    fn record_segments(&self, closed: &[SegmentId]) {
        let mut all = BTreeMap::new();
        for domain in self.shared.domains() {
            for segment in domain.store.segment_ids() {
                all.insert(segment, domain.key.to_string());
            }
        }
        self.shared.state_file.lock().record(all, closed);
    }

    /// Applies a client's next message, or another slice of the last. `false`: nothing is left.
    fn serve_one(&mut self, client: &Arc<Client>) -> bool {
        let step = if self.unfinished.remove(&client.number) {
            client.go_on().map_err(Ended::from)
        } else {
            match receive(&client.conn, client.version, &mut self.packet, &client.user) {
                Ok(None) => return false,
                Ok(Some((message, mut received))) => client.apply(message, &mut received.fds).map_err(Ended::from),
                // The agent closed with messages of ours unread; its own last words are still
                // queued behind this.
                Err(Ended::Io(e)) if e.kind() == std::io::ErrorKind::ConnectionReset => return true,
                Err(why) => Err(why),
            }
        };
        match step {
            Ok(next) => self.follow(client, next),
            Err(why) => {
                self.disconnect(client, &why);
                return false;
            }
        }
        true
    }

    fn follow(&mut self, client: &Arc<Client>, next: Next) {
        match next {
            Next::Nothing => {}
            Next::Rest => drop(self.unfinished.insert(client.number)),
            Next::Pass => self.shared.queue.ask(client, Pass::GoOn),
            Next::Reclaim => self.next_reclaim = Some(Instant::now()),
            Next::AskMonitor => {
                ram::ask(&self.shared, client);
                self.next_reclaim = Some(Instant::now());
            }
        }
    }

    fn disconnect(&mut self, client: &Arc<Client>, why: &Ended) {
        self.unwatch(client.conn.as_fd());
        if !matches!(why, Ended::Closed) {
            client.refuse(why);
        }
        client.disconnect();
        let detached = client.state().link == Link::Detached;
        if detached || client.memory.pagemap.is_gone() {
            log_of!(client.user, info, pid = client.pid, name = client.called(), "client gone");
            self.reap(client.number);
        }
    }

    /// A client's process has ended. Its memory may live: a process that is none of its threads may
    /// share it (`CLONE_VM`). Then its frames stay until that has ended, too.
    fn process_ended(&mut self, number: ClientId) {
        let Some(client) = self.shared.client(number) else { return };
        if client.memory.pagemap.is_gone() {
            log_of!(client.user, info, pid = client.pid, name = client.called(), "client ended");
            return self.reap(number);
        }
        self.unwatch(&client.pidfd);
        self.unwatch(client.conn.as_fd());
        client.disconnect();
        log_of!(
            client.user,
            info,
            pid = client.pid,
            name = client.called(),
            "client ended; its memory is still in use"
        );
    }

    /// Reaps clients without a connection whose memory is gone.
    fn reap_the_gone(&mut self, clients: &[Arc<Client>]) {
        for client in clients.iter().filter(|client| !client.state().link.is_up() && client.memory.pagemap.is_gone()) {
            log_of!(client.user, info, pid = client.pid, name = client.called(), "client gone");
            self.reap(client.number);
        }
    }

    /// A client is gone: its sums are kept, all else is given back.
    fn reap(&mut self, number: ClientId) {
        self.unfinished.remove(&number);
        let client = self.shared.remove_client(number);
        if let Some(client) = client {
            self.unwatch(client.conn.as_fd());
            self.unwatch(&client.pidfd);
            // Its ledgers may be large.
            let _ = self.reaper.send(client);
        }
    }
}
