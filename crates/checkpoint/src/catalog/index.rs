//! Where the pool has a page, by the page's hash: an index that stays on the medium.
//!
//! The *index* ([`runs`]) maps keys, the upper halves of hashes, to places. It consists of sorted
//! runs; each lookup reads the one piece of a run in which the key would be, and pieces stay in
//! memory as long as there is room. New keys are collected in memory, written as a run of their
//! own, and merged with the runs before, so that each run has at most half of the keys of the one
//! before.
//!
//! While the pool has no more pages than [`Limits::entries`], the index has all of them, and every
//! duplicate is found. Above, it has a sample: keys with `shift` low bits of zero, where `shift`
//! keeps the index within the limit. A page that is not in the sample is found by its neighbours:
//! a sampled page leads to a data mblock, and the hashes of all of its pages are then kept in
//! memory ([`near`]). Guests of one image have the same pages in much the same order, and pages
//! are stored in the order of the first guest.
//!
//! Nothing here decides what is equal. A wrong or a missing entry costs space, or a comparison.

pub(super) mod near;
pub(super) mod runs;

use std::collections::HashMap;

use mpool::{ObjectError, Pool};

pub use runs::{Part, Run};

use super::PageFlaw;
use near::Near;
use runs::Runs;

/// Hits of a data mblock after which its hashes are read, if the index has all pages.
const NEAR_FROM: u8 = 4;
/// Data mblocks whose hits are counted, at most.
const COUNTED: usize = 1 << 16;

/// What the index may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Pages of the index on the medium. A pool with more pages has a sample of them in the index.
    pub entries: u64,
    /// Pages collected before they are written to the medium.
    pub collected: usize,
    /// Pieces of the index in memory, of [`runs::PIECE`] entries of 16 bytes each.
    pub pieces: usize,
    /// Data mblocks whose hashes are in memory, of 8192 hashes each.
    pub lists: usize,
}

impl Default for Limits {
    /// 256 GiB of unique pages in the index, 1.5 GiB of memory.
    fn default() -> Self {
        Self { entries: 1 << 26, collected: 1 << 22, pieces: 1 << 16, lists: 1 << 10 }
    }
}

/// The key of a hash in the index.
pub fn key(hash: u128) -> u64 {
    (hash >> 64) as u64
}

/// Whether a key is in a sample.
fn is_sampled(key: u64, shift: u8) -> bool {
    key.trailing_zeros() >= u32::from(shift)
}

/// The data mblocks that the index names.
pub trait Known {
    /// Number of pages of a data mblock; 0 if it is gone.
    fn pages(&self, mblock: u64) -> u32;

    /// The hashes of its pages, in their order.
    ///
    /// # Errors
    /// If they cannot be read.
    fn hashes(&self, mblock: u64) -> Result<Vec<u128>, PageFlaw>;
}

/// Whether there is such a page.
fn is_there(known: &dyn Known, at: u64) -> bool {
    (at & 0xFFFF) < u64::from(known.pages(at >> 16))
}

/// Finds the places of pages.
pub struct Index {
    runs: Runs,
    near: Near,
    /// How often the index named a page of a data mblock.
    hits: HashMap<u64, u8>,
    /// Data mblocks whose hashes cannot be read, and why; those of the last call only.
    damaged: Vec<(u64, PageFlaw)>,
}

impl Index {
    /// The index of a pool with these runs, the oldest first, for `pages` pages.
    pub fn new(pool: &Pool, limits: Limits, runs: Vec<Run>, pages: u64) -> Self {
        let runs = Runs::new(pool, limits, runs, pages);
        Self { runs, near: Near::new(limits.lists), hits: HashMap::new(), damaged: Vec::new() }
    }

    /// The places of pages with these hashes, as far as they are found. `None` in `hashes` gives
    /// `None`.
    pub fn find_many(&mut self, hashes: &[Option<u128>], known: &dyn Known) -> Vec<Option<u64>> {
        let mut found: Vec<Option<u64>> = hashes.iter().map(|hash| self.find(key((*hash)?), known)).collect();
        // Hashes that came into memory meanwhile may be those of earlier pages.
        for (found, hash) in found.iter_mut().zip(hashes).filter(|(found, _)| found.is_none()) {
            *found = hash.and_then(|hash| self.near.get(key(hash)));
        }
        found
    }

    /// The place of a page with a hash of this key.
    pub fn find(&mut self, key: u64, known: &dyn Known) -> Option<u64> {
        if let Some(at) = self.near.get(key) {
            return Some(at);
        }
        let (at, exact) = self.runs.find(key, &|at| is_there(known, at))?;
        let mblock = at >> 16;
        if self.hits.len() >= COUNTED {
            self.hits.clear();
        }
        let hits = self.hits.entry(mblock).or_default();
        *hits = hits.saturating_add(1);
        if !exact || *hits >= NEAR_FROM {
            *hits = 0;
            self.bring(mblock, known);
        }
        Some(at)
    }

    /// Reads the hashes of a data mblock into memory.
    fn bring(&mut self, mblock: u64, known: &dyn Known) {
        if self.near.has(mblock) {
            return;
        }
        match known.hashes(mblock) {
            Ok(hashes) => self.near.insert(mblock, hashes.into_iter().map(key)),
            Err(flaw) => self.damaged.push((mblock, flaw)),
        }
    }

    /// Adds a page that was stored just now, behind the one that was added last in its mblock.
    ///
    /// # Errors
    /// If collected entries cannot be written.
    pub fn add(&mut self, hash: u128, at: u64, known: &dyn Known) -> Result<(), ObjectError> {
        self.near.push(key(hash), at);
        self.enter(hash, at, known)
    }

    /// Adds a page to the index without keeping its hash at hand.
    ///
    /// # Errors
    /// If collected entries cannot be written.
    pub fn enter(&mut self, hash: u128, at: u64, known: &dyn Known) -> Result<(), ObjectError> {
        self.runs.add(key(hash), at, &|at| is_there(known, at))
    }

    /// Says that all pages of the mblock that is being filled were added.
    pub fn filled(&mut self) {
        self.near.filled();
    }

    /// Says that a data mblock is not there after all.
    pub(super) fn forget(&mut self, mblock: u64) {
        self.near.forget(mblock);
    }

    /// Writes what was collected. Gives all runs, the oldest first, which are then to be recorded;
    /// afterwards [`Index::retired`] are to be deleted.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&mut self, known: &dyn Known) -> Result<Vec<Run>, ObjectError> {
        self.runs.write(&|at| is_there(known, at))?;
        Ok(self.runs.all().to_vec())
    }

    /// All runs, the oldest first.
    pub(super) fn runs(&self) -> &[Run] {
        self.runs.all()
    }

    /// The mblocks that the runs given last do not need any more.
    pub fn retired(&mut self) -> Vec<u64> {
        self.runs.retired()
    }

    /// Why a part of the index cannot be read, if that was found.
    pub fn flaw(&self) -> Option<&PageFlaw> {
        self.runs.flaw()
    }

    /// Data mblocks whose hashes could not be read since the last call, and why.
    pub(super) fn take_damaged(&mut self) -> Vec<(u64, PageFlaw)> {
        std::mem::take(&mut self.damaged)
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> usize {
        self.runs.memory() + self.near.memory() + self.hits.capacity() * 17
    }

    /// Entries on the medium and collected, and the low bits of zero that a key needs.
    pub fn entries(&self) -> (u64, u8) {
        self.runs.entries()
    }
}

#[cfg(test)]
mod tests;
