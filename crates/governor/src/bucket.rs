//! A token bucket of CPU time, for a scanner that can wait at any moment.
//!
//! Spent CPU time drains at `rate`; the part that has not drained is the *level*. A worker that has
//! spent CPU time waits until the level is no higher than `burst`. Over any time `w` the workers
//! spend at most `rate·w + burst`, plus the one piece of work that each of them has in hand. A rate
//! of `limit − burst/w` therefore keeps `limit` over every `w`.
//!
//! Work that was given to other processes, and whose CPU time is charged later, is *in hand*: until
//! then an estimate counts as spent.

use std::time::Duration;

use crate::Window;

/// The bucket. All times count from the same fixed start.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// CPU seconds that drain in a second.
    rate: f64,
    /// CPU seconds that may be spent at once.
    burst: f64,
    level: f64,
    at: f64,
}

impl Bucket {
    /// The share of a window's CPU time that is reserved for bursts: 5 %, large enough for the work
    /// in hand.
    const BURST: f64 = 0.05;

    /// A bucket that keeps `limit`, a share of one CPU, over every [`Window::LENGTH`].
    pub fn new(limit: f64) -> Self {
        let mut bucket = Self { rate: 0.0, burst: 0.0, level: 0.0, at: 0.0 };
        bucket.set_limit(limit);
        bucket
    }

    /// Sets another limit, as a share of one CPU.
    pub fn set_limit(&mut self, limit: f64) {
        self.burst = limit * Window::LENGTH * Self::BURST;
        self.rate = limit * (1.0 - 2.0 * Self::BURST);
    }

    /// Charges spent CPU time. Returns how long to wait before spending more, while `in_hand` is
    /// being spent elsewhere.
    pub fn spend(&mut self, now: Duration, cpu: Duration, in_hand: Duration) -> Duration {
        let now = now.as_secs_f64();
        self.level = (self.level - (now - self.at).max(0.0) * self.rate).max(0.0) + cpu.as_secs_f64();
        self.at = self.at.max(now);
        let excess = self.level + in_hand.as_secs_f64() - self.burst;
        if excess <= 0.0 {
            return Duration::ZERO;
        }
        // With a limit of 0 the wait would be infinite: wait an hour, then ask again.
        Duration::from_secs_f64((excess / self.rate).min(3600.0))
    }
}
