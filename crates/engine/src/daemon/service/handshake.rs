//! The handshake: a connection, what an agent says of its process and its regions, and the client
//! that is made of them.

mod segments;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use claims::Owner;
use guests::Names;
use kmem::memfd::{self, SharedMap};
use kmem::peer::{self, Peer};
use kmem::seqpacket::Conn;
use wire::{RegionId, SegmentId, ToAgent, ToDaemon};

use self::segments::Held;
use super::proof::{self, Process, ProofError};
use super::{CLIENT, Ended, HANDSHAKE, PROCESS, Service, receive};
use crate::client::memory::Memory;
use crate::client::{Client, Identity, add_region};
use crate::config::bounds::{ACCEPTS, HANDSHAKE_TIME, HANDSHAKES};
use crate::core::content::index::{ClientId, MAX_CLIENTS};
use crate::core::ledger::Region;
use crate::core::ledger::written::HugePolicy;
use crate::daemon::adopt;
use crate::store::domain::{DomainError, DomainKey};
use crate::tenants::{self, Verdict};
use crate::users::{Claim, Connection, Kind, OverBound, User, log_of};
use crate::world::queue::Pass;
use crate::world::shared::Shared;

/// Most new clients of one user whose memory is being looked at; others wait for their turn.
const MAX_ADMISSIONS: usize = 16;

/// A connection that has not finished its introduction.
pub(super) struct Handshake {
    conn: Connection,
    peer: Peer,
    pub(super) user: Arc<User>,
    _claim: Claim,
    since: Instant,
    hello: Option<Hello>,
    regions: BTreeMap<RegionId, Region>,
    /// Segments of an earlier daemon that it has, and parts of a snapshot's RAM.
    segments: BTreeMap<SegmentId, Held>,
    /// The control page, once it was welcomed.
    control: Option<SharedMap>,
}

/// What an agent says of its process.
struct Hello {
    /// The version of the protocol that both sides speak.
    version: u16,
    domain: Option<String>,
    name: String,
    forks: u64,
}

/// A new client, which the service thread does not know yet.
struct Admitted {
    client: Arc<Client>,
    /// What its process was before.
    before: Vec<ClientId>,
}

/// New clients on their way.
pub(super) struct Admissions {
    /// The number that was given last.
    last: ClientId,
    done: (Sender<Admitted>, Receiver<Admitted>),
    by_user: HashMap<Owner, OfUser>,
}

/// New clients of a user.
#[derive(Default)]
struct OfUser {
    /// One more is counted than are on their way.
    under_way: Arc<()>,
    /// Those that wait for their turn, with the address of their control page.
    waiting: VecDeque<(Handshake, SharedMap, u64)>,
}

impl OfUser {
    /// Whether the memory of as many as may be is being looked at.
    fn is_busy(&self) -> bool {
        Arc::strong_count(&self.under_way) > MAX_ADMISSIONS
    }
}

impl Admissions {
    pub(super) fn new() -> Self {
        Self { last: ClientId(0), done: std::sync::mpsc::channel(), by_user: HashMap::new() }
    }
}

/// What follows from a message of an introduction.
enum Step {
    /// More messages.
    More,
    /// All was said: the control page is sent.
    Welcome,
    /// The agent maps the control page at this address.
    Mapped(SharedMap, u64),
}

/// An introduction that the protocol does not allow.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Version(#[from] wire::VersionError),
    #[error("it spoke before it said hello")]
    NoHello,
    #[error("it said hello twice")]
    HelloTwice,
    #[error(transparent)]
    OverBound(#[from] OverBound),
    #[error("it holds segment {0} twice")]
    SegmentTwice(SegmentId),
    #[error("a segment came without its descriptor")]
    SegmentWithoutDescriptor,
    #[error("it spoke of a control page that it was not sent, or not yet")]
    NotWelcomed,
    #[error("it said twice that it is ready")]
    ReadyTwice,
    #[error("it spoke of a pool before it was ready")]
    PoolTooEarly,
}

#[derive(Debug, thiserror::Error)]
enum AdmissionError {
    #[error(transparent)]
    Domain(#[from] DomainError),
    #[error("its process can't be watched: {0}")]
    Process(std::io::Error),
    #[error("its process has ended while its manager was looked up")]
    HasEnded,
    #[error(transparent)]
    Proof(#[from] ProofError),
    #[error("its control page cannot be sent: {0}")]
    ControlPage(std::io::Error),
    #[error(
        "the daemon cannot look at the memory of {MAX_ADMISSIONS} other new clients of this user: \
         end programs that map files which do not answer, and see that /etc/pve answers where there is one"
    )]
    Busy,
    #[error(
        "there are {MAX_CLIENTS} clients, and there can be no more: start further ones under a second daemon \
             with a directory of its own (--dir)"
    )]
    Full,
    #[error(transparent)]
    OverBound(#[from] OverBound),
}

impl Service {
    /// Accepts new connections. Each user has room for some of its own.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let conn = match self.accepting.listener.accept() {
                Ok(Some(conn)) => conn,
                Ok(None) => return,
                Err(e) => return self.rest(&e),
            };
            let Ok(peer) = Peer::of(&conn) else { continue };
            let user = self.shared.users.user(peer.uid);
            let conn = Connection::new(conn, user.clone());
            let claim = match user.claim(Kind::Handshakes, 1) {
                Ok(claim) => claim,
                Err(why) => {
                    user.refuse((peer.uid, peer.pid), "", &why.to_string());
                    continue;
                }
            };
            if self.handshakes.len() >= HANDSHAKES {
                self.drop_oldest_handshake();
            }
            self.next_handshake = self.next_handshake.wrapping_add(1);
            if self.watch(conn.as_fd(), HANDSHAKE | u64::from(self.next_handshake)) {
                let handshake = Handshake {
                    conn,
                    peer,
                    user,
                    _claim: claim,
                    since: Instant::now(),
                    hello: None,
                    regions: BTreeMap::new(),
                    segments: BTreeMap::new(),
                    control: None,
                };
                self.handshakes.insert(self.next_handshake, handshake);
            }
        }
    }

    /// Ends the oldest handshake of the user that has the most.
    fn drop_oldest_handshake(&mut self) {
        let most = |handshake: &Handshake| handshake.user.taken(Kind::Handshakes);
        let oldest = self.handshakes.iter().max_by_key(|(_, handshake)| (most(handshake), handshake.since.elapsed()));
        if let Some(number) = oldest.map(|(&number, _)| number) {
            self.end_handshake(number);
        }
    }

    /// A handshake is over. The connection is watched no longer: `epoll_wait(2)` holds what it
    /// watches for a moment (Linux 6.10), so that a close elsewhere might end here, and wait here.
    fn end_handshake(&mut self, number: u32) -> Option<Handshake> {
        let handshake = self.handshakes.remove(&number)?;
        self.unwatch(handshake.conn.as_fd());
        Some(handshake)
    }

    /// When the first handshake has taken too long.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let waiting = self.admissions.by_user.values().filter_map(|of_user| Some(&of_user.waiting.front()?.0));
        self.handshakes.values().chain(waiting).map(|handshake| handshake.since + HANDSHAKE_TIME).min()
    }

    /// Ends handshakes that have taken too long.
    pub(super) fn expire_handshakes(&mut self) {
        let is_late = |handshake: &Handshake| handshake.since.elapsed() >= HANDSHAKE_TIME;
        let late = self.handshakes.iter().filter(|(_, handshake)| is_late(handshake)).map(|(&number, _)| number);
        for number in late.collect::<Vec<_>>() {
            let Some(handshake) = self.end_handshake(number) else { continue };
            handshake.note_refusal(&format!("it has not introduced itself within {} s", HANDSHAKE_TIME.as_secs()));
        }
        for OfUser { waiting, .. } in self.admissions.by_user.values_mut() {
            while waiting.front().is_some_and(|(handshake, ..)| is_late(handshake))
                && let Some((handshake, ..)) = waiting.pop_front()
            {
                handshake.refuse(&AdmissionError::Busy);
            }
        }
    }

    /// Takes a message of an introduction. `false`: none has come, or the introduction is over.
    pub(super) fn shake_hands(&mut self, number: u32) -> bool {
        let Some(handshake) = self.handshakes.get_mut(&number) else { return false };
        let step = match receive(&handshake.conn, handshake.version(), &mut self.packet, &handshake.user) {
            Ok(None) => return false,
            Ok(Some((message, mut received))) => introduce(&self.shared, handshake, message, &mut received.fds),
            Err(why) => Err(why),
        };
        match step {
            Ok(Step::More) => return true,
            Ok(Step::Welcome) => match handshake.welcome(&self.shared) {
                Ok(()) => return true,
                Err(why) => {
                    handshake.refuse(&why);
                    self.end_handshake(number);
                }
            },
            Ok(Step::Mapped(control, address)) => {
                let Some(handshake) = self.end_handshake(number) else { return false };
                let of_user = self.admissions.by_user.entry(handshake.user.owner).or_default();
                of_user.waiting.push_back((handshake, control, address));
                self.admit_waiting();
            }
            Err(why) => {
                if !matches!(why, Ended::Closed) {
                    handshake.note_refusal(&format!("connection closed: {why}"));
                }
                self.end_handshake(number);
            }
        }
        false
    }

    /// Makes clients of agents that have introduced themselves, of each user some at a time.
    fn admit_waiting(&mut self) {
        let users: Vec<Owner> = self.admissions.by_user.keys().copied().collect();
        for owner in users {
            while let Some(of_user) = self.admissions.by_user.get_mut(&owner).filter(|of_user| !of_user.is_busy())
                && let Some(next) = of_user.waiting.pop_front()
            {
                let under_way = of_user.under_way.clone();
                self.admit(next, under_way);
            }
        }
        self.admissions
            .by_user
            .retain(|_, OfUser { under_way, waiting }| Arc::strong_count(under_way) > 1 || !waiting.is_empty());
    }

    /// Makes a client of an agent. Looking at its memory may take for ever, if the agent wants
    /// that: a thread of its own does it, and hands the client back.
    fn admit(&mut self, (handshake, control, address): (Handshake, SharedMap, u64), under_way: Arc<()>) {
        let Some(number) = self.shared.free_number(self.admissions.last) else {
            return handshake.refuse(&AdmissionError::Full);
        };
        self.admissions.last = number;
        let (shared, wake, done) = (self.shared.clone(), self.wake.clone(), self.admissions.done.0.clone());
        let body = move || {
            let admitted = Admitted::prepare(&shared, number, handshake, control, address);
            drop(under_way);
            if let Some(admitted) = admitted {
                let _ = done.send(admitted);
            }
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        };
        if let Err(e) = std::thread::Builder::new().name("admit".into()).spawn(body) {
            tracing::warn!("cannot start a thread for a new client, which will try again: {e}");
        }
    }

    pub(super) fn take_admitted(&mut self) {
        self.admit_waiting();
        while let Ok(Admitted { client, before }) = self.admissions.done.1.try_recv() {
            let number = client.number;
            // Only now: the new ledger counts the frames that it maps.
            before.into_iter().for_each(|number| self.reap(number));
            log_of!(client.user, info, pid = client.pid, name = client.called(), domain = %client.domain.key, "client");
            let watched = self.watch(client.conn.as_fd(), CLIENT | u64::from(number.0))
                && self.watch(&client.pidfd, PROCESS | u64::from(number.0));
            self.shared.add_client(&client);
            if !watched {
                self.reap(number);
                continue;
            }
            self.record_segments(&[]);
            self.empty_since = Instant::now();
            self.shared.queue.ask(&client, Pass::Scan);
            // Messages may have come before the connection was watched: it is ready then.
        }
    }
}

impl Admitted {
    /// Checks that a process can be a client, and whose memory it is. Makes it a client, with what
    /// it had merged before. `None`: the agent was told why not.
    fn prepare(
        shared: &Shared,
        number: ClientId,
        handshake: Handshake,
        control: SharedMap,
        address: u64,
    ) -> Option<Self> {
        let Peer { pid, uid, .. } = handshake.peer;
        if shared.client_of(pid).is_some_and(|before| !before.wait_to_return()) {
            return None;
        }
        let checked = || -> Result<_, AdmissionError> {
            let claim = handshake.user.claim(Kind::Clients, 1)?;
            let pidfd = peer::pidfd(handshake.conn.as_fd()).map_err(AdmissionError::Process)?;
            let verdict = tenants::verdict(&shared.config().tenants, pid);
            let own = Names::of(Path::new("/"), pid);
            let process = Process::open(pid, uid, &control, address)?;
            // The process lived all the time, so no other had its number; and it ran no other
            // program, since it still shows the control page.
            if pidfd.has_exited() {
                return Err(AdmissionError::HasEnded);
            }
            let key = handshake.domain(shared, &verdict)?;
            Ok((shared.domain(key)?, verdict, own, claim, pidfd, process))
        };
        let (domain, verdict, own, claim, pidfd, process) =
            shared.pacer.apart(checked).inspect_err(|why| handshake.refuse(why)).ok()?;
        let Process { memory, pagemap, maps } = process;
        handshake.user.accepted(pid);
        let hello = handshake.hello?;
        // Kept until the users of their frames are counted: the service thread closes unused ones.
        let held = shared.pacer.apart(|| segments::adopt(shared, &domain, &handshake.user, pid, handshake.segments));
        let segments = held.own.iter().map(|segment| segment.id).collect();
        let config = shared.config();
        let identity = Identity {
            number,
            pid,
            uid,
            user: handshake.user,
            name: hello.name,
            own,
            version: hello.version,
            domain,
            verdict,
            conn: handshake.conn.claimed(claim),
            pidfd,
            forks_before: hello.forks,
            memory: Memory::new(pid, memory, pagemap, control, address),
            huge_pages: HugePolicy { pages: config.huge_pages, share: config.huge_page_share },
            reclaim_period: config.reclaim_period,
        };
        let client = Arc::new(Client::new(identity, segments));
        client.state().regions = handshake.regions;
        let status = kmem::procfs::status(Some(pid));
        client.state().totals.peak = status.map_or(0, |status| status.vm_hwm_kib / (kmem::PAGE_SIZE as u64 >> 10));
        client.state().flight.others = held.others;
        if let Err(e) = adopt::rebuild(shared, &client, maps) {
            let why = "its mappings can't be read; what it had merged stays merged and is not counted";
            log_of!(client.user, warn, pid, "{why}: {e}");
        }
        drop(held.own);
        client.drop_others();
        client.took(kmem::cpu::thread_time());
        Some(Self { before: superseded(shared, &client, address), client })
    }
}

/// What the process of a new client, which maps its control page at `address`, was before: not an
/// address space that another process still uses.
fn superseded(shared: &Shared, client: &Client, address: u64) -> Vec<ClientId> {
    let is_before = |old: &&Arc<Client>| {
        old.pid == client.pid
            && (proof::shows(&old.memory.space, &client.memory.control, address) || old.memory.pagemap.is_gone())
    };
    shared.clients().iter().filter(is_before).map(|old| old.number).collect()
}

impl Handshake {
    fn name(&self) -> &str {
        self.hello.as_ref().map_or("", |hello| &hello.name)
    }

    /// The version of the protocol that both sides speak.
    fn version(&self) -> u16 {
        self.hello.as_ref().map_or(wire::OLDEST, |hello| hello.version)
    }

    /// Its domain: the part of its tenant's, or of its user's, that it asks for.
    fn domain(&self, shared: &Shared, verdict: &Verdict) -> Result<DomainKey, DomainError> {
        let asked = self.hello.as_ref().and_then(|hello| hello.domain.as_deref());
        DomainKey::of(&shared.config(), self.peer.uid, verdict.tenant.clone(), asked)
    }

    fn note_refusal(&self, why: &str) {
        self.user.refuse((self.peer.uid, self.peer.pid), self.name(), why);
    }

    /// Tells the agent that it is no client, and why.
    fn refuse(&self, why: &AdmissionError) {
        self.note_refusal(&why.to_string());
        let refused = ToAgent::Refused { reason: why.to_string() };
        let _ = self.conn.send(&wire::encode(&refused), &[]);
    }

    /// Welcomes an agent with its control page.
    fn welcome(&mut self, shared: &Shared) -> Result<(), AdmissionError> {
        let page = send_control_page(&self.conn, self.version(), shared.config().direct_io_seconds);
        self.control = Some(page.map_err(AdmissionError::ControlPage)?);
        Ok(())
    }
}

/// Sends a control page that cannot shrink, so that reading it is safe.
fn send_control_page(conn: &Conn, version: u16, direct_io: f64) -> std::io::Result<SharedMap> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("pageone:control", flags)?;
    rustix::fs::ftruncate(&fd, wire::control::LEN as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let map = memfd::map_shared(&fd, wire::control::LEN)?;
    let direct_io_ms = (direct_io * 1000.0).ceil() as u32;
    conn.send(&wire::encode(&ToAgent::Welcome { version, direct_io_ms }), &[fd.as_fd()])?;
    Ok(map)
}

/// Applies one message of an introduction.
fn introduce(
    shared: &Shared,
    handshake: &mut Handshake,
    message: ToDaemon,
    fds: &mut Vec<OwnedFd>,
) -> Result<Step, Ended> {
    match message {
        ToDaemon::Hello { .. } if handshake.hello.is_some() => return Err(HandshakeError::HelloTwice.into()),
        ToDaemon::Hello { version, domain, name, forks } => {
            let version = wire::agreed(version).map_err(|why| {
                let _ = handshake.conn.send(&wire::encode(&ToAgent::Refused { reason: why.to_string() }), &[]);
                HandshakeError::from(why)
            })?;
            handshake.hello = Some(Hello { version, domain, name: name.chars().take(64).collect(), forks });
        }
        _ if handshake.hello.is_none() => return Err(HandshakeError::NoHello.into()),
        ToDaemon::RegionAdded { region, start, len } => {
            add_region(&handshake.user, &mut handshake.regions, region, start, len)?;
        }
        ToDaemon::SegmentHeld { .. } if fds.is_empty() => return Err(HandshakeError::SegmentWithoutDescriptor.into()),
        ToDaemon::SegmentHeld { segment } => segments::hold(shared, handshake, segment, fds)?,
        // The ledger is rebuilt from the mappings themselves, which are already as these messages
        // say.
        ToDaemon::RegionShrunk { .. } | ToDaemon::Discarded { .. } | ToDaemon::Report(_) | ToDaemon::Digests(_) => {}
        ToDaemon::Retained { .. } | ToDaemon::Detaching(_) | ToDaemon::DetachFailed { .. } => {}
        ToDaemon::Recycled(_) | ToDaemon::Swept(_) | ToDaemon::SegmentLeftOut { .. } => {}
        ToDaemon::Library { .. } | ToDaemon::CpuTime { .. } | ToDaemon::Zeros(_) => {}
        ToDaemon::Pool(_) | ToDaemon::PoolRenewed { .. } => return Err(HandshakeError::PoolTooEarly.into()),
        ToDaemon::Detached => return Err(Ended::Closed),
        ToDaemon::Ready if handshake.control.is_some() => return Err(HandshakeError::ReadyTwice.into()),
        ToDaemon::Ready => return Ok(Step::Welcome),
        ToDaemon::Mapped { address } => {
            let control = handshake.control.take().ok_or(HandshakeError::NotWelcomed)?;
            return Ok(Step::Mapped(control, address));
        }
    }
    Ok(Step::More)
}

#[cfg(test)]
mod tests;
