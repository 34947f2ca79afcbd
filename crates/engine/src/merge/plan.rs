//! What a turn has in hand: pages gathered into runs, and rows and stretches that tell what the
//! next pages may be.

use wire::{MAX_BATCH_PAGES, PageNo, RegionId, Run, Slot};

use crate::client::batch::{PlannedRun, Target};
use crate::content::frame::Frame;

/// Pages guessed at a time, first and most.
pub(crate) const GUESSES: std::ops::RangeInclusive<u32> = 64..=512;
/// Pages in a row that equal frames in a row (or zeros), up to the page looked at last.
pub(crate) struct Row {
    pub(crate) page: PageNo,
    pub(crate) target: Target,
    pub(crate) len: u32,
    /// How many pages the next guess takes.
    pub(crate) ahead: u32,
}

impl Default for Row {
    fn default() -> Self {
        Self { page: PageNo(0), target: Target::Zero, len: 0, ahead: *GUESSES.start() }
    }
}

impl Row {
    /// A page was read; `None`: it equals no frame that there was before.
    pub(crate) fn add(&mut self, page: PageNo, target: Option<Target>) {
        match target {
            Some(target) if self.len > 0 && page == self.page + 1 && target == self.target.next() => self.len += 1,
            Some(target) => *self = Self { target, len: 1, ..Self::default() },
            None => *self = Self::default(),
        }
        (self.page, self.target) = (page, target.unwrap_or(self.target));
    }
}

/// Neighbouring pages with one content, up to the page looked up last.
#[derive(Default)]
pub(crate) struct Stretch {
    pub(crate) region: RegionId,
    pub(crate) page: PageNo,
    pub(crate) digest: u64,
    /// The frame that the last page uses.
    pub(crate) frame: Option<Frame>,
    pub(crate) len: u32,
}

impl Stretch {
    pub(crate) fn add(&mut self, region: RegionId, page: PageNo, digest: u64) {
        if (self.region, self.page + 1, self.digest) == (region, page, digest) {
            self.len += 1;
        } else {
            *self = Self { region, digest, frame: None, len: 1, page };
        }
        self.page = page;
    }
}

/// Pages of one region, ascending, gathered into runs.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) runs: Vec<PlannedRun>,
    pub(crate) pages: u32,
    pub(crate) min_run: u32,
}

impl Plan {
    pub(crate) fn push(&mut self, page: PageNo, target: Target) {
        self.pages += 1;
        if let Some(PlannedRun { run, target: first }) = self.runs.last_mut()
            && run.end() == page
            && run.len < MAX_BATCH_PAGES
        {
            let follows = match (*first, target) {
                (Target::Zero, Target::Zero) => true,
                (Target::Frame(first), Target::Frame(next)) => next.0 == first.0 + run.len && next.slot() != Slot(0),
                _ => false,
            };
            if follows {
                run.len += 1;
                return;
            }
        }
        self.runs.push(PlannedRun { run: Run::one(page), target });
    }

    /// The runs to send, and those too short for a short budget of mappings. Zero pages cost no
    /// mapping.
    pub(crate) fn into_runs(self) -> (Vec<PlannedRun>, Vec<PlannedRun>) {
        let min_run = self.min_run;
        self.runs.into_iter().partition(|run| run.target == Target::Zero || run.run.len >= min_run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(pages: &[(u32, Target)]) -> Vec<(u32, u32)> {
        let mut plan = Plan::default();
        pages.iter().for_each(|&(page, target)| plan.push(PageNo(page), target));
        plan.runs.iter().map(|planned| (planned.run.page.0, planned.run.len)).collect()
    }

    #[test]
    fn pages_join_a_run_when_they_and_their_frames_are_consecutive() {
        let f = |n| Target::Frame(Frame(n));
        assert_eq!(runs(&[(1, f(7)), (2, f(8)), (3, f(9))]), [(1, 3)]);
        assert_eq!(runs(&[(1, f(7)), (3, f(8))]), [(1, 1), (3, 1)], "a gap in the pages");
        assert_eq!(runs(&[(1, f(7)), (2, f(9))]), [(1, 1), (2, 1)], "a gap in the frames");
        assert_eq!(runs(&[(1, Target::Zero), (2, Target::Zero), (3, f(9))]), [(1, 2), (3, 1)]);
        let end = wire::SEGMENT_PAGES - 1;
        assert_eq!(runs(&[(1, f(end)), (2, f(end + 1))]), [(1, 1), (2, 1)], "two segments");
    }

    #[test]
    fn a_short_budget_leaves_short_runs_out() {
        let mut plan = Plan { min_run: 2, ..Plan::default() };
        let f = |n| Target::Frame(Frame(n));
        for (page, target) in [(1, f(1)), (2, f(2)), (5, f(9)), (7, Target::Zero)] {
            plan.push(PageNo(page), target);
        }
        let (sent, short) = plan.into_runs();
        assert_eq!(sent.iter().map(|planned| planned.run.page.0).collect::<Vec<_>>(), [1, 7]);
        assert_eq!(short.iter().map(|planned| planned.run.page.0).collect::<Vec<_>>(), [5]);
    }
}
