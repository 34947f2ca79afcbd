//! Batches of merges, carried out window by window.
//!
//! A window is bounded in time: writers to its pages wait. Its length adapts so that one takes about a millisecond; what
//! is left when the time is over goes into the next. Inside, every page is compared with its frame, byte by byte,
//! now that it cannot change: this decides, not what the daemon thinks. Each run of equal pages becomes one mapping.
//!
//! Afterwards the pages that were not mapped are write-protected for the tracking again (they were clean in the last scan; a
//! write that slips in between costs a missed merge at most, since every merge compares). Those that map a frame are
//! not: if one is written, its copy must show in the next scan, or its frame would be kept for ever.

#![allow(unsafe_code)] // Compares and replaces the program's memory.

use crate::raw;
use crate::regions::{Pages, Region};
use crate::sabotage::{self, Sabotage};
use crate::state::{STATE, Segment, State};
use crate::window::{self, MAX_PAGES};
use kmem::{PAGE_SIZE, mm, procfs};
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use wire::{Fate, Merge, Outcome, RegionId, Report, Run, Target, ToDaemon};

/// How long a window may take.
const MAX_TIME: Duration = Duration::from_millis(1);
/// Fewest pages that a window is cut to.
const MIN_PAGES: u32 = 32;
/// Runs this close together share a window.
const MAX_GAP: u32 = 8;
/// Counting the process's mappings may take one part in so many of the time,
const COUNT_SHARE: u32 = 20;
/// and is due after this long in any case: the program makes mappings too.
const COUNT_EVERY: Duration = Duration::from_secs(10);

static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// How many mappings the process has (estimated), and may have.
///
/// Every run is taken to make two, which is the most. Where runs replace others that is far too much, so the mappings
/// are counted again when the budget seems to be spent.
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

    fn has_room(&self, wanted: usize) -> bool {
        self.estimate + wanted <= self.budget || sabotage::is_on(Sabotage::NoBudget)
    }

    /// Whether much of the estimate is a guess.
    fn is_vague(&self) -> bool {
        self.estimate - self.counted > self.budget / 8
    }
}

/// What became of a window.
#[derive(Default)]
struct Done {
    outcomes: Vec<Outcome>,
    /// Runs that were not looked at.
    rest: Vec<Run>,
    /// Pages whose mapping was left as it was.
    untouched: Vec<Pages>,
    time: Duration,
}

impl Done {
    fn tell(&mut self, pages: Pages, result: Fate) {
        self.outcomes.push(Outcome { page: pages.start, len: pages.len(), result });
        if !matches!(result, Fate::Merged | Fate::Failed) {
            self.leave(pages);
        }
    }

    fn leave(&mut self, pages: Pages) {
        match self.untouched.last_mut() {
            Some(last) if last.end == pages.start => last.end = pages.end,
            _ if pages.start < pages.end => self.untouched.push(pages),
            _ => {}
        }
    }
}

/// Carries out batches; the agent thread has one.
pub struct Merger {
    limit: u32,
    /// When the mappings may be counted again.
    next_count: Option<Instant>,
}

impl Merger {
    /// Starts with short windows.
    pub fn new() -> Merger {
        Merger { limit: 128, next_count: None }
    }

    /// Carries out a batch and queues its reports. `flush` is called after each window, without the lock.
    pub fn batch(&mut self, merge: Merge, mut flush: impl FnMut()) {
        let mut pending = VecDeque::from(merge.runs);
        loop {
            let runs = take_window(&mut pending, self.limit);
            self.count_maps(2 * runs.len());
            let mut state = STATE.lock();
            let done = state.merge_window(merge.region, &runs);
            done.rest.iter().rev().for_each(|&run| pending.push_front(run));
            let last = pending.is_empty();
            let (window_ns, maps) = (done.time.as_nanos() as u64, state.maps.estimate as u32);
            let outcomes = done.outcomes;
            let report = Report { batch: merge.batch, last, outcomes, cpu_ns: cpu_time(), window_ns, maps };
            state.outbox.push(ToDaemon::Report(report));
            let go_on = state.conn.is_some() && !state.outbox.has_overflowed();
            drop(state);
            self.adapt(&runs, done.time, !done.rest.is_empty());
            flush();
            if last || !go_on {
                return;
            }
            // The mutex is not fair.
            for _ in 0..50 {
                if !STATE.is_wanted() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    fn adapt(&mut self, runs: &[Run], time: Duration, cut: bool) {
        if cut || time > MAX_TIME {
            self.limit = (self.limit / 2).max(MIN_PAGES);
        } else if time < MAX_TIME / 2 && span(runs).is_some_and(|span| span.len() > self.limit / 2) {
            self.limit = (self.limit * 2).min(MAX_PAGES);
        }
    }

    /// Counts the mappings when the estimate leaves no room; without the lock, since it takes milliseconds.
    fn count_maps(&mut self, wanted: usize) {
        let now = Instant::now();
        let is_due = match self.next_count {
            None => true,
            Some(next) => {
                let maps = &STATE.lock().maps;
                now >= next + COUNT_EVERY || !maps.has_room(wanted) && (now >= next || maps.is_vague())
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

/// Cuts the next window off a batch: at most `limit` pages from its first to its last.
fn take_window(pending: &mut VecDeque<Run>, limit: u32) -> Vec<Run> {
    let mut window: Vec<Run> = Vec::new();
    while let Some(run) = pending.pop_front() {
        let start = window.first().map_or(run.page, |first| first.page);
        let end = window.last().map_or(run.page, |last| last.page + last.len);
        let room = (start + limit).saturating_sub(run.page);
        if room == 0 || run.page - end > MAX_GAP {
            pending.push_front(run);
            break;
        }
        if run.len > room {
            let (head, tail) = split(run, room);
            window.push(head);
            pending.push_front(tail);
            break;
        }
        window.push(run);
    }
    window
}

fn split(run: Run, at: u32) -> (Run, Run) {
    let target = match run.target {
        Target::Frames { segment, slot } => Target::Frames { segment, slot: slot + at },
        Target::Zero => Target::Zero,
    };
    (Run { len: at, ..run }, Run { page: run.page + at, len: run.len - at, target })
}

/// From the first page of the runs to their last.
fn span(runs: &[Run]) -> Option<Pages> {
    let (first, last) = (runs.first()?, runs.last()?);
    Some(Pages { start: first.page, end: last.page + last.len })
}

impl State {
    fn merge_window(&mut self, id: RegionId, runs: &[Run]) -> Done {
        let mut done = Done::default();
        let (Some(mut window), mut runs) = (span(runs), runs) else { return done };
        let region = self.position(id).map(|index| (index, &self.regions[index]));
        if let Some((_, region)) = region
            && !region.manages(window)
        {
            // Somewhere is a hole: one by one.
            let (first, rest) = runs.split_at(1);
            done.rest = rest.to_vec();
            runs = first;
            window = Pages::new(runs[0].page, runs[0].len);
        }
        let Some((index, region)) = region.filter(|(_, region)| region.manages(window)) else {
            runs.iter().for_each(|run| done.tell(pages_of(run), Fate::Gone));
            return done;
        };
        let bytes = region.bytes(window);
        let mut new_maps = 0;
        let refused: Vec<Option<Fate>> = runs.iter().map(|run| self.refusal(run, &mut new_maps)).collect();
        if let Some(fates) = refused.iter().copied().collect::<Option<Vec<Fate>>>() {
            runs.iter().zip(fates).for_each(|(run, fate)| done.tell(pages_of(run), fate));
            return done;
        }

        let opened = Instant::now();
        if self.open_window(bytes).is_err() {
            runs.iter().for_each(|run| done.tell(pages_of(run), Fate::Gone));
            return done;
        }
        // Only now: who pins a page for writing from here on waits for the window, or gets a page of its own.
        let held = held_memory();
        let mut at = window.start;
        for (i, (run, refusal)) in runs.iter().zip(refused).enumerate() {
            if i > 0 && opened.elapsed() > MAX_TIME {
                done.rest.splice(0..0, runs[i..].iter().copied());
                break;
            }
            done.leave(Pages { start: at, end: run.page });
            match held.or(refusal) {
                Some(fate) => done.tell(pages_of(run), fate),
                None => self.merge_run(index, run, &mut done),
            }
            at = run.page + run.len;
        }
        done.leave(Pages { start: at, end: window.end });
        self.close_window(bytes);
        done.time = opened.elapsed();

        for pages in std::mem::take(&mut done.untouched) {
            self.protect(index, pages);
        }
        done
    }

    /// Why a run is refused before its window is opened.
    fn refusal(&self, run: &Run, new_maps: &mut usize) -> Option<Fate> {
        let Target::Frames { segment, .. } = run.target else { return None };
        *new_maps += 2;
        if !self.maps.has_room(*new_maps) {
            Some(Fate::NoMaps)
        } else if !self.segments.iter().any(|held| held.id == segment) {
            Some(Fate::Failed)
        } else {
            None
        }
    }

    fn merge_run(&mut self, index: usize, run: &Run, done: &mut Done) {
        let State { regions, segments, maps, .. } = self;
        let region = &mut regions[index];
        let place = region.bytes(pages_of(run)).start;
        let source = match run.target {
            Target::Zero => None,
            Target::Frames { segment, slot } => match segments.iter().find(|held| held.id == segment) {
                Some(held) => Some((held, slot)),
                None => return done.tell(pages_of(run), Fate::Failed),
            },
        };
        let equals = |page: u32| {
            let target = match source {
                // In bounds: a run that leaves its segment does not decode, and every segment has the full length.
                Some((held, slot)) => held.map.as_ptr().wrapping_add((slot + page) as usize * PAGE_SIZE).cast_const(),
                None => ZEROS.as_ptr(),
            };
            // SAFETY: both are a page of mapped memory: the window's span is managed, so mapped. Nobody writes to either: the page
            // is write-protected and the frame immutable.
            unsafe { libc::memcmp((place + page as usize * PAGE_SIZE) as *const _, target.cast(), PAGE_SIZE) == 0 }
        };
        let mut at = 0;
        while at < run.len {
            let equal = equals(at);
            let mut end = at + 1;
            while end < run.len && equals(end) == equal {
                end += 1;
            }
            // The page that ended this stretch is compared again; it is one in a run that does not fit anyway.
            let pages = Pages { start: run.page + at, end: run.page + end };
            let fate = match source {
                _ if !equal => Fate::Differs,
                Some((held, slot)) => map_frames(region, pages, held, slot + at, maps),
                None => map_zeros(region, pages),
            };
            done.tell(pages, fate);
            at = end;
        }
    }

    /// Marks pages as clean for the tracking, except those that map a frame.
    fn protect(&mut self, index: usize, pages: Pages) {
        let (region, Some(tracking)) = (&self.regions[index], &self.tracking) else { return };
        let mut left = pages;
        while let Some(gap) = region.mapped.next_gap(left) {
            // On failure they count as written.
            let _ = tracking.write_protect(region.bytes(gap), true);
            left.start = gap.end;
        }
    }
}

fn pages_of(run: &Run) -> Pages {
    Pages::new(run.page, run.len)
}

/// Why nothing may be merged in this process now.
fn held_memory() -> Option<Fate> {
    if sabotage::is_on(Sabotage::NoPinCheck) {
        return None;
    }
    match procfs::status(None) {
        Ok(status) if status.vm_pin_kib > 0 => Some(Fate::Pinned),
        Ok(status) if status.vm_lck_kib > 0 => Some(Fate::Locked),
        Ok(_) => None,
        Err(_) => Some(Fate::Failed),
    }
}

fn map_frames(region: &mut Region, pages: Pages, held: &Segment, slot: u32, maps: &mut Maps) -> Fate {
    let place = region.bytes(pages);
    let offset = u64::from(slot) * PAGE_SIZE as u64;
    use std::os::fd::AsFd;
    // SAFETY: the place holds the same bytes as the frames, and its writers wait.
    if unsafe { mm::map_fixed_private(held.fd.as_fd(), place, offset) }.is_err() {
        if raw::has_hole(place) {
            fill_hole(region, pages, held, slot);
        }
        return Fate::Failed;
    }
    region.mapped.set(pages);
    window::advise(region, place, false);
    maps.estimate += 2;
    Fate::Merged
}

/// The kernel took the old mapping away and could not make the new one (out of memory): the frames' bytes are what was there.
fn fill_hole(region: &mut Region, pages: Pages, held: &Segment, slot: u32) {
    let place = region.bytes(pages);
    let from = held.map.as_ptr().wrapping_add(slot as usize * PAGE_SIZE);
    for _ in 0..1000 {
        // SAFETY: the place is part of a region and equals the frames, so covering it and copying them keeps its bytes; until then
        // whoever touches the hole faults either way.
        unsafe {
            if window::cover_anonymous(region, pages).is_ok() {
                std::ptr::copy_nonoverlapping(from, place.start as *mut u8, place.len);
                return;
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Going on would give the program a hole where its memory was.
    raw::print(b"pageone-agent: out of memory while replacing a mapping\n");
    std::process::abort();
}

fn map_zeros(region: &mut Region, pages: Pages) -> Fate {
    let place = region.bytes(pages);
    let done = if region.mapped.any(pages) {
        // SAFETY: the place holds zeros, and its writers wait.
        unsafe { window::cover_anonymous(region, pages) }.is_ok()
    } else {
        // SAFETY: as above; it is anonymous memory all through.
        unsafe { raw::madvise(place.start, place.len, libc::MADV_DONTNEED) }.is_ok()
    };
    if done { Fate::Merged } else { Fate::Failed }
}

/// CPU time of the calling thread; the agent's other thread uses next to none.
fn cpu_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(page: u32, len: u32, slot: u32) -> Run {
        Run { page, len, target: Target::Frames { segment: 1, slot } }
    }

    #[test]
    fn windows_are_bounded_and_leave_nothing_out() {
        let runs = vec![run(0, 10, 5), run(12, 1, 40), run(30, 100, 100), Run { page: 131, len: 3, target: Target::Zero }];
        let mut pending = VecDeque::from(runs.clone());
        let mut seen = Vec::new();
        let mut windows = 0;
        while !pending.is_empty() {
            let window = take_window(&mut pending, 32);
            let span = span(&window).unwrap();
            assert!(span.len() <= 32);
            assert!(window.windows(2).all(|w| w[1].page - (w[0].page + w[0].len) <= MAX_GAP));
            windows += 1;
            for run in window {
                let slot = |page| match run.target {
                    Target::Frames { slot, .. } => Some(slot + page - run.page),
                    Target::Zero => None,
                };
                seen.extend((run.page..run.page + run.len).map(|page| (page, slot(page))));
            }
        }
        let wanted = runs.iter().flat_map(|run| (0..run.len).map(move |i| (run.page + i, run)));
        let wanted: Vec<_> = wanted
            .map(|(page, run)| match run.target {
                Target::Frames { slot, .. } => (page, Some(slot + page - run.page)),
                Target::Zero => (page, None),
            })
            .collect();
        assert_eq!(seen, wanted);
        assert_eq!(windows, 5, "[0..13) then 100 pages by 32, the last with the zeros");
    }

    #[test]
    fn untouched_parts_join() {
        let mut done = Done::default();
        done.leave(Pages::new(0, 0));
        done.tell(Pages::new(0, 2), Fate::Differs);
        done.leave(Pages::new(2, 3));
        done.tell(Pages::new(5, 1), Fate::Merged);
        done.leave(Pages::new(6, 1));
        assert_eq!(done.untouched, [Pages::new(0, 5), Pages::new(6, 1)]);
    }
}
