//! Watching a client: its scans stamp the pages that they find written, while somebody asks for its
//! dirty rate (see `report::rates`).

use std::time::{Duration, Instant};

use crate::client::State;
use crate::ledger::stamps::{REBASE_BY, Stamps};

/// How long after the last question a client is watched.
const PATIENCE: Duration = Duration::from_secs(10);
/// Questions within this time share a scan.
const SHARED: Duration = Duration::from_millis(50);

/// That a client is watched.
pub(crate) struct Watch {
    /// The time that stamps count from, and when watching began.
    base: Instant,
    pub(crate) since: Instant,
    asked: Instant,
    pub(crate) scanned: Instant,
    /// Between the last two scans of a watch.
    pub(crate) interval: Duration,
    pub(crate) found: u64,
}

impl Watch {
    fn new(now: Instant) -> Self {
        Self { base: now, since: now, asked: now, scanned: now, interval: Duration::ZERO, found: 0 }
    }

    fn tick(&self, now: Instant) -> u16 {
        (now.duration_since(self.base).as_millis() / 100 + 1).min(u128::from(u16::MAX)) as u16
    }
}

impl State {
    /// A scan begins: what it finds is stamped with this time. Watching ends when nobody has asked
    /// for a while.
    pub(crate) fn stamp_scan(&mut self, now: Instant) {
        let Some(watch) = &mut self.watch else { return };
        if now.duration_since(watch.asked) > PATIENCE {
            self.watch = None;
            self.regions.values_mut().for_each(|region| region.stamps = None);
            return;
        }
        let back = Stamps::is_rebase_due(watch.tick(now));
        if back {
            watch.base += Duration::from_millis(100) * u32::from(REBASE_BY);
        }
        let tick = watch.tick(now);
        for stamps in self.regions.values_mut().filter_map(|region| region.stamps.as_mut()) {
            stamps.set_now(tick);
            if back {
                stamps.rebase();
            }
        }
    }

    /// Somebody asks for its dirty rate: it is watched from now on. Whether a scan is due for that.
    pub(crate) fn watch(&mut self, now: Instant) -> bool {
        let fresh = self.watch.is_none();
        let watch = self.watch.get_or_insert_with(|| Watch::new(now));
        watch.asked = now;
        fresh || now.duration_since(watch.scanned) >= SHARED
    }

    /// The scan for a watch, begun at `now`, is over: counts what it found.
    pub(crate) fn watched(&mut self, now: Instant) {
        let Some(watch) = &mut self.watch else { return };
        let tick = watch.tick(now);
        let mut counted = false;
        watch.found = 0;
        for region in self.regions.values_mut() {
            match &mut region.stamps {
                Some(stamps) => {
                    counted = true;
                    watch.found += stamps.take_found();
                }
                // What this scan has found was written before anybody watched.
                None => region.stamps = Some(Stamps::new(region.pages, tick)),
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
