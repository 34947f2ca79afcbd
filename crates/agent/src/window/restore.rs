//! A whole region becomes plain memory again, window by window.
//!
//! Pages that were never merged are not touched. Of the others those are replaced that the
//! [gate](crate::window::gate) lets go; copies that a device may be writing to stay where they are.

#![allow(unsafe_code)] // Replaces mappings of the program's memory.

use std::time::Duration;

use kmem::pagemap::Query;
use rustix::io::Errno;
use wire::{PageNo, RegionId, Run};

use crate::runtime::state::STATE;
use crate::runtime::state::State;
use crate::runtime::state::control;
use crate::runtime::state::region::Region;
use crate::window::filler::Filler;
use crate::window::gate::{self, Copies};
use crate::window::safe_read::{Buffer, reserve};
use crate::window::{MAX_PAGES, ZEROS};

/// How long other threads may take the lock between two windows.
const BREATHER: Duration = Duration::from_micros(20);

/// Which copies a restore takes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cooling {
    /// Those that no device can be writing to, because no direct I/O takes any time.
    Unknown,
    /// Those that were not written since [`note_writes`], a whole cooldown ago.
    Over,
}

/// Gives a region its plain memory back, as far as its pages may go. The lock is taken for each
/// window, so that the program's threads get it in between. Returns how many merged pages are left.
pub(crate) fn restore_region(id: RegionId, pages: u32, cooling: Cooling, filler: &Filler) -> Result<u64, Errno> {
    let mut buffer = Buffer::new(MAX_PAGES as usize)?;
    for start in (0..pages).step_by(MAX_PAGES as usize) {
        let mut state = STATE.lock();
        let Some(region) = state.regions.get(id) else { return Ok(0) };
        let window = Run::new(PageNo(start), MAX_PAGES.min(pages - start));
        let parts: Vec<Run> = region.managed_in(region.bytes(window)).collect();
        for part in parts {
            restore(&mut state, id, part, cooling, filler, &mut buffer)?;
        }
        drop(state);
        std::thread::sleep(BREATHER);
    }
    Ok(left(&STATE.lock(), id))
}

/// How many pages of a region lie in mappings of segments.
fn left(state: &State, id: RegionId) -> u64 {
    let Some(region) = state.regions.get(id) else { return 0 };
    gate::merged(region, region.all()).iter().map(|run| u64::from(run.len)).sum()
}

/// Clears the kernel's notes of writes to all merged pages of a region.
pub(crate) fn note_writes(id: RegionId) -> Result<(), Errno> {
    let state = STATE.lock();
    let Some(region) = state.regions.get(id) else { return Ok(()) };
    let pagemap = state.files.pagemap().ok_or(Errno::ACCESS)?;
    for run in gate::merged(region, region.all()) {
        pagemap.scan(region.bytes(run), &Query { write_protect: true, ..Query::default() }, &mut |_| {})?;
    }
    Ok(())
}

/// A window, and the anonymous pages just before and behind it. What comes into the window is
/// joined with them if its first page is filled while they are registered alike: then the kernel
/// gives it their `anon_vma`, and one of its own otherwise.
fn with_neighbours(region: &Region, window: Run) -> Run {
    let is_plain = |page: PageNo| region.manages(Run::one(page)) && !region.mapped.any(Run::one(page));
    let before = window.page.0.checked_sub(1).map(PageNo).filter(|&page| is_plain(page));
    let start = before.unwrap_or(window.page);
    let end = if is_plain(window.end()) { window.end() + 1 } else { window.end() };
    Run::between(start, end)
}

fn restore(
    state: &mut State,
    id: RegionId,
    run: Run,
    cooling: Cooling,
    filler: &Filler,
    buffer: &mut Buffer,
) -> Result<(), Errno> {
    let State { regions, uffds, files, direct_io, uplink, .. } = state;
    let Some(region) = regions.get_mut(id).filter(|region| region.manages(run)) else { return Ok(()) };
    let merged = gate::merged(region, run);
    let (Some(first), Some(last)) = (merged.first(), merged.last()) else { return Ok(()) };
    let copies = match (cooling, files.pagemap()) {
        (Cooling::Over, Some(pagemap)) => Copies::CooledBut(gate::written_pages(region, run, &pagemap)),
        _ => Copies::at_once(*direct_io),
    };
    let window = Run::between(first.page, last.end());
    let span = region.bytes(with_neighbours(region, window));
    uffds.untrack(span)?;
    uplink.control.tell_window(control::Window::Open);
    let mut done = filler.open(span);
    if done.is_ok() {
        let mut bytes: Vec<(Run, Vec<u8>)> = Vec::with_capacity(merged.len());
        // Read first: that brings the pages into memory, so that the kernel can say what they are.
        for run in merged {
            let read = buffer.read(region.bytes(run));
            match reserve(read.len()) {
                Ok(mut copy) => {
                    copy.extend_from_slice(read);
                    bytes.push((run, copy));
                }
                Err(error) => done = Err(error),
            }
        }
        let may_go = gate::may_go(region, window, &copies, files);
        for (run, bytes) in bytes {
            let read = Run::new(run.page, (bytes.len() / ZEROS.len()) as u32);
            for part in may_go.iter().filter_map(|part| part.intersect(read)) {
                let at = (part.page - run.page) as usize * ZEROS.len();
                let bytes = &bytes[at..at + part.len as usize * ZEROS.len()];
                // SAFETY: the filler's window is open over the part, whose bytes were read while
                // writers waited, and which may go by the gate's rule.
                done = done.and_then(|()| unsafe { filler.replace(region, span, part, bytes) });
            }
        }
    }
    filler.close(span);
    uplink.control.tell_window(control::Window::Closed);
    if filler.take_forks() {
        uplink.control.count_fork();
    }
    uffds.track(span);
    done
}
