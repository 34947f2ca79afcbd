//! Many threads, each against its own knowledge. Meant to be run under ThreadSanitizer too.
#![allow(unsafe_code)] // one test shares plain memory through the tree, for ThreadSanitizer to watch

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;

use super::{Random, Table};
use crate::{Handle, Insert, KeySource, SdTree};

const THREADS: usize = 4;

fn rounds() -> usize {
    if cfg!(debug_assertions) { 40_000 } else { 200_000 }
}

/// Few distinct bytes and mixed lengths, so that neighbours in the tree belong to different
/// threads.
fn keys(count: usize) -> Vec<Vec<u8>> {
    let mut random = Random(7);
    let mut keys = std::collections::BTreeSet::new();
    while keys.len() < count {
        let len = 1 + random.below(5);
        keys.insert((0..len).map(|_| [0u8, 1, 3, 0x80][random.below(4)]).collect::<Vec<u8>>());
    }
    keys.into_iter().collect()
}

/// Every thread changes only its own keys, and knows exactly what every answer about them must be;
/// of the keys of others it knows that an answer names the right handle.
fn own(seed: u64) {
    let keys = keys(400);
    let tree = SdTree::new(Table(keys.clone()));
    let start = Barrier::new(THREADS);
    let left: Vec<Vec<usize>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let (tree, keys, start) = (&tree, &keys, &start);
                scope.spawn(move || {
                    let mut random = Random(seed << 8 | me as u64);
                    let mut mine: HashMap<usize, bool> = HashMap::new();
                    start.wait();
                    for _ in 0..rounds() {
                        let i = random.below(keys.len());
                        let (key, handle) = (&keys[i], Handle(i as u64));
                        if i % THREADS != me {
                            assert!(tree.query(key).is_none_or(|found| found == handle));
                            continue;
                        }
                        let there = mine.entry(i).or_insert(false);
                        match random.below(3) {
                            0 => {
                                let expected = if *there { Insert::Exists(handle) } else { Insert::Inserted };
                                assert_eq!(tree.insert(key, handle), expected);
                                *there = true;
                            }
                            1 => {
                                assert_eq!(tree.remove(key, handle), *there);
                                *there = false;
                            }
                            _ => assert_eq!(tree.query(key), there.then_some(handle)),
                        }
                    }
                    mine.into_iter().filter(|&(_, there)| there).map(|(i, _)| i).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut left: Vec<usize> = left.concat();
    left.sort_unstable();
    let mut seen = Vec::new();
    tree.for_each(|handle| seen.push(handle.0 as usize));
    seen.sort_unstable();
    assert_eq!(seen, left);
    assert_eq!(tree.check(), left.len() as u64);
}

#[test]
fn own_keys() {
    own(0);
}

/// [`stress`] with keys that come and go in waves, so that the tree grows and shrinks all the time.
fn come_and_go(seed: u64) {
    let key = |i| Random(seed << 32 | i).next().to_be_bytes().to_vec();
    let keys: Vec<Vec<u8>> = (0..THREADS as u64 * 2_000).map(key).collect();
    let tree = SdTree::new(Table(keys.clone()));
    let (start, waves) = (Barrier::new(THREADS), rounds() / 10_000);
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (tree, keys, start) = (&tree, &keys, &start);
            scope.spawn(move || {
                let own = || (me..keys.len()).step_by(THREADS);
                for wave in 0..waves {
                    start.wait();
                    own().for_each(|i| assert_eq!(tree.insert(&keys[i], Handle(i as u64)), Insert::Inserted));
                    own().for_each(|i| assert_eq!(tree.query(&keys[i]), Some(Handle(i as u64))));
                    if wave % 2 == 0 {
                        start.wait(); // else some still insert while others remove
                    }
                    for i in own() {
                        assert!(tree.remove(&keys[i], Handle(i as u64)));
                        assert_eq!(tree.query(&keys[i]), None);
                        let other = keys.len() - 1 - i;
                        assert!(tree.query(&keys[other]).is_none_or(|found| found == Handle(other as u64)));
                    }
                }
            });
        }
    });
    let stats = tree.stats();
    assert!(stats.resizes >= 2 * waves as u64 / 2, "{stats:?}");
    assert_eq!(tree.check(), 0);
}

#[test]
fn waves() {
    come_and_go(0);
}

/// All threads contend for a few keys: successful insertions and removals of a key must alternate.
fn same(seed: u64) {
    let keys = keys(6);
    let tree = SdTree::new(Table(keys.clone()));
    let start = Barrier::new(THREADS);
    let balance: Vec<AtomicI64> = keys.iter().map(|_| AtomicI64::new(0)).collect();
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (tree, keys, start, balance) = (&tree, &keys, &start, &balance);
            scope.spawn(move || {
                let mut random = Random((seed << 8) + 100 + me as u64);
                let mut own = vec![0; keys.len()];
                start.wait();
                for _ in 0..rounds() {
                    let i = random.below(keys.len());
                    let (key, handle) = (&keys[i], Handle(i as u64));
                    match random.below(3) {
                        0 => own[i] += i64::from(tree.insert(key, handle) == Insert::Inserted),
                        1 => own[i] -= i64::from(tree.remove(key, handle)),
                        _ => assert!(tree.query(key).is_none_or(|found| found == handle)),
                    }
                }
                for (sum, own) in balance.iter().zip(own) {
                    sum.fetch_add(own, Ordering::Relaxed);
                }
            });
        }
    });
    for (i, balance) in balance.iter().enumerate() {
        let there = i64::from(tree.query(&keys[i]).is_some());
        assert_eq!(balance.load(Ordering::Relaxed), there, "key {i}");
    }
    tree.check();
}

#[test]
fn same_keys() {
    same(0);
}

/// Runs for `SDTREE_STRESS_SECONDS`: `make stress`.
#[test]
#[ignore = "takes minutes to hours"]
fn for_hours() {
    let seconds = std::env::var("SDTREE_STRESS_SECONDS").map_or(60, |text| text.parse().unwrap());
    let start = std::time::Instant::now();
    let mut rounds = 0;
    while start.elapsed().as_secs() < seconds {
        rounds += 1;
        own(rounds);
        come_and_go(rounds);
        same(rounds);
        super::slots::engine(rounds, super::stress::rounds(), 500 << (rounds % 4));
    }
    println!("{rounds} rounds in {:.0} s", start.elapsed().as_secs_f64());
}

/// Every query and every walk finds a key that is there throughout, whatever other threads do.
#[test]
fn steady_key_amid_changes() {
    let keys = keys(64);
    let steady = 17;
    let tree = SdTree::new(Table(keys.clone()));
    tree.insert(&keys[steady], Handle(steady as u64));
    thread::scope(|scope| {
        let changers: Vec<_> = (0..2)
            .map(|seed| {
                let (tree, keys) = (&tree, &keys);
                scope.spawn(move || {
                    let mut random = Random(seed);
                    for _ in 0..rounds() {
                        let i = random.below(keys.len());
                        if i != steady {
                            if random.below(2) == 0 {
                                tree.insert(&keys[i], Handle(i as u64));
                            } else {
                                tree.remove(&keys[i], Handle(i as u64));
                            }
                        }
                    }
                })
            })
            .collect();
        while !changers.iter().all(|thread| thread.is_finished()) {
            assert_eq!(tree.query(&keys[steady]), Some(Handle(steady as u64)));
            let mut seen = 0;
            tree.for_each(|handle| seen += usize::from(handle.0 == steady as u64));
            assert_eq!(seen, 1);
        }
    });
    tree.check();
}

/// Keys in plain memory, each written once by the thread that is about to insert its handle.
struct Plain(Vec<UnsafeCell<[u8; 8]>>);

// SAFETY: one thread writes a cell, before it gives the handle to the tree. Other threads read the
// cell only with the handle from the tree. The test checks that this is enough.
unsafe impl Sync for Plain {}

impl KeySource for Plain {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        // SAFETY: the tree asks only for handles that were inserted, and a cell is written before
        // its handle is inserted and not afterwards.
        f(Some(unsafe { &*self.0[handle.0 as usize].get() }))
    }
}

/// Writes of a thread before it inserted a handle are visible to every thread that gets the handle
/// from the tree.
#[test]
fn keys_are_published() {
    let each = rounds() / 4;
    let tree = SdTree::new(Plain((0..THREADS * each).map(|_| UnsafeCell::new([0; 8])).collect()));
    let start = Barrier::new(THREADS);
    let inserted: usize = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let (tree, start) = (&tree, &start);
                scope.spawn(move || {
                    // All threads draw the same keys, in nearly the same order.
                    let mut random = Random(5);
                    let mut inserted = 0;
                    start.wait();
                    for i in 0..each {
                        let key = (random.next() % each as u64).to_be_bytes();
                        let handle = me * each + i;
                        // SAFETY: only this thread writes this cell, once, before another thread
                        // can have the handle.
                        unsafe { *tree.keys().0[handle].get() = key };
                        inserted += usize::from(tree.insert(&key, Handle(handle as u64)) == Insert::Inserted);
                        assert!(tree.query(&key).is_some(), "this thread or another has inserted it");
                    }
                    inserted
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(tree.check(), inserted as u64);
}
