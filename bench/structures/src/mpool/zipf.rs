//! The request distribution of YCSB: zipfian, scattered over all items (Gray et al., "Quickly
//! generating billion-record synthetic databases", SIGMOD 1994, as YCSB has it).

use bench_common::random::{Random, mix};

/// Which item is asked for.
#[derive(Clone)]
pub(super) struct Zipf {
    items: u64,
    theta: f64,
    alpha: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    pub(super) fn new(items: u64, theta: f64) -> Self {
        let zeta: f64 = (1..=items).map(|i| (i as f64).powf(-theta)).sum();
        let two = 1.0 + 0.5f64.powf(theta);
        let eta = (1.0 - (2.0 / items as f64).powf(1.0 - theta)) / (1.0 - two / zeta);
        Self { items, theta, alpha: 1.0 / (1.0 - theta), zeta, eta }
    }

    /// A rank: 0 is the most popular.
    fn rank(&self, random: &mut Random) -> u64 {
        let u = random.share();
        let uz = u * self.zeta;
        if uz < 1.0 {
            return 0;
        }
        if uz < 1.0 + 0.5f64.powf(self.theta) {
            return 1;
        }
        (self.items as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha)) as u64
    }

    /// An item: the popular ones lie anywhere.
    pub(super) fn item(&self, random: &mut Random) -> u64 {
        mix(self.rank(random)) % self.items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_popular_are_asked_for_as_often_as_they_should() {
        let (zipf, mut random) = (Zipf::new(10_000, 0.99), Random::new(1));
        let mut counts = vec![0u32; 10_000];
        (0..200_000).for_each(|_| counts[zipf.rank(&mut random) as usize] += 1);
        let share = f64::from(counts[0]) / 200_000.0;
        assert!((share - 1.0 / zipf.zeta).abs() < 0.01, "{share}");
        let hundred: u32 = counts[..100].iter().sum();
        assert!((0.45..0.6).contains(&(f64::from(hundred) / 200_000.0)), "{hundred}");
    }
}
