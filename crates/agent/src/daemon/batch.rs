//! Batches of merges, cut into windows.
//!
//! A window is bounded in time, since writers to its pages wait. Its length adapts so that it takes
//! about a millisecond; what is left goes into the next. Lengths are counted in *weight*: mapping a
//! run takes many times as long as comparing one of its pages.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use kmem::procfs;
use wire::{Merge, MergeRun, Report, ToDaemon};

use crate::runtime::cpu_ns;
use crate::runtime::denied::{self, Need};
use crate::runtime::state::STATE;
use crate::window::merge::{HeldCheck, Request, merge};
use crate::window::report::WindowReport;
use crate::window::runs::split;
use crate::window::select::Pages;
use crate::window::{MAX_PAGES, MAX_TIME};

/// Weight of mapping one run. To compare a page and to take it away weighs 1.
const RUN_WEIGHT: u32 = 12;
/// Least weight that a window is cut to.
const MIN_WEIGHT: u32 = 128;
/// Most that a window can weigh: every page is a run.
const MAX_WEIGHT: u32 = MAX_PAGES * (1 + RUN_WEIGHT);
/// Most pages between two runs of one window: more would block writers for nothing.
const MAX_GAP: u32 = 32;
const FLUSH_EVERY: Duration = Duration::from_millis(5);
/// Counting mappings takes at most one in so many parts of the time.
const COUNT_SHARE: u32 = 20;
/// The mappings are counted after this time in any case: the program makes mappings too.
const COUNT_EVERY: Duration = Duration::from_secs(10);
/// Added to [`COUNT_EVERY`] for each mapping: a hundred times as long as counting one takes.
const COUNT_EVERY_MAP: Duration = Duration::from_micros(100);

/// The kernel's own limit of mappings (`DEFAULT_MAX_MAP_COUNT`).
const USUAL_MAPS: usize = 65_530;

/// Carries out batches; the agent thread has one.
pub(crate) struct Merger {
    /// Weight of the next window, at most.
    limit: u32,
    next_count: Option<Instant>,
    /// The limit of mappings, as it was last read.
    most_maps: usize,
    /// A profile keeps it from being read.
    limit_is_denied: bool,
}

impl Merger {
    pub(crate) fn new() -> Self {
        Self { limit: 4 * MIN_WEIGHT, next_count: None, most_maps: USUAL_MAPS, limit_is_denied: false }
    }

    /// Carries out a batch, and queues its reports. Calls `flush` now and then, without the lock.
    pub(crate) fn batch(&mut self, batch: Merge, mut flush: impl FnMut()) {
        let mut pending = VecDeque::from(batch.runs);
        let pages = if batch.calm { Pages::Calm } else { Pages::All };
        // Until one window has found nothing held. The program may lock memory during the batch, as
        // it may right after a merge.
        let mut check = HeldCheck::Now;
        let mut flushed = Instant::now();
        loop {
            let runs = take_window(&mut pending, self.limit);
            self.count_maps(2 * runs.len());
            let mut state = STATE.lock();
            if state.has_lost_descriptors() {
                // A number may name a file of the program. The session ends with the next message.
                return;
            }
            let request = Request { region: batch.region, runs: &runs, pages, check };
            let WindowReport { outcomes, rest, ran_out, time, nothing_held, .. } = merge(&mut state, &request);
            if nothing_held {
                check = HeldCheck::IfUnseen;
            }
            rest.iter().rev().for_each(|&run| pending.push_front(run));
            let last = pending.is_empty();
            let (window_ns, maps) = (time.as_nanos() as u64, state.maps.estimate() as u32);
            state.uplink.outbox.push(ToDaemon::Report(Report {
                batch: batch.batch,
                last,
                outcomes,
                cpu_ns: cpu_ns(),
                window_ns,
                maps,
            }));
            let has_ended = last || !state.uplink.is_usable();
            drop(state);
            if ran_out || time > MAX_TIME {
                self.limit = (self.limit / 2).max(MIN_WEIGHT);
            } else if time < MAX_TIME / 2 && runs.iter().map(weight).sum::<u32>() > self.limit / 2 {
                self.limit = (self.limit * 2).min(MAX_WEIGHT);
            }
            if has_ended || flushed.elapsed() > FLUSH_EVERY {
                flush();
                flushed = Instant::now();
            }
            if has_ended {
                return;
            }
            STATE.yield_to_waiting();
        }
    }

    /// `vm.max_map_count`, or what it was. It is not asked for again where a profile denies it:
    /// each denial is a line in the host's log.
    fn most_maps(&mut self) -> usize {
        if !self.limit_is_denied {
            match procfs::max_map_count() {
                Ok(most) => self.most_maps = most,
                Err(error) => {
                    denied::tell(Need::MaxMapCount, &error);
                    self.limit_is_denied = error.kind() == ErrorKind::PermissionDenied;
                }
            }
        }
        self.most_maps
    }

    /// Counts the mappings where the estimate is old, or leaves no room. Takes ms: without the
    /// lock.
    fn count_maps(&mut self, wanted: usize) {
        let now = Instant::now();
        let is_due = match self.next_count {
            None => true,
            Some(next) => {
                let maps = &STATE.lock().maps;
                let routine = COUNT_EVERY + COUNT_EVERY_MAP * maps.estimate() as u32;
                now >= next + routine || !maps.has_room(wanted) && (now >= next || maps.is_vague())
            }
        };
        if !is_due {
            return;
        }
        match procfs::count_maps(None) {
            Ok(counted) => {
                let most = self.most_maps();
                STATE.lock().maps.set(counted, most);
            }
            Err(error) => denied::tell(Need::Maps, &error),
        }
        self.next_count = Some(now + now.elapsed() * COUNT_SHARE);
    }
}

fn weight(merge: &MergeRun) -> u32 {
    RUN_WEIGHT + merge.run.len
}

/// Cuts the next window off a batch: of at most `limit` weight, within [`MAX_PAGES`].
fn take_window(pending: &mut VecDeque<MergeRun>, limit: u32) -> Vec<MergeRun> {
    let mut window: Vec<MergeRun> = Vec::new();
    let mut left = limit;
    while let Some(merge) = pending.pop_front() {
        let start = window.first().map_or(merge.run.page, |first| first.run.page);
        let end = window.last().map_or(merge.run.page, |last| last.run.end());
        let room = (start.0 + MAX_PAGES).saturating_sub(merge.run.page.0).min(left.saturating_sub(RUN_WEIGHT));
        if room == 0 || merge.run.page - end > MAX_GAP {
            pending.push_front(merge);
            break;
        }
        if merge.run.len > room {
            let (head, tail) = split(merge, room);
            window.push(head);
            pending.push_front(tail);
            break;
        }
        left -= weight(&merge);
        window.push(merge);
    }
    window
}

#[cfg(test)]
mod tests {
    use wire::{PageNo, Run, Slot, Target};

    use super::*;
    use crate::window::runs::span;

    fn run(page: u32, len: u32, slot: u32) -> MergeRun {
        MergeRun { run: Run::new(PageNo(page), len), target: Target::Frames { segment: 1, slot: Slot(slot) } }
    }

    #[test]
    fn windows_are_bounded_and_leave_nothing_out() {
        let runs = vec![
            run(0, 10, 5),
            run(12, 1, 40),
            run(30, 100, 100),
            MergeRun { run: Run::new(PageNo(131), 3), target: Target::Zero },
        ];
        let mut pending = VecDeque::from(runs.clone());
        let mut seen = Vec::new();
        let mut windows = 0;
        while !pending.is_empty() {
            let window = take_window(&mut pending, 60);
            assert!(window.iter().map(weight).sum::<u32>() <= 60 && span(&window).unwrap().len <= MAX_PAGES);
            assert!(window.windows(2).all(|w| w[1].run.page - w[0].run.end() <= MAX_GAP));
            windows += 1;
            for run in window {
                let slot = |page| match run.target {
                    Target::Frames { slot, .. } => Some(slot + (page - run.run.page)),
                    Target::Zero => None,
                };
                seen.extend(run.run.pages().map(|page| (page, slot(page))));
            }
        }
        let wanted = runs.iter().flat_map(|run| run.run.pages().map(move |page| (page, run)));
        let wanted: Vec<_> = wanted
            .map(|(page, run)| match run.target {
                Target::Frames { slot, .. } => (page, Some(slot + (page - run.run.page))),
                Target::Zero => (page, None),
            })
            .collect();
        assert_eq!(seen, wanted);
        assert_eq!(windows, 4, "[0..13), 100 pages by 48, the rest with the zeros");
    }
}
