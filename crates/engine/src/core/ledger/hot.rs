//! Pages that are written again and again: scans leave them writable.
//!
//! To protect a page anew costs its next writer a fault, and a virtual machine two more, in its
//! stage-2 page tables. A page that is always written again before it would be a candidate is
//! *hot*: a scan reports it as written, which it is since some earlier period, and *spares* it.
//!
//! It is protected every second period, to see whether it is still hot, and each time that it is,
//! half as often, down to once in 2^[`LEVELS`] periods. So a page that calms down is noticed after
//! about as much time as it was seen being written. Which period it is depends on the page's place
//! too: not all are protected in the same one, and neighbours are.

use std::sync::Arc;

use dirty::{DirtyTree, NewError};

/// Levels of hot pages: one of level `n` is protected in every `2^n`th period.
const LEVELS: usize = 3;
/// Pages that are protected in the same period: as many as one entry of a page directory maps.
const BLOCK: u64 = 512;

pub(super) struct Hot {
    /// Pages of each level, from level 1.
    pub(super) levels: [DirtyTree; LEVELS],
    /// Those that the next scan spares.
    pub(super) spared: Arc<DirtyTree>,
    /// Those that the last scan found written, and spared.
    pub(super) left: DirtyTree,
    /// Number of the region's first page in the address space.
    first: u64,
    pub(super) period: u64,
}

/// Whether the scan after this period spares a page of this level. `page`: its number in the
/// address space.
pub(super) fn is_spared(period: u64, page: u64, level: u32) -> bool {
    !(period + page / BLOCK).is_multiple_of(1 << level)
}

impl Hot {
    pub(super) const SETS: usize = LEVELS + 2;

    /// None, of `pages` pages. `first`: the number of the first in its address space.
    pub(super) fn new(first: u64, pages: u32) -> Result<Self, NewError> {
        let set = || DirtyTree::new(pages.into());
        Ok(Self { levels: [set()?, set()?, set()?], spared: Arc::new(set()?), left: set()?, first, period: 0 })
    }

    /// For how many periods a page has been written at least, by its level; 1 if it is not hot.
    pub(super) fn periods(&self, page: u64) -> u32 {
        let level = self.levels.iter().position(|level| level.contains(page));
        level.map_or(1, |level| 2 << level)
    }

    /// A period is over: pages `written` in it, `young` in the one before, `older` before that.
    pub(super) fn end_period(&mut self, written: &DirtyTree, young: &DirtyTree, older: &DirtyTree) {
        for level in &mut self.levels {
            let calm = |&page: &u64| !written.contains(page) && !young.contains(page);
            let calm: Vec<u64> = level.iter().filter(calm).collect();
            calm.into_iter().for_each(|page| level.remove(page));
        }
        // Of those that the last scan left writable it is not known when they were written.
        let again = |&page: &u64| written.contains(page) && !self.left.contains(page);
        for page in young.iter().chain(older.iter()).filter(again).collect::<Vec<u64>>() {
            match self.levels.iter().position(|level| level.contains(page)) {
                Some(level) if level + 1 < LEVELS => {
                    self.levels[level].remove(page);
                    self.levels[level + 1].insert(page);
                }
                Some(_) => {}
                None => {
                    self.levels[0].insert(page);
                }
            }
        }
        self.period += 1;
        // Nobody scans now, so that no one else has it.
        let Some(spared) = Arc::get_mut(&mut self.spared) else { return };
        self.left.clear();
        for page in spared.iter().filter(|&page| written.contains(page)) {
            self.left.insert(page);
        }
        spared.clear();
        for (level, pages) in (1..).zip(&self.levels) {
            for page in pages.iter().filter(|&page| is_spared(self.period, self.first + page, level)) {
                spared.insert(page);
            }
        }
    }
}

#[cfg(test)]
mod tests;
