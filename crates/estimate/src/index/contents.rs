//! The slots and records of an index, in arrays that never move.

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, OnceLock};

use sdtree::{Handle, KeySource};

const COUNT_BITS: u32 = 20;
pub(super) const TARGET_BITS: u32 = 16;
pub(super) const RECORD_BITS: u32 = 28;
pub(super) const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;

/// Elements of a chunk of slots or records.
pub(super) const CHUNK: usize = 1 << 14;
/// Slots that a worker reserves at a time.
pub(super) const TAKE: u32 = 1024;

/// Bytes of a content: its slot and its tree node.
pub(super) const CONTENT_BYTES: u64 = 32;
/// Bytes of a record, with its copy while the level is raised.
pub(super) const RECORD_BYTES: u64 = 16;

/// `count`, `target` and `record` in one word.
#[derive(Clone, Copy)]
pub(super) struct Word {
    pub(super) count: u64,
    pub(super) target: u16,
    /// Number of the next record; 0: none.
    pub(super) record: u32,
}

impl Word {
    pub(super) fn pack(self) -> u64 {
        self.count << (TARGET_BITS + RECORD_BITS) | u64::from(self.target) << RECORD_BITS | u64::from(self.record)
    }

    pub(super) fn from(word: u64) -> Self {
        Self {
            count: word >> (TARGET_BITS + RECORD_BITS),
            target: (word >> RECORD_BITS) as u16,
            record: (word & ((1 << RECORD_BITS) - 1)) as u32,
        }
    }
}

/// A growing array whose elements do not move.
pub(super) struct Chunks<T>(Box<[OnceLock<Box<[T]>>]>);

impl<T: Default> Chunks<T> {
    fn new(capacity: u64) -> Self {
        Self((0..=capacity as usize / CHUNK).map(|_| OnceLock::new()).collect())
    }

    pub(super) fn get(&self, index: u32) -> &T {
        let chunk = self.0[index as usize / CHUNK].get_or_init(|| (0..CHUNK).map(|_| T::default()).collect());
        &chunk[index as usize % CHUNK]
    }

    /// Frees the chunks after the first `len` elements.
    pub(super) fn truncate(&mut self, len: u32) {
        for chunk in &mut self.0[(len as usize).div_ceil(CHUNK)..] {
            chunk.take();
        }
    }
}

/// A content.
#[derive(Default)]
pub(super) struct Slot {
    pub(super) digest: AtomicU64,
    /// A [`Word`]; 0: no content.
    pub(super) word: AtomicU64,
}

/// All contents of an index.
pub(super) struct Contents {
    pub(super) slots: Chunks<Slot>,
    pub(super) next_slot: AtomicU32,
    pub(super) records: Chunks<AtomicU64>,
    pub(super) next_record: AtomicU32,
}

impl Contents {
    /// Room for `limit` bytes of contents.
    pub(super) fn new(limit: u64) -> Self {
        // Each worker may exceed the limit by what it reserves at a time; handles are 32 bits wide.
        let room = |bytes: u64| (limit / bytes + 1024 * u64::from(TAKE)).min(u64::from(u32::MAX));
        Self {
            slots: Chunks::new(room(CONTENT_BYTES)),
            next_slot: AtomicU32::new(0),
            records: Chunks::new(room(RECORD_BYTES).min(1 << RECORD_BITS)),
            next_record: AtomicU32::new(1), // 0 ends a list
        }
    }

    /// The sightings of a content: target and count, the latest target first. A target may appear
    /// twice in a row.
    pub(super) fn sightings(&self, word: u64) -> impl Iterator<Item = (u16, u64)> {
        let mut next = Some(Word::from(word));
        std::iter::from_fn(move || {
            let word = next?;
            next = (word.record != 0).then(|| Word::from(self.records.get(word.record).load(Acquire)));
            Some((word.target, word.count))
        })
    }

    /// The number of sightings of a content.
    pub(super) fn total(&self, word: u64) -> u64 {
        self.sightings(word).map(|(_, count)| count).sum()
    }

    /// Copies the records of a slot's word to another index; returns the word for the slot there.
    pub(super) fn copy(&self, word: u64, to: &Self) -> u64 {
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

/// The tree's keys: the digests of the slots.
pub(super) struct Keys(pub(super) Arc<Contents>);

impl KeySource for Keys {
    fn with_key<R>(&self, handle: Handle, f: impl FnOnce(Option<&[u8]>) -> R) -> R {
        f(Some(&self.0.slots.get(handle.0 as u32).digest.load(Relaxed).to_be_bytes()))
    }
}
