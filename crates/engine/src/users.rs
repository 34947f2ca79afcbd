//! Resources that each user's clients take, and the bounds on them.
//!
//! A [`Claim`] counts against its user until it is dropped. The bounds are those of
//! [`crate::config::bounds`] and of the configuration. Refused clients are kept here too, and lines
//! in the log are counted.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

use claims::{Lines, Owner};
use kmem::PAGE_SIZE;
use kmem::peer::is_trusted;
use kmem::procfs::start_time;

pub(crate) use self::received::{Connection, Received};
use self::turns::Turns;
use crate::config::Config;
use crate::config::bounds::{HANDSHAKES_OF_USER, LINES, LINES_OF_USER, REFUSALS_OF_USER, SEGMENTS_OF_USER};
use crate::sync::Mutex;

mod received;
mod turns;

/// A line in the log about a client, within the bounds of its user and of all:
/// `log_of!(user, warn, …)`.
macro_rules! log_of {
    ($user:expr, $level:ident, $($rest:tt)+) => {
        if $user.may_log() {
            tracing::$level!($($rest)+);
        }
    };
}

pub(crate) use log_of;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Pages,
    Clients,
    /// Connections that have not finished their handshake.
    Handshakes,
    /// Descriptors of segments that wait in handshakes.
    Segments,
}

const KINDS: usize = 4;

/// A user would have more than it may have.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum OverBound {
    #[error(
        "the clients of uid {user} would announce {mib} MiB of memory and may announce {most} MiB: where that is right, raise `user_memory` in the daemon's configuration"
    )]
    Pages { user: Owner, mib: u64, most: u64 },
    #[error(
        "uid {user} has {most} clients, and may not have more: where that is right, raise `user_clients` in the daemon's configuration"
    )]
    Clients { user: Owner, most: u64 },
    #[error("{most} connections of uid {user} wait to introduce themselves; another is taken when one of them is done")]
    Handshakes { user: Owner, most: u64 },
    #[error("handshakes of uid {user} hold {most} segments; another is taken when one of them is done")]
    Segments { user: Owner, most: u64 },
}

/// A client that was refused, or that broke a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) uid: u32,
    pub(crate) pid: i32,
    /// When the process started: another may have its number by now.
    started: u64,
    /// The name of its program, as it says; may be empty.
    pub(crate) name: String,
    /// The broken rule, and the remedy.
    pub(crate) reason: String,
    pub(crate) times: u64,
}

impl Refused {
    /// Whether its process lives. No descriptor is kept for that, since one process can be refused
    /// as many users.
    pub(crate) fn lives(&self) -> bool {
        start_time(self.pid).is_ok_and(|started| started == self.started)
    }
}

/// A user, with all of its subordinate uids.
pub(crate) struct User {
    pub(crate) owner: Owner,
    most: [AtomicU64; KINDS],
    taken: [AtomicU64; KINDS],
    lines: Mutex<Lines>,
    /// Those of all users; `None`: of root or the daemon's owner, whom others leave no less.
    lines_of_all: Option<Arc<Mutex<Lines>>>,
    refused: Mutex<VecDeque<Refused>>,
    closing: Mutex<received::Closing>,
    /// Pages of its clients that are gone that took memory of their own again.
    pub(crate) unmerged: AtomicU64,
}

/// A part of what a user takes, until it is dropped.
pub(crate) struct Claim {
    user: Arc<User>,
    kind: Kind,
    amount: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.user.taken[self.kind as usize].fetch_sub(self.amount, AcqRel);
    }
}

impl User {
    /// A user with bounds on pages and clients.
    pub(crate) fn new(owner: Owner, pages: u64, clients: u64) -> Self {
        Self {
            owner,
            most: [pages, clients, HANDSHAKES_OF_USER, SEGMENTS_OF_USER].map(AtomicU64::new),
            taken: Default::default(),
            lines: Mutex::new(Lines::new(LINES_OF_USER)),
            lines_of_all: None,
            refused: Mutex::default(),
            closing: Mutex::default(),
            unmerged: AtomicU64::new(0),
        }
    }

    pub(crate) fn taken(&self, kind: Kind) -> u64 {
        self.taken[kind as usize].load(Acquire)
    }

    /// Counts `amount` more, unless that is over the bound.
    pub(crate) fn claim(self: &Arc<Self>, kind: Kind, amount: u64) -> Result<Claim, OverBound> {
        let (user, most) = (self.owner, self.most[kind as usize].load(Acquire));
        let more = |taken: u64| taken.checked_add(amount).filter(|&all| all <= most);
        match self.taken[kind as usize].fetch_update(AcqRel, Acquire, more) {
            Ok(_) => Ok(Claim { user: self.clone(), kind, amount }),
            Err(taken) => Err(match kind {
                Kind::Pages => {
                    let mib = |pages: u64| pages.saturating_mul(PAGE_SIZE as u64) >> 20;
                    OverBound::Pages { user, mib: mib(taken.saturating_add(amount)), most: mib(most) }
                }
                Kind::Clients => OverBound::Clients { user, most },
                Kind::Handshakes => OverBound::Handshakes { user, most },
                Kind::Segments => OverBound::Segments { user, most },
            }),
        }
    }

    /// Whether there may be another line about this user's clients; counts what is left out.
    pub(crate) fn may_log(&self) -> bool {
        let Some(left_out) = self.lines.lock().take() else { return false };
        let Some(of_all) = self.lines_of_all.as_ref().map_or(Some(0), |lines| lines.lock().take()) else {
            return false;
        };
        if left_out > 0 {
            tracing::warn!(uid = %self.owner, "{left_out} more lines about this user's clients were left out");
        }
        if of_all > 0 {
            tracing::warn!("{of_all} more lines about clients of many users were left out");
        }
        true
    }

    /// Notes a refused client, and logs it once.
    pub(crate) fn refuse(&self, (uid, pid): (u32, i32), name: &str, reason: &str) {
        // What has ended already is not listed.
        if let Ok(started) = start_time(pid) {
            let mut refused = self.refused.lock();
            let is_same = |one: &&mut Refused| one.pid == pid && one.started == started && one.reason == reason;
            if let Some(same) = refused.iter_mut().find(is_same) {
                same.times += 1;
                return;
            }
            if refused.len() >= REFUSALS_OF_USER {
                refused.pop_front();
            }
            refused.push_back(Refused { uid, pid, started, name: name.into(), reason: reason.into(), times: 1 });
        }
        if self.may_log() {
            tracing::warn!(pid, uid, name, "refused: {reason}");
        }
    }

    pub(crate) fn accepted(&self, pid: i32) {
        self.refused.lock().retain(|refused| refused.pid != pid);
    }

    /// The refused clients whose processes live, the latest last.
    pub(crate) fn refused(&self) -> Vec<Refused> {
        let mut refused = self.refused.lock();
        refused.retain(Refused::lives);
        refused.iter().cloned().collect()
    }
}

/// All users that have, or lately had, a client.
pub(crate) struct Users {
    /// Bounds on pages and clients of each.
    most: Mutex<(u64, u64)>,
    users: Mutex<BTreeMap<Owner, Arc<User>>>,
    lines: Arc<Mutex<Lines>>,
    /// For taking clients back.
    pub(crate) adoptions: Turns,
}

impl Users {
    pub(crate) fn new(config: &Config) -> Self {
        let lines = Arc::new(Mutex::new(Lines::new(LINES)));
        // The other half of the CPUs is for the rest of the work.
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let adoptions = Turns::new(cpus.div_ceil(2));
        Self { most: Mutex::new(Self::bounds(config)), users: Mutex::default(), lines, adoptions }
    }

    /// Sets other bounds, for present users too. A user that has more keeps it, and gets no more.
    pub(crate) fn set(&self, config: &Config) {
        let (pages, clients) = Self::bounds(config);
        let users = self.users.lock();
        *self.most.lock() = (pages, clients);
        for user in users.values() {
            user.most[Kind::Pages as usize].store(pages, Release);
            user.most[Kind::Clients as usize].store(clients, Release);
        }
    }

    /// Pages and clients that one user may have.
    fn bounds(config: &Config) -> (u64, u64) {
        let host = kmem::procfs::meminfo().map_or(u64::MAX, |info| (info.total_kib + info.swap_total_kib) << 10);
        let pages = (host / PAGE_SIZE as u64) as f64 * config.user_memory;
        (pages as u64, config.user_clients as u64)
    }

    /// Whose this uid is.
    pub(crate) fn user(&self, uid: u32) -> Arc<User> {
        let owner = Owner::of(uid);
        let new = || {
            let (pages, clients) = *self.most.lock();
            let mut user = User::new(owner, pages, clients);
            user.lines_of_all = (!is_trusted(uid)).then(|| self.lines.clone());
            Arc::new(user)
        };
        self.users.lock().entry(owner).or_insert_with(new).clone()
    }

    pub(crate) fn all(&self) -> Vec<Arc<User>> {
        self.users.lock().values().cloned().collect()
    }

    /// Into how many parts a resource of all clients is divided, of which a client of `user` has
    /// one. Each user has the same share of it, and divides that among its clients.
    pub(crate) fn share(&self, user: &User) -> u32 {
        let users = self.users.lock().values().filter(|user| user.taken(Kind::Clients) > 0).count() as u32;
        users.saturating_mul(user.taken(Kind::Clients) as u32).max(1)
    }

    /// Forgets users that have nothing here.
    pub(crate) fn tidy(&self) {
        let idle = |user: &Arc<User>| Arc::strong_count(user) == 1 && user.refused().is_empty();
        self.users.lock().retain(|_, user| !idle(user) || !user.lines.lock().are_old());
    }
}

#[cfg(test)]
pub(crate) use self::received::tests::lingering;
#[cfg(test)]
mod tests;
