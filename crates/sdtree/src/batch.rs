//! Many look-ups at once, interleaved so that one thread waits for many cache misses at a time.
//!
//! Keys are taken in groups. For all keys of a group the memory of each step is prefetched before
//! it is read: the words that go into heads, the slots of the directory, the nodes on the ways,
//! step by step, and the stored keys where fingerprints are equal. Then the keys are compared.

use smallvec::SmallVec;

use crate::epoch::Pin;
use crate::key::{Key, Mixer};
use crate::pool::Node;
use crate::prefetch::prefetch;
use crate::tree::SdTree;
use crate::word::{self, FLAG, LEAF, is_inner, position};
use crate::{Handle, Insert, KeySource};

/// Look-ups that run side by side: a little more than the cache misses that a core handles at a
/// time.
const GROUP: usize = 16;

impl<K: KeySource> SdTree<K> {
    /// [`query`](SdTree::query) for each of `keys`; the answers are in `out`. Several times as fast
    /// when the tree is larger than the caches.
    ///
    /// Each answer is linearisable by itself, at some moment inside the call.
    ///
    /// # Panics
    /// If `out` has another length than `keys`.
    pub fn query_many(&self, keys: &[&[u8]], out: &mut [Option<Handle>]) {
        assert_eq!(keys.len(), out.len(), "an answer for each key");
        for (keys, out) in keys.chunks(GROUP).zip(out.chunks_mut(GROUP)) {
            let pin = self.epoch.pin();
            let found = self.descend(&pin, keys.iter().copied());
            for ((key, link), out) in found.iter().zip(out) {
                *out = self.verify(*link, key);
            }
        }
    }

    /// [`insert`](SdTree::insert) for each of `items`, in their order; the results are in `out`.
    /// The memory that an insertion reads is in the caches by then.
    ///
    /// # Panics
    /// If a key is longer than [`MAX_KEY_LEN`](crate::MAX_KEY_LEN), a handle greater than
    /// [`Handle::MAX`], or `out` has another length than `items`.
    pub fn insert_many(&self, items: &[(&[u8], Handle)], out: &mut [Insert]) {
        assert_eq!(items.len(), out.len(), "a result for each item");
        for (items, out) in items.chunks(GROUP).zip(out.chunks_mut(GROUP)) {
            self.descend(&self.epoch.pin(), items.iter().map(|&(key, _)| key));
            for (&(key, handle), out) in items.iter().zip(out) {
                *out = self.insert(key, handle);
            }
        }
    }

    /// The link at the end of the search for each key of a group. All searches run side by side.
    fn descend<'k>(
        &'k self,
        pin: &Pin<'_>,
        keys: impl Iterator<Item = &'k [u8]> + Clone,
    ) -> SmallVec<[(Key<'k>, u64); GROUP]> {
        for key in keys.clone() {
            Mixer::samples(key.len()).for_each(|at| prefetch(&raw const key[at]));
        }
        let dir = self.current(pin);
        let mut ways: SmallVec<[(Key<'k>, u64); GROUP]> = keys.map(|key| (self.mixer.key(key), 0)).collect();
        ways.iter().for_each(|(key, _)| prefetch(dir.slot(key.head)));
        let ask = |link: u64| {
            if is_inner(link) {
                prefetch(word::address(link) as *const Node);
            } else if link & (FLAG | LEAF) == LEAF {
                return link;
            }
            link
        };
        for (key, link) in &mut ways {
            *link = ask(self.enter(pin, key.head));
        }
        let mut under_way = true;
        while under_way {
            under_way = false;
            for (key, link) in &mut ways {
                if is_inner(*link) {
                    *link = ask(self.node(*link, pin).load(key.bit(position(*link))));
                    under_way |= is_inner(*link);
                }
            }
        }
        for (key, link) in &ways {
            if link & (FLAG | LEAF) == LEAF && word::same_fingerprint(*link, word::leaf(0, key.head)) {
                self.keys().prefetch(Handle(word::handle(*link)));
            }
        }
        ways
    }
}
