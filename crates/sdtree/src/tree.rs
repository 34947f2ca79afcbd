//! The tree: search, insertion, removal. The picture is at the top of the crate, the proof sketch in `docs/sdtree.md`.
//!
//! What holds of every node from its first link to its last: *all keys that are ever below it agree before its
//! position* (its prefix, which never changes), *and the keys below its side `b` have bit `b` there*. So an insertion that
//! knows one key below a node knows where its own key leaves the node's prefix; and this is still true when its
//! compare-and-swap comes, however many keys have come and gone below the node.

use crate::bits::{MAX_KEY_LEN, bit, first_difference};
use crate::nodes::{Nodes, Pin};
use crate::primitive::{AtomicU64, Ordering, random_seed};
use crate::word::{self, EMPTY, FLAG, LEAF, MAX_PAYLOAD, TAG, is_inner, payload, position};
use crate::{Handle, Insert, KeySource, Stats};
use Ordering::{AcqRel, Acquire, Relaxed, Release};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A lock-free set of keys that live with the caller: see the crate's page.
///
/// Any number of threads may call anything at any time; every call is linearisable except the counting ones and
/// [`for_each`](SdTree::for_each).
pub struct SdTree<K: KeySource> {
    source: K,
    /// For fingerprints.
    seed: u64,
    root: AtomicU64,
    nodes: Nodes,
}

/// A link on the way of a search: where it is, and what it held. Never tagged.
#[derive(Copy, Clone)]
struct Step<'a> {
    slot: &'a AtomicU64,
    word: u64,
}

/// The way of a search from the root to a leaf (or to [`EMPTY`]). Positions grow along it.
type Path<'a> = SmallVec<[Step<'a>; 64]>;

/// What a leaf's key, read now, is to the key of an insertion.
enum Comparison {
    Same,
    /// They differ first at this position.
    Differ(u16),
    /// It is gone, or not the key that it was.
    Stale,
}

impl<K: KeySource> SdTree<K> {
    /// An empty tree over the keys in `keys`.
    pub fn new(keys: K) -> Self {
        SdTree { source: keys, seed: random_seed(), root: AtomicU64::new(EMPTY), nodes: Nodes::new() }
    }

    /// The key source.
    pub fn keys(&self) -> &K {
        &self.source
    }

    /// Looks for `key`. The stored key's bytes were equal to it when they were compared.
    ///
    /// Where no key has its fingerprint at the predicted place, the source is not asked at all.
    pub fn query(&self, key: &[u8]) -> Option<Handle> {
        let _pin = self.nodes.pin();
        let mut link = self.root.load(Acquire);
        while is_inner(link) {
            link = self.nodes.get(link).0[bit(key, position(link))].load(Acquire);
        }
        if link & FLAG != 0 || link == EMPTY || !word::same_fingerprint(link, self.leaf(key, 0)) {
            return None;
        }
        let handle = Handle(payload(link));
        self.source.with_key(handle, |stored| stored == Some(key)).then_some(handle)
    }

    /// Stores `handle` under `key`, unless the key is there already.
    ///
    /// # Panics
    /// If `key` is longer than [`MAX_KEY_LEN`] or `handle` greater than [`Handle::MAX`].
    pub fn insert(&self, key: &[u8], handle: Handle) -> Insert {
        assert!(key.len() <= MAX_KEY_LEN, "a key of {} bytes; the limit is {MAX_KEY_LEN}", key.len());
        assert!(handle <= Handle::MAX, "{handle:?} does not fit 40 bits");
        let pin = self.nodes.pin();
        let leaf = self.leaf(key, handle.0);
        let mut path = Path::new();
        let mut spare = None; // a node from an attempt that failed
        let result = loop {
            self.seek(&pin, key, &mut path);
            let end = path[path.len() - 1];
            if end.word == EMPTY {
                if end.slot.compare_exchange(EMPTY, leaf, Release, Relaxed).is_ok() {
                    break Insert::Inserted;
                }
                continue;
            }
            if end.word & FLAG != 0 {
                self.unlink_leaf(&pin, key, &path);
                continue;
            }
            let place = match self.compare(key, end.word, &path) {
                Comparison::Same => break Insert::Exists(Handle(payload(end.word))),
                Comparison::Differ(place) => place,
                Comparison::Stale => {
                    if self.remove_leaf(&pin, key, end.word) {
                        pin.count_stale();
                    }
                    continue;
                }
            };
            // Above the first node that branches later; `compare` saw to it that none branches at `place` itself.
            let at = path[path.partition_point(|step| is_inner(step.word) && position(step.word) < place)];
            let index = spare.take().unwrap_or_else(|| self.nodes.allocate(&pin));
            let link = word::inner(index, place);
            let side = bit(key, place);
            let node = self.nodes.get(link);
            node.0[side].store(leaf, Relaxed);
            node.0[side ^ 1].store(at.word, Relaxed);
            if at.slot.compare_exchange(at.word, link, Release, Relaxed).is_ok() {
                break Insert::Inserted;
            }
            spare = Some(index);
        };
        if let Some(index) = spare {
            self.nodes.retire(&pin, index, 0);
        }
        if result == Insert::Inserted {
            pin.count_added();
        }
        result
    }

    /// Removes `key` if it is stored under `handle`, and says whether it was.
    ///
    /// The source is not asked: this works when it no longer has the key. `key` must be as it was at insertion.
    pub fn remove(&self, key: &[u8], handle: Handle) -> bool {
        if key.len() > MAX_KEY_LEN || handle > Handle::MAX {
            return false;
        }
        self.remove_leaf(&self.nodes.pin(), key, self.leaf(key, handle.0))
    }

    /// The number of keys. Exact while no other thread changes the tree.
    pub fn len(&self) -> u64 {
        self.nodes.keys()
    }

    /// Whether there is no key at this moment.
    pub fn is_empty(&self) -> bool {
        let link = self.root.load(Acquire);
        link == EMPTY || link & FLAG != 0
    }

    /// Figures.
    pub fn stats(&self) -> Stats {
        let keys = self.len();
        let nodes_live = keys.saturating_sub(1);
        Stats {
            keys,
            nodes_live,
            nodes_free: self.nodes.touched().saturating_sub(nodes_live),
            bytes: self.nodes.bytes(),
            bytes_reserved: self.nodes.bytes_reserved(),
            stale_dropped: self.nodes.stale_dropped(),
            ticks: self.nodes.ticks(),
        }
    }

    /// Calls `f` for every handle, in no particular order.
    ///
    /// Weakly consistent: a key that is there throughout is seen exactly once; one that comes or goes meanwhile may be seen or
    /// not, and one that goes and comes back may be seen twice. No node is reclaimed while this runs. `f` may change the tree.
    pub fn for_each(&self, mut f: impl FnMut(Handle)) {
        let _pin = self.nodes.pin();
        let mut todo = vec![self.root.load(Acquire)];
        while let Some(link) = todo.pop() {
            if is_inner(link) {
                let node = self.nodes.get(link);
                todo.extend([node.0[1].load(Acquire), node.0[0].load(Acquire)]);
            } else if link & FLAG == 0 && link != EMPTY {
                f(Handle(payload(link)));
            }
        }
    }

    /// The leaf link for a key.
    #[inline]
    fn leaf(&self, key: &[u8], handle: u64) -> u64 {
        debug_assert!(handle <= MAX_PAYLOAD);
        word::leaf(handle, xxh3_64_with_seed(key, self.seed))
    }

    /// Goes down to where `key` leads, and finishes the removals whose tagged links lie on the way.
    fn seek<'a>(&'a self, pin: &Pin<'_>, key: &[u8], path: &mut Path<'a>) {
        'again: loop {
            path.clear();
            let mut step = Step { slot: &self.root, word: self.root.load(Acquire) };
            while is_inner(step.word) {
                let side = bit(key, position(step.word));
                let slot = &self.nodes.get(step.word).0[side];
                let next = Step { slot, word: slot.load(Acquire) };
                if next.word & TAG != 0 {
                    self.unlink(pin, step, side ^ 1);
                    continue 'again;
                }
                path.push(step);
                step = next;
            }
            path.push(step);
            return;
        }
    }

    /// Compares `key` with the key of the leaf `link`, where the search for it along `path` ended.
    fn compare(&self, key: &[u8], link: u64, path: &Path<'_>) -> Comparison {
        self.source.with_key(Handle(payload(link)), |stored| {
            let Some(stored) = stored else {
                return Comparison::Stale;
            };
            let place = first_difference(key, stored);
            // The key that was inserted here has this fingerprint, and the bits of `key` wherever the path branches.
            let fits = place.is_none_or(|place| {
                let branches = path.iter().rev().skip(1).map(|step| position(step.word));
                branches.take_while(|&branch| branch >= place).all(|branch| bit(key, branch) == bit(stored, branch))
            });
            match place {
                _ if !fits || !word::same_fingerprint(link, self.leaf(stored, 0)) => Comparison::Stale,
                Some(place) => Comparison::Differ(place),
                None => Comparison::Same,
            }
        })
    }

    /// Removes the leaf `leaf` if `key` leads to it, and says whether this call removed it.
    fn remove_leaf(&self, pin: &Pin<'_>, key: &[u8], leaf: u64) -> bool {
        let mut path = Path::new();
        let mut flagged = false; // by us: it is removed, and only to be unlinked
        loop {
            self.seek(pin, key, &mut path);
            let end = path[path.len() - 1];
            if end.word == leaf | FLAG {
                // Ours, or another thread's, which we help.
                if self.unlink_leaf(pin, key, &path) || !flagged {
                    return flagged;
                }
            } else if flagged || end.word != leaf {
                return flagged;
            } else {
                // The last key needs no mark: nothing is to be unlinked.
                let to = if path.len() == 1 { EMPTY } else { leaf | FLAG };
                if end.slot.compare_exchange(leaf, to, AcqRel, Relaxed).is_err() {
                    continue;
                }
                self.nodes.count_removed(pin);
                if to == EMPTY || self.unlink_leaf(pin, key, &path) {
                    return true;
                }
                flagged = true;
            }
        }
    }

    /// Unlinks the flagged leaf at the end of `path`; false if something else has changed there first.
    fn unlink_leaf(&self, pin: &Pin<'_>, key: &[u8], path: &Path<'_>) -> bool {
        if let [.., parent, _] = path[..] {
            return self.unlink(pin, parent, bit(key, position(parent.word)));
        }
        let flagged = path[0].word;
        path[0].slot.compare_exchange(flagged, EMPTY, AcqRel, Relaxed).is_ok()
    }

    /// Puts the sibling of a node's flagged leaf, on side `dead`, in the place of the node.
    fn unlink(&self, pin: &Pin<'_>, step: Step<'_>, dead: usize) -> bool {
        debug_assert!(is_inner(step.word));
        let node = self.nodes.get(step.word);
        debug_assert!(node.0[dead].load(Acquire) & (FLAG | LEAF) == FLAG | LEAF);
        let sibling = node.0[dead ^ 1].fetch_or(TAG, AcqRel) & !TAG; // its flag, if it has one, goes along
        let done = step.slot.compare_exchange(step.word, sibling, AcqRel, Relaxed).is_ok();
        if done {
            self.nodes.retire(pin, payload(step.word), dead);
        }
        done
    }
}

#[cfg(test)]
impl<K: KeySource> SdTree<K> {
    /// Checks every invariant of a tree at rest whose keys are all as they were inserted; returns the number of keys.
    pub(crate) fn check(&self) -> u64 {
        let mut nodes = std::collections::BTreeSet::new();
        let root = self.root.load(Acquire);
        if root != EMPTY {
            self.check_below(root, &mut Vec::new(), &mut nodes);
        }
        let keys = if root == EMPTY { 0 } else { nodes.len() as u64 + 1 };
        assert_eq!(keys, self.len());
        self.nodes.check(nodes);
        keys
    }

    /// Checks what is below `link`, to which the positions and sides in `path` lead. Returns a key from there.
    fn check_below(
        &self,
        link: u64,
        path: &mut Vec<(u16, usize)>,
        nodes: &mut std::collections::BTreeSet<u64>,
    ) -> Vec<u8> {
        assert_eq!(link & TAG, 0, "a mark is left");
        if !is_inner(link) {
            let key = self.source.with_key(Handle(payload(link)), |key| key.map(<[u8]>::to_vec));
            let key = key.expect("its key is there");
            assert_eq!(link, self.leaf(&key, payload(link)), "a mark is left, or another key");
            assert!(path.iter().all(|&(at, side)| bit(&key, at) == side), "in the wrong place");
            return key;
        }
        assert!(nodes.insert(payload(link)), "linked twice");
        let at = position(link);
        assert!(path.last().is_none_or(|&(above, _)| above < at), "positions grow");
        let [left, right] = [0, 1].map(|side| {
            path.push((at, side));
            let key = self.check_below(self.nodes.get(link).0[side].load(Acquire), path, nodes);
            path.pop();
            key
        });
        assert_eq!(first_difference(&left, &right), Some(at));
        left
    }
}
