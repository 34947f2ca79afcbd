//! One moment: what the daemon said at one time.

use std::collections::BTreeMap;

use control::{
    Cell, ClientMap, ClientStatus, DomainSharing, MOST_CONTENTS, MOST_SHARERS, RegionMap, SharingMatrix, Status,
};
use serde::{Deserialize, Serialize};

/// Bytes of a page.
pub const PAGE: u64 = kmem::PAGE_SIZE as u64;

/// Pages in bytes.
pub fn bytes_of(pages: u64) -> u64 {
    pages.saturating_mul(PAGE)
}

/// A sum; what a damaged or foreign recording says must not end the program.
pub fn total(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}

/// The daemon's status at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Milliseconds since 1970.
    pub time: i64,
    /// The status; `None`: no daemon answered.
    pub status: Option<Status>,
    /// Why there is no status.
    #[serde(default)]
    pub away: Option<String>,
}

/// What is asked for less often than the status, since it costs the daemon more.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Depth {
    /// Milliseconds since 1970.
    pub time: i64,
    /// Who shares with whom.
    pub sharing: SharingMatrix,
    /// The memory of clients, by process.
    pub maps: BTreeMap<i32, ClientMap>,
}

impl Depth {
    /// With at most as many of each as a daemon tells.
    pub(crate) fn bounded(mut self) -> Self {
        for DomainSharing { clients, clients_unlisted, pairs, contents, .. } in &mut self.sharing.domains {
            *clients_unlisted = clients_unlisted.saturating_add(clients.len().saturating_sub(MOST_SHARERS));
            clients.truncate(MOST_SHARERS);
            pairs.retain(|pair| pair.a < clients.len() && pair.b < clients.len());
            pairs.truncate(MOST_SHARERS * MOST_SHARERS);
            contents.truncate(MOST_CONTENTS);
        }
        self
    }
}

/// The figures of a moment that a graph over time needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Bytes of the host's memory that are in use; NaN: not known.
    pub used: f64,
    /// Bytes that are saved, less every cost.
    pub saved: f64,
    /// Bytes that could be saved beside those.
    pub could_be_saved: f64,
    /// CPU time, in percent of one CPU.
    pub cpu: f64,
    /// Clients; NaN: no daemon answered.
    pub clients: f64,
}

impl Summary {
    /// No daemon answered.
    pub const AWAY: Summary =
        Summary { used: f64::NAN, saved: f64::NAN, could_be_saved: f64::NAN, cpu: f64::NAN, clients: f64::NAN };
}

impl Moment {
    /// The figures for graphs.
    pub fn summary(&self) -> Summary {
        let Some(status) = &self.status else { return Summary::AWAY };
        let metrics = &status.metrics;
        Summary {
            used: used(status).map_or(f64::NAN, |bytes| bytes as f64),
            saved: metrics.general_profit as f64,
            could_be_saved: could_be_saved(status) as f64,
            cpu: status.governor.metrics.cpu_percent,
            clients: status.clients().count() as f64,
        }
    }
}

/// Bytes of the host's memory that are in use.
pub fn used(status: &Status) -> Option<u64> {
    Some(status.metrics.memory_total_bytes?.saturating_sub(status.metrics.memory_available_bytes?))
}

/// Bytes that are known to be mergeable and are not merged: pages that wait for their agent, and
/// those that stay in huge pages.
pub fn could_be_saved(status: &Status) -> u64 {
    let pages = |client: &ClientStatus| client.metrics.pages_kept_huge.saturating_add(client.metrics.pages_pending);
    bytes_of(total(status.clients().map(pages)))
}

/// A map with at most about this many cells: neighbours are added up.
pub fn coarsen(mut map: ClientMap, most: usize) -> ClientMap {
    let cells: usize = map.regions.iter().map(|region| region.cells.len()).sum();
    let together = cells.div_ceil(most.max(1)).max(1);
    if together > 1 {
        map.cell_pages = map.cell_pages.saturating_mul(together as u32);
        for RegionMap { cells, .. } in &mut map.regions {
            *cells = cells.chunks(together).map(sum).collect();
        }
    }
    map
}

/// The sum of several cells.
pub fn sum(cells: &[Cell]) -> Cell {
    cells.iter().fold(Cell::default(), |all, cell| Cell {
        merged: all.merged.saturating_add(cell.merged),
        zero: all.zero.saturating_add(cell.zero),
        recycled: all.recycled.saturating_add(cell.recycled),
        unshared: all.unshared.saturating_add(cell.unshared),
        volatile: all.volatile.saturating_add(cell.volatile),
        other: all.other.saturating_add(cell.other),
    })
}
