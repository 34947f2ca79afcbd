//! Pages that equal their targets are replaced: by frames, or by untouched memory for zeros.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

use std::os::fd::AsFd;
use std::time::Duration;

use kmem::{PAGE_SIZE, mm, raw};
use rustix::io::Errno;
use wire::{Outcome, PageNo, Run, Slot};

use crate::runtime::state::maps::MapBudget;
use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segment;
use crate::runtime::state::window_uffd::{PutBack, WindowUffd};
use crate::window::anonymous::cover;
use crate::window::gate::{self, Grounds};

/// How often, once in a millisecond, covering a hole is tried before the program is ended.
const COVER_TRIES: u32 = 1000;

/// Where pages were taken to: the window's userfaultfd, and the offset in its scratch area.
#[derive(Clone, Copy)]
pub(super) struct Taken<'a> {
    pub(super) uffd: &'a WindowUffd,
    pub(super) offset: usize,
}

/// Takes pages away as far as they can be checked for pins; returns the first that must stay, or
/// the end. Pages that lie in a mapping of a segment cannot be checked, and stay where they are.
///
/// # Safety
///
/// The contract of [`WindowUffd::take_away`] holds for all the pages.
pub(super) unsafe fn take_away(region: &Region, run: Run, to: Taken<'_>) -> PageNo {
    let mut left = run;
    while let Some(part) = region.mapped.next_gap(left) {
        let offset = to.offset + (part.page - run.page) as usize * PAGE_SIZE;
        // SAFETY: the part lies in the run, so this function's contract covers it.
        let (bytes, result) = unsafe { to.uffd.take_away(region.bytes(part), offset) };
        if result.is_err() {
            return part.page + (bytes / PAGE_SIZE) as u32;
        }
        left = Run::between(part.end(), left.end());
    }
    run.end()
}

/// Puts pages back that [`take_away`] took.
fn put_back(region: &Region, run: Run, from: Taken<'_>) -> PutBack {
    let mut worst = PutBack::Done;
    let mut left = run;
    while let Some(part) = region.mapped.next_gap(left) {
        let offset = from.offset + (part.page - run.page) as usize * PAGE_SIZE;
        worst = worst.max(from.uffd.put_back(region.bytes(part), offset));
        left = Run::between(part.end(), left.end());
    }
    worst
}

/// Puts a page back that [`take_away`] took, and that may not be replaced. False if the program has
/// unmapped its place meanwhile, past the C library. Ends the program where it fails for long.
pub(super) fn give_back(region: &Region, page: Run, from: Taken<'_>) -> bool {
    for _ in 0..COVER_TRIES {
        match put_back(region, page, from) {
            PutBack::Done => return true,
            PutBack::Gone => return false,
            PutBack::Failed => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    // Going on would leave the program a hole where its memory was.
    raw::print(b"pageone-agent: a page cannot be put back\n");
    std::process::abort();
}

/// Maps frames over pages.
///
/// # Safety
///
/// - The pages lie in an open window, and equal the frames from `slot` on, which lie in the
///   segment.
/// - With `taken` they were [taken away](take_away) to there, and readers are blocked.
pub(super) unsafe fn map_frames(
    region: &mut Region,
    run: Run,
    segment: &Segment,
    slot: Slot,
    maps: &mut MapBudget,
    taken: Option<Taken<'_>>,
) -> Outcome {
    let place = region.bytes(run);
    let offset = u64::from(slot) * PAGE_SIZE as u64;
    // SAFETY: by the contract the place holds, or held before its pages were taken, the same bytes
    // as the frames, and no thread can write to it. The segment is sealed against shrinking.
    if unsafe { gate::map_frames(segment.fd.as_fd(), place, offset) }.is_err() {
        // There are too many mappings, since the limit was lowered, say. The old mapping is usually
        // there still, and takes its pages back.
        let is_failure = |taken| put_back(region, run, taken) == PutBack::Failed;
        let restored = !mm::has_hole(place) && !taken.is_some_and(is_failure);
        if !restored {
            // SAFETY: this function's contract covers it.
            unsafe { fill_hole(region, run, segment, slot) };
        }
        return Outcome::Failed;
    }
    maps.add(region.new_maps(run));
    region.mapped.set(run);
    Outcome::Merged
}

/// Restores pages whose mapping is gone, and whose new mapping could not be made: their bytes are
/// those of the frames. Ends the program where that fails too.
///
/// # Safety
///
/// The pages lie in an open window, and were equal to the frames from `slot` on, which lie in the
/// segment.
unsafe fn fill_hole(region: &mut Region, run: Run, segment: &Segment, slot: Slot) {
    let place = region.bytes(run);
    let from = segment.map.as_ptr().wrapping_add(slot.index() * PAGE_SIZE);
    for _ in 0..COVER_TRIES {
        // SAFETY: covering the place and copying the frames gives it the bytes that it had. Until
        // then a thread that touches the hole faults either way. The frames are mapped for
        // `place.len` bytes, and the new mapping is writable and lies elsewhere.
        unsafe {
            if cover(region, run, Grounds::Merged).is_ok() {
                std::ptr::copy_nonoverlapping(from, place.start as *mut u8, place.len);
                return;
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Going on would leave the program a hole where its memory was.
    raw::print(b"pageone-agent: out of memory while replacing a mapping\n");
    std::process::abort();
}

/// Makes pages of zeros untouched memory. `taken`: those outside of segments' mappings were taken
/// away, so they are untouched already.
///
/// # Safety
///
/// The pages lie in an open window and hold zeros, or held zeros before they were taken.
pub(super) unsafe fn map_zeros(region: &mut Region, run: Run, maps: &mut MapBudget, taken: bool) -> Outcome {
    let place = region.bytes(run);
    let done: Result<(), Errno> = if region.mapped.any(run) {
        maps.add(region.new_maps(run));
        // SAFETY: by the contract untouched memory has the same bytes, writers are blocked, and the
        // tracking userfaultfd does not have the pages.
        unsafe { cover(region, run, Grounds::Merged) }
    } else if taken {
        Ok(())
    } else {
        // SAFETY: the place is anonymous memory throughout, so the advice makes it read as zeros,
        // which by the contract it did before.
        unsafe { gate::discard(Grounds::Merged, &[place]) }
    };
    if done.is_ok() { Outcome::Merged } else { Outcome::Failed }
}
