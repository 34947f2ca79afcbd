//! The CPU limit: how much was used in the last ten seconds, and what may be risked until the next
//! look.
//!
//! A batch that has begun cannot be stopped, and what its pages cost is known only afterwards:
//! passing over a page takes a fraction of a microsecond, merging it ten. So a number of pages is
//! allowed only if the limit would hold even when every page of the time ahead cost as much as the
//! dearest seen:
//!
//! ```text
//! allowance = limit · 10 s − used in the last 10 s
//!           ≥ what the batch under way may cost + what batches may cost until the next look + one batch more, begun just before
//! ```
//!
//! The last term is the next look's first: by induction the limit holds over every window that ends
//! at any moment.

use std::collections::VecDeque;

/// CPU time over the recent past. Times are in seconds from any fixed start and do not decrease.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// Time and CPU time of each sample, the oldest first; the first is the last one that is out of
    /// the window.
    samples: VecDeque<(f64, f64)>,
}

impl Window {
    /// Over how long the limit holds, in seconds.
    pub const LENGTH: f64 = 10.0;

    /// Notes the CPU time used so far.
    pub fn note(&mut self, at: f64, cpu: f64) {
        self.samples.push_back((at, cpu));
        while self.samples.get(1).is_some_and(|&(next, _)| next <= at - Self::LENGTH) {
            self.samples.pop_front();
        }
    }

    /// CPU time in the window that ends with the last sample, and how long it is: that up to the
    /// first sample out of the window counts in full, so that this is rather too much than too
    /// little.
    pub fn used(&self) -> (f64, f64) {
        match (self.samples.front(), self.samples.back()) {
            (Some(first), Some(last)) => (last.1 - first.1, last.0 - first.0),
            _ => (0.0, 0.0),
        }
    }

    /// Percent of a CPU in the window; what was before the first sample counts as nothing.
    pub fn percent(&self) -> f64 {
        let (used, time) = self.used();
        used / time.max(Self::LENGTH) * 100.0
    }

    /// CPU time that may still be used now, in seconds. `limit`: a share of one CPU.
    pub fn allowance(&self, limit: f64) -> f64 {
        limit * Self::LENGTH - self.used().0
    }
}

/// What is allowed until the next look.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Risk {
    /// CPU time, in seconds, that may be used: see [`Window::allowance`].
    pub allowance: f64,
    /// CPU time that the batch under way may use, in seconds.
    pub under_way: f64,
    /// What a page may cost at most, in seconds of CPU time.
    pub worst_cost: f64,
    /// How long the scanner sleeps after a batch, in seconds.
    pub pause: f64,
}

/// The most pages of a batch for which the limit holds when the next look comes `wait` seconds from
/// now.
///
/// With `x` the greatest cost of a batch: `wait·x/(pause + x) + x ≤ allowance − under_way`, solved
/// for `x`. Batches begun within `wait` take `x/(pause + x)` of the time at most, and a CPU is all
/// that one thread can use.
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
        // Nothing since 20 s.
        assert!((window.used().0 - 0.0).abs() < 1e-9, "{:?}", window.used());
        window.note(31.0, 2.5);
        assert!((window.used().0 - 0.5).abs() < 1e-9 && (window.percent() - 5.0).abs() < 1e-9);
        assert!((window.allowance(0.2) - 1.5).abs() < 1e-9);
        // Sparse samples: a stretch that is partly out counts in full.
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
