//! Where a guest's RAM lies in QEMU's memory.
//!
//! No single command of QEMU gives the answer to that:
//!
//! 1. `query-memory-devices` names memory that may be unplugged. It is left out.
//! 2. The monitor's `info mtree -f` lists the ranges of the guest's physical addresses. RAM among
//!    them was there when QEMU started, and stays where it is until QEMU ends.
//! 3. `gpa2hva` gives the host's address of the first and of the last page of each range. Both must
//!    be equally far apart, or the range is not one piece.
//!
//! ```text
//! FlatView #0
//!  AS "memory", root: system
//!   0000000000000000-00000000000bffff (prio 0, ram): pc.ram
//!   00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
//!   0000000000100000-000000007fffffff (prio 0, ram): pc.ram @0000000000100000
//!   0000000100000000-00000001bfffffff (prio 0, ram): pc.ram @0000000080000000
//! ```

use std::ops::Range;
use std::os::fd::AsFd;

use qmp::{Qmp, QmpError};
use serde_json::{Value, json};

/// The first guest-physical address that is looked at, in bytes. Firmware makes memory below it RAM
/// or ROM while it runs.
const FIRST: u64 = 1 << 20;
const PAGE: u64 = kmem::PAGE_SIZE as u64;

/// Why it is not known where the RAM lies.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayoutError {
    /// QEMU does not say.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// RAM that QEMU lists has no host address, or not one piece.
    #[error("QEMU lists RAM at {0:#x} that is not one piece of its memory")]
    Torn(u64),
}

/// RAM of the guest: guest-physical addresses from `start` to `end`, at address `host` in QEMU's
/// memory. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ram {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) host: u64,
}

/// Where the guest's RAM lies.
///
/// # Errors
/// QEMU does not answer; RAM is not in one piece.
pub(crate) fn find_ram(qmp: &mut Qmp<'_, impl AsFd>) -> Result<Vec<Ram>, LayoutError> {
    let mut found = Vec::new();
    let removable = removable(&qmp.execute("query-memory-devices", json!({}))?);
    let text = qmp.monitor("info mtree -f")?;
    for range in parse_mtree(&text) {
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

/// RAM in the address space that CPUs see, above the firmware's first MiB.
fn parse_mtree(text: &str) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if line.starts_with("FlatView") {
            inside = false;
        } else if line.trim_start().starts_with("AS \"memory\",") {
            inside = true;
        } else if inside && let Some(range) = parse_ram(line) {
            found.push(range);
        }
    }
    found
}

/// The addresses of a line of the list, in whole pages, if it is RAM.
fn parse_ram(line: &str) -> Option<Range<u64>> {
    let (addresses, rest) = line.trim().split_once(' ')?;
    // Memory of devices, such as a screen's, has another priority.
    if !rest.starts_with("(prio 0, ram)") {
        return None;
    }
    let (start, last) = addresses.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (number(start)?.max(FIRST), number(last)?.checked_add(1)? / PAGE * PAGE);
    let start = start.checked_next_multiple_of(PAGE)?;
    (start < end).then_some(start..end)
}

/// Memory that may be unplugged, by guest-physical address, from the answer of
/// `query-memory-devices`. A device without an address is not mapped.
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

#[cfg(test)]
mod tests;
