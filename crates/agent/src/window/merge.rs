//! The merge protocol: one window of a batch.
//!
//! ```text
//! select    runs that can share a window; pages written since the last scan end it
//! refuse    runs without a segment, or without room for their mappings
//! open      writers to the span wait; it leaves tracking
//! look      at some pages; where pages cannot be moved every byte is compared
//! take      some pages are moved away, unless they are pinned; readers wait too
//! compare   every byte of those, now that nothing can write to them; what differs is put back
//! map       frames, or untouched memory for zeros, in their place; then the next pages are taken
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

use std::collections::VecDeque;
use std::time::Instant;

use kmem::range::Range;
use wire::{MergeRun, Outcome, PageNo, RegionId, Run, Target};

use crate::runtime::own_files::OwnFiles;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::State;
use crate::runtime::state::control::ControlPage;
use crate::runtime::state::maps::MapBudget;
use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segments;
use crate::runtime::state::uffds::Userfaultfds;
use crate::runtime::state::window_uffd::WindowUffd;
use crate::window::compare::{Verdict, Verdicts, compare};
use crate::window::look::Looked;
use crate::window::report::WindowReport;
use crate::window::runs::{end_of_group, span};
use crate::window::select::select;
use crate::window::{MAX_TIME, pins};

mod take;

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
    files: &'s OwnFiles,
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
    /// Pages are taken that nobody has looked at.
    unseen: bool,
    /// Equal pages before this one were taken away, or need not be.
    taken: PageNo,
    /// Those of them that do not equal their target, and why, ascending.
    changed: VecDeque<(PageNo, Outcome)>,
    report: WindowReport,
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
        let runs = match files.kept_pagemap() {
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
            files,
            segments,
            maps,
            control: &mut uplink.control,
            refusals: Vec::new(),
            verdicts: Vec::with_capacity(runs.len()),
            runs,
            span,
            opened: Instant::now(),
            unseen: false,
            taken: span.page,
            changed: VecDeque::new(),
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

    /// Finds out which pages equal their targets, as far as they are not compared when they were
    /// taken.
    fn compare(&mut self, check_held: bool) {
        // Pins and locks are looked for only now: a thread that pins a page for writing from here
        // on waits for the window, or gets a page of its own.
        let shows_pins = self.uffds.window().is_some_and(WindowUffd::can_check_pins)
            && !self.runs.iter().any(|merge| self.region.mapped.any(merge.run));
        let held = if check_held || !shows_pins { pins::held_memory(self.files) } else { None };
        self.report.nothing_held = check_held && held.is_none();
        if let Some(outcome) = held {
            return self.verdicts.extend(self.runs.iter().map(|merge| (merge.run, Verdict::Settled(outcome))));
        }
        let is_sound = self.control.memory_is_sound();
        if shows_pins && is_sound && pin_check(self.uffds).is_some() {
            self.look();
        } else {
            self.compare_in_place(!is_sound);
        }
    }

    /// Looks at some pages. All of them are compared when they were taken.
    fn look(&mut self) {
        self.unseen = true;
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
    fn compare_in_place(&mut self, ask_frames: bool) {
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
                    compare(self.region, self.segments, merge, ask_frames, group, &mut readable, &mut self.verdicts);
                },
            }
        }
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
            self.report.stuck.iter().for_each(|&page| pins::own(self.region.bytes(page), self.files));
        }
    }
}

/// The userfaultfd that tells pinned pages from others, where the kernel can.
fn pin_check(uffds: &Userfaultfds) -> Option<&WindowUffd> {
    uffds.window().filter(|uffd| uffd.can_check_pins() && !sabotage::is_on(Sabotage::NoPinCheck))
}
