//! Which contents were seen, how often, and in which targets; in bounded memory.
//!
//! The index is an SD tree over 64-bit digests. A content has a *slot* of 16 bytes: its digest, and
//! how often the latest target that has it was seen with it. Targets are looked at one after the
//! other; when the next one meets the content, the former's count moves to a *record* of 8 bytes,
//! and records form a list from the latest to the first:
//!
//! ```text
//!   slot    digest │ count 20 bits │ target 16 │ record 28 ─┐
//!   record           count         │ target    │ record ◀───┘ ─▶ … 0 ends the list
//! ```
//!
//! A count that is full moves to a record in the same way. With the tree's node, a content costs 32
//! bytes, and 8 for each further target that has it.
//!
//! # When memory is short
//!
//! At level *k* only digests with *k* low zero bits are let in: a fair sample of the contents, each
//! of which then stands for 2^*k*. When the limit is reached the level goes up, and contents that
//! no longer belong are dropped. Contents that were seen most often by then are kept all the same,
//! with the weight that they had, in up to a quarter of the memory: what is rare can be sampled
//! well, but one content that makes a third of all pages can not. So every content has a known
//! chance to be here (1 ÷ weight), and sums over the contents, each times its weight, are unbiased.

use std::collections::HashMap;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use sdtree::{Handle, Insert, KeySource, SdTree};

const COUNT_BITS: u32 = 20;
const TARGET_BITS: u32 = 16;
const RECORD_BITS: u32 = 28;
const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;
/// More targets than this are refused.
pub(super) const MAX_TARGETS: usize = 1 << TARGET_BITS;

/// Elements of a chunk of slots or records, and handles that a worker takes at a time.
const CHUNK: usize = 1 << 14;
const TAKE: u32 = 1024;

/// What a content costs: slot, tree node.
const CONTENT_BYTES: u64 = 32;
/// A record, and its copy while the level goes up.
const RECORD_BYTES: u64 = 16;
/// An entry of the table of those that keep their weight.
const KEPT_BYTES: u64 = 36;

/// `count`, `target` and `record` in one word.
#[derive(Clone, Copy)]
struct Word {
    count: u64,
    target: u16,
    record: u32,
}

impl Word {
    fn pack(self) -> u64 {
        self.count << (TARGET_BITS + RECORD_BITS) | u64::from(self.target) << RECORD_BITS | u64::from(self.record)
    }

    fn from(word: u64) -> Self {
        Word {
            count: word >> (TARGET_BITS + RECORD_BITS),
            target: (word >> RECORD_BITS) as u16,
            record: (word & ((1 << RECORD_BITS) - 1)) as u32,
        }
    }
}

/// A growing array whose elements stay where they are.
struct Chunks<T>(Box<[OnceLock<Box<[T]>>]>);

impl<T: Default> Chunks<T> {
    fn new(capacity: u64) -> Self {
        Chunks((0..=capacity as usize / CHUNK).map(|_| OnceLock::new()).collect())
    }

    fn get(&self, index: u32) -> &T {
        let chunk = self.0[index as usize / CHUNK].get_or_init(|| (0..CHUNK).map(|_| T::default()).collect());
        &chunk[index as usize % CHUNK]
    }

    /// Gives back the chunks from the one behind `len` elements.
    fn truncate(&mut self, len: u32) {
        for chunk in &mut self.0[(len as usize).div_ceil(CHUNK)..] {
            chunk.take();
        }
    }
}

#[derive(Default)]
struct Slot {
    digest: AtomicU64,
    /// 0: no content.
    word: AtomicU64,
}

struct Contents {
    slots: Chunks<Slot>,
    next_slot: AtomicU32,
    records: Chunks<AtomicU64>,
    next_record: AtomicU32,
}

impl Contents {
    fn new(limit: u64) -> Self {
        // Every worker may overshoot by what it takes at a time; handles are 32 bits wide.
        let room = |bytes: u64| (limit / bytes + 1024 * u64::from(TAKE)).min(u64::from(u32::MAX));
        Contents {
            slots: Chunks::new(room(CONTENT_BYTES)),
            next_slot: AtomicU32::new(0),
            records: Chunks::new(room(RECORD_BYTES).min(1 << RECORD_BITS)),
            next_record: AtomicU32::new(1), // 0 ends a list
        }
    }

    /// The sightings of a content: target and count, the latest target first. A target may come
    /// twice in a row.
    fn sightings(&self, word: u64) -> impl Iterator<Item = (u16, u64)> {
        let mut next = Some(Word::from(word));
        std::iter::from_fn(move || {
            let word = next?;
            next = (word.record != 0).then(|| Word::from(self.records.get(word.record).load(Acquire)));
            Some((word.target, word.count))
        })
    }

    fn total(&self, word: u64) -> u64 {
        self.sightings(word).map(|(_, count)| count).sum()
    }

    /// Copies the records behind a slot's word to another index; gives the word that leads to them
    /// there.
    fn copy(&self, word: u64, to: &Contents) -> u64 {
        let sightings: Vec<_> = self.sightings(word).collect();
        let mut copy = 0;
        for (i, &(target, count)) in sightings.iter().rev().enumerate() {
            let mut record = 0;
            if i > 0 {
                record = to.next_record.fetch_add(1, Relaxed);
                to.records.get(record).store(copy, Relaxed);
            }
            copy = Word { count, target, record }.pack();
        }
        copy
    }
}

struct Keys(Arc<Contents>);

impl KeySource for Keys {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(Some(&self.0.slots.get(handle.0 as u32).digest.load(Relaxed).to_be_bytes()))
    }
}

struct State {
    contents: Arc<Contents>,
    tree: SdTree<Keys>,
    level: u32,
    /// Levels of those contents that have another than the index.
    kept: HashMap<u64, u32>,
}

/// See the module's page.
pub(super) struct Index {
    state: RwLock<State>,
    limit: u64,
}

/// What became of a digest. Contents that one worker saw first one after the other have consecutive
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Seen for the first time.
    New(u32),
    /// Seen before.
    Known(u32),
    /// Not part of the sample, or of no use as a number, because memory was short once.
    Sampled,
}

/// What a worker has in hand: numbers to give to new contents, a record to fill.
#[derive(Default)]
pub(super) struct Taker {
    level: u32,
    slots: std::ops::Range<u32>,
    record: Option<u32>,
}

impl Index {
    /// An index that takes about `limit` bytes of memory.
    pub(super) fn new(limit: u64) -> Self {
        let contents = Arc::new(Contents::new(limit));
        let tree = SdTree::new(Keys(contents.clone()));
        Index { state: RwLock::new(State { contents, tree, level: 0, kept: HashMap::new() }), limit }
    }

    /// Counts a sighting of each digest in `target`. `seen` gets what became of them.
    pub(super) fn see(&self, digests: &[u64], target: u16, taker: &mut Taker, seen: &mut Vec<Seen>) {
        seen.clear();
        let full = {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            if taker.level != state.level {
                *taker = Taker { level: state.level, ..Taker::default() };
            }
            seen.extend(digests.iter().map(|&digest| state.see(digest, target, taker)));
            state.is_over(self.limit)
        };
        if full {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            while state.is_over(self.limit / 4 * 3) && state.level < 63 {
                // Another worker may have been here first; then this is not reached.
                state.raise(self.limit);
            }
        }
    }

    /// The level: 0 if nothing was left out.
    pub(super) fn level(&self) -> u32 {
        self.state.read().unwrap_or_else(PoisonError::into_inner).level
    }

    /// Bytes in use.
    pub(super) fn bytes(&self) -> u64 {
        self.state.read().unwrap_or_else(PoisonError::into_inner).bytes()
    }

    /// Calls `f` for every content with its weight and its sightings: target and count, the latest
    /// target first.
    pub(super) fn for_each(&self, mut f: impl FnMut(f64, &[(u16, u64)])) {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let contents = &state.contents;
        let mut sightings: Vec<(u16, u64)> = Vec::new();
        for handle in 0..contents.next_slot.load(Relaxed) {
            let slot = contents.slots.get(handle);
            let word = slot.word.load(Acquire);
            if word == 0 {
                continue;
            }
            sightings.clear();
            for (target, count) in contents.sightings(word) {
                match sightings.last_mut() {
                    Some((last, sum)) if *last == target => *sum += count,
                    _ => sightings.push((target, count)),
                }
            }
            let level = state.kept.get(&slot.digest.load(Relaxed)).copied().unwrap_or(state.level);
            f((1u64 << level) as f64, &sightings);
        }
    }
}

impl State {
    fn bytes(&self) -> u64 {
        u64::from(self.contents.next_slot.load(Relaxed)) * CONTENT_BYTES
            + u64::from(self.contents.next_record.load(Relaxed)) * RECORD_BYTES
            + self.kept.len() as u64 * KEPT_BYTES
    }

    fn see(&self, digest: u64, target: u16, taker: &mut Taker) -> Seen {
        let key = digest.to_be_bytes();
        if digest.trailing_zeros() < self.level {
            if let Some(handle) = self.tree.query(&key) {
                self.count(handle.0 as u32, target, taker);
            }
            return Seen::Sampled;
        }
        if taker.slots.is_empty() {
            let start = self.contents.next_slot.fetch_add(TAKE, Relaxed);
            taker.slots = start..start + TAKE;
        }
        let handle = taker.slots.start;
        let slot = self.contents.slots.get(handle);
        slot.digest.store(digest, Relaxed);
        slot.word.store(Word { count: 1, target, record: 0 }.pack(), Relaxed);
        let seen = match self.tree.insert(&key, Handle(u64::from(handle))) {
            Insert::Inserted => {
                taker.slots.start += 1;
                Seen::New(handle)
            }
            Insert::Exists(known) => {
                slot.word.store(0, Relaxed);
                self.count(known.0 as u32, target, taker);
                Seen::Known(known.0 as u32)
            }
        };
        if self.level == 0 { seen } else { Seen::Sampled }
    }

    /// Counts another sighting of a content.
    fn count(&self, handle: u32, target: u16, taker: &mut Taker) {
        let slot = &self.contents.slots.get(handle).word;
        let mut old = slot.load(Acquire);
        loop {
            let word = Word::from(old);
            let new = if word.target == target && word.count < COUNT_MAX {
                Word { count: word.count + 1, ..word }
            } else {
                let record = *taker.record.get_or_insert_with(|| self.contents.next_record.fetch_add(1, Relaxed));
                self.contents.records.get(record).store(old, Relaxed);
                Word { count: 1, target, record }
            };
            // Release: the record can be read by whoever reads the word.
            match slot.compare_exchange_weak(old, new.pack(), AcqRel, Acquire) {
                Ok(_) => {
                    if taker.record == Some(new.record) {
                        taker.record = None;
                    }
                    return;
                }
                Err(now) => old = now,
            }
        }
    }

    /// Whether this takes more than `limit` bytes, or numbers are about to run out.
    fn is_over(&self, limit: u64) -> bool {
        const MARGIN: u32 = 1 << 22;
        self.bytes() > limit
            || self.contents.next_record.load(Relaxed) > (1 << RECORD_BITS) - MARGIN
            || self.contents.next_slot.load(Relaxed) > u32::MAX - MARGIN
    }

    /// Goes to the next level. Workers drop what they have in hand when they see that.
    fn raise(&mut self, limit: u64) {
        let often = self.often(limit);
        self.level += 1;
        // First the tree, so that its memory serves the new one.
        let empty = Arc::new(Contents::new(0));
        self.tree = SdTree::new(Keys(empty.clone()));
        let Ok(mut contents) = Arc::try_unwrap(std::mem::replace(&mut self.contents, empty)) else {
            unreachable!("the tree, which is gone, had the only other one");
        };
        let mut fresh = Contents::new(limit);
        let mut len = 0;
        for handle in 0..contents.next_slot.load(Relaxed) {
            let slot = contents.slots.get(handle);
            let (digest, word) = (slot.digest.load(Relaxed), slot.word.load(Relaxed));
            if word == 0 {
                continue;
            }
            if !self.kept.contains_key(&digest) {
                if contents.total(word) >= often {
                    self.kept.insert(digest, self.level - 1);
                } else if digest.trailing_zeros() < self.level {
                    continue;
                }
            }
            let to = contents.slots.get(len);
            to.digest.store(digest, Relaxed);
            to.word.store(contents.copy(word, &fresh), Relaxed);
            len += 1;
        }
        for handle in len..(len as usize).next_multiple_of(CHUNK) as u32 {
            contents.slots.get(handle).word.store(0, Relaxed);
        }
        contents.slots.truncate(len);
        std::mem::swap(&mut contents.slots, &mut fresh.slots);
        fresh.next_slot = AtomicU32::new(len);
        drop(contents);
        self.contents = Arc::new(fresh);
        self.tree = SdTree::new(Keys(self.contents.clone()));
        for handle in 0..len {
            let digest = self.contents.slots.get(handle).digest.load(Relaxed);
            self.tree.insert(&digest.to_be_bytes(), Handle(u64::from(handle)));
        }
    }

    /// From how many sightings on a content is worth keeping: so that those kept take half of the
    /// room that is left for such.
    fn often(&self, limit: u64) -> u64 {
        let mut counts = [0u64; 64];
        for handle in 0..self.contents.next_slot.load(Relaxed) {
            let slot = self.contents.slots.get(handle);
            let word = slot.word.load(Acquire);
            if word != 0 && !self.kept.contains_key(&slot.digest.load(Relaxed)) {
                counts[self.contents.total(word).ilog2() as usize] += 1;
            }
        }
        let room = (limit / 4 / (CONTENT_BYTES + KEPT_BYTES)).saturating_sub(self.kept.len() as u64) / 2;
        let mut often = 63;
        let mut sum = 0;
        while often > 0 && sum + counts[often] <= room {
            sum += counts[often];
            often -= 1;
        }
        // What was seen once is never worth it.
        1 << (often + 1).min(63)
    }
}

#[cfg(test)]
mod tests;
