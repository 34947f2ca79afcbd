//! What is watched while the `governor` bench runs, and the figures that follow from it.

use std::time::Duration;

use bench_common::report::Sheet;

/// Over how long the CPU limit holds, in seconds.
const WINDOW: f64 = 10.0;
/// This many scans in a row that are no further from the target than this part of it show that it
/// has recovered.
const IN_A_ROW: usize = 3;
const RECOVERED: f64 = 0.03;
/// The part of what can be merged that counts as all.
const ALL: f64 = 0.99;

/// One look.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Look {
    /// Seconds since the run began.
    pub(crate) at: f64,
    /// CPU time that is governed, in seconds since the run began.
    pub(crate) cpu: f64,
    /// Pages that are merged.
    pub(crate) merged: u64,
    /// Pages that can be merged.
    pub(crate) mergeable: u64,
}

/// A run.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) looks: Vec<Look>,
    /// When scans ended, in seconds since the run began.
    pub(crate) ends: Vec<f64>,
    /// Times of scans, where they do not follow one another: those that had something to do.
    pub(crate) scans: Vec<f64>,
    /// When the load changed.
    pub(crate) changes: Vec<f64>,
    /// CPU time of the governing program, in seconds.
    pub(crate) governing: f64,
}

impl Trace {
    /// Times of the scans that are steady: the load has not changed, and all that can be merged has
    /// been merged two scans ago.
    pub(crate) fn steady_scans(&self) -> Vec<f64> {
        let ends = |from: f64| self.ends.partition_point(|&end| end <= from);
        let mut times = Vec::new();
        for (n, sharing) in self.sharing_times().into_iter().enumerate() {
            let Some(from) = sharing.map(|time| self.changes[n] + time) else { continue };
            let until = self.changes.get(n + 1).map_or(self.ends.len(), |&next| ends(next));
            let whole = self.ends.get(ends(from)..until).unwrap_or_default();
            times.extend(whole.windows(2).skip(2).map(|pair| pair[1] - pair[0]));
        }
        times
    }

    /// Seconds from each change until all that can be merged then is merged; `None` where that did
    /// not come.
    fn sharing_times(&self) -> Vec<Option<f64>> {
        let all = |look: &&Look| look.mergeable > 0 && look.merged as f64 >= ALL * look.mergeable as f64;
        let after = |n: usize| {
            let until = self.changes.get(n + 1).copied().unwrap_or(f64::INFINITY);
            let from = self.changes[n];
            let found = self.looks.iter().filter(|look| look.at > from && look.at <= until).find(all);
            found.map(|look| look.at - from)
        };
        (0..self.changes.len()).map(after).collect()
    }

    /// Seconds during which the window that ends then holds more than the limit.
    fn exceeded(&self, limit: f64) -> f64 {
        let mut first = 0;
        let mut seconds = 0.0;
        for (n, look) in self.looks.iter().enumerate().skip(1) {
            while self.looks[first + 1].at <= look.at - WINDOW {
                first += 1;
            }
            // From the first look inside the window: never more than was used.
            let from = if look.at - self.looks[first].at > WINDOW { first + 1 } else { first };
            if look.cpu - self.looks[from].cpu > limit * WINDOW {
                seconds += look.at - self.looks[n - 1].at;
            }
        }
        seconds
    }

    /// Scans that end after a change before [`IN_A_ROW`] are within [`RECOVERED`] of the target,
    /// the one under way at the change among them. `None`: to the end.
    fn scans_to_recover(&self, change: usize, target: f64) -> Option<usize> {
        let from = self.ends.partition_point(|&end| end <= self.changes[change]).max(1);
        let times: Vec<f64> = self.ends[from - 1..].windows(2).map(|pair| pair[1] - pair[0]).collect();
        times.windows(IN_A_ROW).position(|row| row.iter().all(|time| (time / target - 1.0).abs() <= RECOVERED))
    }

    /// The figures. `grown`: which changes ended the two growths; `tripled`: which tripled the
    /// candidates.
    pub(crate) fn note(
        &self,
        sheet: &mut Sheet,
        target: Duration,
        max_cpu: f64,
        grown: (usize, usize),
        tripled: Option<usize>,
    ) {
        let target = target.as_secs_f64();
        let last = self.looks.last().copied().unwrap_or_default();
        sheet.add("cpu_seconds", last.cpu + self.governing, "s");
        sheet.add("cpu_seconds_of_the_governor", self.governing, "s");
        let sharing: f64 = self.looks.windows(2).map(|two| two[1].merged as f64 * (two[1].at - two[0].at)).sum();
        sheet.add("merged_pages_on_average", sharing / last.at.max(1e-9), "pages");
        let times = self.sharing_times();
        for (metric, change) in [("seconds_to_99_sharing", grown.0), ("seconds_to_99_sharing_again", grown.1)] {
            // What did not come has no figure.
            if let Some(Some(time)) = times.get(change) {
                sheet.add(metric, *time, "s");
            }
        }
        if let Some(change) = tripled
            && !self.ends.is_empty()
            && let Some(scans) = self.scans_to_recover(change, target)
        {
            sheet.add("scans_to_recover", scans as f64, "");
        }
        let steady = if self.scans.is_empty() { self.steady_scans() } else { self.scans.clone() };
        sheet.add("steady_scans", steady.len() as f64, "");
        if !steady.is_empty() {
            let errors: Vec<f64> = steady.iter().map(|time| (time / target - 1.0) * 100.0).collect();
            let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / errors.len() as f64;
            sheet.add("scan_time", mean(&mut steady.iter().copied()), "s");
            sheet.add("scan_time_error_percent", mean(&mut errors.iter().map(|e| e.abs())), "%");
            sheet.add("scan_time_error_worst", errors.iter().fold(0.0f64, |most, e| most.max(e.abs())), "%");
        }
        sheet.add("cpu_limit_exceeded_seconds", self.exceeded(max_cpu / 100.0), "s");
        sheet.add("most_cpu_percent_over_10_s", self.most() * 100.0, "%");
    }

    fn most(&self) -> f64 {
        let used = |n: usize| {
            let from = self.looks.partition_point(|look| look.at < self.looks[n].at - WINDOW);
            (self.looks[n].cpu - self.looks[from].cpu) / WINDOW
        };
        (0..self.looks.len()).map(used).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests;
