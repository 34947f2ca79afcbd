//! The control law of mode `target`: a model of the scanner, fitted to the last whole scan and
//! solved for the target.
//!
//! A scan of `work` pages in batches of `p` pages has `work / p` batches. Each page costs `cost` of
//! CPU time. Each batch costs `pause` of other time: sleeping, and waiting for a CPU. Therefore
//!
//! ```text
//! scan time = work · pause / p + work · cost        and for a scan time of `target`:
//! p         = work · pause / (target − work · cost)
//! ```
//!
//! One scan gives all three: its number of pages is `work`; its CPU time divided by its pages is
//! `cost`; the rest of its time divided by its batches is `pause`.
//!
//! *Within a scan.* The kernel skips pages that were unique several times (smart scan), many of
//! them in the same scans. So the work of a scan may be half that of the last one, and that of a
//! program half that of its neighbour. The *places* of a scan, which are its scanned and skipped
//! pages, stay the same: the places left divided by the time left are the speed to keep. The part
//! of them that is scanned, and their cost, are taken from the last hundredth of the scan:
//!
//! ```text
//! places in a batch = left · pause / (time left − left · cost of a place)
//! p                 = places in a batch · scanned pages in a place
//! ```
//!
//! but at least a quarter and at most four times that of the whole scan. The places left might all
//! be expensive, though, while the places so far were cheap. Therefore, until
//!
//! ```text
//! left · cost of the most expensive places ≤ time left · share of a CPU that may be used
//! ```
//!
//! a scan is faster than that. A scan with more places than the last one has met new memory, which
//! must be scanned in any case: from there on it is as fast as the CPU limit allows.
//!
//! A wrong estimate of how the pause depends on `p` makes the next estimate better, not worse: see
//! `docs/design/governor.md`. Only the final number of pages is rounded.

/// The model of a scanner, fitted to a whole scan.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Model {
    /// Pages of a whole scan.
    pub work: f64,
    /// CPU time of a page, in seconds.
    pub cost: f64,
    /// Time between two batches, in seconds.
    pub pause: f64,
    /// The number of batches that the pause was measured from.
    pub evidence: f64,
}

/// Sums over a whole scan.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct Scan {
    /// CPU time, in seconds.
    pub cpu: f64,
    /// Pages scanned.
    pub pages: f64,
    /// The time between batches, in seconds.
    pub between: f64,
    /// The number of batches in that time: pages divided by pages in a batch.
    pub batches: f64,
}

/// The weight of the initial estimate of the pause, in batches.
const GUESS: f64 = 10.0;
/// The weight of the newest scan in the pause, if the scan had [`ENOUGH_BATCHES`].
const NEWEST: f64 = 0.7;
/// Batches from which on a scan measures the pause well enough.
const ENOUGH_BATCHES: f64 = 100.0;

impl Model {
    /// CPU time of a page in seconds until one was measured: about the time to look at a known page
    /// that has not changed.
    pub const FIRST_COST: f64 = 5e-7;

    /// The model before the first whole scan. `sleep` is the scanner's configured sleep, in
    /// seconds.
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
            // A plain mean at first, then one that forgets old scans.
            let mean = scan.batches / (self.evidence + scan.batches);
            let weight = mean.max(NEWEST * (scan.batches / ENOUGH_BATCHES).min(1.0));
            self.pause += weight * ((scan.between / scan.batches).max(0.0) - self.pause);
            self.evidence += scan.batches;
        }
    }

    /// The pages of a batch for which a scan takes `target` seconds; infinite if the CPU time alone
    /// takes that long.
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
        // The initial pause was a tenth off, and has the weight of ten batches of 186.
        assert!((model.pages_for(5.0) / truth.pages_for(5.0) - 1.0).abs() < 0.006);
        // An empty scan changes the work and nothing else.
        model.learn(&Scan { between: 0.02, ..Scan::default() });
        assert_eq!((model.work, model.cost), (0.0, scan.cpu / scan.pages));
    }
}
