//! The pace of a scanner that can wait at any moment and knows how much there is to do: PageONE's
//! engine.
//!
//! A *scan* begins when the engine asks which pages were written. It ends when every page that is
//! due then was read once. [`Mode`]s:
//!
//! * `none`: every page at once, as fast as the CPU limit allows;
//! * `target`: the pages are spread evenly, so that the last one is read at the end of the target
//!   time ([`Schedule`]). This needs no model of the scanner, since a late scan is faster for the
//!   rest of it;
//! * `scan-time`: a number of pages every 20 ms: that which the kernel's advisor ([`kernel`]) would
//!   make ksmd scan between two sleeps. It follows from the time and CPU time of the last scan.
//!
//! The CPU limit ([`Bucket`]) holds in every mode.

use std::fmt;
use std::time::Duration;

use crate::kernel::{self, Advisor, Tunables};
use crate::{Bucket, Mode, Schedule, Window};

/// The goals and limits of a [`Pace`].
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct PaceSettings {
    /// How the pace is found.
    pub mode: Mode,
    /// The target time of a scan, in seconds.
    pub target: f64,
    /// The CPU limit as a share of one CPU, over any [`Window::LENGTH`]; 0: no limit.
    pub max_cpu: f64,
}

/// The part of the target time that a scan fills, so that the next one can begin in time.
const AIM: f64 = 0.99;
/// ksmd's default sleep, in seconds.
const SLEEP: f64 = 0.020;
/// The kernel advisor's first `pages_to_scan`.
const FIRST_PAGES: u32 = 500;
/// A scan is late from this multiple of the target on.
const LATE: f64 = 1.03;
/// From this part of the limit on, the limit is what delayed a late scan. It is below 1, since a
/// little less is used than allowed.
const NEAR: f64 = 0.8;
/// Seconds between two samples of the window.
const SAMPLE: f64 = 0.1;

/// One scan.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct PacedScan {
    /// Pages scanned.
    pub pages: u64,
    /// Seconds from its beginning until the time of its last pages was over.
    pub took: f64,
    /// CPU time of the scan, in seconds.
    pub cpu: f64,
}

/// The pace of a scan, and the reason.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct PaceDecision {
    /// How the pace is found.
    pub mode: Mode,
    /// The last scan, if it had any page to scan.
    pub last: Option<PacedScan>,
    /// The target, in seconds.
    pub target: f64,
    /// Pages that are due.
    pub due: u64,
    /// Pages in a second, in the last scan and in this one; infinite in mode `none`.
    pub rate: [f64; 2],
    /// Percent of a CPU over the last ten seconds, and its limit; 0: none.
    pub cpu_percent: [f64; 2],
    /// Whether the CPU limit delayed the last scan, or delays this one.
    pub limited: bool,
}

impl fmt::Display for PaceDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.last {
            Some(PacedScan { pages, took, .. }) if self.mode == Mode::None => {
                write!(f, "scan of {pages} pages took {took:.2} s; ")?;
            }
            Some(PacedScan { pages, took, .. }) => {
                write!(f, "scan of {pages} pages took {took:.2} s for a target of {} s; ", self.target)?;
            }
            None if self.mode == Mode::None => {}
            None => write!(f, "a target of {} s; ", self.target)?,
        }
        write!(f, "{} pages due; ", self.due)?;
        let [before, now] = self.rate.map(f64::round);
        match () {
            () if now.is_infinite() => f.write_str("as fast as possible")?,
            () if before < now => write!(f, "raised {before:.0} → {now:.0} pages a second")?,
            () if before > now => write!(f, "lowered {before:.0} → {now:.0} pages a second")?,
            () => write!(f, "kept {now:.0} pages a second")?,
        }
        let [used, limit] = self.cpu_percent;
        write!(f, "; CPU {used:.1} %")?;
        if limit > 0.0 {
            write!(f, " of {limit} %")?;
        }
        if self.limited { f.write_str(": the CPU limit binds") } else { Ok(()) }
    }
}

/// The pace of a scanner; the module's page says how it works. All times count from the same fixed
/// start.
#[derive(Clone, Debug)]
pub struct Pace {
    settings: PaceSettings,
    bucket: Bucket,
    window: Window,
    sampled: f64,
    /// CPU time charged so far, in seconds.
    cpu: f64,
    /// When CPU time may be used again, in seconds.
    held: f64,
    schedule: Schedule,
    advisor: Advisor,
    /// The advisor's `pages_to_scan`.
    pages_to_scan: u32,
    under_way: UnderWay,
    last: Option<PacedScan>,
    decision: PaceDecision,
}

/// The scan under way.
#[derive(Copy, Clone, Debug, Default)]
struct UnderWay {
    scan: PacedScan,
    /// When it began, and the CPU time charged by then, in seconds.
    began: f64,
    cpu_before: f64,
    /// Its pace was told.
    decided: bool,
}

impl Pace {
    /// A pace before its first scan.
    pub fn new(settings: PaceSettings) -> Self {
        Self {
            settings,
            bucket: Bucket::new(settings.max_cpu),
            window: Window::default(),
            sampled: f64::NEG_INFINITY,
            cpu: 0.0,
            held: 0.0,
            schedule: Schedule::default(),
            advisor: Advisor::default(),
            pages_to_scan: FIRST_PAGES,
            under_way: UnderWay::default(),
            last: None,
            decision: PaceDecision { mode: settings.mode, target: settings.target, ..PaceDecision::default() },
        }
    }

    /// Sets another goal; the scan under way ends as it began. The CPU limit stays.
    pub fn set_goal(&mut self, mode: Mode, target: f64) {
        (self.settings.mode, self.settings.target) = (mode, target);
        (self.decision.mode, self.decision.target) = (mode, target);
    }

    /// Sets another CPU limit, as a share of one CPU.
    pub fn set_max_cpu(&mut self, max_cpu: f64) {
        self.settings.max_cpu = max_cpu;
        self.bucket.set_limit(max_cpu);
    }

    /// Begins a scan. Pages that were left of the last one are due again.
    pub fn begin(&mut self, now: Duration) {
        let now = now.as_secs_f64();
        let UnderWay { scan, cpu_before, .. } = self.under_way;
        if scan.pages > 0 {
            let scan = PacedScan { cpu: self.cpu - cpu_before, ..scan };
            self.last = Some(scan);
            if self.settings.mode == Mode::ScanTime {
                self.step(scan);
            }
        }
        let PaceSettings { mode, target, .. } = self.settings;
        self.schedule = match mode {
            Mode::None => Schedule::until(now, now),
            Mode::Target => Schedule::until(now, now + target * AIM),
            Mode::ScanTime => Schedule::at_rate(now, f64::from(self.pages_to_scan) / SLEEP),
        };
        self.under_way = UnderWay { began: now, cpu_before: self.cpu, ..UnderWay::default() };
    }

    /// The kernel's advice after a scan.
    fn step(&mut self, scan: PacedScan) {
        let kernel = Tunables::default();
        let max_cpu = if self.settings.max_cpu > 0.0 { (self.settings.max_cpu * 100.0) as u32 } else { kernel.max_cpu };
        let target_scan_time = self.settings.target as u64;
        let tunables = Tunables { target_scan_time, max_cpu: max_cpu.max(1), ..kernel };
        let seconds = kernel::scan_seconds((scan.took * 1e3) as u64);
        let percent = kernel::cpu_percent((scan.cpu * 1e9) as u64, seconds);
        // The result is never 0: the kernel's least value is ten pages.
        self.pages_to_scan = self.advisor.step(&tunables, self.pages_to_scan, seconds, percent).max(1);
    }

    /// Adds `pages` pages that are due.
    pub fn found(&mut self, now: Duration, pages: u64) {
        self.schedule.found(now.as_secs_f64(), pages);
    }

    /// `pages` of those that were found are not due after all.
    pub fn forget(&mut self, pages: u64) {
        self.schedule.forget(pages);
    }

    /// Takes `pages` pages, which are being scanned. Returns the time until which to wait before
    /// taking more, and the decision if it is new.
    pub fn took(&mut self, now: Duration, pages: u64) -> (Duration, Option<PaceDecision>) {
        let at = now.as_secs_f64();
        let decision = (!std::mem::replace(&mut self.under_way.decided, true)).then(|| {
            let rate = if self.settings.mode == Mode::None { f64::INFINITY } else { self.schedule.rate() };
            self.decision = PaceDecision {
                last: self.last,
                due: self.schedule.left(),
                rate: [self.decision.rate[1], rate],
                limited: self.last.is_some_and(|last| self.limited(last)),
                ..self.decision
            };
            self.decision(now)
        });
        let until = self.schedule.took(pages);
        let UnderWay { scan, began, .. } = &mut self.under_way;
        scan.pages += pages;
        scan.took = until.max(at) - *began;
        (Duration::from_secs_f64(until.max(0.0)), decision)
    }

    /// Whether the CPU limit delayed this scan.
    fn limited(&self, scan: PacedScan) -> bool {
        let PaceSettings { mode, target, max_cpu } = self.settings;
        mode != Mode::None
            && max_cpu > 0.0
            && scan.took > target * LATE
            && scan.cpu > NEAR * max_cpu * scan.took.min(Window::LENGTH)
    }

    /// The scan under way, if pages are left or the CPU limit delays more than were found.
    fn unfinished(&self, now: f64) -> Option<PacedScan> {
        let UnderWay { scan, began, cpu_before, .. } = self.under_way;
        let scan = PacedScan { took: now - began, cpu: self.cpu - cpu_before, ..scan };
        (self.left() > 0 || now < self.held).then_some(scan)
    }

    /// Charges CPU time. Returns how long to wait before more, while `in_hand` is used elsewhere.
    pub fn charge(&mut self, now: Duration, cpu: Duration, in_hand: Duration) -> Duration {
        self.cpu += cpu.as_secs_f64();
        let at = now.as_secs_f64();
        if at >= self.sampled + SAMPLE {
            self.sampled = at;
            self.window.note(at, self.cpu);
        }
        let limited = (self.settings.max_cpu > 0.0).then(|| self.bucket.spend(now, cpu, in_hand));
        self.held = at + limited.unwrap_or_default().as_secs_f64();
        limited.unwrap_or_default()
    }

    /// The last decision, with the present CPU time. The limit binds where it delays the scan under
    /// way, too: a first scan may take long.
    pub fn decision(&self, now: Duration) -> PaceDecision {
        let now = now.as_secs_f64();
        let mut window = self.window.clone();
        window.note(now, self.cpu);
        let limited = self.decision.limited || self.unfinished(now).is_some_and(|scan| self.limited(scan));
        // Mode `none` has a CPU limit too.
        PaceDecision { cpu_percent: [window.percent(), self.settings.max_cpu * 100.0], limited, ..self.decision }
    }

    /// The last scan that had any page to scan.
    pub fn last(&self) -> Option<PacedScan> {
        self.last
    }

    /// The time until which to wait before taking more pages.
    pub fn until(&self) -> Duration {
        Duration::from_secs_f64(self.schedule.clock().max(0.0))
    }

    /// Pages that are due and were not scanned yet.
    pub fn left(&self) -> u64 {
        self.schedule.left()
    }
}

#[cfg(test)]
mod tests;
