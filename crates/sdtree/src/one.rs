//! ONE, the Object Non-duplicate Engine: every object is kept once, and counts its users.
//!
//! An object is any row of bytes: a page, a chunk of a file, a whole file. The bytes live in an
//! [`ObjectStore`] of the caller's; ONE finds whether an object is there already, gives it an
//! identity, and counts references.
//!
//! ```
//! use sdtree::one::{MemoryStore, One};
//! let one = One::new(MemoryStore::new());
//! let first = one.put(b"some bytes")?;
//! let again = one.put(b"some bytes")?;
//! assert!(first.new && !again.new && first.id == again.id);
//! assert_eq!(one.release(first.id)?, 1);
//! assert_eq!(one.release(first.id)?, 0); // the last user: the object is gone
//! assert_eq!(one.query(b"some bytes"), None);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it works
//!
//! The index is one [`SdTree`]. **An object of up to [`MAX_KEY_LEN`] bytes is its own key**: no
//! digest is made of it, and the comparison that ends a search of the tree is the proof of
//! equality. A longer object has a 128-bit digest for a key, and is compared with the stored
//! object, byte by byte, before it counts as the same. Should two different objects have one key (a
//! digest met twice), the second is kept as well, but is not found by content: that costs space,
//! never a wrong answer. An object that the store has lost makes room for its like.
//!
//! # Objects that outlive the engine
//!
//! Where reading the store is dear, or its objects are there before the engine, the caller makes
//! the digests and keeps them beside the objects. Then nothing is read to fill the index
//! ([`One::over`]) or to look into it ([`One::find`]); whoever puts ([`One::put_by`]) or claims
//! ([`One::claim`]) an object still has it compared byte by byte. Such an object has its digest for
//! a key, however short it is. An object is found only in the way that it was put: use one way for
//! all.
//!
//! ```
//! use sdtree::one::{MemoryStore, ObjectId, ObjectStore, One};
//! let digest = |object: &[u8]| object.iter().fold(0, |sum, &byte| sum * 31 + u128::from(byte)); // anything
//! let store = MemoryStore::new();
//! store.put(ObjectId(0), b"from before")?;
//! let one = One::over(store, [digest(b"from before")]);
//! let found = one.find(digest(b"from before")).filter(|&id| one.claim(id, b"from before"));
//! assert_eq!(found, Some(ObjectId(0)));
//! assert!(one.put_by(digest(b"another"), b"another")?.new);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Races
//!
//! The count of an object decides: it goes from 0 to 1 once, when the object is made, and from 1 to
//! 0 once, by its last release; an object whose count is 0 is dead and stays so. A
//! [`put`](One::put) takes its reference by raising a count that is not 0. So a `put` that meets
//! the last release either comes first, and the object lives on under its identity, or comes
//! second, and the object is stored anew under another identity, as new. It never returns a dead
//! one. It does not wait for the releasing thread either, but takes the dead object out of the tree
//! itself.
//!
//! Identities are used again. Every operation is pinned (`crossbeam-epoch`), and an identity comes
//! back only when all operations that were under way at its release have ended: so within one
//! operation an identity means one object. All operations are lock-free as far as the store is.

use crate::prefetch::prefetch;
use crate::primitive::{AtomicU64, Ordering, random_seed};
use crate::{Handle, Insert, KeySource, MAX_KEY_LEN, SdTree};
use Ordering::{AcqRel, Acquire, Relaxed, Release};
use crossbeam_queue::SegQueue;
use smallvec::SmallVec;
use std::sync::Arc;
use table::Table;
use xxhash_rust::xxh3::xxh3_128_with_seed;

mod memory;
mod table;

#[cfg(all(test, loom))]
mod loom_tests;
#[cfg(all(test, not(loom)))]
mod tests;

pub use memory::MemoryStore;

/// The name of an object, as long as somebody holds a reference; later it may become that of
/// another one.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ObjectId(pub u64);

/// Where objects live. Identities are small numbers, so that a store may be an array.
///
/// An object must stay as it is from [`put`](ObjectStore::put) to [`remove`](ObjectStore::remove).
/// A store that cannot promise that may answer `None` for what is gone: such an object is missed
/// when its like is put, which is stored and found from then on; it is never taken for another one.
pub trait ObjectStore {
    /// Why an object cannot be stored.
    type Error;

    /// Keeps `object` under `id`, which has no object now.
    ///
    /// # Errors
    ///
    /// The store's own. Nothing is kept then.
    fn put(&self, id: ObjectId, object: &[u8]) -> Result<(), Self::Error>;

    /// Calls `f` once with the object, or with `None` if there is none (any more). May be called
    /// for an object that is being removed.
    fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R;

    /// Forgets the object, if it has not lost it.
    fn remove(&self, id: ObjectId);
}

/// What [`One::put`] did.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Put {
    /// The object's identity. The caller holds one more reference to it.
    pub id: ObjectId,
    /// Whether the object was stored now; otherwise it was there, and its bytes were compared.
    pub new: bool,
}

/// The identity names no object that is there.
#[derive(Copy, Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("object {} is not there: it was released more often than it was put and retained", id.0)]
pub struct UnknownObject {
    /// The identity.
    pub id: ObjectId,
}

/// What ONE knows of an object.
#[derive(Default)]
struct Entry {
    /// Twice the number of references, and 1 more if the key is a digest. No references: dead, or
    /// never used.
    state: AtomicU64,
    /// The digest that is the key; of no meaning if the object is its own.
    digest: [AtomicU64; 2],
}

/// The store and the entries: the tree's key source.
struct Objects<S> {
    store: S,
    entries: Table<Entry>,
}

/// An object's key in the tree.
enum Key<'a> {
    /// The object itself.
    Own(&'a [u8]),
    /// Its digest.
    Digest([u8; 16]),
}

impl Key<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Key::Own(bytes) => bytes,
            Key::Digest(bytes) => bytes,
        }
    }
}

impl Entry {
    fn digest(&self) -> [u8; 16] {
        let [high, low] = self.digest.each_ref().map(|half| u128::from(half.load(Relaxed)));
        (high << 64 | low).to_be_bytes()
    }

    fn is_by_digest(&self) -> bool {
        self.state.load(Relaxed) & 1 != 0
    }

    fn references(&self) -> u64 {
        self.state.load(Acquire) / 2
    }

    /// Another reference, unless the object is dead. Gives how many there are.
    fn acquire(&self) -> Option<u64> {
        let more = |state: u64| (state > 1).then(|| state + 2);
        self.state.fetch_update(AcqRel, Acquire, more).ok().map(|before| before / 2 + 1)
    }

    /// One reference less, unless there is none. Gives how many are left.
    fn give_back(&self) -> Option<u64> {
        let less = |state: u64| state.checked_sub(2);
        self.state.fetch_update(AcqRel, Acquire, less).ok().map(|before| before / 2 - 1)
    }

    /// It was made, and nobody is to have it.
    fn kill(&self) {
        self.state.store(0, Relaxed);
    }
}

impl<S: ObjectStore> KeySource for Objects<S> {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        match self.entries.get(handle.0) {
            Some(entry) if entry.is_by_digest() => f(Some(&entry.digest())),
            Some(_) => self.store.with_object(ObjectId(handle.0), f),
            None => f(None),
        }
    }

    fn prefetch(&self, handle: Handle) {
        if let Some(entry) = self.entries.get(handle.0) {
            prefetch(entry);
        }
    }
}

/// The engine. See the module's page.
pub struct One<S: ObjectStore> {
    tree: SdTree<Objects<S>>,
    seed: u64,
    /// Identities below this have been used.
    fresh: std::sync::atomic::AtomicU64,
    free: Arc<SegQueue<u64>>,
}

/// What a stored object is to one that is put.
enum Met {
    /// The same; the caller has a reference now.
    Same,
    /// The same, or once the same, and dead.
    Dead,
    /// The store has lost it; whether it was the same cannot be known.
    Lost,
    /// Another one under the same key.
    Other,
}

impl<S: ObjectStore> One<S> {
    /// An engine over an empty store.
    pub fn new(store: S) -> Self {
        One {
            tree: SdTree::new(Objects { store, entries: Table::new() }),
            seed: random_seed(),
            fresh: 0.into(),
            free: Arc::default(),
        }
    }

    /// An engine over a store that has objects already: the first one's identity is 0, and this its
    /// digest, the next one's is 1, and so on. Each has one reference, the caller's. They are
    /// found as if they had been put by [`put_by`](One::put_by); of several with one digest,
    /// the last. None of them is read.
    ///
    /// # Panics
    ///
    /// Beyond 2⁴⁰ objects.
    pub fn over(store: S, digests: impl IntoIterator<Item = u128>) -> Self {
        const GROUP: usize = 64;
        let one = One::new(store);
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

    /// As [`put`](One::put), under a digest of the caller's: whatever makes equal objects equal
    /// numbers, and others hardly ever.
    ///
    /// # Errors
    ///
    /// As [`put`](One::put).
    pub fn put_by(&self, digest: u128, object: &[u8]) -> Result<Put, S::Error> {
        self.put_under(&Key::Digest(digest.to_be_bytes()), object)
    }

    fn put_under(&self, key: &Key<'_>, object: &[u8]) -> Result<Put, S::Error> {
        let guard = pin::pin();
        if let Some(handle) = self.tree.query(key.bytes())
            && let Met::Same = self.meet(handle, key, object)
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
            let Insert::Exists(handle) = self.tree.insert(key.bytes(), Handle(id.0)) else {
                return Ok(Put { id, new: true });
            };
            match self.meet(handle, key, object) {
                Met::Same => {
                    self.entry(id).kill();
                    self.store().remove(id);
                    self.use_again(id, &guard);
                    return Ok(Put { id: ObjectId(handle.0), new: false });
                }
                Met::Other => return Ok(Put { id, new: true }),
                // Pinned: this handle still means the dead or lost object, and no other that we would take out in
                // error.
                Met::Dead | Met::Lost => _ = self.tree.remove(key.bytes(), handle),
            }
        }
    }

    /// Looks for an object. The stored object's bytes were equal when they were compared.
    ///
    /// Takes no reference: where others release, the answer may be out of date at once. To be sure,
    /// [`put`](One::put).
    pub fn query(&self, object: &[u8]) -> Option<ObjectId> {
        let _guard = pin::pin();
        let key = self.key(object);
        let handle = self.tree.query(key.bytes())?;
        let is_same = matches!(self.compare(handle, &key, object), Met::Same);
        (is_same && self.references(ObjectId(handle.0)) > 0).then_some(ObjectId(handle.0))
    }

    /// Looks for an object that was put by this digest. Nothing is read or compared: what is found
    /// is likely the one that is looked for, which [`claim`](One::claim) proves. Takes no
    /// reference.
    pub fn find(&self, digest: u128) -> Option<ObjectId> {
        let _guard = pin::pin();
        let id = ObjectId(self.tree.query(&digest.to_be_bytes())?.0);
        self.is_findable(id).then_some(id)
    }

    /// [`find`](One::find) for each of these digests, in their order; quicker, for what they need
    /// is fetched side by side.
    pub fn find_many(&self, digests: &[u128]) -> Vec<Option<ObjectId>> {
        const GROUP: usize = 64;
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

    /// Takes a reference to an object if it is there and equal to `object`, byte by byte; says
    /// whether it did.
    pub fn claim(&self, id: ObjectId, object: &[u8]) -> bool {
        let _guard = pin::pin();
        if self.tree.keys().entries.get(id.0).and_then(Entry::acquire).is_none() {
            return false;
        }
        let equal = self.store().with_object(id, |stored| stored == Some(object));
        if !equal {
            // This may be the last reference by now; an error is impossible, for it is ours.
            let _ = self.release(id);
        }
        equal
    }

    /// Takes a further reference to an object that the caller holds a reference to. Gives how many
    /// there are now.
    ///
    /// # Errors
    ///
    /// [`UnknownObject`].
    pub fn retain(&self, id: ObjectId) -> Result<u64, UnknownObject> {
        let _guard = pin::pin();
        self.tree.keys().entries.get(id.0).and_then(Entry::acquire).ok_or(UnknownObject { id })
    }

    /// Gives back a reference; the last one takes the object out of the store. Gives how many are
    /// left.
    ///
    /// The caller must hold a reference. Whoever releases more often than that releases somebody
    /// else's: an error is all but certain, but which object it hits is not.
    ///
    /// # Errors
    ///
    /// [`UnknownObject`]: nobody held a reference.
    pub fn release(&self, id: ObjectId) -> Result<u64, UnknownObject> {
        let guard = pin::pin();
        let left = self.tree.keys().entries.get(id.0).and_then(Entry::give_back).ok_or(UnknownObject { id })?;
        if left == 0 {
            // It may not be in the tree: taken out by a `put`, or never in. Where the store has lost it, the
            // tree drops it when it meets it.
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

    /// Bytes of memory that the engine takes beside the store, for the tree and for the entries.
    pub fn bytes(&self) -> u64 {
        self.tree.stats().bytes + self.fresh.load(Relaxed) * size_of::<Entry>() as u64
    }

    fn key<'a>(&self, object: &'a [u8]) -> Key<'a> {
        if object.len() <= MAX_KEY_LEN { Key::Own(object) } else { Key::Digest(self.digest(object).to_be_bytes()) }
    }

    fn digest(&self, object: &[u8]) -> u128 {
        #[cfg(test)]
        if object.starts_with(tests_collide::MARK) {
            return 7;
        }
        xxh3_128_with_seed(object, self.seed)
    }

    fn entry(&self, id: ObjectId) -> &Entry {
        self.tree.keys().entries.ensure(id.0)
    }

    /// An identity with one reference, for an object with this key. Nobody else knows it yet.
    fn make(&self, key: &Key<'_>) -> ObjectId {
        let id = ObjectId(self.free.pop().unwrap_or_else(|| self.fresh.fetch_add(1, Relaxed)));
        let entry = self.entry(id);
        if let Key::Digest(digest) = key {
            let digest = u128::from_be_bytes(*digest);
            entry.digest[0].store((digest >> 64) as u64, Relaxed);
            entry.digest[1].store(digest as u64, Relaxed);
        }
        // Release, for whoever comes by the identity in another way than through the tree.
        entry.state.store(2 | u64::from(matches!(key, Key::Digest(_))), Release);
        id
    }

    /// The identity may be used again when everybody who may know it has ended what they are at.
    fn use_again(&self, id: ObjectId, guard: &pin::Guard) {
        let free = self.free.clone();
        pin::later(guard, move || free.push(id.0));
    }

    /// What the object behind a handle, which the tree gave for `key`, is to `object`, which has
    /// that key.
    fn compare(&self, handle: Handle, key: &Key<'_>, object: &[u8]) -> Met {
        let id = ObjectId(handle.0);
        match (self.entry(id).is_by_digest(), key) {
            (false, Key::Own(_)) => Met::Same, // the tree has compared the key, which is the object
            (true, Key::Digest(_)) => self.store().with_object(id, |stored| match stored {
                None => Met::Lost,
                Some(stored) if stored == object => Met::Same,
                Some(_) => Met::Other,
            }),
            _ => Met::Other, // an object that is another one's digest
        }
    }

    /// As [`One::compare`]; takes a reference to what is the same.
    fn meet(&self, handle: Handle, key: &Key<'_>, object: &[u8]) -> Met {
        // The reference first: what is held cannot go while it is compared.
        let id = ObjectId(handle.0);
        if self.entry(id).acquire().is_none() {
            return Met::Dead;
        }
        let met = self.compare(handle, key, object);
        if !matches!(met, Met::Same) {
            // This may be the last reference by now; an error is impossible, for it is ours.
            let _ = self.release(id);
        }
        met
    }
}

/// While an operation is pinned, no identity that it can see is used again.
#[cfg(not(loom))]
mod pin {
    pub(super) use crossbeam_epoch::{Guard, pin};

    /// Does `f` when everybody who is pinned now has ended.
    pub(super) fn later(guard: &Guard, f: impl FnOnce() + Send + 'static) {
        guard.defer(f);
    }
}

/// Loom cannot model crossbeam's epochs, so there everybody is pinned for ever.
#[cfg(loom)]
mod pin {
    pub(super) struct Guard;

    pub(super) fn pin() -> Guard {
        Guard
    }

    pub(super) fn later(_: &Guard, _: impl FnOnce()) {}
}

/// Lets tests make digests collide.
#[cfg(test)]
mod tests_collide {
    pub(super) const MARK: &[u8] = b"COLLIDE";
}
