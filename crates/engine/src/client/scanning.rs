//! A scan of a client under way: which other work goes on beside it, and which waits.
//!
//! A scan is a system call that takes up to milliseconds. The client's lock is not held for that
//! time, so the thread that hears the agents never waits for a scan. Other scans, batches and
//! freezes do wait ([`Client::settled`]): the scan clears the kernel's notes of writes as it reads
//! them, and until the ledger has its findings only the scan knows of those writes.
//!
//! Pages that the agent reports discarded or recycled meanwhile are noted ([`State::overtake`]),
//! and the findings on them are dropped. The outcome is as if the findings had been applied at
//! once, and the messages after them.

use wire::{PageNo, RegionId, Run};

use super::{Client, State};
use crate::core::ledger::Emptied;
use crate::sync::MutexGuard;

/// The region that is being scanned, and its pages that the agent has reported on since.
#[derive(Default)]
pub(super) struct UnderScan {
    region: RegionId,
    overtaken: Emptied,
}

impl Client {
    /// The changing half, at a time when no scan is under way: waits for the end of one.
    pub(crate) fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.state();
        self.wait_for_scan(&mut state);
        state
    }

    /// Waits for the end of a scan that began while the state was unlocked.
    pub(crate) fn wait_for_scan(&self, state: &mut MutexGuard<'_, State>) {
        while state.schedule.scanning.is_some() {
            self.scan_ended.wait(state);
        }
    }

    /// Runs a scan, which may unlock the [settled](Client::settled) state.
    pub(crate) fn while_scanning<R>(
        &self,
        state: &mut MutexGuard<'_, State>,
        scan: impl FnOnce(&mut MutexGuard<'_, State>) -> R,
    ) -> R {
        debug_assert!(state.schedule.scanning.is_none(), "two scans at a time");
        state.schedule.scanning = Some(UnderScan::default());
        let result = scan(state);
        state.schedule.scanning = None;
        self.scan_ended.notify_all();
        result
    }
}

impl State {
    #[cfg(test)]
    pub(crate) fn is_scanned(&self) -> bool {
        self.schedule.scanning.is_some()
    }

    /// The scan under way comes to this region.
    pub(crate) fn begin_region(&mut self, region: RegionId) {
        self.schedule.scanning = Some(UnderScan { region, overtaken: Emptied::default() });
    }

    /// The agent reports that these pages hold nothing now. Findings of a scan under way are older.
    pub(crate) fn overtake(&mut self, region: RegionId, run: Run) {
        if let Some(scanning) = self.schedule.scanning.as_mut().filter(|scanning| scanning.region == region) {
            scanning.overtaken.add(run);
        }
    }

    /// The pages overtaken since the scan of the region began: ascending, disjoint.
    pub(crate) fn overtaken(&mut self) -> Vec<Run> {
        self.schedule.scanning.as_mut().map(|scanning| scanning.overtaken.take()).unwrap_or_default()
    }
}

/// Calls `each` with the parts of `run` in none of `holes`, which are ascending and disjoint.
pub(crate) fn without(run: Run, holes: &[Run], mut each: impl FnMut(Run)) {
    let mut from: PageNo = run.page;
    let first = holes.partition_point(|hole| hole.end() <= from);
    for hole in holes[first..].iter().take_while(|hole| hole.page < run.end()) {
        if hole.page > from {
            each(Run::between(from, hole.page));
        }
        from = from.max(hole.end());
    }
    if from < run.end() {
        each(Run::between(from, run.end()));
    }
}

#[cfg(test)]
pub(crate) mod tests;
