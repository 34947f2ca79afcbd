//! The tree: search, insertion, removal. The picture is at the top of the crate, the proof sketch
//! in `docs/design/sdtree.md`.
//!
//! What holds of every node from its first link to its last: *all keys that are ever below it agree
//! before its position* (its prefix, which never changes), *and the keys below its side `b` have
//! bit `b` there*. So an insertion that knows one key below a node knows where its own key leaves
//! the node's prefix; and this is still true when its compare-and-swap comes, however many keys
//! have come and gone below the node.
#![allow(unsafe_code)] // nodes and directories are reached through addresses in atomics

use crate::directory::{Directory, MIN_BITS};
use crate::epoch::{Epoch, Pin};
use crate::key::{Key, MAX_KEY_LEN, Mixer, first_difference};
use crate::pool::{Node, Pool, node};
use crate::prefetch::prefetch;
use crate::primitive::{AtomicPtr, AtomicU64, Counter, Ordering, random_seed};
use crate::word::{self, FINGERPRINT_END, FLAG, LEAF, TAG, VACANT, handle, is_inner, position};
use crate::{Examined, Handle, Insert, KeySource, Stats};
use Ordering::{AcqRel, Acquire, Relaxed, Release};
use smallvec::SmallVec;
use std::ptr;
use std::sync::Arc;

/// A lock-free set of keys that live with the caller: see the crate's page.
///
/// Any number of threads may call anything at any time; every call is linearisable except the
/// counting ones and [`for_each`](SdTree::for_each).
pub struct SdTree<K: KeySource> {
    source: K,
    pub(crate) mixer: Mixer,
    pub(crate) epoch: Epoch,
    /// The directory that searches start from.
    pub(crate) current: AtomicPtr<Directory>,
    /// The directory that was left last and is still to be swept.
    pub(crate) left: AtomicPtr<Directory>,
    /// A list of directories to be dropped after a grace period.
    pub(crate) doomed: AtomicPtr<Directory>,
    /// Nodes that branch after the fingerprint.
    pub(crate) far: Pool,
    pub(crate) resizes: Counter,
}

/// A link on the way of a search: where it is, and what it held. Never tagged.
#[derive(Copy, Clone)]
struct Step<'p> {
    slot: &'p AtomicU64,
    word: u64,
}

/// The way of a search from a slot of the directory to a leaf (or to a slot without one). Positions
/// grow along it.
type Path<'p> = SmallVec<[Step<'p>; 16]>;

/// Bytes of a cache line.
const LINE: usize = 64;

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
        Self::with_bits(keys, MIN_BITS)
    }

    /// An empty tree with a directory of so many bits.
    pub(crate) fn with_bits(keys: K, bits: u32) -> Self {
        let epoch = Epoch::new();
        let directory = Directory::new(bits, Arc::new(Pool::new(&epoch)));
        SdTree {
            source: keys,
            mixer: Mixer::new(random_seed()),
            current: AtomicPtr::new(Box::into_raw(Box::new(directory))),
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
    /// Where the fingerprint at the predicted place is not this key's, the source is not asked at
    /// all.
    pub fn query(&self, key: &[u8]) -> Option<Handle> {
        let pin = self.epoch.pin();
        let key = self.mixer.key(key);
        let mut link = self.enter(&pin, key.head);
        while is_inner(link) {
            link = self.node(link, &pin).load(key.bit(position(link)));
        }
        self.verify(link, &key)
    }

    /// The link in the slot for keys with this head, for reading.
    #[inline]
    pub(crate) fn enter(&self, pin: &Pin<'_>, head: u64) -> u64 {
        let mut dir = self.current(pin);
        let mut link = dir.slot(head).load(Acquire);
        // Frozen: the link is in the next directory, or is still good because it is not there yet.
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

    /// What a look-up of `key` costs, counted: a second, slower query that answers nothing else.
    /// For statistics.
    pub fn examine(&self, key: &[u8]) -> Examined {
        let pin = self.epoch.pin();
        let key = self.mixer.key(key);
        let mut examined = Examined { nodes: 0, key_bits: Mixer::examined(key.bytes) };
        let mut link = self.enter(&pin, key.head);
        while is_inner(link) {
            link = self.node(link, &pin).load(key.bit(position(link)));
            examined.nodes += 1;
            examined.key_bits += 1;
        }
        if link & (FLAG | LEAF) == LEAF && word::same_fingerprint(link, word::leaf(0, key.head)) {
            examined.key_bits += self.source.with_key(Handle(handle(link)), |stored| match stored {
                Some(stored) if stored.len() == key.bytes.len() => {
                    let same = key.bytes.iter().zip(stored).take_while(|(a, b)| a == b).count();
                    ((same + 1).min(stored.len()) * 8) as u64
                }
                _ => 0,
            });
        }
        examined
    }

    /// Stores `handle` under `key`, unless the key is there already.
    ///
    /// # Panics
    /// If `key` is longer than [`MAX_KEY_LEN`] or `handle` greater than [`Handle::MAX`].
    pub fn insert(&self, key: &[u8], handle: Handle) -> Insert {
        assert!(key.len() <= MAX_KEY_LEN, "a key of {} bytes; the limit is {MAX_KEY_LEN}", key.len());
        assert!(handle <= Handle::MAX, "{handle:?} does not fit 40 bits");
        let key = self.mixer.key(key);
        let leaf = word::leaf(handle.0, key.head);
        let pin = self.epoch.pin();
        let mut path = Path::new();
        let mut spare: Option<(&Pool, u64)> = None; // a node from an attempt that failed
        let result = loop {
            let dir = self.seek(&pin, &key, &mut path);
            let end = path[path.len() - 1];
            if end.word == VACANT || end.word & FLAG != 0 {
                if path.len() > 1 {
                    self.unlink_leaf(&pin, dir, &key, &path);
                } else if end.slot.compare_exchange(end.word, leaf, Release, Relaxed).is_ok() {
                    break Insert::Inserted;
                }
                continue;
            }
            let place = match word::fingerprint_difference(end.word, leaf) {
                Some(place) => place,
                None => match self.compare(&pin, &key, &path) {
                    Comparison::Same => break Insert::Exists(Handle(word::handle(end.word))),
                    Comparison::Differ(place) => place,
                    Comparison::Stale => {
                        // Its fingerprint is this key's, so this key's way leads to it.
                        if self.remove_leaf(&pin, &key, end.word) {
                            pin.count_stale();
                        }
                        continue;
                    }
                },
            };
            // Above the first node that branches later; none branches at `place` itself.
            let at = path[place_in(&path, place)];
            let pool = self.pool(dir, place);
            let address = match spare.take() {
                Some((from, address)) if ptr::eq(from, pool) => address,
                other => {
                    if let Some((from, address)) = other {
                        from.retire(&pin, address, 0);
                    }
                    pool.allocate(&self.epoch, &pin)
                }
            };
            let link = word::inner(address, place);
            let side = key.bit(place);
            let node = self.node(link, &pin);
            node.0[side].store(leaf, Relaxed);
            node.0[side ^ 1].store(at.word, Relaxed);
            if at.slot.compare_exchange(at.word, link, Release, Relaxed).is_ok() {
                break Insert::Inserted;
            }
            spare = Some((pool, address));
        };
        if let Some((from, address)) = spare {
            from.retire(&pin, address, 0);
        }
        if result == Insert::Inserted {
            let look = pin.count_added();
            self.upkeep(&pin, look);
        }
        result
    }

    /// Removes `key` if it is stored under `handle`, and says whether it was.
    ///
    /// The source is not asked: this works when it no longer has the key. `key` must be as it was
    /// at insertion. (If `handle` is stored under another key that has the same place and
    /// fingerprint, that one may be removed instead.)
    pub fn remove(&self, key: &[u8], handle: Handle) -> bool {
        if key.len() > MAX_KEY_LEN || handle > Handle::MAX {
            return false;
        }
        let key = self.mixer.key(key);
        self.remove_leaf(&self.epoch.pin(), &key, word::leaf(handle.0, key.head))
    }

    /// The number of keys. Exact while no other thread changes the tree.
    pub fn len(&self) -> u64 {
        self.epoch.keys()
    }

    /// Whether there is no key. Exact while no other thread changes the tree.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Figures.
    pub fn stats(&self) -> Stats {
        let pin = self.epoch.pin();
        let dir = self.current(&pin);
        let mut stats = Stats {
            keys: self.len(),
            nodes: self.far.touched(),
            directory_bits: dir.bits,
            bytes: size_of::<Self>() as u64 + self.epoch.bytes() + self.far.bytes(),
            bytes_reserved: self.far.bytes_reserved(),
            stale_dropped: self.epoch.stale_dropped(),
            ticks: self.epoch.ticks(),
            resizes: self.resizes.load(Relaxed),
        };
        let mut pool = ptr::null();
        // The list of doomed ones belongs to whoever takes it; what is in it is not counted.
        let all = [self.directory(&self.left, &pin), Some(dir), self.directory(&dir.next, &pin)];
        for dir in all.into_iter().flatten() {
            stats.bytes += dir.bytes();
            if !ptr::eq(pool, &*dir.pool) {
                pool = &*dir.pool;
                stats.nodes += dir.pool.touched();
                stats.bytes += dir.pool.bytes();
                stats.bytes_reserved += dir.pool.bytes_reserved();
            }
        }
        stats.bytes_reserved += stats.bytes - stats.nodes * size_of::<Node>() as u64;
        stats
    }

    /// Calls `f` for every handle, in no particular order.
    ///
    /// Weakly consistent: a key that is there throughout is seen exactly once; one that comes or
    /// goes meanwhile may be seen or not, and one that goes and comes back may be seen twice.
    /// No memory is reclaimed while this runs. `f` may change the tree.
    pub fn for_each(&self, mut f: impl FnMut(Handle)) {
        let pin = self.epoch.pin();
        let dir = self.current(&pin);
        let mut todo = Vec::new();
        for slot in 0..dir.slots.len() {
            self.walk_slot(&pin, dir, slot, &mut todo, &mut f);
        }
    }

    /// Goes down all trees of a slot.
    fn walk_slot(&self, pin: &Pin<'_>, dir: &Directory, slot: usize, todo: &mut Vec<u64>, f: &mut impl FnMut(Handle)) {
        let mut link = dir.slots[slot].load(Acquire);
        if link & TAG != 0
            && let Some(next) = self.directory(&dir.next, pin)
            && next.bits > dir.bits
        {
            // Of a slot that becomes two, both are looked at in the same directory: a key is in one
            // or in the other. What comes after a shrunk directory is not looked at: what was
            // frozen has all that was there throughout.
            let [left, right] = [2 * slot, 2 * slot + 1];
            if next.slots[left].load(Acquire) != VACANT {
                self.walk_slot(pin, next, left, todo, f);
                self.walk_slot(pin, next, right, todo, f);
                return;
            }
            link = dir.slots[slot].load(Acquire);
        }
        todo.push(link);
        while let Some(link) = todo.pop() {
            if is_inner(link) {
                let node = self.node(link, pin);
                todo.extend([node.load(1), node.load(0)]);
            } else if link & (FLAG | LEAF) == LEAF {
                f(Handle(handle(link)));
            }
        }
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
        // the pin. A directory is dropped by whoever took it out of the list of doomed ones, when a
        // grace period has passed since it got there, and before it got there no other pointer to
        // it was left in reach.
        unsafe { at.as_ref() }
    }

    /// Frees a directory.
    pub(crate) fn free_directory(&self, at: *mut Directory) {
        // SAFETY: the callers are those who found the grace period over, who made it and kept it,
        // and `drop`; each has it alone, and it came from `Box::into_raw`.
        drop(unsafe { Box::from_raw(at) });
    }

    /// The node that an inner link leads to, which was read in this tree under `pin`, or was made
    /// from a new node.
    #[inline]
    pub(crate) fn node<'p>(&self, link: u64, pin: &'p Pin<'_>) -> &'p Node {
        debug_assert!(is_inner(link));
        // SAFETY: all callers are in this module and in `resize` and `batch`, and keep to what is
        // said above.
        unsafe { node(link, pin) }
    }

    /// Where nodes that branch at `position` come from, below a directory.
    #[inline]
    fn pool<'p>(&'p self, dir: &'p Directory, position: u16) -> &'p Pool {
        if u32::from(position) < FINGERPRINT_END { &dir.pool } else { &self.far }
    }

    /// Goes down to where `key` leads, and finishes the removals and moves whose tagged links lie
    /// on the way. Returns the directory in which the way begins.
    fn seek<'p>(&self, pin: &'p Pin<'_>, key: &Key<'_>, path: &mut Path<'p>) -> &'p Directory {
        'again: loop {
            path.clear();
            let mut dir = self.current(pin);
            let mut slot = dir.slot(key.head);
            let mut step = Step { slot, word: slot.load(Acquire) };
            while step.word & TAG != 0 {
                let Some(next) = self.directory(&dir.next, pin) else {
                    unreachable!("a slot is frozen for the next directory")
                };
                self.move_unit(pin, dir, next, dir.unit(next, key.head));
                dir = next;
                slot = dir.slot(key.head);
                step = Step { slot, word: slot.load(Acquire) };
            }
            while is_inner(step.word) {
                let side = key.bit(position(step.word));
                let slot = &self.node(step.word, pin).0[side];
                let next = Step { slot, word: slot.load(Acquire) };
                if next.word & TAG != 0 {
                    self.unlink(pin, dir, step, side ^ 1);
                    continue 'again;
                }
                path.push(step);
                step = next;
            }
            path.push(step);
            return dir;
        }
    }

    /// Compares `key` with the key of the leaf at the end of `path`, which has the same
    /// fingerprint.
    fn compare(&self, pin: &Pin<'_>, key: &Key<'_>, path: &Path<'_>) -> Comparison {
        let end = path[path.len() - 1].word;
        let branches = || path.iter().rev().skip(1).map(|step| position(step.word));
        let comparison = self.source.with_key(Handle(handle(end)), |stored| {
            let Some(stored) = stored.map(|stored| self.mixer.key(stored)) else {
                return Comparison::Stale;
            };
            let Some(place) = first_difference(key, &stored) else {
                return Comparison::Same;
            };
            // The key that was inserted here has this fingerprint, and the bits of `key` wherever
            // the path branches.
            let fits = |branch| key.bit(branch) == stored.bit(branch);
            if word::same_fingerprint(end, word::leaf(0, stored.head)) && branches().all(fits) {
                Comparison::Differ(place)
            } else {
                Comparison::Stale
            }
        });
        match comparison {
            Comparison::Differ(place) if !self.confirmed(pin, key, path, place) => Comparison::Stale,
            other => other,
        }
    }

    /// Whether a second key agrees that `key` leaves the others at `place`: one from the other side
    /// of the node above which it would go. Without one, or if that one is itself not what it
    /// was, the first is believed.
    fn confirmed(&self, pin: &Pin<'_>, key: &Key<'_>, path: &Path<'_>, place: u16) -> bool {
        let below = path[place_in(path, place)].word;
        if !is_inner(below) {
            return true;
        }
        let side = key.bit(position(below)) ^ 1;
        let mut link = self.node(below, pin).load(side);
        while is_inner(link) {
            let node = self.node(link, pin);
            link = node.load(0);
            if link & FLAG != 0 {
                link = node.load(1);
            }
        }
        if link & (FLAG | LEAF) != LEAF {
            return true;
        }
        self.source.with_key(Handle(handle(link)), |second| {
            let Some(second) = second.map(|second| self.mixer.key(second)) else { return true };
            let above = path.iter().map(|step| step.word).take_while(|&word| is_inner(word) && position(word) < place);
            let fits = above.map(position).all(|branch| key.bit(branch) == second.bit(branch))
                && word::same_fingerprint(link, word::leaf(0, second.head))
                && second.bit(position(below)) == side;
            !fits || first_difference(key, &second) == Some(place)
        })
    }

    /// Removes the leaf `leaf` if `key` leads to it, and says whether this call removed it.
    fn remove_leaf(&self, pin: &Pin<'_>, key: &Key<'_>, leaf: u64) -> bool {
        let mut path = Path::new();
        let mut flagged = false; // by us: it is removed, and only to be unlinked
        loop {
            let dir = self.seek(pin, key, &mut path);
            let end = path[path.len() - 1];
            if end.word == leaf | FLAG {
                // Ours, or another thread's, which we help. In a slot of the directory it may stay.
                if path.len() == 1 || self.unlink_leaf(pin, dir, key, &path) || !flagged {
                    break;
                }
            } else if flagged || end.word != leaf {
                break;
            } else if end.slot.compare_exchange(leaf, leaf | FLAG, AcqRel, Relaxed).is_ok() {
                flagged = true;
                if path.len() == 1 || self.unlink_leaf(pin, dir, key, &path) {
                    break;
                }
            }
        }
        if flagged {
            let look = pin.count_removed();
            if look {
                self.epoch.tick();
            }
            self.upkeep(pin, look);
        }
        flagged
    }

    /// Unlinks the flagged leaf at the end of `path`; false if something else has changed there
    /// first.
    fn unlink_leaf(&self, pin: &Pin<'_>, dir: &Directory, key: &Key<'_>, path: &Path<'_>) -> bool {
        let parent = path[path.len() - 2];
        self.unlink(pin, dir, parent, key.bit(position(parent.word)))
    }

    /// Puts the sibling of a node's flagged leaf, on side `dead`, in the place of the node. Does
    /// nothing if there is no such leaf: then the node is frozen because its slot is being
    /// moved.
    fn unlink(&self, pin: &Pin<'_>, dir: &Directory, step: Step<'_>, dead: usize) -> bool {
        let node = self.node(step.word, pin);
        if node.load(dead) & FLAG == 0 {
            return false;
        }
        let sibling = node.0[dead ^ 1].fetch_or(TAG, AcqRel) & !TAG; // its flag, if it has one, goes along
        let done = step.slot.compare_exchange(step.word, sibling, AcqRel, Relaxed).is_ok();
        if done {
            self.pool(dir, position(step.word)).retire(pin, word::address(step.word), dead);
        }
        done
    }
}

/// Whether two keys are equal, which is likely: their fingerprints are. All of the stored key is
/// asked for before anything is compared, because long keys mostly come from memory, and the
/// processor's own prefetching takes a while to get under way. (For the other key, whose samples
/// were read already, it costs more than it saves.)
#[inline]
fn equal(stored: &[u8], key: &[u8]) -> bool {
    if stored.len() != key.len() {
        return false;
    }
    stored.chunks(LINE).for_each(|line| prefetch(line.as_ptr()));
    stored == key
}

/// Which step of a path leads to what is to go below a new node that branches at `place`.
fn place_in(path: &Path<'_>, place: u16) -> usize {
    path.partition_point(|step| is_inner(step.word) && position(step.word) < place)
}

impl<K: KeySource> Drop for SdTree<K> {
    fn drop(&mut self) {
        let mut all: SmallVec<[*mut Directory; 4]> = SmallVec::new();
        for first in [&self.current, &self.left, &self.doomed] {
            let mut at = first.load(Relaxed);
            // SAFETY: `&mut self`: nobody else has any of them, and each is in one place. The
            // current one leads to the next; the one that was left leads to the current one, which
            // is freed as such.
            while let Some(dir) = unsafe { at.as_ref() } {
                all.push(at);
                at = match first {
                    _ if ptr::eq(first, &self.current) => dir.next.load(Relaxed),
                    _ if ptr::eq(first, &self.doomed) => dir.doomed.load(Relaxed),
                    _ => ptr::null_mut(),
                };
            }
        }
        all.into_iter().for_each(|at| self.free_directory(at));
    }
}
