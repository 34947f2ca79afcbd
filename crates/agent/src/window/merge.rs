//! One window of a batch: compare, take away, replace.
//!
//! A window spans pages between its runs too. It ends before one of these that was written since
//! the last scan: whoever wrote it may write again, and would wait; and the note of that write
//! would be lost. It ends before such a page of a run as well, and that page is let be: it may be
//! long since it was read, and what is written often is not worth merging.
//!
//! Every page is compared with its frame, byte by byte, now that it cannot change: this decides,
//! not what the daemon thinks. What equals is taken away if it has no pins ([`crate::window::pins`]), and
//! each run of such pages becomes one mapping of frames, or untouched memory for zeros.
//!
//! Afterwards the pages that were not replaced are write-protected for the tracking again (they
//! were clean in the last scan; a write that slips in between costs a missed merge at most, since
//! every merge compares). Those that map a frame are not: if one is written, its copy must show in
//! the next scan, or its frame would be kept for ever.

#![allow(unsafe_code)] // Compares and replaces the program's memory.

use crate::daemon::batch::{Maps, span, split};
use crate::runtime::regions::{Pages, Region};
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::{Segment, State};
use crate::window::pins::{self, Waiting};
use crate::window::{self, ZEROS};
use kmem::pagemap::{Categories, Pagemap, Query};
use kmem::{PAGE_SIZE, mm, procfs, raw};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use wire::{MergeRun, Outcome, RegionId, RunOutcome, Slot, Target, control};

/// How long a window may take.
pub const MAX_TIME: Duration = Duration::from_millis(1);

/// What became of a window.
#[derive(Default)]
pub struct Done {
    /// Outcomes, in the order of the runs.
    pub outcomes: Vec<RunOutcome>,
    /// Runs that were not looked at.
    pub rest: Vec<MergeRun>,
    /// Pages whose mapping was left as it was.
    untouched: Vec<Pages>,
    /// Pages that could not be taken away.
    stuck: Vec<Pages>,
    /// The time was over before all runs were looked at.
    pub ran_out: bool,
    /// How long writers could have waited.
    pub time: Duration,
    /// It was looked whether the process has pinned or locked memory, and it has not.
    pub free: bool,
}

impl Done {
    fn tell(&mut self, pages: Pages, outcome: Outcome) {
        match self.outcomes.last_mut() {
            Some(last) if last.outcome == outcome && last.run.end().0 == pages.start => last.run.len += pages.len(),
            _ => self.outcomes.push(RunOutcome { run: pages.into(), outcome }),
        }
        if !matches!(outcome, Outcome::Merged | Outcome::Failed) {
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

/// What the comparison says of some pages.
enum Verdict {
    Outcome(Outcome),
    /// They equal the target.
    Equal(Target),
}

impl State {
    /// Carries out the runs of one window, as far as nobody writes between them (`calm`: nor to
    /// them), which `pagemap` tells. `look`: see whether the process has pinned or locked
    /// memory in any case; else only where taking pages away would not tell.
    pub fn merge_window(
        &mut self,
        id: RegionId,
        runs: &[MergeRun],
        look: bool,
        calm: bool,
        pagemap: Option<&Pagemap>,
    ) -> Done {
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
            window = pages_of(&runs[0]);
        }
        let Some((index, region)) = region.filter(|(_, region)| region.manages(window)) else {
            runs.iter().for_each(|run| done.tell(pages_of(run), Outcome::Gone));
            return done;
        };
        let part = pagemap.map(|pagemap| calm_part(runs, &written_pages(region, window, runs, calm, pagemap), calm));
        if let Some(part) = &part {
            // Not through `tell`: their notes of having been written stay.
            let written = part.written.iter().map(|&w| RunOutcome { run: w.into(), outcome: Outcome::Differs });
            done.outcomes.extend(written);
            done.rest.splice(0..0, part.rest.iter().copied());
            runs = &part.now;
            match span(runs) {
                Some(span) => window = span,
                None => return done,
            }
        }
        let bytes = region.bytes(window);
        let mut new_maps = 0;
        let refused: Vec<Option<Outcome>> = runs.iter().map(|run| self.refusal(run, &mut new_maps)).collect();
        if let Some(fates) = refused.iter().copied().collect::<Option<Vec<Outcome>>>() {
            runs.iter().zip(fates).for_each(|(run, fate)| done.tell(pages_of(run), fate));
            return done;
        }

        let opened = Instant::now();
        self.set_in_window(true);
        if self.open_window(bytes).is_err() {
            self.set_in_window(false);
            runs.iter().for_each(|run| done.tell(pages_of(run), Outcome::Gone));
            return done;
        }
        // Only now: who pins a page for writing from here on waits for the window, or gets a page of its
        // own.
        let tells = self.waiting.as_ref().is_some_and(Waiting::can_check)
            && !runs.iter().any(|run| self.regions[index].mapped.any(pages_of(run)));
        let held = if look || !tells { held_memory() } else { None };
        done.free = look && held.is_none();
        let mut verdicts = Vec::with_capacity(runs.len());
        for (i, (run, refusal)) in runs.iter().zip(refused).enumerate() {
            // Replacing takes about as long as comparing.
            if i > 0 && opened.elapsed() > MAX_TIME / 2 {
                done.rest.splice(0..0, runs[i..].iter().copied());
                done.ran_out = true;
                break;
            }
            match held.or(refusal) {
                Some(fate) => verdicts.push((pages_of(run), Verdict::Outcome(fate))),
                None => compare(&self.regions[index], &self.segments, run, &mut verdicts),
            }
        }
        self.replace(index, window, verdicts, &mut done);
        self.close_window(bytes);
        self.set_in_window(false);
        done.time = opened.elapsed();

        if let Some(waiting) = &self.waiting {
            waiting.throw_away(bytes.len);
        }
        for pages in std::mem::take(&mut done.untouched) {
            self.protect(index, pages);
        }
        let region = &self.regions[index];
        if self.forks > 0 && region.is_inherited() {
            for &pages in &done.stuck {
                pins::own(region.bytes(pages));
            }
        }
        done
    }

    fn set_in_window(&self, open: bool) {
        if let Some(page) = &self.control {
            page.atomic_u64(control::WINDOW).store(open.into(), Ordering::SeqCst);
        }
    }

    /// Why a run is refused before its window is opened.
    fn refusal(&self, run: &MergeRun, new_maps: &mut usize) -> Option<Outcome> {
        let Target::Frames { segment, .. } = run.target else { return None };
        *new_maps += 2;
        if !self.maps.has_room(*new_maps) {
            Some(Outcome::NoMaps)
        } else if !self.segments.iter().any(|held| held.id == segment) {
            Some(Outcome::Failed)
        } else {
            None
        }
    }

    /// Replaces what equals, and tells the fate of everything.
    fn replace(&mut self, index: usize, window: Pages, verdicts: Vec<(Pages, Verdict)>, done: &mut Done) {
        let State { regions, segments, maps, waiting, .. } = self;
        let region = &mut regions[index];
        let mut equal =
            verdicts.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Equal(_))).map(|(pages, _)| *pages);
        let hull = equal.next().map(|first| Pages { start: first.start, end: equal.next_back().unwrap_or(first).end });
        let checker = waiting.as_ref().filter(|waiting| waiting.can_check() && !sabotage::is_on(Sabotage::NoPinCheck));
        let held = match (hull, checker) {
            (Some(hull), Some(checker)) => checker.hold_readers(region.bytes(hull)).is_ok(),
            _ => true,
        };
        let mut at = window.start;
        // Pages before this one have been taken away, whole stretches at a time: what costs is the call.
        let mut taken = window.start;
        let mut mapped = false;
        for (i, (pages, verdict)) in verdicts.iter().enumerate() {
            let pages = *pages;
            done.leave(Pages { start: at, end: pages.start });
            at = pages.end;
            let target = match verdict {
                Verdict::Equal(target) if held => *target,
                Verdict::Equal(_) => {
                    done.tell(pages, Outcome::Gone);
                    continue;
                }
                Verdict::Outcome(fate) => {
                    done.tell(pages, *fate);
                    continue;
                }
            };
            let offset = |page: u32| (page - window.start) as usize * PAGE_SIZE;
            let mut left = pages;
            while left.start < left.end {
                if taken <= left.start {
                    let stretch = Pages { start: left.start, end: end_of_stretch(&verdicts[i..]) };
                    taken = match checker {
                        // SAFETY: the pages equal their targets, which are mapped in their place before the window
                        // closes.
                        Some(checker) => take_away(region, stretch, |part| unsafe {
                            checker.take_away(region.bytes(part), offset(part.start))
                        }),
                        None => stretch.end,
                    };
                }
                let replaced = Pages { start: left.start, end: taken.min(left.end) };
                if replaced.start < replaced.end {
                    let fate = match target {
                        Target::Zero => map_zeros(region, replaced, maps, checker.is_some()),
                        Target::Frames { segment, slot } => {
                            let slot = slot + (replaced.start - pages.start);
                            // `compare` found it, under the same lock.
                            match segments.iter().find(|held| held.id == segment) {
                                Some(held) => {
                                    let taken = checker.map(|checker| (checker, offset(replaced.start)));
                                    map_frames(region, replaced, held, slot, maps, taken)
                                }
                                None => Outcome::Failed,
                            }
                        }
                    };
                    mapped |= fate == Outcome::Merged;
                    done.tell(replaced, fate);
                    left.start = replaced.end;
                }
                if left.start < left.end {
                    let stuck = Pages::new(left.start, 1);
                    done.stuck.push(stuck);
                    done.tell(stuck, Outcome::Failed);
                    left.start += 1;
                    taken = left.start;
                }
            }
        }
        if let Some(hull) = hull.filter(|_| mapped) {
            // All at once. What was not replaced has had this advice before.
            window::advise(region, region.bytes(hull), false);
        }
        done.leave(Pages { start: at, end: window.end });
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

/// Where the first verdict's pages, and those that follow at once and equal their targets too, come
/// to an end.
fn end_of_stretch(verdicts: &[(Pages, Verdict)]) -> u32 {
    let mut end = verdicts[0].0.end;
    for (pages, verdict) in &verdicts[1..] {
        if pages.start != end || !matches!(verdict, Verdict::Equal(_)) {
            break;
        }
        end = pages.end;
    }
    end
}

/// The pages of a window that the program has written since the last scan, ascending. Those between
/// runs are all that is looked for where the runs themselves need not be calm.
fn written_pages(region: &Region, window: Pages, runs: &[MergeRun], calm: bool, pagemap: &Pagemap) -> Vec<Pages> {
    let mut written = Vec::new();
    let has_gaps = runs.windows(2).any(|pair| pair[0].run.end() < pair[1].run.page);
    if !calm && !has_gaps {
        return written;
    }
    // The agent's own changes count as written too: frames are pages of a file, and zeros read the zero
    // page.
    let theirs = Categories::FILE | Categories::PFNZERO;
    let query = Query {
        inverted: theirs,
        required: Categories::WRITTEN | theirs,
        any_of: Categories::PRESENT | Categories::SWAPPED,
        ..Query::default()
    };
    let page = |address: usize| ((address - region.range.start) / PAGE_SIZE) as u32;
    // What a scan that fails has not told is taken for calm: it costs a writer some waiting.
    let _ = pagemap.scan(region.bytes(window), &query, &mut |run| {
        written.push(Pages { start: page(run.start), end: page(run.end) });
    });
    written
}

/// What of some runs can share a window.
#[derive(Debug, Default, PartialEq, Eq)]
struct CalmPart {
    /// Pages before [`CalmPart::now`] that were written.
    written: Vec<Pages>,
    now: Vec<MergeRun>,
    rest: Vec<MergeRun>,
}

/// Cuts runs before the first page that was written, in a gap between them or (`calm`) in one of
/// them. Written pages that come first of all are set apart.
fn calm_part(runs: &[MergeRun], written: &[Pages], calm: bool) -> CalmPart {
    let mut part = CalmPart::default();
    let mut written = written.iter().copied().peekable();
    for (i, &run) in runs.iter().enumerate() {
        let Pages { end, .. } = pages_of(&run);
        let with_rest = |left: MergeRun| std::iter::once(left).chain(runs[i + 1..].iter().copied()).collect();
        let mut left = run;
        loop {
            let start = left.run.page.0;
            // Where this window ends so far; the gap before its first run is no part of it.
            let done = part.now.last().map_or(start, |last| pages_of(last).end);
            while written.next_if(|w| w.end <= done).is_some() {}
            // Where the runs need not be calm, only what begins before a gap's end counts.
            let counts = |w: &&Pages| if calm { w.start < end } else { done < start && w.start < start };
            let Some(&w) = written.peek().filter(counts) else {
                part.now.push(left);
                break;
            };
            if w.start > start {
                let (now, rest) = split(left, w.start - start);
                part.now.push(now);
                part.rest = with_rest(rest);
                return part;
            }
            if !part.now.is_empty() {
                part.rest = with_rest(left);
                return part;
            }
            let to = w.end.min(end);
            part.written.push(Pages { start, end: to });
            if to == end {
                break;
            }
            left = split(left, to - start).1;
        }
    }
    part
}

fn pages_of(run: &MergeRun) -> Pages {
    run.run.into()
}

/// Compares a run with its target, page by page.
fn compare(region: &Region, segments: &[Segment], run: &MergeRun, verdicts: &mut Vec<(Pages, Verdict)>) {
    let place = region.bytes(pages_of(run)).start;
    let frames = match run.target {
        Target::Zero => None,
        Target::Frames { segment, slot } => match segments.iter().find(|held| held.id == segment) {
            Some(held) => Some(held.map.as_ptr().wrapping_add(slot.index() * PAGE_SIZE)),
            None => return verdicts.push((pages_of(run), Verdict::Outcome(Outcome::Failed))),
        },
    };
    let equals = |page: u32| {
        let offset = page as usize * PAGE_SIZE;
        // In bounds: a run that leaves its segment does not decode, and every segment has the full length.
        let target = frames.map_or(ZEROS.as_ptr(), |frames| frames.wrapping_add(offset));
        // SAFETY: both are a page of mapped memory: the window's span is managed, so mapped. Nobody writes
        // to either: the page is write-protected and the frame immutable.
        unsafe { libc::memcmp((place + offset) as *const _, target.cast(), PAGE_SIZE) == 0 }
    };
    let mut start = 0;
    let mut equal = equals(0);
    for page in 1..=run.run.len {
        let next = page < run.run.len && equals(page);
        if page < run.run.len && next == equal {
            continue;
        }
        let pages = Pages { start: run.run.page.0 + start, end: run.run.page.0 + page };
        verdicts.push(match (equal, run.target) {
            (false, _) => (pages, Verdict::Outcome(Outcome::Differs)),
            (true, Target::Zero) => (pages, Verdict::Equal(Target::Zero)),
            (true, Target::Frames { segment, slot }) => {
                (pages, Verdict::Equal(Target::Frames { segment, slot: slot + start }))
            }
        });
        (start, equal) = (page, next);
    }
}

/// Takes pages away as far as they can be checked for pins; returns the first that must stay, or
/// the end.
fn take_away(region: &Region, pages: Pages, take: impl Fn(Pages) -> (usize, Result<(), rustix::io::Errno>)) -> u32 {
    let mut left = pages;
    while let Some(part) = region.mapped.next_gap(left) {
        let (taken, result) = take(part);
        if result.is_err() {
            return part.start + (taken / PAGE_SIZE) as u32;
        }
        left.start = part.end;
    }
    pages.end
}

/// Why nothing may be merged in this process now.
pub fn held_memory() -> Option<Outcome> {
    if sabotage::is_on(Sabotage::NoPinCheck) {
        return None;
    }
    match procfs::status(None) {
        Ok(status) if status.vm_pin_kib > 0 => Some(Outcome::Pinned),
        Ok(status) if status.vm_lck_kib > 0 => Some(Outcome::Locked),
        Ok(_) => None,
        Err(_) => Some(Outcome::Failed),
    }
}

/// Maps frames over pages that equal them; `taken`: the pages have been taken away, to there.
fn map_frames(
    region: &mut Region,
    pages: Pages,
    held: &Segment,
    slot: Slot,
    maps: &mut Maps,
    taken: Option<(&Waiting, usize)>,
) -> Outcome {
    let place = region.bytes(pages);
    let offset = u64::from(slot) * PAGE_SIZE as u64;
    // SAFETY: the place holds, or held, the same bytes as the frames, and its writers wait.
    if unsafe { mm::map_fixed_private(held.fd.as_fd(), place, offset) }.is_err() {
        // No more mappings, say, because the limit was lowered: the old one is there still, and takes its
        // pages back.
        let restored =
            !mm::has_hole(place) && taken.is_none_or(|(waiting, from)| put_back(region, pages, waiting, from));
        if !restored {
            fill_hole(region, pages, held, slot);
        }
        return Outcome::Failed;
    }
    maps.add(region.new_maps(pages));
    region.mapped.set(pages);
    Outcome::Merged
}

/// Puts pages back that [`take_away`] took to `from` on; those that map a frame were not taken.
fn put_back(region: &Region, pages: Pages, waiting: &Waiting, from: usize) -> bool {
    let mut left = pages;
    while let Some(part) = region.mapped.next_gap(left) {
        if !waiting.put_back(region.bytes(part), from + (part.start - pages.start) as usize * PAGE_SIZE) {
            return false;
        }
        left.start = part.end;
    }
    true
}

/// What was there is gone, and the new mapping could not be made (out of memory): the frames' bytes
/// are what was there.
fn fill_hole(region: &mut Region, pages: Pages, held: &Segment, slot: Slot) {
    let place = region.bytes(pages);
    let from = held.map.as_ptr().wrapping_add(slot.index() * PAGE_SIZE);
    for _ in 0..1000 {
        // SAFETY: the place is part of a region and equals the frames, so covering it and copying them
        // keeps its bytes; until then whoever touches the hole faults either way.
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

/// Makes pages of zeros untouched memory; `taken`: those that map no frame are that already.
fn map_zeros(region: &mut Region, pages: Pages, maps: &mut Maps, taken: bool) -> Outcome {
    let place = region.bytes(pages);
    let done = if region.mapped.any(pages) {
        maps.add(region.new_maps(pages));
        // SAFETY: the place holds zeros, and its writers wait.
        unsafe { window::cover_anonymous(region, pages) }.is_ok()
    } else {
        // SAFETY: as above; it is anonymous memory all through.
        taken || unsafe { raw::madvise(place.start, place.len, libc::MADV_DONTNEED) }.is_ok()
    };
    if done { Outcome::Merged } else { Outcome::Failed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_end_before_what_is_written() {
        let run = |page, len| MergeRun {
            run: Pages::new(page, len).into(),
            target: Target::Frames { segment: 1, slot: Slot(100 + page) },
        };
        let pages = |start, end| Pages { start, end };
        let part = |runs: &[MergeRun], written: &[Pages], calm| calm_part(runs, written, calm);
        let runs = [run(0, 4), run(4, 4), run(10, 5)];
        let all = CalmPart { now: runs.to_vec(), ..CalmPart::default() };
        assert_eq!(part(&runs, &[], true), all);
        assert_eq!(part(&runs, &[pages(15, 90)], true), all, "behind them");
        // In the gap, whether or not it reaches into the run behind.
        for end in [9, 11] {
            let cut = CalmPart { now: runs[..2].to_vec(), rest: runs[2..].to_vec(), ..CalmPart::default() };
            assert_eq!(part(&runs, &[pages(8, end)], true), cut);
            assert_eq!(part(&runs, &[pages(8, end)], false), cut);
        }
        // In a run.
        let inside = [pages(5, 6)];
        let cut =
            CalmPart { now: vec![run(0, 4), run(4, 1)], rest: vec![run(5, 3), run(10, 5)], ..CalmPart::default() };
        assert_eq!(part(&runs, &inside, true), cut);
        assert_eq!(part(&runs, &inside, false), all);
        assert_eq!(part(&runs, &[pages(0, 6)], false), all, "over a border without a gap");
        let next = CalmPart { written: inside.to_vec(), now: vec![run(6, 2), run(10, 5)], ..CalmPart::default() };
        assert_eq!(part(&cut.rest, &inside, true), next);
        // The first pages of all, over several runs, and a gap behind them.
        let first = part(&runs, &[pages(0, 9), pages(11, 12)], true);
        assert_eq!(first.written, [pages(0, 4), pages(4, 8)]);
        assert_eq!((first.now, first.rest), (vec![run(10, 1)], vec![run(11, 4)]));
        // Everything.
        let none = part(&runs, &[pages(0, 20)], true);
        assert_eq!(none.written, [pages(0, 4), pages(4, 8), pages(10, 15)]);
        assert!(none.now.is_empty() && none.rest.is_empty());
    }

    #[test]
    fn untouched_parts_join() {
        let mut done = Done::default();
        done.leave(Pages::new(0, 0));
        done.tell(Pages::new(0, 2), Outcome::Differs);
        done.leave(Pages::new(2, 3));
        done.tell(Pages::new(5, 1), Outcome::Merged);
        done.leave(Pages::new(6, 1));
        assert_eq!(done.untouched, [Pages::new(0, 5), Pages::new(6, 1)]);
    }
}
