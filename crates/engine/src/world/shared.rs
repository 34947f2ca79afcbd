//! What all threads of the engine share.

use std::collections::{BTreeMap, HashMap};
use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::time::Instant;

use claims::Owner;
use control::Histogram;
use wire::SegmentId;

use crate::client::Client;
use crate::client::link::Tracking;
use crate::client::requests::Request;
use crate::config::{Changes, Config};
use crate::core::content::frame::Frame;
use crate::core::content::index::{ClientId, MAX_CLIENTS, Sighting};
use crate::core::merge::pass::Pace;
use crate::pace::Pacer;
use crate::store::domain::{Domain, DomainError, DomainKey};
use crate::sync::{Mutex, RwLock};
use crate::users::Users;
use crate::world::headroom::{Demand, Headroom, View};
use crate::world::queue::{Queue, TakesPasses};
use crate::world::stall::Stalls;
use crate::world::state_file::StateFile;

pub(crate) struct Shared {
    config: RwLock<Arc<Config>>,
    pub(crate) queue: Queue<Client>,
    pub(crate) pacer: Pacer,
    pub(crate) stalls: Stalls,
    pub(crate) started: Instant,
    clients: RwLock<Clients>,
    domains: Mutex<BTreeMap<DomainKey, Arc<Domain>>>,
    pub(crate) state_file: Mutex<StateFile>,
    pub(crate) users: Users,
    stop: AtomicBool,
    /// Processes that are frozen, each with the client that it was then; see `daemon::freeze`.
    pub(crate) frozen: Mutex<HashMap<i32, Arc<Client>>>,
    /// Searches for guests' RAM under way, by the user of the domain; see [`super::searches`].
    pub(crate) searches: Mutex<HashMap<Option<Owner>, u32>>,
    pub(crate) headroom: Headroom,
}

/// The clients and the sums of those gone, under one lock: a sum has each client once.
#[derive(Default)]
struct Clients {
    all: BTreeMap<ClientId, Arc<Client>>,
    gone: Sums,
}

/// What is summed over all clients that there have been.
#[derive(Clone, Copy, Default)]
pub(crate) struct Sums {
    /// CPU time of agents, in nanoseconds.
    pub(crate) cpu_ns: u64,
    pub(crate) merged: u64,
    pub(crate) recycled: u64,
    pub(crate) scans: u64,
    /// Pages that took memory of their own again.
    pub(crate) unmerged: u64,
    /// How long writers waited.
    pub(crate) stalls: Histogram,
}

impl Sums {
    fn of(client: &Client) -> Self {
        let state = client.state();
        let totals = &state.totals;
        Self {
            cpu_ns: state.flight.credit.charged_ns,
            merged: totals.merged + totals.zeroed,
            recycled: state.recycling.as_ref().map_or(0, |recycling| recycling.totals.pages),
            scans: totals.full_scans,
            unmerged: totals.unmerged,
            stalls: totals.stalls,
        }
    }
}

impl AddAssign<&Sums> for Sums {
    fn add_assign(&mut self, more: &Sums) {
        self.cpu_ns += more.cpu_ns;
        self.merged += more.merged;
        self.recycled += more.recycled;
        self.scans += more.scans;
        self.unmerged += more.unmerged;
        self.stalls += &more.stalls;
    }
}

impl TakesPasses for Client {
    fn passes(&self) -> &AtomicU32 {
        &self.passes
    }

    fn user(&self) -> Owner {
        self.user.owner
    }
}

impl Shared {
    pub(crate) fn new(config: Config, state_file: StateFile) -> Self {
        Self {
            pacer: Pacer::new(&config),
            users: Users::new(&config),
            config: RwLock::new(Arc::new(config)),
            queue: Queue::default(),
            stalls: Stalls::default(),
            started: Instant::now(),
            clients: RwLock::default(),
            domains: Mutex::default(),
            state_file: Mutex::new(state_file),
            stop: AtomicBool::new(false),
            frozen: Mutex::default(),
            searches: Mutex::default(),
            headroom: Headroom::default(),
        }
    }

    pub(crate) fn config(&self) -> Arc<Config> {
        self.config.read().clone()
    }

    /// Puts other settings in effect, but for those that need a restart.
    pub(crate) fn reconfigure(&self, mut config: Config) -> Changes {
        let (config, changes) = {
            let mut running = self.config.write();
            let changes = config.keep_fixed(&running);
            *running = Arc::new(config);
            (running.clone(), changes)
        };
        self.pacer.set(&config);
        self.users.set(&config);
        // A domain is made under this lock: with these settings, or it is here.
        self.domains.lock().values().for_each(|domain| domain.set(&config));
        changes
    }

    /// Ends every thread.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.queue.close();
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// The pace of a user's work.
    pub(crate) fn pace(&self, user: Owner) -> Pace<'_> {
        Pace { pacer: &self.pacer, user, stop: &self.stop }
    }

    pub(crate) fn client(&self, number: ClientId) -> Option<Arc<Client>> {
        self.clients.read().all.get(&number).cloned()
    }

    /// A client that has this number now; while it reconnects there may be two. One whose process
    /// has ended may be kept, since its memory lives, and another process have its number.
    pub(crate) fn client_of(&self, pid: i32) -> Option<Arc<Client>> {
        let clients = self.clients.read();
        clients.all.values().find(|client| client.pid == pid && !client.pidfd.has_exited()).cloned()
    }

    pub(crate) fn clients(&self) -> Vec<Arc<Client>> {
        self.clients.read().all.values().cloned().collect()
    }

    /// The clients, and the sums of those that are gone.
    pub(crate) fn clients_and_gone(&self) -> (Vec<Arc<Client>>, Sums) {
        let clients = self.clients.read();
        (clients.all.values().cloned().collect(), clients.gone)
    }

    /// Charges the pacer with agents' work, at most once in [`crate::pace::CHARGE_EVERY`], with
    /// many clients less often.
    pub(crate) fn charge_agents(&self) {
        if !self.pacer.is_charge_due() {
            return;
        }
        let clients = self.clients.read();
        self.pacer.put_off_charging(clients.all.len());
        let (mut cpu, mut in_hand) = (clients.gone.cpu_ns, 0u32);
        for client in clients.all.values() {
            let (agent, pages) = client.load();
            cpu = cpu.saturating_add(agent);
            in_hand = in_hand.saturating_add(pages);
        }
        drop(clients);
        self.pacer.charge_agents(cpu, in_hand);
    }

    /// Requests that the page of a sighting be merged with a frame of its content, which counts the
    /// page as a user already. `false`: its client is gone.
    pub(crate) fn request_merge(&self, domain: &Arc<Domain>, there: Sighting, handle: u32, frame: Frame) -> bool {
        let request = Request { region: there.region, page: there.page, handle, frame };
        let client = self.client(there.client).filter(|client| Arc::ptr_eq(&client.domain, domain));
        let taken = client.is_some_and(|client| client.requests.add(request).is_ok());
        if !taken {
            domain.release(frame);
        }
        taken
    }

    /// Adds a client, which may be the new connection of a frozen process. Another process may have
    /// got the number of a frozen one that has ended; it is not frozen.
    pub(crate) fn add_client(&self, client: &Arc<Client>) {
        let frozen = self.frozen.lock();
        if frozen.get(&client.pid).is_some_and(|frozen| !frozen.pidfd.has_exited()) {
            client.state().tracking = Tracking::Frozen;
        }
        self.clients.write().all.insert(client.number, client.clone());
    }

    /// Takes a client out, and keeps its sums.
    pub(crate) fn remove_client(&self, number: ClientId) -> Option<Arc<Client>> {
        // Not under the lock: threads that hold a client's state look other clients up.
        let sums = Sums::of(&*self.client(number)?);
        let mut clients = self.clients.write();
        let client = clients.all.remove(&number)?;
        clients.gone += &sums;
        client.user.unmerged.fetch_add(sums.unmerged, Relaxed);
        Some(client)
    }

    /// The first number behind `last` that no client has.
    pub(crate) fn free_number(&self, last: ClientId) -> Option<ClientId> {
        let clients = self.clients.read();
        (1..=MAX_CLIENTS).map(|i| ClientId((last.0 + i) % MAX_CLIENTS)).find(|number| !clients.all.contains_key(number))
    }

    /// Whether the host could give back what merging has saved. Looks again at most once a second.
    pub(crate) fn headroom(&self) -> Arc<View> {
        self.headroom.look(Instant::now(), &self.config(), || (self.demand(), available()))
    }

    fn demand(&self) -> Demand {
        let (clients, gone) = self.clients_and_gone();
        let below = self.headroom.below.lock().clone();
        let (mut parts, mut bytes) = (below.parts, 0);
        for user in self.users.all() {
            parts.entry(Some(user.owner)).or_default().unmerged_pages += user.unmerged.load(Relaxed);
        }
        let mut unmerged = gone.unmerged;
        for client in clients {
            let state = client.state();
            let part = parts.entry(Some(client.user.owner)).or_default();
            part.unmerged_pages += state.totals.unmerged;
            unmerged += state.totals.unmerged;
            let counts = state.regions.values().map(|region| region.counts());
            let pages = counts.map(|counts| counts.merged + counts.zero + counts.recycled).sum::<u64>();
            part.unmerge_bytes += pages * kmem::PAGE_SIZE as u64;
            bytes += pages * kmem::PAGE_SIZE as u64;
        }
        let frames: u64 = self.domains().iter().map(|domain| domain.store.usage().frames).sum();
        Demand {
            unmerge_bytes: bytes.saturating_sub(frames * kmem::PAGE_SIZE as u64) + below.all.unmerge_bytes,
            unmerged_pages: unmerged + below.all.unmerged_pages,
            parts,
        }
    }

    /// Every number is this client's.
    #[cfg(test)]
    pub(crate) fn fill(&self, client: &Arc<Client>) {
        self.clients.write().all.extend((0..MAX_CLIENTS).map(|number| (ClientId(number), client.clone())));
    }

    pub(crate) fn domains(&self) -> Vec<Arc<Domain>> {
        self.domains.lock().values().cloned().collect()
    }

    /// The domain of this name, made if it is missing.
    /// `Err`: [`DomainError::TooMany`]: its user has as many as it may have.
    pub(crate) fn domain(&self, key: DomainKey) -> Result<Arc<Domain>, DomainError> {
        let mut domains = self.domains.lock();
        if let Some(known) = domains.get(&key) {
            return Ok(known.clone());
        }
        let most = self.config().user_domains;
        let counts = |other: &&DomainKey| other.can_be_multiplied() && other.group() == key.group();
        if let (Some(user), _) = key.group()
            && key.can_be_multiplied()
            && domains.keys().filter(counts).count() >= most
        {
            return Err(DomainError::TooMany { user, most });
        }
        let domain = Arc::new(Domain::new(key.clone(), &self.config()));
        domains.insert(key, domain.clone());
        Ok(domain)
    }

    /// Writes down segments of a domain before an agent gets one: a daemon that follows a killed
    /// one takes back no others.
    pub(crate) fn note_segments(&self, domain: &Domain, segments: &[SegmentId]) {
        // Others hold this lock while they take a user's segments back.
        if segments.is_empty() {
            return;
        }
        let mut file = self.state_file.lock();
        if !segments.iter().all(|&segment| file.has(segment)) {
            let of = domain.key.to_string();
            file.record(segments.iter().map(|&segment| (segment, of.clone())).collect(), &[]);
        }
    }

    /// Forgets domains that have no client and no segment.
    pub(crate) fn tidy_domains(&self) {
        self.domains.lock().retain(|_, domain| Arc::strong_count(domain) > 1 || !domain.store.segment_ids().is_empty());
    }
}

/// Bytes of memory that are available, with free swap space.
fn available() -> Option<u64> {
    let memory = kmem::procfs::meminfo().ok()?;
    Some((memory.available_kib + memory.swap_free_kib) << 10)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::client::scanning::tests::client;
    use crate::tenants::Tenant;

    /// What all threads share, with the default settings.
    pub(crate) fn shared() -> Shared {
        Shared::new(Config::default(), StateFile::load(&std::env::temp_dir()).unwrap())
    }

    #[test]
    fn a_sum_over_all_clients_never_goes_back_when_one_of_them_goes() {
        let shared = shared();
        let (client, _agent) = client();
        client.state().totals.full_scans = 1;
        let (client, ends) = (Arc::new(client), AtomicBool::new(false));
        let sum = || {
            let (clients, gone) = shared.clients_and_gone();
            clients.iter().map(|client| client.state().totals.full_scans).sum::<u64>() + gone.scans
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..200_000 {
                    shared.add_client(&client);
                    assert!(shared.remove_client(client.number).is_some());
                }
                ends.store(true, SeqCst);
            });
            let mut last = 0;
            while !ends.load(SeqCst) {
                let now = sum();
                assert!(now >= last, "{now} after {last}");
                last = now;
            }
        });
        assert_eq!(sum(), 200_000);
    }

    #[test]
    fn a_user_makes_64_domains_at_most_and_empty_ones_are_forgotten() {
        let shared = shared();
        let most = Config::default().user_domains;
        let key = |name: usize, uid| DomainKey::named(uid, &name.to_string());
        let mut held: Vec<_> = (0..most).map(|n| shared.domain(key(n, Some(7))).unwrap()).collect();
        let over = shared.domain(key(most, Some(7))).err().unwrap();
        assert!(over.to_string().contains("uid 7") && over.to_string().contains("user_domains"), "{over}");
        assert!(shared.domain(key(0, Some(7))).is_ok(), "one that it has");
        assert!(shared.domain(key(0, Some(8))).is_ok() && shared.domain(key(99, None)).is_ok(), "others' do not count");
        let of = |source, value: &str| DomainKey::of_tenant(7, Tenant { source, value: value.into() });
        assert!(shared.domain(of("container", "1")).is_err() && shared.domain(of("process", "1")).is_err());
        for guest in 0..200 {
            held.push(shared.domain(of("guest", &guest.to_string())).unwrap());
        }
        held.truncate(1);
        shared.tidy_domains();
        assert_eq!(shared.domains().len(), 1, "only one has a client");
        assert!(shared.domain(key(most, Some(7))).is_ok());
    }
}
