//! One region: its managed parts, and the pages that map frames. No mapping is changed here.
//!
//! Page numbers count from the region's original start, also when it was cut.

use kmem::PAGE_SIZE;
use kmem::range::Range;
use wire::{PageNo, RegionId, Run};

use crate::runtime::state::bitmap::Bitmap;
use crate::runtime::state::given_back::GivenBack;

/// The program's advice, which every mapping that the agent puts there needs again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Sticky {
    /// `MADV_DONTFORK`.
    pub(crate) dont_fork: bool,
    /// `MADV_DONTDUMP`.
    pub(crate) dont_dump: bool,
    /// `MADV_HUGEPAGE` (true) or `MADV_NOHUGEPAGE` (false).
    pub(crate) huge: Option<bool>,
    /// The memory was mapped with `MAP_NORESERVE`.
    pub(crate) no_reserve: bool,
}

/// Memory under management.
pub(crate) struct Region {
    pub(crate) id: RegionId,
    /// What was marked.
    pub(crate) range: Range,
    /// Pages that lie in a mapping of a segment, also after a write has copied them.
    pub(crate) mapped: Bitmap,
    pub(crate) given_back: GivenBack,
    pub(crate) sticky: Sticky,
    /// Some mapping inside may lack `MADV_DONTFORK` although the program gave it.
    pub(crate) leaks_into_children: bool,
    /// Ascending, disjoint, none empty.
    managed: Vec<Run>,
}

impl Region {
    /// Nothing of it is merged. `None`: there is no memory for its bitmap.
    pub(crate) fn new(id: RegionId, range: Range, sticky: Sticky) -> Option<Self> {
        let pages = u32::try_from(range.pages()).ok()?;
        let (mapped, given_back) = (Bitmap::new(pages)?, GivenBack::new(pages)?);
        let managed = vec![Run::new(PageNo(0), pages)];
        Some(Self { id, range, mapped, given_back, sticky, leaks_into_children: false, managed })
    }

    /// All its pages, managed or not.
    pub(crate) fn all(&self) -> Run {
        Run::new(PageNo(0), self.mapped.bits())
    }

    pub(crate) fn bytes(&self, run: Run) -> Range {
        Range::new(self.range.start + run.page.index() * PAGE_SIZE, run.len as usize * PAGE_SIZE)
    }

    /// The page at an address of the region.
    pub(crate) fn page_at(&self, address: usize) -> PageNo {
        PageNo(((address - self.range.start) / PAGE_SIZE) as u32)
    }

    /// The managed parts, ascending.
    pub(crate) fn managed(&self) -> &[Run] {
        &self.managed
    }

    /// The managed parts inside a range of addresses.
    pub(crate) fn managed_in(&self, range: Range) -> impl Iterator<Item = Run> {
        let wanted = self.range.intersect(&range).map(|both| Run::new(self.page_at(both.start), both.pages() as u32));
        self.managed.iter().filter_map(move |part| part.intersect(wanted?))
    }

    pub(crate) fn manages(&self, run: Run) -> bool {
        self.managed.iter().any(|part| part.covers(run))
    }

    /// Whether children that the program forks get a copy of some of its mappings.
    pub(crate) fn is_inherited(&self) -> bool {
        !self.sticky.dont_fork || self.leaks_into_children
    }

    /// Takes pages out of management and forgets what they map.
    pub(crate) fn drop_pages(&mut self, run: Run) {
        let mut left = Vec::with_capacity(self.managed.len() + 1);
        for part in &self.managed {
            let before = Run::between(part.page, part.end().min(run.page));
            let behind = Run::between(part.page.max(run.end()), part.end());
            left.extend([before, behind].into_iter().filter(|rest| rest.len > 0));
        }
        self.managed = left;
        self.mapped.clear(run);
        self.given_back.forget(run);
    }

    /// How many more mappings there are, at most, when these pages become one: it replaces what
    /// lies between two others, or leaves a remainder on one or both sides.
    pub(crate) fn new_maps(&self, run: Run) -> usize {
        if self.mapped.any(run) {
            return 2;
        }
        let before = run.page.0.checked_sub(1).map(|page| Run::one(PageNo(page)));
        let behind = (run.end().0 < self.mapped.bits()).then_some(Run::one(run.end()));
        [before, behind].into_iter().flatten().filter(|&page| !self.mapped.any(page)).count()
    }

    /// The parts that are not managed any more, ascending.
    pub(crate) fn holes(&self) -> impl Iterator<Item = Run> {
        let ends = self.managed.iter().map(|part| part.end());
        let starts = self.managed.iter().map(|part| part.page);
        std::iter::once(PageNo(0))
            .chain(ends)
            .zip(starts.chain(std::iter::once(self.all().end())))
            .map(|(start, end)| Run::between(start, end))
            .filter(|hole| hole.len > 0)
    }
}

#[cfg(test)]
mod tests;
