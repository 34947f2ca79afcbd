//! ONE against a model, and with many threads.

use super::tests_collide::MARK;
use super::*;
use crate::tests::Random;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Barrier;
use std::thread;

/// Objects shorter than, as long as and longer than a key; colliding ones; one that is another
/// one's key; the empty one.
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

#[derive(Clone, Debug)]
enum ByDigest {
    Put(u128, u8),
    Claim(usize, u8),
    Release(usize),
    Lose(usize),
}

fn by_digest() -> impl Strategy<Value = ByDigest> {
    let (digest, content, any) = (0..6u128, 0..4u8, 0..64usize);
    prop_oneof![
        3 => (digest, content.clone()).prop_map(|(digest, content)| ByDigest::Put(digest, content)),
        2 => (any.clone(), content).prop_map(|(i, content)| ByDigest::Claim(i, content)),
        3 => any.clone().prop_map(ByDigest::Release),
        1 => any.prop_map(ByDigest::Lose),
    ]
}

/// An object as the model knows it.
#[derive(Clone)]
struct Known {
    digest: u128,
    content: Option<u8>,
    count: u64,
}

/// Short and long ones, among them digests.
fn content(number: u8) -> Vec<u8> {
    match number {
        0 => vec![],
        1 => 1u128.to_be_bytes().to_vec(),
        2 => vec![2; MAX_KEY_LEN],
        _ => vec![3; 2 * MAX_KEY_LEN],
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    /// Digests of the caller's, which collide; objects from before; a store that loses some.
    #[test]
    fn by_digest_as_a_map(
        before in proptest::collection::vec((0..200u128, 0..4u8), 0..150),
        ops in proptest::collection::vec(by_digest(), 0..200),
    ) {
        let store = MemoryStore::new();
        let mut model: std::collections::BTreeMap<ObjectId, Known> = Default::default();
        let mut found: HashMap<u128, ObjectId> = HashMap::new();
        for (i, &(digest, number)) in before.iter().enumerate() {
            let id = ObjectId(i as u64);
            store.put(id, &content(number)).unwrap();
            model.insert(id, Known { digest, content: Some(number), count: 1 });
            found.insert(digest, id); // the last one counts
        }
        let one = One::over(store, before.iter().map(|&(digest, _)| digest));
        for op in ops {
            let ids: Vec<ObjectId> = model.keys().copied().collect();
            let nth = |i: usize| ids.get(i % ids.len().max(1)).copied().unwrap_or(ObjectId(1000));
            match op {
                ByDigest::Put(digest, number) => {
                    let put = one.put_by(digest, &content(number)).unwrap();
                    let there = found.get(&digest).map(|id| (*id, model[id].content));
                    match there {
                        Some((id, Some(same))) if same == number => {
                            prop_assert_eq!(put, Put { id, new: false });
                            model.get_mut(&id).unwrap().count += 1;
                        }
                        _ => {
                            prop_assert!(put.new && !model.contains_key(&put.id));
                            model.insert(put.id, Known { digest, content: Some(number), count: 1 });
                            // Another object under one digest is kept, not found; a lost one makes room.
                            if !matches!(there, Some((_, Some(_)))) {
                                found.insert(digest, put.id);
                            }
                        }
                    }
                }
                ByDigest::Claim(i, number) => {
                    let id = nth(i);
                    let known = model.get_mut(&id).filter(|known| known.content == Some(number));
                    prop_assert_eq!(one.claim(id, &content(number)), known.is_some());
                    known.into_iter().for_each(|known| known.count += 1);
                }
                ByDigest::Release(i) => {
                    let id = nth(i);
                    let Some(known) = model.get_mut(&id) else {
                        prop_assert_eq!(one.release(id), Err(UnknownObject { id }));
                        continue;
                    };
                    known.count -= 1;
                    prop_assert_eq!(one.release(id), Ok(known.count));
                    if known.count == 0 {
                        let digest = known.digest;
                        model.remove(&id);
                        found.retain(|&of, there| of != digest || *there != id);
                    }
                }
                ByDigest::Lose(i) => {
                    if let Some(known) = model.get_mut(&nth(i)) {
                        known.content = None;
                    }
                    one.store().remove(nth(i));
                }
            }
            let digests: Vec<u128> = (0..200).collect();
            let all = one.find_many(&digests);
            for digest in digests {
                prop_assert_eq!(one.find(digest), found.get(&digest).copied());
                prop_assert_eq!(all[digest as usize], found.get(&digest).copied());
            }
            for (&id, known) in &model {
                prop_assert_eq!(one.references(id), known.count);
                prop_assert_eq!(bytes(&one, id), known.content.map(content));
            }
            prop_assert_eq!(one.len(), found.len() as u64);
        }
        one.tree.check();
    }
}

#[test]
fn what_is_put_by_a_digest_is_found_by_it_alone() {
    let one = One::new(MemoryStore::new());
    let (digest, object) = (5u128, b"short".as_slice());
    let by_digest = one.put_by(digest, object).unwrap();
    assert!(one.query(object).is_none() && one.query(&digest.to_be_bytes()).is_none());
    let own = one.put(object).unwrap();
    assert!(own.new && own.id != by_digest.id);
    let of_its_bytes = one.put(&9u128.to_be_bytes()).unwrap();
    assert_eq!((one.find(digest), one.find(9), one.find(6)), (Some(by_digest.id), None, None));
    assert_eq!(one.find_many(&[9, digest, 6]), [None, Some(by_digest.id), None]);
    assert!(one.claim(of_its_bytes.id, &9u128.to_be_bytes()) && !one.claim(ObjectId(77), object));
    assert_eq!(one.references(of_its_bytes.id), 2);
}

/// Many objects from before, found by two threads at once; an object takes at most so many bytes.
#[test]
fn an_index_over_many_objects() {
    const OBJECTS: u64 = 300_000;
    let digest = |i: u64| u128::from(i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    let one = One::over(MemoryStore::new(), (0..OBJECTS).map(digest));
    let right = |i| one.find(digest(i)) == Some(ObjectId(i));
    thread::scope(|scope| {
        let right = &right;
        (0..2).for_each(|half| _ = scope.spawn(move || assert!((0..OBJECTS).skip(half).step_by(2).all(right))));
    });
    assert!(one.find(digest(OBJECTS)).is_none());
    assert!(one.bytes() < 48 * OBJECTS, "{} bytes an object", one.bytes() / OBJECTS);
    assert_eq!(one.put_by(digest(OBJECTS), b"new").unwrap(), Put { id: ObjectId(OBJECTS), new: true });
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

/// Identities are used again. Another test's thread that is pinned and has no CPU holds them back
/// for a while, so what counts is the best of many rounds.
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
        assert_eq!(one.query(&object), Some(again.id), "once");
        assert_eq!(one.release(first.id), Ok(0));
        assert_eq!(one.release(again.id), Ok(0));
        assert!(one.query(&object).is_none());
    }
}

/// Threads put and release the same few objects. While a thread holds a reference, the object is
/// there with its bytes, and whoever puts it gets the same identity.
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
