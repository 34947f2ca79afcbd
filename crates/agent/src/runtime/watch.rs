//! The addresses of managed memory, read without a lock.
//!
//! Every interposed call reads this first, from any thread: before constructors have run, inside
//! allocators that hold their locks, between `fork` and `exec`. So a reader allocates nothing,
//! takes no lock and touches no thread-local storage. A sequence number guards the list, as the
//! kernel's seqlock does. Writers hold the agent's lock.

use std::sync::atomic::{AtomicUsize, Ordering, fence};

use kmem::range::Range;

/// How many ranges the table holds. With more, the last one spans all that do not fit.
const SLOTS: usize = 64;

pub(crate) static WATCH: Watch = Watch::new();

pub(crate) struct Watch {
    sequence: AtomicUsize,
    used: AtomicUsize,
    slots: [[AtomicUsize; 2]; SLOTS],
}

impl Watch {
    pub(crate) const fn new() -> Self {
        Self {
            sequence: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            slots: [const { [AtomicUsize::new(0), AtomicUsize::new(0)] }; SLOTS],
        }
    }

    /// Whether `len` bytes from `start` on (rounded out to pages) may overlap managed memory.
    pub(crate) fn overlaps(&self, start: usize, len: usize) -> bool {
        if self.used.load(Ordering::Acquire) == 0 {
            return false;
        }
        let end = start.saturating_add(len);
        // Updates are rare and take nanoseconds. A copy of the process that a raw `clone` makes in
        // the middle of one never sees it end: then the answer is yes.
        for _ in 0..10_000 {
            let before = self.sequence.load(Ordering::Acquire);
            let found = self
                .slots
                .iter()
                .take(self.used.load(Ordering::Relaxed))
                .any(|[low, high]| start < high.load(Ordering::Relaxed) && low.load(Ordering::Relaxed) < end);
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                return found;
            }
            std::hint::spin_loop();
        }
        true
    }

    /// Replaces the ranges. The caller holds the agent's lock: there is one writer at a time.
    pub(crate) fn set(&self, ranges: impl Iterator<Item = Range>) {
        self.sequence.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        let mut used = 0;
        for range in ranges {
            let (mut low, mut high) = (range.start, range.end());
            if used == SLOTS {
                used -= 1;
                low = low.min(self.slots[used][0].load(Ordering::Relaxed));
                high = high.max(self.slots[used][1].load(Ordering::Relaxed));
            }
            self.slots[used][0].store(low, Ordering::Relaxed);
            self.slots[used][1].store(high, Ordering::Relaxed);
            used += 1;
        }
        self.used.store(used, Ordering::Release);
        self.sequence.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_for_what_was_set() {
        let watch = Watch::new();
        assert!(!watch.overlaps(0, usize::MAX));
        watch.set([Range::new(0x10000, 0x2000), Range::new(0x20000, 0x1000)].into_iter());
        assert!(watch.overlaps(0x10000, 1) && watch.overlaps(0xf000, 0x1001) && watch.overlaps(0x11fff, 1));
        assert!(!watch.overlaps(0xf000, 0x1000) && !watch.overlaps(0x12000, 0xe000) && watch.overlaps(0x12000, 0xe001));
        watch.set(std::iter::empty());
        assert!(!watch.overlaps(0x10000, 1));
    }

    #[test]
    fn never_misses_what_does_not_fit() {
        let watch = Watch::new();
        watch.set((0..200).map(|i| Range::new(0x1000 * (10 + 2 * i), 0x1000)));
        assert!((0..200).all(|i| watch.overlaps(0x1000 * (10 + 2 * i), 1)));
        assert!(!watch.overlaps(0x1000 * 11, 0x1000), "told apart within the table");
    }

    #[test]
    fn readers_never_miss_what_stays() {
        let watch = Watch::new();
        let stays = Range::new(0x100_0000, 0x1000);
        watch.set([stays].into_iter());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (0..200_000).all(|_| watch.overlaps(stays.start, 1)));
            for i in 0..20_000 {
                let other = Range::new(0x1000 * (1 + i % 7), 0x1000);
                if i % 2 == 0 { watch.set([other, stays].into_iter()) } else { watch.set([stays].into_iter()) }
            }
            assert!(reader.join().unwrap());
        });
    }
}
