//! The CPU limit: how much CPU time was used in the last ten seconds, and how much may be risked
//! until the next reading.
//!
//! A batch that has begun cannot be stopped, and the cost of its pages is known only afterwards:
//! skipping a page takes a fraction of a microsecond, merging it ten. Therefore every page until
//! the next reading is assumed to cost as much as the most expensive page so far. A number of pages
//! is allowed only if the limit holds even then:
//!
//! ```text
//! allowance = limit · 10 s − used in the last 10 s
//!           ≥   most cost of the batch under way
//!             + most cost of the batches until the next reading
//!             + most cost of one batch more, which begins just before the reading
//! ```
//!
//! The last term is the first term of the next reading. By induction the limit holds over every
//! window, whenever it ends.

use std::collections::VecDeque;

/// CPU time over the recent past. Times are in seconds from any fixed start and do not decrease.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Time and CPU time of each sample, the oldest first. The first one is the newest sample
    /// outside of the window.
    samples: VecDeque<(f64, f64)>,
}

impl Window {
    /// The length of the window over which the limit holds, in seconds.
    pub const LENGTH: f64 = 10.0;

    /// Notes the CPU time used so far.
    pub fn note(&mut self, at: f64, cpu: f64) {
        self.samples.push_back((at, cpu));
        while self.samples.get(1).is_some_and(|&(next, _)| next <= at - Self::LENGTH) {
            self.samples.pop_front();
        }
    }

    /// CPU time in the window that ends with the last sample, and the window's length, both in
    /// seconds. The time back to the newest sample outside of the window counts in full, so the
    /// result is rather too large than too small.
    pub fn used(&self) -> (f64, f64) {
        match (self.samples.front(), self.samples.back()) {
            (Some(first), Some(last)) => (last.1 - first.1, last.0 - first.0),
            _ => (0.0, 0.0),
        }
    }

    /// Percent of a CPU in the window. CPU time before the first sample counts as none.
    pub fn percent(&self) -> f64 {
        let (used, time) = self.used();
        used / time.max(Self::LENGTH) * 100.0
    }

    /// CPU time that may still be used now, in seconds. `limit` is a share of one CPU.
    pub fn allowance(&self, limit: f64) -> f64 {
        limit * Self::LENGTH - self.used().0
    }
}

/// The assumptions about the time until the next reading.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Risk {
    /// CPU time, in seconds, that may be used: see [`Window::allowance`].
    pub allowance: f64,
    /// CPU time that the batch under way may use, in seconds.
    pub under_way: f64,
    /// The most that a page may cost, in seconds of CPU time.
    pub worst_cost: f64,
    /// How long the scanner sleeps after a batch, in seconds.
    pub pause: f64,
}

/// The most pages of a batch for which the limit holds, if the next reading comes `wait` seconds
/// from now.
///
/// With `x` the greatest cost of a batch: `wait·x/(pause + x) + x ≤ allowance − under_way`, solved
/// for `x`. Batches that begin within `wait` take at most `x/(pause + x)` of the time, since one
/// thread uses at most one CPU.
pub fn guard(risk: &Risk, wait: f64) -> f64 {
    let room = risk.allowance - risk.under_way;
    if room <= 0.0 {
        return 0.0;
    }
    let b = room - risk.pause - wait;
    let x = (b + (b * b + 4.0 * room * risk.pause).sqrt()) / 2.0;
    x / risk.worst_cost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_forgets_what_is_older() {
        let mut window = Window::default();
        assert_eq!(window.used(), (0.0, 0.0));
        for second in 0..=30 {
            window.note(f64::from(second), f64::from(second.min(20)) * 0.1);
        }
        // No CPU time since second 20.
        assert!((window.used().0 - 0.0).abs() < 1e-9, "{:?}", window.used());
        window.note(31.0, 2.5);
        assert!((window.used().0 - 0.5).abs() < 1e-9 && (window.percent() - 5.0).abs() < 1e-9);
        assert!((window.allowance(0.2) - 1.5).abs() < 1e-9);
        // Sparse samples: a time that is partly outside of the window counts in full.
        window.note(50.0, 3.0);
        assert!((window.used().0 - 0.5).abs() < 1e-9);
    }

    #[test]
    fn the_guard_solves_its_inequality() {
        for (allowance, under_way, wait, pause) in
            [(2.0, 0.1, 0.1, 0.02), (0.05, 0.0, 1.0, 0.02), (7.0, 0.0, 1.0, 0.0), (0.3, 0.2, 0.02, 0.5)]
        {
            let risk = Risk { allowance, under_way, worst_cost: 1e-5, pause };
            let x = guard(&risk, wait) * risk.worst_cost;
            let need = wait * x / (pause + x) + x;
            assert!((need - (allowance - under_way)).abs() < 1e-9, "{need}");
        }
        assert_eq!(guard(&Risk { allowance: 0.1, under_way: 0.1, worst_cost: 1e-5, pause: 0.02 }, 0.1), 0.0);
    }
}
