//! The merge protocol: one window of a batch.
//!
//! ```text
//! select    runs that can share a window; pages written since the last scan end it
//! refuse    runs without a segment, or without room for their mappings
//! look      at some pages: those that differ are left alone
//! open      a part of the window leaves tracking
//! take      some pages are moved away, unless they are pinned; who touches them waits
//! compare   every byte of those, now that nobody can write to them; what differs is put back
//! map       frames, or untouched memory for zeros, in their place; then the next pages are taken
//! close     all threads go on; the part is tracked again
//! ```
//!
//! The comparison decides, and not what the daemon expects. Each run of equal pages becomes one
//! mapping. Pages that are left alone keep their place in a virtual machine's stage-2 page tables;
//! so a part reaches over few of them ([`PART_GAP`]).
//!
//! Where pages cannot be moved ([`crate::runtime::state::window_uffd`]) the window is one part,
//! whose writers wait from the beginning, and pages are compared in place.
//!
//! After a part is closed, its pages that were not replaced are marked as clean for tracking again,
//! as they were in the last scan. A write before that costs a missed merge at most: every merge
//! compares, and the daemon's change logs list all pages of a window. Pages that map a frame are
//! marked only as long as they do: a copy must show in the next scan, or its frame would be kept
//! for ever.

#![allow(unsafe_code)] // Compares and replaces the program's memory.

use std::collections::VecDeque;
use std::ops;
use std::time::{Duration, Instant};

use kmem::pagemap::{Categories, Query};
use kmem::range::Range;
use wire::{MergeRun, Outcome, PageNo, RegionId, Run, Target};

use crate::runtime::proc_files::ProcFiles;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::sharers::SHARERS;
use crate::runtime::state::State;
use crate::runtime::state::control::{self, ControlPage};
use crate::runtime::state::maps::MapBudget;
use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segments;
use crate::runtime::state::uffds::Userfaultfds;
use crate::runtime::state::window_uffd::WindowUffd;
use crate::window::compare::{Memory, Verdict, Verdicts, compare, hull};
use crate::window::look::Looked;
use crate::window::report::WindowReport;
use crate::window::runs::{end_of_group, span};
use crate::window::select::{Pages, select};
use crate::window::{MAX_TIME, pins};

mod take;

/// From then on no more pages are taken. Replacing those that were takes the rest of the time.
const TAKE_TIME: Duration = Duration::from_micros(800);
/// Most pages between two runs of a part. To open and close a part takes some system calls, and
/// costs as much as this many pages that leave stage-2 page tables for nothing.
const PART_GAP: u32 = 8;

/// The runs of one window, as far as it gets.
pub(crate) struct Request<'a> {
    pub(crate) region: RegionId,
    /// Ascending and disjoint, within [`crate::window::MAX_PAGES`] from the first page to the last.
    pub(crate) runs: &'a [MergeRun],
    /// Which of their pages.
    pub(crate) pages: Pages,
    /// Whether the process is checked for pinned and locked memory.
    pub(crate) check: HeldCheck,
}

/// When the process is checked for pinned and locked memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeldCheck {
    Now,
    /// Only where taking shows no pins: an earlier window of the batch has found none.
    IfUnseen,
}

/// Carries out one window.
pub(crate) fn merge(state: &mut State, request: &Request<'_>) -> WindowReport {
    if is_shared() {
        let mut report = WindowReport::default();
        report.settle_all(request.runs, Outcome::Failed);
        return report;
    }
    let mut window = match Window::select(state, request) {
        Ok(window) => window,
        Err(report) => return report,
    };
    if window.refuse() {
        if window.can_take() {
            window.take_parts(request.check);
        } else {
            window.compare_and_map(request.check);
        }
        window.mark_clean();
        window.unshare_stuck();
    }
    window.report
}

/// Whether another process would be left alone with an open window, if this one were killed.
fn is_shared() -> bool {
    !sabotage::is_on(Sabotage::NoSharerCheck) && SHARERS.any()
}

/// A merge window, and the parts of the [`State`] that it uses.
struct Window<'s> {
    region: &'s mut Region,
    uffds: &'s mut Userfaultfds,
    files: &'s ProcFiles,
    segments: &'s Segments,
    maps: &'s mut MapBudget,
    control: &'s mut ControlPage,
    runs: Vec<MergeRun>,
    /// Why each of the runs is refused, if it is.
    refusals: Vec<Option<Outcome>>,
    /// From the first page of the runs to their last.
    span: Run,
    opened: Instant,
    verdicts: Verdicts,
    taking: Taking,
    report: WindowReport,
}

/// How far the pages of a window were taken away.
struct Taking {
    /// Nobody has compared them before.
    is_uncompared: bool,
    /// Some page was taken away.
    has_begun: bool,
    /// Equal pages before this one were taken away, or need not be.
    next: PageNo,
    /// Those of them that do not equal their target, and why, ascending.
    changed: VecDeque<(PageNo, Outcome)>,
}

impl<'s> Window<'s> {
    /// The runs of the request that can share a window. Without any, the report says why.
    fn select(state: &'s mut State, request: &Request<'_>) -> Result<Self, WindowReport> {
        let mut report = WindowReport::default();
        let mut runs = request.runs;
        let Some(mut whole) = span(runs) else { return Err(report) };
        let State { regions, uffds, files, segments, maps, uplink, .. } = state;
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
        // Without a page map windows span pages that are being written.
        let runs = match files.pagemap_from_start() {
            Some(pagemap) => {
                let selection = select(region, whole, runs, request.pages, pagemap);
                selection.written.into_iter().for_each(|run| report.settle_as_is(run, Outcome::Differs));
                report.rest.splice(0..0, selection.rest);
                selection.now
            }
            None => runs.to_vec(),
        };
        let Some(span) = span(&runs) else { return Err(report) };
        Ok(Self {
            region,
            uffds,
            files,
            segments,
            maps,
            control: &mut uplink.control,
            refusals: Vec::new(),
            verdicts: Vec::with_capacity(runs.len()),
            runs,
            span,
            opened: Instant::now(),
            taking: Taking { is_uncompared: false, has_begun: false, next: span.page, changed: VecDeque::new() },
            report,
        })
    }

    /// Refuses runs that lack a segment, or room for their mappings. False: all outcomes are
    /// settled.
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

    /// Whether all pages can be moved away, so that they are compared where nobody reaches them.
    fn can_take(&self) -> bool {
        pin_check(self.uffds).is_some()
            && self.control.memory_is_sound()
            && !self.runs.iter().any(|merge| self.region.mapped.any(merge.run))
    }

    /// Why no page of this process may be merged now.
    fn held(&mut self) -> Option<Outcome> {
        let held = pins::held_memory(self.files);
        self.report.nothing_held |= held.is_none();
        held
    }

    /// Takes the pages that look like their targets, part by part, and replaces those that equal
    /// them. A page that is pinned or locked meanwhile cannot be taken.
    fn take_parts(&mut self, check: HeldCheck) {
        if check == HeldCheck::Now
            && let Some(outcome) = self.held()
        {
            return self.runs.iter().for_each(|merge| self.report.settle_as_is(merge.run, outcome));
        }
        self.taking.is_uncompared = true;
        self.look();
        let verdicts = std::mem::take(&mut self.verdicts);
        self.opened = Instant::now();
        let mut done = 0;
        while let Some(part) = next_part(&verdicts[done..]) {
            let (before, part) = (&verdicts[done..done + part.start], &verdicts[done + part.start..done + part.end]);
            self.settle_as_is(before);
            done += before.len() + part.len();
            if self.is_out_of_time() {
                return self.leave_rest(part[0].0.page, &verdicts);
            }
            let span = self.region.bytes(Run::between(part[0].0.page, part[part.len() - 1].0.end()));
            self.control.tell_window(control::Window::Open);
            if self.uffds.open_taking(span).is_err() {
                self.control.tell_window(control::Window::Closed);
                part.iter().for_each(|(run, _)| self.report.settle(*run, Outcome::Gone));
                continue;
            }
            let stopped = self.take_and_map(part);
            self.close(span);
            if let Some(page) = stopped {
                return self.leave_rest(page, &verdicts);
            }
        }
        self.settle_as_is(&verdicts[done..]);
    }

    /// Settles what is known of pages that are in no part, and were left alone.
    fn settle_as_is(&mut self, verdicts: &[(Run, Verdict)]) {
        for (run, verdict) in verdicts {
            if let Verdict::Settled(outcome) = verdict {
                self.report.settle_as_is(*run, *outcome);
            }
        }
    }

    /// Compares the pages in place while writers wait, and replaces those that equal their targets.
    fn compare_and_map(&mut self, check: HeldCheck) {
        let span = self.region.bytes(self.span);
        self.opened = Instant::now();
        self.control.tell_window(control::Window::Open);
        if self.uffds.open_window(span).is_err() {
            self.control.tell_window(control::Window::Closed);
            return self.report.settle_all(&self.runs, Outcome::Gone);
        }
        // Pins and locks are looked for only now: a thread that pins a page for writing from here
        // on waits for the window, or gets a page of its own.
        let shows_pins = self.uffds.window().is_some_and(WindowUffd::can_check_pins)
            && !self.runs.iter().any(|merge| self.region.mapped.any(merge.run));
        let held = if check == HeldCheck::Now || !shows_pins { self.held() } else { None };
        match held {
            Some(outcome) => self.report.settle_all(&self.runs, outcome),
            None => {
                self.compare_in_place();
                let verdicts = std::mem::take(&mut self.verdicts);
                let end = verdicts.last().map_or(self.span.page, |(run, _)| run.end());
                let stopped = match (hull(&verdicts), pin_check(self.uffds)) {
                    (Some(hull), Some(uffd)) if uffd.block_readers(self.region.bytes(hull)).is_err() => {
                        verdicts.iter().for_each(|(run, _)| self.report.settle(*run, Outcome::Gone));
                        None
                    }
                    _ => self.take_and_map(&verdicts),
                };
                if let Some(page) = stopped {
                    self.leave_rest(page, &verdicts);
                }
                self.report.leave(Run::between(end, self.span.end()));
            }
        }
        self.close(span);
    }

    /// Looks at some pages. All of them are compared when they were taken.
    fn look(&mut self) {
        let runs = self.runs.iter().zip(&self.refusals);
        let wanted = runs.clone().filter(|(_, refusal)| refusal.is_none()).map(|(&merge, _)| merge);
        // SAFETY: the daemon writes no frame that a page may map, and no memory has failed. A run
        // that leaves its segment does not decode.
        let mut looked = unsafe { Looked::at(self.region, self.segments, wanted) };
        for (&merge, refusal) in runs {
            match *refusal {
                Some(outcome) => self.verdicts.push((merge.run, Verdict::Settled(outcome))),
                None => looked.tell(merge, &mut self.verdicts),
            }
        }
    }

    /// Compares the runs with their targets, for half of the window's time: replacing takes as
    /// long. What is not reached is left for another window.
    fn compare_in_place(&mut self) {
        let frames = if self.control.memory_is_sound() { Memory::Sound } else { Memory::Unsure };
        let mut readable = PageNo(0);
        for (i, (&merge, &refusal)) in self.runs.iter().zip(&self.refusals).enumerate() {
            if i > 0 && self.opened.elapsed() > MAX_TIME / 2 {
                self.report.rest.splice(0..0, self.runs[i..].iter().copied());
                self.report.ran_out = true;
                break;
            }
            match refusal {
                Some(outcome) => self.verdicts.push((merge.run, Verdict::Settled(outcome))),
                // SAFETY: the window is open over all runs, and no page was taken yet. A run that
                // leaves its segment does not decode.
                None => unsafe {
                    let group = end_of_group(&self.runs[i..]);
                    compare(self.region, self.segments, merge, frames, group, &mut readable, &mut self.verdicts);
                },
            }
        }
    }

    /// No more pages are taken in this window.
    fn is_out_of_time(&self) -> bool {
        self.taking.has_begun && self.opened.elapsed() > TAKE_TIME
    }

    /// Lets all threads go on that wait in a part of the window.
    fn close(&mut self, part: Range) {
        self.uffds.close_window(part);
        self.control.tell_window(control::Window::Closed);
        if self.uffds.take_forks() {
            self.control.count_fork();
        }
        self.report.time = self.opened.elapsed();
        self.mark_frames(part);
        if let Some(uffd) = self.uffds.window() {
            let offset = part.start - self.region.bytes(self.span).start;
            uffd.discard_taken(Range::new(offset, part.len));
        }
    }

    /// Marks pages that map a frame as clean, in one step with asking whether they still do: the
    /// next scan would do it, and a guest that has read them meanwhile would fault on them again.
    fn mark_frames(&self, part: Range) {
        let frames = Categories::WRITTEN | Categories::PRESENT | Categories::FILE;
        if let Some(pagemap) = self.files.pagemap_from_start() {
            // What is not marked is found by the next scan.
            let _ = pagemap.protect(part, &Query { required: frames, ..Query::default() });
        }
    }

    /// Marks the pages that were left as they were as clean, except those that map a frame.
    fn mark_clean(&mut self) {
        for run in std::mem::take(&mut self.report.untouched) {
            self.region.mapped.gaps(run).for_each(|gap| self.uffds.mark_clean(self.region.bytes(gap)));
        }
    }

    /// Where a fork may be the reason that pages could not be taken, makes them ready for the next
    /// time.
    fn unshare_stuck(&self) {
        if self.control.forks() > 0 && self.region.is_inherited() {
            self.report.stuck.iter().for_each(|&page| pins::unshare(self.region.bytes(page), self.files));
        }
    }
}

/// The first verdicts that share a part: pages that may be taken, with what lies between them.
fn next_part(verdicts: &[(Run, Verdict)]) -> Option<ops::Range<usize>> {
    let mut wanted = (0..).zip(verdicts).filter(|(_, (_, verdict))| matches!(verdict, Verdict::Equal(_)));
    let (start, &(first, _)) = wanted.next()?;
    let (mut end, mut last) = (start + 1, first);
    for (i, &(run, _)) in wanted {
        if run.page - last.end() > PART_GAP {
            break;
        }
        (end, last) = (i + 1, run);
    }
    Some(start..end)
}

/// The userfaultfd that tells pinned pages from others, where the kernel can.
fn pin_check(uffds: &Userfaultfds) -> Option<&WindowUffd> {
    uffds.window().filter(|uffd| uffd.can_check_pins() && !sabotage::is_on(Sabotage::NoPinCheck))
}
