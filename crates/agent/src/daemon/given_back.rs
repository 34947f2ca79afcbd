//! What was given back before this connection: a daemon that was restarted counts it as saved, too.

use kmem::pagemap::{Categories, Query};
use wire::recycle::{MAX_RUNS, Recycled};
use wire::{PageNo, RegionId, Run, ToDaemon};

use crate::daemon::send::try_flush;
use crate::runtime::state::given_back::GivenFor;
use crate::runtime::state::{STATE, State};

/// Pages that are looked at under the lock at once: 64 MiB.
const SLICE: u32 = 1 << 14;
/// Messages at most; they have room for four million runs.
const MOST: usize = 1024;

/// Tells the daemon, slice by slice.
pub(super) fn tell() {
    let regions: Vec<(RegionId, Run)> = STATE.lock().regions.iter().map(|region| (region.id, region.all())).collect();
    let mut left = MOST;
    for (id, all) in regions {
        for first in (0..all.len).step_by(SLICE as usize) {
            let mut state = STATE.lock();
            let slice = Run::new(PageNo(first), SLICE.min(all.len - first));
            let messages = messages(&mut state, id, slice);
            left = left.saturating_sub(messages.len());
            if left == 0 || !state.uplink.is_usable() {
                return;
            }
            messages.into_iter().for_each(|message| state.uplink.outbox.push(message));
            try_flush(&mut state);
        }
    }
}

/// What there is to say of a slice. Pages that hold something by now are forgotten.
fn messages(state: &mut State, id: RegionId, slice: Run) -> Vec<ToDaemon> {
    let State { regions, files, .. } = state;
    let (Some(region), Some(pagemap)) = (regions.get_mut(id), files.pagemap_from_start()) else { return Vec::new() };
    let both = [GivenFor::Zeros, GivenFor::Marks];
    if both.iter().all(|&why| region.given_back.runs(slice, why).next().is_none()) {
        return Vec::new();
    }
    // Who has read such a page since has the kernel's page of zeros there.
    let query = Query {
        inverted: Categories::PFNZERO,
        required: Categories::PFNZERO,
        any_of: Categories::PRESENT | Categories::SWAPPED,
        ..Query::default()
    };
    let mut filled = Vec::new();
    let looked = pagemap.scan(region.bytes(slice), &query, &mut |found| {
        filled.push(Run::between(region.page_at(found.start), region.page_at(found.end)));
    });
    if looked.is_err() {
        return Vec::new();
    }
    filled.into_iter().for_each(|run| region.given_back.forget(run));
    let of = |why| {
        let runs: Vec<Run> = region.given_back.runs(slice, why).collect();
        let message = move |runs: &[Run]| {
            let said = Recycled { region: id, runs: runs.to_vec() };
            if why == GivenFor::Zeros { ToDaemon::Zeros(said) } else { ToDaemon::Recycled(said) }
        };
        runs.chunks(MAX_RUNS).map(message).collect::<Vec<_>>()
    };
    both.into_iter().flat_map(of).collect()
}
