//! Every page of a window is compared with its target, byte by byte.

#![allow(unsafe_code)] // Reads the program's memory.

use kmem::PAGE_SIZE;
use wire::{MergeRun, Outcome, PageNo, Run, Target};

use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segments;
use crate::window::ZEROS;
use crate::window::runs::advance;

/// What is known of some pages after the comparison.
pub(super) enum Verdict {
    /// Their outcome.
    Settled(Outcome),
    /// They equal the target.
    Equal(Target),
}

/// The verdicts on a window's pages, in ascending order.
pub(super) type Verdicts = Vec<(Run, Verdict)>;

/// Compares a run with its target, page by page.
///
/// # Safety
///
/// - The pages lie in an open window of the region: they are mapped and readable, no page is
///   missing, and writers are blocked.
/// - The run does not leave its segment.
pub(super) unsafe fn compare(region: &Region, segments: &Segments, merge: MergeRun, verdicts: &mut Verdicts) {
    let MergeRun { run, target } = merge;
    let place = region.bytes(run).start;
    let frames = match target {
        Target::Zero => None,
        Target::Frames { segment, slot } => match segments.get(segment) {
            Some(held) => Some(held.map.as_ptr().wrapping_add(slot.index() * PAGE_SIZE)),
            None => return verdicts.push((run, Verdict::Settled(Outcome::Failed))),
        },
    };
    let equals = |page: u32| {
        let offset = page as usize * PAGE_SIZE;
        let target = frames.map_or(ZEROS.as_ptr(), |frames| frames.wrapping_add(offset));
        // SAFETY: by the contract the page is mapped and no thread writes to it. The frame lies
        // within its segment, which is mapped in full length, and the daemon writes no frame that a
        // page may map.
        unsafe { libc::memcmp((place + offset) as *const _, target.cast(), PAGE_SIZE) == 0 }
    };
    let mut start = 0;
    let mut equal = equals(0);
    for page in 1..=run.len {
        let next = page < run.len && equals(page);
        if page < run.len && next == equal {
            continue;
        }
        let verdict = match equal {
            false => Verdict::Settled(Outcome::Differs),
            true => Verdict::Equal(advance(target, start)),
        };
        verdicts.push((Run::between(run.page + start, run.page + page), verdict));
        (start, equal) = (page, next);
    }
}

/// From the first pages that equal their targets to the last, with what lies between; `None` if
/// none do.
pub(super) fn hull(verdicts: &Verdicts) -> Option<Run> {
    let mut equal = verdicts.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Equal(_))).map(|(run, _)| *run);
    let first = equal.next()?;
    Some(Run::between(first.page, equal.next_back().unwrap_or(first).end()))
}

/// Where the first verdict's pages end, with those that follow without a gap and equal their
/// targets too.
pub(super) fn end_of_equal(verdicts: &[(Run, Verdict)]) -> PageNo {
    let mut end = verdicts[0].0.end();
    for (run, verdict) in &verdicts[1..] {
        if run.page != end || !matches!(verdict, Verdict::Equal(_)) {
            break;
        }
        end = run.end();
    }
    end
}
