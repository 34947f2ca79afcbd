//! Digests of pages: what the daemon wants to know before it knows whether a page is worth
//! anything.
//!
//! Read here, a page costs one pass over mapped memory. Read from outside it costs the kernel a
//! walk of the page tables and a copy first. Which pages are read, and what comes of it, is the
//! daemon's business.

#![allow(unsafe_code)] // Reads the program's memory while it runs.

use crate::daemon::batch::cpu_time;
use crate::runtime::regions::Pages;
use crate::runtime::state::{STATE, State};
use kmem::PAGE_SIZE;
use wire::{Digest, Digests, RegionId, ToDaemon};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Pages read without letting go of the lock: some 30 us.
const PART: u32 = 64;

/// Computes what is asked for, and queues the answer. It ends before the first part that can't be
/// read.
pub fn answer(asked: &Digest) {
    let mut digests = Vec::with_capacity(wire::MAX_DIGESTS as usize);
    let parts = asked.runs.iter().flat_map(|run| {
        let end = run.end().0;
        (run.page.0..end).step_by(PART as usize).map(move |start| Pages { start, end: (start + PART).min(end) })
    });
    for part in parts {
        if !STATE.lock().digest(asked.region, part, asked.seed, &mut digests) {
            break;
        }
        STATE.let_others();
    }
    let answer = Digests { request: asked.request, digests, cpu_ns: cpu_time() };
    STATE.lock().outbox.push(ToDaemon::Digests(answer));
}

impl State {
    /// `false`: these pages can't be read.
    fn digest(&self, id: RegionId, pages: Pages, seed: u64, into: &mut Vec<u64>) -> bool {
        let Some(region) = self.position(id).map(|index| &self.regions[index]).filter(|r| r.manages(pages)) else {
            return false;
        };
        let place = region.bytes(pages);
        // Somebody may have unmapped it past the C library.
        if kmem::mm::has_hole(place) {
            return false;
        }
        let mut page = [0u8; PAGE_SIZE];
        for address in (place.start..place.end()).step_by(PAGE_SIZE) {
            // SAFETY: managed memory is mapped and readable, and stays so while the lock is held. The program
            // may write to it meanwhile: then this is a mixture of bytes before and after, of which
            // nothing is claimed.
            unsafe { libc::memcpy(page.as_mut_ptr().cast(), address as *const libc::c_void, PAGE_SIZE) };
            into.push(xxh3_64_with_seed(&page, seed));
        }
        true
    }
}
