//! The governor of a scanner that works in batches.

use std::time::Duration;

use crate::decision::{Cause, Decision};
use crate::kernel::{self, Advisor, Tunables};
use crate::law::{Model, Scan};
use crate::settings::{Mode, Settings, SettingsError};
use crate::window::{Risk, Window, guard};

/// Counters of the scanner at one moment. They never decrease, and may begin anywhere.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Reading {
    /// The moment, from any fixed start.
    pub at: Duration,
    /// CPU time that the scanner has used.
    pub cpu: Duration,
    /// Pages that it has scanned (`pages_scanned`).
    pub pages: u64,
    /// Pages that it has skipped (`pages_skipped`, smart scan).
    pub skipped: u64,
    /// Whole scans (`full_scans`).
    pub scans: u64,
    /// Pages that are known to be candidates; not a counter. Only used until the end of a scan was
    /// seen.
    pub candidates: u64,
    /// Pages of a batch since the last reading.
    pub pages_to_scan: u32,
}

/// The scan under way.
#[derive(Copy, Clone, Debug, Default)]
struct UnderWay {
    sums: Scan,
    /// Skipped pages.
    skipped: f64,
    /// Seconds since the scan began, without the time when the scanner was stopped.
    time: f64,
    /// Seconds that the model expects for the same work.
    expected: f64,
    /// The time in seconds at which it began.
    since: f64,
    /// Whether it was seen from its beginning.
    whole: bool,
}

/// What is known of the scanner's places, which are the pages that a scan scans or skips.
#[derive(Copy, Clone, Debug, Default)]
struct Places {
    /// Those of the last scan.
    last: f64,
    /// The greater number of the last two scans. The end of a fast scan may take places from the
    /// next one, which are not new memory.
    most: f64,
    /// Whether the end of a scan was seen, or candidates were known at the beginning.
    known: bool,
}

/// What pages cost, measured.
#[derive(Copy, Clone, Debug)]
struct Costs {
    /// CPU time in seconds and pages of the last readings; older ones count less.
    late: (f64, f64),
    /// CPU time in seconds, pages and places of the last hundredth of the scan.
    here: (f64, f64, f64),
    /// The most CPU time of a page so far, in seconds.
    worst: f64,
    /// CPU time in seconds of the most expensive places, in this scan or, with decreasing weight,
    /// in the scans before.
    dear: f64,
}

/// A whole scan, in seconds: its duration, its duration without the time when it was stopped, and
/// its CPU time.
struct Ended {
    took: f64,
    time: f64,
    cpu: f64,
}

/// The governor of a scanner that works in batches; the crate's page says how it works.
#[derive(Clone, Debug)]
pub struct Governor {
    settings: Settings,
    /// The least time between batches, in seconds.
    sleep: f64,
    model: Model,
    places: Places,
    advisor: Advisor,
    scan: UnderWay,
    window: Window,
    before: Option<Reading>,
    costs: Costs,
    /// Whether the CPU limit bound at the last decision.
    limited: bool,
}

/// The assumed greatest cost of a page until one has cost more, in seconds: the time to merge a
/// page.
const WORST_COST: f64 = 10e-6;
/// Pages from which on a reading measures the cost of a page.
const ENOUGH_PAGES: f64 = 256.0;
/// The part of a scan that is its beginning, during which the plan is that of the last scan.
const BEGINNING: f64 = 0.02;
/// The part of a scan over which the density and cost of places are averaged.
const HERE: f64 = 0.01;
/// The greatest factor by which the rest of a scan may be faster or slower than the whole.
const CORRECTION: f64 = 4.0;
/// The greatest factor by which a scan counts as slower or faster than expected.
const SLOWER: f64 = 2.0;
/// A relative difference that does not matter within a scan.
const BLUR: f64 = 0.03;
/// The weight that earlier readings keep from one reading to the next.
const FORGET: f64 = 0.9;
/// The part of the limit at which the limiter aims, so that the guard rarely binds.
const AIM: f64 = 0.97;
/// The weight that the cost of the most expensive places keeps from one scan to the next.
const FADE: f64 = 0.9;
/// The greatest factor by which a batch may be longer than the last one while the scan hurries.
const HURRY: f64 = 4.0;
/// The greatest part of the places left that a batch may have while the scan hurries.
const SWEEP: f64 = 1.0 / 3.0;
/// The seconds within which the window's allowance may be used up.
const SOON: f64 = 2.0;
/// The greatest share of a CPU while the allowance is used up.
const BUSIEST: f64 = 0.8;
/// Seconds between two readings while the limit is near.
const NEAR: f64 = 0.1;
/// The most seconds between two readings.
const FAR: f64 = 1.0;

impl Governor {
    /// A governor of a scanner that sleeps for `sleep` after each batch.
    ///
    /// # Errors
    ///
    /// [`SettingsError`]: a setting is out of range.
    pub fn new(settings: Settings, sleep: Duration) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            settings,
            sleep: sleep.as_secs_f64(),
            model: Model::guess(0.0, sleep.as_secs_f64()),
            places: Places::default(),
            advisor: Advisor::default(),
            scan: UnderWay::default(),
            window: Window::default(),
            before: None,
            costs: Costs { late: (0.0, 0.0), here: (0.0, 0.0, 0.0), worst: WORST_COST, dear: 0.0 },
            limited: false,
        })
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes a reading and decides. Call it when [`Decision::check_after`] has passed, or earlier.
    pub fn observe(&mut self, now: &Reading) -> Decision {
        let at = now.at.as_secs_f64();
        self.window.note(at, now.cpu.as_secs_f64());
        let Some(before) = self.before.replace(*now) else {
            self.scan.since = at;
            self.model.work = now.candidates as f64;
            let (last, known) = (self.model.work, now.candidates >= ENOUGH_PAGES as u64);
            self.places = Places { last, most: last, known };
            let wanted = match self.settings.mode {
                // The kernel's advisor begins with its minimum.
                Mode::ScanTime => self.settings.min_pages,
                Mode::Target => self.wanted(now.pages_to_scan),
                Mode::None => now.pages_to_scan,
            };
            return self.decide(now, wanted, Cause::Began { candidates: now.candidates });
        };
        self.add(now, &before);
        let ended = now.scans.saturating_sub(before.scans);
        let ended = if ended > 0 { self.end_scan(at, ended) } else { None };
        let wanted = match (self.settings.mode, &ended) {
            (Mode::Target, _) => self.wanted(now.pages_to_scan),
            (Mode::ScanTime, Some(scan)) => self.step(scan, now.pages_to_scan),
            (Mode::ScanTime | Mode::None, _) => now.pages_to_scan,
        };
        let cause = match ended {
            Some(scan) => Cause::ScanEnded { took: scan.took },
            None if self.settings.mode == Mode::Target && self.places.known && self.overrun(now.pages_to_scan) => {
                Cause::MoreWork { so_far: at - self.scan.since }
            }
            None => Cause::Unchanged,
        };
        self.decide(now, wanted, cause)
    }

    /// Adds the work since the last reading to the scan under way, and to the measured costs.
    fn add(&mut self, now: &Reading, before: &Reading) {
        let time = now.at.saturating_sub(before.at).as_secs_f64();
        let cpu = now.cpu.saturating_sub(before.cpu).as_secs_f64();
        let pages = now.pages.saturating_sub(before.pages) as f64;
        let sums = &mut self.scan.sums;
        // While the scanner is stopped, no time belongs to batches.
        if now.pages_to_scan > 0 {
            self.scan.time += time;
            self.scan.expected += pages * self.model.pause / f64::from(now.pages_to_scan) + cpu;
        }
        // After a change a batch of the old size may still be under way; and while new work
        // appears, every batch has another size.
        let steady = now.pages_to_scan == before.pages_to_scan && sums.pages + self.scan.skipped <= self.places.last;
        if steady && now.pages_to_scan > 0 {
            sums.between += time - cpu;
            sums.batches += pages / f64::from(now.pages_to_scan);
        }
        sums.cpu += cpu;
        sums.pages += pages;
        let skipped = now.skipped.saturating_sub(before.skipped) as f64;
        self.scan.skipped += skipped;
        let (places, costs) = (self.places.last, &mut self.costs);
        let keep = (-(pages + skipped) / (HERE * places).max(1.0)).exp();
        let (here_cpu, here_pages, here_places) = costs.here;
        costs.here = (here_cpu * keep + cpu, here_pages * keep + pages, here_places * keep + pages + skipped);
        if costs.here.2 >= HERE * places / 2.0 {
            costs.dear = costs.dear.max(costs.here.0 / costs.here.2.max(1.0));
        }
        costs.late = (costs.late.0 * FORGET + cpu, costs.late.1 * FORGET + pages);
        // Skipping pages costs CPU time too, which is not part of the cost of a scanned page.
        if pages >= ENOUGH_PAGES && now.skipped == before.skipped {
            costs.worst = costs.worst.max(cpu / pages);
        }
    }

    /// Ends the scan under way; `ended` scans have ended since the last reading. Returns its
    /// figures if it was seen from its beginning.
    fn end_scan(&mut self, at: f64, ended: u64) -> Option<Ended> {
        let next = UnderWay { since: at, whole: true, ..UnderWay::default() };
        let scan = std::mem::replace(&mut self.scan, next);
        self.costs.dear *= FADE;
        let known = std::mem::replace(&mut self.places.known, true);
        if !scan.whole {
            // The end of a scan shows the cost of a page, but only a lower bound of the work.
            let work = self.model.work;
            self.model.learn(&scan.sums);
            if known {
                self.model.work = self.model.work.max(work);
            }
            self.places.last = self.places.last.max(scan.sums.pages + scan.skipped);
            self.places.most = self.places.last;
            return None;
        }
        let each = ended as f64;
        let sums = Scan { cpu: scan.sums.cpu / each, pages: scan.sums.pages / each, ..scan.sums };
        self.model.learn(&sums);
        let before = std::mem::replace(&mut self.places.last, (scan.sums.pages + scan.skipped) / each);
        self.places.most = before.max(self.places.last);
        Some(Ended { took: (at - scan.since) / each, time: scan.time / each, cpu: sums.cpu })
    }

    /// Whether the scan has more places than the last ones, so that their number is unknown.
    /// Readings are late by about a batch.
    fn overrun(&self, in_force: u32) -> bool {
        self.scan.sums.pages + self.scan.skipped > self.places.most * (1.0 + BLUR) + 2.0 * f64::from(in_force)
    }

    /// Pages for the target.
    fn wanted(&self, in_force: u32) -> u32 {
        // New memory has to be scanned once in any case: as fast as the CPU limit allows.
        let new = !self.places.known || self.overrun(in_force);
        let pages = if new { f64::INFINITY } else { self.plan(f64::from(in_force)) };
        // Rounded up: a scan that ends a moment early is on time. The cast saturates.
        (pages.ceil() as u32).clamp(self.settings.min_pages, self.settings.max_pages)
    }

    /// The pages of a batch within a scan: see [`law`](crate::law).
    fn plan(&self, in_force: f64) -> f64 {
        let target = self.settings.target.as_secs_f64();
        let UnderWay { sums, skipped, time, expected, .. } = &self.scan;
        let places = sums.pages + skipped;
        if places < self.places.last * BEGINNING {
            return self.model.pages_for(target);
        }
        // Slower than expected so far: other programs use the CPU too.
        let slower = if *expected > 0.0 { (time / expected).clamp(1.0 / SLOWER, SLOWER) } else { 1.0 };
        let (here_cpu, here_pages, here_places) = self.costs.here;
        let (density, cost) = (here_pages / here_places.max(1.0), slower * here_cpu / here_places.max(1.0));
        let model = |places| Model { work: places, cost, pause: slower * self.model.pause, ..self.model };
        // Places of a batch.
        let whole = model(self.places.last).pages_for(target);
        let left = (self.places.last - places).max(0.0);
        let rest = model(left).pages_for(target - time).clamp(whole / CORRECTION, whole * CORRECTION);
        // If all places left were as expensive as the most expensive ones, the time would not
        // suffice: hurry until it does. But no batch may be so long that it covers much of the
        // places left.
        let dear = slower * self.costs.dear;
        let ahead = left - self.share() * (target - time) / dear;
        let hurry = if dear > 0.0 { ahead.min(left * SWEEP).min(HURRY * in_force / density) } else { 0.0 };
        let pages = density * rest.max(hurry);
        // Small changes are not worth it.
        if (pages / in_force - 1.0).abs() <= BLUR { in_force } else { pages }
    }

    /// The share of a CPU that may be used now. CPU time that was not used recently may be used up
    /// soon, so that a scan with many pages to merge ends in time. It may not be used up at once: a
    /// long batch that begins at expensive pages is noticed too late, after it has covered the
    /// cheap ones behind them.
    fn share(&self) -> f64 {
        let limit = self.limit();
        (self.window.allowance(limit) / SOON).min(BUSIEST).max(limit * AIM)
    }

    /// The CPU limit, as a share of a CPU, less what a page a batch takes: no batch has fewer.
    fn limit(&self) -> f64 {
        let limit = self.settings.max_cpu / 100.0;
        limit - (self.costs.worst / self.sleep).min(limit / 2.0)
    }

    /// The kernel's advice after a whole scan.
    fn step(&mut self, scan: &Ended, pages: u32) -> u32 {
        let tunables = Tunables {
            target_scan_time: self.settings.target.as_secs(),
            max_cpu: self.settings.max_cpu as u32,
            max_pages_to_scan: u64::from(self.settings.max_pages),
        };
        let seconds = kernel::scan_seconds((scan.time * 1e3) as u64);
        self.advisor.step(&tunables, pages, seconds, kernel::cpu_percent((scan.cpu * 1e9) as u64, seconds))
    }

    /// The lesser of the wanted pages and those that the CPU limit allows, and the time of the next
    /// reading.
    fn decide(&mut self, now: &Reading, wanted: u32, cause: Cause) -> Decision {
        if self.settings.mode != Mode::Target {
            return Decision { pages: wanted, ..self.as_is(now, cause) };
        }
        let limit = self.limit();
        let aim = self.share();
        let risk = Risk {
            allowance: self.window.allowance(limit),
            under_way: f64::from(now.pages_to_scan) * self.costs.worst,
            worst_cost: self.costs.worst,
            pause: self.sleep,
        };
        let (cpu, pages) = self.costs.late;
        let cost = if pages >= ENOUGH_PAGES { cpu / pages } else { Model::FIRST_COST };
        let average = if aim < 1.0 { self.model.pause * aim / (1.0 - aim) / cost } else { f64::INFINITY };
        let far = if f64::from(wanted) <= guard(&risk, FAR) { FAR } else { NEAR };
        let allowed = average.min(guard(&risk, far));
        // With 0 ksmd would scan nothing, for ever if this program is killed now.
        let pages = wanted.min(allowed as u32).max(1);
        let limited = pages < wanted;
        let cause = match (std::mem::replace(&mut self.limited, limited), limited, cause) {
            (_, true, Cause::Unchanged) => Cause::CpuLimit,
            (true, false, Cause::Unchanged) => Cause::CpuLimitOver,
            _ => cause,
        };
        let bound = match pages {
            _ if limited => Some("all that the CPU limit allows"),
            pages if pages == self.settings.min_pages => Some("the minimum"),
            pages if pages == self.settings.max_pages => Some("the maximum"),
            _ => None,
        };
        let check_after = self.check_after(pages).min(far);
        Decision { pages, bound, check_after: Duration::from_secs_f64(check_after), ..self.as_is(now, cause) }
    }

    /// Seconds until the next reading. The end of a scan is seen to within a thousandth of the
    /// target when it is near, and a hundredth in any case.
    fn check_after(&self, pages: u32) -> f64 {
        let target = self.settings.target.as_secs_f64();
        let (least, most) = ((target / 1000.0).clamp(0.002, FAR), (target / 100.0).clamp(0.005, FAR));
        let left = (self.places.last - self.scan.sums.pages - self.scan.skipped).max(0.0);
        let (_, here_pages, here_places) = self.costs.here;
        let density = if here_places > 0.0 { here_pages / here_places } else { 1.0 };
        let expected = Model { work: density * left, ..self.model }.scan_time(f64::from(pages.max(1)));
        let late = self.scan.time - target;
        (expected / 2.0).max(late / 20.0).clamp(least, most)
    }

    /// A decision that changes nothing.
    fn as_is(&self, now: &Reading, cause: Cause) -> Decision {
        Decision {
            pages: now.pages_to_scan,
            before: now.pages_to_scan,
            check_after: Duration::from_secs_f64(self.check_after(now.pages_to_scan)),
            cause,
            cpu_percent: self.window.percent(),
            max_cpu: self.settings.max_cpu,
            target: self.settings.target.as_secs_f64(),
            bound: None,
        }
    }
}
