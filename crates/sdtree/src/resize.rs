//! Growing and shrinking, a few slots at a time.
//!
//! A directory has between two thirds of a slot and one and a third for each key, until many keys
//! are removed. When the tree has outgrown it, or has become much smaller, a new one is made. From
//! then on every operation that changes the tree moves a few *units* to it. No thread waits, and no
//! call moves more than a few units, so the tree is never rebuilt at one moment.
//!
//! How a unit is moved, by any number of threads at once:
//!
//! 1. The unit's slots in the old directory are *frozen*, that is, tagged: no operation changes a
//!    tagged link. Searches that find a frozen slot go to the new directory. If the slot there is
//!    still vacant, they go on from the frozen link.
//! 2. When the tree grows, a slot becomes two. If its trie branches at just this bit, its node's
//!    two links are frozen and become the links of the two slots. Otherwise the whole trie goes to
//!    one side, which the fingerprint of any of its leaves tells. When the tree shrinks, some slots
//!    become one. All their nodes that branch within the fingerprint are frozen and copied, with
//!    new nodes where slots are joined.
//! 3. The new slots are filled by compare-and-swap from vacant. All threads see the same frozen
//!    links, so it does not matter which is first. A unit's *first* slot is filled last, and the
//!    thread that fills it counts the unit.
//!
//! The thread that counts the last unit makes the new directory the current one. After growing, the
//! old one is *swept* when a grace period has passed, again a few slots at a time: its nodes that
//! became two slots are free now. After shrinking, all its nodes were copied, and go back to the
//! system with their pool. The old directory is dropped after another grace period.
//!
//! Nodes that branch after the fingerprint come from a separate pool and are never copied. They are
//! few, unless many keys have equal heads.

use std::ptr;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::KeySource;
use crate::directory::{Directory, MAX_BITS, MIN_BITS};
use crate::epoch::{GRACE, Pin};
use crate::pool::Pool;
use crate::primitive::{AtomicU64, Ordering};
use crate::tree::SdTree;
use crate::word::{self, EMPTY, FINGERPRINT_END, FLAG, LEAF, TAG, VACANT, is_inner, position};
use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Units that an operation moves, or slots that it sweeps. A power of two, at most 2^[`MIN_BITS`].
const STEP: u64 = if cfg!(loom) { 1 } else { 8 };

/// The most keys for a directory of `bits` bits: three for two slots. With more keys, ways get
/// longer. With fewer, both directories together would take more than 24 bytes for each key while
/// the tree grows.
fn most(bits: u32) -> u64 {
    3 << bits >> 1
}

/// Nodes that were made for a unit; they are given back if another thread was first.
type Made = SmallVec<[u64; 16]>;

impl<K: KeySource> SdTree<K> {
    /// The part of an operation that has changed the tree in resizing it.
    #[inline]
    pub(crate) fn upkeep(&self, pin: &Pin<'_>) {
        let dir = self.current(pin);
        if let Some(next) = self.directory(&dir.next, pin) {
            self.move_some(pin, dir, next);
        } else if let Some(left) = self.directory(&self.left, pin) {
            self.sweep(pin, left);
        }
    }

    /// Begins to grow or to shrink if the number of keys asks for it; drops directories whose grace
    /// period is over.
    #[cold]
    pub(crate) fn look(&self, pin: &Pin<'_>) {
        if !self.left.load(Relaxed).is_null() || !self.doomed.load(Relaxed).is_null() {
            self.epoch.tick();
            self.drop_doomed(pin);
        }
        if cfg!(loom) {
            return; // models resize explicitly
        }
        let dir = self.current(pin);
        let (bits, keys) = (dir.bits, self.epoch.keys());
        if keys > most(bits) && bits < MAX_BITS && (!self.mixer.is_ordered() || is_spread(dir)) {
            self.resize(dir, bits + 1);
        } else if keys < most(bits) / 4 && bits > MIN_BITS {
            // Small, but not so small that it has to grow again soon.
            let fitting = (MIN_BITS..bits).find(|&fewer| 2 * keys <= most(fewer));
            self.resize(dir, fitting.unwrap_or(bits - 1));
        }
    }

    /// Begins to move from `dir` to a directory of `bits` bits. Does nothing if the tree is still
    /// busy with the last move, or has left `dir` since the caller counted the keys. `bits` was
    /// chosen for `dir`, and is wrong for any other directory: a unit of a growing directory
    /// becomes two slots, never four.
    pub(crate) fn resize(&self, dir: &Directory, bits: u32) {
        // A directory that was left keeps its next one for ever.
        if !dir.next.load(Acquire).is_null() || !self.left.load(Acquire).is_null() || bits == dir.bits {
            return;
        }
        debug_assert!(bits <= dir.bits + 1, "growing goes bit by bit");
        let pool = if bits > dir.bits { dir.pool.clone() } else { Arc::new(Pool::new(&self.epoch)) };
        let next = Box::into_raw(Box::new(Directory::new(bits, pool)));
        if dir.next.compare_exchange(ptr::null_mut(), next, AcqRel, Relaxed).is_err() {
            // Another thread has begun.
            self.free_directory(next);
        }
    }

    #[cold]
    fn move_some(&self, pin: &Pin<'_>, dir: &Directory, next: &Directory) {
        let units = dir.units(next);
        let start = dir.asked.fetch_add(STEP, Relaxed);
        for unit in start..start + STEP {
            self.move_unit(pin, dir, next, (unit % units) as usize);
        }
    }

    pub(crate) fn move_unit(&self, pin: &Pin<'_>, dir: &Directory, next: &Directory, unit: usize) {
        let bits = dir.bits.min(next.bits);
        let (old, new) = (dir.slots_of(bits, unit), next.slots_of(bits, unit));
        if new[0].load(Acquire) != VACANT {
            return;
        }
        let mut made = Made::new();
        let done = if next.bits > dir.bits {
            let [left, right] = self.split(pin, dir.bits, freeze(&old[0]));
            let _ = new[1].compare_exchange(VACANT, right, AcqRel, Relaxed);
            new[0].compare_exchange(VACANT, left, AcqRel, Relaxed).is_ok()
        } else {
            old.iter().for_each(|slot| _ = freeze(slot));
            let link = self.join(pin, next, bits, old, &mut made);
            new[0].compare_exchange(VACANT, link, AcqRel, Relaxed).is_ok()
        };
        if !done {
            made.into_iter().for_each(|address| next.pool.retire(pin, address, 0));
        } else if next.moved.fetch_add(1, AcqRel) + 1 == dir.units(next) {
            self.leave(pin, dir, next);
        }
    }

    /// The links of the two slots that replace a slot with the frozen link `link`.
    fn split(&self, pin: &Pin<'_>, bit: u32, link: u64) -> [u64; 2] {
        if link == VACANT || link & FLAG != 0 {
            return [EMPTY; 2];
        }
        if is_inner(link) && u32::from(position(link)) == bit {
            let node = self.node(link, pin);
            return [freeze(&node.0[0]), freeze(&node.0[1])];
        }
        // All keys below agree in this bit, so any leaf tells it, a removed one too.
        let mut leaf = link;
        while is_inner(leaf) {
            let node = self.node(leaf, pin);
            leaf = node.load(0);
            if word::is_list(leaf) {
                leaf = node.load(1); // a node has one dead link at most
            }
        }
        let mut links = [EMPTY; 2];
        links[word::fingerprint_bit(leaf, bit)] = link;
        links
    }

    /// The link of the slot that replaces these frozen slots, whose keys differ from bit `bit` on.
    fn join(&self, pin: &Pin<'_>, next: &Directory, bit: u32, old: &[AtomicU64], made: &mut Made) -> u64 {
        if let [slot] = old {
            return self.copy(pin, next, slot.load(Acquire) & !TAG, made);
        }
        let (left, right) = old.split_at(old.len() / 2);
        let links = [left, right].map(|half| self.join(pin, next, bit + 1, half, made));
        self.put_together(pin, next, bit as u16, links, made)
    }

    /// A copy of the trie below a frozen link, without its removed leaves.
    fn copy(&self, pin: &Pin<'_>, next: &Directory, link: u64, made: &mut Made) -> u64 {
        if link == VACANT || link & FLAG != 0 {
            return EMPTY;
        }
        if link & LEAF != 0 || u32::from(position(link)) >= FINGERPRINT_END {
            return link;
        }
        let node = self.node(link, pin);
        let links = [0, 1].map(|side| self.copy(pin, next, freeze(&node.0[side]), made));
        self.put_together(pin, next, position(link), links, made)
    }

    /// A new node above two links; if one of them is empty, the other link.
    fn put_together(&self, pin: &Pin<'_>, next: &Directory, at: u16, links: [u64; 2], made: &mut Made) -> u64 {
        match links {
            [EMPTY, other] | [other, EMPTY] => other,
            [left, right] => {
                let address = next.pool.allocate(&self.epoch, pin);
                made.push(address);
                let link = word::inner(address, at);
                let node = self.node(link, pin);
                node.0[0].store(left, Relaxed);
                node.0[1].store(right, Relaxed);
                link
            }
        }
    }

    /// Makes `next` the current directory after the last unit was moved. One thread calls this,
    /// once for each directory.
    fn leave(&self, pin: &Pin<'_>, dir: &Directory, next: &Directory) {
        dir.left_at.store(pin.epoch, Relaxed);
        let (old, new) = (ptr::from_ref(dir).cast_mut(), ptr::from_ref(next).cast_mut());
        let grown = next.bits > dir.bits;
        if grown {
            // Before the new one is current, so that no thread begins to move from that one.
            self.left.store(old, Release);
        }
        self.current.store(new, Release);
        self.resizes.fetch_add(1, Relaxed);
        if !grown {
            self.doom(old, dir);
        }
    }

    /// Frees the nodes that became two slots, in a few slots of a directory that was left.
    #[cold]
    fn sweep(&self, pin: &Pin<'_>, left: &Directory) {
        if pin.epoch < left.left_at.load(Relaxed) + GRACE {
            return;
        }
        let slots = left.slots.len() as u64;
        let start = left.sweeping.fetch_add(STEP, Relaxed);
        if start >= slots {
            return;
        }
        for slot in &left.slots[start as usize..(start + STEP) as usize] {
            let link = slot.load(Relaxed) & !TAG;
            if is_inner(link) && u32::from(position(link)) == left.bits {
                left.pool.release(pin, word::address(link));
            }
        }
        if left.swept.fetch_add(STEP, AcqRel) + STEP == slots {
            left.left_at.store(pin.epoch, Relaxed);
            let old = self.left.swap(ptr::null_mut(), AcqRel);
            self.doom(old, left);
        }
    }

    /// Puts a directory that no new operation can reach into the list of those to be dropped.
    fn doom(&self, old: *mut Directory, dir: &Directory) {
        let mut first = self.doomed.load(Relaxed);
        loop {
            dir.doomed.store(first, Relaxed);
            match self.doomed.compare_exchange_weak(first, old, AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }

    /// Drops the directories whose grace period is over.
    fn drop_doomed(&self, pin: &Pin<'_>) {
        // The list is taken as a whole: this thread owns its directories now.
        let mut list = self.doomed.swap(ptr::null_mut(), AcqRel);
        while let Some(dir) = self.directory_at(list, pin) {
            let this = list;
            list = dir.doomed.load(Relaxed);
            if pin.epoch >= dir.left_at.load(Relaxed) + GRACE {
                self.free_directory(this);
            } else {
                self.doom(this, dir);
            }
        }
    }

    /// Finishes a resize that is under way, and sweeps and drops the old directory. No thread may
    /// be pinned.
    #[cfg(any(test, fuzzing, feature = "check"))]
    pub(crate) fn finish(&self) {
        loop {
            {
                let pin = self.epoch.pin();
                let dir = self.current(&pin);
                let busy = [&dir.next, &self.left, &self.doomed].iter().any(|at| !at.load(Acquire).is_null());
                if !busy {
                    return;
                }
                self.upkeep(&pin);
                self.look(&pin);
            }
            self.epoch.tick();
        }
    }
}

/// Whether the slots of a directory are used well, judged by some of them. Heads spread keys over
/// all slots; without heads the first bits may be the same for all keys, and a larger directory
/// would be of no use.
fn is_spread(dir: &Directory) -> bool {
    let step = dir.slots.len() / 64;
    let is_used = |at: &usize| dir.slots[at * step].load(Relaxed) & !TAG & !FLAG > LEAF;
    step > 0 && (0..64).filter(is_used).count() >= 40
}

/// Freezes a link. Returns the link without the mark.
fn freeze(link: &AtomicU64) -> u64 {
    link.fetch_or(TAG, AcqRel) & !TAG
}
