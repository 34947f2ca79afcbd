//! Latencies, to 3 % each.

const SUB: usize = 32;

/// Counts of nanoseconds, in 32 steps for each doubling.
#[derive(Clone)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    all: u64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { counts: vec![0; 40 * SUB], all: 0 }
    }

    fn slot(ns: u64) -> usize {
        let ns = ns.max(SUB as u64);
        let exponent = ns.ilog2() as usize;
        let sub = (ns >> (exponent - 5)) as usize - SUB;
        (exponent - 5) * SUB + sub
    }

    pub(super) fn add(&mut self, ns: u64) {
        let slot = Self::slot(ns).min(self.counts.len() - 1);
        self.counts[slot] += 1;
        self.all += 1;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.all += other.all;
    }

    pub(super) fn count(&self) -> u64 {
        self.all
    }

    /// The latency, in microseconds, that this share of all stay below or at.
    pub(super) fn quantile_us(&self, share: f64) -> f64 {
        let target = ((self.all as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (slot, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= target {
                let (exponent, sub) = (slot / SUB + 5, slot % SUB);
                return ((SUB + sub + 1) as u64 * (1u64 << (exponent - 5))) as f64 / 1e3;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_near() {
        let mut histogram = Histogram::new();
        (1..=100_000u64).for_each(|us| histogram.add(us * 100));
        for (share, us) in [(0.5, 5_000.0), (0.99, 9_900.0), (0.9999, 9_999.0)] {
            let found = histogram.quantile_us(share);
            assert!((found / us - 1.0).abs() < 0.035, "{share}: {found}");
        }
        assert_eq!(histogram.count(), 100_000);
    }
}
