//! Every interleaving (up to a bound of preemptions) of small cases, by loom.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p sdtree --lib --release`

use std::sync::atomic::Ordering::Relaxed;

use loom::sync::Arc;
use loom::thread;

use super::Table;
use crate::key::Mixer;
use crate::primitive::Counter;
use crate::{Handle, Insert, SdTree};

mod resize;

/// Runs `f` in every order, with at most `preemptions` in each.
pub(crate) fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(f);
}

/// Counts over all runs of a model, to show that the models meet the interesting cases.
pub(crate) struct Count(Counter);

impl Count {
    pub(crate) const fn new() -> Self {
        Count(Counter::new(0))
    }

    pub(crate) fn more(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    pub(crate) fn any(&self) -> bool {
        self.0.load(Relaxed) > 0
    }
}

type Tree = SdTree<Table>;

/// In a model a key's head is its first bytes, and a directory has two slots at least. `a`, `b` and
/// `c` are in one tree: the node of `a` and `b` hangs below the one of `c`. `d` goes on `b`'s side
/// of that node, `e` on `a`'s. In a directory of four slots, `c` has one of its own.
const KEYS: [&[u8]; 11] = [
    &[0x00],
    &[0x03],
    &[0x40],
    &[0x02],
    &[0x00],
    &[0x01],
    &[0x41],
    &[0x43],
    &[0, 0, 0, 0, 0, 0, 1],
    &[0, 0, 0, 0, 0, 0, 2],
    &[0, 0, 0, 0, 0, 0, 3],
];
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const D: usize = 3;
/// The same key as `A`, under another handle.
const A2: usize = 4;
const E: usize = 5;
/// In `c`'s half.
const F: usize = 6;
const G: usize = 7;
/// With the same heads: their ways part in their far heads.
const X: usize = 8;
const Y: usize = 9;
const Z: usize = 10;

fn insert(tree: &Tree, key: usize) -> Insert {
    tree.insert(KEYS[key], Handle(key as u64))
}

fn remove(tree: &Tree, key: usize) -> bool {
    tree.remove(KEYS[key], Handle(key as u64))
}

fn found(tree: &Tree, key: usize) -> bool {
    match tree.query(KEYS[key]) {
        Some(handle) => {
            assert_eq!(handle, Handle(key as u64));
            true
        }
        None => false,
    }
}

/// Begins to move to a directory of `bits` bits, and moves the unit that has keys, or the rest of
/// it.
fn resize(tree: &Tree, bits: u32) {
    let pin = tree.epoch.pin();
    tree.resize(tree.current(&pin), bits);
    let dir = tree.current(&pin);
    if let Some(next) = tree.directory(&dir.next, &pin) {
        tree.move_unit(&pin, dir, next, 0);
    }
}

/// Begins to move, and moves the unit without keys.
fn prepare(tree: &Tree, bits: u32) {
    let pin = tree.epoch.pin();
    tree.resize(tree.current(&pin), bits);
    let dir = tree.current(&pin);
    if let Some(next) = tree.directory(&dir.next, &pin) {
        tree.move_unit(&pin, dir, next, 1);
        // Some free nodes: the search for nodes in all lists has its own model.
        let stock = [(); 5].map(|_| next.pool.allocate(&tree.epoch, &pin));
        stock.into_iter().for_each(|address| next.pool.release(&pin, address));
    }
}

/// A tree of the keys in `first`, with a directory of `bits` bits.
fn tree_of(bits: u32, first: &[usize]) -> Arc<Tree> {
    let keys = Table(KEYS.iter().map(|key| key.to_vec()).collect());
    let tree = Arc::new(SdTree::with(keys, Mixer::new(0), bits));
    for &key in first {
        assert_eq!(insert(&tree, key), Insert::Inserted);
    }
    tree
}

/// Runs two threads on a tree of the keys in `first`, and then `last` at rest.
fn two(first: &'static [usize], one: fn(&Tree), other: fn(&Tree), last: fn(&Tree)) {
    two_from(3, || tree_of(1, first), one, other, last);
}

fn two_from(
    preemptions: usize,
    first: impl Fn() -> Arc<Tree> + Send + Sync + 'static,
    one: fn(&Tree),
    other: fn(&Tree),
    last: fn(&Tree),
) {
    model(preemptions, move || {
        let tree = first();
        let thread = {
            let tree = tree.clone();
            thread::spawn(move || other(&tree))
        };
        one(&tree);
        thread.join().unwrap();
        last(&tree);
        tree.check();
    });
}

/// Asserts which keys are in the tree, and which are not.
fn holds(tree: &Tree, there: &[usize], gone: &[usize]) {
    assert!(there.iter().all(|&key| found(tree, key)));
    assert!(!gone.iter().any(|&key| found(tree, key)));
    assert_eq!(tree.len(), there.len() as u64);
}

#[test]
fn insert_insert_into_nothing() {
    two(&[], |t| _ = insert(t, A), |t| _ = insert(t, B), |t| holds(t, &[A, B], &[]));
}

#[test]
fn insert_insert_at_one_link() {
    two(&[A], |t| _ = insert(t, B), |t| _ = insert(t, D), |t| holds(t, &[A, B, D], &[]));
}

#[test]
fn insert_insert_one_above_the_other() {
    two(&[A, B], |t| _ = insert(t, C), |t| _ = insert(t, D), |t| holds(t, &[A, B, C, D], &[]));
}

#[test]
fn insert_insert_same_key() {
    static FIRST: Count = Count::new();
    static SECOND: Count = Count::new();
    fn put(tree: &Tree, key: usize, other: usize, count: &Count) {
        match insert(tree, key) {
            Insert::Inserted => count.more(),
            Insert::Exists(handle) => assert_eq!(handle, Handle(other as u64)),
        }
    }
    two(&[C], |t| put(t, A, A2, &FIRST), |t| put(t, A2, A, &SECOND), |t| assert_eq!(t.len(), 2));
    assert!(FIRST.any() && SECOND.any());
}

#[test]
fn insert_beside_remove() {
    // The removal of `a` tags the link at which `d` goes in.
    let last: fn(&Tree) = |t| holds(t, &[B, D], &[A]);
    two(&[A, B], |t| assert!(remove(t, A)), |t| assert_eq!(insert(t, D), Insert::Inserted), last);
}

/// The insertion may reach the place of `a` when its node is already unlinked and in a list.
#[test]
fn insert_in_place_of_remove() {
    let last: fn(&Tree) = |t| holds(t, &[B, E], &[A]);
    two(&[A, B], |t| assert!(remove(t, A)), |t| assert_eq!(insert(t, E), Insert::Inserted), last);
}

/// The same key and handle goes and comes back: the removal must not take it twice.
#[test]
fn insert_again_beside_remove() {
    static AGAIN: Count = Count::new();
    static THERE: Counter = Counter::new(0);
    fn put(tree: &Tree) {
        let again = insert(tree, A) == Insert::Inserted;
        THERE.store(u64::from(again), Relaxed);
        if again {
            AGAIN.more();
        }
    }
    let last: fn(&Tree) = |t| assert_eq!(found(t, A), THERE.load(Relaxed) == 1);
    two(&[A, B], |t| assert!(remove(t, A)), put, last);
    assert!(AGAIN.any());
}

#[test]
fn insert_above_remove() {
    let last: fn(&Tree) = |t| holds(t, &[B, C], &[A]);
    two(&[A, B], |t| assert!(remove(t, A)), |t| assert_eq!(insert(t, C), Insert::Inserted), last);
}

#[test]
fn insert_where_the_last_key_goes() {
    let last: fn(&Tree) = |t| holds(t, &[B], &[A]);
    two(&[A], |t| assert!(remove(t, A)), |t| assert_eq!(insert(t, B), Insert::Inserted), last);
}

#[test]
fn insert_of_the_key_that_goes() {
    // Under another handle: `Exists` if that came first; otherwise it is inserted.
    fn put(tree: &Tree) {
        match insert(tree, A2) {
            Insert::Inserted => assert_eq!(tree.query(KEYS[A]), Some(Handle(A2 as u64))),
            Insert::Exists(handle) => assert_eq!(handle, Handle(A as u64)),
        }
    }
    two(&[A, B], |t| assert!(remove(t, A)), put, |t| assert!(found(t, B)));
}

#[test]
fn remove_remove_siblings() {
    two(&[A, B, C], |t| assert!(remove(t, A)), |t| assert!(remove(t, B)), |t| holds(t, &[C], &[A, B]));
}

#[test]
fn remove_remove_to_nothing() {
    let last: fn(&Tree) = |t| {
        holds(t, &[], &[A, B]);
        assert!(t.is_empty());
    };
    two(&[A, B], |t| assert!(remove(t, A)), |t| assert!(remove(t, B)), last);
}

#[test]
fn remove_remove_of_neighbouring_nodes() {
    two(&[A, B, C], |t| assert!(remove(t, C)), |t| assert!(remove(t, B)), |t| holds(t, &[A], &[B, C]));
}

#[test]
fn remove_remove_same_key() {
    static FIRST: Count = Count::new();
    static SECOND: Count = Count::new();
    static DONE: Counter = Counter::new(0);
    fn take(tree: &Tree, count: &Count) {
        if remove(tree, A) {
            count.more();
            DONE.fetch_add(1, Relaxed);
        }
    }
    let last: fn(&Tree) = |t| {
        assert_eq!(DONE.swap(0, Relaxed), 1, "one of them did it");
        holds(t, &[B], &[A]);
    };
    two(&[A, B], |t| take(t, &FIRST), |t| take(t, &SECOND), last);
    assert!(FIRST.any() && SECOND.any());
}

#[test]
fn query_beside_remove() {
    static YES: Count = Count::new();
    static NO: Count = Count::new();
    fn look(tree: &Tree) {
        assert!(found(tree, B), "it is there all the time");
        let first = found(tree, A);
        if first {
            YES.more()
        } else {
            NO.more()
        }
        assert!(first || !found(tree, A), "gone is gone");
    }
    two(&[A, B, C], |t| assert!(remove(t, A)), look, |t| holds(t, &[B, C], &[A]));
    assert!(YES.any() && NO.any());
}

#[test]
fn query_beside_insert() {
    fn look(tree: &Tree) {
        assert!(found(tree, A) && found(tree, B));
        assert!(!found(tree, D) || found(tree, D), "there is there");
    }
    two(&[A, B], |t| _ = insert(t, D), look, |t| holds(t, &[A, B, D], &[]));
}

/// Nodes come and go under a query until they are used again, in another place.
#[test]
fn query_beside_reuse() {
    static REUSED: Count = Count::new();
    fn change(tree: &Tree) {
        let before = tree.stats().bytes;
        assert!(remove(tree, A));
        assert!(remove(tree, C));
        insert(tree, C);
        insert(tree, D);
        if tree.stats().bytes - before < 2 * 16 {
            REUSED.more();
        }
    }
    two(&[A, B, C], change, |t| assert!(found(t, B)), |t| holds(t, &[B, C, D], &[A]));
    assert!(REUSED.any());
}

/// A removal stops halfway while nodes come and go and are used again.
#[test]
fn remove_beside_reuse() {
    fn change(tree: &Tree) {
        for _ in 0..2 {
            insert(tree, D);
            assert!(remove(tree, D));
        }
    }
    two_from(2, || tree_of(1, &[A, B, C]), change, |t| assert!(remove(t, A)), |t| holds(t, &[B, C], &[A, D]));
}

#[test]
fn walk_beside_changes() {
    fn walk(tree: &Tree) {
        let mut seen = 0;
        tree.for_each(|handle| seen += usize::from(handle == Handle(B as u64)));
        assert_eq!(seen, 1);
    }
    fn change(tree: &Tree) {
        assert!(remove(tree, A));
        insert(tree, D);
    }
    two(&[A, B, C], change, walk, |t| holds(t, &[B, C, D], &[A]));
}

/// Keys with records: a removal unlinks two nodes.
#[test]
fn records_remove_beside_insert() {
    let last: fn(&Tree) = |t| holds(t, &[X, Z], &[Y]);
    two_from(
        2,
        || tree_of(1, &[X, Y]),
        |t| assert!(remove(t, Y)),
        |t| assert_eq!(insert(t, Z), Insert::Inserted),
        last,
    );
}

#[test]
fn records_remove_beside_remove() {
    let last: fn(&Tree) = |t| holds(t, &[X], &[Y, Z]);
    two_from(2, || tree_of(1, &[X, Y, Z]), |t| assert!(remove(t, Y)), |t| assert!(remove(t, Z)), last);
}

#[test]
fn records_query_beside_remove() {
    fn look(tree: &Tree) {
        assert!(found(tree, Z) && found(tree, X));
        let first = found(tree, Y);
        assert!(first || !found(tree, Y), "gone is gone");
    }
    two_from(2, || tree_of(1, &[X, Y, Z]), |t| assert!(remove(t, Y)), look, |t| holds(t, &[X, Z], &[Y]));
}

#[test]
fn records_insert_beside_insert() {
    let last: fn(&Tree) = |t| holds(t, &[X, Y, Z], &[]);
    two_from(2, || tree_of(1, &[X]), |t| _ = insert(t, Y), |t| _ = insert(t, Z), last);
}

/// One handle takes the other's place beside a removal of the one that was there.
#[test]
fn upsert_beside_remove() {
    static REPLACED: Count = Count::new();
    static AFTER: Count = Count::new();
    fn put(tree: &Tree) {
        match tree.upsert(KEYS[A2], Handle(A2 as u64)) {
            Some(before) => {
                assert_eq!(before, Handle(A as u64));
                REPLACED.more();
            }
            None => AFTER.more(),
        }
    }
    let last: fn(&Tree) = |t| {
        assert_eq!((t.query(KEYS[A]), t.len()), (Some(Handle(A2 as u64)), 2));
    };
    two(&[A, B], |t| _ = remove(t, A), put, last);
    assert!(REPLACED.any() && AFTER.any());
}

#[test]
fn upsert_beside_upsert_and_insert_beside_it() {
    let last: fn(&Tree) = |t| {
        assert!(matches!(t.query(KEYS[A]), Some(Handle(0 | 4))));
        assert!(found(t, E));
    };
    fn put(tree: &Tree) {
        tree.upsert(KEYS[A], Handle(A as u64));
        insert(tree, E);
    }
    two(&[A, B], put, |t| _ = t.upsert(KEYS[A2], Handle(A2 as u64)), last);
}

#[test]
fn upsert_beside_growing() {
    let last: fn(&Tree) = |t| assert_eq!((t.query(KEYS[A]), t.len()), (Some(Handle(A2 as u64)), 3));
    two_from(2, growing, |t| resize(t, 2), |t| assert!(t.upsert(KEYS[A2], Handle(A2 as u64)).is_some()), last);
}

/// Two removals that meet, and a query of the key that stays.
#[test]
fn three_threads() {
    model(2, || {
        let tree = tree_of(1, &[A, B, C]);
        let threads: Vec<_> = [A, B]
            .into_iter()
            .map(|key| {
                let tree = tree.clone();
                thread::spawn(move || assert!(remove(&tree, key)))
            })
            .collect();
        assert!(found(&tree, C));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        holds(&tree, &[C], &[A, B]);
        tree.check();
    });
}

fn growing() -> Arc<Tree> {
    let tree = tree_of(1, &[A, B, C]);
    prepare(&tree, 2);
    tree
}

fn shrinking() -> Arc<Tree> {
    let tree = tree_of(2, &[A, B, C]);
    prepare(&tree, 1);
    tree
}
