//! What the ledger knows of each page: 4 bytes a page.

use wire::{PageNo, Run};

use crate::content::frame::Frame;

/// What the ledger knows of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Entry {
    /// Nothing is known: untouched, changing, or not read yet.
    Fresh,
    /// Read and unique so far; the index knows it under this handle.
    Unshared(u32),
    /// It maps this frame, and counts as one of its users.
    Merged(Frame),
    /// Given back as a zero page.
    Zero,
    /// Part of a batch that is under way; the batch knows the target.
    Pending,
    /// The guest does not need it; taken back, and untouched since.
    Recycled,
}

/// Bits of a word that hold a handle or a frame; the two above say what it is.
const LOW: u32 = (1 << 30) - 1;

impl Entry {
    fn word(self) -> u32 {
        match self {
            Entry::Fresh => 0,
            Entry::Unshared(handle) => 1 << 30 | handle & LOW,
            Entry::Merged(frame) => 2 << 30 | frame.0 & LOW,
            Entry::Zero => 3 << 30,
            Entry::Pending => 3 << 30 | 1,
            Entry::Recycled => 3 << 30 | 2,
        }
    }

    fn from_word(word: u32) -> Self {
        match (word >> 30, word & LOW) {
            (0, _) => Entry::Fresh,
            (1, handle) => Entry::Unshared(handle),
            (2, frame) => Entry::Merged(Frame(frame)),
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

/// The entries of one region.
pub(super) struct Entries {
    words: Vec<u32>,
    counts: Counts,
}

impl Entries {
    /// Fresh entries of `pages` pages.
    pub(super) fn new(pages: u32) -> Self {
        Self { words: vec![0; pages as usize], counts: Counts::default() }
    }

    /// Bytes that they take.
    pub(super) fn bytes(&self) -> usize {
        self.words.len() * 4
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// The entry of a page; fresh past the end.
    pub(super) fn get(&self, page: PageNo) -> Entry {
        self.words.get(page.index()).map_or(Entry::Fresh, |&word| Entry::from_word(word))
    }

    fn count(&mut self, entry: Entry) -> Option<&mut u64> {
        match entry {
            Entry::Fresh => None,
            Entry::Unshared(_) => Some(&mut self.counts.unshared),
            Entry::Merged(_) => Some(&mut self.counts.merged),
            Entry::Zero => Some(&mut self.counts.zero),
            Entry::Pending => Some(&mut self.counts.pending),
            Entry::Recycled => Some(&mut self.counts.recycled),
        }
    }

    /// Writes an entry and returns the one before it. Past the end: does nothing.
    pub(super) fn set(&mut self, page: PageNo, entry: Entry) -> Entry {
        let Some(word) = self.words.get_mut(page.index()) else { return Entry::Fresh };
        let before = Entry::from_word(std::mem::replace(word, entry.word()));
        if let Some(n) = self.count(before) {
            *n -= 1;
        }
        if let Some(n) = self.count(entry) {
            *n += 1;
        }
        before
    }

    /// These pages were recycled; a pending page stays pending. Calls `left` with what else was
    /// known of them.
    pub(super) fn recycle(&mut self, run: Run, mut left: impl FnMut(PageNo, Entry)) {
        let Some(words) = self.words.get_mut(run.page.index()..run.end().index()) else { return };
        let mut fresh = 0;
        let mut others = Vec::new();
        for (page, word) in run.pages().zip(words) {
            match Entry::from_word(*word) {
                // Nearly all: no pass reads a guest's free pages.
                Entry::Fresh => {
                    *word = Entry::Recycled.word();
                    fresh += 1;
                }
                Entry::Pending | Entry::Recycled => {}
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
mod tests {
    use super::*;

    #[test]
    fn entries_survive_their_word_and_are_counted() {
        let mut held = Entries::new(8);
        let entries = [
            Entry::Unshared(LOW),
            Entry::Merged(Frame(LOW)),
            Entry::Zero,
            Entry::Pending,
            Entry::Fresh,
            Entry::Recycled,
        ];
        for (page, entry) in entries.into_iter().enumerate() {
            assert_eq!(held.set(PageNo(page as u32), entry), Entry::Fresh);
            assert_eq!(held.get(PageNo(page as u32)), entry);
        }
        assert_eq!(held.counts(), Counts { unshared: 1, merged: 1, zero: 1, pending: 1, recycled: 1 });
        assert_eq!(held.set(PageNo(1), Entry::Zero), Entry::Merged(Frame(LOW)));
        assert_eq!(held.counts(), Counts { unshared: 1, merged: 0, zero: 2, pending: 1, recycled: 1 });
        assert_eq!(held.set(PageNo(99), Entry::Zero), Entry::Fresh, "past the end: nothing");
        assert_eq!(held.get(PageNo(99)), Entry::Fresh);
    }
}
