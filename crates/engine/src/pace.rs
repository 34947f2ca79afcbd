//! Pacing: workers wait here, so that a scan takes its target time and CPU time stays within its
//! limit.
//!
//! [`governor::Pace`] decides; here are the clocks. Every worker calls [`Pacer::pause`] where it
//! holds no lock. CPU time of this process is charged by itself, whichever thread uses it, but for
//! what anybody may cause ([`Pacer::apart`]): connections would stop merging for all. CPU time that
//! agents use for the daemon is charged as they report it ([`Pacer::charge_agents`]); until then,
//! the pages they were given count as *in hand*. While the host is short of memory (PSI), merging
//! helps, and a second, higher limit applies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use claims::Owner;
use control::{GovernorMetrics, GovernorMode, GovernorStatus};
use governor::{Mode, Pace, PaceSettings};

use crate::config::Config;
use crate::sync::Mutex;

#[cfg(test)]
mod tests;

/// The shortest wait, so that a fast pace does not cause many wake-ups.
const SHORTEST: Duration = Duration::from_millis(2);
/// The longest wait at a time, so that a worker sees that it is to end.
const LONGEST: Duration = Duration::from_millis(200);
/// How often memory pressure is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How often agents are charged: each time looks at every client.
pub(crate) const CHARGE_EVERY: Duration = Duration::from_millis(1);
/// And so much later for each client: a look takes some 50 ns for it.
const CHARGE_EACH: Duration = Duration::from_micros(2);
/// CPU time of this process is read at most this often.
const SETTLE: Duration = Duration::from_micros(500);
/// CPU time that a page costs an agent at most: comparing it, and a mapping of its own.
pub(crate) const AGENT_PAGE: Duration = Duration::from_micros(10);
/// An agent that has not reported for this long is not working.
pub(crate) const IN_HAND: Duration = Duration::from_secs(2);
/// How often a decision is logged at level `info`; at `debug` all are.
const NEWS: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limits {
    pub(crate) mode: Mode,
    /// How long a scan is to take, in seconds.
    pub(crate) target: f64,
    /// CPU limit as a share of one CPU; 0: none.
    pub(crate) usual: f64,
    /// CPU limit while tasks lose more of their time to memory shortage than `pressure`.
    pub(crate) short: f64,
    /// Percent of the last 10 s that tasks lost waiting for memory.
    pub(crate) pressure: f64,
}

impl From<&Config> for Limits {
    fn from(config: &Config) -> Self {
        Self {
            mode: config.mode,
            target: config.target(),
            usual: config.max_cpu / 100.0,
            short: config.max_cpu_under_pressure / 100.0,
            pressure: config.pressure_percent,
        }
    }
}

impl Limits {
    /// Whether memory pressure changes the CPU limit.
    fn looks(&self) -> bool {
        self.usual > 0.0 && self.short > self.usual
    }
}

struct State {
    limits: Limits,
    pace: Pace,
    /// CPU time that has been charged, in nanoseconds: of this process, of agents.
    own: u64,
    agents: u64,
    /// Pages that agents have in hand, since when.
    in_hand: (u32, Duration),
    settled: Duration,
    looked: Option<Instant>,
    short: bool,
    /// The last line in the log: when, and whether the CPU limit bound.
    told: Option<(Duration, bool)>,
    /// Those whose scans are not over, or lately were.
    users: BTreeMap<Owner, OfUser>,
}

/// A user's part of the scan.
#[derive(Default)]
struct OfUser {
    /// Pages found that no worker has taken.
    left: u64,
    /// When a worker was last here, for a client of the user.
    seen: Duration,
}

pub(crate) struct Pacer {
    started: Instant,
    /// CPU time so far, in nanoseconds.
    clock: fn() -> u64,
    /// Of that, what is not charged.
    apart: AtomicU64,
    /// When agents were last charged: microseconds after `started`.
    charged: AtomicU64,
    state: Mutex<State>,
}

fn process_cpu() -> u64 {
    kmem::cpu::process_time().as_nanos() as u64
}

impl Pacer {
    pub(crate) fn new(config: &Config) -> Self {
        Self::with_clock(config.into(), process_cpu)
    }

    fn with_clock(limits: Limits, clock: fn() -> u64) -> Self {
        let Limits { mode, target, usual, .. } = limits;
        let state = State {
            limits,
            pace: Pace::new(PaceSettings { mode, target, max_cpu: usual }),
            own: 0,
            agents: 0,
            in_hand: (0, Duration::ZERO),
            settled: Duration::ZERO,
            looked: None,
            short: false,
            told: None,
            users: BTreeMap::new(),
        };
        Self {
            started: Instant::now(),
            clock,
            apart: AtomicU64::default(),
            charged: AtomicU64::default(),
            state: Mutex::new(state),
        }
    }

    /// Other limits, from the next scan and the next piece of work on.
    pub(crate) fn set(&self, config: &Config) {
        self.with(|state, _| {
            let limits = Limits::from(config);
            state.pace.set_goal(limits.mode, limits.target);
            state.short &= limits.looks();
            state.pace.set_max_cpu(if state.short { limits.short } else { limits.usual });
            state.limits = limits;
        });
    }

    fn with<T>(&self, act: impl FnOnce(&mut State, Duration) -> T) -> T {
        let mut state = self.state.lock();
        // Taken under the lock, so that it does not go back.
        let now = self.started.elapsed();
        act(&mut state, now)
    }

    /// Scans of these users' clients begin. Pages that were left of their last ones are found
    /// again. `round`: so does a scan, as the governor counts them; of other users, pages are only
    /// left where `busy` says that passes are under way.
    pub(crate) fn begin_scan(&self, users: &BTreeSet<Owner>, round: bool, busy: impl Fn(Owner) -> bool) {
        self.with(|state, now| {
            if round {
                state.users.retain(|&owner, _| busy(owner));
            }
            for &owner in users {
                let user = state.users.entry(owner).or_default();
                state.pace.forget(std::mem::take(&mut user.left));
                user.seen = now;
            }
            if round {
                state.pace.begin(now);
                state.pace.found(now, state.users.values().map(|user| user.left).sum());
            }
        });
    }

    /// `pages` more pages are due, of one client of this user.
    pub(crate) fn found(&self, owner: Owner, pages: u64) {
        self.with(|state, now| {
            state.users.entry(owner).or_default().left += pages;
            state.pace.found(now, pages);
        });
    }

    /// `pages` pages of a client of this user are being looked at.
    pub(crate) fn took(&self, owner: Owner, pages: u64) {
        if pages == 0 {
            return;
        }
        let decision = self.with(|state, now| {
            let user = state.users.entry(owner).or_default();
            (user.left, user.seen) = (user.left.saturating_sub(pages), now);
            let decision = state.pace.took(now, pages).1?;
            let news = state.told.is_none_or(|(at, limited)| now - at >= NEWS || limited != decision.limited);
            if news {
                state.told = Some((now, decision.limited));
            }
            Some((decision, news))
        });
        match decision {
            Some((decision, true)) => tracing::info!("{decision}"),
            Some((decision, false)) => tracing::debug!("{decision}"),
            None => {}
        }
    }

    /// Waits until it is time for more pages, of a client of this user, and until CPU time may be
    /// used. The caller must hold no lock.
    pub(crate) fn pause(&self, owner: Owner, stopping: impl Fn() -> bool) {
        // Each worker has its own place in the schedule.
        let until = self.with(|state, _| state.pace.until());
        loop {
            let (now, cpu) = self.settle(0, Duration::ZERO);
            self.with(|state, now| state.users.entry(owner).or_default().seen = now);
            let wait = until.saturating_sub(now).max(cpu);
            if wait.is_zero() || stopping() {
                return;
            }
            std::thread::sleep(wait.clamp(SHORTEST, LONGEST));
        }
    }

    /// Does, for a short time, what is not merging: its CPU time is not charged.
    pub(crate) fn apart<T>(&self, act: impl FnOnce() -> T) -> T {
        let before = kmem::cpu::thread_time();
        let result = act();
        self.apart.fetch_add((kmem::cpu::thread_time() - before).as_nanos() as u64, Relaxed);
        result
    }

    /// Whether agents are to be charged now, by this thread.
    pub(crate) fn is_charge_due(&self) -> bool {
        let (now, last) = (self.started.elapsed().as_micros() as u64, self.charged.load(Relaxed));
        let due = last == 0 || now >= last + CHARGE_EVERY.as_micros() as u64;
        due && self.charged.compare_exchange(last, now.max(1), Relaxed, Relaxed).is_ok()
    }

    /// The next charge is so much later as looking at so many clients takes.
    pub(crate) fn put_off_charging(&self, clients: usize) {
        self.charged.fetch_add((CHARGE_EACH * clients as u32).as_micros() as u64, Relaxed);
    }

    /// Charges agents. `total`: CPU time of all agents ever, in nanoseconds; `in_hand`: pages that
    /// they have been given and have not reported on.
    pub(crate) fn charge_agents(&self, total: u64, in_hand: u32) {
        let new = self.with(|state, now| {
            state.in_hand = (in_hand, now);
            let new = total.saturating_sub(state.agents);
            state.agents = state.agents.max(total);
            new
        });
        self.settle(new, SETTLE);
    }

    /// CPU time for urgent work of at most `wanted`. `None`: too much was used; it waits, too.
    pub(crate) fn allowance(&self, wanted: Duration) -> Option<Duration> {
        let limits = self.with(|state, _| state.limits);
        if limits.usual <= 0.0 {
            return Some(wanted);
        }
        let (_, owed) = self.settle(0, Duration::ZERO);
        let share = wanted.mul_f64(limits.usual.max(limits.short).min(1.0));
        (owed <= wanted).then_some(share)
    }

    /// Whether a worker was here within the last `time`, for a client of this user.
    pub(crate) fn is_busy(&self, owner: Owner, time: Duration) -> bool {
        self.with(|state, now| state.users.get(&owner).is_some_and(|user| now.saturating_sub(user.seen) < time))
    }

    /// Charges `others` and, if `least` ago, this process. Returns the time, and how long to wait.
    fn settle(&self, others: u64, least: Duration) -> (Duration, Duration) {
        let memory_is_short = self.look();
        self.with(|state, now| {
            if let Some(short) = memory_is_short {
                state.short = short;
                state.pace.set_max_cpu(if short { state.limits.short } else { state.limits.usual });
            }
            let mut used = others;
            if now.saturating_sub(state.settled) >= least.max(SETTLE) {
                state.settled = now;
                let own = (self.clock)().saturating_sub(self.apart.load(Relaxed));
                used += own.saturating_sub(state.own);
                state.own = state.own.max(own);
            }
            let (pages, since) = state.in_hand;
            let in_hand = if now.saturating_sub(since) < IN_HAND { AGENT_PAGE * pages } else { Duration::ZERO };
            (now, state.pace.charge(now, Duration::from_nanos(used), in_hand))
        })
    }

    /// Looks at memory pressure now and then. `Some`: memory has become short, or no longer is.
    fn look(&self) -> Option<bool> {
        let (limits, short) = self.with(|state, _| {
            let due = state.limits.looks() && state.looked.is_none_or(|looked| looked.elapsed() >= LOOK);
            due.then(|| {
                state.looked = Some(Instant::now());
                (state.limits, state.short)
            })
        })?;
        let pressure = kmem::psi::memory().ok().flatten().map_or(0.0, |pressure| pressure.some.avg10);
        let is_short = pressure > limits.pressure;
        if is_short == short {
            return None;
        }
        let limit = 100.0 * if is_short { limits.short } else { limits.usual };
        let bound = limits.pressure;
        tracing::info!(
            "memory pressure {pressure:.1} % for a bound of {bound} %; the CPU limit is {limit} % from now on"
        );
        Some(is_short)
    }

    /// The CPU limit at present in percent, if it binds.
    pub(crate) fn binding_limit(&self) -> Option<f64> {
        self.with(|state, now| {
            let decision = state.pace.decision(now);
            decision.limited.then_some(decision.cpu_percent[1])
        })
    }

    pub(crate) fn status(&self) -> GovernorStatus {
        self.settle(0, Duration::ZERO);
        self.with(|state, now| {
            let decision = state.pace.decision(now);
            let [cpu_percent, max_cpu_percent] = decision.cpu_percent;
            let rate = decision.rate[1];
            GovernorStatus {
                mode: match state.limits.mode {
                    Mode::Target => GovernorMode::Target,
                    Mode::ScanTime => GovernorMode::ScanTime,
                    Mode::None => GovernorMode::None,
                },
                metrics: GovernorMetrics {
                    target_scan_time_seconds: state.limits.target,
                    scan_time_seconds: state.pace.last().map(|scan| scan.took),
                    scan_pages: state.pace.last().map_or(0, |scan| scan.pages),
                    scan_cpu_seconds: state.pace.last().map_or(0.0, |scan| scan.cpu),
                    pages_due: state.pace.left(),
                    pages_per_second: rate.is_finite().then_some(rate),
                    cpu_percent,
                    max_cpu_percent,
                    memory_is_short: state.short,
                },
                reason: decision.to_string(),
            }
        })
    }
}
