//! Settling: what an agent reports on its batches enters the ledger.

use std::time::Instant;

use wire::{Outcome, PageNo, RegionId, Report};

use super::batch::{Batch, Target};
use super::{Client, ProtocolError, State};
use crate::core::content::frame::Frame;
use crate::core::ledger::Entry;

impl Client {
    pub(super) fn report(&self, state: &mut State, report: &Report) -> Result<(), ProtocolError> {
        state.link.resume();
        state.flight.reported = Instant::now();
        state.budget.maps = report.maps;
        state.flight.credit.charge(report.cpu_ns);
        state.totals.window_max_ns = state.totals.window_max_ns.max(report.window_ns);
        if report.window_ns > 0 {
            state.totals.stalls.add(report.window_ns as f64 / 1e9);
        }
        if report.outcomes.iter().map(|outcome| u64::from(outcome.run.len)).sum::<u64>()
            > u64::from(wire::MAX_BATCH_PAGES)
        {
            return Err(ProtocolError::ReportTooLong(report.batch));
        }
        let Some(mut batch) = state.flight.batches.remove(&report.batch) else {
            return Err(ProtocolError::UnknownBatch(report.batch));
        };
        for outcome in &report.outcomes {
            for page in outcome.run.pages() {
                self.settle(state, &mut batch, page, outcome.outcome);
            }
        }
        let id = batch.region;
        if report.last {
            self.settle_rest(state, batch);
        } else {
            state.flight.batches.insert(report.batch, batch);
        }
        state.drop_unmanaged(id);
        Ok(())
    }

    /// The pages of a batch that are not settled were not merged.
    pub(super) fn settle_rest(&self, state: &mut State, mut batch: Batch) {
        for page in batch.left() {
            self.settle(state, &mut batch, page, Outcome::Gone);
        }
    }

    /// Enters the outcome of a page of a batch, unless it has one.
    fn settle(&self, state: &mut State, batch: &mut Batch, page: PageNo, outcome: Outcome) {
        let Some(target) = batch.settle(page) else { return };
        let Some(region) = state.regions.get_mut(&batch.region) else { return };
        debug_assert_eq!(region.entry(page), Entry::Pending, "page {page}");
        state.flight.settled();
        if let Some(origin) = batch.origins.remove(&page) {
            return self.settle_move(state, batch.region, page, outcome, origin, target);
        }
        if outcome != Outcome::Differs {
            region.ages.settled(page);
        } else if region.ages.differs(page) {
            state.flight.mispredicted = true;
            region.set(page, Entry::Fresh);
            if let Target::Frame(frame) = target {
                self.release(frame);
            }
            return;
        }
        if outcome == Outcome::Merged {
            match target {
                Target::Frame(frame) => {
                    state.totals.merged += 1;
                    region.set(page, Entry::Merged(frame));
                }
                Target::Zero => {
                    state.totals.zeroed += 1;
                    region.set(page, Entry::Zero);
                }
            }
            return;
        }
        region.set(page, Entry::Fresh);
        match outcome {
            Outcome::Differs => {
                state.totals.differed += 1;
                region.ages.restart(page);
            }
            Outcome::NoMaps => {
                region.ages.defer(page);
                state.budget.exhaust(state.totals.full_scans);
            }
            Outcome::Pinned | Outcome::Locked => state.refusals.pinned(self.pid),
            // It is looked at again when it was written.
            Outcome::Unreadable => state.totals.unreadable += 1,
            Outcome::Gone | Outcome::Failed | Outcome::Merged => {}
        }
        if matches!(outcome, Outcome::Pinned | Outcome::Locked | Outcome::Failed | Outcome::Gone) {
            region.ages.restart(page);
        }
        if let Target::Frame(frame) = target {
            self.release(frame);
        }
    }

    /// Enters the outcome of a page that was to be moved from one frame to another.
    fn settle_move(&self, state: &mut State, id: RegionId, page: PageNo, outcome: Outcome, from: Frame, to: Target) {
        let Some(region) = state.regions.get_mut(&id) else { return };
        let Target::Frame(to) = to else { return };
        let (stays, leaves) = if outcome == Outcome::Merged { (to, from) } else { (from, to) };
        // Where it was not moved it maps its frame as before. If it was written, a later scan finds
        // the copy.
        region.set(page, Entry::Merged(stays));
        if matches!(outcome, Outcome::Pinned | Outcome::Locked) {
            state.refusals.pinned(self.pid);
        }
        self.release(leaves);
    }
}

#[cfg(test)]
mod tests;
