//! Changing the mappings under a running program.
//!
//! A *window* is a span over which writers wait: it is taken from the tracking userfaultfd
//! (`WP_ASYNC`: the kernel resolves faults itself), given to the waiting one and write-protected.
//! Readers go on. What is changed inside keeps the bytes as they are, so nobody can tell. Closing
//! it unregisters the span, which wakes the writers, and tracks it again.
//!
//! Everything here runs with the agent's lock held, and unregisters from the tracking userfaultfd
//! before it unmaps anything: that one raises events, which the event thread reads only when it
//! gets the lock.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

pub mod merge;
pub mod pins;

use crate::runtime::regions::{Pages, Region, Sticky};
use crate::runtime::sabotage::{self, Sabotage};
use crate::runtime::state::State;
use crate::window::pins::Waiting;
use kmem::range::Range;
use kmem::{PAGE_SIZE, mm, raw};
use rustix::io::Errno;
use wire::RegionId;

/// A page of zeros to compare with.
pub static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
/// Most pages in one window.
pub const MAX_PAGES: u32 = wire::MAX_WINDOW_PAGES;

/// How memory is unmerged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// Other threads read and write it: each run is replaced in one step.
    Active,
    /// Nobody may use it just now (the program moves it): filled in place, so that it is one
    /// mapping afterwards.
    None,
}

impl State {
    /// Opens a window. After an error it is closed.
    pub fn open_window(&mut self, span: Range) -> Result<(), Errno> {
        if self.waiting.is_none() {
            // A forked child: the one of its parent is of no use to it.
            self.waiting = Waiting::new().ok();
        }
        let waiting = self.waiting.as_ref().ok_or(Errno::NOMEM)?.uffd();
        let opened = match &self.tracking {
            Some(tracking) => tracking.unregister(span),
            None => Ok(()),
        };
        let opened = opened.and_then(|()| waiting.register_wp(span)).and_then(|()| {
            if sabotage::is_on(Sabotage::NoProtect) { Ok(()) } else { waiting.write_protect(span, true) }
        });
        if opened.is_err() {
            self.close_window(span);
        } else if sabotage::is_on(Sabotage::SlowWindow) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        opened
    }

    /// Closes a window: writers go on.
    pub fn close_window(&mut self, span: Range) {
        if let Some(waiting) = self.waiting.as_ref().map(Waiting::uffd) {
            // Fails only where nothing is mapped any more; then there is nothing to unregister either.
            let _ = waiting.unregister(span);
            let _ = waiting.wake(span);
        }
        self.track(span);
    }

    /// Registers a span with the tracking userfaultfd.
    pub fn track(&mut self, span: Range) {
        if let Some(tracking) = &self.tracking
            && tracking.register_wp(span).is_err()
        {
            self.untracked.push(span);
        }
    }

    /// Tries again what [`State::track`] could not do.
    pub fn track_again(&mut self) {
        for span in std::mem::take(&mut self.untracked) {
            let parts: Vec<Range> = self.regions.iter().flat_map(|r| r.managed_in(span).map(|p| r.bytes(p))).collect();
            parts.into_iter().for_each(|part| self.track(part));
        }
    }

    /// Takes a span away from the tracking userfaultfd, so that unmapping it raises no event.
    pub fn untrack(&mut self, span: Range) {
        if let Some(tracking) = &self.tracking {
            // Fails only where nothing is mapped.
            let _ = tracking.unregister(span);
        }
    }

    /// Turns merged pages back into anonymous memory with the same bytes.
    pub fn unmerge(&mut self, id: RegionId, pages: Pages, users: Users) -> Result<(), Errno> {
        let mut left = pages;
        while let Some(index) = self.position(id)
            && let Some(run) = self.regions[index].mapped.next_run(left)
        {
            let window = Pages { start: run.start, end: left.end.min(run.start.saturating_add(MAX_PAGES)) };
            let span = self.regions[index].bytes(window);
            self.open_window(span)?;
            let done = unmerge_window(&mut self.regions[index], window, users);
            self.close_window(span);
            done?;
            left.start = window.end;
        }
        Ok(())
    }

    /// Gives a window of a region its plain memory back, all of it: what is not zero is copied to
    /// its place in `twin`, and that part of the twin is moved over the window. `false`: not
    /// all of the window is managed, and nothing was done.
    pub fn restore(&mut self, id: RegionId, pages: Pages, twin: &mut Twin) -> Result<bool, Errno> {
        let Some(index) = self.position(id).filter(|&index| self.regions[index].manages(pages)) else {
            return Ok(false);
        };
        let span = self.regions[index].bytes(pages);
        self.open_window(span)?;
        let done = twin.replace(&mut self.regions[index], pages);
        self.close_window(span);
        done.map(|()| true)
    }

    /// Makes merged pages untouched memory, as the program discards them.
    pub fn discard(&mut self, id: RegionId, pages: Pages) -> Result<(), Errno> {
        let Some(index) = self.position(id) else { return Ok(()) };
        let region = &mut self.regions[index];
        let Some(first) = region.mapped.next_run(pages) else { return Ok(()) };
        let span = region.bytes(Pages { start: first.start, end: pages.end });
        if let Some(tracking) = &self.tracking {
            tracking.unregister(span)?;
        }
        let mut left = pages;
        let mut result = Ok(());
        while let Some(run) = region.mapped.next_run(left)
            && result.is_ok()
        {
            // SAFETY: the program discards these pages.
            result = unsafe { cover_anonymous(region, run) };
            left.start = run.end;
        }
        self.track(span);
        result
    }
}

/// Memory as long as a region, to take the region's place window by window. It is one mapping, so
/// that the kernel joins the moved pieces to one again; pieces of their own would stay pieces for
/// ever.
pub struct Twin {
    start: usize,
    /// What has not been moved yet.
    left: Range,
}

impl Twin {
    /// Memory for a region, untouched.
    pub fn new(region: &mut Region) -> Result<Twin, Errno> {
        let start = anonymous(0, region.range.len, 0, region.sticky)?;
        let left = Range::new(start, region.range.len);
        advise(region, left, true);
        Ok(Twin { start, left })
    }

    /// Moves the part of these pages into place, with their bytes. Windows come in ascending order;
    /// what is left out is unmapped.
    fn replace(&mut self, region: &mut Region, pages: Pages) -> Result<(), Errno> {
        let place = region.bytes(pages);
        let part = Range::new(self.start + pages.start as usize * PAGE_SIZE, place.len);
        self.skip_to(part.start);
        for offset in (0..place.len).step_by(PAGE_SIZE) {
            // SAFETY: a page of mapped memory whose writers wait, and a page of the twin, which nobody else
            // knows.
            unsafe {
                let from = (place.start + offset) as *const u8;
                if libc::memcmp(from.cast(), ZEROS.as_ptr().cast(), PAGE_SIZE) != 0 {
                    std::ptr::copy_nonoverlapping(from, (part.start + offset) as *mut u8, PAGE_SIZE);
                }
            }
        }
        // SAFETY: the bytes stay what they are.
        unsafe { mm::remap_fixed(part, place.start) }?;
        self.left = Range::new(part.end(), self.left.end() - part.end());
        region.mapped.clear(pages);
        Ok(())
    }

    fn skip_to(&mut self, start: usize) {
        let unused = Range::new(self.left.start, start - self.left.start);
        if unused.len > 0 {
            // SAFETY: the twin's own memory, which was not moved.
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

fn unmerge_window(region: &mut Region, window: Pages, users: Users) -> Result<(), Errno> {
    let mut left = window;
    while let Some(run) = region.mapped.next_run(left) {
        let place = region.bytes(run);
        match users {
            Users::Active => {
                let copy = anonymous(0, place.len, 0, region.sticky)?;
                let from = Range::new(copy, place.len);
                // SAFETY: `copy` is fresh memory of that length; the place is mapped and its writers wait. Moving
                // the copy over the place leaves its bytes as they are.
                let moved = unsafe {
                    std::ptr::copy_nonoverlapping(place.start as *const u8, copy as *mut u8, place.len);
                    advise(region, from, true);
                    mm::remap_fixed(from, place.start)
                };
                if moved.is_err() {
                    // SAFETY: mapped above, and still of no use to anybody.
                    let _ = unsafe { mm::unmap(from) };
                }
                moved?;
                region.mapped.clear(run);
            }
            Users::None => {
                // SAFETY: the place is mapped, and nobody writes to it.
                let bytes = unsafe { std::slice::from_raw_parts(place.start as *const u8, place.len) }.to_vec();
                // SAFETY: nobody uses the place until its bytes are back.
                unsafe {
                    cover_anonymous(region, run)?;
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), place.start as *mut u8, place.len);
                }
            }
        }
        left.start = run.end;
    }
    Ok(())
}

/// Maps untouched memory over pages of a region and repeats the program's advice. The pages are not
/// tracked afterwards.
///
/// # Safety
/// What was there is gone.
pub unsafe fn cover_anonymous(region: &mut Region, pages: Pages) -> Result<(), Errno> {
    let place = region.bytes(pages);
    anonymous(place.start, place.len, libc::MAP_FIXED, region.sticky)?;
    region.mapped.clear(pages);
    advise(region, place, true);
    Ok(())
}

/// Anonymous memory with the flags of the program's own, so that the kernel joins it with its
/// neighbours.
fn anonymous(start: usize, len: usize, fixed: i32, sticky: Sticky) -> Result<usize, Errno> {
    let reserve = if sticky.no_reserve { libc::MAP_NORESERVE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed | reserve;
    // SAFETY: replaces nothing, or with MAP_FIXED what the caller gave up.
    unsafe { raw::mmap(start, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) }
}

/// Repeats the program's advice on a new mapping of a region.
pub fn advise(region: &mut Region, place: Range, is_anonymous: bool) {
    let sticky = region.sticky;
    if sabotage::is_on(Sabotage::NoStickyAdvice) {
        return;
    }
    let huge = match sticky.huge {
        Some(true) if is_anonymous => Some(libc::MADV_HUGEPAGE),
        Some(false) if is_anonymous => Some(libc::MADV_NOHUGEPAGE),
        _ => None,
    };
    let all = [sticky.dont_fork.then_some(libc::MADV_DONTFORK), sticky.dont_dump.then_some(libc::MADV_DONTDUMP), huge];
    for advice in all.into_iter().flatten() {
        // SAFETY: none of these changes memory.
        if unsafe { raw::madvise(place.start, place.len, advice) }.is_err() && advice == libc::MADV_DONTFORK {
            region.leaks_into_children = true;
        }
    }
}
