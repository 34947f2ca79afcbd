//! `madvise(MADV_MERGEABLE)`: the program's consent, and the only way into management.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use kmem::PAGE_SIZE;
use kmem::range::Range;
use wire::{RegionId, SegmentId};

use crate::intercept::guard::whole_pages;
use crate::intercept::probe::{Ksm, Unfit, probe};
use crate::runtime::interlock::INTERLOCK;
use crate::runtime::lifecycle::{LOADING, Phase, phase};
use crate::runtime::lock::Blocked;
use crate::runtime::log;
use crate::runtime::state::AdoptError;
use crate::runtime::state::STATE;
use crate::runtime::waker::WAKE;
use crate::service::fork;
use crate::service::start::{self, StartError};

/// Smaller pieces are left to the kernel, in bytes: they save little, and each costs a region.
pub(super) const SMALLEST: usize = 1 << 20;
/// Pause between two looks at whether stashed events were acted upon.
const STASH_PAUSE: Duration = Duration::from_micros(100);

/// Memory that is being loaded. It is taken afterwards, whenever the program marks it.
static LOADING_MEMORY: Mutex<Option<Range>> = Mutex::new(None);

pub(super) fn set_loading(range: Option<Range>) {
    *LOADING_MEMORY.lock().unwrap_or_else(PoisonError::into_inner) = range;
}

pub(super) fn is_loading(range: Range) -> bool {
    let loading = *LOADING_MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    loading.is_some_and(|loading| loading.intersect(&range).is_some())
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum MarkError {
    #[error("{0} bytes at {1:#x}: memory is taken in whole pages, and from 1 MiB on")]
    Small(usize, usize),
    #[error(transparent)]
    Start(#[from] StartError),

    #[error(transparent)]
    Unfit(#[from] Unfit),
    #[error(transparent)]
    Adopt(#[from] AdoptError),
}

/// Takes a range that the program marked. False: nothing of it is managed; it is the kernel's.
pub(crate) fn mergeable(start: usize, len: usize) -> bool {
    mark(start, len).is_ok_and(|marked| marked.taken)
}

pub(crate) struct Marked {
    /// Some of it is managed.
    taken: bool,
    /// Why the first part that is not managed is not.
    pub(crate) refused: Option<MarkError>,
}

/// Takes what is fit of a range, and is not managed yet. An error: all of it is left alone.
pub(crate) fn mark(start: usize, len: usize) -> Result<Marked, MarkError> {
    fork::settle();
    if phase() == Phase::Ended {
        return Err(StartError::Ended.into());
    }
    let range = whole_pages(start, len).filter(|_| len >= SMALLEST).ok_or(MarkError::Small(len, start))?;
    if is_loading(range) {
        return Ok(Marked { taken: true, refused: None });
    }
    // No signal handler may run while this thread holds the locks taken below.
    let _signals = Blocked::all();
    start::start(None)?;
    let new = unmanaged(range);
    let mut marked = Marked { taken: new.iter().map(|piece| piece.len).sum::<usize>() < range.len, refused: None };
    for piece in new.into_iter().filter(|piece| piece.len >= SMALLEST) {
        match take(piece) {
            Ok(region) => {
                marked.taken = true;
                let mib = piece.len >> 20;
                log::line(format_args!("region {region}: {mib} MiB at {:#x}", piece.start));
            }
            Err(error) => {
                log::line(format_args!("{} KiB at {:#x} not taken: {error}", piece.len >> 10, piece.start));
                marked.refused.get_or_insert(error);
            }
        }
    }
    WAKE.wake();
    Ok(marked)
}

/// Takes memory that no region manages yet. The caller has blocked all signals.
pub(super) fn take(piece: Range) -> Result<RegionId, MarkError> {
    let of_snapshot = of_snapshot(piece);
    let fit = probe(piece, Ksm::Without, of_snapshot.as_deref().unwrap_or_default())?;
    let mut state = STATE.lock();
    // The event thread may be about to act upon an event about older memory at this address.
    while !INTERLOCK.begin_adopting() {
        drop(state);
        thread::sleep(STASH_PAUSE);
        state = STATE.lock();
    }
    let adopted = state.adopt(piece, fit.sticky, &fit.merged);
    INTERLOCK.end_adopting();
    if of_snapshot.is_some() && adopted.is_ok() {
        LOADING.store(false, Ordering::Release);
    }
    Ok(adopted?)
}

/// The segments that may be mapped in a clone's RAM. `None`: the range is something else.
fn of_snapshot(range: Range) -> Option<Vec<SegmentId>> {
    let state = STATE.lock();
    let is_retained = !state.regions.retained().within(range).is_empty();
    is_retained.then(|| state.segments.iter().map(|segment| segment.id).collect())
}

/// The parts of a range that no region manages yet.
fn unmanaged(range: Range) -> Vec<Range> {
    let mut managed = STATE.lock().regions.managed_bytes(range);
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
