//! Single properties of ONE, some with many threads.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use sdtree::MAX_KEY_LEN;

use super::{bytes, objects};
use crate::{MemoryStore, ObjectId, ObjectStore, One, Put};

/// A small generator of numbers (splitmix64), the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
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

/// Many objects from before, found by two threads at once; and a limit of the bytes for an object.
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
    full: AtomicBool,
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
/// there with its bytes, and every put returns the same identity.
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
