//! Keys that are made to collide: no set of keys makes a comb.

use std::time::{Duration, Instant};

use super::{Random, Table};
use crate::{Handle, Insert, MAX_KEY_LEN, SdTree};

const KEYS: usize = 16_000;

fn random_pages(seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random(seed);
    (0..KEYS).map(|_| (0..MAX_KEY_LEN / 8).flat_map(|_| random.next().to_ne_bytes()).collect()).collect()
}

/// Pages that differ from one page in one bit each, at a place that no head looks at. If keys with
/// equal heads branched at their own bits, page *i* would branch off the way of all later ones.
fn comb() -> Vec<Vec<u8>> {
    let page = random_pages(1).swap_remove(0);
    let sampled = |word: usize| word < 40 || word % 73 == 0 || word == MAX_KEY_LEN / 8 - 1;
    let words: Vec<usize> = (0..MAX_KEY_LEN / 8).filter(|&word| !sampled(word)).collect();
    let bits = words.into_iter().flat_map(|word| word * 64..word * 64 + 64);
    let pages = bits.take(KEYS).map(|bit| {
        let mut page = page.clone();
        page[bit / 8] ^= 0x80 >> (bit % 8);
        page
    });
    pages.collect()
}

/// Inserts all; returns the time of that, and the most nodes on the way to a key.
fn insert_all(tree: &mut SdTree<Table>) -> (Duration, u64) {
    let keys = &tree.keys().0;
    let start = Instant::now();
    for (i, key) in keys.iter().enumerate() {
        assert_eq!(tree.insert(key, Handle(i as u64)), Insert::Inserted);
    }
    let took = start.elapsed();
    (took, keys.iter().map(|key| tree.examine(key).nodes).max().unwrap_or(0))
}

/// The best of a few rounds each, in turns: what else runs on the machine counts for neither.
#[test]
fn crafted_pages_cost_at_most_twice_as_much_as_random_ones() {
    let mut best = [Duration::MAX; 2];
    let mut deepest = 0;
    let rounds = if cfg!(debug_assertions) { 1 } else { 7 };
    let [mut random, mut crafted] = [random_pages(2), comb()];
    for _ in 0..rounds {
        for (at, keys) in [&mut random, &mut crafted].into_iter().enumerate() {
            let mut tree = SdTree::new(Table(std::mem::take(keys)));
            let (took, nodes) = insert_all(&mut tree);
            best[at] = best[at].min(took);
            deepest = deepest.max(nodes);
            *keys = std::mem::take(&mut tree.source.0);
        }
    }
    let [random, crafted] = best.map(|best| best.as_nanos() as f64 / KEYS as f64);
    println!("{KEYS} pages: random {random:.0} ns, crafted {crafted:.0} ns an insertion, {deepest} nodes on a way");
    // Log2 of the number of keys is 14; the ways of random tries are two or three times as long at
    // most.
    assert!(deepest <= 64, "{deepest} nodes on a way");
    assert!(cfg!(debug_assertions) || crafted <= 2.0 * random, "random {random:.0} ns, crafted {crafted:.0} ns");
}
