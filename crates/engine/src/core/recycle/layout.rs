//! Where a guest's RAM lies in QEMU's memory.
//!
//! No single command of QEMU gives the answer to that:
//!
//! 1. `query-memory-devices` names memory that may be unplugged. It is left out.
//! 2. The monitor's `info mtree` lists memory by the guest's physical addresses ([`tree`]). RAM
//!    among it was there when QEMU started, and stays where it is until QEMU ends.
//! 3. `gpa2hva` gives the host's address of the first and of the last page of each range. Both must
//!    be equally far apart, or the range is not one piece.

mod tree;

use std::ops::Range;
use std::os::fd::AsFd;

use qmp::{Qmp, QmpError};
use serde_json::{Value, json};
use wire::recycle::Extent;
use wire::{PageNo, RegionId, Run};

/// The first guest-physical address in bytes: firmware makes memory below it RAM or ROM at times.
const FIRST: u64 = 1 << 20;
const PAGE: u64 = kmem::PAGE_SIZE as u64;

#[derive(Debug, thiserror::Error)]
pub(crate) enum LayoutError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error(
        "QEMU lists RAM at {0:#x} that is not one piece of its memory; start the guest with \
             --free-page-reporting in place of --ppr"
    )]
    Torn(u64),
}

/// Guest-physical addresses from `start` to `end`, at `host` in QEMU's memory; bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ram {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) host: u64,
}

/// Where the guest's RAM lies.
pub(crate) fn find_ram(qmp: &mut Qmp<'_, impl AsFd>) -> Result<Vec<Ram>, LayoutError> {
    let mut found = Vec::new();
    let removable = removable(&qmp.execute("query-memory-devices", json!({}))?);
    let text = qmp.monitor("info mtree")?;
    for range in tree::find(&text).into_iter().filter_map(whole_pages) {
        if removable.iter().any(|device| device.start < range.end && range.start < device.end) {
            continue;
        }
        let mut host_address = |guest| qmp.host_address(guest)?.ok_or(LayoutError::Torn(guest));
        let host = host_address(range.start)?;
        let last = host_address(range.end - PAGE)?;
        if last.checked_sub(host) != Some(range.end - PAGE - range.start) || host % PAGE != 0 {
            return Err(LayoutError::Torn(range.start));
        }
        found.push(Ram { start: range.start, end: range.end, host });
    }
    Ok(found)
}

/// The whole pages of a range above the firmware's first MiB.
fn whole_pages(range: Range<u64>) -> Option<Range<u64>> {
    let (start, end) = (range.start.max(FIRST), range.end / PAGE * PAGE);
    let start = start.checked_next_multiple_of(PAGE)?;
    (start < end).then_some(start..end)
}

/// Memory that may be unplugged, by guest-physical address; without one it is not mapped.
fn removable(answer: &Value) -> Vec<Range<u64>> {
    let devices = answer.as_array().into_iter().flatten();
    let range = |device: &Value| {
        let data = &device["data"];
        let start = data.get("addr").or_else(|| data.get("memaddr"))?.as_u64()?;
        // The size of a virtio-mem device is what is plugged now; it may grow up to `max-size`.
        let size = data.get("max-size").or_else(|| data.get("size"))?.as_u64()?;
        Some(start..start.saturating_add(size))
    };
    devices.filter_map(range).collect()
}

/// Pages that lie at an address of QEMU's: of a region, from `first` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) start: u64,
    pub(crate) pages: u32,
    pub(crate) region: RegionId,
    pub(crate) first: PageNo,
}

pub(crate) fn extents_of(places: &[Place], ram: &[Ram]) -> Vec<Extent> {
    let page = PAGE;
    let mut extents = Vec::new();
    for ram in ram {
        for place in places {
            let (first, end) = (
                place.start.max(ram.host),
                // QEMU's answer is not trusted: the sum must not overflow.
                (place.start + u64::from(place.pages) * page).min(ram.host.saturating_add(ram.end - ram.start)),
            );
            if first < end {
                extents.push(Extent {
                    frame: (ram.start + (first - ram.host)) / page,
                    region: place.region,
                    run: Run::new(place.first + ((first - place.start) / page) as u32, ((end - first) / page) as u32),
                });
            }
        }
    }
    extents.sort_by_key(|extent| extent.frame);
    extents.truncate(wire::recycle::MAX_EXTENTS);
    extents
}

#[cfg(test)]
mod tests;
