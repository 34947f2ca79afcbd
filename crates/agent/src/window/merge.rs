//! The merge protocol: one window of a batch.
//!
//! ```text
//! select    runs that can share a window; pages written since the last scan end it
//! refuse    runs without a segment, or without room for their mappings
//! open      writers to the span wait; it leaves tracking
//! compare   a sample of every page with its target; every byte where pages cannot be moved
//! take      equal pages are moved away, unless they are pinned; readers wait too
//! compare   every byte of those, now that nothing can write to them; what differs is put back
//! map       frames, or untouched memory for zeros, in their place
//! close     writers and readers go on; the span is tracked again
//! ```
//!
//! The comparison decides, and not what the daemon expects. Each run of equal pages becomes one
//! mapping.
//!
//! After the window is closed, the pages that were not replaced are marked as clean for tracking
//! again: they were clean in the last scan. A write that slips in before that costs a missed merge
//! at most, since every merge compares. Pages that map a frame are not marked: if one is written,
//! its copy must show in the next scan, or its frame would be kept for ever.

#![allow(unsafe_code)] // Compares and replaces the program's memory.

use std::time::{Duration, Instant};

use kmem::PAGE_SIZE;
use kmem::pagemap::Pagemap;
use kmem::range::Range;
use wire::{MergeRun, Outcome, PageNo, RegionId, Run, Target};

use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::State;
use crate::runtime::state::control::ControlPage;
use crate::runtime::state::maps::MapBudget;
use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segments;
use crate::runtime::state::uffds::Userfaultfds;
use crate::runtime::state::window_uffd::WindowUffd;
use crate::window::anonymous::advise;
use crate::window::compare::{Depth, How, Verdict, Verdicts, changed, compare, end_of_equal, hull};
use crate::window::map::{Taken, give_back, map_frames, map_zeros, take_away};
use crate::window::report::WindowReport;
use crate::window::runs::{advance, end_of_group, span};
use crate::window::select::select;
use crate::window::{MAX_TIME, pins};

/// How long samples are compared. Then the pages are taken, compared and replaced, which takes
/// about four times as long. Whole pages are compared for half of a window: replacing takes as
/// long.
const SAMPLE_TIME: Duration = Duration::from_micros(200);

/// The runs of one window, as far as it gets.
pub(crate) struct Request<'a> {
    /// Their region.
    pub(crate) region: RegionId,
    /// Ascending and disjoint, within [`crate::window::MAX_PAGES`] from the first page to the last.
    pub(crate) runs: &'a [MergeRun],
    /// Pages of the runs that were written since the last scan are left out.
    pub(crate) calm: bool,
    /// The process is checked for pinned and locked memory. Without it that happens only where
    /// taking pages away does not show pins.
    pub(crate) check_held: bool,
    /// This process's; without it windows span pages that are being written.
    pub(crate) pagemap: Option<&'a Pagemap>,
}

/// Carries out one window.
pub(crate) fn merge(state: &mut State, request: &Request<'_>) -> WindowReport {
    let mut window = match Window::select(state, request) {
        Ok(window) => window,
        Err(report) => return report,
    };
    let some_left = window.refuse();
    if some_left && window.open() {
        window.compare(request.check_held);
        window.take_and_map();
        window.close();
        window.mark_clean();
        window.own_stuck();
    }
    window.report
}

/// A merge window, and the parts of the [`State`] that it uses.
struct Window<'s> {
    region: &'s mut Region,
    uffds: &'s mut Userfaultfds,
    segments: &'s Segments,
    maps: &'s mut MapBudget,
    control: &'s mut ControlPage,
    runs: Vec<MergeRun>,
    /// Why each of the runs is refused, if it is.
    refusals: Vec<Option<Outcome>>,
    /// From the first page of the runs to their last.
    span: Run,
    /// Its addresses.
    bytes: Range,
    opened: Instant,
    verdicts: Verdicts,
    /// Equal pages before this one were taken away, or need not be.
    taken: PageNo,
    report: WindowReport,
}

impl<'s> Window<'s> {
    /// The runs of the request that can share a window. Without any, the report says why.
    fn select(state: &'s mut State, request: &Request<'_>) -> Result<Self, WindowReport> {
        let mut report = WindowReport::default();
        let mut runs = request.runs;
        let Some(mut whole) = span(runs) else { return Err(report) };
        let State { regions, uffds, segments, maps, uplink, .. } = state;
        let Some(region) = regions.get_mut(request.region) else {
            report.settle_all(runs, Outcome::Gone);
            return Err(report);
        };
        if !region.manages(whole) {
            // There is a hole somewhere: the runs are taken one by one.
            let (first, rest) = runs.split_at(1);
            report.rest = rest.to_vec();
            (runs, whole) = (first, first[0].run);
            if !region.manages(whole) {
                report.settle_all(runs, Outcome::Gone);
                return Err(report);
            }
        }
        let runs = match request.pagemap {
            Some(pagemap) => {
                let selection = select(region, whole, runs, request.calm, pagemap);
                selection.written.into_iter().for_each(|run| report.settle_written(run, Outcome::Differs));
                report.rest.splice(0..0, selection.rest);
                selection.now
            }
            None => runs.to_vec(),
        };
        let Some(span) = span(&runs) else { return Err(report) };
        Ok(Self {
            bytes: region.bytes(span),
            region,
            uffds,
            segments,
            maps,
            control: &mut uplink.control,
            refusals: Vec::new(),
            verdicts: Vec::with_capacity(runs.len()),
            runs,
            span,
            opened: Instant::now(),
            taken: span.page,
            report,
        })
    }

    /// Refuses runs that lack a segment, or room for their mappings. True if some are left; without
    /// any, the outcome of all is settled.
    fn refuse(&mut self) -> bool {
        let mut new_maps = 0;
        let refusal = |merge: &MergeRun| {
            let Target::Frames { segment, .. } = merge.target else { return None };
            new_maps += 2;
            if !self.maps.has_room(new_maps) {
                Some(Outcome::NoMaps)
            } else if self.segments.get(segment).is_none() {
                Some(Outcome::Failed)
            } else {
                None
            }
        };
        self.refusals = self.runs.iter().map(refusal).collect();
        if self.refusals.iter().any(Option::is_none) {
            return true;
        }
        for (merge, refusal) in self.runs.iter().zip(&self.refusals) {
            refusal.iter().for_each(|&outcome| self.report.settle(merge.run, outcome));
        }
        false
    }

    /// Blocks writers to the span. False if that failed.
    fn open(&mut self) -> bool {
        self.opened = Instant::now();
        self.control.set_window(true);
        let is_open = self.uffds.open_window(self.bytes).is_ok();
        if !is_open {
            self.control.set_window(false);
            self.report.settle_all(&self.runs, Outcome::Gone);
        }
        is_open
    }

    /// Compares the runs with their targets, for a part of the window's time. What is not reached
    /// is left for another window.
    fn compare(&mut self, check_held: bool) {
        // Pins and locks are looked for only now: a thread that pins a page for writing from here
        // on waits for the window, or gets a page of its own.
        let shows_pins = self.uffds.window().is_some_and(WindowUffd::can_check_pins)
            && !self.runs.iter().any(|merge| self.region.mapped.any(merge.run));
        let held = if check_held || !shows_pins { pins::held_memory() } else { None };
        self.report.nothing_held = check_held && held.is_none();
        // Where all pages are compared again when they were taken, a sample will do.
        let (depth, time) = match pin_check(self.uffds) {
            Some(_) if shows_pins => (Depth::Sample, SAMPLE_TIME),
            _ => (Depth::Whole, MAX_TIME / 2),
        };
        let how = How { depth, ask_frames: !self.control.memory_is_sound() };
        let mut readable = PageNo(0);
        for (i, (&merge, &refusal)) in self.runs.iter().zip(&self.refusals).enumerate() {
            if i > 0 && self.opened.elapsed() > time {
                self.report.rest.splice(0..0, self.runs[i..].iter().copied());
                self.report.ran_out = true;
                break;
            }
            match held.or(refusal) {
                Some(outcome) => self.verdicts.push((merge.run, Verdict::Settled(outcome))),
                // SAFETY: the window is open over all runs, and no page was taken yet. A run that
                // leaves its segment does not decode.
                None => unsafe {
                    let group = end_of_group(&self.runs[i..]);
                    compare(self.region, self.segments, merge, how, group, &mut readable, &mut self.verdicts);
                },
            }
        }
    }

    /// Replaces the pages that equal their targets, and settles the outcome of all others.
    fn take_and_map(&mut self) {
        let verdicts = std::mem::take(&mut self.verdicts);
        let hull = hull(&verdicts);
        if sabotage::is_on(Sabotage::SlowTake) {
            std::thread::sleep(Duration::from_secs(1));
        }
        let readers_blocked = match (hull, pin_check(self.uffds)) {
            (Some(hull), Some(uffd)) => uffd.block_readers(self.region.bytes(hull)).is_ok(),
            _ => true,
        };
        let mut at = self.span.page;
        let mut mapped = false;
        for (i, (run, verdict)) in verdicts.iter().enumerate() {
            self.report.leave(Run::between(at, run.page));
            at = run.end();
            match verdict {
                // SAFETY: the verdict is the comparison's, in this window; where pages can be
                // checked for pins, readers are blocked.
                Verdict::Equal(target) if readers_blocked => mapped |= unsafe { self.replace(*target, &verdicts[i..]) },
                Verdict::Equal(_) => self.report.settle(*run, Outcome::Gone),
                Verdict::Settled(outcome) => self.report.settle(*run, *outcome),
            }
        }
        if let Some(hull) = hull.filter(|_| mapped) {
            // In one call for all. Pages that were not replaced have had this advice before.
            let place = self.region.bytes(hull);
            advise(self.region, place, false);
        }
        self.report.leave(Run::between(at, self.span.end()));
    }

    /// Replaces the pages of the first verdict; pages that cannot be taken away are left out.
    /// Whether any was replaced.
    ///
    /// # Safety
    ///
    /// The window is open. The pages of the first verdict equal `target`; the further verdicts
    /// follow it in this window. Where there is a [`pin_check`], readers are blocked.
    unsafe fn replace(&mut self, target: Target, verdicts: &[(Run, Verdict)]) -> bool {
        let run = verdicts[0].0;
        let mut mapped = false;
        let mut left = run;
        while left.len > 0 {
            if self.taken <= left.page {
                // As many pages as possible at a time: the system call is what costs.
                let equal = Run::between(left.page, end_of_equal(verdicts));
                // SAFETY: all pages of `equal` equal their targets. Each of them is mapped, or put
                // back, before the window closes: here, or in the call for its own verdict.
                self.taken = unsafe { self.take(equal) };
            }
            let ready = Run::between(left.page, self.taken.min(left.end()));
            if ready.len > 0 {
                // SAFETY: the pages equalled this part of the target, and were taken away if they
                // can be.
                mapped |= unsafe { self.map_unchanged(ready, advance(target, ready.page - run.page)) };
                left = Run::between(ready.end(), left.end());
            }
            if left.len > 0 {
                let stuck = Run::one(left.page);
                self.report.stuck.push(stuck);
                self.report.settle(stuck, Outcome::Failed);
                left = Run::between(stuck.end(), left.end());
                self.taken = left.page;
            }
        }
        mapped
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
    /// Whether any was replaced.
    ///
    /// Since the comparison a device may have written to a page by a pin, and let go of it. Then it
    /// was not pinned when it was taken, and is put back. Nobody reaches a page that was taken.
    ///
    /// # Safety
    ///
    /// The window is open, and the pages equalled the target when they were compared.
    unsafe fn map_unchanged(&mut self, ready: Run, target: Target) -> bool {
        let merge = MergeRun { run: ready, target };
        if sabotage::is_on(Sabotage::SlowTake) {
            std::thread::sleep(Duration::from_secs(1));
        }
        let taken = pin_check(self.uffds).and_then(|uffd| uffd.taken_at(self.offset(ready.page)));
        let changed = match taken {
            // SAFETY: the pages were taken to there in this window. A run that leaves its segment
            // does not decode. The kernel's answers to the comparison are as old as the window.
            Some(taken) => unsafe {
                let ask = self.opened.elapsed() > MAX_TIME;
                changed(self.region, self.segments, merge, taken, ask)
            },
            None => Vec::new(),
        };
        let (mut at, mut mapped) = (ready.page, false);
        for (page, outcome) in changed.into_iter().chain([(ready.end(), Outcome::Merged)]) {
            let part = Run::between(at, page);
            if part.len > 0 {
                // SAFETY: the pages equal this part of the target.
                let outcome = unsafe { self.map(part, advance(target, at - ready.page)) };
                mapped |= outcome == Outcome::Merged;
                self.report.settle(part, outcome);
            }
            if page < ready.end() {
                self.give_back(Run::one(page), outcome);
            }
            at = page + 1;
        }
        mapped
    }

    /// Puts a page back that was taken, and does not equal its target any more. The kernel goes on
    /// counting it as written.
    fn give_back(&mut self, page: Run, outcome: Outcome) {
        let offset = self.offset(page.page);
        let is_back = pin_check(self.uffds).is_none_or(|uffd| give_back(self.region, page, Taken { uffd, offset }));
        self.report.settle_written(page, if is_back { outcome } else { Outcome::Gone });
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
            Target::Zero => unsafe { map_zeros(self.region, run, self.maps, taken.is_some()) },
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

    /// Lets all threads go on.
    fn close(&mut self) {
        self.uffds.close_window(self.bytes);
        self.control.set_window(false);
        if self.uffds.take_forks() {
            self.control.count_fork();
        }
        self.report.time = self.opened.elapsed();
        if let Some(uffd) = self.uffds.window() {
            uffd.discard_taken(self.bytes.len);
        }
    }

    /// Marks the pages that were left as they were as clean, except those that map a frame.
    fn mark_clean(&mut self) {
        for run in std::mem::take(&mut self.report.untouched) {
            let mut left = run;
            while let Some(gap) = self.region.mapped.next_gap(left) {
                self.uffds.mark_clean(self.region.bytes(gap));
                left = Run::between(gap.end(), left.end());
            }
        }
    }

    /// Where a fork may be the reason that pages could not be taken, makes them ready for the next
    /// time.
    fn own_stuck(&self) {
        if self.control.forks() > 0 && self.region.is_inherited() {
            self.report.stuck.iter().for_each(|&page| pins::own(self.region.bytes(page)));
        }
    }
}

/// The userfaultfd that tells pinned pages from others, where the kernel can.
fn pin_check(uffds: &Userfaultfds) -> Option<&WindowUffd> {
    uffds.window().filter(|uffd| uffd.can_check_pins() && !sabotage::is_on(Sabotage::NoPinCheck))
}
