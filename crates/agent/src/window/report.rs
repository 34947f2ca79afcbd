//! What a merge window did.

use std::time::Duration;

use wire::{MergeRun, Outcome, Run, RunOutcome};

/// What became of the runs that a window was opened for.
#[derive(Default)]
pub(crate) struct WindowReport {
    /// Outcomes, in the order of the runs.
    pub(crate) outcomes: Vec<RunOutcome>,
    /// Runs that were not looked at.
    pub(crate) rest: Vec<MergeRun>,
    /// The time was over before all runs were looked at.
    pub(crate) ran_out: bool,
    /// How long writers could have waited.
    pub(crate) time: Duration,
    /// The process was checked for pinned and locked memory, and has none.
    pub(crate) nothing_held: bool,
    /// Pages whose mapping was left as it was.
    pub(super) untouched: Vec<Run>,
    /// Pages that could not be taken away.
    pub(super) stuck: Vec<Run>,
}

impl WindowReport {
    /// Notes the outcome of pages that go on being counted as written, or as clean.
    pub(super) fn settle_as_is(&mut self, run: Run, outcome: Outcome) {
        match self.outcomes.last_mut() {
            Some(last) if last.outcome == outcome && last.run.end() == run.page => last.run.len += run.len,
            _ => self.outcomes.push(RunOutcome { run, outcome }),
        }
    }

    /// Notes the outcome of some pages.
    pub(super) fn settle(&mut self, run: Run, outcome: Outcome) {
        self.settle_as_is(run, outcome);
        if !matches!(outcome, Outcome::Merged | Outcome::Failed) {
            self.leave(run);
        }
    }

    pub(super) fn settle_all(&mut self, runs: &[MergeRun], outcome: Outcome) {
        runs.iter().for_each(|merge| self.settle(merge.run, outcome));
    }

    /// Notes that the mapping of some pages was left as it was.
    pub(super) fn leave(&mut self, run: Run) {
        match self.untouched.last_mut() {
            Some(last) if last.end() == run.page => last.len += run.len,
            _ if run.len > 0 => self.untouched.push(run),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use wire::PageNo;

    use super::*;

    fn run(start: u32, len: u32) -> Run {
        Run::new(PageNo(start), len)
    }

    #[test]
    fn untouched_parts_join() {
        let mut report = WindowReport::default();
        report.leave(run(0, 0));
        report.settle(run(0, 2), Outcome::Differs);
        report.leave(run(2, 3));
        report.settle(run(5, 1), Outcome::Merged);
        report.leave(run(6, 1));
        assert_eq!(report.untouched, [run(0, 5), run(6, 1)]);
    }
}
