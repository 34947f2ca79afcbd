//! A schedule, for a scanner that knows how many pages it has to scan and can wait between any two
//! of them.
//!
//! A *clock* runs ahead of the scanner. Each page that is taken moves it on by the page's part of
//! the time left,
//!
//! ```text
//! clock += pages · (deadline − clock) / left
//! left  −= pages
//! ```
//!
//! so that the clock reaches the deadline with the last page, and the pages are spread evenly,
//! whatever they cost. The scanner waits for the clock. A scanner may be late, because its pages
//! took longer or because it waited for CPU time. It then finds the clock behind, and does not wait
//! until it has caught up. Pages that are found later are spread over the time left.
//!
//! With a fixed *rate* the clock moves on by `pages / rate`, and there is no deadline.

/// The schedule. All times are in seconds from the same fixed start.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    clock: f64,
    deadline: f64,
    /// Pages in a second, if the rate is fixed.
    rate: Option<f64>,
    left: f64,
}

impl Schedule {
    /// Begins a scan that is to end at `deadline`.
    pub fn until(now: f64, deadline: f64) -> Self {
        Self { clock: now, deadline, rate: None, left: 0.0 }
    }

    /// Begins a scan of `rate` pages a second.
    pub fn at_rate(now: f64, rate: f64) -> Self {
        Self { clock: now, deadline: f64::INFINITY, rate: Some(rate), left: 0.0 }
    }

    /// Adds `pages` pages that are to be scanned.
    pub fn found(&mut self, now: f64, pages: u64) {
        if self.left == 0.0 {
            self.clock = self.clock.max(now);
        }
        self.left += pages as f64;
    }

    /// `pages` of those that were added are not to be scanned.
    pub fn forget(&mut self, pages: u64) {
        self.left = (self.left - pages as f64).max(0.0);
    }

    /// Takes `pages` pages, which are being scanned. Returns the time until which to wait before
    /// taking more.
    pub fn took(&mut self, pages: u64) -> f64 {
        let pages = (pages as f64).min(self.left);
        if pages > 0.0 {
            self.clock += match self.rate {
                Some(rate) => pages / rate,
                None => pages / self.left * (self.deadline - self.clock).max(0.0),
            };
            self.left -= pages;
        }
        self.clock
    }

    /// Pages that have not been taken.
    pub fn left(&self) -> u64 {
        self.left as u64
    }

    /// The time at which more pages may be taken.
    pub fn clock(&self) -> f64 {
        self.clock
    }

    /// The present rate in pages in a second; 0 when no page is left.
    pub fn rate(&self) -> f64 {
        match self.rate {
            Some(rate) => rate,
            None if self.left == 0.0 => 0.0,
            None => self.left / (self.deadline - self.clock).max(1e-3),
        }
    }
}

#[cfg(test)]
mod tests;
