//! A whole region becomes plain memory again, window by window.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

use std::time::Duration;

use kmem::range::Range;
use kmem::{PAGE_SIZE, mm};
use rustix::io::Errno;
use wire::{PageNo, RegionId, Run};

use crate::runtime::globals::STATE;
use crate::runtime::state::State;
use crate::runtime::state::region::Region;
use crate::window::anonymous::{advise, map_anywhere};
use crate::window::{MAX_PAGES, ZEROS};

/// How long other threads may take the lock between two windows.
const BREATHER: Duration = Duration::from_micros(20);

/// Gives the first `pages` pages of a region their plain memory back. The lock is taken for each
/// window, so that the program's threads get it in between.
pub(crate) fn restore_region(id: RegionId, pages: u32) -> Result<(), Errno> {
    let mut twin: Option<Twin> = None;
    for start in (0..pages).step_by(MAX_PAGES as usize) {
        let mut state = STATE.lock();
        let Some(region) = state.regions.get_mut(id) else { break };
        let window = Run::new(PageNo(start), MAX_PAGES.min(pages - start));
        if twin.is_none() {
            if !region.mapped.any(Run::new(PageNo(0), pages)) {
                break;
            }
            twin = Some(Twin::new(region)?);
        }
        let parts: Vec<Run> = region.managed_in(region.bytes(window)).collect();
        for part in parts {
            if let Some(twin) = &mut twin {
                restore(&mut state, id, part, twin)?;
            }
        }
        drop(state);
        std::thread::sleep(BREATHER);
    }
    Ok(())
}

/// Gives one window its plain memory back, if all of it is managed.
fn restore(state: &mut State, id: RegionId, run: Run, twin: &mut Twin) -> Result<(), Errno> {
    let State { regions, uffds, .. } = state;
    let Some(region) = regions.get_mut(id).filter(|region| region.manages(run)) else { return Ok(()) };
    let span = region.bytes(run);
    uffds.open_window(span)?;
    // SAFETY: the window is open: its pages are mapped, writers are blocked, and the tracking
    // userfaultfd does not have them.
    let done = unsafe { twin.replace(region, run) };
    uffds.close_window(span);
    done
}

/// Memory as long as a region, which takes the region's place window by window. It is one mapping,
/// so that the kernel joins the moved pieces to one again; pieces mapped one by one would stay
/// apart.
struct Twin {
    start: usize,
    /// The part that was not moved yet.
    left: Range,
}

impl Twin {
    /// Untouched memory for a region.
    fn new(region: &mut Region) -> Result<Self, Errno> {
        let start = map_anywhere(region.range.len, region.sticky)?;
        let left = Range::new(start, region.range.len);
        advise(region, left, true);
        Ok(Self { start, left })
    }

    /// Copies the pages that are not zero to their place in the twin, and moves that part of the
    /// twin over them. Windows come in ascending order; the twin's memory between them is unmapped.
    ///
    /// # Safety
    ///
    /// The pages lie in an open window of the region that this twin was made for.
    unsafe fn replace(&mut self, region: &mut Region, run: Run) -> Result<(), Errno> {
        let place = region.bytes(run);
        let part = Range::new(self.start + run.page.index() * PAGE_SIZE, place.len);
        self.skip_to(part.start);
        for offset in (0..place.len).step_by(PAGE_SIZE) {
            // SAFETY: by the contract `from` is a page of mapped memory to which no thread writes.
            // The twin is as long as the region and nobody else knows it, so the page at `offset`
            // of the part is mapped, writable and unused.
            unsafe {
                let from = (place.start + offset) as *const u8;
                if libc::memcmp(from.cast(), ZEROS.as_ptr().cast(), PAGE_SIZE) != 0 {
                    std::ptr::copy_nonoverlapping(from, (part.start + offset) as *mut u8, PAGE_SIZE);
                }
            }
        }
        // SAFETY: the part holds the place's bytes, which cannot change while the window is open;
        // so readers of the place see no difference. Nothing refers to the part at its old address.
        unsafe { mm::remap_fixed(part, place.start) }?;
        self.left = Range::new(part.end(), self.left.end() - part.end());
        region.mapped.clear(run);
        Ok(())
    }

    fn skip_to(&mut self, start: usize) {
        let unused = Range::new(self.left.start, start - self.left.start);
        if unused.len > 0 {
            // SAFETY: memory of the twin that was not moved: nothing refers to it.
            let _ = unsafe { mm::unmap(unused) };
        }
        self.left = Range::new(start, self.left.end() - start);
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        self.skip_to(self.left.end());
    }
}
