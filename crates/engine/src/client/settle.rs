//! Settling: what an agent reports on its batches enters the ledger.

use wire::{Outcome, PageNo, Report};

use super::batch::{Batch, Target};
use super::{Client, ProtocolError, State};
use crate::ledger::Entry;

impl Client {
    /// The agent reports on a batch.
    pub(super) fn report(&self, state: &mut State, report: &Report) -> Result<(), ProtocolError> {
        state.link.set_stalled(false);
        state.flight.reported();
        state.budget.set_maps(report.maps);
        state.charge(report.cpu_ns);
        state.totals.window_max_ns = state.totals.window_max_ns.max(report.window_ns);
        if report.outcomes.iter().map(|outcome| u64::from(outcome.run.len)).sum::<u64>()
            > u64::from(wire::MAX_BATCH_PAGES)
        {
            return Err(ProtocolError::ReportTooLong(report.batch));
        }
        let Some(mut batch) = state.flight.take(report.batch) else {
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
            state.flight.put_back(report.batch, batch);
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
        if region.settle_prediction(page, outcome == Outcome::Differs) {
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
                region.restart(page);
            }
            Outcome::NoMaps => {
                region.defer(page);
                state.budget.exhaust(state.totals.full_scans);
            }
            Outcome::Pinned | Outcome::Locked => state.refusals.pinned(self.pid),
            // It is looked at again when it was written.
            Outcome::Unreadable => state.totals.unreadable += 1,
            Outcome::Gone | Outcome::Failed | Outcome::Merged => {}
        }
        if matches!(outcome, Outcome::Pinned | Outcome::Locked | Outcome::Failed | Outcome::Gone) {
            region.restart(page);
        }
        if let Target::Frame(frame) = target {
            self.release(frame);
        }
    }
}
