//! What is known of a guest that marks its free pages: its marks, where its RAM lies, how far it
//! is, and what its sweeps came to.
//!
//! In each *reclaim period* the daemon looks at the summary of the guest's pool, 4 KiB for 8 GiB of
//! guest. Where it says that something is marked, a sweep is due, with as much CPU time as the
//! budget that merging and recycling share allows. Who sweeps, an agent or the daemon, is the back
//! end's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use control::{RecycleStatus, RecyclerMetrics, RecyclerState};
use kmem::PAGE_SIZE;
use wire::recycle::{Extent, Sweep};

use crate::core::ledger::free_pages::Marks;
use crate::pace::Pacer;

/// The part of a reclaim period after which to look for marks; the rest is for the work.
const LOOK_AFTER: f64 = 0.8;
/// The part of a reclaim period that one sweep may take where there is no other limit.
const SWEEP_SHARE: f64 = 0.5;
/// How long a guest may boot and load its module; then it is merged without marks.
const BOOT_TIME: Duration = Duration::from_secs(60);

#[derive(Debug)]
enum Phase {
    /// Where its RAM lies is not known yet.
    Starting,
    /// It can be swept, while its device is plugged in.
    Ready,
    /// Nothing can be recycled at present.
    Refused(String),
    /// Nothing will ever be recycled again.
    Dropped(String),
}

/// Whether a guest has its device: without one nobody marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    In,
    Out,
}

/// A guest that marks its free pages.
pub(crate) struct Recycling {
    pub(crate) marks: Arc<Marks>,
    /// Where its RAM lies.
    pub(crate) extents: Vec<Extent>,
    period: Duration,
    /// When to look for marks next.
    pub(crate) due: Instant,
    phase: Phase,
    device: Device,
    /// Until when it may be booting.
    boots_until: Option<Instant>,
    pub(crate) totals: Totals,
    rate: Rate,
}

/// Sums over a client's life, as far as this daemon knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) pages: u64,
    pub(crate) runs: u64,
    /// Pages that the guest took back itself between the look and the claim.
    pub(crate) lost: u64,
    pub(crate) sweeps: u64,
    pub(crate) sweep_ns: u64,
    /// The longest time that pages were claimed.
    pub(crate) longest_ns: u64,
}

/// Pages taken back a second, over a window of at least two seconds.
struct Rate {
    /// When it was last computed, and the total of pages then.
    window: (Instant, u64),
    rate: f64,
}

impl Rate {
    fn add(&mut self, pages: u64) {
        let elapsed = self.window.0.elapsed().as_secs_f64();
        if elapsed >= 2.0 {
            self.rate = (pages - self.window.1) as f64 / elapsed;
            self.window = (Instant::now(), pages);
        }
    }
}

impl Recycling {
    /// Of a guest that marks its free pages there.
    pub(crate) fn new(marks: Arc<Marks>, period: Duration) -> Self {
        let now = Instant::now();
        Self {
            marks,
            extents: Vec::new(),
            period,
            due: now,
            phase: Phase::Starting,
            device: Device::In,
            boots_until: None,
            totals: Totals::default(),
            rate: Rate { window: (now, 0), rate: 0.0 },
        }
    }

    pub(crate) fn booting(self) -> Self {
        Self { boots_until: Some(Instant::now() + BOOT_TIME), ..self }
    }

    /// A guest's reclaim period: its own, in milliseconds, or, where that is 0, `usual`.
    pub(crate) fn period_of(own_ms: u32, usual: f64) -> Duration {
        Duration::from_secs_f64(match own_ms {
            0 => usual,
            own => (f64::from(own) / 1000.0).clamp(crate::config::SHORTEST_PERIOD, 86_400.0),
        })
    }

    /// The guest's RAM lies there.
    pub(crate) fn locate(&mut self, extents: Vec<Extent>) {
        self.due = Instant::now();
        self.extents = extents;
        if matches!(self.phase, Phase::Starting | Phase::Ready) {
            self.phase = self.fit();
        }
    }

    /// The phase of a guest that nothing is against.
    fn fit(&self) -> Phase {
        if self.is_located() { Phase::Ready } else { Phase::Starting }
    }

    pub(crate) fn is_located(&self) -> bool {
        !self.extents.is_empty()
    }

    /// Why nothing can be recycled at present, or never again, for people.
    pub(crate) fn why(&self) -> Option<&str> {
        match &self.phase {
            Phase::Starting | Phase::Ready => None,
            Phase::Refused(why) | Phase::Dropped(why) => Some(why),
        }
    }

    pub(crate) fn is_dropped(&self) -> bool {
        matches!(self.phase, Phase::Dropped(_))
    }

    pub(crate) fn set_device(&mut self, device: Device) {
        self.device = device;
        if device == Device::In {
            self.due = Instant::now();
        }
    }

    pub(crate) fn refuse(&mut self, why: String) {
        if !self.is_dropped() {
            self.phase = Phase::Refused(why);
        }
    }

    /// Whether it is time to look for marks; then the next look is due.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now >= self.due;
        if is_due {
            self.due = now + self.period.mul_f64(LOOK_AFTER);
        }
        is_due
    }

    /// Nothing can be done for a whole period.
    pub(crate) fn rest(&mut self, now: Instant) {
        self.due = now + self.period;
    }

    /// CPU time for a sweep now, if anything may be marked. Reads 4 KiB for 8 GiB of guest.
    pub(crate) fn budget(&self, pacer: &Pacer) -> Option<Duration> {
        if !self.has_marks() {
            return None;
        }
        pacer.allowance(self.period.mul_f64(SWEEP_SHARE))
    }

    /// Whether the daemon may sweep it.
    pub(crate) fn may_be_swept(&self) -> bool {
        !self.is_dropped() && self.device == Device::In
    }

    /// Whether the guest may have marked something.
    pub(crate) fn has_marks(&self) -> bool {
        self.extents.last().is_some_and(|extent| self.marks.any_below(extent.frames().end))
    }

    pub(crate) fn status(&self) -> RecycleStatus {
        let state = match (&self.phase, self.device) {
            (Phase::Dropped(_), _) => RecyclerState::Dropped,
            (Phase::Refused(_), _) => RecyclerState::Refused,
            (Phase::Starting, _) => RecyclerState::Starting,
            (Phase::Ready, Device::Out) => RecyclerState::Paused,
            (Phase::Ready, Device::In) => RecyclerState::Recycling,
        };
        let totals = &self.totals;
        let idle = self.rate.window.0.elapsed() > 5 * self.period;
        RecycleStatus {
            state,
            why: self.why().map(str::to_owned),
            metrics: RecyclerMetrics {
                managed_bytes: self.extents.iter().map(|extent| u64::from(extent.run.len) * PAGE_SIZE as u64).sum(),
                pool_bytes: self.marks.bytes(),
                reclaim_period_seconds: self.period.as_secs_f64(),
                pages_recycled_total: totals.pages,
                pages_recycled_per_second: if idle { 0.0 } else { self.rate.rate },
                runs_total: totals.runs,
                pages_lost_total: totals.lost,
                sweeps_total: totals.sweeps,
                sweep_seconds: totals.sweep_ns as f64 / 1e9,
                claim_max_us: totals.longest_ns / 1000,
            },
        }
    }

    /// Whether the guest will soon tell which pages are free. Until then most that could be merged
    /// are left over from booting: their frames would soon lose their users, and stay in the store.
    pub(crate) fn is_awaited(&mut self) -> bool {
        let awaited = self.boots_until.is_some_and(|until| Instant::now() < until)
            && self.why().is_none()
            && self.device == Device::In
            && self.totals.sweeps == 0
            && self.marks.guest_starts() == 0;
        if !awaited {
            self.boots_until = None;
        }
        awaited
    }

    /// A sweep has ended. Returns why nothing can be recycled, if that is new.
    pub(crate) fn swept(&mut self, sweep: &Sweep) -> Option<&str> {
        let before = self.why().map(str::to_owned);
        if !self.is_dropped() {
            self.phase = match sweep.refused {
                Some(why) if why.is_final() => Phase::Dropped(why.to_string()),
                Some(why) => Phase::Refused(why.to_string()),
                None => self.fit(),
            };
        }
        // A sweep passes each page once. With this limit a hostile client cannot make the sums
        // overflow.
        let most: u64 = self.extents.iter().map(|extent| u64::from(extent.run.len)).sum();
        let totals = &mut self.totals;
        totals.sweeps += 1;
        totals.pages += sweep.pages.min(most);
        totals.runs += sweep.runs.min(most);
        totals.lost += sweep.lost.min(most);
        totals.sweep_ns = totals.sweep_ns.saturating_add(sweep.sweep_ns);
        totals.longest_ns = totals.longest_ns.max(sweep.longest_ns);
        self.rate.add(totals.pages);
        if sweep.more {
            self.due = Instant::now();
        }
        self.why().filter(|&why| before.as_deref() != Some(why))
    }
}

#[cfg(test)]
mod tests;
