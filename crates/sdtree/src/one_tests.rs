//! ONE against a model, and with many threads.

use super::tests_collide::MARK;
use super::*;
use crate::tests::Random;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Barrier;
use std::thread;

/// Objects shorter than, as long as and longer than a key; colliding ones; one that is another one's key; the empty one.
fn objects(one: &One<MemoryStore>) -> Vec<Vec<u8>> {
    let long = |last: u8| [vec![1; MAX_KEY_LEN], vec![last]].concat();
    let colliding = |last: u8| [MARK, &long(last)].concat();
    let mut objects = vec![vec![], vec![0], vec![0, 0], vec![1; MAX_KEY_LEN], vec![9; 3 * MAX_KEY_LEN]];
    objects.extend([long(1), long(2), colliding(1), colliding(2), colliding(3)]);
    objects.push(one.digest(&long(1)).to_be_bytes().to_vec());
    objects
}

#[derive(Clone, Debug)]
enum Op {
    Put(usize),
    Retain(usize),
    Release(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let any = 0..64usize;
    prop_oneof![
        3 => any.clone().prop_map(Op::Put),
        1 => any.clone().prop_map(Op::Retain),
        3 => any.prop_map(Op::Release),
    ]
}

fn bytes(one: &One<MemoryStore>, id: ObjectId) -> Option<Vec<u8>> {
    one.store().with_object(id, |object| object.map(<[u8]>::to_vec))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn as_a_map(ops in proptest::collection::vec(op(), 0..200)) {
        let one = One::new(MemoryStore::new());
        let objects = objects(&one);
        let mut model: HashMap<ObjectId, (usize, u64)> = HashMap::new();
        for op in ops {
            match op {
                Op::Put(i) => {
                    let i = i % objects.len();
                    let put = one.put(&objects[i]).unwrap();
                    let known = model.get_mut(&put.id);
                    prop_assert_eq!(put.new, known.is_none());
                    match known {
                        Some((there, count)) => {
                            prop_assert_eq!(*there, i, "another object's identity");
                            *count += 1;
                        }
                        None => {
                            // Only those that share their key with another object may be kept twice.
                            let twice = model.values().any(|&(there, _)| there == i);
                            prop_assert!(!twice || i == 5 || i >= 7, "object {} is there already", i);
                            model.insert(put.id, (i, 1));
                        }
                    }
                }
                Op::Retain(i) | Op::Release(i) if model.is_empty() => {
                    prop_assert!(one.retain(ObjectId(i as u64)).is_err() && one.release(ObjectId(i as u64)).is_err());
                }
                Op::Retain(i) => {
                    let mut ids: Vec<_> = model.keys().copied().collect();
                    ids.sort();
                    let id = ids[i % ids.len()];
                    let count = &mut model.get_mut(&id).unwrap().1;
                    *count += 1;
                    prop_assert_eq!(one.retain(id), Ok(*count));
                }
                Op::Release(i) => {
                    let mut ids: Vec<_> = model.keys().copied().collect();
                    ids.sort();
                    let id = ids[i % ids.len()];
                    let count = &mut model.get_mut(&id).unwrap().1;
                    *count -= 1;
                    prop_assert_eq!(one.release(id), Ok(*count));
                    if *count == 0 {
                        model.remove(&id);
                        prop_assert_eq!(one.references(id), 0);
                        prop_assert_eq!(one.release(id), Err(UnknownObject { id }));
                        prop_assert_eq!(bytes(&one, id), None);
                    }
                }
            }
            for (&id, &(object, count)) in &model {
                prop_assert_eq!(one.references(id), count);
                prop_assert_eq!(bytes(&one, id), Some(objects[object].clone()));
            }
            for (i, object) in objects.iter().enumerate() {
                match one.query(object) {
                    Some(id) => prop_assert_eq!(model.get(&id).map(|m| m.0), Some(i)),
                    None => prop_assert!(i == 5 || i >= 7 || model.values().all(|&(there, _)| there != i)),
                }
            }
        }
        one.tree.check();
    }
}

#[test]
fn different_objects_with_one_key_are_both_kept() {
    let one = One::new(MemoryStore::new());
    let objects = objects(&one);
    let ids: Vec<_> = objects.iter().map(|object| one.put(object).unwrap()).collect();
    assert!(ids.iter().all(|put| put.new));
    for (put, object) in ids.iter().zip(&objects) {
        assert_eq!(bytes(&one, put.id).as_ref(), Some(object));
    }
    assert_eq!(one.len(), objects.len() as u64 - 3, "two with a digest that was there, one that is a digest");
    assert!(ids.iter().all(|put| one.release(put.id) == Ok(0)));
    assert!(one.is_empty());
}

/// Identities are used again. Another test's thread that is pinned and has no CPU holds them back for a while, so what
/// counts is the best of many rounds.
#[test]
fn identities_come_back() {
    const PUTS: u32 = 20_000;
    let one = One::new(MemoryStore::new());
    let fresh = (0..30).map(|_| {
        let before = one.fresh.load(Relaxed);
        for i in 0..PUTS {
            let put = one.put(&i.to_be_bytes()).unwrap();
            assert!(put.new);
            assert_eq!(one.release(put.id), Ok(0));
        }
        one.fresh.load(Relaxed) - before
    });
    let best = fresh.min().unwrap();
    assert!(best < u64::from(PUTS) / 10, "{best} new identities for {PUTS} objects");
}

/// A store that fails, and one that loses objects.
struct Weak {
    inner: MemoryStore,
    full: std::sync::atomic::AtomicBool,
}

impl ObjectStore for Weak {
    type Error = &'static str;

    fn put(&self, id: ObjectId, object: &[u8]) -> Result<(), &'static str> {
        if self.full.load(Relaxed) {
            return Err("full");
        }
        self.inner.put(id, object).map_err(|_| "never")
    }

    fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        self.inner.with_object(id, f)
    }

    fn remove(&self, id: ObjectId) {
        self.inner.remove(id);
    }
}

#[test]
fn a_store_may_fail_or_lose_an_object() {
    for len in [10, 2 * MAX_KEY_LEN] {
        let one = One::new(Weak { inner: MemoryStore::new(), full: true.into() });
        let object = vec![3; len];
        assert_eq!(one.put(&object), Err("full"));
        assert!(one.is_empty() && one.query(&object).is_none());
        one.store().full.store(false, Relaxed);
        let first = one.put(&object).unwrap();
        one.store().inner.remove(first.id);
        assert_eq!(one.query(&object), None);
        let again = one.put(&object).unwrap();
        assert!(again.new && again.id != first.id, "what is lost is stored again");
        assert_eq!(one.release(first.id), Ok(0));
        assert_eq!(one.release(again.id), Ok(0));
        assert!(one.query(&object).is_none());
    }
}

/// Threads put and release the same few objects. While a thread holds a reference, the object is there with its bytes, and
/// whoever puts it gets the same identity.
#[test]
fn puts_and_last_releases() {
    const THREADS: usize = 4;
    let rounds = if cfg!(debug_assertions) { 20_000 } else { 200_000 };
    let one = One::new(MemoryStore::new());
    let objects: Vec<Vec<u8>> = vec![vec![1; 8], vec![2; MAX_KEY_LEN], vec![3; MAX_KEY_LEN + 1]];
    let start = Barrier::new(THREADS);
    let news: usize = thread::scope(|scope| {
        let (one, objects, start) = (&one, &objects, &start);
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                scope.spawn(move || {
                    let mut random = Random(me as u64);
                    let mut news = 0;
                    start.wait();
                    for _ in 0..rounds {
                        let object = &objects[random.below(objects.len())];
                        let put = one.put(object).unwrap();
                        news += usize::from(put.new);
                        assert!(one.references(put.id) > 0, "held");
                        one.store().with_object(put.id, |stored| assert_eq!(stored, Some(&object[..])));
                        assert_eq!(one.query(object), Some(put.id), "held, so it is found");
                        let again = one.put(object).unwrap();
                        assert_eq!((again.id, again.new), (put.id, false), "held, so it is the same");
                        one.release(again.id).unwrap();
                        one.release(put.id).unwrap();
                    }
                    news
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(news > objects.len(), "the last release was met {news} times");
    assert!(one.is_empty());
    assert_eq!(one.tree.check(), 0);
    assert!((0..one.fresh.load(Relaxed)).all(|id| bytes(&one, ObjectId(id)).is_none()), "nothing is left in the store");
}
