//! A scanner that works in batches and sleeps between them, as ksmd does, in simulated time.

use std::time::Duration;

use crate::{Decision, Governor, Reading, Settings};

/// The scanner. Times are in seconds.
#[derive(Clone, Debug)]
pub(crate) struct Plant {
    /// The pieces of a scan: their pages, and the CPU time of each page.
    pub(crate) content: Vec<(u64, f64)>,
    /// The part of each piece that is scanned only in every n-th scan (smart scan), and n.
    pub(crate) seldom: (f64, u64),
    /// Whether each piece is scanned in other scans than the one before.
    pub(crate) staggered: bool,
    /// The sleep between batches.
    pub(crate) sleep: f64,
    /// Sleeps are longer by up to this part, in a cycle.
    pub(crate) jitter: f64,
    /// Seconds that pass for a second of CPU time; 2 if another program takes half of the CPU.
    pub(crate) contention: f64,
    /// Pages of a batch.
    pub(crate) pages_to_scan: u32,
    at: f64,
    cpu: f64,
    scanned: u64,
    skipped: f64,
    scans: u64,
    /// The place of the scan: a piece of the content, and pages in it.
    place: (usize, u64),
    /// Pages left in the batch, or the time until which the scanner sleeps.
    batch: u32,
    wake: f64,
    /// CPU time at every moment at which it began or ceased to run.
    pub(crate) trace: Vec<(f64, f64)>,
    /// The times at which scans ended.
    pub(crate) ends: Vec<f64>,
    random: u64,
}

impl Plant {
    pub(crate) fn new(content: Vec<(u64, f64)>, sleep: f64, pages_to_scan: u32) -> Self {
        Self {
            content,
            seldom: (0.0, 1),
            staggered: false,
            sleep,
            jitter: 0.0,
            contention: 1.0,
            pages_to_scan,
            at: 0.0,
            cpu: 0.0,
            scanned: 0,
            skipped: 0.0,
            scans: 0,
            place: (0, 0),
            batch: 0,
            wake: 0.0,
            trace: vec![(0.0, 0.0)],
            ends: Vec::new(),
            random: 1,
        }
    }

    fn sleep_from(&mut self, at: f64) {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let part = (self.random >> 33) as f64 / (1u64 << 31) as f64;
        self.batch = 0;
        self.wake = at + self.sleep * (1.0 + part * self.jitter);
    }

    /// Lets time pass until `to`.
    pub(crate) fn run(&mut self, to: f64) {
        while self.at < to {
            if self.batch == 0 {
                if self.wake > to {
                    break;
                }
                self.at = self.at.max(self.wake);
                self.batch = self.pages_to_scan;
                self.trace.push((self.at, self.cpu));
                if self.batch == 0 {
                    self.sleep_from(self.at);
                    continue;
                }
            }
            let Some(&(pages, cost)) = self.content.get(self.place.0) else {
                self.place = (0, 0);
                self.scans += 1;
                self.ends.push(self.at);
                self.sleep_from(self.at);
                continue;
            };
            let time = cost * self.contention;
            // Skipped evenly, and at no cost.
            let (part, every) = self.seldom;
            let scan = self.scans + if self.staggered { self.place.0 as u64 } else { 0 };
            let part = if scan.is_multiple_of(every) { 0.0 } else { part };
            let left = ((pages as f64 * (1.0 - part)).ceil() as u64).saturating_sub(self.place.1);
            let fit = ((to - self.at) / time).ceil() as u64;
            let now = left.min(u64::from(self.batch)).min(fit.max(1));
            self.place.1 += now;
            if now == left {
                self.place = (self.place.0 + 1, 0);
            }
            self.scanned += now;
            self.skipped += now as f64 * part / (1.0 - part);
            self.at += now as f64 * time;
            self.cpu += now as f64 * cost;
            self.trace.push((self.at, self.cpu));
            self.batch -= now as u32;
            if self.batch == 0 && self.place.0 < self.content.len() {
                self.sleep_from(self.at);
            }
        }
        // Pages are not split: the scanner may have run a moment longer.
        self.at = self.at.max(to);
    }

    pub(crate) fn reading(&self) -> Reading {
        Reading {
            at: Duration::from_secs_f64(self.at),
            cpu: Duration::from_secs_f64(self.cpu),
            pages: self.scanned,
            skipped: self.skipped as u64,
            scans: self.scans,
            candidates: 0,
            pages_to_scan: self.pages_to_scan,
        }
    }

    /// Runs the scanner under the governor until `to`. Returns all decisions.
    pub(crate) fn govern(&mut self, governor: &mut Governor, to: f64) -> Vec<Decision> {
        let mut decisions = Vec::new();
        while self.at < to {
            let decision = governor.observe(&self.reading());
            self.pages_to_scan = decision.pages;
            decisions.push(decision);
            let wait = decision.check_after.as_secs_f64();
            assert!(wait > 0.0 && wait <= 86_400.0, "{decision:?}");
            self.run(self.at + wait);
        }
        decisions
    }

    /// The durations of the scans that ended after `from`, without the one under way then.
    pub(crate) fn scan_times(&self, from: f64) -> Vec<f64> {
        let ends: Vec<f64> = self.ends.iter().copied().filter(|&end| end > from).collect();
        ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// The most CPU time in any window of this length, in seconds.
    pub(crate) fn most_cpu(&self, length: f64) -> f64 {
        let used_by = |at: f64| {
            let next = self.trace.partition_point(|&(time, _)| time <= at);
            match (self.trace.get(next.wrapping_sub(1)), self.trace.get(next)) {
                (Some(&(t0, c0)), Some(&(t1, c1))) => c0 + (c1 - c0) * (at - t0) / (t1 - t0),
                (Some(&(_, c0)), None) => c0,
                (None, _) => 0.0,
            }
        };
        // The greatest window ends where the scanner ceases to run, or begins where it begins.
        let ending = self.trace.iter().map(|&(at, cpu)| cpu - used_by(at - length));
        let beginning = self.trace.iter().map(|&(at, cpu)| used_by(at + length) - cpu);
        ending.chain(beginning).fold(0.0, f64::max)
    }
}

pub(crate) fn governor(settings: Settings, sleep: f64) -> Governor {
    Governor::new(settings, Duration::from_secs_f64(sleep)).unwrap()
}

#[test]
fn the_plant_scans_as_reckoned() {
    let mut plant = Plant::new(vec![(10_000, 1e-6), (10_000, 3e-6)], 0.02, 1000);
    plant.run(10.0);
    let times = plant.scan_times(0.0);
    assert!(times.iter().all(|t| (t - (20.0 * 0.02 + 0.04)).abs() < 1e-6), "{times:?}");
    let scans = 10.0 / 0.44;
    assert!((plant.most_cpu(10.0) - scans * 0.04).abs() < 0.01, "{}", plant.most_cpu(10.0));
}
