//! One sweep over the guest's RAM.
//!
//! A sweep takes the agent's lock for one batch at a time ([`SWEEP_PAGES`]). It claims marked pages
//! and turns merged ones into anonymous memory. It gives all of them back to the kernel in one
//! `process_madvise(2)`, releases them and tells the daemon. It takes the lock before it claims,
//! and the guest waits for claims: so no thread that waits for the lock is itself waited for.

#![allow(unsafe_code)] // Discards the guest's free pages.

use std::ops::{ControlFlow, Range as Frames};
use std::time::{Duration, Instant};

use kmem::range::Range;
use ppr::{Ended, SWEEP_PAGES};
use rustix::io::Errno;
use wire::recycle::{Extent, MAX_RUNS, Recycled, Refusal, Sweep};
use wire::{Outcome, RegionId, Run, ToDaemon};

use crate::runtime::cpu_ns;
use crate::runtime::proc_files::ProcFiles;
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::runtime::state::given_back::GivenFor;
use crate::window::gate::{self, Grounds, Taker};
use crate::window::pins::held_memory;
use crate::window::unmerge::discard;

const FLUSH_EVERY: Duration = Duration::from_millis(5);

/// Recycles marked pages, for at most `budget` of CPU time, and queues the answer. Calls `flush`
/// now and then, without the lock.
pub(crate) fn sweep(budget: Duration, mut flush: impl FnMut()) {
    let begin = cpu_ns();
    let mut state = STATE.lock();
    let refused = refusal(&mut state);
    let ranges: Vec<Frames<u64>> = match (refused, &state.recycler) {
        (None, Some(recycler)) => recycler.extents().iter().map(Extent::frames).collect(),
        _ => Vec::new(),
    };
    drop(state);
    let mut flushed = Instant::now();
    let is_over = || Duration::from_nanos(cpu_ns() - begin) > budget;
    let (sum, ended) = ppr::sweep(ranges, is_over, |left| {
        let done = batch(left)?;
        if flushed.elapsed() > FLUSH_EVERY {
            flush();
            flushed = Instant::now();
        }
        STATE.yield_to_waiting();
        ControlFlow::Continue(done)
    });
    let cpu_ns = cpu_ns();
    STATE.lock().uplink.outbox.push(ToDaemon::Swept(Sweep {
        pages: sum.pages,
        runs: sum.runs,
        lost: sum.lost,
        longest_ns: sum.longest.as_nanos() as u64,
        sweep_ns: cpu_ns - begin,
        cpu_ns,
        more: ended == Ended::Over,
        refused: if let Ended::Stopped(why) = ended { why } else { refused },
    }));
}

/// Why nothing may be recycled now.
fn refusal(state: &mut State) -> Option<Refusal> {
    let Some(recycler) = state.recycler.as_mut().filter(|recycler| !recycler.extents().is_empty()) else {
        return Some(Refusal::NoPool);
    };
    if !recycler.check_header() {
        return Some(Refusal::Header);
    }
    match held_memory(&state.files)? {
        Outcome::Pinned => Some(Refusal::Pinned),
        Outcome::Locked => Some(Refusal::Locked),
        _ => Some(Refusal::Kernel),
    }
}

/// Recycles one batch of `left`, which becomes the part that was not looked at. Breaks with the
/// reason, or without one where the daemon does not read.
fn batch(left: &mut Frames<u64>) -> ControlFlow<Option<Refusal>, ppr::Recycled> {
    let mut state = STATE.lock();
    match recycle_batch(&mut state, left) {
        Err(_) => ControlFlow::Break(Some(Refusal::Kernel)),
        Ok(_) if state.uplink.outbox.has_overflowed() => ControlFlow::Break(None),
        Ok(done) => ControlFlow::Continue(done),
    }
}

fn recycle_batch(state: &mut State, within: &mut Frames<u64>) -> Result<ppr::Recycled, Errno> {
    // Taken out for the call, which changes the other parts of the state.
    let Some(mut recycler) = state.recycler.take() else { return Err(Errno::NODEV) };
    let mut stayed = 0;
    // One batch a call: the first one that holds anything reaches the limit.
    let result = recycler.recycle(within, SWEEP_PAGES, |extents, runs| {
        // SAFETY: the host claims the frames of `runs` before it calls this, and releases them
        // afterwards.
        stayed += unsafe { take_back(state, extents, runs) }?;
        Ok(())
    });
    state.recycler = Some(recycler);
    result.map(|done| ppr::Recycled { pages: done.pages - stayed.min(done.pages), ..done })
}

/// Turns runs of claimed frames into untouched memory, as far as no device may be writing to them,
/// and tells the daemon. Returns how many pages stayed as they were.
///
/// Pins are looked for here, under the lock: a device that registers memory during a sweep keeps
/// its pages. `UFFDIO_MOVE` refuses pinned pages; what it cannot check (pages in mappings of
/// segments, and all before Linux 6.8) stays while the process has pinned memory.
///
/// # Safety
///
/// The guest has marked the frames as free, and they are claimed: until they are released the guest
/// relies on nothing that they hold.
unsafe fn take_back(state: &mut State, extents: &[Extent], runs: &[Frames<u64>]) -> Result<u64, Errno> {
    let mut batch = Batch::default();
    let mut result = Ok(());
    for (id, run) in runs.iter().flat_map(|frames| Extent::pages_of(extents, frames)) {
        // SAFETY: the pages are claimed, see the contract.
        result = unsafe { batch.take(state, id, run) };
        if result.is_err() {
            break;
        }
    }
    let Batch { places, recycled, stayed, .. } = batch;
    // SAFETY: the places are managed memory outside of mappings of segments, and claimed.
    let result = result.and(unsafe { gate::discard(Grounds::Discarded, &places) });
    // The daemon is told after an error too: some pages may be gone, and the ledger must not take
    // them for merged.
    for (region, runs) in recycled {
        if let Some(region) = state.regions.get_mut(region) {
            runs.iter().for_each(|&run| region.given_back.note(run, GivenFor::Marks));
        }
        state.uplink.outbox.push(ToDaemon::Recycled(Recycled { region, runs }));
    }
    result.map(|()| stayed)
}

/// What became of the pages of a batch.
#[derive(Default)]
struct Batch {
    /// Whether the process has pinned or locked memory, once it was asked.
    is_held: Option<bool>,
    /// What is to be given back to the kernel in one call.
    places: Vec<Range>,
    /// What the daemon is told.
    recycled: Vec<(RegionId, Vec<Run>)>,
    stayed: u64,
}

impl Batch {
    /// Takes one run of pages away.
    ///
    /// # Safety
    ///
    /// The pages are claimed: nobody relies on what they hold.
    unsafe fn take(&mut self, state: &mut State, id: RegionId, run: Run) -> Result<(), Errno> {
        // Pages that were unmapped or given back since are the program's.
        let Some(region) = state.regions.managing(id, run) else { return Ok(()) };
        let merged = gate::merged(region, run);
        for part in gate::without(run, &merged) {
            self.take_plain(state, id, part);
        }
        for part in merged {
            if self.is_held(&state.files) {
                self.stayed += u64::from(part.len);
                continue;
            }
            // SAFETY: the pages are claimed, see the contract, and nothing is pinned.
            unsafe { discard(state, id, part) }?;
            self.add(id, part);
        }
        Ok(())
    }

    /// Pages that lie in no mapping of a segment.
    fn take_plain(&mut self, state: &State, id: RegionId, run: Run) {
        let Some(region) = state.regions.get(id) else { return };
        let place = region.bytes(run);
        let Some(mut taker) = Taker::new(state.uffds.window()) else {
            if self.is_held(&state.files) {
                self.stayed += u64::from(run.len);
            } else {
                self.places.push(place);
                self.add(id, run);
            }
            return;
        };
        // A fork makes pages look pinned until they are written.
        let is_shared = state.uplink.control.forks() > 0 && region.is_inherited();
        let mut stayed = Vec::new();
        // SAFETY: the pages are claimed, and lie in no mapping of a segment.
        unsafe { taker.take(place, |address| stayed.push(Run::one(region.page_at(address)))) };
        if !stayed.is_empty() && is_shared && !self.is_held(&state.files) {
            self.places.extend(stayed.drain(..).map(|page| region.bytes(page)));
        }
        self.stayed += stayed.len() as u64;
        gate::without(run, &stayed).into_iter().for_each(|part| self.add(id, part));
    }

    fn is_held(&mut self, files: &ProcFiles) -> bool {
        *self.is_held.get_or_insert_with(|| held_memory(files).is_some())
    }

    fn add(&mut self, id: RegionId, run: Run) {
        match self.recycled.last_mut() {
            Some((last, runs)) if *last == id && runs.len() < MAX_RUNS => runs.push(run),
            _ => self.recycled.push((id, vec![run])),
        }
    }
}
