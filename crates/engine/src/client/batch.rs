//! What an agent is told to do: runs of pages and what they are to be merged with.

use wire::RegionId;

use crate::content::store::Frame;

/// What a planned page is to be merged with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    Frame(Frame),
    Zero,
}

impl Goal {
    /// The goal of the page behind, in a run.
    pub(crate) fn next(self) -> Self {
        match self {
            Goal::Frame(frame) => Goal::Frame(Frame(frame.0 + 1)),
            Goal::Zero => Goal::Zero,
        }
    }
}

/// Consecutive pages of a batch with consecutive frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedRun {
    pub(crate) page: u32,
    pub(crate) len: u32,
    pub(crate) goal: Goal,
}

impl PlannedRun {
    fn goal_of(&self, page: u32) -> Goal {
        match self.goal {
            Goal::Frame(first) => Goal::Frame(Frame(first.0 + (page - self.page))),
            Goal::Zero => Goal::Zero,
        }
    }
}

/// What an agent was told to do and has not reported on to the end. Which of its pages are settled
/// is noted here and not read off the ledger: a page that was guessed wrong can be under way again,
/// in a later batch, before this one is over.
pub(crate) struct Batch {
    pub(crate) region: RegionId,
    pub(crate) runs: Vec<PlannedRun>,
    /// Pages in the runs before each run.
    firsts: Vec<u32>,
    settled: Vec<bool>,
}

impl Batch {
    pub(crate) fn new(region: RegionId, runs: Vec<PlannedRun>) -> Self {
        let mut pages = 0;
        let mut firsts = Vec::with_capacity(runs.len());
        for run in &runs {
            firsts.push(pages);
            pages += run.len;
        }
        Self { region, runs, firsts, settled: vec![false; pages as usize] }
    }

    /// Settles a page: gives its goal, once.
    pub(crate) fn settle(&mut self, page: u32) -> Option<Goal> {
        let at = self.runs.partition_point(|run| run.page + run.len <= page);
        let run = self.runs.get(at).filter(|run| run.page <= page)?;
        let settled = self.settled.get_mut((self.firsts[at] + page - run.page) as usize)?;
        (!std::mem::replace(settled, true)).then(|| run.goal_of(page))
    }

    /// The pages that are not settled.
    pub(crate) fn left(&self) -> Vec<u32> {
        let pages = self.runs.iter().flat_map(|run| run.page..run.page + run.len);
        pages.zip(&self.settled).filter(|(_, settled)| !**settled).map(|(page, _)| page).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_settled_once_in_each_batch() {
        let frame = |n| Goal::Frame(Frame(n));
        let runs = vec![
            PlannedRun { page: 3, len: 2, goal: frame(10) },
            PlannedRun { page: 9, len: 1, goal: Goal::Zero },
            PlannedRun { page: 10, len: 3, goal: frame(50) },
        ];
        let mut batch = Batch::new(0, runs);
        assert_eq!(batch.settle(4), Some(frame(11)));
        assert_eq!(batch.settle(4), None, "settled, whatever has become of the page since");
        assert_eq!(batch.settle(9), Some(Goal::Zero));
        for page in [0, 2, 5, 8, 13, u32::MAX] {
            assert_eq!(batch.settle(page), None, "page {page} is not in it");
        }
        assert_eq!(batch.left(), [3, 10, 11, 12]);
        assert_eq!(batch.settle(12), Some(frame(52)));
        assert_eq!(batch.left(), [3, 10, 11]);
    }
}
