//! How a client introduces itself: a connection, what it says of its process and its regions, and
//! the client that comes of it.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kmem::memfd::{self, SharedMap};
use kmem::pagemap::Pagemap;
use kmem::seqpacket::{Conn, Peer};
use wire::{RegionId, SegmentId, ToAgent, ToDaemon};

use super::{CLIENT, FAIR_SHARE, GREETING, PROCESS, Service, pidfd_of};
use crate::client::{Client, Identity, add_region};
use crate::content::domain::{Domain, DomainKey};
use crate::content::index::MAX_CLIENTS;
use crate::daemon::adopt;

/// Most connections that have not introduced themselves yet.
const MAX_GREETINGS: usize = 256;
/// How long a connection may take to introduce itself.
pub(super) const GREETING_TIME: Duration = Duration::from_secs(10);

/// A connection that has not finished its introduction.
pub(super) struct Greeting {
    conn: Conn,
    peer: Peer,
    pub(super) since: Instant,
    hello: Option<(Option<String>, String, u64)>,
    regions: BTreeMap<RegionId, crate::ledger::Region>,
    held: Vec<(SegmentId, OwnedFd)>,
}

impl Service {
    pub(super) fn accept(&mut self) {
        while let Ok(Some(conn)) = self.listener.accept() {
            let Ok(peer) = conn.peer() else { continue };
            if self.greetings.len() >= MAX_GREETINGS {
                tracing::warn!("over {MAX_GREETINGS} connections wait to introduce themselves; one more is refused");
                continue;
            }
            self.next_greeting = self.next_greeting.wrapping_add(1);
            if self.watch(conn.as_fd(), GREETING | u64::from(self.next_greeting)) {
                let greeting = Greeting {
                    conn,
                    peer,
                    since: Instant::now(),
                    hello: None,
                    regions: BTreeMap::new(),
                    held: Vec::new(),
                };
                self.greetings.insert(self.next_greeting, greeting);
            }
        }
    }

    pub(super) fn greet(&mut self, number: u32) {
        let Some(greeting) = self.greetings.get_mut(&number) else { return };
        for _ in 0..FAIR_SHARE {
            let mut fds = Vec::new();
            let step = match greeting.conn.recv(&mut self.packet, &mut fds) {
                Ok(None) => return,
                Ok(Some(0)) => Err(String::new()),
                Ok(Some(len)) => match wire::decode_to_daemon(&self.packet[..len]) {
                    Ok(message) => introduce(greeting, message, fds),
                    Err(e) => Err(e.to_string()),
                },
                Err(e) => Err(e.to_string()),
            };
            match step {
                Ok(false) => {}
                Ok(true) => {
                    if let Some(greeting) = self.greetings.remove(&number) {
                        self.unwatch(greeting.conn.as_fd());
                        self.welcome(greeting);
                    }
                    return;
                }
                Err(why) => {
                    if !why.is_empty() {
                        tracing::warn!(pid = greeting.peer.pid, "connection closed: {why}");
                    }
                    self.greetings.remove(&number);
                    return;
                }
            }
        }
    }

    /// An agent has introduced itself: makes it a client, with whatever it had merged before.
    fn welcome(&mut self, greeting: Greeting) {
        let pid = greeting.peer.pid;
        let refuse = |conn: &Conn, reason: String| {
            tracing::warn!(pid, "refused: {reason}");
            let _ = conn.send(&wire::encode(&ToAgent::Refused { reason }), &[]);
        };
        let Some((domain, name, forks)) = greeting.hello else { return };
        let key = match DomainKey::of(&self.shared.config, greeting.peer.uid, domain.as_deref()) {
            Ok(key) => key,
            Err(why) => return refuse(&greeting.conn, why),
        };
        let (pidfd, pagemap) = match (greeting.conn.peer_pidfd(), Pagemap::open(pid)) {
            (Ok(pidfd), Ok(pagemap)) => (pidfd, pagemap),
            (Err(e), _) => return refuse(&greeting.conn, format!("its process can't be watched: {e}")),
            (_, Err(e)) => {
                return refuse(
                    &greeting.conn,
                    format!("/proc/{pid}/pagemap can't be opened: {e}; run the daemon as root or as the same user"),
                );
            }
        };
        let control = match send_control_page(&greeting.conn) {
            Ok(control) => control,
            Err(e) => return refuse(&greeting.conn, format!("no control page: {e}")),
        };
        let Some(number) = self.shared.free_number(self.last_client) else {
            return refuse(&greeting.conn, format!("there are {MAX_CLIENTS} clients"));
        };
        self.last_client = number;
        let domain = self.shared.domain(key);
        let held = self.adopt_segments(&domain, pid, greeting.held);
        let identity = Identity {
            number,
            pid,
            uid: greeting.peer.uid,
            name,
            domain,
            conn: greeting.conn,
            pidfd,
            control,
            forks_before: forks,
            pagemap,
            huge_pages: self.shared.config.huge_pages,
            huge_page_share: self.shared.config.huge_page_share,
            reclaim_period: self.shared.config.reclaim_period,
        };
        let client = Arc::new(Client::new(identity, held));
        client.state().regions = greeting.regions;
        if let Err(e) = adopt::rebuild(&self.shared, &client) {
            tracing::warn!(pid, "its mappings can't be read; what it had merged stays merged and is not counted: {e}");
        }
        // Only now: the new ledger holds its own references.
        self.bury_pid(pid);
        tracing::info!(pid, name = client.name, domain = %client.domain.key, "client");
        let watched = self.watch(client.conn.as_fd(), CLIENT | u64::from(number.0))
            && self.watch(pidfd_of(&client), PROCESS | u64::from(number.0));
        self.shared.add_client(&client);
        if !watched {
            return self.bury(number);
        }
        self.record_segments(&[]);
        self.empty_since = Instant::now();
        self.shared.queue.ask(&client, true);
        // Messages may have come while nobody watched.
        self.serve(number);
    }

    fn adopt_segments(&self, domain: &Domain, pid: i32, held: Vec<(SegmentId, OwnedFd)>) -> HashSet<SegmentId> {
        let state_file = self.shared.state_file.lock();
        let mut known = HashSet::new();
        for (segment, fd) in held {
            let genuine = memfd::identity(fd.as_fd()).is_ok_and(|id| id.ino == segment)
                && memfd::require_seals(fd.as_fd()).is_ok()
                && state_file.knows(segment, &domain.key.to_string());
            if domain.store.find(segment).is_some() {
                known.insert(segment);
            } else if !genuine {
                tracing::warn!(
                    pid,
                    segment,
                    "it holds a segment that no earlier daemon of this directory made for its domain; not taken"
                );
            } else {
                match domain.store.adopt(segment, fd) {
                    Ok(()) => drop(known.insert(segment)),
                    Err(e) => tracing::warn!(pid, segment, "cannot take a segment back: {e}"),
                }
            }
        }
        known
    }
}

/// Welcomes a client with its control page. The page can't shrink, so that reading it is safe
/// whatever the client does.
fn send_control_page(conn: &Conn) -> std::io::Result<SharedMap> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("pageone:control", flags)?;
    rustix::fs::ftruncate(&fd, wire::control::LEN as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let map = memfd::map_shared(&fd, wire::control::LEN).map_err(std::io::Error::other)?;
    conn.send(&wire::encode(&ToAgent::Welcome { version: wire::VERSION }), &[fd.as_fd()])?;
    Ok(map)
}

/// One message of an introduction. `Ok(true)`: it is complete.
fn introduce(greeting: &mut Greeting, message: ToDaemon, mut fds: Vec<OwnedFd>) -> Result<bool, String> {
    match message {
        ToDaemon::Hello { version, .. } if version != wire::VERSION => {
            let reason = format!(
                "the agent speaks protocol {version}, this daemon {}; restart the program with this version's `pageone run`",
                wire::VERSION
            );
            let _ = greeting.conn.send(&wire::encode(&ToAgent::Refused { reason: reason.clone() }), &[]);
            return Err(reason);
        }
        ToDaemon::Hello { domain, name, forks, .. } => {
            greeting.hello = Some((domain, name.chars().take(64).collect(), forks))
        }
        _ if greeting.hello.is_none() => return Err("it spoke before it said hello".into()),
        ToDaemon::RegionAdded { region, start, len } => {
            add_region(&mut greeting.regions, region, start, len).map_err(|e| e.to_string())?
        }
        ToDaemon::SegmentHeld { segment } => match fds.pop() {
            Some(fd) if greeting.held.len() < 4096 => greeting.held.push((segment, fd)),
            Some(_) => return Err("it holds more segments than a store has".into()),
            None => return Err("a segment came without its descriptor".into()),
        },
        // The ledger is rebuilt from the mappings themselves, which are already as these messages say.
        ToDaemon::RegionShrunk { .. } | ToDaemon::Discarded { .. } | ToDaemon::Report(_) | ToDaemon::Digests(_) => {}
        ToDaemon::Recycled(_) | ToDaemon::Swept(_) => {}
        ToDaemon::Pool(_) => return Err("it spoke of a pool before it was ready".into()),
        ToDaemon::Detached => return Err(String::new()),
        ToDaemon::Ready => return Ok(true),
    }
    Ok(false)
}
