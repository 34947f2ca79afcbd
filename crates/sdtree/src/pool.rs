//! Allocation of nodes.
//!
//! Nodes lie in regions of memory, each twice as large as the one before. A region stays at its
//! address as long as the pool lives. A pool's memory goes back to the system as a whole: the tree
//! makes a new pool when it shrinks (module `resize`).
//!
//! Unlinked nodes are in *limbo* lists, one for each shard and epoch modulo 8; free nodes are in a
//! *free* list for each shard. The lists run through the nodes. An unlinked node has one dead link,
//! to the leaf whose removal unlinked it. The list's link takes its place and still reads as a
//! removed leaf, so that a search at the node sees no difference. A thread that still helps to
//! unlink the node may tag that link; so its tag is ignored. All lists are stacks with a
//! compare-and-swap at the head. A limbo list is only ever taken as a whole. A pop from a free list
//! is safe from a head that went and came back (ABA): the popping thread is pinned, and a node
//! enters a free list only after a grace period.
//!
//! A thread pinned at *q* takes the lists of *q* − 3 to *q* − 6 modulo 8. Meanwhile no thread is
//! pinned later than *q* + 1, which is *q* − 7 modulo 8, so no node in these lists is too young.
//!
//! Shards only serve speed: every thread may take from every shard.
#![allow(unsafe_code)] // Nodes are reached through addresses in link words.

use std::ptr;

use crate::epoch::{Epoch, GRACE, Pin};
use crate::memory::{Zeroable, Zeroed};
use crate::primitive::{AtomicPtr, AtomicU64, Ordering};
use crate::word::{self, NIL};
use Ordering::{AcqRel, Acquire, Relaxed};

/// Two links. Aligned to its size: a node never straddles cache lines.
#[repr(align(16))]
pub(crate) struct Node(pub(crate) [AtomicU64; 2]);

impl Node {
    #[inline]
    pub(crate) fn load(&self, side: usize) -> u64 {
        let link = self.0[side].load(Acquire);
        debug_assert!(link & !word::TAG != word::VACANT, "a node that was never filled is in the tree");
        link
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Node>() == 16 && align_of::<Node>() == 16);

// SAFETY: zeroed bytes are two atomics of value 0, and atomics need no drop.
unsafe impl Zeroable for Node {
    #[cfg(loom)]
    fn zero() -> Self {
        Node([AtomicU64::new(0), AtomicU64::new(0)])
    }
}

/// Limbo lists in a shard: the four ages that may be used, and four that may not be yet.
const LISTS: u64 = 8;
/// Ages, in epochs, of the limbo lists whose nodes may be used again.
const RIPE: std::ops::RangeInclusive<u64> = GRACE..=6;
/// Fresh nodes are taken in blocks of this many: 1 KiB. A power of two; regions are multiples of
/// it.
const BLOCK: u64 = if cfg!(loom) { 1 } else { 64 };
/// log₂ of the number of nodes in the first region.
const FIRST_BITS: u32 = if cfg!(loom) { 1 } else { 12 };
/// Regions, for 2⁴⁰ nodes.
const REGIONS: usize = if cfg!(loom) { 4 } else { 41 - FIRST_BITS as usize };

#[repr(align(128))]
struct Shard {
    limbo: [AtomicU64; LISTS as usize],
    free: AtomicU64,
}

/// Nodes of a tree.
pub(crate) struct Pool {
    regions: [AtomicPtr<Node>; REGIONS],
    /// The number of nodes that have been handed out at least once.
    fresh: AtomicU64,
    /// As many shards as the epoch has.
    shards: Box<[Shard]>,
}

/// The node that an inner link leads to.
///
/// # Safety
/// One of these holds: `link` was read in a tree's directory or node under `pin`; its address comes
/// from [`Pool::allocate`], called under `pin`; or `link` was read under `pin` from a list of a
/// pool that outlives the pin.
#[inline]
pub(crate) unsafe fn node<'p>(link: u64, _pin: &'p Pin<'_>) -> &'p Node {
    // SAFETY: an address gets into a word only from `Pool::allocate`. It is the address of an
    // element of one of the pool's regions, and its provenance was exposed there. A pool lives at
    // least until a grace period has passed since the last link into it could be reached
    // (`resize`), so until the pin ends. A node is two atomics, to which only shared references are
    // ever made.
    unsafe { &*ptr::with_exposed_provenance::<Node>(word::address(link) as usize) }
}

impl Pool {
    pub(crate) fn new(epoch: &Epoch) -> Self {
        let shard = |_| Shard { limbo: std::array::from_fn(|_| AtomicU64::new(NIL)), free: AtomicU64::new(NIL) };
        Self {
            regions: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            fresh: AtomicU64::new(0),
            shards: (0..epoch.shards()).map(shard).collect(),
        }
    }

    /// The address of a node that no other thread uses. Its words have no meaning.
    pub(crate) fn allocate(&self, epoch: &Epoch, pin: &Pin<'_>) -> u64 {
        let own = &self.shards[pin.number];
        loop {
            if let Some(address) = self.pop(own, pin) {
                return address;
            }
            epoch.tick(); // there are no free nodes: let limbo lists ripen
            // Lists of other shards are taken as a whole, so that threads do not contend for each
            // node.
            if let Some(address) =
                std::iter::once(own).chain(&self.shards).find_map(|shard| self.harvest(shard, own, pin))
            {
                return address;
            }
            if let Some(address) = self.shards.iter().find_map(|shard| self.take(&shard.free, own, pin)) {
                return address;
            }
            self.add_block(own, pin);
        }
    }

    /// Gives back a node to which no link leads. If a link led to it before, its word `dead` holds
    /// a link to a removed leaf.
    pub(crate) fn retire(&self, pin: &Pin<'_>, address: u64, dead: usize) {
        if cfg!(all(debug_assertions, not(loom))) {
            let now = self.next(word::list(address, dead), pin).load(Relaxed);
            assert!(!word::is_list(now), "node {address:#x} is given back twice, or was never used");
        }
        let list = &self.shards[pin.number].limbo[(pin.epoch % LISTS) as usize];
        self.push(list, word::list(address, dead), word::list(address, dead), pin);
    }

    /// Puts a node whose grace period is over into the free list.
    pub(crate) fn release(&self, pin: &Pin<'_>, address: u64) {
        self.poison(word::list(address, 0), pin);
        self.push(&self.shards[pin.number].free, word::list(address, 0), word::list(address, 0), pin);
    }

    /// Sets the other word of a free node to one that no search may meet, in debug builds, which
    /// check for it. Not under loom, whose models would get too large.
    #[inline]
    fn poison(&self, link: u64, pin: &Pin<'_>) {
        if cfg!(all(debug_assertions, not(loom))) {
            // SAFETY: list links lead to nodes of this pool, which lives as long as `self`; the
            // link was read, or its node allocated, under the pin.
            unsafe { &node(link, pin).0[word::list_side(link) ^ 1] }.store(word::POISON, Relaxed);
        }
    }

    /// The word of a node in a list that holds the list's next link.
    fn next<'p>(&self, link: u64, pin: &'p Pin<'_>) -> &'p AtomicU64 {
        // SAFETY: list links lead to nodes of this pool, which lives as long as `self`; they are
        // read under a pin.
        unsafe { &node(link, pin).0[word::list_side(link)] }
    }

    fn pop(&self, shard: &Shard, pin: &Pin<'_>) -> Option<u64> {
        let mut head = shard.free.load(Acquire);
        while head != NIL {
            let next = self.next(head, pin).load(Relaxed) & !word::TAG;
            match shard.free.compare_exchange_weak(head, next, AcqRel, Acquire) {
                Ok(_) => return Some(word::address(head)),
                Err(now) => head = now,
            }
        }
        None
    }

    /// Puts the list from the link `first` to the link `last` before the list at `head`.
    fn push(&self, head: &AtomicU64, first: u64, last: u64, pin: &Pin<'_>) {
        let end = self.next(last, pin);
        let mut now = head.load(Relaxed);
        loop {
            // A swap, not a store: loom may order a store on either side of a late helper's tag,
            // and then read neither.
            end.swap(now, Relaxed);
            match head.compare_exchange_weak(now, first, AcqRel, Relaxed) {
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
    }

    /// Takes a ripe limbo list of `shard`.
    fn harvest(&self, shard: &Shard, own: &Shard, pin: &Pin<'_>) -> Option<u64> {
        RIPE.into_iter().find_map(|age| self.take(&shard.limbo[((pin.epoch - age) % LISTS) as usize], own, pin))
    }

    /// Takes a list as a whole. Returns its first node; the rest goes to the free list of `own`.
    fn take(&self, list: &AtomicU64, own: &Shard, pin: &Pin<'_>) -> Option<u64> {
        if list.load(Relaxed) == NIL {
            return None;
        }
        let first = list.swap(NIL, AcqRel);
        if first == NIL {
            return None;
        }
        // If both leaves of a node were removed at once, a late helper may have tagged the list's
        // link.
        let next = |link| self.next(link, pin).load(Relaxed) & !word::TAG;
        let rest = next(first);
        if cfg!(all(debug_assertions, not(loom))) {
            let mut all = first;
            while all != NIL {
                self.poison(all, pin);
                all = next(all);
            }
        }
        // Usually the free list is empty: that is why the list is taken.
        if rest != NIL && own.free.compare_exchange(NIL, rest, AcqRel, Relaxed).is_err() {
            let mut end = rest;
            while next(end) != NIL {
                end = next(end);
            }
            self.push(&own.free, rest, end, pin);
        }
        Some(word::address(first))
    }

    /// Puts a block of fresh nodes into the shard's free list.
    fn add_block(&self, shard: &Shard, pin: &Pin<'_>) {
        let start = self.address(self.fresh.fetch_add(BLOCK, Relaxed));
        let link = |i: u64| word::list(start + i * size_of::<Node>() as u64, 0);
        for i in 1..BLOCK {
            self.next(link(i - 1), pin).store(link(i), Relaxed);
        }
        (0..BLOCK).for_each(|i| self.poison(link(i), pin));
        self.push(&shard.free, link(0), link(BLOCK - 1), pin);
    }

    /// Region and offset of a node by its number. Region `r` has 2^(FIRST_BITS + r) nodes.
    fn place(number: u64) -> (usize, usize) {
        let n = number + (1 << FIRST_BITS);
        let log = n.ilog2();
        ((log - FIRST_BITS) as usize, (n - (1 << log)) as usize)
    }

    fn region_len(region: usize) -> usize {
        1 << (FIRST_BITS as usize + region)
    }

    /// The address of the first node of a block, by the node's number. Makes its region if it is
    /// missing.
    fn address(&self, number: u64) -> u64 {
        let (region, offset) = Self::place(number);
        assert!(region < REGIONS, "a tree has at most 2^40 nodes");
        let slot = &self.regions[region];
        let mut start = slot.load(Acquire);
        if start.is_null() {
            let len = Self::region_len(region);
            let fresh = Zeroed::<Node>::new(len).into_raw();
            match slot.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
                Ok(_) => start = fresh,
                Err(theirs) => {
                    start = theirs;
                    // SAFETY: the pointer comes from `into_raw` of a slice of this length, and no
                    // other thread has seen it.
                    drop(unsafe { Zeroed::from_raw(fresh, len) });
                }
            }
        }
        let node = start.wrapping_add(offset);
        let address = node.expose_provenance() as u64;
        assert!(word::is_address(address), "the kernel gave memory at {node:p}, which a link cannot hold");
        address
    }

    pub(crate) fn touched(&self) -> u64 {
        self.fresh.load(Relaxed)
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.touched() * size_of::<Node>() as u64) + size_of::<Self>() as u64 + size_of_val(&*self.shards) as u64
    }

    pub(crate) fn bytes_reserved(&self) -> u64 {
        let made = |region: &usize| !self.regions[*region].load(Relaxed).is_null();
        (0..REGIONS).filter(made).map(|region| (Self::region_len(region) * size_of::<Node>()) as u64).sum()
    }

    /// Checks, at rest, that every node is exactly once live or in a list. `live` holds the
    /// addresses of live nodes; those of this pool are removed from it.
    #[cfg(any(test, fuzzing, feature = "check"))]
    pub(crate) fn check(&self, live: &mut std::collections::BTreeSet<u64>, pin: &Pin<'_>) {
        let mut own = std::collections::BTreeSet::new();
        for shard in &self.shards {
            for head in shard.limbo.iter().chain([&shard.free]) {
                let mut link = head.load(Acquire);
                while link != NIL {
                    assert!(own.insert(word::address(link)), "listed twice: {link:#x}");
                    assert!(!live.contains(&word::address(link)), "listed and live: {link:#x}");
                    link = self.next(link, pin).load(Relaxed) & !word::TAG;
                }
            }
        }
        let all: Vec<u64> = (0..self.touched()).map(|number| self.address(number)).collect();
        for address in &all {
            assert!(own.remove(address) || live.remove(address), "lost: {address:#x}");
        }
        assert!(own.is_empty(), "nodes of another pool");
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn shard_lists_ripe(&self, shard: usize, pin: &Pin<'_>) -> Option<u64> {
        self.harvest(&self.shards[shard], &self.shards[pin.number], pin)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (region, slot) in self.regions.iter().enumerate() {
            let start = slot.load(Relaxed);
            if !start.is_null() {
                // SAFETY: `address` stored the pointer, from `into_raw` of a slice of this length.
                // `&mut self`: no other thread uses it.
                drop(unsafe { Zeroed::from_raw(start, Self::region_len(region)) });
            }
        }
    }
}

#[cfg(test)]
mod tests;
