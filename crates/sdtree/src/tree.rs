//! The tree: search, insertion, removal. The crate's page has the picture, `docs/design/sdtree.md`
//! the proof sketch.
//!
//! Invariant of every node while a link leads to it: *all keys that are ever below it agree before
//! its position* (its prefix, which never changes), *and the keys below its side `b` have bit `b`
//! there*. An insertion that knows one key below a node therefore knows where its own key leaves
//! the node's prefix. This is still true at its compare-and-swap, whatever keys have come and gone
//! below the node meanwhile.
#![allow(unsafe_code)] // Nodes and directories are reached through addresses in atomics.

use std::ptr;
use std::sync::Arc;

use smallvec::SmallVec;

use self::change::{Comparison, place_in};
use crate::directory::{Directory, MIN_BITS};
use crate::epoch::{Epoch, Pin};
use crate::key::{FAR, Key, MAX_KEY_LEN, Mixer};
use crate::pool::{Node, Pool, node};
use crate::prefetch::{LINE, prefetch};
use crate::primitive::{AtomicPtr, AtomicU64, Counter, Ordering, random_seed};
use crate::word::{self, FINGERPRINT_END, FLAG, LEAF, TAG, VACANT, handle, is_inner, position};
use crate::{Handle, Insert, KeySource};
use Ordering::{Acquire, Relaxed, Release};

mod change;
mod figures;
pub(crate) mod iter;

/// A lock-free set of keys whose bytes a [`KeySource`] keeps; the crate's page says how it works.
///
/// Any number of threads may call any function at any time. Every call is linearisable, except
/// those that count and those that visit all keys.
///
/// ```
/// use sdtree::{Handle, Insert, KeySource, SdTree};
///
/// struct Digests(Vec<[u8; 16]>);
///
/// impl KeySource for Digests {
///     fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
///         f(self.0.get(handle.0 as usize).map(|digest| &digest[..]))
///     }
/// }
///
/// let tree = SdTree::new(Digests((0..100).map(|i| [i; 16]).collect()));
/// std::thread::scope(|scope| {
///     for part in 0..4 {
///         let tree = &tree;
///         scope.spawn(move || {
///             for i in (part..100).step_by(4) {
///                 assert_eq!(tree.insert(&tree.keys().0[i], Handle(i as u64)), Insert::Inserted);
///             }
///         });
///     }
/// });
/// assert_eq!((tree.len(), tree.query(&[7; 16])), (100, Some(Handle(7))));
/// let mut found = [None; 2];
/// tree.query_many(&[&[8; 16], b"none"], &mut found);
/// assert_eq!(found, [Some(Handle(8)), None]);
/// tree.retain(|handle| handle.0 < 10);
/// assert!(tree.remove(&[0; 16], Handle(0)));
/// assert_eq!(tree.iter().map(|handle| handle.0).sum::<u64>(), (1..10).sum());
/// ```
pub struct SdTree<K: KeySource> {
    pub(crate) source: K,
    pub(crate) mixer: Mixer,
    pub(crate) epoch: Epoch,
    /// The directory that searches start from.
    pub(crate) current: AtomicPtr<Directory>,
    /// The directory that was left last, until it is swept.
    pub(crate) left: AtomicPtr<Directory>,
    /// The list of directories that are dropped after a grace period.
    pub(crate) doomed: AtomicPtr<Directory>,
    /// Nodes that branch after the fingerprint.
    pub(crate) far: Pool,
    pub(crate) resizes: Counter,
}

/// A link on the way of a search: its place, and the word that it held. Never tagged.
#[derive(Copy, Clone)]
struct Step<'p> {
    slot: &'p AtomicU64,
    word: u64,
}

impl Step<'_> {
    /// Makes the link lead to `word`, which is an insertion's. `false`: it was changed meanwhile.
    #[inline]
    fn replace(&self, word: u64) -> bool {
        self.slot.compare_exchange(self.word, word, Release, Relaxed).is_ok()
    }
}

/// The way of a search from a slot of the directory to a leaf, or to a slot without a leaf.
/// Positions grow along it.
type Path<'p> = SmallVec<[Step<'p>; 16]>;

impl<K: KeySource> SdTree<K> {
    /// An empty tree over the keys in `keys`.
    pub fn new(keys: K) -> Self {
        Self::with(keys, Mixer::new(random_seed()), MIN_BITS)
    }

    /// An empty tree whose directory has `bits` bits.
    pub(crate) fn with(keys: K, mixer: Mixer, bits: u32) -> Self {
        let epoch = Epoch::new();
        Self {
            source: keys,
            mixer,
            current: AtomicPtr::new(first_directory(&epoch, bits)),
            left: AtomicPtr::new(ptr::null_mut()),
            doomed: AtomicPtr::new(ptr::null_mut()),
            far: Pool::new(&epoch),
            epoch,
            resizes: Counter::new(0),
        }
    }

    /// The key source.
    pub fn keys(&self) -> &K {
        &self.source
    }

    /// Looks for `key`. The stored key's bytes were equal to it when they were compared.
    ///
    /// If the fingerprint at the predicted place differs from this key's, the source is not asked
    /// at all.
    pub fn query(&self, key: &[u8]) -> Option<Handle> {
        self.query_key(&self.mixer.key(key))
    }

    #[inline]
    pub(crate) fn query_key(&self, key: &Key<'_>) -> Option<Handle> {
        let pin = self.epoch.pin();
        let (mut link, mut above) = (self.enter(&pin, key.head), VACANT);
        while is_inner(link) {
            above = link;
            link = self.node(link, &pin).load(key.bit(position(link)));
        }
        if word::is_record(above) && self.differs_from_record(&pin, key, above, link) {
            return None;
        }
        self.verify(link, key)
    }

    /// The link in the slot for keys with this head, for reading.
    #[inline]
    pub(crate) fn enter(&self, pin: &Pin<'_>, head: u64) -> u64 {
        let mut dir = self.current(pin);
        let mut link = dir.slot(head).load(Acquire);
        // Frozen: the link has moved to the next directory, or is still valid because it has not
        // moved yet.
        while link & TAG != 0 {
            let Some(next) = self.directory(&dir.next, pin) else { break };
            let moved = next.slot(head).load(Acquire);
            if moved == VACANT {
                break;
            }
            (dir, link) = (next, moved);
        }
        link
    }

    /// Whether the leaf at the end of a search is `key`'s.
    #[inline]
    pub(crate) fn verify(&self, link: u64, key: &Key<'_>) -> Option<Handle> {
        if link & (FLAG | LEAF) != LEAF || !word::same_fingerprint(link, word::leaf(0, key.head)) {
            return None;
        }
        let handle = Handle(handle(link));
        self.source.with_key(handle, |stored| stored.is_some_and(|stored| equal(stored, key.bytes))).then_some(handle)
    }

    /// Stores `handle` under `key`, unless the key is there already.
    ///
    /// # Panics
    /// If `key` is longer than [`MAX_KEY_LEN`] or `handle` greater than [`Handle::MAX`].
    pub fn insert(&self, key: &[u8], handle: Handle) -> Insert {
        self.insert_key::<false>(&self.mixer.key(key), handle)
    }

    /// Stores `handle` under `key`. If the key is there already, its handle is replaced, in one
    /// step, and returned.
    ///
    /// # Panics
    /// As [`insert`](SdTree::insert).
    pub fn upsert(&self, key: &[u8], handle: Handle) -> Option<Handle> {
        self.entry(key).upsert(handle)
    }

    /// [`insert`](SdTree::insert); `REPLACE`: if the key is there, it has this handle then.
    pub(crate) fn insert_key<const REPLACE: bool>(&self, key: &Key<'_>, handle: Handle) -> Insert {
        let len = key.bytes.len();
        assert!(len <= MAX_KEY_LEN, "a key of {len} bytes; the limit is {MAX_KEY_LEN}");
        assert!(handle <= Handle::MAX, "{handle:?} does not fit 40 bits");
        let leaf = word::leaf(handle.0, key.head);
        let pin = self.epoch.pin();
        let mut path = Path::new();
        let mut spare: Option<(&Pool, u64)> = None; // a node from a failed attempt
        let mut record: Option<u64> = None; // the link to this key's record, if it was made
        let result = loop {
            let dir = self.seek(&pin, key, &mut path);
            let end = path[path.len() - 1];
            if end.word == VACANT || end.word & FLAG != 0 {
                if path.len() > 1 {
                    self.unlink_leaf(&pin, dir, key, &path);
                } else if end.replace(leaf) {
                    break Insert::Inserted;
                }
                continue;
            }
            let known = word::fingerprint_difference(end.word, leaf);
            let known = known.or_else(|| self.recorded_difference(&pin, key, &path));
            let place = match known.map_or_else(|| self.compare(&pin, key, &path), Comparison::Differ) {
                Comparison::Differ(place) => place,
                // Like the leaf, its replacement is of this key: nothing changes but the handle.
                Comparison::Same if REPLACE && !end.replace(leaf) => continue,
                Comparison::Same => break Insert::Exists(Handle(word::handle(end.word))),
                Comparison::Stale => {
                    // Its fingerprint equals this key's, so this key's way leads to it.
                    if self.drop_leaf(&pin, key, end.word) {
                        pin.count_stale();
                    }
                    continue;
                }
            };
            // The new node goes above the first node that branches later. No node branches at
            // `place` itself.
            let at = path[place_in(&path, place)];
            let pool = self.pool(dir, place);
            let address = self.spare_or_new(&pin, pool, spare.take());
            let link = word::inner(address, place);
            let side = key.bit(place);
            let node = self.node(link, &pin);
            let below = match place {
                FAR.. if !self.mixer.is_ordered() => *record.get_or_insert_with(|| self.record(&pin, key, leaf)),
                _ => leaf,
            };
            node.0[side].store(below, Relaxed);
            node.0[side ^ 1].store(at.word, Relaxed);
            if at.replace(link) {
                record.take_if(|record| below == *record);
                break Insert::Inserted;
            }
            spare = Some((pool, address));
        };
        let record = record.map(|record| (&self.far, word::address(record)));
        spare.into_iter().chain(record).for_each(|(from, address)| from.retire(&pin, address, 0));
        if result == Insert::Inserted {
            let look = pin.count_added();
            self.upkeep(&pin);
            if look {
                self.look(&pin);
            }
        }
        result
    }

    /// A node of `pool`: the spare one if it is from there; otherwise a new one, and the spare one
    /// is given back.
    #[inline]
    fn spare_or_new(&self, pin: &Pin<'_>, pool: &Pool, spare: Option<(&Pool, u64)>) -> u64 {
        match spare {
            Some((from, address)) if ptr::eq(from, pool) => address,
            other => {
                if let Some((from, address)) = other {
                    from.retire(pin, address, 0);
                }
                pool.allocate(&self.epoch, pin)
            }
        }
    }

    /// Removes `key` if it is stored under `handle`. Returns whether it was.
    ///
    /// The source is not asked: this works when it no longer has the key. `key` must be as it was
    /// at insertion. If `handle` is stored under another key with the same place and fingerprint,
    /// that key may be removed instead.
    pub fn remove(&self, key: &[u8], handle: Handle) -> bool {
        key.len() <= MAX_KEY_LEN && self.remove_from(&self.mixer.key(key), handle)
    }

    #[inline]
    pub(crate) fn remove_from(&self, key: &Key<'_>, handle: Handle) -> bool {
        handle <= Handle::MAX && self.remove_leaf(&self.epoch.pin(), key, word::leaf(handle.0, key.head))
    }

    /// Removes all keys, and gives all memory back. To empty a tree that others use, use
    /// [`retain`](SdTree::retain). [`stats`](SdTree::stats) begins anew.
    pub fn clear(&mut self) {
        self.free_directories();
        self.epoch = Epoch::new();
        self.far = Pool::new(&self.epoch);
        self.resizes = Counter::new(0);
        self.current = AtomicPtr::new(first_directory(&self.epoch, MIN_BITS));
    }

    /// The directory that searches start from.
    #[inline]
    pub(crate) fn current<'p>(&self, pin: &'p Pin<'_>) -> &'p Directory {
        match self.directory(&self.current, pin) {
            Some(dir) => dir,
            None => unreachable!("a tree always has a directory"),
        }
    }

    /// The directory that one of the tree's pointers leads to.
    #[inline]
    pub(crate) fn directory<'p>(&self, at: &AtomicPtr<Directory>, pin: &'p Pin<'_>) -> Option<&'p Directory> {
        self.directory_at(at.load(Acquire), pin)
    }

    #[inline]
    pub(crate) fn directory_at<'p>(&self, at: *const Directory, _pin: &'p Pin<'_>) -> Option<&'p Directory> {
        // SAFETY: all pointers between directories come from `Box::into_raw`, and were read under
        // the pin. Only the thread that took a directory out of the list of doomed ones drops it.
        // It does so only when a grace period has passed since the directory got there. Before it
        // got there, all other pointers to it were removed. So a directory that was reached under
        // the pin lives until the pin ends.
        unsafe { at.as_ref() }
    }

    pub(crate) fn free_directory(&self, at: *mut Directory) {
        // SAFETY: the pointer comes from `Box::into_raw`, and the caller owns the directory alone.
        // There are three callers: `drop_doomed` after the grace period, `resize` with a directory
        // that no other thread has seen, and `free_directories`, which has `&mut self`.
        drop(unsafe { Box::from_raw(at) });
    }

    /// The node that an inner link leads to, which was read in this tree under `pin`, or was made
    /// from a new node.
    #[inline]
    pub(crate) fn node<'p>(&self, link: u64, pin: &'p Pin<'_>) -> &'p Node {
        debug_assert!(is_inner(link));
        // SAFETY: all callers are in this crate (this module, `resize`, `batch`, `check`). Each
        // passes a link that it read in this tree under `pin`, or that it made from a node of
        // `Pool::allocate` under `pin`: the contract of `node`.
        unsafe { node(link, pin) }
    }

    /// The pool of nodes that branch at `position`, below a directory.
    #[inline]
    fn pool<'p>(&'p self, dir: &'p Directory, position: u16) -> &'p Pool {
        if u32::from(position) < FINGERPRINT_END { &dir.pool } else { &self.far }
    }
}

/// Whether two keys are equal, which is likely, since their fingerprints are. The whole stored key
/// is prefetched before the comparison: long keys usually come from memory, and the processor's own
/// prefetching starts late. For the other key, whose samples were read already, prefetching costs
/// more than it saves.
#[inline]
fn equal(stored: &[u8], key: &[u8]) -> bool {
    if stored.len() != key.len() {
        return false;
    }
    stored.chunks(LINE).for_each(|line| prefetch(line.as_ptr()));
    stored == key
}

/// The directory of a new tree.
fn first_directory(epoch: &Epoch, bits: u32) -> *mut Directory {
    Box::into_raw(Box::new(Directory::new(bits, Arc::new(Pool::new(epoch)))))
}

impl<K: KeySource> Drop for SdTree<K> {
    fn drop(&mut self) {
        self.free_directories();
    }
}

impl<K: KeySource> SdTree<K> {
    /// Frees all directories. No pointer leads to one afterwards.
    fn free_directories(&mut self) {
        let mut all: SmallVec<[*mut Directory; 4]> = SmallVec::new();
        for first in [&self.current, &self.left, &self.doomed] {
            let mut at = first.load(Relaxed);
            // SAFETY: the pointers come from `Box::into_raw`, and nothing was freed yet. `&mut
            // self`: no other thread uses a directory. Each directory is reached once: the current
            // one leads to the next; the one that was left leads to the current one, which is not
            // followed from there.
            while let Some(dir) = unsafe { at.as_ref() } {
                all.push(at);
                at = match first {
                    _ if ptr::eq(first, &self.current) => dir.next.load(Relaxed),
                    _ if ptr::eq(first, &self.doomed) => dir.doomed.load(Relaxed),
                    _ => ptr::null_mut(),
                };
            }
        }
        for first in [&self.current, &self.left, &self.doomed] {
            first.store(ptr::null_mut(), Relaxed);
        }
        all.into_iter().for_each(|at| self.free_directory(at));
    }
}
