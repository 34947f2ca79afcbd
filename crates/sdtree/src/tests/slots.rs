//! The tree as the engine uses it, with digests in slots. Handles are slots, and the source reads a
//! slot's digest. The digest changes when the slot is used again, and any thread may use a free
//! slot.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::sync::{Barrier, Mutex};
use std::thread;

use super::Random;
use crate::{Handle, Insert, KeySource, SdTree};

const THREADS: usize = 4;
/// Digests that all threads contend for.
const SHARED: usize = 50;
/// A freed slot stays in quarantine until this many more were freed: usually long enough for a call
/// to end.
const QUARANTINE: usize = 64;

struct Slot {
    digest: AtomicU64,
    /// The number of the thread that inserted it, which distinguishes two entries of one digest. 0:
    /// free.
    place: AtomicU64,
}

struct Slots {
    slots: Vec<Slot>,
    freed: Mutex<VecDeque<u64>>,
}

impl KeySource for Slots {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        let slot = self.slots.get(handle.0 as usize);
        assert!(slot.is_some(), "a handle that was not inserted");
        let digest = slot.map(|slot| slot.digest.load(Acquire).to_be_bytes());
        f(digest.as_ref().map(|bytes| bytes.as_slice()))
    }
}

fn slots(count: u64) -> Slots {
    let slot = |_| Slot { digest: AtomicU64::new(0), place: AtomicU64::new(0) };
    Slots { slots: (0..count).map(slot).collect(), freed: Mutex::new((0..count).collect()) }
}

fn slot(tree: &SdTree<Slots>, handle: Handle) -> &Slot {
    &tree.keys().slots[handle.0 as usize]
}

/// Looks `digest` up, and stores `place` for it if it is not known. Returns whether it was new, and
/// the handle.
fn see(tree: &SdTree<Slots>, digest: u64, place: u64, ask_first: bool) -> (bool, Handle) {
    if ask_first && let Some(handle) = tree.query(&digest.to_be_bytes()) {
        return (false, handle);
    }
    let free = tree.keys().freed.lock().unwrap().pop_front().unwrap();
    let handle = Handle(free);
    slot(tree, handle).digest.store(digest, Release);
    slot(tree, handle).place.store(place, Release);
    match tree.insert(&digest.to_be_bytes(), handle) {
        Insert::Inserted => (true, handle),
        Insert::Exists(known) => {
            slot(tree, handle).place.store(0, Release);
            tree.keys().freed.lock().unwrap().push_back(free);
            (false, known)
        }
    }
}

/// Removes a handle's digest, if its place is still `place`.
fn forget(tree: &SdTree<Slots>, handle: Handle, digest: u64, place: u64) -> bool {
    if slot(tree, handle).place.compare_exchange(place, 0, AcqRel, Acquire).is_err() {
        return false;
    }
    assert!(tree.remove(&digest.to_be_bytes(), handle), "{digest:#x} was in the tree under {handle:?}");
    tree.keys().freed.lock().unwrap().push_back(handle.0);
    true
}

fn digest(owner: usize, number: usize) -> u64 {
    Random((owner as u64) << 32 | number as u64).next() | 1
}

/// Looks a shared digest up or stores it, and then removes it, if another thread does not.
/// `rights`: stored digests that were not removed.
fn contend(tree: &SdTree<Slots>, random: &mut Random, place: u64, rights: &AtomicU64) {
    let digest = digest(THREADS, random.below(SHARED));
    let (new, handle) = see(tree, digest, place, random.below(2) == 0);
    let found = slot(tree, handle);
    let there = found.place.load(Acquire);
    if new {
        // Another thread may have removed it by then; only one thread removes
        // it.
        rights.fetch_add(1, Relaxed);
    }
    if there != 0 && found.digest.load(Acquire) == digest && forget(tree, handle, digest, there) {
        rights.fetch_sub(1, Relaxed);
    }
}

/// Queries 20 digests of thread `me` at once, from `number` on.
fn query_some(tree: &SdTree<Slots>, known: &HashMap<usize, Handle>, me: usize, number: usize, own: usize) {
    let keys: [[u8; 8]; 20] = std::array::from_fn(|i| digest(me, (number + i) % own).to_be_bytes());
    let asked: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
    // Guards on both sides: nothing may be written beside the answers.
    let mut out = [Some(Handle(7)); 22];
    tree.query_many(&asked, &mut out[1..21]);
    assert_eq!((out[0], out[21]), (Some(Handle(7)), Some(Handle(7))));
    for (i, found) in out[1..21].iter().enumerate() {
        assert_eq!(*found, known.get(&((number + i) % own)).copied());
    }
}

/// Each thread owns digests, and knows exactly which of them are there and under which handle. All
/// threads contend for some others, each with its own places. Waves let the tree grow to thousands
/// of keys and shrink to few.
pub(super) fn engine(seed: u64, rounds: usize, own: usize) {
    let tree = SdTree::new(slots((THREADS * (own + SHARED + QUARANTINE)) as u64));
    let (start, rights) = (Barrier::new(THREADS), AtomicU64::new(0));
    thread::scope(|scope| {
        for me in 0..THREADS {
            let (tree, start, rights) = (&tree, &start, &rights);
            scope.spawn(move || {
                let mut random = Random(seed << 8 | me as u64);
                let mut known: HashMap<usize, Handle> = HashMap::new();
                let mut place = (me as u64) << 48;
                start.wait();
                for round in 0..rounds {
                    // Up for a while, then down for a while.
                    let up = (round / (2 * own)).is_multiple_of(2);
                    place += 1;
                    if random.below(8) == 0 {
                        contend(tree, &mut random, place, rights);
                        continue;
                    }
                    let number = random.below(own);
                    let digest = digest(me, number);
                    match known.get(&number).copied() {
                        Some(handle) if up || random.below(4) == 0 => {
                            assert_eq!(tree.query(&digest.to_be_bytes()), Some(handle));
                            assert_eq!(slot(tree, handle).digest.load(Acquire), digest);
                            assert_eq!(see(tree, digest, place, random.below(2) == 0), (false, handle));
                        }
                        Some(handle) => {
                            let there = slot(tree, handle).place.load(Acquire);
                            assert!(forget(tree, handle, digest, there), "no other thread removes it");
                            assert_eq!(tree.query(&digest.to_be_bytes()), None);
                            known.remove(&number);
                        }
                        None if up || random.below(8) == 0 => {
                            let (new, handle) = see(tree, digest, place, random.below(2) == 0);
                            assert!(new, "no other thread has it");
                            known.insert(number, handle);
                        }
                        None => {
                            assert_eq!(tree.query(&digest.to_be_bytes()), None);
                            assert!(!tree.remove(&digest.to_be_bytes(), Handle(random.next() % 100)));
                            query_some(tree, &known, me, number, own);
                        }
                    }
                }
                for (number, handle) in known {
                    let place = slot(tree, handle).place.load(Acquire);
                    assert!(forget(tree, handle, digest(me, number), place));
                }
            });
        }
    });
    assert_eq!(tree.check(), rights.load(Relaxed), "what was seen and not forgotten is there");
    let mut left = 0;
    tree.for_each(|handle| {
        left += 1;
        assert_ne!(slot(&tree, handle).place.load(Acquire), 0);
    });
    assert_eq!(left, rights.load(Relaxed));
}

#[test]
fn as_an_engine_does() {
    engine(1, if cfg!(debug_assertions) { 60_000 } else { 300_000 }, 1500);
}
