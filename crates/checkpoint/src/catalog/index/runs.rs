//! The index on the medium: sorted runs of keys and places.
//!
//! A run is one or several *parts*, mblocks of [`PART`] entries at most:
//!
//! | bytes | of a part |
//! |---|---|
//! | 16 each | key, place; ascending by key, each key once |
//! | 8 each | the first key of each piece of [`PIECE`] entries |
//!
//! A place is `id << 16 | page`, as in a map. Runs are written and never changed. They are merged
//! when a later one has more than half of the keys of the one before, so there are few of them, and
//! each key is written a few times only. Merging leaves out pages that are gone.

mod merge;
mod pieces;

use std::collections::HashSet;

use mpool::{BLOCK, ObjectError, Pool};
use serde::{Deserialize, Serialize};

use super::near::{ByKey, ENTRY};
use super::{Limits, PageFlaw, is_sampled};
use merge::{Collected, merge};
use pieces::Pieces;

/// Entries that are read at once: 16 KiB.
pub const PIECE: usize = 1024;
/// Entries of an mblock: 64 MiB.
const PART: u64 = 1 << 22;
/// Bytes of an entry.
const ENTRY_BYTES: usize = 16;

/// An mblock of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its identity.
    pub id: u64,
    /// Number of its entries.
    pub entries: u32,
    /// Its first key.
    pub first: u64,
}

impl Part {
    /// Bytes of its entries, and of the mblock.
    fn lens(&self) -> (u64, u64) {
        let entries = u64::from(self.entries) * ENTRY_BYTES as u64;
        (entries, entries + u64::from(self.entries).div_ceil(PIECE as u64) * 8)
    }
}

/// A sorted run of entries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Low bits of zero that each of its keys has.
    pub shift: u8,
    /// Its mblocks, in the order of their keys.
    pub parts: Vec<Part>,
}

impl Run {
    /// Number of its entries.
    pub fn entries(&self) -> u64 {
        self.parts.iter().map(|part| u64::from(part.entries)).sum()
    }
}

/// Whether there is a page at a place.
type IsThere<'a> = &'a dyn Fn(u64) -> bool;

/// All runs of the index.
pub(super) struct Runs {
    pool: Pool,
    limits: Limits,
    /// The oldest first.
    runs: Vec<Run>,
    /// Entries that are in no run yet.
    collected: ByKey,
    /// Pages of the pool, with those added since.
    pages: u64,
    /// Low bits of zero that a key needs now.
    shift: u8,
    pieces: Pieces,
    /// Mblocks that the catalogue names.
    recorded: HashSet<u64>,
    /// Mblocks that the catalogue names and the runs do not.
    retired: Vec<u64>,
}

impl Runs {
    pub(super) fn new(pool: &Pool, limits: Limits, runs: Vec<Run>, pages: u64) -> Self {
        let pieces = Pieces::new(pool, limits.pieces);
        let (collected, recorded, retired) = (ByKey::default(), HashSet::new(), Vec::new());
        let mut new = Self { pool: pool.clone(), limits, runs, collected, pages, shift: 0, pieces, recorded, retired };
        new.grow(0);
        new.record();
        new
    }

    /// Counts pages, and takes a sparser sample if the index would have too many of them.
    fn grow(&mut self, pages: u64) {
        self.pages += pages;
        while self.shift < 32 && self.pages >> self.shift > self.limits.entries {
            self.shift += 1;
        }
    }

    fn record(&mut self) {
        self.recorded = self.runs.iter().flat_map(|run| &run.parts).map(|part| part.id).collect();
    }

    /// The place that the latest run with this key names, and whether that run has all pages.
    pub(super) fn find(&mut self, key: u64, is_there: IsThere<'_>) -> Option<(u64, bool)> {
        if let Some(at) = self.collected.get(&key).filter(|at| is_there(**at)) {
            return Some((*at, self.shift == 0));
        }
        for run in self.runs.iter().rev().filter(|run| is_sampled(key, run.shift)) {
            let part = run.parts.partition_point(|part| part.first <= key).checked_sub(1);
            let found = part.and_then(|part| self.pieces.find(&run.parts[part], key));
            if let Some(at) = found.filter(|at| is_there(*at)) {
                return Some((at, run.shift == 0));
            }
        }
        None
    }

    /// Adds a page.
    pub(super) fn add(&mut self, key: u64, at: u64, is_there: IsThere<'_>) -> Result<(), ObjectError> {
        self.grow(1);
        if is_sampled(key, self.shift) {
            self.collected.insert(key, at);
            if self.collected.len() >= self.limits.collected {
                self.write(is_there)?;
            }
        }
        Ok(())
    }

    /// Writes the collected entries as a run, and merges runs.
    pub(super) fn write(&mut self, is_there: IsThere<'_>) -> Result<(), ObjectError> {
        let shift = self.shift;
        // A part that cannot be read is left out; the caller has the index made anew.
        let collected = Collected::new(&self.collected);
        let mut from = self.runs.len();
        let mut sum = collected.len() as u64;
        let thinner = self.runs.iter().any(|run| run.shift < shift);
        while from > 0 && (thinner || self.runs[from - 1].entries() <= 2 * sum) {
            from -= 1;
            sum += self.runs[from].entries();
        }
        if sum == 0 {
            return Ok(());
        }
        let old = self.runs.split_off(from);
        let shift = old.iter().map(|run| run.shift).fold(shift, u8::max);
        let keep = |key, at| is_sampled(key, shift) && is_there(at);
        let parts = match merge(&self.pool, &old, collected, sum, &keep) {
            Ok((parts, flaw)) => {
                self.pieces.note(flaw);
                parts
            }
            Err(e) => {
                self.runs.extend(old);
                return Err(e);
            }
        };
        self.collected = ByKey::default();
        if !parts.is_empty() {
            self.runs.push(Run { shift, parts });
        }
        let (recorded, own): (Vec<u64>, Vec<u64>) =
            old.iter().flat_map(|run| &run.parts).map(|part| part.id).partition(|id| self.recorded.contains(id));
        self.pieces.forget(recorded.iter().chain(&own));
        self.retired.extend(recorded);
        // What is left over is removed when the next checkpoint begins.
        let _ = self.pool.mblock_delete(&own);
        Ok(())
    }

    pub(super) fn all(&self) -> &[Run] {
        &self.runs
    }

    /// The runs are recorded now: gives the mblocks that are not needed any more.
    pub(super) fn retired(&mut self) -> Vec<u64> {
        self.record();
        std::mem::take(&mut self.retired)
    }

    pub(super) fn flaw(&self) -> Option<&PageFlaw> {
        self.pieces.flaw()
    }

    pub(super) fn memory(&self) -> usize {
        self.collected.capacity() * ENTRY + self.pieces.memory()
    }

    pub(super) fn entries(&self) -> (u64, u8) {
        (self.runs.iter().map(Run::entries).sum::<u64>() + self.collected.len() as u64, self.shift)
    }
}

const _: () = assert!((PIECE * ENTRY_BYTES).is_multiple_of(BLOCK) && PART.is_multiple_of(PIECE as u64));
