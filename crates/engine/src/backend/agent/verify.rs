//! Checks regions that an agent announced against the mappings of its process.
//!
//! An agent may announce any range. Before the first scan of a region the daemon looks at
//! `/proc/PID/maps`: only private mappings that can be read, of anonymous memory or of a store, are
//! managed. All other pages count as given back. An honest agent announces such pages where the
//! program has unmapped them since, and its message about that is on its way. A region without any
//! such mapping is kept for that message; a client with more than a few of those is refused.

use std::io;

use kmem::PAGE_SIZE;
use kmem::procfs::MapLine;
use kmem::range::Range;
use wire::{PageNo, RegionId, Run};

use crate::client::{Client, ProtocolError, State};
use crate::config::bounds::UNMAPPED_REGIONS;
use crate::core::ledger::Region;
use crate::sync::MutexGuard;
use crate::world::stall::{touch, wait};

#[derive(Debug, thiserror::Error)]
pub(super) enum VerifyError {
    #[error("its mappings cannot be read: {0}")]
    Maps(#[from] io::Error),
    #[error("this worker was held up in the memory of a client")]
    HeldUp,
    #[error(transparent)]
    Refused(#[from] ProtocolError),
}

/// Checks the regions that no scan has seen. The lock is not held while the mappings are read;
/// afterwards the state is [settled](Client::settled) again, and may be another one. After an error
/// the connection is closed, or the next period tries again.
pub(super) fn regions(client: &Client, state: &mut MutexGuard<'_, State>) -> Result<(), VerifyError> {
    let bytes = |region: &Region| Range::new(region.start as usize, region.pages as usize * PAGE_SIZE);
    let mut new: Vec<(RegionId, Range)> =
        state.regions.iter().filter(|(_, region)| !region.verified).map(|(&id, region)| (id, bytes(region))).collect();
    if new.is_empty() {
        return Ok(());
    }
    new.sort_by_key(|(_, range)| range.start);
    let read = || touch(client.user.owner, || mapped_parts(client, &new));
    let mapped = MutexGuard::unlocked(state, read);
    wait(client.user.owner, || client.wait_for_scan(state));
    let mapped = mapped.ok_or(VerifyError::HeldUp)??;
    for ((id, range), parts) in new.into_iter().zip(mapped) {
        let Some(region) = state.regions.get_mut(&id).filter(|region| bytes(region) == range) else { continue };
        let page = |address: usize| PageNo(((address - range.start) / PAGE_SIZE) as u32);
        let mut from = range.start;
        for part in parts.iter().copied().chain([Range::new(range.end(), 0)]) {
            if part.start > from {
                region.shrink(Run::between(page(from), page(part.start))).map_err(ProtocolError::from)?;
            }
            from = from.max(part.end());
        }
        region.verified = true;
    }
    let mut unmapped = state.regions.values().filter(|region| region.verified && region.managed == 0);
    if let Some(region) = unmapped.nth(UNMAPPED_REGIONS) {
        let why = ProtocolError::NotMapped { start: region.start, len: u64::from(region.pages) * PAGE_SIZE as u64 };
        client.refuse(&why);
        return Err(why.into());
    }
    Ok(())
}

/// The parts of each range, ascending, that can be managed. Ranges may overlap: an agent may
/// announce the same memory twice, and counts twice for its user then.
fn mapped_parts(client: &Client, ranges: &[(RegionId, Range)]) -> io::Result<Vec<Vec<Range>>> {
    let mut parts = vec![Vec::new(); ranges.len()];
    // Before this one, all end below the present mapping.
    let mut first = 0;
    kmem::procfs::for_each_map(Some(client.pid), |line| {
        if !is_fit(line) {
            return;
        }
        while ranges.get(first).is_some_and(|(_, range)| range.end() <= line.range.start) {
            first += 1;
        }
        for (at, (_, range)) in ranges.iter().enumerate().skip(first) {
            if range.start >= line.range.end() {
                break;
            }
            parts[at].extend(range.intersect(&line.range));
        }
    })?;
    Ok(parts)
}

/// Whether a mapping can be managed: private and readable, without a file or of a store, of this
/// daemon or an earlier one. The program may have protected it against writing since.
fn is_fit(line: &MapLine) -> bool {
    line.perms.read && !line.perms.shared && (line.inode == 0 || line.path.starts_with("/memfd:pageone:"))
}

#[cfg(test)]
mod tests;
