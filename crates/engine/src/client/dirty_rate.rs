//! How many pages of a client are written a second, as its scans find them.

use std::time::Instant;

/// The weight of the last period; the periods before have the rest.
const LAST: f64 = 0.5;

/// Less is nothing: a mean that fades never becomes 0.
const LEAST: f64 = 0.0003;

/// The rate, smoothed over the last periods.
#[derive(Debug, Default)]
pub(crate) struct DirtyRate {
    /// Pages that scans found written since the last merge period's scan.
    found: u64,
    last: Option<Instant>,
    per_second: Option<f64>,
}

impl DirtyRate {
    /// A scan found this number of pages written.
    pub(crate) fn found(&mut self, pages: u64) {
        self.found += pages;
    }

    /// A merge period's scan is over.
    pub(crate) fn end_period(&mut self, now: Instant) {
        let found = std::mem::take(&mut self.found);
        if let Some(last) = self.last.replace(now) {
            let rate = found as f64 / now.duration_since(last).as_secs_f64().max(0.001);
            self.per_second = Some(self.per_second.map_or(rate, |before| before + (rate - before) * LAST));
        }
    }

    /// Pages written a second; 0 before the second scan, and for less than one an hour.
    pub(crate) fn per_second(&self) -> f64 {
        self.per_second.filter(|&rate| rate > LEAST).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_rate_follows_what_scans_find() {
        let (mut rate, now) = (DirtyRate::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        rate.found(7);
        rate.end_period(at(0));
        assert_eq!(rate.per_second(), 0.0, "nobody knows since when those were written");
        rate.found(60);
        rate.found(40);
        rate.end_period(at(10));
        assert_eq!(rate.per_second(), 10.0);
        rate.end_period(at(20));
        assert_eq!(rate.per_second(), 5.0);
    }
}
