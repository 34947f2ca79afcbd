//! The contents seen, how often, and in which targets; in bounded memory.
//!
//! The index is an SD tree over 64-bit digests. A content has a *slot* of 16 bytes: its digest, the
//! latest target that contains it, and the number of its sightings there. Targets are scanned one
//! after the other. When the next target contains the content, the former count moves to a *record*
//! of 8 bytes. Records form a list from the latest to the first:
//!
//! ```text
//!   slot    digest │ count 20 bits │ target 16 │ record 28 ─┐
//!   record           count         │ target    │ record ◀───┘ ─▶ … 0 ends the list
//! ```
//!
//! A count that overflows moves to a record in the same way. With the tree's node, a content takes
//! 32 bytes, and 8 for each further target that contains it.
//!
//! # When memory is short
//!
//! At level *k*, only digests with *k* low zero bits are admitted: a fair sample, in which a
//! content stands for 2^*k*. When the limit is reached, the level is raised and contents that no
//! longer belong to the sample are dropped. The contents seen most often by then are kept with
//! their former weight, in up to a quarter of the memory. Rare contents can be sampled well; a
//! single content that makes up a third of all pages cannot. So each content has a known
//! probability of being in the index (1 ÷ weight), and sums over the contents, each times its
//! weight, are unbiased.

mod contents;
mod sample;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

use parking_lot::RwLock;
use sdtree::{Handle, Insert, SdTree};

use contents::{CONTENT_BYTES, COUNT_MAX, Contents, Keys, RECORD_BITS, RECORD_BYTES, TAKE, TARGET_BITS, Word};

/// The most targets that an index can tell apart.
pub const MAX_TARGETS: usize = 1 << TARGET_BITS;

/// Bytes of an entry of the table of contents that keep their weight.
const KEPT_BYTES: u64 = 36;

struct State {
    contents: Arc<Contents>,
    tree: SdTree<Keys>,
    level: u32,
    /// Levels of the contents that have kept their weight.
    kept: HashMap<u64, u32>,
}

/// An index of contents, for many threads.
pub(crate) struct Index {
    state: RwLock<State>,
    limit: u64,
}

/// The result of counting a digest. Contents that one worker saw first, one after the other, have
/// consecutive numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Seen for the first time.
    New(u32),
    /// Seen before.
    Known(u32),
    /// Not in the sample, or without a lasting number, because memory has been short.
    Sampled,
}

/// What a worker has reserved: slots for new contents, and a record.
#[derive(Default)]
pub(crate) struct Reserved {
    level: u32,
    slots: std::ops::Range<u32>,
    record: Option<u32>,
}

impl Index {
    /// An empty index that will take about `limit` bytes of memory.
    pub(crate) fn new(limit: u64) -> Self {
        let contents = Arc::new(Contents::new(limit));
        let tree = SdTree::new(Keys(contents.clone()));
        Self { state: RwLock::new(State { contents, tree, level: 0, kept: HashMap::new() }), limit }
    }

    /// Counts a sighting of each digest in `target`. `seen` receives the results.
    pub(crate) fn see(&self, digests: &[u64], target: u16, reserved: &mut Reserved, seen: &mut Vec<Seen>) {
        seen.clear();
        let full = {
            let state = self.state.read();
            if reserved.level != state.level {
                *reserved = Reserved { level: state.level, ..Reserved::default() };
            }
            seen.extend(digests.iter().map(|&digest| state.see(digest, target, reserved)));
            state.is_over(self.limit)
        };
        if full {
            let mut state = self.state.write();
            while state.is_over(self.limit / 4 * 3) && state.level < 63 {
                // Not reached if another worker has raised the level meanwhile.
                state.raise(self.limit);
            }
        }
    }

    /// The level: 0 if every content is counted.
    pub(crate) fn level(&self) -> u32 {
        self.state.read().level
    }

    /// Bytes in use.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.read().bytes()
    }

    /// Calls `f` for every content with its weight and its sightings: target and count, the latest
    /// target first.
    pub(crate) fn for_each(&self, mut f: impl FnMut(f64, &[(u16, u64)])) {
        let state = self.state.read();
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

    fn see(&self, digest: u64, target: u16, reserved: &mut Reserved) -> Seen {
        let key = digest.to_be_bytes();
        if digest.trailing_zeros() < self.level {
            if let Some(handle) = self.tree.query(&key) {
                self.count(handle.0 as u32, target, reserved);
            }
            return Seen::Sampled;
        }
        if reserved.slots.is_empty() {
            let start = self.contents.next_slot.fetch_add(TAKE, Relaxed);
            reserved.slots = start..start + TAKE;
        }
        let handle = reserved.slots.start;
        let slot = self.contents.slots.get(handle);
        slot.digest.store(digest, Relaxed);
        slot.word.store(Word { count: 1, target, record: 0 }.pack(), Relaxed);
        let seen = match self.tree.insert(&key, Handle(u64::from(handle))) {
            Insert::Inserted => {
                reserved.slots.start += 1;
                Seen::New(handle)
            }
            Insert::Exists(known) => {
                slot.word.store(0, Relaxed);
                self.count(known.0 as u32, target, reserved);
                Seen::Known(known.0 as u32)
            }
        };
        if self.level == 0 { seen } else { Seen::Sampled }
    }

    /// Counts another sighting of a known content.
    fn count(&self, handle: u32, target: u16, reserved: &mut Reserved) {
        let slot = &self.contents.slots.get(handle).word;
        let mut old = slot.load(Acquire);
        loop {
            let word = Word::from(old);
            let new = if word.target == target && word.count < COUNT_MAX {
                Word { count: word.count + 1, ..word }
            } else {
                let record = *reserved.record.get_or_insert_with(|| self.contents.next_record.fetch_add(1, Relaxed));
                self.contents.records.get(record).store(old, Relaxed);
                Word { count: 1, target, record }
            };
            // Release: a thread that reads the word also reads the record.
            match slot.compare_exchange_weak(old, new.pack(), AcqRel, Acquire) {
                Ok(_) => {
                    if reserved.record == Some(new.record) {
                        reserved.record = None;
                    }
                    return;
                }
                Err(now) => old = now,
            }
        }
    }

    /// Whether the index takes more than `limit` bytes, or is about to run out of numbers.
    fn is_over(&self, limit: u64) -> bool {
        // Numbers that all workers together may use before the next check.
        const MARGIN: u32 = 1 << 22;
        self.bytes() > limit
            || self.contents.next_record.load(Relaxed) > (1 << RECORD_BITS) - MARGIN
            || self.contents.next_slot.load(Relaxed) > u32::MAX - MARGIN
    }
}

#[cfg(test)]
mod tests;
