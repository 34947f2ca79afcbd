//! What the ledger knows of each page: 4 bytes a page, in chunks.
//!
//! A chunk is allocated when the first of its pages gets an entry. So a reservation that the client
//! never touches costs the table of chunks only: 8 bytes for 4 MiB.

use std::collections::TryReserveError;
use std::marker::PhantomData;

use wire::{PageNo, Run};

use crate::core::content::frame::Frame;
use crate::core::content::index::Content;

/// A store's frame, or a content whose frame the kernel knows, by a number of 30 bits.
pub(crate) trait MergedWith: Copy + PartialEq {
    fn number(self) -> u32;
    fn of(number: u32) -> Self;
}

impl MergedWith for Frame {
    fn number(self) -> u32 {
        self.0
    }

    fn of(number: u32) -> Self {
        Self(number)
    }
}

impl MergedWith for Content {
    fn number(self) -> u32 {
        self.0
    }

    fn of(number: u32) -> Self {
        Self(number)
    }
}

/// What the ledger knows of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Entry<S = Frame> {
    /// Nothing is known: untouched, changing, or not read yet.
    Fresh,
    /// Read and unique so far; the index knows it under this handle.
    Unshared(u32),
    /// It is merged with this, and counts as one of its users.
    Merged(S),
    /// Given back as a zero page.
    Zero,
    /// Part of a batch that is under way; the batch knows the target.
    Pending,
    /// The guest does not need it; taken back, and untouched since.
    Recycled,
}

/// Bits of a word that hold a handle or a frame; the two above say what it is.
const LOW: u32 = (1 << 30) - 1;

impl<S: MergedWith> Entry<S> {
    pub(super) fn word(self) -> u32 {
        match self {
            Entry::Fresh => 0,
            Entry::Unshared(handle) => 1 << 30 | handle & LOW,
            Entry::Merged(with) => 2 << 30 | with.number() & LOW,
            Entry::Zero => 3 << 30,
            Entry::Pending => 3 << 30 | 1,
            Entry::Recycled => 3 << 30 | 2,
        }
    }

    pub(super) fn from_word(word: u32) -> Self {
        match (word >> 30, word & LOW) {
            (0, _) => Entry::Fresh,
            (1, handle) => Entry::Unshared(handle),
            (2, number) => Entry::Merged(S::of(number)),
            (_, 0) => Entry::Zero,
            (_, 2) => Entry::Recycled,
            _ => Entry::Pending,
        }
    }
}

/// Pages of a region by what the ledger knows of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) unshared: u64,
    pub(crate) merged: u64,
    pub(crate) zero: u64,
    pub(crate) pending: u64,
    pub(crate) recycled: u64,
}

impl Counts {
    /// Where a page with this entry is counted.
    pub(super) fn of<S>(&mut self, entry: Entry<S>) -> Option<&mut u64> {
        match entry {
            Entry::Fresh => None,
            Entry::Unshared(_) => Some(&mut self.unshared),
            Entry::Merged(_) => Some(&mut self.merged),
            Entry::Zero => Some(&mut self.zero),
            Entry::Pending => Some(&mut self.pending),
            Entry::Recycled => Some(&mut self.recycled),
        }
    }

    /// Pages of which anything is known.
    pub(super) fn sum(self) -> u64 {
        self.unshared + self.merged + self.zero + self.pending + self.recycled
    }
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            unshared: self.unshared + more.unshared,
            merged: self.merged + more.merged,
            zero: self.zero + more.zero,
            pending: self.pending + more.pending,
            recycled: self.recycled + more.recycled,
        }
    }
}

/// Pages of a chunk: 4 KiB of entries.
const CHUNK: usize = 1024;

pub(super) struct Entries<S> {
    pages: u32,
    /// `None`: all pages of the chunk are fresh.
    chunks: Vec<Option<Box<[u32; CHUNK]>>>,
    allocated: usize,
    counts: Counts,
    with: PhantomData<S>,
}

impl<S: MergedWith> Entries<S> {
    /// Fresh entries of `pages` pages.
    pub(super) fn new(pages: u32) -> Result<Self, TryReserveError> {
        let count = (pages as usize).div_ceil(CHUNK);
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(count)?;
        chunks.resize_with(count, || None);
        Ok(Self { pages, chunks, allocated: 0, counts: Counts::default(), with: PhantomData })
    }

    pub(super) fn bytes(&self) -> usize {
        self.chunks.len() * size_of::<Option<Box<[u32; CHUNK]>>>() + self.allocated * CHUNK * 4
    }

    /// The words of one chunk, allocated if they are missing: 4 KiB.
    fn chunk(&mut self, index: usize) -> Option<&mut [u32; CHUNK]> {
        let Self { chunks, allocated, .. } = self;
        let chunk = chunks.get_mut(index)?;
        Some(chunk.get_or_insert_with(|| {
            *allocated += 1;
            Box::new([0; CHUNK])
        }))
    }

    /// The pages of `run` that may have an entry: those of chunks that are allocated, ascending.
    pub(super) fn known(&self, run: Run) -> impl Iterator<Item = PageNo> {
        let (start, end) = (run.page.0, run.end().0.min(self.pages));
        let first = start as usize / CHUNK;
        let last = (end as usize).div_ceil(CHUNK).max(first);
        let chunks = self.chunks.get(first..last).unwrap_or_default().iter().zip(first..);
        chunks.filter(|(chunk, _)| chunk.is_some()).flat_map(move |(_, index)| {
            let base = (index * CHUNK) as u32;
            (base.max(start)..(base.saturating_add(CHUNK as u32)).min(end)).map(PageNo)
        })
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// The entry of a page; fresh past the end.
    pub(super) fn get(&self, page: PageNo) -> Entry<S> {
        let chunk = self.chunks.get(page.index() / CHUNK).and_then(Option::as_deref);
        chunk.map_or(Entry::Fresh, |words| Entry::from_word(words[page.index() % CHUNK]))
    }

    /// Writes an entry and returns the one before it. Past the end: does nothing.
    pub(super) fn set(&mut self, page: PageNo, entry: Entry<S>) -> Entry<S> {
        if page.0 >= self.pages || entry == Entry::Fresh && self.chunks[page.index() / CHUNK].is_none() {
            return Entry::Fresh;
        }
        let Some(words) = self.chunk(page.index() / CHUNK) else { return Entry::Fresh };
        let before = Entry::from_word(std::mem::replace(&mut words[page.index() % CHUNK], entry.word()));
        if let Some(n) = self.counts.of(before) {
            *n -= 1;
        }
        if let Some(n) = self.counts.of(entry) {
            *n += 1;
        }
        before
    }

    /// These pages were recycled, but pending ones. Calls `left` with what else was known of them.
    /// `counts`: whether a fresh one does.
    pub(super) fn recycle(
        &mut self,
        run: Run,
        mut counts: impl FnMut(PageNo) -> bool,
        mut left: impl FnMut(PageNo, Entry<S>),
    ) {
        if run.end().0 > self.pages {
            return;
        }
        let (mut fresh, mut others) = (0, Vec::new());
        for page in run.pages() {
            match self.get(page) {
                Entry::Pending | Entry::Recycled => {}
                // Nearly all: no pass reads a guest's free pages.
                Entry::Fresh if !counts(page) => {}
                Entry::Fresh => {
                    if let Some(words) = self.chunk(page.index() / CHUNK) {
                        words[page.index() % CHUNK] = Entry::<S>::Recycled.word();
                        fresh += 1;
                    }
                }
                entry => others.push((page, entry)),
            }
        }
        self.counts.recycled += fresh;
        for (page, entry) in others {
            self.set(page, Entry::Recycled);
            left(page, entry);
        }
    }
}

#[cfg(test)]
mod tests;
