//! `madvise(MADV_MERGEABLE)`: the program's consent, as for the kernel's KSM, and the only way into
//! management.

use crate::intercept::guard::whole_pages;
use crate::intercept::probe;
use crate::runtime::lock::Blocked;
use crate::runtime::log;
use crate::runtime::state::{ENDED, PHASE, STASHED, STATE, wake};
use crate::runtime::threads;
use kmem::PAGE_SIZE;
use kmem::range::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Smaller pieces are left to the kernel, in bytes.
const SMALLEST: usize = 1 << 20;

/// Takes a range that the program marked. False: it was not taken, and the kernel may have it.
pub fn mergeable(start: usize, len: usize) -> bool {
    if PHASE.load(Ordering::Acquire) == ENDED || len < SMALLEST {
        return false;
    }
    let Some(range) = whole_pages(start, len) else { return false };
    // No handler may run into the locks taken below.
    let _signals = Blocked::all();
    if !threads::start() {
        return false;
    }
    let new = unmanaged(range);
    let mut taken = new.iter().map(|piece| piece.len).sum::<usize>() < range.len;
    for piece in new.into_iter().filter(|piece| piece.len >= SMALLEST) {
        match probe::probe(piece).and_then(|sticky| {
            let mut state = STATE.lock();
            // An unmapping that the event thread has read but not acted upon could be one of this very place.
            while STASHED.load(Ordering::Acquire) {
                drop(state);
                std::thread::sleep(Duration::from_micros(100));
                state = STATE.lock();
            }
            state.adopt(piece, sticky)
        }) {
            Ok(region) => {
                taken = true;
                let mib = piece.len >> 20;
                log::line(format_args!("region {region}: {mib} MiB at {:#x}", piece.start));
            }
            Err(why) => log::line(format_args!("{} KiB at {:#x} not taken: {why}", piece.len >> 10, piece.start)),
        }
    }
    wake();
    taken
}

/// The parts of a range that no region manages yet.
fn unmanaged(range: Range) -> Vec<Range> {
    let state = STATE.lock();
    let mut managed: Vec<Range> =
        state.regions.iter().flat_map(|region| region.managed_in(range).map(|part| region.bytes(part))).collect();
    drop(state);
    managed.sort_by_key(|part| part.start);
    let mut left = Vec::new();
    let mut at = range.start;
    for part in managed.into_iter().chain([Range::new(range.end(), PAGE_SIZE)]) {
        if at < part.start {
            left.push(Range::new(at, part.start - at));
        }
        at = at.max(part.end());
    }
    left
}
