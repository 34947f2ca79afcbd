//! Nodes to take and to give back.
//!
//! Nodes lie in regions of memory, each twice as large as the one before, that stay where they are
//! as long as the pool lives. A pool is given back to the system whole: the tree makes a new one
//! when it has shrunk (module `resize`).
//!
//! Unlinked nodes hang in *limbo* lists, one per shard and epoch modulo 8; free ones in a *free*
//! list per shard. The lists run through the nodes: an unlinked node has one dead link, to the leaf
//! whose removal unlinked it, and the list's link takes its place and still reads as a removed
//! leaf, so that a search that stands on the node finds the same. (A thread that still helps to
//! unlink the node may even tag that link; so its tag is ignored.) All are stacks with a
//! compare-and-swap at the head. A limbo list is only ever taken whole. A pop from a free list
//! cannot be fooled by a head that went and came back (ABA): it is done pinned, and a node gets
//! into a free list once in its life, after a grace period.
//!
//! A thread pinned at *q* takes the lists of *q* − 3 to *q* − 6 modulo 8. Nobody meanwhile is
//! pinned later than *q* + 1, which is *q* − 7 modulo 8, so nothing too young can be in them.
//!
//! Sharding is for speed alone: every thread may take from every shard.
#![allow(unsafe_code)] // nodes are reached through addresses in link words

use crate::epoch::{Epoch, GRACE, Pin};
use crate::memory::{Zeroable, Zeroed};
use crate::primitive::{AtomicPtr, AtomicU64, Ordering};
use crate::word::{self, NIL};
use Ordering::{AcqRel, Acquire, Relaxed};
use std::ptr;

/// Two links. Aligned to its size: a node never straddles cache lines.
#[repr(align(16))]
pub(crate) struct Node(pub(crate) [AtomicU64; 2]);

impl Node {
    /// The link on one side.
    #[inline]
    pub(crate) fn load(&self, side: usize) -> u64 {
        let link = self.0[side].load(Acquire);
        debug_assert!(link & !word::TAG != word::VACANT, "a node that was never filled is in the tree");
        link
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Node>() == 16 && align_of::<Node>() == 16);

// SAFETY: two atomics of value 0.
unsafe impl Zeroable for Node {
    #[cfg(loom)]
    fn zero() -> Self {
        Node([AtomicU64::new(0), AtomicU64::new(0)])
    }
}

/// Limbo lists per shard.
const LISTS: u64 = 8;
/// Ages of the limbo lists that may be used again.
const RIPE: std::ops::RangeInclusive<u64> = GRACE..=6;
/// Fresh nodes are taken in blocks of this many; a power of two, and regions are multiples of it.
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
    /// As many as the epoch has.
    shards: Box<[Shard]>,
}

/// The node that an inner link leads to.
///
/// # Safety
/// `link` was read in the tree under `pin`, or comes from [`Pool::allocate`] under it, or from a
/// list that the caller owns under it.
#[inline]
pub(crate) unsafe fn node<'p>(link: u64, _pin: &'p Pin<'_>) -> &'p Node {
    // SAFETY: an address gets into a word only from `Pool::allocate`, so it is that of an element
    // of one of its pool's regions, whose provenance was exposed there. A pool lives at least until
    // a grace period has passed since the last link into it was in reach (`resize`), so until the
    // pin ends. A node is two atomics, so shared references are all that is ever made to it.
    unsafe { &*ptr::with_exposed_provenance::<Node>(word::address(link) as usize) }
}

impl Pool {
    pub(crate) fn new(epoch: &Epoch) -> Self {
        let shard = |_| Shard { limbo: std::array::from_fn(|_| AtomicU64::new(NIL)), free: AtomicU64::new(NIL) };
        Pool {
            regions: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            fresh: AtomicU64::new(0),
            shards: (0..epoch.shards()).map(shard).collect(),
        }
    }

    /// The address of a node for the caller alone. What its words hold is of no meaning.
    pub(crate) fn allocate(&self, epoch: &Epoch, pin: &Pin<'_>) -> u64 {
        let own = &self.shards[pin.number];
        loop {
            if let Some(address) = self.pop(own, pin) {
                return address;
            }
            epoch.tick(); // we are short of nodes: let limbo lists ripen
            // Lists of others are taken whole, so that threads do not meet at each node.
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

    /// Gives back a node that no link leads to any more (or never did), and whose word `dead` holds
    /// a link to a removed leaf (or, if it was never linked, anything).
    pub(crate) fn retire(&self, pin: &Pin<'_>, address: u64, dead: usize) {
        if cfg!(all(debug_assertions, not(loom))) {
            let now = self.next(word::list(address, dead), pin).load(Relaxed);
            assert!(!word::is_list(now), "node {address:#x} is given back twice, or was never used");
        }
        let list = &self.shards[pin.number].limbo[(pin.epoch % LISTS) as usize];
        self.push(list, word::list(address, dead), word::list(address, dead), pin);
    }

    /// Makes a node free whose grace period is over.
    pub(crate) fn release(&self, pin: &Pin<'_>, address: u64) {
        self.poison(word::list(address, 0), pin);
        self.push(&self.shards[pin.number].free, word::list(address, 0), word::list(address, 0), pin);
    }

    /// Makes the other word of a free node one that no search may meet; debug builds find out those
    /// that do. (Loom has enough to do.)
    #[inline]
    fn poison(&self, link: u64, pin: &Pin<'_>) {
        if cfg!(all(debug_assertions, not(loom))) {
            // SAFETY: as in `next`.
            unsafe { &node(link, pin).0[word::list_side(link) ^ 1] }.store(word::POISON, Relaxed);
        }
    }

    /// The word of a list's node that holds the list's next link.
    fn next<'p>(&self, link: u64, pin: &'p Pin<'_>) -> &'p AtomicU64 {
        // SAFETY: list links lead to nodes of this pool, which lives as long as `self`; and the
        // lists are read under a pin.
        unsafe { &node(link, pin).0[word::list_side(link)] }
    }

    /// Takes a node from the shard's free list.
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
            // A swap, not a store: loom may put a store on either side of a late helper's tag, and
            // read neither.
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

    /// Takes a list whole: returns its first node, the rest goes to `own`'s free list.
    fn take(&self, list: &AtomicU64, own: &Shard, pin: &Pin<'_>) -> Option<u64> {
        if list.load(Relaxed) == NIL {
            return None;
        }
        let first = list.swap(NIL, AcqRel);
        if first == NIL {
            return None;
        }
        // Where both leaves of a node were removed at once, a late helper may have tagged the
        // list's link.
        let next = |link| self.next(link, pin).load(Relaxed) & !word::TAG;
        let rest = next(first);
        if cfg!(all(debug_assertions, not(loom))) {
            let mut all = first;
            while all != NIL {
                self.poison(all, pin);
                all = next(all);
            }
        }
        // Mostly the free list is empty: that is why we are here.
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

    /// The address of the first node of a block, by its number; makes its region if it is not there
    /// yet.
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
                    // SAFETY: it comes from `into_raw` with this length, and nobody else has seen
                    // it.
                    drop(unsafe { Zeroed::from_raw(fresh, len) });
                }
            }
        }
        let node = start.wrapping_add(offset);
        let address = node.expose_provenance() as u64;
        assert!(word::is_address(address), "the kernel gave memory at {node:p}, which a link cannot hold");
        address
    }

    /// Nodes handed out at least once.
    pub(crate) fn touched(&self) -> u64 {
        self.fresh.load(Relaxed)
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.touched() * size_of::<Node>() as u64) + size_of::<Self>() as u64 + size_of_val(&*self.shards) as u64
    }

    /// Bytes of address space for nodes.
    pub(crate) fn bytes_reserved(&self) -> u64 {
        let made = |region: &usize| !self.regions[*region].load(Relaxed).is_null();
        (0..REGIONS).filter(made).map(|region| (Self::region_len(region) * size_of::<Node>()) as u64).sum()
    }

    /// Checks, at rest, that every node is live or in a list, and that once. `live` holds
    /// addresses, of which it takes this pool's out.
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

    #[cfg(test)]
    pub(crate) fn shard_lists_ripe(&self, shard: usize, pin: &Pin<'_>) -> Option<u64> {
        self.harvest(&self.shards[shard], &self.shards[pin.number], pin)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (region, slot) in self.regions.iter().enumerate() {
            let start = slot.load(Relaxed);
            if !start.is_null() {
                // SAFETY: `address` stored it, from `into_raw` with this length; `&mut self` says
                // nobody uses it.
                drop(unsafe { Zeroed::from_raw(start, Self::region_len(region)) });
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn places_are_dense_and_inside_their_regions() {
        let mut expected = (0, 0);
        for number in 0..100_000 {
            assert_eq!(Pool::place(number), expected, "node {number}");
            expected.1 += 1;
            if expected.1 == Pool::region_len(expected.0) {
                expected = (expected.0 + 1, 0);
            }
        }
        let (region, offset) = Pool::place((1 << 40) - 1);
        assert!(region < REGIONS && offset < Pool::region_len(region));
    }

    /// The lists' rule, one step after the other.
    #[test]
    fn what_a_pin_holds_back() {
        let epoch = Epoch::with_shards(2);
        let pool = Pool::new(&epoch);
        let first = epoch.pin_on(0);
        let address = pool.allocate(&epoch, &first);
        // SAFETY: just allocated.
        unsafe { node(address, &first) }.0[0].store(word::EMPTY, Relaxed);
        epoch.tick();

        // Retired one tick later than `first` was pinned; `first` must not come by it, whatever it
        // takes.
        let second = epoch.pin_on(1);
        pool.retire(&second, address, 0);
        drop(second);
        for shard in &pool.shards {
            assert_eq!(pool.harvest(shard, &pool.shards[0], &first), None);
        }
        drop(first);

        while epoch.ticks() < 4 {
            let pin = epoch.pin_on(0);
            assert_eq!(pool.shard_lists_ripe(1, &pin), None, "too early");
            drop(pin);
            epoch.tick();
        }
        let pin = epoch.pin_on(0);
        assert_eq!(pool.shard_lists_ripe(1, &pin), Some(address), "three ticks later");
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use crate::primitive::Counter;
    use crate::tests::loom::{Count, model};
    use Ordering::Release;
    use loom::sync::Arc;
    use loom::thread;

    const LIVE: u64 = 11;

    /// A reader who got a node before it was unlinked must find in it what was there; a node is
    /// used again all the same.
    #[test]
    fn grace() {
        static REUSED: Count = Count::new();
        static SEEN: Count = Count::new();
        model(3, || {
            let epoch = Arc::new(Epoch::with_shards(2));
            let pool = Arc::new(Pool::new(&epoch));
            let get = |pin: &Pin<'_>, link: u64, side: usize| {
                // SAFETY: a link to a node of this pool; the test is what tests that it may be
                // read.
                unsafe { node(link, pin) }.0[side].load(Relaxed)
            };
            let address = {
                let pin = epoch.pin_on(1);
                let address = pool.allocate(&epoch, &pin);
                // SAFETY: just allocated.
                unsafe { node(address, &pin) }.0[1].store(LIVE, Relaxed);
                address
            };
            let slot = Arc::new(AtomicU64::new(word::inner(address, 0)));

            let reader = {
                let (epoch, pool, slot) = (epoch.clone(), pool.clone(), slot.clone());
                thread::spawn(move || {
                    let pin = epoch.pin_on(0);
                    let link = slot.load(Acquire);
                    if link != word::VACANT {
                        SEEN.more();
                        assert_eq!(get(&pin, link, 1), LIVE);
                    }
                    drop(pin);
                    drop(pool);
                })
            };
            // Ticks that a reader may sleep through between its first look at the clock and its
            // count.
            epoch.tick();
            epoch.tick();
            {
                let pin = epoch.pin_on(1);
                slot.store(word::VACANT, Release);
                pool.retire(&pin, address, 0);
            }
            for _ in 0..*RIPE.start() {
                epoch.tick();
            }
            let pin = epoch.pin_on(1);
            let again = pool.allocate(&epoch, &pin);
            // SAFETY: just allocated.
            unsafe { node(again, &pin) }.0[1].store(LIVE + 1, Relaxed);
            if again == address {
                REUSED.more();
            }
            drop(pin);
            reader.join().unwrap();
        });
        assert!(REUSED.any() && SEEN.any(), "the model never came to the point");
    }

    /// No node is handed out twice, though lists are popped, pushed and harvested at the same time.
    #[test]
    fn owners() {
        model(3, || {
            let epoch = Arc::new(Epoch::with_shards(1));
            let pool = Arc::new(Pool::new(&epoch));
            {
                // Two nodes in the limbo list that is ripe next.
                let pin = epoch.pin();
                let two = [pool.allocate(&epoch, &pin), pool.allocate(&epoch, &pin)];
                for (i, address) in two.into_iter().enumerate() {
                    pool.retire(&pin, address, i);
                }
            }
            (0..2).for_each(|_| epoch.tick());
            let owned: Arc<std::sync::Mutex<std::collections::BTreeSet<u64>>> = Arc::default();
            static REUSED: Counter = Counter::new(0);
            let work =
                |epoch: &Epoch, pool: &Pool, owned: &std::sync::Mutex<std::collections::BTreeSet<u64>>, rounds| {
                    for round in 0..rounds {
                        let pin = epoch.pin();
                        let address = pool.allocate(epoch, &pin);
                        assert!(owned.lock().unwrap().insert(address), "node {address:#x} has two owners");
                        // SAFETY: just allocated.
                        unsafe { node(address, &pin) }.0[round].store(0, Relaxed);
                        owned.lock().unwrap().remove(&address);
                        pool.retire(&pin, address, round);
                        REUSED.fetch_add(1, Relaxed);
                    }
                };
            let other = {
                let (epoch, pool, owned) = (epoch.clone(), pool.clone(), owned.clone());
                thread::spawn(move || work(&epoch, &pool, &owned, 1))
            };
            work(&epoch, &pool, &owned, 2);
            other.join().unwrap();
        });
    }
}
