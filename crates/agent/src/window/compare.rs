//! Every page of a window is compared with its target, byte by byte.
//!
//! Pages that can be moved are compared where they were moved to ([`changed`]): there no thread can
//! write to them. All other pages are compared in place.

#![allow(unsafe_code)] // Reads the program's memory.

use kmem::PAGE_SIZE;
use kmem::range::Range;
use wire::{MergeRun, Outcome, PageNo, Run, Target};

use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segments;
use crate::window::ZEROS;
use crate::window::runs::advance;
use crate::window::safe_read;

/// What is known of some pages after the comparison.
pub(super) enum Verdict {
    /// Their outcome.
    Settled(Outcome),
    /// They equal the target, as far as they were compared.
    Equal(Target),
}

/// The verdicts on a window's pages, in ascending order.
pub(super) type Verdicts = Vec<(Run, Verdict)>;

/// What one page is, beside its target.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Finding {
    Equal,
    Differs,
    /// It is gone, or it or its frame is poisoned by a memory error.
    Unreadable,
}

/// Whether frames, or pages that were taken away, can be read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// The kernel has said so, or no memory of the host has failed.
    Sound,
    /// The kernel has to be asked.
    Unsure,
}

/// Compares a run with its target, page by page. The kernel is asked first whether the pages can be
/// read: for all pages up to `group`, since the call is what costs. Those before `readable` can.
/// Memory are mapped by the agent alone: they can be read unless their memory has failed.
///
/// # Safety
///
/// - The pages lie in an open window of the region: they are mapped, no page is missing, and
///   writers are blocked. The program does not unmap them past the C library just now.
/// - The run does not leave its segment, and ends at `group` or before.
pub(super) unsafe fn compare(
    region: &Region,
    segments: &Segments,
    merge: MergeRun,
    frames_are: Memory,
    group: PageNo,
    readable: &mut PageNo,
    verdicts: &mut Verdicts,
) {
    let place = region.bytes(merge.run).start;
    let MergeRun { run, target } = merge;
    let Ok(frames) = segments.frames(target) else {
        return verdicts.push((run, Verdict::Settled(Outcome::Failed)));
    };
    let mut found = Found::new(merge);
    let mut done = 0;
    while done < run.len {
        let page = run.page + done;
        if *readable <= page {
            let pages = safe_read::readable(region.bytes(Run::between(page, group)));
            *readable = page + pages as u32;
        }
        let len = (readable.0.min(run.end().0)).saturating_sub(page.0);
        // A frame whose memory broke cannot be read either.
        let len = frames.filter(|_| len > 0 && frames_are == Memory::Unsure).map_or(len, |frames| {
            let first = frames.wrapping_add(done as usize * PAGE_SIZE).expose_provenance();
            safe_read::readable(Range::new(first, len as usize * PAGE_SIZE)) as u32
        });
        for i in done..done + len {
            let offset = i as usize * PAGE_SIZE;
            let target = frames.map_or(ZEROS.as_ptr(), |frames| frames.wrapping_add(offset));
            // SAFETY: page and frame were readable just now, and by the contract the page is not
            // unmapped. No thread writes to it. The frame lies within its segment, which is mapped
            // in full length, and no process writes a frame that a page may map.
            let equal = unsafe { libc::memcmp((place + offset) as *const _, target.cast(), PAGE_SIZE) == 0 };
            found.add(i, if equal { Finding::Equal } else { Finding::Differs }, verdicts);
        }
        done += len;
        if len == 0 {
            found.add(done, Finding::Unreadable, verdicts);
            done += 1;
        }
    }
    found.end(run.len, verdicts);
}

/// Joins findings on consecutive pages of a run.
pub(super) struct Found {
    run: Run,
    target: Target,
    start: u32,
    finding: Option<Finding>,
}

impl Found {
    pub(super) fn new(MergeRun { run, target }: MergeRun) -> Self {
        Self { run, target, start: 0, finding: None }
    }

    /// Adds the finding on the next page of the run.
    pub(super) fn add(&mut self, page: u32, finding: Finding, verdicts: &mut Verdicts) {
        if self.finding != Some(finding) {
            self.end(page, verdicts);
            (self.start, self.finding) = (page, Some(finding));
        }
    }

    /// The pages with the last finding end before this one.
    pub(super) fn end(&self, page: u32, verdicts: &mut Verdicts) {
        let verdict = match self.finding {
            None => return,
            Some(Finding::Equal) => Verdict::Equal(advance(self.target, self.start)),
            Some(Finding::Differs) => Verdict::Settled(Outcome::Differs),
            Some(Finding::Unreadable) => Verdict::Settled(Outcome::Unreadable),
        };
        verdicts.push((Run::between(self.run.page + self.start, self.run.page + page), verdict));
    }
}

/// Pages that were taken away and do not equal their target (beside the sample, or since a device
/// wrote to them and has let go), or cannot be read any more. Ascending, with outcomes.
///
/// # Safety
///
/// - The pages of the run, but those in mappings of segments, were taken to `taken`, each at its
///   offset in the run. What is there is mapped, and nobody else uses it.
/// - The run does not leave its segment.
/// - With [`Memory::Sound`], the kernel said just now that pages and frames can be read.
pub(super) unsafe fn changed(
    region: &Region,
    segments: &Segments,
    merge: MergeRun,
    taken: usize,
    memory: Memory,
) -> Vec<(PageNo, Outcome)> {
    let MergeRun { run, target } = merge;
    // Not reached without it: the comparison found the segment, under the same lock.
    let Ok(frames) = segments.frames(target) else {
        return run.pages().map(|page| (page, Outcome::Differs)).collect();
    };
    let can_read = |first: usize, pages: usize| safe_read::readable(Range::new(first, pages * PAGE_SIZE)) == pages;
    // All at once first: page by page the calls cost more than comparing.
    let ask = memory == Memory::Unsure
        && !(can_read(taken, run.len as usize)
            && frames.is_none_or(|frames| can_read(frames.expose_provenance(), run.len as usize)));
    let outcome = |page: PageNo| {
        let offset = (page - run.page) as usize * PAGE_SIZE;
        let target = frames.map_or(ZEROS.as_ptr(), |frames| frames.wrapping_add(offset));
        if ask && !(can_read(taken + offset, 1) && can_read(target.expose_provenance(), 1)) {
            return Some((page, Outcome::Unreadable));
        }
        // SAFETY: by the contract the page is mapped where it was taken to. The frame lies within
        // its segment, which is mapped in full length, and the daemon writes no frame that a page
        // may map. Both could be read just now.
        let equal = unsafe { libc::memcmp((taken + offset) as *const _, target.cast(), PAGE_SIZE) == 0 };
        (!equal).then_some((page, Outcome::Differs))
    };
    region.mapped.gaps(run).flat_map(|part| part.pages()).filter_map(outcome).collect()
}

/// From the first pages that equal their targets to the last, with what lies between; `None` if
/// none do.
pub(super) fn hull(verdicts: &Verdicts) -> Option<Run> {
    let mut equal = verdicts.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Equal(_))).map(|(run, _)| *run);
    let first = equal.next()?;
    Some(Run::between(first.page, equal.next_back().unwrap_or(first).end()))
}

/// Where the first verdict's pages end, with those that follow without a gap and equal their
/// targets too, until there are `most`.
pub(super) fn end_of_equal(verdicts: &[(Run, Verdict)], most: u32) -> PageNo {
    let (first, mut end) = (verdicts[0].0.page, verdicts[0].0.end());
    for (run, verdict) in &verdicts[1..] {
        if run.page != end || !matches!(verdict, Verdict::Equal(_)) || end - first >= most {
            break;
        }
        end = run.end();
    }
    end
}
