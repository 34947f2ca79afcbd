//! Memory: how much a key costs, and that it does not grow when keys come and go.

use std::ptr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::thread;

use super::{Random, Table};
use crate::key::Mixer;
use crate::{Handle, Insert, KeySource, SdTree};

/// Keys computed from the handle.
struct Computed;

impl Computed {
    fn key(handle: u64) -> [u8; 8] {
        Random(handle).next().to_be_bytes()
    }
}

impl KeySource for Computed {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(Some(&Self::key(handle.0)))
    }
}

/// Bytes of a tree without keys, with single blocks and pages.
const FIXED: u64 = 128 << 10;

/// At every size, also while the tree is growing.
#[test]
fn at_most_24_bytes_a_key() {
    let tree = SdTree::new(Computed);
    let (mut most, mut sum, keys) = (0.0f64, 0.0, 400_000);
    for i in 0..keys {
        assert_eq!(tree.insert(&Computed::key(i), Handle(i)), Insert::Inserted);
        if i >= 50_000 {
            let each = tree.stats().bytes.saturating_sub(FIXED) as f64 / (i + 1) as f64;
            (most, sum) = (most.max(each), sum + each);
        }
    }
    assert!(most <= 24.0, "{most}");
    assert!(sum / (keys - 50_000) as f64 <= 18.0, "on average {}", sum / (keys - 50_000) as f64);
    assert_eq!(tree.check(), keys);
    let stats = tree.stats();
    assert!(stats.bytes_reserved < 3 * stats.bytes, "{stats:?}");
}

/// A million pairs of one insertion and one removal, beside 1000 keys that stay.
#[test]
fn churn_is_bounded() {
    let tree = SdTree::new(Computed);
    let (stay, pairs) = (1000, 1_000_000);
    for i in 0..stay {
        tree.insert(&Computed::key(i), Handle(i));
    }
    tree.check(); // with the growing behind it
    let before = tree.stats();
    for i in stay..stay + pairs {
        let key = Computed::key(i);
        assert_eq!(tree.insert(&key, Handle(i)), Insert::Inserted);
        assert!(tree.remove(&key, Handle(i)));
    }
    let after = tree.stats();
    assert!(after.bytes <= before.bytes + 1000 * 16, "{before:?} {after:?}");
    assert!(after.ticks > 1000, "{after:?}");
    assert_eq!(tree.check(), stay);
}

/// After 99 % of the keys were removed, in no order, their memory is given back; and again.
#[test]
fn removals_give_memory_back() {
    let tree = SdTree::new(Computed);
    let (keys, stay) = (300_000, 3_000);
    let mut full = 0;
    for round in 0..3 {
        for i in stay * u64::from(round > 0)..keys {
            tree.insert(&Computed::key(i), Handle(i));
        }
        full = tree.stats().bytes.max(full);
        for i in stay..keys {
            assert!(tree.remove(&Computed::key(i), Handle(i)));
        }
        let stats = tree.stats();
        assert!(stats.bytes - FIXED.min(stats.bytes) < 100 * stay, "{stats:?}");
        assert!(stats.bytes < full / 8 && stats.bytes_reserved < full / 4, "{full} {stats:?}");
        for i in 0..stay {
            assert_eq!(tree.query(&Computed::key(i)), Some(Handle(i)));
        }
        assert_eq!(tree.check(), stay);
    }
    let refilled = tree.stats().resizes;
    assert!(refilled > 10, "{refilled}");
}

/// One thread only inserts, another only removes: nodes must come from the one to the other.
#[test]
fn nodes_go_round_between_threads() {
    let tree = SdTree::new(Computed);
    let pairs = 200_000;
    let window = 1000;
    thread::scope(|scope| {
        let (send, receive) = mpsc::sync_channel(window);
        let remover = scope.spawn({
            let tree = &tree;
            move || {
                for i in receive {
                    assert!(tree.remove(&Computed::key(i), Handle(i)));
                }
            }
        });
        for i in 0..pairs {
            assert_eq!(tree.insert(&Computed::key(i), Handle(i)), Insert::Inserted);
            send.send(i).unwrap();
        }
        drop(send);
        remover.join().unwrap();
    });
    // The limit is generous: a thread that loses the processor in the middle of an operation holds
    // the clock.
    let stats = tree.stats();
    assert!(stats.nodes < pairs / 4, "{stats:?}");
    assert_eq!((tree.check(), tree.is_empty()), (0, true));
}

/// A thread that counts the keys of a large tree may find, when it has counted, that the tree has
/// left the directory. The size that it chose was meant for that directory. It may have several
/// bits more than the present one; then a unit would fill two slots and lose the rest.
#[test]
fn a_directory_that_was_left_is_not_resized() {
    let tree = SdTree::with(Computed, Mixer::new(0), 12);
    for i in 0..100 {
        tree.insert(&Computed::key(i), Handle(i));
    }
    {
        let pin = tree.epoch.pin();
        let counted = tree.current(&pin);
        tree.resize(counted, 8);
        while ptr::eq(tree.current(&pin), counted) {
            tree.upkeep(&pin);
        }
        tree.resize(counted, 13);
        tree.resize(counted, 10);
        assert!(tree.current(&pin).next.load(Relaxed).is_null());
    }
    tree.finish();
    assert_eq!(tree.stats().directory_bits, 8);
    assert_eq!(tree.check(), 100);
}

/// A pinned thread (here: inside `for_each`) holds memory back, and nothing else.
#[test]
fn nothing_is_reclaimed_under_a_pin() {
    let keys: Vec<Vec<u8>> = (0..3000u64).map(|i| Computed::key(i).to_vec()).collect();
    let tree = SdTree::new(Table(keys.clone()));
    for (i, key) in keys.iter().enumerate() {
        tree.insert(key, Handle(i as u64));
    }
    tree.check();
    let before = tree.stats();
    let mut seen = 0;
    tree.for_each(|handle| {
        seen += 1;
        let key = &keys[handle.0 as usize];
        assert!(tree.remove(key, handle));
        assert_eq!(tree.query(key), None);
    });
    let after = tree.stats();
    assert!(after.ticks - before.ticks <= 1, "{before:?} {after:?}");
    assert!(after.resizes > before.resizes, "it shrank under the walk");
    assert_eq!((seen, tree.check()), (3000, 0));
}
