//! The engine: puts, looks up and releases objects.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crossbeam_queue::SegQueue;
use sdtree::{Handle, Insert, KeySource, MAX_KEY_LEN, SdTree};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::entry::{Entry, Key, Objects};
use crate::table::Table;
use crate::{ObjectId, ObjectStore, Put, UnknownObject, pin};

/// Keys that are looked up or inserted side by side.
const GROUP: usize = 64;

/// The engine; the crate's page says how it works.
///
/// ```
/// use one::{MemoryStore, ObjectStore, One};
///
/// let one = One::new(MemoryStore::new());
/// let ids: Vec<_> = std::thread::scope(|scope| {
///     let put = || scope.spawn(|| one.put(b"a page").unwrap().id);
///     [put(), put()].map(|thread| thread.join().unwrap()).into()
/// });
/// assert_eq!(ids[0], ids[1]);
/// assert_eq!((one.len(), one.references(ids[0])), (1, 2));
/// assert!(one.claim(ids[0], b"a page") && !one.claim(ids[0], b"another"));
/// assert_eq!(one.retain(ids[0])?, 4);
/// one.store().with_object(ids[0], |object| assert_eq!(object, Some(&b"a page"[..])));
/// # Ok::<(), one::UnknownObject>(())
/// ```
pub struct One<S: ObjectStore> {
    pub(crate) tree: SdTree<Objects<S>>,
    /// Of the digests that the engine makes itself.
    seed: u64,
    /// Identities below this have been used.
    pub(crate) fresh: AtomicU64,
    /// Identities that no object has, to be used again.
    free: Arc<SegQueue<u64>>,
}

/// How a stored object compares with one that is put.
enum Match {
    /// The same.
    Same,
    /// Under the same key, and dead.
    Dead,
    /// The store has lost it; whether it was the same cannot be known.
    Lost,
    /// Another object under the same key.
    Other,
}

impl<S: ObjectStore> One<S> {
    /// An engine over an empty store.
    pub fn new(store: S) -> Self {
        Self {
            tree: SdTree::new(Objects { store, entries: Table::new() }),
            seed: random_seed(),
            fresh: 0.into(),
            free: Arc::default(),
        }
    }

    /// An engine over a store that has objects already: `digests` yields the digest of object 0, of
    /// object 1, and so on. Each object has one reference, which belongs to the caller. Objects are
    /// found as if they had been put by [`put_by`](One::put_by); of several with one digest, the
    /// last is. None of them is read.
    ///
    /// # Panics
    ///
    /// Beyond 2⁴⁰ objects.
    pub fn over(store: S, digests: impl IntoIterator<Item = u128>) -> Self {
        let one = Self::new(store);
        let mut digests = digests.into_iter().map(u128::to_be_bytes);
        loop {
            let keys: SmallVec<[[u8; 16]; GROUP]> = digests.by_ref().take(GROUP).collect();
            let handles = keys.iter().map(|key| Handle(one.make(&Key::Digest(*key)).0));
            let items: SmallVec<[(&[u8], Handle); GROUP]> = keys.iter().map(|key| &key[..]).zip(handles).collect();
            let mut results = [Insert::Inserted; GROUP];
            one.tree.insert_many(&items, &mut results[..items.len()]);
            for (&(key, handle), result) in items.iter().zip(results) {
                if result != Insert::Inserted {
                    one.tree.query(key).map(|earlier| one.tree.remove(key, earlier));
                    one.tree.insert(key, handle);
                }
            }
            if keys.len() < GROUP {
                return one;
            }
        }
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.tree.keys().store
    }

    /// Makes sure that `object` is kept, and takes a reference to it.
    ///
    /// # Errors
    ///
    /// Those of the store; nothing has changed then.
    pub fn put(&self, object: &[u8]) -> Result<Put, S::Error> {
        self.put_under(&self.key(object), object)
    }

    /// [`put`](One::put) under a digest that the caller made: equal objects have equal digests,
    /// different ones seldom do.
    ///
    /// # Errors
    ///
    /// Those of the store; nothing has changed then.
    pub fn put_by(&self, digest: u128, object: &[u8]) -> Result<Put, S::Error> {
        self.put_under(&Key::Digest(digest.to_be_bytes()), object)
    }

    fn put_under(&self, key: &Key<'_>, object: &[u8]) -> Result<Put, S::Error> {
        let guard = pin::pin();
        let entry = self.tree.entry(key.bytes());
        if let Some(handle) = entry.get()
            && let Match::Same = self.take_same(handle, key, object)
        {
            return Ok(Put { id: ObjectId(handle.0), new: false });
        }
        let id = self.make(key);
        if let Err(error) = self.store().put(id, object) {
            self.entry(id).kill();
            self.use_again(id, &guard);
            return Err(error);
        }
        loop {
            let Insert::Exists(handle) = entry.insert(Handle(id.0)) else {
                return Ok(Put { id, new: true });
            };
            match self.take_same(handle, key, object) {
                Match::Same => {
                    self.entry(id).kill();
                    self.store().remove(id);
                    self.use_again(id, &guard);
                    return Ok(Put { id: ObjectId(handle.0), new: false });
                }
                Match::Other => return Ok(Put { id, new: true }),
                // Pinned: the handle still means the dead or lost object, so no other one is
                // removed.
                Match::Dead | Match::Lost => _ = entry.remove_handle(handle),
            }
        }
    }

    /// Looks for an object. The stored object's bytes were equal when they were compared.
    ///
    /// Takes no reference: if other threads release, the answer may be out of date at once. To be
    /// sure, use [`put`](One::put).
    pub fn query(&self, object: &[u8]) -> Option<ObjectId> {
        let _guard = pin::pin();
        let key = self.key(object);
        let handle = self.tree.query(key.bytes())?;
        let is_same = matches!(self.compare(handle, &key, object), Match::Same);
        (is_same && self.references(ObjectId(handle.0)) > 0).then_some(ObjectId(handle.0))
    }

    /// Looks for an object that was put by this digest. Nothing is read or compared: the object
    /// found is likely the right one, which [`claim`](One::claim) proves. Takes no reference.
    pub fn find(&self, digest: u128) -> Option<ObjectId> {
        let _guard = pin::pin();
        let id = ObjectId(self.tree.query(&digest.to_be_bytes())?.0);
        self.is_findable(id).then_some(id)
    }

    /// [`find`](One::find) for each of these digests, in their order. It is faster than separate
    /// calls, because the memory that the searches read is fetched side by side.
    pub fn find_many(&self, digests: &[u128]) -> Vec<Option<ObjectId>> {
        let mut all = Vec::with_capacity(digests.len());
        for digests in digests.chunks(GROUP) {
            let _guard = pin::pin();
            let keys: SmallVec<[[u8; 16]; GROUP]> = digests.iter().map(|digest| digest.to_be_bytes()).collect();
            let keys: SmallVec<[&[u8]; GROUP]> = keys.iter().map(|key| &key[..]).collect();
            let mut found = [None; GROUP];
            self.tree.query_many(&keys, &mut found[..keys.len()]);
            let ids = found[..keys.len()].iter().map(|handle| handle.map(|handle| ObjectId(handle.0)));
            all.extend(ids.map(|id| id.filter(|&id| self.is_findable(id))));
        }
        all
    }

    fn is_findable(&self, id: ObjectId) -> bool {
        self.entry(id).is_by_digest() && self.references(id) > 0
    }

    /// Takes a reference to an object if it is there and equal to `object`, byte by byte. Returns
    /// whether it did.
    pub fn claim(&self, id: ObjectId, object: &[u8]) -> bool {
        let _guard = pin::pin();
        if self.tree.keys().entries.get(id.0).and_then(Entry::acquire).is_none() {
            return false;
        }
        let equal = self.store().with_object(id, |stored| stored == Some(object));
        if !equal {
            // It may be the last reference by now. It is ours, so there is no error.
            let _ = self.release(id);
        }
        equal
    }

    /// Takes a further reference to an object that the caller holds a reference to. Returns how
    /// many there are then.
    ///
    /// # Errors
    ///
    /// [`UnknownObject`]: no reference is held.
    pub fn retain(&self, id: ObjectId) -> Result<u64, UnknownObject> {
        let _guard = pin::pin();
        self.tree.keys().entries.get(id.0).and_then(Entry::acquire).ok_or(UnknownObject { id })
    }

    /// Gives back a reference; the last one removes the object from the store. Returns how many are
    /// left.
    ///
    /// The caller must hold a reference. Without one it releases the reference of another user,
    /// maybe of another object under the same identity; later calls then return errors.
    ///
    /// # Errors
    ///
    /// [`UnknownObject`]: no reference was held.
    pub fn release(&self, id: ObjectId) -> Result<u64, UnknownObject> {
        let guard = pin::pin();
        let left = self.tree.keys().entries.get(id.0).and_then(Entry::give_back).ok_or(UnknownObject { id })?;
        if left == 0 {
            // It may not be in the tree: a `put` took it out, or it never was. If the store has
            // lost it, the tree drops the handle at the next insertion that meets it.
            let handle = Handle(id.0);
            self.tree.keys().with_key(handle, |key| key.is_some_and(|key| self.tree.remove(key, handle)));
            self.store().remove(id);
            self.use_again(id, &guard);
        }
        Ok(left)
    }

    /// References to an object; 0 if it is not there.
    pub fn references(&self, id: ObjectId) -> u64 {
        self.tree.keys().entries.get(id.0).map_or(0, Entry::references)
    }

    /// Objects that can be found. Exact while no other thread changes anything.
    pub fn len(&self) -> u64 {
        self.tree.len()
    }

    /// Whether no object can be found at this moment.
    pub fn is_empty(&self) -> bool {
        self.tree.is_empty()
    }

    /// Bytes of memory that the engine uses beside the store: for the tree and for the entries.
    pub fn bytes(&self) -> u64 {
        self.tree.stats().bytes + self.fresh.load(Relaxed) * size_of::<Entry>() as u64
    }

    fn key<'a>(&self, object: &'a [u8]) -> Key<'a> {
        if object.len() <= MAX_KEY_LEN { Key::Own(object) } else { Key::Digest(self.digest(object).to_be_bytes()) }
    }

    pub(crate) fn digest(&self, object: &[u8]) -> u128 {
        #[cfg(test)]
        if object.starts_with(crate::tests::COLLIDING) {
            return 7;
        }
        xxh3_128_with_seed(object, self.seed)
    }

    fn entry(&self, id: ObjectId) -> &Entry {
        self.tree.keys().entries.ensure(id.0)
    }

    /// A new identity with one reference, for an object with this key. No other thread knows it
    /// yet.
    fn make(&self, key: &Key<'_>) -> ObjectId {
        let id = ObjectId(self.free.pop().unwrap_or_else(|| self.fresh.fetch_add(1, Relaxed)));
        self.entry(id).begin(key);
        id
    }

    /// Makes an identity free when all operations that may know it have ended.
    fn use_again(&self, id: ObjectId, guard: &pin::Guard) {
        let free = self.free.clone();
        pin::later(guard, move || free.push(id.0));
    }

    /// Compares the object behind a handle, which the tree gave for `key`, with `object`, which has
    /// that key.
    fn compare(&self, handle: Handle, key: &Key<'_>, object: &[u8]) -> Match {
        let id = ObjectId(handle.0);
        match (self.entry(id).is_by_digest(), key) {
            (false, Key::Own(_)) => Match::Same, // the tree has compared the key, which is the object
            (true, Key::Digest(_)) => self.store().with_object(id, |stored| match stored {
                None => Match::Lost,
                Some(stored) if stored == object => Match::Same,
                Some(_) => Match::Other,
            }),
            _ => Match::Other, // the bytes of one object are the digest of the other
        }
    }

    /// [`One::compare`], which also tells dead objects. If the two are the same, the caller has a
    /// reference then.
    fn take_same(&self, handle: Handle, key: &Key<'_>, object: &[u8]) -> Match {
        // The reference comes first: a held object cannot go while it is compared.
        let id = ObjectId(handle.0);
        if self.entry(id).acquire().is_none() {
            return Match::Dead;
        }
        let found = self.compare(handle, key, object);
        if !matches!(found, Match::Same) {
            // It may be the last reference by now. It is ours, so there is no error.
            let _ = self.release(id);
        }
        found
    }
}

/// A number that differs from engine to engine, and is the same in every run of a test.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    if cfg!(any(loom, test, fuzzing)) {
        return 0;
    }
    RandomState::new().build_hasher().finish()
}
