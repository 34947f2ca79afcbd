//! What an agent is told to do: runs of pages and what they are to be merged with.

use std::collections::HashMap;

use wire::{PageNo, RegionId, Run};

use crate::core::content::frame::Frame;
use crate::core::merge::predict::Follows;

/// What a planned page is to be merged with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Frame(Frame),
    Zero,
}

impl Follows for Target {
    const NONE: Self = Target::Zero;

    fn step_to(self, next: Self) -> Option<u32> {
        match (self, next) {
            (Target::Frame(frame), Target::Frame(next)) if next.0 == frame.0 + 1 => Some(1),
            (Target::Zero, Target::Zero) => Some(0),
            _ => None,
        }
    }

    fn stepped(self, step: u32) -> Self {
        match self {
            Target::Frame(frame) => Target::Frame(Frame(frame.0 + step)),
            Target::Zero => Target::Zero,
        }
    }
}

/// Consecutive pages of a batch with consecutive frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRun {
    pub(crate) run: Run,
    pub(crate) target: Target,
}

impl PlannedRun {
    fn target_of(&self, page: PageNo) -> Target {
        match self.target {
            Target::Frame(first) => Target::Frame(Frame(first.0 + (page - self.run.page))),
            Target::Zero => Target::Zero,
        }
    }
}

/// What an agent was told to do and has not reported on. Which pages are settled is noted here: a
/// page that was predicted wrong can be under way again in a later batch.
pub(crate) struct Batch {
    pub(crate) region: RegionId,
    pub(crate) runs: Vec<PlannedRun>,
    /// Pages in the runs before each run.
    firsts: Vec<u32>,
    settled: Vec<bool>,
    /// The frames that pages map which are moved to equal ones: the pages use both.
    pub(super) origins: HashMap<PageNo, Frame>,
}

impl Batch {
    pub(crate) fn new(region: RegionId, runs: Vec<PlannedRun>) -> Self {
        let mut pages = 0;
        let mut firsts = Vec::with_capacity(runs.len());
        for run in &runs {
            firsts.push(pages);
            pages += run.run.len;
        }
        Self { region, runs, firsts, settled: vec![false; pages as usize], origins: HashMap::new() }
    }

    /// Settles a page and returns its target. `None`: it is settled, or not in the batch.
    pub(crate) fn settle(&mut self, page: PageNo) -> Option<Target> {
        let at = self.runs.partition_point(|planned| planned.run.end() <= page);
        let run = self.runs.get(at).filter(|planned| planned.run.page <= page)?;
        let settled = self.settled.get_mut((self.firsts[at] + (page - run.run.page)) as usize)?;
        (!std::mem::replace(settled, true)).then(|| run.target_of(page))
    }

    pub(crate) fn take_origins(&mut self, run: Run) -> Vec<Frame> {
        self.origins.extract_if(|page, _| (run.page..run.end()).contains(page)).map(|(_, frame)| frame).collect()
    }

    pub(crate) fn left(&self) -> Vec<PageNo> {
        let pages = self.runs.iter().flat_map(|planned| planned.run.pages());
        pages.zip(&self.settled).filter(|(_, settled)| !**settled).map(|(page, _)| page).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_settled_once_in_each_batch() {
        let frame = |n| Target::Frame(Frame(n));
        let runs = vec![
            PlannedRun { run: Run::new(PageNo(3), 2), target: frame(10) },
            PlannedRun { run: Run::new(PageNo(9), 1), target: Target::Zero },
            PlannedRun { run: Run::new(PageNo(10), 3), target: frame(50) },
        ];
        let mut batch = Batch::new(RegionId(0), runs);
        assert_eq!(batch.settle(PageNo(4)), Some(frame(11)));
        assert_eq!(batch.settle(PageNo(4)), None, "settled, whatever has become of the page since");
        assert_eq!(batch.settle(PageNo(9)), Some(Target::Zero));
        for page in [0, 2, 5, 8, 13, u32::MAX] {
            assert_eq!(batch.settle(PageNo(page)), None, "page {page} is not in it");
        }
        assert_eq!(batch.left(), [3, 10, 11, 12].map(PageNo));
        assert_eq!(batch.settle(PageNo(12)), Some(frame(52)));
        assert_eq!(batch.left(), [3, 10, 11].map(PageNo));
    }
}
