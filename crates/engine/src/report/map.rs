//! A map of a client's memory, by the state of its pages, and the ranges that it writes most.
//!
//! The map has at most [`MOST_CELLS`] cells in all regions together, of a power of two of pages
//! each. The client's lock is held for a slice at a time, so the cells are not of one moment.

use control::{Cell, ClientMap, HotRange, MOST_CELLS, MOST_HOT, RegionMap};
use kmem::PAGE_SIZE;
use wire::{PageNo, RegionId, Run};

use crate::client::Client;
use crate::core::ledger::{Entry, Region};

/// Regions that are shown at most.
const MOST_REGIONS: usize = MOST_CELLS / 4;
/// Pages that are looked at while the client is locked: under a millisecond.
const SLICE: u32 = 1 << 16;

pub(super) fn map(client: &Client) -> ClientMap {
    let mut regions: Vec<(RegionId, u64, u32)> =
        client.state().regions.iter().map(|(&id, region)| (id, region.start, region.pages)).collect();
    regions.sort_unstable_by_key(|&(_, _, pages)| std::cmp::Reverse(pages));
    let regions_unlisted = regions.len().saturating_sub(MOST_REGIONS);
    regions.truncate(MOST_REGIONS);
    regions.sort_unstable_by_key(|&(_, start, _)| start);
    let pages: u64 = regions.iter().map(|&(_, _, pages)| u64::from(pages)).sum();
    let cell_pages = cell_pages(pages, regions.len());
    let mut out =
        ClientMap { pid: client.pid, name: client.name.clone(), cell_pages, regions_unlisted, ..ClientMap::default() };
    for (id, start, pages) in regions {
        let mut cells = vec![Cell::default(); pages.div_ceil(cell_pages) as usize];
        let mut heat = vec![0; cells.len()];
        for from in (0..pages).step_by(SLICE as usize) {
            let run = Run::new(PageNo(from), SLICE.min(pages - from));
            let state = client.state();
            // A region by the same number may be another one by now.
            let region = state.regions.get(&id).filter(|region| (region.start, region.pages) == (start, pages));
            let Some(region) = region else { break };
            count(region, run, cell_pages, &mut cells, &mut heat);
        }
        let size = |at: usize| cell_pages.min(pages - at as u32 * cell_pages);
        for (at, cell) in cells.iter_mut().enumerate() {
            cell.other = size(at) - (cell.merged + cell.zero + cell.recycled + cell.unshared + cell.volatile);
        }
        let hot = (0..).zip(heat).filter(|&(_, writes)| writes > 0).map(|(at, writes)| HotRange {
            start: start + at as u64 * u64::from(cell_pages) * PAGE_SIZE as u64,
            pages: size(at),
            writes,
        });
        out.hottest.extend(hot);
        out.regions.push(RegionMap { start, pages, cells });
    }
    out.hottest.sort_unstable_by_key(|range| std::cmp::Reverse(range.writes));
    out.hottest.truncate(MOST_HOT);
    out
}

/// Pages of a cell: the least power of two with which all of these regions fit.
fn cell_pages(pages: u64, regions: usize) -> u32 {
    // Each region's last cell may be begun only.
    let cells = (MOST_CELLS - regions.min(MOST_REGIONS)) as u64;
    pages.div_ceil(cells).max(1).next_power_of_two().min(1 << 31) as u32
}

/// Counts some pages of a region in their cells, and how hot they are.
fn count(region: &Region, run: Run, cell_pages: u32, cells: &mut [Cell], heat: &mut [u64]) {
    let at = |page: PageNo| (page.0 / cell_pages) as usize;
    for page in region.known(run) {
        let cell = &mut cells[at(page)];
        match region.entry(page) {
            Entry::Merged(_) => cell.merged += 1,
            Entry::Zero => cell.zero += 1,
            Entry::Recycled => cell.recycled += 1,
            Entry::Unshared(_) => cell.unshared += 1,
            Entry::Fresh | Entry::Pending => {}
        }
    }
    for (page, writes) in region.ages.written_lately(run) {
        heat[at(page)] += u64::from(writes);
        if region.entry(page) == Entry::Fresh {
            cells[at(page)].volatile += 1;
        }
    }
}

#[cfg(test)]
mod tests;
