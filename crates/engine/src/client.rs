//! A client as the daemon knows it: its regions' ledgers, the batches under way, and what its agent
//! reports.
//!
//! ```text
//!   apply ──▶ settle     reports on batches ──▶ ledgers, flight, budget, refusals
//!     │  └──▶ recycling  pools, recycled pages, sweeps
//!     └─────▶ digests    answers for the pass that waits for them
//!   send  ──▶ agent      batches ──▶ ledgers, flight, changes
//! ```

mod apply;
pub(crate) mod batch;
mod budget;
pub(crate) mod changes;
mod credit;
pub(crate) mod digests;
mod flight;
pub(crate) mod link;
pub(crate) mod memory;
mod protocol;
mod recycling;
mod refusals;
pub(crate) mod requests;
pub(crate) mod scanning;
mod schedule;
pub(crate) mod send;
mod settle;
pub(crate) mod sweeps;
pub(crate) mod watch;

use std::collections::{BTreeMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use control::Histogram;
use guests::Names;
use kmem::pidfd::PidFd;
use wire::{Detaching, PageNo, RegionId, SegmentId};

use self::apply::Rest;
pub(crate) use self::apply::{Next, add_region};
use self::budget::Budget;
use self::digests::Answers;
use self::flight::Flight;
use self::link::{Link, Tracking};
use self::memory::Memory;
pub(crate) use self::protocol::ProtocolError;
use self::refusals::Refusals;
use self::requests::Requests;
use self::schedule::Schedule;
use self::sweeps::Sweeps;
use self::watch::Observers;
use crate::config::bounds::REST_OF_PROCESS;
use crate::core::content::frame::Frame;
use crate::core::content::index::{ClientId, Place, Sighting};
use crate::core::ledger::written::{HugePolicy, Unmerged};
use crate::core::ledger::{Entry, Region};
use crate::pace::IN_HAND;
use crate::store::domain::Domain;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::tenants::Verdict;
use crate::users::{Connection, User};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) full_scans: u64,
    pub(crate) merged: u64,
    pub(crate) zeroed: u64,
    /// Pages that the program gave back itself.
    pub(crate) discarded: u64,
    pub(crate) differed: u64,
    /// Pages that an agent left alone because they cannot be read.
    pub(crate) unreadable: u64,
    pub(crate) copied: u64,
    /// Pages that take memory of their own again: copied, or filled since they were given back.
    pub(crate) unmerged: u64,
    /// The most pages that its process has ever had at once, as the kernel told last. So many count
    /// as given back of those that no scan has found, and no more: the agent says what it likes.
    pub(crate) peak: u64,
    /// How many have.
    pub(crate) unseen: u64,
    pub(crate) window_max_ns: u64,
    /// How long writers can have waited. Of windows that were reported together the longest counts.
    pub(crate) stalls: Histogram,
}

impl Totals {
    /// A scan found that these pages take memory of their own again.
    pub(crate) fn unmerged(&mut self, pages: Unmerged) {
        self.copied += pages.copied;
        self.unmerged += pages.copied + pages.filled;
    }
}

/// How far a client's detach has come, as its agent says.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Detach {
    /// What it waits for at present.
    pub(crate) waits: Option<Detaching>,
    /// The kernel's error with which it failed; the memory stays managed.
    pub(crate) errno: Option<i32>,
    /// Pages that left management, in a detach or before, and may map frames.
    pub(crate) retained: u64,
}

pub(crate) struct State {
    pub(crate) link: Link,
    pub(crate) tracking: Tracking,
    pub(crate) schedule: Schedule,
    pub(crate) regions: BTreeMap<RegionId, Region>,
    pub(crate) flight: Flight,
    pub(crate) refusals: Refusals,
    pub(crate) budget: Budget,
    pub(crate) detach: Detach,
    pub(crate) observers: Observers,
    pub(crate) totals: Totals,
    /// The version of its agent's package, if the agent has said it.
    pub(crate) library: Option<String>,
    /// The message that is not applied to its end.
    rest: Option<Rest>,
    /// Its guest marks free pages.
    pub(crate) recycling: Option<Sweeps>,
}

impl State {
    /// After a scan: what was put off becomes a candidate again, every few scans.
    pub(crate) fn retry_deferred(&mut self) {
        if self.budget.retry(self.totals.full_scans) {
            self.regions.values_mut().for_each(|region| region.ages.retry_deferred());
        }
    }
}

/// Who a client is and how it is reached; this does not change.
pub(crate) struct Identity {
    pub(crate) number: ClientId,
    pub(crate) pid: i32,
    /// Its own; `user` may have others, too.
    pub(crate) uid: u32,
    pub(crate) user: Arc<User>,
    pub(crate) name: String,
    /// How its guest called itself when it connected.
    pub(crate) own: Names,
    /// The version of the protocol that its connection speaks.
    pub(crate) version: u16,
    pub(crate) domain: Arc<Domain>,
    /// Why it has this domain.
    pub(crate) verdict: Verdict,
    pub(crate) conn: Connection,
    pub(crate) pidfd: PidFd,
    /// Forks with regions that its children inherited, before it was a client of this daemon.
    pub(crate) forks_before: u64,
    pub(crate) memory: Memory,
    pub(crate) huge_pages: HugePolicy,
    /// Reclaim period in seconds, unless its agent names another.
    pub(crate) reclaim_period: f64,
}

pub(crate) struct Client {
    identity: Identity,
    state: Mutex<State>,
    /// [`Schedule::scanning`] became `None`.
    scan_ended: Condvar,
    pub(crate) requests: Requests,
    pub(crate) answers: Answers,
    /// Merge passes that the workers' queue has been asked for; the queue's.
    pub(crate) passes: AtomicU32,
    /// CPU time of its agent in ns, and pages that it has in hand, as last read.
    load: (AtomicU64, AtomicU32),
    /// If its process connects again, it is looked at from then on, and once more so much later.
    returns: Mutex<(Instant, Duration)>,
}

impl std::ops::Deref for Client {
    type Target = Identity;
    fn deref(&self) -> &Identity {
        &self.identity
    }
}

impl Identity {
    /// What it is called where people read it, as [`control::ClientStatus::called`].
    pub(crate) fn called(&self) -> &str {
        let guest = self.verdict.name.as_ref().or(self.own.name.as_ref());
        guest.filter(|name| !name.is_empty()).unwrap_or(&self.name)
    }
}

impl Client {
    /// `segments`: those whose descriptors its agent has.
    pub(crate) fn new(identity: Identity, segments: HashSet<SegmentId>) -> Self {
        let maps = kmem::procfs::count_maps(Some(identity.pid)).unwrap_or(0) as u32;
        let state = State {
            link: Link::Connected,
            tracking: Tracking::Complete,
            schedule: Schedule::new(Instant::now()),
            regions: BTreeMap::new(),
            flight: Flight::new(segments),
            refusals: Refusals::default(),
            budget: Budget::new(maps),
            detach: Detach::default(),
            observers: Observers::default(),
            totals: Totals::default(),
            library: None,
            rest: None,
            recycling: None,
        };
        Self {
            identity,
            state: Mutex::new(state),
            scan_ended: Condvar::new(),
            requests: Requests::default(),
            answers: Answers::default(),
            passes: AtomicU32::new(0),
            load: Default::default(),
            returns: Mutex::new((Instant::now(), Duration::ZERO)),
        }
    }

    /// It took this CPU time to take it back: if its process connects again, it has to wait.
    pub(crate) fn took(&self, time: Duration) {
        let (times, longest) = REST_OF_PROCESS;
        let rest = (time * times).min(longest);
        *self.returns.lock() = (Instant::now() + rest, rest);
    }

    /// Waits until its process may be looked at again. `false`: too many of its connections do, of
    /// which an honest agent has one.
    pub(crate) fn wait_to_return(&self) -> bool {
        let now = Instant::now();
        let left = {
            let (from, rest) = &mut *self.returns.lock();
            let left = from.saturating_duration_since(now);
            if left > REST_OF_PROCESS.1 {
                return false;
            }
            *from = now + left + *rest;
            left
        };
        std::thread::sleep(left);
        true
    }

    /// CPU time that its agent has charged, in nanoseconds, and pages that it has in hand. Does not
    /// wait for the lock: while another thread has it, the values last read are returned.
    pub(crate) fn load(&self) -> (u64, u32) {
        let (cpu_ns, in_hand) = &self.load;
        if let Some(state) = self.state.try_lock() {
            cpu_ns.store(state.flight.credit.charged_ns, Relaxed);
            in_hand.store(if state.link.is_up() { state.flight.in_hand(IN_HAND) } else { 0 }, Relaxed);
        }
        (cpu_ns.load(Relaxed), in_hand.load(Relaxed))
    }

    /// The changing half; a scan may be under way, see [`Client::settled`].
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Whether it ever forked with regions: a child may map frames that the process leaves.
    fn forked(&self) -> bool {
        self.forks_before > 0 || self.memory.control.atomic_u64(wire::control::FORKS).load(Acquire) > 0
    }

    /// Whether its agent may have pages taken away just now.
    pub(crate) fn is_in_window(&self) -> bool {
        self.memory.control.atomic_u64(wire::control::WINDOW).load(Acquire) > 0
    }

    pub(crate) fn release(&self, frame: Frame) {
        if self.forked() {
            // A child without an agent may still map it.
            self.domain.store.pin(frame);
        }
        self.domain.release(frame);
    }

    fn sighting(&self, region: RegionId, page: PageNo) -> Sighting {
        Sighting { client: self.number, region, page }
    }

    /// Drops what the ledger knew of a page: its frame loses a user, or the index forgets it.
    pub(crate) fn drop_entry(&self, region: RegionId, page: PageNo, entry: Entry) {
        match entry {
            Entry::Merged(frame) => self.release(frame),
            Entry::Unshared(handle) => {
                self.domain.index.forget(handle, Place::Sighted(self.sighting(region, page)));
            }
            Entry::Fresh | Entry::Zero | Entry::Pending | Entry::Recycled => {}
        }
    }

    /// Whether the agent has enough to do. From then on a pass is due when it has done half of it.
    pub(crate) fn is_full(&self) -> bool {
        self.state().flight.is_full()
    }

    /// Ends the connection of a client that broke a rule: the service thread finds it closed.
    pub(crate) fn refuse(&self, why: &impl std::fmt::Display) {
        self.user.refuse((self.uid, self.pid), &self.name, &format!("connection closed: {why}"));
        let _ = rustix::net::shutdown(self.conn.as_fd(), rustix::net::Shutdown::Both);
    }

    /// The connection has ended; the process may live. Its pages keep their frames.
    pub(crate) fn disconnect(&self) {
        self.state().link.disconnect();
        self.answers.close();
    }

    /// The process is gone, or a newer connection has taken its place: gives back all that it held.
    /// Returns the bytes of its ledgers.
    pub(crate) fn reap(&self) -> u64 {
        self.requests.close().iter().for_each(|request| self.release(request.frame));
        self.answers.close();
        let mut state = self.state();
        state.link.disconnect();
        for batch in std::mem::take(&mut state.flight.batches).into_values() {
            self.settle_rest(&mut state, batch);
        }
        let regions = std::mem::take(&mut state.regions);
        // A worker may wait for the lock, and the ledgers may be large.
        drop(state);
        for (id, region) in &regions {
            for page in region.known(region.all()) {
                self.drop_entry(*id, page, region.entry(page));
            }
        }
        regions.values().map(Region::bytes).sum()
    }
}
