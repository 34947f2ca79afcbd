//! Digests of pages, which the daemon asks for before it reads a page itself.
//!
//! Here a page costs a copy and a pass over it. Reading it from outside costs the kernel a walk
//! of the page tables and a copy first. The daemon decides which pages are read, and what follows.

use kmem::PAGE_SIZE;
use wire::{Digest, Digests, PageNo, Run, ToDaemon};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::runtime::cpu_ns;
use crate::runtime::globals::STATE;
use crate::runtime::state::State;
use crate::window::own::{Buffer, CHUNK};

/// Pages read in one go with the lock held: some 15 us.
const PART: u32 = CHUNK as u32;

/// Computes the digests asked for and queues the answer. It ends before the first part that cannot
/// be read.
pub(crate) fn answer(request: &Digest) {
    let mut digests = Vec::with_capacity(wire::MAX_DIGESTS as usize);
    let mut buffer = Buffer::new(PART as usize);
    for part in request.runs.iter().flat_map(|&run| parts(run)) {
        if !digest(&STATE.lock(), request, part, &mut buffer, &mut digests) {
            break;
        }
        STATE.yield_to_waiting();
    }
    let answer = Digests { request: request.request, digests, cpu_ns: cpu_ns() };
    STATE.lock().tell(ToDaemon::Digests(answer));
}

/// A run in parts of at most [`PART`] pages.
fn parts(run: Run) -> impl Iterator<Item = Run> {
    let end = run.end().0;
    (run.page.0..end).step_by(PART as usize).map(move |start| Run::new(PageNo(start), PART.min(end - start)))
}

/// False if some of these pages cannot be read. The program may write meanwhile: the digest is then
/// of a mixture of old and new bytes, and a wrong hint, as any digest may be.
fn digest(state: &State, request: &Digest, run: Run, buffer: &mut Buffer, digests: &mut Vec<u64>) -> bool {
    let Some(region) = state.regions.managing(request.region, run) else { return false };
    let pages = buffer.read(region.bytes(run));
    digests.extend(pages.chunks_exact(PAGE_SIZE).map(|page| xxh3_64_with_seed(page, request.seed)));
    pages.len() == run.len as usize * PAGE_SIZE
}
