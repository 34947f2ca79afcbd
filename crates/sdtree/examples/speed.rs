//! Times insertions, finds, misses and removals of random 8-byte keys, on one thread and on several.
//!
//! `cargo run --release -p sdtree --example speed -- [keys] [threads]` (1,000,000 keys, 2 threads)
#![allow(clippy::unwrap_used)]

use sdtree::{Handle, KeySource, SdTree};
use std::thread;
use std::time::Instant;

/// Keys in memory, as a page ledger has its digests.
struct Table(Vec<[u8; 8]>);

impl KeySource for Table {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(self.0.get(handle.0 as usize).map(|key| &key[..]))
    }
}

/// A number that looks random (splitmix64's mixer).
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Runs `f` for all numbers below `count`, shared among the threads; prints the median time per call and thread, over
/// blocks of 1000 calls, so that other work on the machine shows less.
fn time(name: &str, count: usize, threads: usize, f: impl Fn(usize) + Sync) {
    let run = |t: usize| {
        let share: Vec<usize> = (t..count).step_by(threads).collect();
        let block = |block: &[usize]| {
            let start = Instant::now();
            block.iter().copied().for_each(&f);
            start.elapsed().as_nanos() as f64 / block.len() as f64
        };
        share.chunks(1000).map(block).collect::<Vec<_>>()
    };
    let mut times: Vec<f64> = thread::scope(|scope| {
        let run = &run;
        let workers: Vec<_> = (0..threads).map(|t| scope.spawn(move || run(t))).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    times.sort_by(f64::total_cmp);
    println!("{name:>8} {threads:>3} threads {:>8.1} ns", times[times.len() / 2]);
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse().unwrap());
    let count: usize = arguments.next().unwrap_or(1_000_000);
    let most: usize = arguments.next().unwrap_or(2);
    let keys: Vec<[u8; 8]> = (0..count as u64).map(|i| mix(i).to_be_bytes()).collect();
    // In another order than they were inserted in.
    let shuffled: Vec<usize> = (0..count).map(|i| (i * 7_368_787) % count).collect();
    for threads in [1, most] {
        let tree = SdTree::new(Table(keys.clone()));
        time("insert", count, threads, |i| _ = tree.insert(&keys[i], Handle(i as u64)));
        let full = tree.stats();
        time("find", count, threads, |i| assert!(tree.query(&keys[shuffled[i]]).is_some()));
        time("miss", count, threads, |i| assert!(tree.query(&mix((count + i) as u64).to_be_bytes()).is_none()));
        time("remove", count, threads, |i| _ = tree.remove(&keys[shuffled[i]], Handle(shuffled[i] as u64)));
        println!("{:.2} bytes a key; {full:?}; {} left", full.bytes as f64 / count as f64, tree.len());
    }
}
