//! The control law of mode `target`: a model of the scanner, fitted to the last whole scan and
//! solved for the target.
//!
//! A scan of `work` pages in batches of `p` is `work / p` batches; each page costs `cost` of CPU
//! time, each batch `pause` of everything else (sleeping, and waiting for a CPU). So
//!
//! ```text
//! scan time = work · pause / p + work · cost        and for a scan time of `target`:
//! p         = work · pause / (target − work · cost)
//! ```
//!
//! One scan gives all three: its pages are `work`, its CPU time over its pages is `cost`, what
//! remains of its time over its batches is `pause`.
//!
//! *Within a scan.* The kernel passes over pages that were unique several times (smart scan), many
//! of them in the same scans, so that one scan's work may be half of the last one's, and one
//! program's half of its neighbour's. The *places* that a scan comes by, scanned
//! or passed over, stay the same: those that are left, over the time that is left, are the speed to
//! keep. How many of them are scanned and what they cost is taken from the last hundredth of the
//! scan:
//!
//! ```text
//! places a batch = left · pause / (time left − left · cost a place)         p = places a batch · pages a place
//! ```
//!
//! no less than a quarter and no more than four times that of the whole. What is left might all be
//! dear, though, while what came so far was cheap. So until
//!
//! ```text
//! left · cost of the dearest places ≤ time left · share of a CPU that may be used
//! ```
//!
//! a scan is quicker than that, and no further than to there. A scan that has come by more places
//! than the last has met something new, which must be looked at in any case: from there on it is as
//! fast as the CPU limit allows.
//!
//! A wrong guess of how the pause depends on `p` makes the next guess better, not worse: see
//! `docs/design/governor.md`. Fractions stay fractions: nothing is truncated but the pages, at the
//! end.

/// A scanner, as one scan showed it.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Model {
    /// Pages of a whole scan.
    pub work: f64,
    /// CPU time of a page, in seconds.
    pub cost: f64,
    /// Time between two batches, in seconds.
    pub pause: f64,
    /// How many batches the pause is known from.
    pub evidence: f64,
}

/// Sums over a whole scan.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct Scan {
    /// CPU time, in seconds.
    pub cpu: f64,
    /// Pages scanned.
    pub pages: f64,
    /// What of its time was between batches, in seconds …
    pub between: f64,
    /// … and how many batches there were in that time: pages over pages in a batch.
    pub batches: f64,
}

/// What a guess of the pause counts for, in batches.
const GUESS: f64 = 10.0;
/// How much the newest scan counts for the pause, if it had so many batches.
const NEWEST: f64 = 0.7;
const ENOUGH_BATCHES: f64 = 100.0;

impl Model {
    /// CPU time of a page until one was seen: about what it takes to look at one that is known and
    /// has not changed.
    pub const FIRST_COST: f64 = 5e-7;

    /// Before the first whole scan. `sleep`: how long the scanner says that it sleeps, in seconds.
    pub fn guess(work: f64, sleep: f64) -> Self {
        Self { work, cost: Self::FIRST_COST, pause: sleep, evidence: GUESS }
    }

    /// Fits the model to a whole scan.
    pub fn learn(&mut self, scan: &Scan) {
        self.work = scan.pages;
        if scan.pages > 0.0 {
            self.cost = scan.cpu / scan.pages;
        }
        if scan.batches > 0.0 {
            // A mean at first, then one that forgets.
            let mean = scan.batches / (self.evidence + scan.batches);
            let weight = mean.max(NEWEST * (scan.batches / ENOUGH_BATCHES).min(1.0));
            self.pause += weight * ((scan.between / scan.batches).max(0.0) - self.pause);
            self.evidence += scan.batches;
        }
    }

    /// The pages of a batch for which a scan takes `target` seconds: infinitely many if the CPU
    /// time alone takes that long.
    pub fn pages_for(&self, target: f64) -> f64 {
        let left = target - self.work * self.cost;
        if left > 0.0 { self.work * self.pause / left } else { f64::INFINITY }
    }

    /// The scan time with batches of `pages`, in seconds.
    pub fn scan_time(&self, pages: f64) -> f64 {
        self.work * (self.pause / pages + self.cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_solution_takes_the_target() {
        let model = Model { work: 500_000.0, cost: 4e-7, pause: 0.024, evidence: 0.0 };
        for target in [0.5, 5.0, 200.0] {
            let pages = model.pages_for(target);
            assert!((model.scan_time(pages) / target - 1.0).abs() < 1e-12, "{pages}");
        }
        assert_eq!(model.pages_for(0.19), f64::INFINITY);
        assert_eq!(Model { work: 0.0, ..model }.pages_for(5.0), 0.0);
    }

    #[test]
    fn one_scan_is_enough() {
        let truth = Model { work: 123_456.0, cost: 7e-7, pause: 0.022, evidence: 0.0 };
        let pages = 700.0;
        let scan = Scan {
            cpu: truth.work * truth.cost,
            pages: truth.work,
            between: truth.work / pages * truth.pause,
            batches: truth.work / pages,
        };
        let mut model = Model::guess(10.0, 0.02);
        model.learn(&scan);
        // The guess was a tenth off, and counts for ten batches of 186.
        assert!((model.pages_for(5.0) / truth.pages_for(5.0) - 1.0).abs() < 0.006);
        // An empty scan changes the work and nothing else.
        model.learn(&Scan { between: 0.02, ..Scan::default() });
        assert_eq!((model.work, model.cost), (0.0, scan.cpu / scan.pages));
    }
}
