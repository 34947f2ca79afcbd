//! Digests of pages, which the daemon asks for before it reads a page itself.
//!
//! Here a page costs one pass over mapped memory, from outside a walk of the page tables and a
//! copy. The daemon decides which pages are read, and what follows.

#![allow(unsafe_code)] // Reads the program's memory while it runs.

use kmem::PAGE_SIZE;
use wire::{Digest, Digests, PageNo, Run, ToDaemon};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::runtime::cpu_ns;
use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::window::safe_read::readable;

/// Pages read in one go with the lock held: some 30 us.
const PART: u32 = 64;

/// Computes digests, up to the first part that cannot be read, and queues the answer.
pub(crate) fn answer(request: &Digest) {
    let mut digests = Vec::with_capacity(wire::MAX_DIGESTS as usize);
    for part in request.runs.iter().flat_map(|&run| parts(run)) {
        if !digest(&STATE.lock(), request, part, &mut digests) {
            break;
        }
        STATE.yield_to_waiting();
    }
    let answer = Digests { request: request.request, digests, cpu_ns: cpu_ns() };
    STATE.lock().uplink.outbox.push(ToDaemon::Digests(answer));
}

fn parts(run: Run) -> impl Iterator<Item = Run> {
    let end = run.end().0;
    (run.page.0..end).step_by(PART as usize).map(move |start| Run::new(PageNo(start), PART.min(end - start)))
}

/// False if some of these pages cannot be read.
fn digest(state: &State, request: &Digest, run: Run, digests: &mut Vec<u64>) -> bool {
    let Some(region) = state.regions.managing(request.region, run) else { return false };
    let pages = readable(region.bytes(run));
    let place = region.bytes(Run::new(run.page, pages as u32));
    let mut page = [0u8; PAGE_SIZE];
    for address in (place.start..place.end()).step_by(PAGE_SIZE) {
        // SAFETY: managed memory is mapped, which calls through the C library change only with the
        // lock, and it was readable just now. The program may write meanwhile: the copy is then a
        // mixture of old and new bytes, and its digest a wrong hint, as any digest may be.
        unsafe { libc::memcpy(page.as_mut_ptr().cast(), address as *const libc::c_void, PAGE_SIZE) };
        digests.push(xxh3_64_with_seed(&page, request.seed));
    }
    place.pages() == run.len as usize
}
