//! What ONE knows of an object: its count of references, and its key.

use sdtree::{Handle, KeySource, prefetch};

use Ordering::{AcqRel, Acquire, Relaxed, Release};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

use crate::table::Table;
use crate::{ObjectId, ObjectStore};

/// What ONE knows of an object.
#[derive(Default)]
pub(crate) struct Entry {
    /// Twice the number of references, and 1 more if the key is a digest. No references: dead, or
    /// never used.
    state: AtomicU64,
    /// The digest that is the key, its high half first. It has no meaning if the object is its own
    /// key.
    digest: [AtomicU64; 2],
}

pub(crate) enum Key<'a> {
    Own(&'a [u8]),
    Digest([u8; 16]),
}

impl Key<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Key::Own(bytes) => bytes,
            Key::Digest(bytes) => bytes,
        }
    }
}

impl Entry {
    /// Makes this the entry of an object with this key and one reference.
    pub(crate) fn begin(&self, key: &Key<'_>) {
        if let Key::Digest(digest) = key {
            let digest = u128::from_be_bytes(*digest);
            self.digest[0].store((digest >> 64) as u64, Relaxed);
            self.digest[1].store(digest as u64, Relaxed);
        }
        // Release: another thread may learn the identity in another way than through the tree.
        self.state.store(2 | u64::from(matches!(key, Key::Digest(_))), Release);
    }

    fn digest(&self) -> [u8; 16] {
        let [high, low] = self.digest.each_ref().map(|half| u128::from(half.load(Relaxed)));
        (high << 64 | low).to_be_bytes()
    }

    pub(crate) fn is_by_digest(&self) -> bool {
        self.state.load(Relaxed) & 1 != 0
    }

    pub(crate) fn references(&self) -> u64 {
        self.state.load(Acquire) / 2
    }

    /// Takes a reference, unless the object is dead. Returns how many there are then.
    pub(crate) fn acquire(&self) -> Option<u64> {
        let more = |state: u64| (state > 1).then(|| state + 2);
        self.state.fetch_update(AcqRel, Acquire, more).ok().map(|before| before / 2 + 1)
    }

    /// Gives a reference back, unless there is none. Returns how many are left.
    pub(crate) fn give_back(&self) -> Option<u64> {
        let less = |state: u64| state.checked_sub(2);
        self.state.fetch_update(AcqRel, Acquire, less).ok().map(|before| before / 2 - 1)
    }

    /// Takes back the one reference of an object that was made and that no caller has.
    pub(crate) fn kill(&self) {
        self.state.store(0, Relaxed);
    }
}

/// The store and the entries: the tree's key source.
pub(crate) struct Objects<S> {
    pub(crate) store: S,
    pub(crate) entries: Table<Entry>,
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
