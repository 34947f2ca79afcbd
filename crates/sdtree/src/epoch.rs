//! The epoch clock, which decides when unlinked memory may be used again.
//!
//! Epoch-based reclamation (Fraser, 2004), kept per tree. An operation *pins* the epoch: it reads
//! the clock, adds itself to the count of that epoch, and reads the clock again. If the clock has
//! moved, it starts over. The clock goes from *e* to *e* + 1 only when no operation is counted at
//! *e* − 1. While an operation is pinned at *p*, the clock therefore shows *p* or *p* + 1:
//!
//! The clock would go from *p* + 1 to *p* + 2 after a read-modify-write that reads the count of
//! *p*. If that comes before the operation's addition to the count, the operation's second reading
//! of the clock comes after it and sees at least *p* + 1: the operation is not pinned. If it comes
//! after the addition, it sees the operation counted.
//!
//! # Grace
//!
//! Memory that a thread pinned at *p* unlinked may be used again by a thread pinned at *p* +
//! [`GRACE`] or later:
//!
//! - when it was unlinked, the clock showed at most *p* + 1. A thread that pins at *p* + 2 or later
//!   sees it unlinked, because the clock came to *p* + 2 after the unlinking thread had been
//!   counted out;
//! - the clock comes to *p* + 3 only when all threads that pinned at *p* + 1 or before have been
//!   counted out.
//!
//! All of this follows from acquire and release on single words; there is no fence and no
//! sequential consistency, so loom models it exactly and ThreadSanitizer understands it.

use crate::primitive::{AtomicU64, Counter, Ordering, shard_count, thread_number};
use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Ticks after which memory may be used again.
pub(crate) const GRACE: u64 = 3;
/// Counts of pinned operations per shard: of the epochs modulo 4 (three would do).
const COUNTS: u64 = 4;
/// The clock starts late enough for the ages of lists to be subtracted.
const START: u64 = 16;
/// Removals in a shard after which its thread tries to move the clock on, and changes after which
/// it looks at the tree's size. Both read words that all other threads write, so they must be rare.
const TICK_EVERY: u64 = if cfg!(loom) { 1 } else { 128 };

/// The counters of some threads, so that threads do not contend for one counter.
#[repr(align(128))]
struct Shard {
    pinned: [AtomicU64; COUNTS as usize],
    added: Counter,
    removed: Counter,
    stale: Counter,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Shard>() == 128, "two cache lines, which processors fetch as a pair");

/// The clock, and the counts of pinned operations.
pub(crate) struct Epoch {
    clock: AtomicU64,
    /// A power of two of them.
    shards: Box<[Shard]>,
}

/// While this lives, no memory that its holder can reach is used again.
pub(crate) struct Pin<'a> {
    shard: &'a Shard,
    pub(crate) epoch: u64,
    pub(crate) number: usize,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        // Release: a thread that reads the count as zero comes after everything that was done while
        // pinned.
        self.shard.pinned[(self.epoch % COUNTS) as usize].fetch_sub(1, Release);
    }
}

impl Pin<'_> {
    /// Counts an added key. Returns whether this operation should look at the tree's size, which is
    /// true now and then.
    pub(crate) fn count_added(&self) -> bool {
        (self.shard.added.fetch_add(1, Relaxed) + 1).is_multiple_of(TICK_EVERY)
    }

    /// Counts a removed key; the result is that of [`Pin::count_added`].
    pub(crate) fn count_removed(&self) -> bool {
        (self.shard.removed.fetch_add(1, Relaxed) + 1).is_multiple_of(TICK_EVERY)
    }

    /// Counts a stale key that was dropped; it also counts as removed.
    pub(crate) fn count_stale(&self) {
        self.shard.stale.fetch_add(1, Relaxed);
    }
}

impl Epoch {
    pub(crate) fn new() -> Self {
        Self::with_shards(shard_count())
    }

    pub(crate) fn with_shards(shards: usize) -> Self {
        debug_assert!(shards.is_power_of_two());
        let shard = |_| Shard {
            pinned: std::array::from_fn(|_| AtomicU64::new(0)),
            added: Counter::new(0),
            removed: Counter::new(0),
            stale: Counter::new(0),
        };
        Self { clock: AtomicU64::new(START), shards: (0..shards).map(shard).collect() }
    }

    pub(crate) fn shards(&self) -> usize {
        self.shards.len()
    }

    #[inline]
    pub(crate) fn pin(&self) -> Pin<'_> {
        self.pin_on(thread_number())
    }

    #[inline]
    pub(crate) fn pin_on(&self, number: usize) -> Pin<'_> {
        let number = number & (self.shards.len() - 1);
        let shard = &self.shards[number];
        let mut epoch = self.clock.load(Acquire);
        loop {
            let count = &shard.pinned[(epoch % COUNTS) as usize];
            count.fetch_add(1, AcqRel);
            let now = self.clock.load(Acquire);
            if now == epoch {
                return Pin { shard, epoch, number };
            }
            count.fetch_sub(1, Release);
            epoch = now;
        }
    }

    /// Moves the clock on, if no pinned operation holds it.
    pub(crate) fn tick(&self) {
        let now = self.clock.load(Acquire);
        let before = ((now - 1) % COUNTS) as usize;
        // A cheap look first. Then the proof, which must be a read-modify-write: see the module's
        // page.
        let idle =
            |shard: &Shard| shard.pinned[before].load(Relaxed) == 0 && shard.pinned[before].fetch_add(0, AcqRel) == 0;
        if self.shards.iter().all(idle) {
            // Failure: another thread has moved it on.
            let _ = self.clock.compare_exchange(now, now + 1, AcqRel, Relaxed);
        }
    }

    pub(crate) fn keys(&self) -> u64 {
        // Removals first, and not below zero: the counters move while they are summed.
        let removed = self.sum(|shard| &shard.removed);
        self.sum(|shard| &shard.added).saturating_sub(removed)
    }

    pub(crate) fn stale_dropped(&self) -> u64 {
        self.sum(|shard| &shard.stale)
    }

    fn sum(&self, counter: impl Fn(&Shard) -> &Counter) -> u64 {
        self.shards.iter().map(|shard| counter(shard).load(Relaxed)).sum()
    }

    pub(crate) fn ticks(&self) -> u64 {
        self.clock.load(Relaxed) - START
    }

    pub(crate) fn bytes(&self) -> u64 {
        size_of_val(&*self.shards) as u64
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_pin_holds_the_clock() {
        let epoch = Epoch::with_shards(2);
        let first = epoch.pin_on(0);
        epoch.tick();
        assert_eq!(epoch.ticks(), 1, "a pin at the present allows one tick");
        let second = epoch.pin_on(1);
        epoch.tick();
        assert_eq!(epoch.ticks(), 1, "and no more");
        drop(first);
        epoch.tick();
        assert_eq!(epoch.ticks(), 2);
        epoch.tick();
        assert_eq!(epoch.ticks(), 2, "the second holds it now");
        drop(second);
        epoch.tick();
        assert_eq!(epoch.ticks(), 3);
    }
}
