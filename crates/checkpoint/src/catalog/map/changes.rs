//! What a checkpoint has found of the places of its pages, before its map is written.

use super::Places;
use crate::catalog::LEAF;

/// The place of a page that has not changed. No page has it: data mblocks have 8192 pages.
const UNCHANGED: u64 = u64::MAX;
/// Changes of a leaf that are listed; more take a place for each page.
const FEW: usize = 128;

/// The changes of a leaf.
#[derive(Clone, Debug)]
enum Change {
    /// Pages of the leaf and their places. Of several places of a page the last one counts.
    Few(Vec<(u16, u64)>),
    All(Box<Places>),
}

/// The changes of a map.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Changes {
    /// Pages of the memory.
    pages: u64,
    leaves: Vec<Change>,
    /// A bit for each page; pages whose bit is not set become zeros, unless they are changed.
    present: Option<Vec<u64>>,
}

impl Changes {
    /// No changes of a map for this many pages.
    pub(in super::super) fn new(pages: usize) -> Self {
        let leaves = vec![Change::Few(Vec::new()); pages.div_ceil(LEAF)];
        Self { pages: pages as u64, leaves, present: None }
    }

    /// Says where a page is from now on.
    pub(in super::super) fn set(&mut self, page: u64, at: u64) {
        let (leaf, page) = (&mut self.leaves[page as usize / LEAF], page as usize % LEAF);
        match leaf {
            Change::Few(list) if list.len() < FEW => list.push((page as u16, at)),
            Change::Few(list) => {
                let mut all = Box::new([UNCHANGED; LEAF]);
                list.iter().for_each(|(page, at)| all[*page as usize] = *at);
                all[page] = at;
                *leaf = Change::All(all);
            }
            Change::All(all) => all[page] = at,
        }
    }

    /// Pages whose bit is not set become zeros, unless they are changed.
    pub(in super::super) fn keep_present(&mut self, present: Vec<u64>) {
        self.present = Some(present);
    }

    /// Number of pages.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of leaves.
    pub(super) fn leaves(&self) -> usize {
        self.leaves.len()
    }

    /// Whether places of a leaf were set.
    pub(super) fn has(&self, leaf: usize) -> bool {
        !matches!(&self.leaves[leaf], Change::Few(list) if list.is_empty())
    }

    /// Bits of the leaf's pages that are present.
    fn present(&self, leaf: usize) -> impl Iterator<Item = u64> {
        let words = LEAF / 64;
        let all = self.present.as_deref();
        (leaf * words..(leaf + 1) * words).map(move |i| all.map_or(u64::MAX, |all| all.get(i).copied().unwrap_or(0)))
    }

    /// Whether pages of the leaf are absent.
    pub(super) fn has_absent(&self, leaf: usize) -> bool {
        self.present(leaf).any(|word| word != u64::MAX)
    }

    /// Whether the leaf's places are known without those that it had.
    pub(super) fn is_whole(&self, leaf: usize) -> bool {
        let mut places = [UNCHANGED; LEAF];
        self.apply(leaf, &mut places);
        !places.contains(&UNCHANGED)
    }

    /// Changes the places of a leaf.
    pub(super) fn apply(&self, leaf: usize, places: &mut Places) {
        for (i, word) in self.present(leaf).enumerate().filter(|(_, word)| *word != u64::MAX) {
            (0..64).filter(|bit| word >> bit & 1 == 0).for_each(|bit| places[i * 64 + bit] = 0);
        }
        match &self.leaves[leaf] {
            Change::Few(list) => list.iter().for_each(|(page, at)| places[*page as usize] = *at),
            Change::All(all) => {
                places.iter_mut().zip(all.iter()).filter(|(_, at)| **at != UNCHANGED).for_each(|(to, at)| *to = *at);
            }
        }
    }
}
