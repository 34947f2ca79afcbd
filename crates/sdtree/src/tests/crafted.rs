//! Keys that are made to collide: no set of keys makes a comb.

use std::time::{Duration, Instant};

use super::Random;
use crate::{Handle, Insert, KeySource, MAX_KEY_LEN, SdTree};

const KEYS: usize = 16_000;

/// Pages in one allocation, from a page's boundary on, as memory has them.
struct Pages(Vec<[u8; MAX_KEY_LEN]>);

impl KeySource for &Pages {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(self.0.get(handle.0 as usize).map(|page| &page[..]))
    }
}

fn random_page(random: &mut Random) -> [u8; MAX_KEY_LEN] {
    let mut page = [0; MAX_KEY_LEN];
    page.as_chunks_mut().0.iter_mut().for_each(|word| *word = random.next().to_ne_bytes());
    page
}

fn random_pages() -> Pages {
    let mut random = Random(2);
    Pages((0..KEYS).map(|_| random_page(&mut random)).collect())
}

/// Pages that differ from one page in one bit each, at a place that no head looks at. If keys with
/// equal heads branched at their own bits, page *i* would branch off the way of all later ones.
fn comb() -> Pages {
    let page = random_page(&mut Random(1));
    let sampled = |word: &usize| *word < 40 || word.is_multiple_of(73) || *word == MAX_KEY_LEN / 8 - 1;
    let words = (0..MAX_KEY_LEN / 8).filter(|word| !sampled(word));
    let bits = words.flat_map(|word| word * 64..word * 64 + 64).take(KEYS);
    let pages = bits.map(|bit| {
        let mut page = page;
        page[bit / 8] ^= 0x80 >> (bit % 8);
        page
    });
    Pages(pages.collect())
}

/// Inserts all; returns the time of that, and the most nodes on the way to a key.
fn insert_all(pages: &Pages) -> (Duration, u64) {
    let tree = SdTree::new(pages);
    let start = Instant::now();
    for (i, page) in pages.0.iter().enumerate() {
        assert_eq!(tree.insert(page, Handle(i as u64)), Insert::Inserted);
    }
    let took = start.elapsed();
    assert!(pages.0.iter().enumerate().all(|(i, page)| tree.query(page) == Some(Handle(i as u64))));
    (took, pages.0.iter().map(|page| tree.examine(page).nodes).max().unwrap_or(0))
}

/// All bytes of a crafted page must be read, from memory, and of a random one a tenth: that takes
/// 2.2 to 2.6 times as long where nothing else runs. A hash map that hashes all bytes takes 1.8 to
/// 2.5 times as long for any page. The limit allows for other tests beside this one. A comb took
/// 340 times as long.
///
/// The best of a few rounds each, in turns.
#[test]
fn crafted_pages_make_no_comb() {
    let mut best = [Duration::MAX; 2];
    let mut deepest = 0;
    let rounds = if cfg!(debug_assertions) { 1 } else { 9 };
    let sets = [random_pages(), comb()];
    for _ in 0..rounds {
        for (best, pages) in best.iter_mut().zip(&sets) {
            let (took, nodes) = insert_all(pages);
            *best = took.min(*best);
            deepest = nodes.max(deepest);
        }
    }
    let [random, crafted] = best.map(|best| best.as_nanos() as f64 / KEYS as f64);
    println!("{KEYS} pages: random {random:.0} ns, crafted {crafted:.0} ns an insertion, {deepest} nodes on a way");
    // Log2 of the number of keys is 14; the ways of random tries are two or three times as long at
    // most.
    assert!(deepest <= 48, "{deepest} nodes on a way");
    assert!(cfg!(debug_assertions) || crafted <= 8.0 * random, "random {random:.0} ns, crafted {crafted:.0} ns");
}
