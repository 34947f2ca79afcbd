//! Runs of a batch: cut in two, and the span of several.

use wire::{MergeRun, PageNo, Run, Target};

/// The first `at` pages of a run, and the others.
pub(crate) fn split(merge: MergeRun, at: u32) -> (MergeRun, MergeRun) {
    let (head, tail) = (Run::new(merge.run.page, at), Run::between(merge.run.page + at, merge.run.end()));
    (MergeRun { run: head, ..merge }, MergeRun { run: tail, target: advance(merge.target, at) })
}

/// What the page `pages` behind the first one is merged with.
pub(crate) fn advance(target: Target, pages: u32) -> Target {
    match target {
        Target::Frames { segment, slot } => Target::Frames { segment, slot: slot + pages },
        Target::Zero => Target::Zero,
    }
}

/// From the first page of the runs to their last; `None` if there is no run.
pub(crate) fn span(runs: &[MergeRun]) -> Option<Run> {
    let (first, last) = (runs.first()?, runs.last()?);
    Some(Run::between(first.run.page, last.run.end()))
}

/// Where the first run ends, with those that follow it without a gap.
pub(crate) fn end_of_group(runs: &[MergeRun]) -> PageNo {
    let mut end = runs[0].run.end();
    for merge in &runs[1..] {
        if merge.run.page != end {
            break;
        }
        end = merge.run.end();
    }
    end
}
