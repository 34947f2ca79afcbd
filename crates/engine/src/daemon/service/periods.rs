//! When clients are scanned: every merge period, user by user.
//!
//! At the beginning of a period all users are due. A user whose clients wait for a merge pass, or
//! have one, stays due until these passes are over. So a user with much to do, or whose passes do
//! not end, delays its own scans only.
//!
//! The pace of reading is one for all ([`crate::pace`]). A *round* of it begins with a scan when
//! every user that was scanned at the beginning of the round before has been read. With one user
//! that is each scan. Pages found between two beginnings add to the round under way.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use claims::Owner;

/// How soon to look again whether a user's passes are over: each look takes CPU time that merging
/// has not.
const LATER: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(50)];

/// Scans to request now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Scans {
    /// Of the clients of these users.
    pub(super) users: BTreeSet<Owner>,
    /// A round of the pace begins.
    pub(super) round: bool,
}

pub(super) struct Periods {
    period: Duration,
    /// When the next period begins.
    next: Instant,
    /// Users that were not scanned in this period.
    due: BTreeSet<Owner>,
    /// Users that were scanned when the round began and have passes since.
    awaited: BTreeSet<Owner>,
}

impl Periods {
    /// The first period begins one period from `now`.
    pub(super) fn new(period: Duration, now: Instant) -> Self {
        Self { period, next: now + period, due: BTreeSet::new(), awaited: BTreeSet::new() }
    }

    /// Another period from now on; the one under way gets no longer.
    pub(super) fn set(&mut self, period: Duration, now: Instant) {
        if period != self.period {
            self.period = period;
            self.next = self.next.min(now + period);
        }
    }

    /// When to look at the periods again.
    pub(super) fn wake(&self, now: Instant) -> Instant {
        let later = (!self.due.is_empty()).then(|| now + (self.period / 64).clamp(LATER[0], LATER[1]));
        later.map_or(self.next, |later| later.min(self.next))
    }

    /// Whether a period begins `now`; then `users` gives all users that have clients.
    pub(super) fn begin(&mut self, now: Instant, users: impl FnOnce() -> BTreeSet<Owner>) -> bool {
        let begins = now >= self.next;
        if begins {
            self.next = (self.next + self.period).max(now);
            self.due = users();
        }
        begins
    }

    /// The scans to request. `busy`: whether a user's passes are not over. `None`: no scan is due.
    pub(super) fn scans(&mut self, busy: impl Fn(Owner) -> bool) -> Option<Scans> {
        let users: BTreeSet<Owner> = self.due.iter().copied().filter(|&user| !busy(user)).collect();
        if users.is_empty() {
            return None;
        }
        self.due.retain(|user| !users.contains(user));
        self.awaited.retain(|&user| !users.contains(&user) && busy(user));
        let round = self.awaited.is_empty();
        if round {
            self.awaited = users.clone();
        }
        Some(Scans { users, round })
    }
}

#[cfg(test)]
mod tests;
