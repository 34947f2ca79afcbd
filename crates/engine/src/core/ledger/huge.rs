//! Huge pages of a client that are split only when it pays.
//!
//! To merge one page of a huge page, the kernel has to split it: 4 KiB are saved, and the program
//! walks page tables for the other 511. So with a least share (`huge_page_share`), the pages of a
//! huge page are read first. Their contents enter the index as all others do. Zeros, and pages
//! whose content is seen elsewhere, then or later, are noted here. When enough are noted, the huge
//! page is *given up*: the noted pages become candidates, are read anew and merged.
//!
//! A huge page that was written, or discarded or recycled in part, has lost its entry in the page
//! tables: the kernel resolves the fault of a tracked write page by page. It is given up, too.

use dirty::{DirtyTree, NewError};
use kmem::PAGE_SIZE;
use kmem::memfd::HUGE_PAGE_SIZE;
use wire::{PageNo, Run};

const HUGE: u32 = (HUGE_PAGE_SIZE / PAGE_SIZE) as u32;

pub(crate) struct HugePagesOf {
    /// Pages before the first boundary of 2 MiB, which belong to no block.
    before: u32,
    /// Most pages of a block that are left alone although they can be merged.
    most: u32,
    /// Blocks that are huge pages and not given up.
    blocks: DirtyTree,
    /// Pages of these that can be merged.
    mergeable: DirtyTree,
}

impl HugePagesOf {
    /// `start`: the region's first byte; `share`: percent.
    pub(crate) fn new(start: u64, pages: u32, share: f64) -> Result<Self, NewError> {
        let before = (start.next_multiple_of(HUGE_PAGE_SIZE as u64) - start) as u32 / PAGE_SIZE as u32;
        let most = (f64::from(HUGE) * share / 100.0) as u32;
        Ok(Self {
            before,
            most,
            blocks: DirtyTree::new((pages / HUGE).max(1).into())?,
            mergeable: DirtyTree::new(pages.into())?,
        })
    }

    fn block(&self, page: PageNo) -> Option<u32> {
        Some(page.0.checked_sub(self.before)? / HUGE)
    }

    fn pages(&self, block: u32) -> Run {
        Run::new(PageNo(self.before + block * HUGE), HUGE)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.blocks.bytes() + self.mergeable.bytes()
    }

    /// Pages that can be merged and are left in huge pages.
    pub(crate) fn kept(&self) -> u64 {
        self.mergeable.count()
    }

    /// A scan found these pages written, or new, in huge pages.
    pub(crate) fn found(&mut self, pages: Run) {
        self.mergeable.remove_range(pages.page.into(), pages.len.into());
        let (Some(first), Some(last)) = (self.block(pages.page), self.block(PageNo(pages.end().0 - 1))) else { return };
        // Only whole blocks of the region.
        self.blocks.insert_range(first.into(), u64::from(last - first) + 1);
    }

    /// Whether the page is in a huge page that was not given up.
    pub(crate) fn keeps(&self, page: PageNo) -> bool {
        self.block(page).is_some_and(|block| self.blocks.contains(block.into()))
    }

    /// This page can be merged. `Some`: so can enough of its huge page, which is given up; these
    /// were noted. Only this page, if the huge page was given up since the page was read.
    pub(crate) fn can_merge(&mut self, page: PageNo) -> Option<Vec<PageNo>> {
        let Some(block) = self.block(page).filter(|_| self.keeps(page)) else { return Some(vec![page]) };
        self.mergeable.insert(page.into());
        let pages = self.pages(block);
        let noted = self.mergeable.iter_from(pages.page.into()).take_while(|&page| page < pages.end().into()).count();
        if noted as u32 > self.most { Some(self.give_up(block)) } else { None }
    }

    /// These pages are in no huge page any more. Returns what was noted of their huge pages.
    pub(crate) fn lost(&mut self, pages: Run) -> Vec<PageNo> {
        let (first, last) = (self.block(pages.page).unwrap_or(0), self.block(PageNo(pages.end().0.saturating_sub(1))));
        let Some(last) = last else { return Vec::new() };
        let blocks: Vec<u64> = self.blocks.iter_from(first.into()).take_while(|&block| block <= last.into()).collect();
        blocks.into_iter().flat_map(|block| self.give_up(block as u32)).collect()
    }

    fn give_up(&mut self, block: u32) -> Vec<PageNo> {
        self.blocks.remove(block.into());
        let pages = self.pages(block);
        let noted = self.mergeable.iter_from(pages.page.into()).take_while(|&page| page < pages.end().into());
        let noted = noted.map(|page| PageNo(page as u32)).collect();
        self.mergeable.remove_range(pages.page.into(), HUGE.into());
        noted
    }
}

#[cfg(test)]
mod tests;
