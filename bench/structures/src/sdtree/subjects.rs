//! Who is measured: the SD tree, its rivals, and the floor under all of them.
//!
//! Every rival has the same key, a pointer to a page that compares or hashes by the page's bytes,
//! and the same value, 4 bytes.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Mutex, PoisonError, RwLock};

use intrusive_collections::{KeyAdapter, RBTree, RBTreeAtomicLink, intrusive_adapter, rbtree};
use sdtree::{Handle, Insert, KeySource, SdTree};

use smallvec::SmallVec;

use super::pages::{Key, Layout, Pages};

/// How many look-ups the batched calls get at a time.
pub(super) const BATCH: usize = 64;

/// The ceiling: a hash map.
pub(super) const HASH_MAP: &str = "papaya-xxh3";

/// A set of keys under test.
pub(super) trait Subject: Sync {
    /// Its name in the tables.
    fn name(&self) -> &'static str;
    /// Whether it keeps its keys in an order, and so is one of the ordered rivals.
    fn ordered(&self) -> bool;
    /// What a thread works with.
    fn session(&self) -> Box<dyn Session + '_>;
    /// Bytes that it takes for its keys, if it knows; otherwise the allocator is asked.
    fn bytes(&self) -> Option<u64> {
        None
    }
    /// Bits of a key that a look-up reads, over those that it has; if it can tell.
    fn examined(&self, _: Key) -> Option<f64> {
        None
    }
    /// Whether it only answers hits.
    fn only_hits(&self) -> bool {
        false
    }
}

/// One thread's view of a subject.
pub(super) trait Session {
    fn insert(&mut self, key: Key, handle: u32) -> bool;
    fn query(&mut self, key: Key) -> Option<u32>;
    fn remove(&mut self, key: Key, handle: u32) -> bool;
    /// Whether it can do many at once; the next two do so only then.
    fn batched(&self) -> bool {
        false
    }
    /// Number of keys found.
    fn query_many(&mut self, keys: &[Key]) -> usize {
        keys.iter().filter(|&&key| self.query(key).is_some()).count()
    }
    /// Number of keys inserted.
    fn insert_many(&mut self, items: &[(Key, u32)]) -> usize {
        items.iter().filter(|&&(key, handle)| self.insert(key, handle)).count()
    }
}

/// All of them.
pub(super) fn all(pages: &Pages, layout: Layout) -> Vec<Box<dyn Subject + '_>> {
    vec![
        Box::new(Ours(SdTree::new(Source(pages)))),
        Box::new(SkipList(crossbeam_skiplist::SkipMap::new())),
        Box::new(TreeIndex(scc::TreeIndex::new())),
        Box::new(Concurrent(Mutex::new(concurrent_map::ConcurrentMap::new()))),
        Box::new(BTree(RwLock::new(BTreeMap::new()))),
        Box::new(RedBlack(RwLock::new(RBTree::new(ByKey::NEW)))),
        Box::new(Papaya(papaya::HashMap::with_hasher(Xxh3))),
        Box::new(Floor(pages, layout)),
    ]
}

/// The SD tree asks for the pages behind its handles.
struct Source<'a>(&'a Pages);

impl KeySource for Source<'_> {
    #[inline]
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(Some(self.0.key(handle.0 as usize).bytes()))
    }

    fn prefetch(&self, handle: Handle) {
        self.0.key(handle.0 as usize).prefetch();
    }
}

struct Ours<'a>(SdTree<Source<'a>>);

impl Subject for Ours<'_> {
    fn name(&self) -> &'static str {
        "sdtree"
    }
    fn ordered(&self) -> bool {
        false
    }
    fn session(&self) -> Box<dyn Session + '_> {
        Box::new(OurSession(&self.0))
    }
    fn bytes(&self) -> Option<u64> {
        Some(self.0.stats().bytes)
    }
    fn examined(&self, key: Key) -> Option<f64> {
        Some(self.0.examine(key.bytes()).key_bits as f64 / (key.bytes().len() * 8) as f64)
    }
}

struct OurSession<'a>(&'a SdTree<Source<'a>>);

impl Session for OurSession<'_> {
    fn insert(&mut self, key: Key, handle: u32) -> bool {
        self.0.insert(key.bytes(), Handle(handle.into())) == Insert::Inserted
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        self.0.query(key.bytes()).map(|handle| handle.0 as u32)
    }
    fn remove(&mut self, key: Key, handle: u32) -> bool {
        self.0.remove(key.bytes(), Handle(handle.into()))
    }
    fn batched(&self) -> bool {
        true
    }
    fn query_many(&mut self, keys: &[Key]) -> usize {
        let mut found = [None; BATCH];
        let keys: SmallVec<[&[u8]; BATCH]> = keys.iter().map(Key::bytes).collect();
        self.0.query_many(&keys, &mut found[..keys.len()]);
        found[..keys.len()].iter().flatten().count()
    }
    fn insert_many(&mut self, items: &[(Key, u32)]) -> usize {
        let mut done = [Insert::Inserted; BATCH];
        let items: SmallVec<[(&[u8], Handle); BATCH]> =
            items.iter().map(|(key, handle)| (key.bytes(), Handle((*handle).into()))).collect();
        self.0.insert_many(&items, &mut done[..items.len()]);
        done[..items.len()].iter().filter(|&&done| done == Insert::Inserted).count()
    }
}

/// A `Subject` that any thread may use as it is.
macro_rules! shared {
    ($subject:ident, $name:expr, $ordered:literal) => {
        impl Subject for $subject {
            fn name(&self) -> &'static str {
                $name
            }
            fn ordered(&self) -> bool {
                $ordered
            }
            fn session(&self) -> Box<dyn Session + '_> {
                Box::new(self)
            }
        }
    };
}

struct SkipList(crossbeam_skiplist::SkipMap<Key, u32>);
shared!(SkipList, "skiplist", true);

impl Session for &SkipList {
    fn insert(&mut self, key: Key, handle: u32) -> bool {
        *self.0.get_or_insert(key, handle).value() == handle
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        self.0.get(&key).map(|entry| *entry.value())
    }
    fn remove(&mut self, key: Key, _: u32) -> bool {
        self.0.remove(&key).is_some()
    }
}

struct TreeIndex(scc::TreeIndex<Key, u32>);
shared!(TreeIndex, "scc-treeindex", true);

impl Session for &TreeIndex {
    fn insert(&mut self, key: Key, handle: u32) -> bool {
        self.0.insert_sync(key, handle).is_ok()
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        self.0.peek_with(&key, |_, value| *value)
    }
    fn remove(&mut self, key: Key, _: u32) -> bool {
        self.0.remove_sync(&key)
    }
}

/// The least key of `concurrent-map`: a page of zeros, which no case stores.
impl concurrent_map::Minimum for Key {
    const MIN: Self = Key::ZERO;
}

type Map = concurrent_map::ConcurrentMap<Key, u32>;

/// Each thread needs a clone of its own.
struct Concurrent(Mutex<Map>);

impl Subject for Concurrent {
    fn name(&self) -> &'static str {
        "concurrent-map"
    }
    fn ordered(&self) -> bool {
        true
    }
    fn session(&self) -> Box<dyn Session + '_> {
        Box::new(ConcurrentSession(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()))
    }
}

struct ConcurrentSession(Map);

impl Session for ConcurrentSession {
    fn insert(&mut self, key: Key, handle: u32) -> bool {
        self.0.insert(key, handle).is_none()
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        self.0.get(&key)
    }
    fn remove(&mut self, key: Key, _: u32) -> bool {
        self.0.remove(&key).is_some()
    }
}

struct BTree(RwLock<BTreeMap<Key, u32>>);
shared!(BTree, "rwlock-btreemap", true);

impl Session for &BTree {
    fn insert(&mut self, key: Key, handle: u32) -> bool {
        *self.0.write().unwrap_or_else(PoisonError::into_inner).entry(key).or_insert(handle) == handle
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&key).copied()
    }
    fn remove(&mut self, key: Key, _: u32) -> bool {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&key).is_some()
    }
}

/// A node of a red-black tree over page pointers, as KSM has them.
struct Node {
    link: RBTreeAtomicLink,
    key: Key,
    handle: u32,
}

intrusive_adapter!(ByKey = Box<Node>: Node { link => RBTreeAtomicLink });

impl<'a> KeyAdapter<'a> for ByKey {
    type Key = Key;
    fn get_key(&self, node: &'a Node) -> Key {
        node.key
    }
}

struct RedBlack(RwLock<RBTree<ByKey>>);
shared!(RedBlack, "rwlock-rbtree", true);

impl Session for &RedBlack {
    fn insert(&mut self, key: Key, handle: u32) -> bool {
        match self.0.write().unwrap_or_else(PoisonError::into_inner).entry(&key) {
            rbtree::Entry::Occupied(_) => false,
            rbtree::Entry::Vacant(place) => {
                place.insert(Box::new(Node { link: Default::default(), key, handle }));
                true
            }
        }
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).find(&key).get().map(|node| node.handle)
    }
    fn remove(&mut self, key: Key, _: u32) -> bool {
        self.0.write().unwrap_or_else(PoisonError::into_inner).find_mut(&key).remove().is_some()
    }
}

/// XXH3 of all that is written at once, with AVX2 where the processor has it.
#[derive(Clone, Copy, Default)]
struct Xxh3;

struct OneShot(u64);

impl BuildHasher for Xxh3 {
    type Hasher = OneShot;
    fn build_hasher(&self) -> OneShot {
        OneShot(0)
    }
}

impl Hasher for OneShot {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        self.0 ^= twox_hash::XxHash3_64::oneshot(bytes);
    }
}

struct Papaya(papaya::HashMap<Key, u32, Xxh3>);
shared!(Papaya, HASH_MAP, false);

impl Session for &Papaya {
    fn insert(&mut self, key: Key, handle: u32) -> bool {
        self.0.pin().try_insert(key, handle).is_ok()
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        self.0.pin().get(&key).copied()
    }
    fn remove(&mut self, key: Key, _: u32) -> bool {
        self.0.pin().remove(&key).is_some()
    }
}

/// Knows where the answer is, and only compares: what no index can go below.
struct Floor<'a>(&'a Pages, Layout);

impl Subject for Floor<'_> {
    fn name(&self) -> &'static str {
        "compare-only"
    }
    fn ordered(&self) -> bool {
        false
    }
    fn session(&self) -> Box<dyn Session + '_> {
        Box::new(self)
    }
    fn bytes(&self) -> Option<u64> {
        Some(0)
    }
    fn only_hits(&self) -> bool {
        true
    }
}

impl Session for &Floor<'_> {
    fn insert(&mut self, _: Key, _: u32) -> bool {
        true
    }
    fn query(&mut self, key: Key) -> Option<u32> {
        let number = self.1.asked(self.0.number(key) - self.1.keys);
        (self.0.key(number) == key).then_some(number as u32)
    }
    fn remove(&mut self, _: Key, _: u32) -> bool {
        true
    }
}
