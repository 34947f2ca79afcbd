//! Keys that change or vanish under the tree.

use std::sync::Mutex;
use std::thread;

use super::Random;
use crate::{Handle, Insert, KeySource, MAX_KEY_LEN, SdTree};

/// Keys that may change at any time.
#[derive(Default)]
struct Changing(Mutex<Vec<Option<Vec<u8>>>>);

impl Changing {
    fn set(&self, handle: u64, key: Option<&[u8]>) {
        let mut keys = self.0.lock().unwrap();
        let len = keys.len().max(handle as usize + 1);
        keys.resize(len, None);
        keys[handle as usize] = key.map(<[u8]>::to_vec);
    }

    fn get(&self, handle: Handle) -> Option<Vec<u8>> {
        self.0.lock().unwrap().get(handle.0 as usize).cloned().flatten()
    }
}

impl KeySource for Changing {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(self.get(handle).as_deref())
    }
}

fn tree_of(keys: &[&[u8]]) -> SdTree<Changing> {
    fill(SdTree::new(Changing::default()), keys)
}

fn fill(tree: SdTree<Changing>, keys: &[&[u8]]) -> SdTree<Changing> {
    for (i, key) in keys.iter().enumerate() {
        tree.keys().set(i as u64, Some(key));
        assert_eq!(tree.insert(key, Handle(i as u64)), Insert::Inserted);
    }
    tree
}

#[test]
fn a_key_that_is_gone_can_be_removed() {
    let tree = tree_of(&[b"abc", b"abd"]);
    tree.keys().set(0, None);
    assert_eq!(tree.query(b"abc"), None);
    assert!(tree.remove(b"abc", Handle(0)));
    assert!(!tree.remove(b"abc", Handle(0)));
    assert_eq!(tree.query(b"abd"), Some(Handle(1)));
    assert_eq!(tree.check(), 1);
}

#[test]
fn a_gone_key_gives_way() {
    let tree = tree_of(&[b"abc", b"abd"]);
    tree.keys().set(0, None);
    tree.keys().set(2, Some(b"abc"));
    assert_eq!(tree.insert(b"abc", Handle(2)), Insert::Inserted);
    assert_eq!(tree.query(b"abc"), Some(Handle(2)));
    assert!(!tree.remove(b"abc", Handle(0)), "it was dropped");
    assert_eq!((tree.check(), tree.stats().stale_dropped), (2, 1));
}

/// A changed key must not lead an insertion to the wrong place: it would hide every key below.
/// Where heads differ, its bytes are not read at all.
#[test]
fn a_changed_key_misleads_nobody() {
    let tree = tree_of(&[b"aaaa", b"aaab", b"aabb", b"aabc"]);
    tree.keys().set(0, Some(b"\xffaaa"));
    tree.keys().set(4, Some(b"aaa`"));
    assert_eq!(tree.insert(b"aaa`", Handle(4)), Insert::Inserted);
    for (i, key) in [(1, b"aaab"), (2, b"aabb"), (3, b"aabc"), (4, b"aaa`")] {
        assert_eq!(tree.query(key), Some(Handle(i)));
    }
    assert_eq!((tree.query(b"aaaa"), tree.query(b"\xffaaa")), (None, None));
    assert!(tree.remove(b"aaaa", Handle(0)));
    assert_eq!((tree.check(), tree.stats().stale_dropped), (4, 0));
}

/// Where heads are equal, bytes are compared. The fingerprint exposes a key whose head changed, its
/// bits a key that does not fit its way, and a second key one that changed elsewhere.
#[test]
fn a_changed_key_among_equal_heads() {
    let changes: [&[u8]; 3] = [b"\xff\0\0\x01", b"\0\xff\0\x02", b"\0\xff\0\x01"];
    for change in changes {
        let keys: [&[u8]; 3] = [b"\0\0\0\x01", b"\0\0\0\x02", b"\0\0\x80\x01"];
        let mut tree = fill(SdTree::with_heads(Changing::default(), 0), &keys[..2]);
        if change[0] != 0 {
            tree.mixer.mask = 1 << 40; // as if the change could be seen in the head, in about half of all trees
            let heads = [tree.mixer.key(change).head, tree.mixer.key(keys[0]).head, tree.mixer.key(keys[2]).head];
            if heads[0] == heads[1] || heads[1] != heads[2] || heads[1] != 0 {
                continue;
            }
        }
        tree.keys().set(0, Some(change));
        tree.keys().set(2, Some(keys[2]));
        assert_eq!(tree.insert(keys[2], Handle(2)), Insert::Inserted, "{change:?}");
        assert_eq!(tree.query(keys[1]), Some(Handle(1)), "{change:?}");
        assert_eq!(tree.query(keys[2]), Some(Handle(2)), "{change:?}");
        assert_eq!((tree.check(), tree.stats().stale_dropped), (2, 1), "{change:?}");
    }
}

/// Pages with equal heads: they differ in one byte that no head looks at.
fn colliding(count: u8) -> Vec<Vec<u8>> {
    let page = |i| {
        let mut page = vec![7; MAX_KEY_LEN];
        (page[0], page[1000]) = (9, i);
        page
    };
    (0..count).map(page).collect()
}

/// An insertion among keys with equal heads asks their records, not their bytes, which may have
/// changed.
#[test]
fn records_are_of_the_keys_that_were_inserted() {
    let pages = colliding(90);
    let tree = tree_of(&pages[..60].iter().map(Vec::as_slice).collect::<Vec<_>>());
    let changed = |i: &usize| *i > 0 && i.is_multiple_of(2) && *i < 60;
    for i in (0..60).filter(changed) {
        tree.keys().set(i as u64, (i % 4 == 0).then_some(&[1; MAX_KEY_LEN]));
    }
    for (i, page) in pages.iter().enumerate().skip(60) {
        tree.keys().set(i as u64, Some(page));
        assert_eq!(tree.insert(page, Handle(i as u64)), Insert::Inserted);
    }
    for (i, page) in pages.iter().enumerate() {
        assert_eq!(tree.query(page).is_some(), !changed(&i), "{i}");
    }
    assert_eq!(tree.stats().stale_dropped, 0);
    assert!(pages.iter().enumerate().all(|(i, page)| tree.remove(page, Handle(i as u64))));
    assert_eq!(tree.check(), 0);
}

/// `retain` drops keys that the source has lost, unless another key agrees with them in 28 bits.
#[test]
fn what_is_lost_is_not_retained() {
    let keys: Vec<Vec<u8>> = (0..500u16).map(|i| i.to_be_bytes().to_vec()).chain(colliding(3)).collect();
    let tree = tree_of(&keys.iter().map(Vec::as_slice).collect::<Vec<_>>());
    (0..keys.len() as u64).filter(|i| i % 2 == 0).for_each(|i| tree.keys().set(i, None));
    tree.retain(|handle| tree.keys().get(handle).is_some());
    let lost = keys.iter().enumerate().filter(|(i, _)| i % 2 == 0);
    let left = lost.filter(|(i, key)| tree.remove(key, Handle(*i as u64))).map(|(i, _)| i).collect::<Vec<_>>();
    assert!(left.iter().all(|i| *i >= 500), "{left:?}");
    assert_eq!(tree.check(), keys.len() as u64 / 2);
}

/// Of two keys that disagree, the one that does not fit its way is not believed.
#[test]
fn a_changed_second_key_is_not_believed() {
    let keys: [&[u8]; 3] = [b"\0\0\0\x01", b"\0\0\0\x02", b"\0\0\x80\x01"];
    for change in [None, Some(&b"\0\xff\0\x01"[..])] {
        let tree = fill(SdTree::with_heads(Changing::default(), 0), &keys[..2]);
        tree.keys().set(1, change);
        tree.keys().set(2, Some(keys[2]));
        assert_eq!(tree.insert(keys[2], Handle(2)), Insert::Inserted);
        assert_eq!(tree.query(keys[0]), Some(Handle(0)));
        assert_eq!(tree.query(keys[2]), Some(Handle(2)));
        assert!(tree.remove(keys[1], Handle(1)));
        assert_eq!((tree.check(), tree.stats().stale_dropped), (2, 0));
    }
}

/// A key that changed into the searched one is in the wrong place: it is not found, and there is no
/// wrong answer.
#[test]
fn a_key_that_became_another() {
    let tree = tree_of(&[b"abc", b"xyz"]);
    tree.keys().set(0, Some(b"abd"));
    assert_eq!(tree.query(b"abd"), None);
    tree.keys().set(2, Some(b"abd"));
    assert_eq!(tree.insert(b"abd", Handle(2)), Insert::Inserted);
    assert_eq!(tree.query(b"abd"), Some(Handle(2)));
    assert!(tree.remove(b"abc", Handle(0)), "it is where it was put");
    assert_eq!(tree.check(), 2);
}

#[test]
fn the_only_key_is_stale() {
    let tree = tree_of(&[b"abc"]);
    tree.keys().set(0, None);
    tree.keys().set(1, Some(b"abc"));
    assert_eq!(tree.insert(b"abc", Handle(1)), Insert::Inserted);
    assert_eq!((tree.check(), tree.stats().stale_dropped), (1, 1));
}

/// A source that has lost everything: every insertion ends, and the tree heals.
#[test]
fn all_keys_are_gone() {
    let keys: Vec<[u8; 8]> = (0..1000u64).map(|i| Random(i).next().to_be_bytes()).collect();
    let tree = tree_of(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>());
    (0..1000).for_each(|i| tree.keys().set(i, None));
    for (i, key) in keys.iter().enumerate() {
        let handle = 1000 + i as u64;
        tree.keys().set(handle, Some(key));
        assert_eq!(tree.insert(key, Handle(handle)), Insert::Inserted);
    }
    assert_eq!((tree.check(), tree.stats().stale_dropped), (1000, 1000));
}

/// Half of the keys change at random, at random times; the other half must never get lost.
#[test]
fn steady_keys_are_always_found() {
    let mut random = Random(1);
    // Short keys over few values: the prefixes of steady and of changing keys are thoroughly mixed.
    let mut draw = move || -> (u64, Vec<u8>) {
        let len = 1 + random.below(4);
        (random.next(), (0..len).map(|_| [0, 1, 0x80, 0xff][random.below(4)]).collect())
    };
    for _ in 0..300 {
        let tree = SdTree::new(Changing::default());
        let mut steady: Vec<(Vec<u8>, Handle)> = Vec::new();
        let mut handle = 0;
        for _ in 0..200 {
            let (choice, mut key) = draw();
            match choice % 4 {
                0 => {
                    key.push(b's'); // no changing key ends like this
                    tree.keys().set(handle, Some(&key));
                    match tree.insert(&key, Handle(handle)) {
                        Insert::Inserted => steady.push((key, Handle(handle))),
                        Insert::Exists(there) => assert!(steady.contains(&(key, there))),
                    }
                    handle += 1;
                }
                1 => {
                    tree.keys().set(handle, Some(&key));
                    tree.insert(&key, Handle(handle));
                    handle += 1;
                }
                _ if handle > 0 => {
                    let victim = choice / 4 % handle;
                    if !steady.iter().any(|(_, steady)| steady.0 == victim) {
                        tree.keys().set(victim, (choice & 1 == 0).then_some(&key));
                    }
                }
                _ => {}
            }
            if let Some(found) = tree.query(&draw().1) {
                assert!(tree.keys().get(found).is_some());
            }
            for (key, handle) in &steady {
                assert_eq!(tree.query(key), Some(*handle));
            }
        }
        for (key, handle) in &steady {
            assert!(tree.remove(key, *handle));
        }
    }
}

/// Insertions, removals and queries while another thread changes every key all the time: all end,
/// none lies.
#[test]
fn everything_changes_all_the_time() {
    let tree = SdTree::new(Changing::default());
    let rounds = if cfg!(debug_assertions) { 3_000 } else { 20_000 };
    thread::scope(|scope| {
        for seed in 0..3 {
            let tree = &tree;
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..rounds {
                    let handle = random.next() % 64;
                    let key = [(random.next() % 8) as u8, (random.next() % 8) as u8];
                    match random.below(4) {
                        0 => tree.keys().set(handle, Some(&key)),
                        1 => drop(tree.insert(&key, Handle(handle))),
                        2 => drop(tree.remove(&key, Handle(handle))),
                        _ => drop(tree.query(&key)),
                    }
                }
            });
        }
    });
    let mut left = 0;
    tree.for_each(|_| left += 1);
    assert_eq!(left, tree.len());
}
