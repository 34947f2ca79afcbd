//! Merged pages become anonymous memory again.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

use kmem::mm;
use kmem::range::Range;
use rustix::io::Errno;
use wire::{RegionId, Run};

use crate::runtime::state::State;
use crate::runtime::state::region::Region;
use crate::window::MAX_PAGES;
use crate::window::anonymous::{advise, cover, map_anywhere};

/// Who uses the memory while it is unmerged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Users {
    /// Other threads read and write it: each run is replaced in one step.
    Active,
    /// No thread may use it, since the program is about to move it. It is filled in place, so that
    /// it is one mapping afterwards.
    None,
}

/// Turns merged pages back into anonymous memory with the same bytes, window by window.
pub(crate) fn unmerge(state: &mut State, id: RegionId, run: Run, users: Users) -> Result<(), Errno> {
    let State { regions, uffds, .. } = state;
    let Some(region) = regions.get_mut(id) else { return Ok(()) };
    let mut left = run;
    while let Some(merged) = region.mapped.next_run(left) {
        let last = left.end().0.min(merged.page.0.saturating_add(MAX_PAGES));
        let window = Run::new(merged.page, last - merged.page.0);
        let span = region.bytes(window);
        uffds.open_window(span)?;
        // SAFETY: the window is open.
        let done = unsafe { unmerge_window(region, window, users) };
        uffds.close_window(span);
        done?;
        left = Run::between(window.end(), left.end());
    }
    Ok(())
}

/// Unmerges all merged pages of a window.
///
/// # Safety
///
/// The window is open: its pages are managed, so mapped and readable; writers are blocked; and the
/// tracking userfaultfd does not have them. With [`Users::None`], no thread uses them.
unsafe fn unmerge_window(region: &mut Region, window: Run, users: Users) -> Result<(), Errno> {
    let mut left = window;
    while let Some(run) = region.mapped.next_run(left) {
        match users {
            // SAFETY: the run lies in the window, so this function's contract covers it.
            Users::Active => unsafe { replace_with_copy(region, run) }?,
            // SAFETY: the run lies in the window, and by the contract no thread uses it.
            Users::None => unsafe { refill(region, run) }?,
        }
        left = Run::between(run.end(), left.end());
    }
    Ok(())
}

/// Moves a copy of the pages over them, in one step.
///
/// # Safety
///
/// The pages lie in an open window.
unsafe fn replace_with_copy(region: &mut Region, run: Run) -> Result<(), Errno> {
    let place = region.bytes(run);
    let copy = map_anywhere(place.len, region.sticky)?;
    let from = Range::new(copy, place.len);
    // SAFETY: `copy` is a fresh mapping of that length, which nobody else knows. The place is
    // mapped, and no thread writes to it while the window is open. So the copy has the same bytes
    // when it takes the place's address, and readers see no difference.
    let moved = unsafe {
        std::ptr::copy_nonoverlapping(place.start as *const u8, copy as *mut u8, place.len);
        advise(region, from, true);
        mm::remap_fixed(from, place.start)
    };
    if moved.is_err() {
        // SAFETY: the copy stays where it was mapped above, and nothing refers to it.
        let _ = unsafe { mm::unmap(from) };
    }
    moved?;
    region.mapped.clear(run);
    Ok(())
}

/// Maps anonymous memory over the pages and writes their bytes back.
///
/// # Safety
///
/// The pages lie in an open window, and no thread uses them.
unsafe fn refill(region: &mut Region, run: Run) -> Result<(), Errno> {
    let place = region.bytes(run);
    // SAFETY: the place is mapped and readable, and no thread writes to it while the slice exists.
    let bytes = unsafe { std::slice::from_raw_parts(place.start as *const u8, place.len) }.to_vec();
    // SAFETY: no thread uses the place before its bytes are back. The new mapping can be written,
    // is as long as the copy, and lies elsewhere.
    unsafe {
        cover(region, run)?;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.start as *mut u8, place.len);
    }
    Ok(())
}

/// Makes merged pages untouched memory.
///
/// # Safety
///
/// No code relies on the pages' bytes: the program is discarding them, or its guest has marked them
/// as free and they are claimed.
pub(crate) unsafe fn discard(state: &mut State, id: RegionId, run: Run) -> Result<(), Errno> {
    let State { regions, uffds, .. } = state;
    let Some(region) = regions.get_mut(id) else { return Ok(()) };
    let Some(first) = region.mapped.next_run(run) else { return Ok(()) };
    let span = region.bytes(Run::between(first.page, run.end()));
    uffds.untrack(span)?;
    let mut left = run;
    let mut result = Ok(());
    while let Some(merged) = region.mapped.next_run(left)
        && result.is_ok()
    {
        // SAFETY: by the contract no code relies on the bytes. The pages have left tracking just
        // now.
        result = unsafe { cover(region, merged) };
        left = Run::between(merged.end(), left.end());
    }
    uffds.track(span);
    result
}
