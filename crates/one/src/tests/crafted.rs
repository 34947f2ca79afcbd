//! Objects that are made so that the heads of their keys collide.

use std::time::{Duration, Instant};

use sdtree::MAX_KEY_LEN;

use crate::{MemoryStore, One};

const OBJECTS: usize = 16_000;

/// Objects that differ from each other in their ends, which keys of the tree look at; or each in
/// one bit, at a place that they do not look at.
fn objects(crafted: bool) -> Vec<[u8; MAX_KEY_LEN]> {
    let noise = |i: usize| ((i * i * 40_503) >> 7) as u8;
    let places = (320..MAX_KEY_LEN).filter(|at| !(at / 8).is_multiple_of(73) && *at < MAX_KEY_LEN - 8);
    let mut bits = places.flat_map(|at| at * 8..at * 8 + 8);
    let object = |i: usize| {
        let mut object = std::array::from_fn(noise);
        let bit = bits.next().unwrap_or(0);
        match crafted {
            true => object[bit / 8] ^= 0x80 >> (bit % 8),
            false => object[..8].copy_from_slice(&i.to_le_bytes()),
        }
        object
    };
    (0..OBJECTS).map(object).collect()
}

/// They take 1.3 times as long where nothing else runs. The limit allows for other tests beside
/// this one. The best of a few rounds each, in turns.
#[test]
fn crafted_objects_make_no_comb() {
    let sets = [objects(false), objects(true)];
    let mut best = [Duration::MAX; 2];
    for _ in 0..if cfg!(debug_assertions) { 1 } else { 9 } {
        for (best, objects) in best.iter_mut().zip(&sets) {
            let one = One::new(MemoryStore::new());
            let start = Instant::now();
            assert!(objects.iter().all(|object| one.put(object).unwrap().new));
            *best = start.elapsed().min(*best);
        }
    }
    let [others, crafted] = best.map(|best| best.as_nanos() as f64 / OBJECTS as f64);
    println!("{OBJECTS} pages put: others {others:.0} ns, crafted {crafted:.0} ns each");
    assert!(crafted <= 8.0 * others, "others {others:.0} ns, crafted {crafted:.0} ns");
}
