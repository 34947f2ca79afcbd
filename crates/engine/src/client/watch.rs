//! Watching a client: while its dirty rate is requested, scans stamp the pages that they find
//! written (see `report::rates`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use wire::RegionId;

use super::changes::Log;
use crate::core::ledger::Region;
use crate::core::ledger::stamps::{REBASE_AT, REBASE_BY, Stamps};

/// How long a client is watched after the last request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Requests within this time share a scan.
const SHARED: Duration = Duration::from_millis(50);

/// What is kept of a client that is watched.
pub(crate) struct Watch {
    /// The time that stamps count from.
    base: Instant,
    pub(crate) since: Instant,
    requested: Instant,
    pub(crate) scanned: Instant,
    /// Time between the last two scans of a watch.
    pub(crate) interval: Duration,
    pub(crate) found: u64,
}

impl Watch {
    fn new(now: Instant) -> Self {
        Self { base: now, since: now, requested: now, scanned: now, interval: Duration::ZERO, found: 0 }
    }

    fn tick(&self, now: Instant) -> u16 {
        (now.duration_since(self.base).as_millis() / 100 + 1).min(u128::from(u16::MAX)) as u16
    }
}

/// Requests that want to know what scans find.
#[derive(Default)]
pub(crate) struct Observers {
    /// What the client has changed since a checkpoint.
    pub(crate) changes: Option<Log>,
    /// Its dirty rate is being measured.
    pub(crate) watch: Option<Watch>,
}

impl Observers {
    /// Findings of a scan get this time as stamp. Watching ends some time after the last request.
    pub(crate) fn stamp_scan(&mut self, regions: &mut BTreeMap<RegionId, Region>, now: Instant) {
        let Some(watch) = &mut self.watch else { return };
        if now.duration_since(watch.requested) > PATIENCE {
            self.watch = None;
            regions.values_mut().for_each(|region| region.stamps = None);
            return;
        }
        let back = watch.tick(now) > REBASE_AT;
        if back {
            watch.base += Duration::from_millis(100) * u32::from(REBASE_BY);
        }
        let tick = watch.tick(now);
        for stamps in regions.values_mut().filter_map(|region| region.stamps.as_mut()) {
            stamps.now = tick;
            if back {
                stamps.rebase();
            }
        }
    }

    /// The dirty rate is requested, and the client watched. Whether a scan is due for that.
    pub(crate) fn request_watch(&mut self, now: Instant) -> bool {
        let fresh = self.watch.is_none();
        let watch = self.watch.get_or_insert_with(|| Watch::new(now));
        watch.requested = now;
        fresh || now.duration_since(watch.scanned) >= SHARED
    }

    /// The scan for a watch, begun at `now`, is over: counts what it found.
    pub(crate) fn watched(&mut self, regions: &mut BTreeMap<RegionId, Region>, now: Instant) {
        let Some(watch) = &mut self.watch else { return };
        let tick = watch.tick(now);
        let mut counted = false;
        watch.found = 0;
        for region in regions.values_mut() {
            match &mut region.stamps {
                Some(stamps) => {
                    counted = true;
                    watch.found += std::mem::take(&mut stamps.found);
                }
                // The findings of this scan were written before the watch began. Without memory
                // the region is not watched; the next scan tries again.
                None => region.stamps = Stamps::new(region.pages, tick),
            }
        }
        if counted {
            watch.interval = now.duration_since(watch.scanned);
        } else {
            watch.since = now;
        }
        watch.scanned = now;
    }
}
