//! Batches of merges, cut into windows.
//!
//! A window is bounded in time, since writers to its pages wait. Its length adapts so that one
//! takes about a millisecond; what is left when the time is over goes into the next. Lengths are
//! counted in *weight*, since mapping a run takes many times as long as comparing one of its pages.

use crate::runtime::regions::Pages;
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::STATE;
use crate::window::MAX_PAGES;
use crate::window::merge::MAX_TIME;
use kmem::pagemap::Pagemap;
use kmem::procfs;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use wire::{Merge, MergeRun, Report, Run, Target, ToDaemon};

/// What mapping one run weighs. Comparing one page and taking it away weighs 1.
const RUN_WEIGHT: u32 = 12;
/// Least weight that a window is cut to.
const MIN_WEIGHT: u32 = 128;
/// Most that a window can weigh: every page a run.
const MAX_WEIGHT: u32 = MAX_PAGES * (1 + RUN_WEIGHT);
/// Runs this close together share a window.
const MAX_GAP: u32 = 32;
/// How often the daemon hears of a batch that takes long.
const FLUSH_EVERY: Duration = Duration::from_millis(5);
/// Counting the process's mappings may take one part in so many of the time while the budget seems
/// to be spent.
const COUNT_SHARE: u32 = 20;
/// In any case it is due after this long: the program makes mappings too.
const COUNT_EVERY: Duration = Duration::from_secs(10);
/// And so much later for each mapping: a hundred times what counting one takes.
const COUNT_EVERY_MAP: Duration = Duration::from_micros(100);

/// How many mappings the process has (estimated), and may have.
///
/// Runs are taken to make as many as they can, which is exact where they lie in plain memory. Where
/// they replace others, or join what the kernel makes one of, that is too much, so the mappings are
/// counted again when the budget seems to be spent.
pub struct Maps {
    counted: usize,
    estimate: usize,
    budget: usize,
}

impl Maps {
    /// No room until they are counted.
    pub const fn new() -> Maps {
        Maps { counted: 0, estimate: 0, budget: 0 }
    }

    /// Whether that many more fit into the budget.
    pub fn has_room(&self, wanted: usize) -> bool {
        self.estimate + wanted <= self.budget || sabotage::is_on(Sabotage::NoBudget)
    }

    /// Some were made.
    pub fn add(&mut self, count: usize) {
        self.estimate += count;
    }

    /// Whether much of the estimate is a guess.
    fn is_vague(&self) -> bool {
        self.estimate - self.counted > self.budget / 8
    }
}

/// Carries out batches; the agent thread has one.
pub struct Merger {
    limit: u32,
    /// When the mappings may be counted again.
    next_count: Option<Instant>,
    /// This process's; without it windows span pages that are being written.
    pagemap: Option<Pagemap>,
}

impl Merger {
    /// Starts with short windows.
    pub fn new() -> Merger {
        Merger { limit: 4 * MIN_WEIGHT, next_count: None, pagemap: Pagemap::open_self().ok() }
    }

    /// Carries out a batch and queues its reports. `flush` is called at its end, and now and then
    /// before, without the lock.
    pub fn batch(&mut self, merge: Merge, mut flush: impl FnMut()) {
        let mut pending = VecDeque::from(merge.runs);
        // Until it has been seen that nothing is held; memory may be locked in the midst of a batch, but
        // not before it unseen.
        let mut look = true;
        let mut flushed = Instant::now();
        loop {
            let runs = take_window(&mut pending, self.limit);
            self.count_maps(2 * runs.len());
            let mut state = STATE.lock();
            let done = state.merge_window(merge.region, &runs, look, merge.calm, self.pagemap.as_ref());
            look &= !done.free;
            done.rest.iter().rev().for_each(|&run| pending.push_front(run));
            let last = pending.is_empty();
            let (window_ns, maps) = (done.time.as_nanos() as u64, state.maps.estimate as u32);
            let outcomes = done.outcomes;
            let report = Report { batch: merge.batch, last, outcomes, cpu_ns: cpu_time(), window_ns, maps };
            state.outbox.push(ToDaemon::Report(report));
            let go_on = state.conn.is_some() && !state.outbox.has_overflowed();
            drop(state);
            self.adapt(&runs, done.time, done.ran_out);
            if last || !go_on || flushed.elapsed() > FLUSH_EVERY {
                flush();
                flushed = Instant::now();
            }
            if last || !go_on {
                return;
            }
            STATE.let_others();
        }
    }

    fn adapt(&mut self, runs: &[MergeRun], time: Duration, cut: bool) {
        if cut || time > MAX_TIME {
            self.limit = (self.limit / 2).max(MIN_WEIGHT);
        } else if time < MAX_TIME / 2 && runs.iter().map(weight).sum::<u32>() > self.limit / 2 {
            self.limit = (self.limit * 2).min(MAX_WEIGHT);
        }
    }

    /// Counts the mappings when the estimate leaves no room; without the lock, since it takes
    /// milliseconds.
    fn count_maps(&mut self, wanted: usize) {
        let now = Instant::now();
        let is_due = match self.next_count {
            None => true,
            Some(next) => {
                let maps = &STATE.lock().maps;
                let routine = COUNT_EVERY + COUNT_EVERY_MAP * maps.estimate as u32;
                now >= next + routine || !maps.has_room(wanted) && (now >= next || maps.is_vague())
            }
        };
        if !is_due {
            return;
        }
        if let (Ok(counted), Ok(most)) = (procfs::count_maps(None), procfs::max_map_count()) {
            STATE.lock().maps = Maps { counted, estimate: counted, budget: most - most / 3 };
        }
        self.next_count = Some(now + now.elapsed() * COUNT_SHARE);
    }
}

/// How long a run takes, about.
fn weight(run: &MergeRun) -> u32 {
    RUN_WEIGHT + run.run.len
}

/// Cuts the next window off a batch: runs of at most `limit` weight, and at most [`MAX_PAGES`] from
/// the first page to the last.
fn take_window(pending: &mut VecDeque<MergeRun>, limit: u32) -> Vec<MergeRun> {
    let mut window: Vec<MergeRun> = Vec::new();
    let mut left = limit;
    while let Some(run) = pending.pop_front() {
        let start = window.first().map_or(run.run.page, |first| first.run.page);
        let end = window.last().map_or(run.run.page, |last| last.run.end());
        let room = (start.0 + MAX_PAGES).saturating_sub(run.run.page.0).min(left.saturating_sub(RUN_WEIGHT));
        if room == 0 || run.run.page - end > MAX_GAP {
            pending.push_front(run);
            break;
        }
        if run.run.len > room {
            let (head, tail) = split(run, room);
            window.push(head);
            pending.push_front(tail);
            break;
        }
        left -= weight(&run);
        window.push(run);
    }
    window
}

/// The first `at` pages of a run, and the others.
pub fn split(run: MergeRun, at: u32) -> (MergeRun, MergeRun) {
    let target = match run.target {
        Target::Frames { segment, slot } => Target::Frames { segment, slot: slot + at },
        Target::Zero => Target::Zero,
    };
    let (head, tail) = (Run::new(run.run.page, at), Run::new(run.run.page + at, run.run.len - at));
    (MergeRun { run: head, target: run.target }, MergeRun { run: tail, target })
}

/// From the first page of the runs to their last.
pub fn span(runs: &[MergeRun]) -> Option<Pages> {
    let (first, last) = (runs.first()?, runs.last()?);
    Some(Pages { start: first.run.page.0, end: last.run.end().0 })
}

/// CPU time of the calling thread; the agent's other thread uses next to none.
pub fn cpu_time() -> u64 {
    kmem::cpu::thread_time().as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::{PageNo, Slot};

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
            let span = span(&window).unwrap();
            assert!(window.iter().map(weight).sum::<u32>() <= 60 && span.len() <= MAX_PAGES);
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
