//! CPU time that an agent may charge to the daemon's budget.
//!
//! An agent says how much CPU time its threads have used, and the pacer makes all merging wait for
//! it ([`crate::pace`]). An agent may say anything. So each request to it grants credit, as much as
//! its work can cost at most, and the agent charges no more. A little is added with time, for work
//! that nobody requested.

use std::time::{Duration, Instant};

use crate::pace::AGENT_PAGE;

/// CPU time that a batch costs an agent beside its pages, at most: a few windows.
const BATCH: Duration = Duration::from_millis(1);
/// One part in this many of the time is for work of an agent that nobody requested.
const UNASKED: u32 = 50;
/// The longest time for which such credit is granted at once.
const LONGEST: Duration = Duration::from_secs(10);

pub(crate) struct Credit {
    left: Duration,
    /// What the agent said last; nothing on a new connection.
    said_ns: Option<u64>,
    granted: Instant,
    /// What it has charged so far.
    pub(crate) charged_ns: u64,
}

impl Credit {
    pub(super) fn new() -> Self {
        Self { left: Duration::ZERO, said_ns: None, granted: Instant::now(), charged_ns: 0 }
    }

    /// The agent is given a batch of `pages` pages.
    pub(super) fn batch(&mut self, pages: u32) {
        self.grant(BATCH + AGENT_PAGE * pages);
    }

    /// The agent has computed the digests of `pages` pages, as requested.
    pub(super) fn digests(&mut self, pages: usize) {
        self.grant(AGENT_PAGE * pages as u32);
    }

    pub(super) fn grant(&mut self, time: Duration) {
        self.left = self.left.saturating_add(time);
    }

    /// The agent says how much CPU time it has used so far. Returns the part that is new and
    /// charged, in nanoseconds.
    pub(super) fn charge(&mut self, said_ns: u64) -> u64 {
        self.grant(self.granted.elapsed().min(LONGEST) / UNASKED);
        self.granted = Instant::now();
        // What was used for an earlier connection was charged there.
        let new = said_ns.saturating_sub(self.said_ns.unwrap_or(said_ns));
        self.said_ns = self.said_ns.max(Some(said_ns));
        let charged = Duration::from_nanos(new).min(self.left);
        self.left -= charged;
        let charged = charged.as_nanos() as u64;
        self.charged_ns += charged;
        charged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_charges_what_its_work_can_have_cost() {
        let mut credit = Credit::new();
        assert_eq!(credit.charge(7_000_000_000), 0, "what it used before");
        let second = 1_000_000_000;
        assert!(credit.charge(1000 * second) < second / 2, "a lie");
        credit.batch(100);
        let all = (BATCH + AGENT_PAGE * 100).as_nanos() as u64;
        assert_eq!(credit.charge(1000 * second + 300_000), 300_000, "less than it may");
        let rest = credit.charge(u64::MAX);
        assert!((all - 300_000..all + second / 2).contains(&rest), "{rest} ns");
        assert_eq!(credit.charge(0), 0, "time does not go back");
    }
}
