//! The hashes of some data mblocks in memory: of those that pages were found in lately, and of the
//! one that is being filled.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A key is half of a hash already.
#[derive(Clone, Copy, Default)]
pub(super) struct AsIs(u64);

impl Hasher for AsIs {
    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, key: u64) {
        // Sampled keys have low bits of zero, by which tables choose.
        self.0 = key.rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Values by keys.
pub(super) type ByKey = HashMap<u64, u64, BuildHasherDefault<AsIs>>;

/// Bytes that an entry of a table takes, with its share of empty ones.
pub(super) const ENTRY: usize = 17 * 8 / 7;

struct List {
    keys: Vec<u64>,
    /// When a page of it was found last, see [`Near::clock`].
    used: u64,
}

/// The hashes of some data mblocks.
pub(super) struct Near {
    /// The place of each page.
    places: ByKey,
    lists: HashMap<u64, List>,
    /// Counts finds in another mblock than the one before.
    clock: u64,
    /// The mblock of the last find.
    last: u64,
    /// The mblock that is being filled; it stays.
    filling: Option<u64>,
    limit: usize,
}

impl Near {
    pub(super) fn new(limit: usize) -> Self {
        Self { places: ByKey::default(), lists: HashMap::new(), clock: 0, last: 0, filling: None, limit }
    }

    /// The place of a page with this key.
    pub(super) fn get(&mut self, key: u64) -> Option<u64> {
        let at = *self.places.get(&key)?;
        if self.last != at >> 16 {
            self.last = at >> 16;
            self.clock += 1;
            if let Some(list) = self.lists.get_mut(&self.last) {
                list.used = self.clock;
            }
        }
        Some(at)
    }

    pub(super) fn has(&self, mblock: u64) -> bool {
        self.lists.contains_key(&mblock)
    }

    /// Adds the keys of a whole data mblock.
    pub(super) fn insert(&mut self, mblock: u64, keys: impl Iterator<Item = u64>) {
        self.make_room();
        let keys: Vec<u64> = keys.collect();
        for (page, key) in keys.iter().enumerate() {
            self.enter(*key, mblock << 16 | page as u64);
        }
        self.clock += 1;
        self.lists.insert(mblock, List { keys, used: self.clock });
    }

    /// Adds the next page of the mblock that is being filled.
    pub(super) fn push(&mut self, key: u64, at: u64) {
        let mblock = at >> 16;
        if self.filling != Some(mblock) {
            self.make_room();
            self.filling = Some(mblock);
        }
        self.clock += 1;
        let list = self.lists.entry(mblock).or_insert_with(|| List { keys: Vec::new(), used: 0 });
        list.keys.push(key);
        list.used = self.clock;
        self.enter(key, at);
    }

    /// Where two pages have one hash the later one counts: the earlier one could not be read.
    fn enter(&mut self, key: u64, at: u64) {
        let place = self.places.entry(key).or_insert(at);
        *place = at.max(*place);
    }

    pub(super) fn filled(&mut self) {
        self.filling = None;
    }

    /// Forgets the mblock that was found least lately, if there are too many.
    fn make_room(&mut self) {
        if self.lists.len() < self.limit {
            return;
        }
        let others = self.lists.iter().filter(|(mblock, _)| Some(**mblock) != self.filling);
        let Some(oldest) = others.min_by_key(|(_, list)| list.used).map(|(mblock, _)| *mblock) else { return };
        self.forget(oldest);
    }

    /// Forgets an mblock.
    pub(super) fn forget(&mut self, mblock: u64) {
        for key in self.lists.remove(&mblock).into_iter().flat_map(|list| list.keys) {
            if self.places.get(&key).is_some_and(|at| at >> 16 == mblock) {
                self.places.remove(&key);
            }
        }
    }

    /// Bytes of memory that it takes.
    pub(super) fn memory(&self) -> usize {
        let keys: usize = self.lists.values().map(|list| list.keys.capacity() * 8 + 64).sum();
        self.places.capacity() * ENTRY + keys
    }
}
