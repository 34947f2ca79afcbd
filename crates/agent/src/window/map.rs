//! Pages that equal their targets are replaced: by frames, or by untouched memory for zeros.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use kmem::range::Range;
use kmem::{PAGE_SIZE, memfd, mm, raw};
use rustix::io::Errno;
use wire::{Outcome, PageNo, Run, Slot};

use crate::runtime::state::given_back::GivenFor;
use crate::runtime::state::maps::MapBudget;
use crate::runtime::state::region::Region;
use crate::runtime::state::segments::Segment;
use crate::runtime::state::window_uffd::{PutBack, WindowUffd};
use crate::window::anonymous::{cover, replace_by_copy};
use crate::window::gate::{self, Grounds};

/// How often, once in a millisecond, covering a hole is tried before the program is ended.
const COVER_TRIES: u32 = 1000;

/// Where pages were taken to: the window's userfaultfd, and the offset in its scratch area.
#[derive(Clone, Copy)]
pub(super) struct Taken<'a> {
    pub(super) uffd: &'a WindowUffd,
    pub(super) offset: usize,
}

/// Takes pages away as far as pins can be checked; returns the first that must stay, or the end.
/// Pages that lie in a mapping of a segment stay where they are.
///
/// # Safety
///
/// The contract of [`WindowUffd::take_away`] holds for all the pages.
pub(super) unsafe fn take_away(region: &Region, run: Run, to: Taken<'_>) -> PageNo {
    for part in region.mapped.gaps(run) {
        let offset = to.offset + (part.page - run.page) as usize * PAGE_SIZE;
        // SAFETY: the part lies in the run, so this function's contract covers it.
        let (bytes, result) = unsafe { to.uffd.take_away(region.bytes(part), offset) };
        if result.is_err() {
            return part.page + (bytes / PAGE_SIZE) as u32;
        }
    }
    run.end()
}

/// Puts pages back that [`take_away`] took.
pub(super) fn put_back(region: &Region, run: Run, from: Taken<'_>) -> PutBack {
    let back = |part: Run| {
        let offset = from.offset + (part.page - run.page) as usize * PAGE_SIZE;
        from.uffd.put_back(region.bytes(part), offset)
    };
    region.mapped.gaps(run).map(back).max().unwrap_or(PutBack::Done)
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
    region.given_back.forget(run);
    populate(place);
    Outcome::Merged
}

/// Enters frames into the page tables that were just mapped, as far as they are in memory. While
/// the place is not tracked yet the kernel enters several at once; later each would take a fault,
/// and two from a virtual CPU (KVM fetches the frame in the background, and the guest comes again).
fn populate(place: Range) {
    // SAFETY: a read fault without a read changes no byte. Failure (memory that is broken, Linux
    // before 5.14) is nothing: whoever reads faults.
    let _ = unsafe { raw::madvise(place.start, place.len, libc::MADV_POPULATE_READ) };
}

/// Restores pages whose mapping is gone, and whose new mapping could not be made: their bytes are
/// those of the frames. Ends the program where that fails for long.
///
/// # Safety
///
/// The pages lie in an open window, and were equal to the frames from `slot` on, which lie in the
/// segment.
unsafe fn fill_hole(region: &mut Region, run: Run, segment: &Segment, slot: Slot) {
    for _ in 0..COVER_TRIES {
        // SAFETY: this function's contract is that of both calls.
        let filled =
            unsafe { try_fill_hole(region, run, segment, slot).or_else(|_| cover_hole(region, run, segment, slot)) };
        if filled.is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // Going on would leave the program a hole where its memory was.
    raw::print(b"pageone-agent: out of memory while replacing a mapping\n");
    std::process::abort();
}

/// Moves a copy of the frames over the pages, in one step: until then who touches the hole faults
/// either way. Frames are read through the descriptor, where failed memory is an error.
///
/// # Safety
///
/// That of [`fill_hole`].
unsafe fn try_fill_hole(region: &mut Region, run: Run, segment: &Segment, slot: Slot) -> io::Result<()> {
    let fill = |bytes: &mut [u8]| {
        let pages = bytes.as_chunks_mut::<PAGE_SIZE>().0;
        pages
            .iter_mut()
            .enumerate()
            .try_for_each(|(i, page)| memfd::read_page(segment.fd.as_fd(), slot.index() + i, page))
    };
    // SAFETY: this function's contract covers it.
    unsafe { replace_by_copy(region, run, fill) }
}

/// The same in two steps, which takes fewer mappings: a thread that touches the place between them
/// reads zeros.
///
/// # Safety
///
/// That of [`fill_hole`].
unsafe fn cover_hole(region: &mut Region, run: Run, segment: &Segment, slot: Slot) -> io::Result<()> {
    for (i, page) in run.pages().enumerate() {
        let mut bytes = [0; PAGE_SIZE];
        memfd::read_page(segment.fd.as_fd(), slot.index() + i, &mut bytes)?;
        let run = Run::one(page);
        let place = region.bytes(run);
        // SAFETY: covering the page and copying the frame gives it the bytes that it had. The new
        // mapping is writable, is one page long, and lies elsewhere.
        unsafe {
            cover(region, run, Grounds::Merged)?;
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.start as *mut u8, place.len);
        }
    }
    Ok(())
}

/// Makes pages of zeros untouched memory. With `taken` those outside of segments' mappings were
/// taken away, so they are untouched already.
///
/// # Safety
///
/// The pages lie in an open window and hold zeros, or held zeros before they were taken.
pub(super) unsafe fn map_zeros(
    region: &mut Region,
    run: Run,
    maps: &mut MapBudget,
    taken: Option<Taken<'_>>,
) -> Outcome {
    let place = region.bytes(run);
    let done: Result<(), Errno> = if region.mapped.any(run) {
        maps.add(region.new_maps(run));
        // SAFETY: by the contract untouched memory has the same bytes, writers are blocked, and the
        // tracking userfaultfd does not have the pages.
        unsafe { cover(region, run, Grounds::Merged) }
    } else if taken.is_some() {
        Ok(())
    } else {
        // SAFETY: the place is anonymous memory throughout, so the advice makes it read as zeros,
        // which by the contract it did before.
        unsafe { gate::discard(Grounds::Merged, &[place]) }
    };
    if done.is_err() {
        return Outcome::Failed;
    }
    region.given_back.note(run, GivenFor::Zeros);
    Outcome::Merged
}

#[cfg(test)]
mod tests {
    use kmem::memfd::create_sealed;
    use wire::{PageNo, RegionId};

    use super::*;
    use crate::runtime::descriptors::Descriptor;
    use crate::runtime::state::region::Sticky;

    #[test]
    fn a_hole_is_filled_though_frames_cannot_be_read_through_the_mapping() {
        let (fd, store) = create_sealed("pageone-test", 4 * PAGE_SIZE).unwrap();
        (0..4).for_each(|slot| store.write_page(slot, &[slot as u8 + 1; PAGE_SIZE]));
        let map = memfd::map_readonly(&fd, 4 * PAGE_SIZE).unwrap();
        // SAFETY: the test does not read the mapping. Memory that failed cannot be read either.
        unsafe { raw::mprotect(map.range().start, map.len(), libc::PROT_NONE).unwrap() };
        let segment = Segment { id: 1, fd: Descriptor::new(fd).unwrap(), map };
        for fill in [try_fill_hole, cover_hole] {
            let start = mm::map_anonymous(1024 * PAGE_SIZE).unwrap();
            let whole = Range::new(start, 1024 * PAGE_SIZE);
            let mut region = Region::new(RegionId(1), whole, Sticky::default()).unwrap();
            let run = Run::new(PageNo(5), 2);
            region.mapped.set(run);
            let hole = region.bytes(run);
            // SAFETY: mapped above and known to this test alone; the frames 1 and 2 exist.
            let filled = unsafe {
                mm::unmap(hole).unwrap();
                fill(&mut region, run, &segment, Slot(1)).unwrap();
                std::slice::from_raw_parts(hole.start as *const u8, hole.len)
            };
            assert!(filled.iter().enumerate().all(|(i, &byte)| byte == (i / PAGE_SIZE) as u8 + 2));
            assert!(!region.mapped.any(run));
        }
    }
}
