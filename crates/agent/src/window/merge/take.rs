//! The second half of a window: pages are taken, compared and replaced, some at a time.
//!
//! See [the protocol](super). Pages go to the scratch area, each at its offset in the window.

#![allow(unsafe_code)] // Replaces the program's memory.

use std::time::Duration;

use kmem::PAGE_SIZE;
use kmem::range::Range;
use wire::{MergeRun, Outcome, PageNo, Run, Target};

use super::{Window, pin_check};
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::window_uffd::PutBack;
use crate::window::MAX_TIME;
use crate::window::anonymous::{Backing, advise};
use crate::window::compare::{Memory, Verdict, changed, end_of_equal};
use crate::window::map::{Taken, give_back, map_frames, map_zeros, put_back, take_away};
use crate::window::runs::{advance, split};
use crate::window::safe_read::Presence;

/// Pages that are taken and compared, and then replaced: the processor's caches serve comparing and
/// mapping badly in turns. A run is taken as a whole.
const TAKE_PAGES: u32 = 128;

impl Window<'_> {
    /// Replaces the pages of an open part that equal their targets, and settles the outcome of all
    /// others. Returns the first page that there was no time for.
    pub(super) fn take_and_map(&mut self, part: &[(Run, Verdict)]) -> Option<PageNo> {
        let (first, last) = (part.first()?.0, part.last()?.0);
        if sabotage::is_on(Sabotage::SlowTake) {
            std::thread::sleep(Duration::from_secs(1));
        }
        let mut at = first.page;
        let (mut mapped, mut stopped) = (false, None);
        for (i, &(run, ref verdict)) in part.iter().enumerate() {
            if self.taking.next <= run.page && self.is_out_of_time() {
                stopped = Some(run.page);
                break;
            }
            self.report.leave(Run::between(at, run.page));
            at = run.end();
            match *verdict {
                // SAFETY: the part is open, and its writers wait, or all its pages are taken and
                // compared before they are replaced.
                Verdict::Equal(target) => mapped |= unsafe { self.replace(target, &part[i..]) },
                Verdict::Settled(outcome) => self.report.settle(run, outcome),
            }
        }
        if mapped {
            // In one call for all. Pages that were not replaced have had this advice before.
            let place = self.region.bytes(Run::between(first.page, last.end()));
            advise(self.region, place, Backing::Segment);
        }
        self.report.leave(Run::between(at, last.end()));
        stopped
    }

    /// Leaves the runs with a verdict to another window, from this page on.
    pub(super) fn leave_rest(&mut self, page: PageNo, verdicts: &[(Run, Verdict)]) {
        let end = verdicts.last().map_or(page, |(run, _)| run.end());
        let rest = self.runs.iter().filter(|merge| merge.run.end() > page && merge.run.page < end).map(|&merge| {
            match page.0.checked_sub(merge.run.page.0) {
                None | Some(0) => merge,
                Some(done) => split(merge, done).1,
            }
        });
        self.report.rest.splice(0..0, rest.collect::<Vec<_>>());
        self.report.ran_out = true;
    }

    /// Replaces the pages of the first verdict; pages that cannot be taken away are left out.
    /// Whether any was replaced.
    ///
    /// # Safety
    ///
    /// A part is open. The pages of the first verdict equal `target`, as far as they were compared;
    /// the further verdicts follow it in this part. Where there is a [`pin_check`], who touches a
    /// missing page waits.
    unsafe fn replace(&mut self, target: Target, verdicts: &[(Run, Verdict)]) -> bool {
        let run = verdicts[0].0;
        let mut mapped = false;
        let mut left = run;
        while left.len > 0 {
            if self.taking.next <= left.page {
                // SAFETY: this function's contract is that of the call.
                unsafe { self.take_ahead(left.page, verdicts) };
            }
            let ready = Run::between(left.page, self.taking.next.min(left.end()));
            if ready.len > 0 {
                // SAFETY: the pages were taken away if they can be, and compared with this part of
                // the target.
                mapped |= unsafe { self.map_unchanged(ready, advance(target, ready.page - run.page)) };
                left = Run::between(ready.end(), left.end());
            }
            if left.len > 0 {
                let stuck = Run::one(left.page);
                self.report.stuck.push(stuck);
                self.report.settle(stuck, Outcome::Failed);
                left = Run::between(stuck.end(), left.end());
                self.taking.next = left.page;
            }
        }
        mapped
    }

    /// Takes the pages from `first` on, as many as are replaced next, and compares them.
    ///
    /// # Safety
    ///
    /// That of [`Window::replace`]. `first` lies in the first verdict, and none of the pages from
    /// there on was taken.
    unsafe fn take_ahead(&mut self, first: PageNo, verdicts: &[(Run, Verdict)]) {
        let mut at = first;
        for (i, (run, verdict)) in verdicts.iter().enumerate() {
            if run.end() <= at || !matches!(verdict, Verdict::Equal(_)) {
                continue;
            }
            if at - first >= TAKE_PAGES {
                break;
            }
            // As many pages as possible at a time: the system call is what costs.
            let equal = Run::between(at.max(run.page), end_of_equal(&verdicts[i..], TAKE_PAGES));
            // SAFETY: all pages of `equal` equal their targets, as far as they were looked at. Each
            // of them is mapped, or put back, before the window closes: by `map_unchanged`.
            at = unsafe { self.take(equal) };
            if at < equal.end() {
                break;
            }
        }
        self.taking.next = at;
        self.taking.has_begun |= at > first;
        let all = Run::between(first, at);
        if sabotage::is_on(Sabotage::SlowTake) {
            std::thread::sleep(Duration::from_secs(1));
        }
        let Some(taken) = pin_check(self.uffds).and_then(|uffd| uffd.taken_at(self.offset(first))) else { return };
        let present = self.taking.is_uncompared.then(|| Presence::of(Range::new(taken, self.region.bytes(all).len)));
        let is_old = self.opened.elapsed() > MAX_TIME;
        for &(run, ref verdict) in verdicts {
            let (&Verdict::Equal(target), Some(part)) = (verdict, run.intersect(all)) else { continue };
            let merge = MergeRun { run: part, target: advance(target, part.page - run.page) };
            let offset = (part.page - first) as usize;
            let taken = taken + offset * PAGE_SIZE;
            let unsure = is_old || present.as_ref().is_some_and(|present| !present.all(offset, part.len as usize));
            let memory = if unsure { Memory::Unsure } else { Memory::Sound };
            // SAFETY: the pages were taken to there in this window. A run that leaves its segment
            // does not decode. The kernel's answers to the comparison are as old as the window, and
            // pages that it was not asked for are in memory.
            self.taking.changed.extend(unsafe { changed(self.region, self.segments, merge, taken, memory) });
        }
    }

    /// Moves pages to the scratch area, as far as they are not pinned. Returns the first that
    /// stays, or the end. Where pins cannot be seen nothing is moved.
    ///
    /// # Safety
    ///
    /// Where there is a [`pin_check`], the contract of [`WindowUffd::take_away`] holds for the
    /// pages.
    unsafe fn take(&self, run: Run) -> PageNo {
        match pin_check(self.uffds) {
            Some(uffd) => {
                let to = Taken { uffd, offset: self.offset(run.page) };
                // SAFETY: this function's contract is that of the call. Each page of the window has
                // a place of its own in the scratch area, which was emptied after the last window.
                unsafe { take_away(self.region, run, to) }
            }
            None => run.end(),
        }
    }

    /// Maps the target over pages that were taken away, if they can be, and settles their outcome.
    /// Those that differ are put back. Whether any was replaced.
    ///
    /// Since the pages were looked at a device may have written to one by a pin, and let go of it.
    /// Then it was not pinned when it was taken. Nobody reaches a page that was taken.
    ///
    /// # Safety
    ///
    /// The window is open, and all pages but the changed ones ([`super::Taking`]) equal the target.
    unsafe fn map_unchanged(&mut self, ready: Run, target: Target) -> bool {
        let (mut at, mut mapped) = (ready.page, false);
        while at < ready.end() {
            let changed = self.next_changed(ready.end());
            let end = changed.map_or(ready.end(), |(run, _)| run.page);
            let part = Run::between(at, end);
            if part.len > 0 {
                // SAFETY: the pages equal this part of the target.
                let outcome = unsafe { self.map(part, advance(target, at - ready.page)) };
                mapped |= outcome == Outcome::Merged;
                self.report.settle(part, outcome);
            }
            at = end;
            if let Some((run, outcome)) = changed {
                self.give_back(run, outcome);
                at = run.end();
            }
        }
        mapped
    }

    /// The next pages before `end` that were taken and do not equal their target.
    fn next_changed(&mut self, end: PageNo) -> Option<(Run, Outcome)> {
        let (page, outcome) = self.taking.changed.front().copied().filter(|&(page, _)| page < end)?;
        let mut run = Run::new(page, 0);
        while run.end() < end && self.taking.changed.front() == Some(&(run.end(), outcome)) {
            self.taking.changed.pop_front();
            run.len += 1;
        }
        Some((run, outcome))
    }

    /// Puts pages back that were taken, and do not equal their target. The kernel goes on counting
    /// them as written.
    fn give_back(&mut self, run: Run, outcome: Outcome) {
        let Some(uffd) = pin_check(self.uffds) else { return self.report.settle_as_is(run, outcome) };
        let from = |page: PageNo| Taken { uffd, offset: (page - self.span.page) as usize * PAGE_SIZE };
        if put_back(self.region, run, from(run.page)) == PutBack::Done {
            return self.report.settle_as_is(run, outcome);
        }
        for page in run.pages() {
            let is_back = give_back(self.region, Run::one(page), from(page));
            self.report.settle_as_is(Run::one(page), if is_back { outcome } else { Outcome::Gone });
        }
    }

    /// Maps the target over pages that were taken away, if they can be.
    ///
    /// # Safety
    ///
    /// The window is open, and the pages equal the target.
    unsafe fn map(&mut self, run: Run, target: Target) -> Outcome {
        let offset = self.offset(run.page);
        let taken = pin_check(self.uffds).map(|uffd| Taken { uffd, offset });
        match target {
            // SAFETY: this function's contract covers it.
            Target::Zero => unsafe { map_zeros(self.region, run, self.maps, taken) },
            Target::Frames { segment, slot } => match self.segments.get(segment) {
                // SAFETY: this function's contract covers it. A run that leaves its segment does
                // not decode, and every segment has its full length.
                Some(segment) => unsafe { map_frames(self.region, run, segment, slot, self.maps, taken) },
                // Not reached: the comparison found the segment, under the same lock.
                None => Outcome::Failed,
            },
        }
    }

    /// Where a page of the window goes in the scratch area, in bytes.
    fn offset(&self, page: PageNo) -> usize {
        (page - self.span.page) as usize * PAGE_SIZE
    }
}
