//! The governor of a scanner that works in batches.

use std::time::Duration;

use crate::decision::{Cause, Decision};
use crate::kernel::{self, Advisor, Tunables};
use crate::law::{Model, Scan};
use crate::settings::{Mode, Settings, SettingsError};
use crate::window::{Risk, Window, guard};

/// Counters of the scanner at one moment. They only grow; where they began does not matter.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Reading {
    /// The moment, from any fixed start.
    pub at: Duration,
    /// CPU time that the scanner has used.
    pub cpu: Duration,
    /// Pages that it has scanned (`pages_scanned`).
    pub pages: u64,
    /// Pages that it has passed over without a look (`pages_skipped`, smart scan).
    pub skipped: u64,
    /// Whole scans (`full_scans`).
    pub scans: u64,
    /// Pages that are known to be candidates; not a counter. Used until the end of a scan was seen.
    pub candidates: u64,
    /// Pages of a batch that have been in force since the last reading.
    pub pages_to_scan: u32,
}

/// The scan under way.
#[derive(Copy, Clone, Debug)]
struct UnderWay {
    sums: Scan,
    /// Pages passed over.
    skipped: f64,
    /// Time, less that when the scanner was stopped …
    time: f64,
    /// … and how long that should have taken, by the model.
    expected: f64,
    /// When it began.
    since: f64,
    /// It was seen from its beginning.
    whole: bool,
}

impl UnderWay {
    fn new(since: f64, whole: bool) -> Self {
        Self { sums: Scan::default(), skipped: 0.0, time: 0.0, expected: 0.0, since, whole }
    }
}

/// A whole scan, in seconds: how long it took, that without the time when it was stopped, and CPU
/// time.
struct Ended {
    took: f64,
    time: f64,
    cpu: f64,
}

/// See the crate.
#[derive(Clone, Debug)]
pub struct Governor {
    settings: Settings,
    /// The least time between batches, in seconds.
    sleep: f64,
    model: Model,
    /// Pages that the last scan came by, scanned or passed over.
    places: f64,
    /// The same of the last two, whichever were more: what the end of a fast scan takes from the
    /// next one is no news.
    most_places: f64,
    /// The end of a scan was seen, or candidates were known at the beginning.
    known: bool,
    advisor: Advisor,
    scan: UnderWay,
    window: Window,
    before: Option<Reading>,
    /// CPU time, in seconds, and pages of late.
    late: (f64, f64),
    /// The places that the scan came by last: CPU time, pages and places.
    here: (f64, f64, f64),
    /// CPU time of a page, the most ever seen, in seconds.
    worst_cost: f64,
    /// CPU time of a place where places are dearest, in this scan or, with less and less weight, in
    /// those before; in seconds.
    dear: f64,
    /// The last decision was the CPU limit's.
    limited: bool,
}

/// The most that a page is taken to cost until one has cost more, in seconds: merging one takes
/// this.
const WORST_COST: f64 = 10e-6;
/// So many pages tell what a page costs.
const ENOUGH_PAGES: f64 = 256.0;
/// So much of a scan is its beginning, which is taken to go on as the last scan did.
const BEGINNING: f64 = 0.02;
/// So much of a scan is known of the places that it has come to.
const HERE: f64 = 0.01;
/// The most by which the rest of a scan may be faster or slower than the whole.
const CORRECTION: f64 = 4.0;
/// The most by which a scan may be taken to be slower or faster than expected.
const SLOWER: f64 = 2.0;
/// What is no difference within a scan.
const BLUR: f64 = 0.03;
/// How fast what was of late is forgotten, from one reading to the next.
const FORGET: f64 = 0.9;
/// The part of the limit at which the limiter aims, so that the guard seldom has to step in.
const AIM: f64 = 0.97;
/// What is known of the dearest places counts for so much in the next scan.
const FADE: f64 = 0.9;
/// So many times as long a batch may be as the one before it while there is no time to lose.
const HURRY: f64 = 4.0;
/// … and so much of what is left.
const SWEEP: f64 = 1.0 / 3.0;
/// Within so many seconds what the window allows may be used up, with so much of a CPU at most.
const SOON: f64 = 2.0;
const BUSIEST: f64 = 0.8;
/// How often to look while the limit is near, and at most, in seconds.
const NEAR: f64 = 0.1;
const FAR: f64 = 1.0;

impl Governor {
    /// A governor of a scanner that sleeps for `sleep` after each batch.
    ///
    /// # Errors
    ///
    /// Settings out of range.
    pub fn new(settings: Settings, sleep: Duration) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            settings,
            sleep: sleep.as_secs_f64(),
            model: Model::guess(0.0, sleep.as_secs_f64()),
            places: 0.0,
            most_places: 0.0,
            known: false,
            advisor: Advisor::default(),
            scan: UnderWay::new(0.0, false),
            window: Window::default(),
            before: None,
            late: (0.0, 0.0),
            here: (0.0, 0.0, 0.0),
            worst_cost: WORST_COST,
            dear: 0.0,
            limited: false,
        })
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes a reading; to be called when [`Decision::check_after`] has passed, or sooner.
    pub fn observe(&mut self, now: &Reading) -> Decision {
        let at = now.at.as_secs_f64();
        self.window.note(at, now.cpu.as_secs_f64());
        let Some(before) = self.before.replace(*now) else {
            self.scan.since = at;
            self.model.work = now.candidates as f64;
            self.places = self.model.work;
            self.most_places = self.places;
            self.known = now.candidates >= ENOUGH_PAGES as u64;
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
            None if self.settings.mode == Mode::Target && self.known && self.overrun(now.pages_to_scan) => {
                Cause::MoreWork { so_far: at - self.scan.since }
            }
            None => Cause::Unchanged,
        };
        self.decide(now, wanted, cause)
    }

    /// Adds what happened since the last reading to the scan under way, and to what is known of
    /// costs.
    fn add(&mut self, now: &Reading, before: &Reading) {
        let time = now.at.saturating_sub(before.at).as_secs_f64();
        let cpu = now.cpu.saturating_sub(before.cpu).as_secs_f64();
        let pages = now.pages.saturating_sub(before.pages) as f64;
        let sums = &mut self.scan.sums;
        // While it was stopped, time has nothing to do with batches.
        if now.pages_to_scan > 0 {
            self.scan.time += time;
            self.scan.expected += pages * self.model.pause / f64::from(now.pages_to_scan) + cpu;
        }
        // After a change a batch of the old size may still be under way; and while more work shows,
        // every batch changes.
        let steady = now.pages_to_scan == before.pages_to_scan && sums.pages + self.scan.skipped <= self.places;
        if steady && now.pages_to_scan > 0 {
            sums.between += time - cpu;
            sums.batches += pages / f64::from(now.pages_to_scan);
        }
        sums.cpu += cpu;
        sums.pages += pages;
        let skipped = now.skipped.saturating_sub(before.skipped) as f64;
        self.scan.skipped += skipped;
        let keep = (-(pages + skipped) / (HERE * self.places).max(1.0)).exp();
        let (here_cpu, here_pages, here_places) = self.here;
        self.here = (here_cpu * keep + cpu, here_pages * keep + pages, here_places * keep + pages + skipped);
        if self.here.2 >= HERE * self.places / 2.0 {
            self.dear = self.dear.max(self.here.0 / self.here.2.max(1.0));
        }
        self.late.0 = self.late.0 * FORGET + cpu;
        self.late.1 = self.late.1 * FORGET + pages;
        if pages >= ENOUGH_PAGES {
            let cost = cpu / pages;
            // Passing over pages costs too, and is no part of what a scanned page costs.
            if now.skipped == before.skipped {
                self.worst_cost = self.worst_cost.max(cost);
            }
        }
    }

    /// A scan has ended, or several since the last reading. What is left of it, had it been seen
    /// from its beginning.
    fn end_scan(&mut self, at: f64, ended: u64) -> Option<Ended> {
        let scan = std::mem::replace(&mut self.scan, UnderWay::new(at, true));
        self.dear *= FADE;
        let known = std::mem::replace(&mut self.known, true);
        if !scan.whole {
            // The end of a scan tells what a page costs; of the work it tells the least that it can
            // be.
            let work = self.model.work;
            self.model.learn(&scan.sums);
            if known {
                self.model.work = self.model.work.max(work);
            }
            self.places = self.places.max(scan.sums.pages + scan.skipped);
            self.most_places = self.places;
            return None;
        }
        let each = ended as f64;
        let sums = Scan { cpu: scan.sums.cpu / each, pages: scan.sums.pages / each, ..scan.sums };
        self.model.learn(&sums);
        let before = std::mem::replace(&mut self.places, (scan.sums.pages + scan.skipped) / each);
        self.most_places = before.max(self.places);
        Some(Ended { took: (at - scan.since) / each, time: scan.time / each, cpu: sums.cpu })
    }

    /// More pages than in the last scan, so that there is no telling how many more. Readings are
    /// late by a batch or so.
    fn overrun(&self, in_force: u32) -> bool {
        self.scan.sums.pages + self.scan.skipped > self.most_places * (1.0 + BLUR) + 2.0 * f64::from(in_force)
    }

    /// Pages for the target.
    fn wanted(&self, in_force: u32) -> u32 {
        // What is new has to be looked at once in any case: the sooner the better, within the CPU
        // limit.
        let new = !self.known || self.overrun(in_force);
        let pages = if new { f64::INFINITY } else { self.plan(f64::from(in_force)) };
        // Rounded up: a scan that ends a moment early is on time. The cast saturates.
        (pages.ceil() as u32).clamp(self.settings.min_pages, self.settings.max_pages)
    }

    /// See [`law`](crate::law), "within a scan".
    fn plan(&self, in_force: f64) -> f64 {
        let target = self.settings.target.as_secs_f64();
        let UnderWay { sums, skipped, time, expected, .. } = &self.scan;
        let places = sums.pages + skipped;
        if places < self.places * BEGINNING {
            return self.model.pages_for(target);
        }
        // Slower than expected so far: others want the CPU too.
        let slower = if *expected > 0.0 { (time / expected).clamp(1.0 / SLOWER, SLOWER) } else { 1.0 };
        let (here_cpu, here_pages, here_places) = self.here;
        let (density, cost) = (here_pages / here_places.max(1.0), slower * here_cpu / here_places.max(1.0));
        let model = |places| Model { work: places, cost, pause: slower * self.model.pause, ..self.model };
        // Places of a batch.
        let whole = model(self.places).pages_for(target);
        let left = (self.places - places).max(0.0);
        let rest = model(left).pages_for(target - time).clamp(whole / CORRECTION, whole * CORRECTION);
        // Were all that is left as dear as it can be, there would be no time for it: quick, until
        // there is. Never with so long a batch that it could sweep over much of what is left.
        let dear = slower * self.dear;
        let ahead = left - self.share() * (target - time) / dear;
        let hurry = if dear > 0.0 { ahead.min(left * SWEEP).min(HURRY * in_force / density) } else { 0.0 };
        let pages = density * rest.max(hurry);
        // A change has to be worth it.
        if (pages / in_force - 1.0).abs() <= BLUR { in_force } else { pages }
    }

    /// The share of a CPU that may be used now. What was not used of late may be used up soon: a
    /// scan that has much to merge is done in time. Longer batches would be known of too late:
    /// one that begins where pages are dear sweeps over the cheap ones behind them.
    fn share(&self) -> f64 {
        let limit = self.settings.max_cpu / 100.0;
        (self.window.allowance(limit) / SOON).min(BUSIEST).max(limit * AIM)
    }

    fn step(&mut self, scan: &Ended, pages: u32) -> u32 {
        let tunables = Tunables {
            target_scan_time: self.settings.target.as_secs(),
            max_cpu: self.settings.max_cpu as u32,
            max_pages_to_scan: u64::from(self.settings.max_pages),
        };
        let seconds = kernel::scan_seconds((scan.time * 1e3) as u64);
        self.advisor.step(&tunables, pages, seconds, kernel::cpu_percent((scan.cpu * 1e9) as u64, seconds))
    }

    /// The least of what is wanted and what the CPU limit allows, and when to look again.
    fn decide(&mut self, now: &Reading, wanted: u32, cause: Cause) -> Decision {
        if self.settings.mode != Mode::Target {
            return Decision { pages: wanted, ..self.as_is(now, cause) };
        }
        let limit = self.settings.max_cpu / 100.0;
        let aim = self.share();
        let risk = Risk {
            allowance: self.window.allowance(limit),
            under_way: f64::from(now.pages_to_scan) * self.worst_cost,
            worst_cost: self.worst_cost,
            pause: self.sleep,
        };
        let cost = if self.late.1 >= ENOUGH_PAGES { self.late.0 / self.late.1 } else { Model::FIRST_COST };
        let average = if aim < 1.0 { self.model.pause * aim / (1.0 - aim) / cost } else { f64::INFINITY };
        let far = if f64::from(wanted) <= guard(&risk, FAR) { FAR } else { NEAR };
        let allowed = average.min(guard(&risk, far));
        let pages = wanted.min(allowed as u32);
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

    /// The end of a scan is to be seen to within a thousandth of the target when it is near, and a
    /// hundredth in any case.
    fn check_after(&self, pages: u32) -> f64 {
        let target = self.settings.target.as_secs_f64();
        let (least, most) = ((target / 1000.0).clamp(0.002, FAR), (target / 100.0).clamp(0.005, FAR));
        let left = (self.places - self.scan.sums.pages - self.scan.skipped).max(0.0);
        let (_, here_pages, here_places) = self.here;
        let density = if here_places > 0.0 { here_pages / here_places } else { 1.0 };
        let expected = Model { work: density * left, ..self.model }.scan_time(f64::from(pages.max(1)));
        let late = self.scan.time - target;
        (expected / 2.0).max(late / 20.0).clamp(least, most)
    }

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
