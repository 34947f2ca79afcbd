//! Nodes to take and to give back, and the epoch clock that says when a node may be used again.
//!
//! # The clock
//!
//! Epoch-based reclamation (Fraser, 2004), kept per tree. An operation *pins* the epoch: it reads the clock, adds itself to
//! the count of that epoch, and reads the clock again; if it has moved, it starts over. The clock goes from *e* to *e* + 1
//! only when nobody is counted at *e* − 1. So while someone is pinned at *p*, the clock shows *p* or *p* + 1:
//!
//! The clock would go from *p* + 1 to *p* + 2 after reading the count of *p*, which is done by a
//! read-modify-write. If that comes before our addition to the same count, our second reading of the clock comes
//! after it, sees at least *p* + 1, and we are not pinned. If it comes after, it sees us counted.
//!
//! # Grace
//!
//! A node unlinked by a thread pinned at *p* may be used again by a thread pinned at *p* + 3 or later:
//!
//! - when it was unlinked, the clock showed at most *p* + 1; whoever pins at *p* + 2 or later sees it unlinked, because the
//!   clock came to *p* + 2 after the unlinking thread had been counted out;
//! - the clock comes to *p* + 3 only when everybody who pinned at *p* + 1 or before has been counted out.
//!
//! All of this follows from acquire and release on single words; there is no fence and no sequential consistency, so loom
//! models it exactly and ThreadSanitizer understands it.
//!
//! # Lists
//!
//! Unlinked nodes hang in *limbo* lists, one per shard and epoch modulo 8; free ones in a *free* list per shard. The
//! lists run through the nodes: an unlinked node has one dead link, to the leaf whose removal unlinked it, and the list's
//! link takes its place and still reads as a removed leaf, so that a search that stands on the node finds the same. (A
//! thread that still helps to unlink the node may even tag that link; so its tag is ignored.) All are stacks with a compare-and-swap at the head. A limbo list is only ever taken whole. A pop from a free list cannot
//! be fooled by a head that went and came back (ABA): it is done pinned, and a node gets into a free list
//! once in its life, after a grace period.
//!
//! A thread pinned at *q* takes the lists of *q* − 3 to *q* − 6 modulo 8. Nobody meanwhile is pinned later than
//! *q* + 1, which is *q* − 7 modulo 8, so nothing too young can be in them.
//!
//! Sharding is for speed alone: every thread may take from every shard.

use crate::primitive::{AtomicU64, Counter, Ordering, shard_count, thread_number};
use crate::slab::{Node, Slab};
use crate::word::{self, MAX_PAYLOAD};
use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Limbo lists per shard.
const LISTS: u64 = 8;
/// Counts of pinned operations per shard: of the epochs modulo 4 (three would do).
const COUNTS: u64 = 4;
/// Ages of the limbo lists that may be used again.
const RIPE: std::ops::RangeInclusive<u64> = 3..=6;
/// Fresh nodes are taken from the slab in blocks of this many; a power of two, and the slab's buckets are multiples of it.
const BLOCK: u64 = if cfg!(loom) { 1 } else { 64 };
/// A shard tries to move the clock on after this many removals.
const TICK_EVERY: u64 = if cfg!(loom) { 1 } else { 32 };

/// The end of a list.
const NIL: u64 = word::FLAG | word::LEAF;

/// What threads would otherwise contend for.
#[repr(align(128))]
struct Shard {
    pinned: [AtomicU64; COUNTS as usize],
    limbo: [AtomicU64; LISTS as usize],
    free: AtomicU64,
    added: Counter,
    removed: Counter,
    stale: Counter,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Shard>() == 128, "two cache lines, which processors fetch as a pair");

/// The nodes of one tree.
pub(crate) struct Nodes {
    slab: Slab,
    clock: AtomicU64,
    /// Every node below this index has been handed out at least once.
    fresh: AtomicU64,
    /// A power of two of them.
    shards: Box<[Shard]>,
}

/// While this lives, no node that its holder can reach is used again.
pub(crate) struct Pin<'a> {
    shard: &'a Shard,
    epoch: u64,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        // Release: whoever reads the count as zero comes after all that was done pinned.
        self.shard.pinned[(self.epoch % COUNTS) as usize].fetch_sub(1, Release);
    }
}

impl Pin<'_> {
    /// Counts a key in.
    pub(crate) fn count_added(&self) {
        self.shard.added.fetch_add(1, Relaxed);
    }

    /// Counts a stale key that was dropped; it also counts as removed.
    pub(crate) fn count_stale(&self) {
        self.shard.stale.fetch_add(1, Relaxed);
    }
}

impl Nodes {
    pub(crate) fn new() -> Self {
        Self::with_shards(shard_count())
    }

    fn with_shards(shards: usize) -> Self {
        debug_assert!(shards.is_power_of_two());
        let shard = |_| Shard {
            pinned: std::array::from_fn(|_| AtomicU64::new(0)),
            limbo: std::array::from_fn(|_| AtomicU64::new(NIL)),
            free: AtomicU64::new(NIL),
            added: Counter::new(0),
            removed: Counter::new(0),
            stale: Counter::new(0),
        };
        Nodes {
            slab: Slab::new(),
            clock: AtomicU64::new(2 * LISTS), // so that nothing below goes under zero
            fresh: AtomicU64::new(BLOCK),     // node 0 is not used, nor is the rest of its block
            shards: (0..shards).map(shard).collect(),
        }
    }

    /// Pins the epoch.
    #[inline]
    pub(crate) fn pin(&self) -> Pin<'_> {
        self.pin_on(thread_number())
    }

    #[inline]
    fn pin_on(&self, number: usize) -> Pin<'_> {
        let shard = &self.shards[number & (self.shards.len() - 1)];
        let mut epoch = self.clock.load(Acquire);
        loop {
            let count = &shard.pinned[(epoch % COUNTS) as usize];
            count.fetch_add(1, AcqRel);
            let now = self.clock.load(Acquire);
            if now == epoch {
                return Pin { shard, epoch };
            }
            count.fetch_sub(1, Release);
            epoch = now;
        }
    }

    /// The node that an inner link leads to.
    #[inline]
    pub(crate) fn get(&self, link: u64) -> &Node {
        self.slab.get(word::payload(link))
    }

    /// A node for the caller alone. What its words hold is of no meaning.
    pub(crate) fn allocate(&self, pin: &Pin<'_>) -> u64 {
        if let Some(index) = self.pop(pin.shard) {
            return index;
        }
        self.tick(); // we are short of nodes: let limbo lists ripen
        loop {
            let own = std::iter::once(pin.shard);
            for shard in own.chain(self.shards.iter()) {
                if let Some(index) = self.pop(shard).or_else(|| self.harvest(shard, pin)) {
                    return index;
                }
            }
            self.add_block(pin.shard);
        }
    }

    /// Gives back a node that no link leads to any more (or never did), and whose word `dead` holds
    /// a link to a removed leaf (or, if it was never linked, anything).
    pub(crate) fn retire(&self, pin: &Pin<'_>, index: u64, dead: usize) {
        let list = &pin.shard.limbo[(pin.epoch % LISTS) as usize];
        self.push(list, word::list(index, dead), (index, dead));
    }

    /// Counts a removed key, and moves the clock on now and then.
    pub(crate) fn count_removed(&self, pin: &Pin<'_>) {
        if (pin.shard.removed.fetch_add(1, Relaxed) + 1).is_multiple_of(TICK_EVERY) {
            self.tick();
        }
    }

    /// Moves the clock on, if nobody holds it.
    fn tick(&self) {
        let now = self.clock.load(Acquire);
        let before = ((now - 1) % COUNTS) as usize;
        // First look, then prove: the second reading must be a read-modify-write (see above).
        let idle =
            |shard: &Shard| shard.pinned[before].load(Relaxed) == 0 && shard.pinned[before].fetch_add(0, AcqRel) == 0;
        if self.shards.iter().all(idle) {
            // Failure: another thread has moved it on.
            let _ = self.clock.compare_exchange(now, now + 1, AcqRel, Relaxed);
        }
    }

    /// The link that follows `link` in a list.
    fn next(&self, link: u64) -> u64 {
        // Where both leaves of a node were removed at once, a late helper may have tagged the list's link.
        self.get(link).0[word::list_side(link)].load(Relaxed) & !word::TAG
    }

    /// Takes a node from the shard's free list.
    fn pop(&self, shard: &Shard) -> Option<u64> {
        let mut head = shard.free.load(Acquire);
        while head != NIL {
            let next = self.next(head);
            match shard.free.compare_exchange_weak(head, next, AcqRel, Acquire) {
                Ok(_) => return Some(word::payload(head)),
                Err(now) => head = now,
            }
        }
        None
    }

    /// Puts the list that starts with the link `first` and ends in the node and side `last` before the list at `head`.
    fn push(&self, head: &AtomicU64, first: u64, last: (u64, usize)) {
        let end = &self.slab.get(last.0).0[last.1];
        let mut now = head.load(Relaxed);
        loop {
            // A swap, not a store: loom may put a store on either side of a late helper's tag, and read neither.
            end.swap(now, Relaxed);
            match head.compare_exchange_weak(now, first, AcqRel, Relaxed) {
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
    }

    /// Takes a ripe limbo list of the shard: returns its first node, the rest becomes free.
    fn harvest(&self, shard: &Shard, pin: &Pin<'_>) -> Option<u64> {
        for age in RIPE {
            let list = &shard.limbo[((pin.epoch - age) % LISTS) as usize];
            if list.load(Relaxed) == NIL {
                continue;
            }
            let first = list.swap(NIL, AcqRel);
            if first == NIL {
                continue;
            }
            let rest = self.next(first);
            // Mostly the free list is empty: that is why we are here.
            if rest != NIL && shard.free.compare_exchange(NIL, rest, AcqRel, Relaxed).is_err() {
                let mut end = rest;
                loop {
                    let next = self.next(end);
                    if next == NIL {
                        break;
                    }
                    end = next;
                }
                self.push(&shard.free, rest, (word::payload(end), word::list_side(end)));
            }
            return Some(word::payload(first));
        }
        None
    }

    /// Takes a block of nodes from the slab and puts it into the shard's free list.
    fn add_block(&self, shard: &Shard) {
        let start = self.fresh.fetch_add(BLOCK, Relaxed);
        assert!(start + BLOCK <= MAX_PAYLOAD, "a tree holds at most 2^40 keys");
        self.slab.ensure(start);
        let last = start + BLOCK - 1;
        for index in start..last {
            self.slab.get(index).0[0].store(word::list(index + 1, 0), Relaxed);
        }
        self.push(&shard.free, word::list(start, 0), (last, 0));
    }

    /// Keys in the tree.
    pub(crate) fn keys(&self) -> u64 {
        let sum = |f: fn(&Shard) -> &Counter| self.shards.iter().map(|s| f(s).load(Relaxed)).sum::<u64>();
        // Removals first, and not below zero: the counters move while we add them up.
        let removed = sum(|s| &s.removed);
        sum(|s| &s.added).saturating_sub(removed)
    }

    /// Checks, at rest, that every node is live or in a list, and that once. Empties `live`.
    #[cfg(test)]
    pub(crate) fn check(&self, mut live: std::collections::BTreeSet<u64>) {
        for shard in &self.shards {
            for head in shard.limbo.iter().chain([&shard.free]) {
                let mut link = head.load(Acquire);
                while link != NIL {
                    assert!(live.insert(word::payload(link)), "live or listed twice: {link:#x}");
                    link = self.next(link);
                }
            }
        }
        assert!(live.iter().all(|&index| index >= BLOCK), "a node that was never handed out");
        assert_eq!(live.len() as u64, self.touched(), "nodes are lost");
    }

    pub(crate) fn stale_dropped(&self) -> u64 {
        self.shards.iter().map(|s| s.stale.load(Relaxed)).sum()
    }

    pub(crate) fn ticks(&self) -> u64 {
        self.clock.load(Relaxed) - 2 * LISTS
    }

    /// Nodes ever handed out.
    pub(crate) fn touched(&self) -> u64 {
        self.fresh.load(Relaxed) - BLOCK
    }

    pub(crate) fn bytes(&self) -> u64 {
        let fixed = size_of::<Self>() + size_of_val(&*self.shards);
        (self.touched() + BLOCK) * size_of::<Node>() as u64 + fixed as u64
    }

    pub(crate) fn bytes_reserved(&self) -> u64 {
        self.slab.bytes_reserved()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The clock's rule and the lists' rule, one step after the other.
    #[test]
    fn what_a_pin_holds_back() {
        let nodes = Nodes::with_shards(2);
        let first = nodes.pin_on(0);
        let index = nodes.allocate(&first);
        nodes.tick();
        assert_eq!(nodes.ticks(), 1, "a pin at the present allows one tick");
        nodes.tick();
        assert_eq!(nodes.ticks(), 1, "and no more");

        // Retired one tick later than `first` was pinned; `first` must not come by it, whatever it takes.
        let second = nodes.pin_on(1);
        nodes.retire(&second, index, 0);
        drop(second);
        for shard in &nodes.shards {
            assert_eq!(nodes.harvest(shard, &first), None);
        }
        drop(first);

        for ticks in 2..=4 {
            let pin = nodes.pin_on(0);
            assert_eq!(nodes.harvest(&nodes.shards[1], &pin), None, "too early");
            drop(pin);
            nodes.tick();
            assert_eq!(nodes.ticks(), ticks);
        }
        let pin = nodes.pin_on(0);
        assert_eq!(nodes.harvest(&nodes.shards[1], &pin), Some(index), "three ticks later");
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use crate::tests::loom::{Count, model};
    use loom::sync::Arc;
    use loom::thread;

    const LIVE: u64 = 11;

    /// A reader who got a node before it was unlinked must find in it what was there; a node is used again all the same.
    #[test]
    fn grace() {
        static REUSED: Count = Count::new();
        static SEEN: Count = Count::new();
        model(3, || {
            let nodes = Arc::new(Nodes::with_shards(2));
            let index = nodes.allocate(&nodes.pin_on(1));
            nodes.slab.get(index).0[1].store(LIVE, Relaxed);
            let slot = Arc::new(AtomicU64::new(word::inner(index, 0)));

            let reader = {
                let (nodes, slot) = (nodes.clone(), slot.clone());
                thread::spawn(move || {
                    let _pin = nodes.pin_on(0);
                    let link = slot.load(Acquire);
                    if link != word::EMPTY {
                        SEEN.more();
                        assert_eq!(nodes.get(link).0[1].load(Relaxed), LIVE);
                    }
                })
            };
            // Ticks that a reader may sleep through between its first look at the clock and its count.
            nodes.tick();
            nodes.tick();
            {
                let pin = nodes.pin_on(1);
                slot.store(word::EMPTY, Release);
                nodes.retire(&pin, index, 0);
            }
            for _ in 0..*RIPE.start() {
                nodes.tick();
            }
            let pin = nodes.pin_on(1);
            let again = nodes.allocate(&pin);
            nodes.slab.get(again).0[1].store(LIVE + 1, Relaxed);
            if again == index {
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
            let nodes = Arc::new(Nodes::with_shards(1));
            let owned: Arc<[Counter; 8]> = Arc::new(std::array::from_fn(|_| Counter::new(0)));
            {
                // Two nodes in the limbo list that is ripe next.
                let pin = nodes.pin();
                let two = [nodes.allocate(&pin), nodes.allocate(&pin)];
                for index in two {
                    nodes.retire(&pin, index, (index & 1) as usize);
                }
            }
            (0..2).for_each(|_| nodes.tick());
            let work = |nodes: &Nodes, owned: &[Counter; 8], rounds: usize| {
                for round in 0..rounds {
                    let pin = nodes.pin();
                    let index = nodes.allocate(&pin);
                    assert_eq!(owned[index as usize].fetch_add(1, Relaxed), 0, "node {index} has two owners");
                    nodes.slab.get(index).0[round].store(0, Relaxed);
                    owned[index as usize].fetch_sub(1, Relaxed);
                    nodes.retire(&pin, index, round);
                }
            };
            let other = {
                let (nodes, owned) = (nodes.clone(), owned.clone());
                thread::spawn(move || work(&nodes, &owned, 1))
            };
            work(&nodes, &owned, 2);
            other.join().unwrap();
        });
    }
}
