//! Sums over all contents of an index.

use super::{Pair, Scanned};
use crate::cost;
use crate::index::Index;

/// Contents in common are counted for pairs of this many targets, the first ones: the table has a
/// number for each pair.
const PAIRED: usize = 256;
/// Pairs in a report, those with most in common.
const PAIRS: usize = 1000;

/// A sum over contents, of which perhaps only a sample is known, and its variance.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    pub(super) value: f64,
    variance: f64,
}

impl Sum {
    /// Adds `value` for a content that was in the index with a probability of 1 in `weight`.
    pub(super) fn add(&mut self, weight: f64, value: f64) {
        self.value += weight * value;
        self.variance += weight * (weight - 1.0) * value * value;
    }

    /// Two standard deviations: in 95 of 100 cases the error is smaller.
    pub(super) fn plus_minus(&self) -> u64 {
        (2.0 * self.variance.sqrt()).round() as u64
    }

    pub(super) fn rounded(&self) -> u64 {
        self.value.round() as u64
    }
}

/// The sums.
pub(super) struct Sums {
    /// For each target, chunks with contents that occur several times, and in no other target.
    pub(super) within: Vec<Sum>,
    /// For each target, chunks with contents of other targets.
    pub(super) others: Vec<Sum>,
    /// Chunks that would be saved.
    pub(super) sharing: Sum,
    /// Contents that occur several times.
    pub(super) frames: Sum,
    /// KSM's frames for these contents.
    pub(super) ksm_frames: Sum,
    /// Contents in common, for each pair of the first `paired` targets: earlier × `paired` + later.
    common: Vec<f64>,
    paired: usize,
}

impl Sums {
    /// The sums of an index with this many targets.
    pub(super) fn of(index: &Index, targets: usize) -> Self {
        let paired = targets.min(PAIRED);
        let mut sums = Self {
            within: vec![Sum::default(); targets],
            others: vec![Sum::default(); targets],
            sharing: Sum::default(),
            frames: Sum::default(),
            ksm_frames: Sum::default(),
            common: vec![0.0; paired * paired],
            paired,
        };
        index.for_each(|weight, sightings| sums.add(weight, sightings));
        sums
    }

    /// Adds a content. `sightings`: target and count, the latest target first.
    fn add(&mut self, weight: f64, sightings: &[(u16, u64)]) {
        let total: u64 = sightings.iter().map(|&(_, count)| count).sum();
        if total < 2 {
            return;
        }
        self.frames.add(weight, 1.0);
        self.ksm_frames.add(weight, total.div_ceil(cost::KSM_SHARING) as f64);
        self.sharing.add(weight, (total - 1) as f64);
        let sums = if sightings.len() == 1 { &mut self.within } else { &mut self.others };
        for (i, &(target, count)) in sightings.iter().enumerate() {
            sums[usize::from(target)].add(weight, count as f64);
            for &(earlier, _) in &sightings[i + 1..] {
                if usize::from(target) < self.paired {
                    self.common[usize::from(earlier) * self.paired + usize::from(target)] += weight;
                }
            }
        }
    }

    /// The pairs of targets with most in common, in descending order.
    pub(super) fn pairs(&self, targets: &[Scanned]) -> Vec<Pair> {
        let mut pairs: Vec<Pair> = Vec::new();
        for a in 0..self.paired {
            for b in a + 1..self.paired {
                let chunks = self.common[a * self.paired + b].round() as u64;
                if chunks > 0 {
                    pairs.push(Pair { a: targets[a].name.clone(), b: targets[b].name.clone(), chunks });
                }
            }
        }
        pairs.sort_by_key(|pair| std::cmp::Reverse(pair.chunks));
        pairs.truncate(PAIRS);
        pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exact_sum_has_no_error_and_a_sampled_one_has() {
        let mut sum = Sum::default();
        sum.add(1.0, 100.0);
        assert_eq!((sum.rounded(), sum.plus_minus()), (100, 0));
        (0..100).for_each(|_| sum.add(4.0, 1.0));
        // Variance 100 · 4 · 3.
        assert_eq!((sum.rounded(), sum.plus_minus()), (500, 69));
    }
}
