//! Loading pages of maps (read, check, put in place), and serving faults.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kmem::uffd::Event;
use rustix::event::{PollFd, PollFlags, poll};

use super::core::{Core, add_time};
use super::state::{Advice, HUGE_PAGES, MapState, Placed};
use crate::BLOCK;
use crate::disk::buffer::AlignedBuf;
use crate::error::{During, MapError};

/// Pages loaded in one go.
const RUN: usize = 256;

thread_local! {
    static BOUNCE: RefCell<AlignedBuf> = RefCell::new(AlignedBuf::zeroed(0));
}

/// Lends this thread's buffer of at least `pages` pages.
fn with_bounce<R>(pages: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
    BOUNCE.with(|cell| {
        let mut buffer = cell.borrow_mut();
        if buffer.len() < pages * BLOCK {
            *buffer = AlignedBuf::zeroed(pages * BLOCK);
        }
        f(&mut buffer[..pages * BLOCK])
    })
}

/// Puts pages in their place, counts them, and then wakes the threads that wait for them: every
/// page that a thread has seen is counted.
fn place(core: &Core, map: &MapState, first: usize, pages: &[u8]) -> std::io::Result<()> {
    let result = place_asleep(core, map, first, pages);
    map.window.wake(&core.uffd, first, pages.len() / BLOCK);
    result
}

fn place_asleep(core: &Core, map: &MapState, first: usize, pages: &[u8]) -> std::io::Result<()> {
    let count = pages.len() / BLOCK;
    let mut done = 0;
    while done < count {
        let filled = map.window.fill(&core.uffd, first + done, &pages[done * BLOCK..])?;
        for page in first + done..first + done + filled {
            core.mark_resident(map, page);
        }
        done += filled;
        if done < count {
            // It is there already: another thread loaded it.
            core.mark_resident(map, first + done);
            done += 1;
        }
    }
    Ok(())
}

/// Loads pages of one mblock of a map.
#[derive(Clone, Copy)]
pub(super) struct Loader<'a> {
    pub(super) core: &'a Core,
    pub(super) map: &'a MapState,
    pub(super) placed: &'a Placed,
}

impl Loader<'_> {
    /// Loads `count` pages of an mblock, from its page `first` on.
    pub(crate) fn load_run(&self, first: usize, count: usize) -> Result<(), MapError> {
        let Self { core, map, placed } = *self;
        let mut at = first;
        while at < first + count {
            let now = RUN.min(first + count - at);
            let start = core.admit(now);
            let result: Result<(), MapError> = with_bounce(now, |bounce| {
                placed.mblock.read_blocks(at as u64, bounce)?;
                let start = add_time(&core.stats.reading, start);
                place(core, map, placed.first + at, bounce).during("filling", "a map")?;
                add_time(&core.stats.placing, start);
                Ok(())
            });
            core.settle(now);
            // A fast medium may have answered before this thread slept. The kernel would let it run
            // on for milliseconds, from one load to the next, while threads wait for the CPU or for
            // these pages.
            std::thread::yield_now();
            result?;
            at += now;
        }
        Ok(())
    }

    /// Loads single pages of an mblock.
    pub(crate) fn load_scattered(&self, pages: &[usize]) -> Result<(), MapError> {
        let Self { core, map, placed } = *self;
        for pages in pages.chunks(RUN) {
            if let [page] = pages {
                self.load_run(*page, 1)?;
                continue;
            }
            let start = core.admit(pages.len());
            let blocks: Vec<u64> = pages.iter().map(|&page| page as u64).collect();
            let result: Result<(), MapError> = with_bounce(pages.len(), |bounce| {
                placed.mblock.read_scattered(&blocks, bounce)?;
                let start = add_time(&core.stats.reading, start);
                for (page, bytes) in pages.iter().zip(bounce.chunks_exact(BLOCK)) {
                    place(core, map, placed.first + page, bytes).during("filling", "a map")?;
                }
                add_time(&core.stats.placing, start);
                Ok(())
            });
            core.settle(pages.len());
            result?;
        }
        Ok(())
    }

    /// Loads the missing pages of a range, as long as memory is not short.
    pub(crate) fn load_ahead(&self, first: usize, count: usize) -> Result<(), MapError> {
        let Self { core, map, placed } = *self;
        let (mut at, end) = (first, first + count);
        while at < end && !core.is_short() {
            if map.is_resident(placed.first + at) {
                at += 1;
                continue;
            }
            let run = (at..end.min(at + RUN)).take_while(|&page| !map.is_resident(placed.first + page)).count();
            self.load_run(at, run)?;
            at += run;
        }
        collapse(core, map, placed.first + first, placed.first + at);
        Ok(())
    }
}

/// Huge pages where pages `first..end` of the window are all there: the processor finds them
/// faster.
fn collapse(core: &Core, map: &MapState, first: usize, end: usize) {
    let mut at = first.next_multiple_of(HUGE_PAGES);
    while at + HUGE_PAGES <= end && !core.is_short() {
        // No page is dropped meanwhile: dropping must know whether a page is part of a huge page.
        let _shape = map.shape.write();
        let huge = &map.huge[at / HUGE_PAGES];
        if !huge.load(Ordering::Relaxed)
            && (at..at + HUGE_PAGES).all(|page| map.is_resident(page))
            && map.window.collapse(at)
        {
            huge.store(true, Ordering::Release);
            core.stats.huge.fetch_add(1, Ordering::Relaxed);
        }
        at += HUGE_PAGES;
    }
}

/// Serves faults until the cache goes.
pub(crate) fn serve_faults(core: &Arc<Core>, stop: BorrowedFd<'_>) {
    loop {
        let mut fds = [PollFd::new(&core.uffd, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
        if poll(&mut fds, None).is_err() {
            continue;
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        while let Ok(Some(event)) = core.uffd.read_event() {
            if let Event::Pagefault { address, .. } = event {
                serve(core, address);
            }
        }
    }
}

fn serve(core: &Core, address: usize) {
    // No map: a thread reads from a map that is being dropped, which the borrow checker forbids.
    let Some(map) = core.map_at(address) else { return };
    let Some(_entered) = map.enter() else { return };
    let page = (address - map.window.range().start) / BLOCK;
    let placed = map.placed_at(page);
    let loader = Loader { core, map: &map, placed };
    core.stats.faults.fetch_add(1, Ordering::Relaxed);
    map.warm(page, 1);
    if map.is_resident(page) {
        // Loaded meanwhile. Where it was dropped again, the next touch comes back here.
        if loader.load_run(page - placed.first, 1).is_err() {
            map.window.wake(&core.uffd, page, 1);
        }
        return;
    }
    let ahead = match map.advice.load(Ordering::Relaxed) {
        a if a == Advice::Random as u8 => 1,
        a if a == Advice::Sequential as u8 => core.throttled(RUN),
        // Read-ahead must not evict pages that were asked for.
        _ if core.is_full() && map.loaded_to.load(Ordering::Relaxed) != page => 1,
        _ => core.throttled(core.settings.read_ahead),
    };
    let end = (placed.first + placed.pages).min(page + ahead);
    let run = (page..end).take_while(|&page| !map.is_resident(page)).count().max(1);
    map.loaded_to.store(page + run, Ordering::Relaxed);
    let mut result = loader.load_run(page - placed.first, run);
    if result.is_err() && run > 1 {
        // The damage may be in a neighbour.
        result = loader.load_run(page - placed.first, 1);
    }
    if result.is_err() {
        core.stats.poisoned.fetch_add(1, Ordering::Relaxed);
        let _ = map.window.poison(&core.uffd, page);
        map.window.wake(&core.uffd, page, 1);
    }
}
