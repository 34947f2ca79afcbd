//! Memory: how much a key costs, and that it does not grow when keys come and go.

use super::{Random, Table};
use crate::{Handle, Insert, KeySource, SdTree};
use std::sync::mpsc;
use std::thread;

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

#[test]
fn sixteen_bytes_a_key() {
    let tree = SdTree::new(Computed);
    let keys = 100_000;
    for i in 0..keys {
        assert_eq!(tree.insert(&Computed::key(i), Handle(i)), Insert::Inserted);
    }
    let stats = tree.stats();
    assert_eq!((stats.keys, stats.nodes_live), (keys, keys - 1));
    assert!(stats.bytes < keys * 17, "{stats:?}");
    assert!(stats.bytes_reserved < keys * 40, "{stats:?}");
    assert_eq!(tree.check(), keys);
}

/// A million pairs of one insertion and one removal, beside 1000 keys that stay.
#[test]
fn churn_is_bounded() {
    let tree = SdTree::new(Computed);
    let (stay, pairs) = (1000, 1_000_000);
    for i in 0..stay {
        tree.insert(&Computed::key(i), Handle(i));
    }
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

/// One thread only inserts, another only removes: nodes must find their way from the one to the other.
#[test]
fn nodes_go_round_between_threads() {
    let tree = SdTree::new(Computed);
    let pairs = 200_000;
    let window = 100;
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
    // A thread that loses the processor in the middle of an operation holds the clock; generous for that.
    let stats = tree.stats();
    assert!(stats.nodes_free < pairs / 4, "{stats:?}");
    assert_eq!((tree.check(), tree.is_empty()), (0, true));
}

/// A pinned thread (here: inside the key source's closure, or `for_each`) holds memory back, and nothing else.
#[test]
fn nothing_is_reclaimed_under_a_pin() {
    let keys: Vec<Vec<u8>> = (0..300u64).map(|i| Computed::key(i).to_vec()).collect();
    let tree = SdTree::new(Table(keys.clone()));
    for (i, key) in keys.iter().enumerate() {
        tree.insert(key, Handle(i as u64));
    }
    let before = tree.stats().ticks;
    let mut seen = 0;
    tree.for_each(|handle| {
        seen += 1;
        let key = &keys[handle.0 as usize];
        assert!(tree.remove(key, handle));
        assert_eq!(tree.query(key), None);
    });
    assert_eq!((seen, tree.check()), (300, 0));
    let ticks = tree.stats().ticks - before;
    assert!(ticks <= 1, "the clock went on by {ticks}");
}
