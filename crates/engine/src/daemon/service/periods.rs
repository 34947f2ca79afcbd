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

/// How soon to look again whether a user's passes are over, at the latest.
const LATER: Duration = Duration::from_millis(50);

/// Scans to request now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Scans {
    /// Of the clients of these users.
    pub(super) users: BTreeSet<u32>,
    /// A round of the pace begins.
    pub(super) round: bool,
}

pub(super) struct Periods {
    period: Duration,
    /// When the next period begins.
    next: Instant,
    /// Users that were not scanned in this period.
    due: BTreeSet<u32>,
    /// Users that were scanned when the round began and have passes since.
    awaited: BTreeSet<u32>,
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
        let later = (!self.due.is_empty()).then(|| now + (self.period / 64).min(LATER));
        later.map_or(self.next, |later| later.min(self.next))
    }

    /// Whether a period begins `now`; then `users` gives all users that have clients.
    pub(super) fn begin(&mut self, now: Instant, users: impl FnOnce() -> BTreeSet<u32>) -> bool {
        let begins = now >= self.next;
        if begins {
            self.next = (self.next + self.period).max(now);
            self.due = users();
        }
        begins
    }

    /// The scans to request. `busy`: whether a user's passes are not over. `None`: no scan is due.
    pub(super) fn scans(&mut self, busy: impl Fn(u32) -> bool) -> Option<Scans> {
        let users: BTreeSet<u32> = self.due.iter().copied().filter(|&user| !busy(user)).collect();
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
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(1);

    fn scans(users: &[u32], round: bool) -> Option<Scans> {
        Some(Scans { users: users.iter().copied().collect(), round })
    }

    #[test]
    fn a_user_whose_passes_are_not_over_puts_off_its_own_scans_and_nobody_elses() {
        let start = Instant::now();
        let mut periods = Periods::new(PERIOD, start);
        let all = || BTreeSet::from([1, 2, 3]);
        assert!(!periods.begin(start, all) && periods.scans(|_| false).is_none());
        assert_eq!(periods.wake(start), start + PERIOD);
        assert!(periods.begin(start + PERIOD, all));
        assert_eq!(periods.scans(|_| false), scans(&[1, 2, 3], true));
        assert_eq!(periods.scans(|_| false), None, "once in a period");
        for n in 2..5 {
            assert!(periods.begin(start + n * PERIOD, all));
            assert_eq!(periods.scans(|user| user == 2), scans(&[1, 3], false), "the round waits for user 2");
            assert!(periods.wake(start + n * PERIOD) < start + (n + 1) * PERIOD);
        }
        assert_eq!(periods.scans(|_| false), scans(&[2], true), "as soon as its passes are over");
        assert!(periods.begin(start + 5 * PERIOD, all));
        assert_eq!(periods.scans(|user| user == 3), scans(&[1, 2], true), "user 3 was not of the last round");
        let now = start + 5 * PERIOD;
        periods.set(PERIOD / 10, now);
        assert!(periods.begin(now + PERIOD / 10, all), "a shorter period begins at once");
    }
}
