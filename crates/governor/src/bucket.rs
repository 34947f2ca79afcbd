//! A token bucket of CPU time, for a scanner that can wait at any moment.
//!
//! CPU time drains at `rate`; what was spent and has not drained is the *level*. A worker that has
//! spent waits until the level is no higher than `burst`. Over any time `w` at most `rate·w +
//! burst` is spent, plus the one piece of work that each worker has in hand: so a rate of `limit −
//! burst/w` keeps `limit` over every `w`.
//!
//! Work that was handed to others and shows in the books only later is *in hand*: it counts as
//! spent until it does.

use std::time::Duration;

use crate::Window;

/// The bucket. Times count from any fixed start.
#[derive(Clone, Debug)]
pub struct Bucket {
    /// CPU seconds a second.
    rate: f64,
    /// CPU seconds.
    burst: f64,
    level: f64,
    at: f64,
}

impl Bucket {
    /// The part of the limit over a window that is kept back for bursts.
    const BURST: f64 = 0.05;

    /// A bucket that keeps `limit`, a share of one CPU, over every [`Window::LENGTH`].
    pub fn new(limit: f64) -> Self {
        let mut bucket = Self { rate: 0.0, burst: 0.0, level: 0.0, at: 0.0 };
        bucket.set_limit(limit);
        bucket
    }

    /// Another limit from now on.
    pub fn set_limit(&mut self, limit: f64) {
        self.burst = limit * Window::LENGTH * Self::BURST;
        self.rate = limit * (1.0 - 2.0 * Self::BURST);
    }

    /// Notes CPU time that was spent. Tells how long to wait before spending more, while `in_hand`
    /// is being spent elsewhere.
    pub fn spend(&mut self, now: Duration, cpu: Duration, in_hand: Duration) -> Duration {
        let now = now.as_secs_f64();
        self.level = (self.level - (now - self.at).max(0.0) * self.rate).max(0.0) + cpu.as_secs_f64();
        self.at = self.at.max(now);
        let excess = self.level + in_hand.as_secs_f64() - self.burst;
        if excess <= 0.0 {
            return Duration::ZERO;
        }
        // A limit of nothing would wait for ever: an hour, then ask again.
        Duration::from_secs_f64((excess / self.rate).min(3600.0))
    }
}
