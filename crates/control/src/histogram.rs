//! How long something took: counts in fixed buckets.

use serde::{Deserialize, Serialize};

/// Upper bounds of the buckets in seconds, from 10 µs to 1 s, three times as long each. One more
/// bucket has what took longer. They are the same in all builds: a command reads the counts of a
/// daemon of another build.
pub const BOUNDS: [f64; 11] = [10e-6, 30e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 30e-3, 0.1, 0.3, 1.0];

/// Durations by their length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Histogram {
    /// For each bucket, how many durations are in it and in no bucket before; one more than
    /// [`BOUNDS`].
    pub counts: [u64; BOUNDS.len() + 1],
    /// Their sum in seconds.
    pub sum_seconds: f64,
}

impl Histogram {
    /// Adds one duration.
    pub fn add(&mut self, seconds: f64) {
        self.counts[BOUNDS.partition_point(|&bound| bound < seconds)] += 1;
        self.sum_seconds += seconds;
    }

    /// How many durations there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, &n| sum.saturating_add(n))
    }

    /// Each bucket's upper bound and its count alone; the last bound is infinite.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        BOUNDS.into_iter().chain([f64::INFINITY]).zip(self.counts)
    }

    /// The least bound within which this part of the durations lies; `None`: there are none.
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let count = self.count();
        let wanted = (count as f64 * part).ceil() as u64;
        let mut seen = 0;
        self.buckets().filter(|_| count > 0).find_map(|(bound, n)| {
            seen = u64::saturating_add(seen, n);
            (seen >= wanted).then_some(bound)
        })
    }
}

impl std::ops::AddAssign<&Histogram> for Histogram {
    fn add_assign(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.sum_seconds += other.sum_seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_the_least_bucket_that_holds_them() {
        let mut all = Histogram::default();
        for seconds in [0.0, 10e-6, 11e-6, 0.5, 1.0, 7.0] {
            all.add(seconds);
        }
        assert_eq!(all.counts, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1]);
        assert_eq!(all.count(), 6);
        assert_eq!(
            (all.quantile(0.5), all.quantile(0.8), all.quantile(1.0)),
            (Some(30e-6), Some(1.0), Some(f64::INFINITY))
        );
        assert_eq!(Histogram::default().quantile(0.5), None);
        let twice = {
            let mut twice = all;
            twice += &all;
            twice
        };
        assert_eq!((twice.count(), twice.sum_seconds), (12, 2.0 * all.sum_seconds));
    }
}
