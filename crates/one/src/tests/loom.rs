//! Every interleaving of two threads on one object.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use loom::thread;

use crate::{ObjectId, ObjectStore, One};

/// Counts over all runs of a model, to show that it came to the point. The standard library's
/// counter: it need not be modelled.
struct Count(AtomicU64);

impl Count {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn more(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    fn any(&self) -> bool {
        self.0.load(Relaxed) > 0
    }
}

/// Objects that come and go in one step: what the store does inside is not modelled.
#[derive(Default)]
struct Store(Mutex<BTreeMap<u64, Vec<u8>>>);

impl ObjectStore for Store {
    type Error = Infallible;

    fn put(&self, id: ObjectId, object: &[u8]) -> Result<(), Infallible> {
        assert!(self.0.lock().unwrap().insert(id.0, object.to_vec()).is_none(), "an identity in use");
        Ok(())
    }

    fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        // Not under the lock: `f` is interrupted by the model.
        let object = self.0.lock().unwrap().get(&id.0).cloned();
        f(object.as_deref())
    }

    fn remove(&self, id: ObjectId) {
        assert!(self.0.lock().unwrap().remove(&id.0).is_some(), "removed twice");
    }
}

const OBJECT: &[u8] = b"x";

fn two(first: fn(&One<Store>), other: fn(&One<Store>), last: fn(&One<Store>)) {
    // Two preemptions: three take minutes.
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let one = loom::sync::Arc::new(One::new(Store::default()));
        // Another object, so that nodes come and go.
        one.put(b"y").unwrap();
        let thread = {
            let one = one.clone();
            thread::spawn(move || other(&one))
        };
        first(&one);
        thread.join().unwrap();
        last(&one);
        one.tree.check();
    });
}

fn put_and_release(one: &One<Store>) -> bool {
    let put = one.put(OBJECT).unwrap();
    assert!(one.references(put.id) > 0);
    one.store().with_object(put.id, |object| assert_eq!(object, Some(OBJECT)));
    one.release(put.id).unwrap();
    put.new
}

#[test]
fn one_put_and_put() {
    static SAME: Count = Count::new();
    fn last(one: &One<Store>) {
        let id = one.query(OBJECT).unwrap();
        assert_eq!(one.references(id), 2);
        assert_eq!(one.store().0.lock().unwrap().len(), 2);
        SAME.more();
    }
    two(|one| _ = one.put(OBJECT), |one| _ = one.put(OBJECT), last);
    assert!(SAME.any());
}

#[test]
fn one_put_and_last_release() {
    static ANEW: Count = Count::new();
    static KEPT: Count = Count::new();
    fn other(one: &One<Store>) {
        put_and_release(one);
    }
    fn last(one: &One<Store>) {
        let id = one.query(OBJECT).unwrap();
        assert_eq!(one.references(id), 1);
        assert_eq!(one.store().0.lock().unwrap().len(), 2);
        // Identities are given out in order: 0 and 1, and another one if the object was stored
        // again or for nothing.
        if id.0 > 1 { ANEW.more() } else { KEPT.more() }
    }
    two(|one| _ = one.put(OBJECT), other, last);
    assert!(ANEW.any() && KEPT.any());
}

#[test]
fn one_last_release_and_last_release() {
    fn body(one: &One<Store>) {
        put_and_release(one);
    }
    fn last(one: &One<Store>) {
        assert_eq!((one.query(OBJECT), one.store().0.lock().unwrap().len()), (None, 1));
    }
    two(body, body, last);
}

#[test]
fn one_put_and_put_of_what_was_lost() {
    static SAME: Count = Count::new();
    const LOST: u128 = 7 << 64;
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(|| {
        // The store has lost it, but a reference is held.
        let one = loom::sync::Arc::new(One::over(Store::default(), [LOST]));
        let put = |one: &One<Store>| one.put_by(LOST, OBJECT).unwrap();
        let thread = {
            let one = one.clone();
            thread::spawn(move || put(&one))
        };
        let (here, there) = (put(&one), thread.join().unwrap());
        assert!(here.new != there.new && here.id == there.id && here.id.0 != 0, "stored once: {here:?} {there:?}");
        if here.id.0 == 2 {
            SAME.more();
        }
        assert_eq!((one.find(LOST), one.references(here.id), one.references(ObjectId(0))), (Some(here.id), 2, 1));
        assert_eq!(one.store().0.lock().unwrap().len(), 1);
        one.tree.check();
    });
    assert!(SAME.any());
}
