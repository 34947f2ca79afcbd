//! ONE, the Object Non-duplicate Engine: every object is kept once, and counts its users.
//!
//! An object is any row of bytes: a page, a chunk of a file, a whole file. The bytes live in an [`ObjectStore`] of the caller's;
//! ONE finds whether an object is there already, gives it an identity, and counts references.
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
//! The index is one [`SdTree`]. **An object of up to [`MAX_KEY_LEN`] bytes is its own key**: no digest is made of it, and
//! the comparison that ends a search of the tree is the proof of equality. A longer object has a 128-bit digest for a key, and is
//! compared with the stored object, byte by byte, before it counts as the same. Should two different objects
//! have one key (a digest met twice), the second is kept as well, but is not found by content: that costs space,
//! never a wrong answer.
//!
//! # Races
//!
//! The count of an object decides: it goes from 0 to 1 once, when the object is made, and from 1 to 0 once, by its last
//! release; an object whose count is 0 is dead and stays so. A [`put`](One::put) takes its reference by raising a count that
//! is not 0. So a `put` that meets the last release either comes first, and the object lives on under its
//! identity, or comes second, and the object is stored anew under another identity, as new. It never returns a dead one.
//! It does not wait for the releasing thread either, but takes the dead object out of the tree itself.
//!
//! Identities are used again. Every operation is pinned (`crossbeam-epoch`), and an identity comes back only when all
//! operations that were under way at its release have ended: so within one operation an identity means one object. All
//! operations are lock-free as far as the store is.

use crate::primitive::{AtomicU64, Ordering, random_seed};
use crate::{Handle, Insert, KeySource, MAX_KEY_LEN, SdTree};
use Ordering::{AcqRel, Acquire, Relaxed, Release};
use crossbeam_queue::SegQueue;
use std::sync::Arc;
use table::Table;
use xxhash_rust::xxh3::xxh3_128_with_seed;

#[path = "one_memory.rs"]
mod memory;
#[path = "one_table.rs"]
mod table;

#[cfg(all(test, loom))]
#[path = "one_loom.rs"]
mod loom_tests;
#[cfg(all(test, not(loom)))]
#[path = "one_tests.rs"]
mod tests;

pub use memory::MemoryStore;

/// The name of an object, as long as somebody holds a reference; later it may become that of another one.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ObjectId(pub u64);

/// Where objects live. Identities are small numbers, so that a store may be an array.
///
/// An object must stay as it is from [`put`](ObjectStore::put) to [`remove`](ObjectStore::remove). A store that cannot promise
/// that may answer `None` for what is gone: such an object may be missed when its like is put, and is
/// never taken for another one.
pub trait ObjectStore {
    /// Why an object cannot be stored.
    type Error;

    /// Keeps `object` under `id`, which has no object now.
    ///
    /// # Errors
    ///
    /// The store's own. Nothing is kept then.
    fn put(&self, id: ObjectId, object: &[u8]) -> Result<(), Self::Error>;

    /// Calls `f` once with the object, or with `None` if there is none (any more). May be called for an object that is being
    /// removed.
    fn with_object<R>(&self, id: ObjectId, f: impl FnOnce(Option<&[u8]>) -> R) -> R;

    /// Forgets the object.
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
    /// References. 0: dead, or never used.
    references: AtomicU64,
    /// The digest of an object longer than a key; of no meaning otherwise.
    digest: [AtomicU64; 2],
    /// Whether the object is longer than a key: 0 or 1.
    long: AtomicU64,
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

    fn is_long(&self) -> bool {
        self.long.load(Relaxed) != 0
    }

    /// Another reference, unless the object is dead.
    fn acquire(&self) -> bool {
        let more = |count| if count == 0 { None } else { Some(count + 1) };
        self.references.fetch_update(AcqRel, Acquire, more).is_ok()
    }
}

impl<S: ObjectStore> KeySource for Objects<S> {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        match self.entries.get(handle.0) {
            Some(entry) if entry.is_long() => f(Some(&entry.digest())),
            Some(_) => self.store.with_object(ObjectId(handle.0), f),
            None => f(None),
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
        let guard = pin::pin();
        let key = self.key(object);
        if let Some(handle) = self.tree.query(key.bytes())
            && let Met::Same = self.meet(handle, object)
        {
            return Ok(Put { id: ObjectId(handle.0), new: false });
        }
        let id = self.make(&key);
        if let Err(error) = self.store().put(id, object) {
            self.entry(id).references.store(0, Relaxed);
            self.give_back(id, &guard);
            return Err(error);
        }
        loop {
            let Insert::Exists(handle) = self.tree.insert(key.bytes(), Handle(id.0)) else {
                return Ok(Put { id, new: true });
            };
            match self.meet(handle, object) {
                Met::Same => {
                    self.entry(id).references.store(0, Relaxed);
                    self.store().remove(id);
                    self.give_back(id, &guard);
                    return Ok(Put { id: ObjectId(handle.0), new: false });
                }
                Met::Other => return Ok(Put { id, new: true }),
                // Pinned: this handle still means the dead object, and no other that we would take out in error.
                Met::Dead => _ = self.tree.remove(key.bytes(), handle),
            }
        }
    }

    /// Looks for an object. The stored object's bytes were equal when they were compared.
    ///
    /// Takes no reference: where others release, the answer may be out of date at once. To be sure, [`put`](One::put).
    pub fn query(&self, object: &[u8]) -> Option<ObjectId> {
        let _guard = pin::pin();
        let handle = self.tree.query(self.key(object).bytes())?;
        let dead = || self.entry(ObjectId(handle.0)).references.load(Acquire) == 0;
        (self.is_equal(handle, object) && !dead()).then_some(ObjectId(handle.0))
    }

    /// Takes a further reference to an object that the caller holds a reference to. Gives how many there are now.
    ///
    /// # Errors
    ///
    /// [`UnknownObject`].
    pub fn retain(&self, id: ObjectId) -> Result<u64, UnknownObject> {
        let _guard = pin::pin();
        let entry = self.tree.keys().entries.get(id.0).filter(|entry| entry.acquire());
        entry.map(|entry| entry.references.load(Relaxed)).ok_or(UnknownObject { id })
    }

    /// Gives back a reference; the last one takes the object out of the store. Gives how many are left.
    ///
    /// The caller must hold a reference. Whoever releases more often than that releases somebody else's: an error is
    /// all but certain, but which object it hits is not.
    ///
    /// # Errors
    ///
    /// [`UnknownObject`]: nobody held a reference.
    pub fn release(&self, id: ObjectId) -> Result<u64, UnknownObject> {
        let guard = pin::pin();
        let entry = self.tree.keys().entries.get(id.0).ok_or(UnknownObject { id })?;
        let less = |count: u64| count.checked_sub(1);
        let left = entry.references.fetch_update(AcqRel, Acquire, less).map_err(|_| UnknownObject { id })? - 1;
        if left == 0 {
            // It may not be in the tree: taken out by a `put`, or never in. Where the store has lost it, the tree
            // drops it when it meets it.
            let handle = Handle(id.0);
            self.tree.keys().with_key(handle, |key| key.is_some_and(|key| self.tree.remove(key, handle)));
            self.store().remove(id);
            self.give_back(id, &guard);
        }
        Ok(left)
    }

    /// References to an object; 0 if it is not there.
    pub fn references(&self, id: ObjectId) -> u64 {
        self.tree.keys().entries.get(id.0).map_or(0, |entry| entry.references.load(Acquire))
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
        entry.long.store(u64::from(matches!(key, Key::Digest(_))), Relaxed);
        // Release, for whoever comes by the identity in another way than through the tree.
        entry.references.store(1, Release);
        id
    }

    /// The identity may be used again when everybody who may know it has ended what they are at.
    fn give_back(&self, id: ObjectId, guard: &pin::Guard) {
        let free = self.free.clone();
        pin::later(guard, move || free.push(id.0));
    }

    /// Whether the object behind a handle, which the tree gave for the key of `object`, is equal to it.
    fn is_equal(&self, handle: Handle, object: &[u8]) -> bool {
        let id = ObjectId(handle.0);
        match (self.entry(id).is_long(), object.len() > MAX_KEY_LEN) {
            (false, false) => true, // the tree has compared the key, which is the object
            (true, true) => self.store().with_object(id, |stored| stored == Some(object)),
            _ => false, // a short object that is another one's digest
        }
    }

    fn meet(&self, handle: Handle, object: &[u8]) -> Met {
        // The reference first: what is held cannot go while it is compared.
        let id = ObjectId(handle.0);
        if !self.entry(id).acquire() {
            return Met::Dead;
        }
        if self.is_equal(handle, object) {
            return Met::Same;
        }
        // This may be the last reference by now; an error is impossible, for it is ours.
        let _ = self.release(id);
        Met::Other
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
