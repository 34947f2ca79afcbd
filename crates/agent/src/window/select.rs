//! Which runs of a batch can share a window.
//!
//! A window spans the pages between its runs too. It ends before the first of these that was
//! written since the last scan: its writer may write again, and would wait; and closing the window
//! would clear the kernel's note. Where runs are to be *calm*, it ends before such a page of a run
//! as well, which is skipped: it may have changed long after the daemon read it, and is not worth
//! merging.

use kmem::pagemap::{Categories, Pagemap, Query};
use wire::{MergeRun, Run};

use crate::runtime::state::region::Region;
use crate::window::runs::split;

/// Which pages of some runs are to be merged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    All,
    /// Those that were not written since the last scan.
    Calm,
}

/// Cuts some runs to what can share a window.
pub(super) fn select(region: &Region, window: Run, runs: &[MergeRun], pages: Pages, pagemap: &Pagemap) -> Selection {
    cut(runs, &written_pages(region, window, runs, pages, pagemap), pages)
}

/// What of some runs can share a window.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Selection {
    /// Pages before [`Selection::now`] that were written.
    pub(super) written: Vec<Run>,
    /// The runs of this window.
    pub(super) now: Vec<MergeRun>,
    /// The runs behind it.
    pub(super) rest: Vec<MergeRun>,
}

/// The pages of a window that were written since the last scan, ascending. Unless the runs are to
/// be calm, only pages between them count, if there are any.
fn written_pages(region: &Region, window: Run, runs: &[MergeRun], pages: Pages, pagemap: &Pagemap) -> Vec<Run> {
    let mut written = Vec::new();
    let has_gaps = runs.windows(2).any(|pair| pair[0].run.end() < pair[1].run.page);
    if pages == Pages::All && !has_gaps {
        return written;
    }
    // What the agent changes counts as written too: frames are pages of a file, and pages that were
    // merged with zeros read the zero page.
    let by_agent = Categories::FILE | Categories::PFNZERO;
    let query = Query {
        inverted: by_agent,
        required: Categories::WRITTEN | by_agent,
        any_of: Categories::PRESENT | Categories::SWAPPED,
        ..Query::default()
    };
    // Where the scan fails, pages count as calm: that costs a writer some waiting.
    let _ = pagemap.scan(region.bytes(window), &query, &mut |found| {
        written.push(Run::between(region.page_at(found.start), region.page_at(found.end)));
    });
    written
}

/// Cuts runs before the first page that was written: in a gap between them, or in one of them if
/// they are to be calm. Written pages at the very beginning are set apart.
fn cut(runs: &[MergeRun], written: &[Run], pages: Pages) -> Selection {
    let mut selection = Selection::default();
    let mut written = written.iter().copied().peekable();
    for (i, &merge) in runs.iter().enumerate() {
        let end = merge.run.end();
        let with_rest = |left: MergeRun| std::iter::once(left).chain(runs[i + 1..].iter().copied()).collect();
        let mut left = merge;
        loop {
            // Where this window ends so far. The gap before its first run is no part of it.
            let window_end = selection.now.last().map_or(left.run.page, |last| last.run.end());
            while written.next_if(|found| found.end() <= window_end).is_some() {}
            // Unless the runs are to be calm, only what begins before a gap's end counts.
            let counts = |found: &&Run| match pages {
                Pages::Calm => found.page < end,
                Pages::All => window_end < left.run.page && found.page < left.run.page,
            };
            let Some(&found) = written.peek().filter(counts) else {
                selection.now.push(left);
                break;
            };
            if found.page > left.run.page {
                let (now, rest) = split(left, found.page - left.run.page);
                selection.now.push(now);
                selection.rest = with_rest(rest);
                return selection;
            }
            if !selection.now.is_empty() {
                selection.rest = with_rest(left);
                return selection;
            }
            let to = found.end().min(end);
            selection.written.push(Run::between(left.run.page, to));
            if to == end {
                break;
            }
            left = split(left, to - left.run.page).1;
        }
    }
    selection
}

#[cfg(test)]
mod tests {
    use wire::{PageNo, Slot, Target};

    use super::*;

    fn run(page: u32, len: u32) -> MergeRun {
        let target = Target::Frames { segment: 1, slot: Slot(100 + page) };
        MergeRun { run: Run::new(PageNo(page), len), target }
    }

    fn span(start: u32, end: u32) -> Run {
        Run::between(PageNo(start), PageNo(end))
    }

    #[test]
    fn windows_end_before_what_is_written() {
        let runs = [run(0, 4), run(4, 4), run(10, 5)];
        let all = Selection { now: runs.to_vec(), ..Selection::default() };
        assert_eq!(cut(&runs, &[], Pages::Calm), all);
        assert_eq!(cut(&runs, &[span(15, 90)], Pages::Calm), all, "behind them");
        // In the gap, whether or not it reaches into the run behind.
        for end in [9, 11] {
            let gap = Selection { now: runs[..2].to_vec(), rest: runs[2..].to_vec(), ..Selection::default() };
            assert_eq!(cut(&runs, &[span(8, end)], Pages::Calm), gap);
            assert_eq!(cut(&runs, &[span(8, end)], Pages::All), gap);
        }
        // In a run.
        let inside = [span(5, 6)];
        let (now, rest) = (vec![run(0, 4), run(4, 1)], vec![run(5, 3), run(10, 5)]);
        let first = Selection { now, rest, ..Selection::default() };
        assert_eq!(cut(&runs, &inside, Pages::Calm), first);
        assert_eq!(cut(&runs, &inside, Pages::All), all);
        assert_eq!(cut(&runs, &[span(0, 6)], Pages::All), all, "over a border without a gap");
        let now = vec![run(6, 2), run(10, 5)];
        let next = Selection { written: inside.to_vec(), now, ..Selection::default() };
        assert_eq!(cut(&first.rest, &inside, Pages::Calm), next);
        // The first pages of all, over several runs, and a gap behind them.
        let first = cut(&runs, &[span(0, 9), span(11, 12)], Pages::Calm);
        assert_eq!(first.written, [span(0, 4), span(4, 8)]);
        assert_eq!((first.now, first.rest), (vec![run(10, 1)], vec![run(11, 4)]));
        // Everything.
        let none = cut(&runs, &[span(0, 20)], Pages::Calm);
        assert_eq!(none.written, [span(0, 4), span(4, 8), span(10, 15)]);
        assert!(none.now.is_empty() && none.rest.is_empty());
    }
}
