//! Seeds of digests: clients and files of one domain have one, so that the digest of a content is
//! one, too.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use crate::sync::Mutex;

/// The seeds in use, by the names of their domains.
static SEEDS: Mutex<BTreeMap<String, Weak<u64>>> = Mutex::new(BTreeMap::new());

/// A seed. It is the domain's as long as somebody keeps it.
#[derive(Clone)]
pub(crate) struct Seed(Arc<u64>);

impl Seed {
    /// Drawn at random: with a known seed, which agents have, a guest could prepare colliding pages
    /// and prevent merges, and nothing worse.
    pub(crate) fn random() -> Self {
        let mut seed = [0u8; 8];
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        Self(Arc::new(u64::from_ne_bytes(seed)))
    }

    /// That of the domain with this name.
    pub(crate) fn of(domain: &str) -> Self {
        let mut seeds = SEEDS.lock();
        if let Some(seed) = seeds.get(domain).and_then(Weak::upgrade) {
            return Self(seed);
        }
        seeds.retain(|_, seed| seed.strong_count() > 0);
        let seed = Self::random();
        seeds.insert(domain.into(), Arc::downgrade(&seed.0));
        seed
    }

    pub(crate) fn get(&self) -> u64 {
        *self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_has_one_seed_and_no_other_has_it() {
        let seed = Seed::of("a seed's domain");
        assert_eq!(Seed::of("a seed's domain").get(), seed.get());
        assert_ne!(Seed::of("another seed's domain").get(), seed.get());
        assert_ne!(Seed::random().get(), Seed::random().get());
        let before = seed.get();
        drop(seed);
        assert_ne!(Seed::of("a seed's domain").get(), before, "nobody kept it");
    }
}
