//! The change log: what a client has changed since a checkpoint of it.
//!
//! The kernel notes which pages were written, and the daemon's scans clear the notes. So the
//! daemon keeps what scans have found since the checkpoint, and the pages that an agent was told
//! to merge: a window clears notes of pages that it does not replace. Later writes are still in
//! the kernel's notes. Pages that were given back are not listed: they read as zeros, as the page
//! map tells.
//!
//! The log may list too much, never too little. It is dropped when it is not complete: after a
//! scan that failed, when the list gets long, with another freeze, and with the client's
//! connection.
//!
//! *Devices write without a note.* The kernel notes a page when a direct I/O request pins it; the
//! request may write later. So for a process that may do direct I/O, pages written within the last
//! one or two cooldown periods count as changed (see [`crate::core::ledger`]): no request takes
//! longer.

use control::ChangeLog;
use kmem::PAGE_SIZE;
use kmem::range::Range;
use wire::PageNo;

use crate::client::batch::PlannedRun;

/// Parts of memory that a log lists at most, 16 bytes each.
const MOST: usize = 1 << 16;
/// Parts are joined when there are twice as many as after the last time, and at least this many.
const JOIN_FROM: usize = 1 << 12;

/// A [`ChangeLog`] as it grows.
#[derive(Debug)]
pub(crate) struct Log {
    label: String,
    /// Parts of memory, begin and end; they may overlap.
    parts: Vec<(usize, usize)>,
    join_at: usize,
}

impl Log {
    /// A log of which nothing is known but the moment it begins.
    pub(crate) fn new(label: String) -> Self {
        Self { label, parts: Vec::new(), join_at: 0 }
    }

    pub(crate) fn add(&mut self, range: Range) {
        match self.parts.last_mut() {
            Some((_, end)) if *end == range.start => *end = range.end(),
            _ => self.parts.push((range.start, range.end())),
        }
        if self.parts.len() >= self.join_at.max(JOIN_FROM) {
            self.join();
        }
    }

    /// Sorts the parts, and joins those that overlap or touch.
    fn join(&mut self) {
        self.parts.sort_unstable();
        self.parts.dedup_by(|next, last| {
            let joins = next.0 <= last.1;
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
        self.join_at = 2 * self.parts.len();
    }

    /// An agent is told to merge these pages of a region that begins at `region`. Its windows span
    /// the pages between them, too.
    pub(crate) fn batch(&mut self, region: u64, runs: &[PlannedRun]) {
        let address = |page: PageNo| region as usize + page.index() * PAGE_SIZE;
        for (i, PlannedRun { run, .. }) in runs.iter().enumerate() {
            let own = run.end();
            let end = match runs.get(i + 1) {
                Some(PlannedRun { run: next, .. }) if next.page > own && next.page - own <= wire::MAX_WINDOW_PAGES => {
                    next.page
                }
                _ => own,
            };
            self.add(Range::new(address(run.page), (end - run.page) as usize * PAGE_SIZE));
        }
    }

    /// Whether there are more parts than a log lists.
    pub(crate) fn is_too_long(&mut self) -> bool {
        if self.parts.len() > MOST {
            self.join();
        }
        self.parts.len() > MOST
    }

    pub(crate) fn end(mut self) -> ChangeLog {
        self.join();
        let changed = self.parts.iter().map(|&(start, end)| (start as u64, (end - start) as u64)).collect();
        ChangeLog { label: self.label, changed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::Run;

    use crate::client::batch::Target;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn pages(log: Log) -> Vec<(u64, u64)> {
        log.end().changed.iter().map(|(start, len)| (start / PAGE, len / PAGE)).collect()
    }

    #[test]
    fn parts_are_joined() {
        let mut log = Log::new("x".into());
        for page in [9, 3, 4, 5, 4, 20] {
            log.add(Range::new(page * PAGE_SIZE, PAGE_SIZE));
        }
        log.add(Range::new(2 * PAGE_SIZE, 10 * PAGE_SIZE));
        assert_eq!(pages(log), [(2, 10), (20, 1)]);
    }

    #[test]
    fn what_lies_between_the_runs_of_a_window_counts() {
        let mut log = Log::new("x".into());
        let run = |page, len| PlannedRun { run: Run::new(PageNo(page), len), target: Target::Zero };
        log.batch(100 * PAGE, &[run(1, 2), run(10, 1), run(600, 3), run(601 + 2 * 512, 1), run(5, 1)]);
        let far = wire::MAX_WINDOW_PAGES;
        assert_eq!(far, 512);
        assert_eq!(pages(log), [(101, 10), (700, 3), (1725, 1)], "589 pages apart share no window");
    }

    #[test]
    fn a_list_that_gets_long_is_noticed() {
        let mut log = Log::new("x".into());
        for page in 0..MOST {
            log.add(Range::new(2 * page * PAGE_SIZE, PAGE_SIZE));
            log.add(Range::new(2 * page * PAGE_SIZE, PAGE_SIZE));
        }
        assert!(!log.is_too_long());
        log.add(Range::new(2 * MOST * PAGE_SIZE, PAGE_SIZE));
        assert!(log.is_too_long());
    }
}
