//! Sending batches to an agent, with the segments that they need.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Release;
use std::time::{Duration, Instant};

use wire::{Merge, MergeRun, RegionId, SegmentId, ToAgent, control};

use super::batch::{Batch, PlannedRun, Target};
use super::{Client, State};
use crate::core::content::frame::Frame;
use crate::core::ledger::Entry;
use crate::sync::Mutex;

/// How long an answer of [`memory_is_sound`] is good for.
const SOUND_FOR: Duration = Duration::from_millis(10);

/// Whether the kernel has counted no memory of this host as failed.
fn memory_is_sound() -> bool {
    static LAST: Mutex<Option<(Instant, bool)>> = Mutex::new(None);
    let mut last = LAST.lock();
    if let Some((at, is_sound)) = *last
        && at.elapsed() < SOUND_FOR
    {
        return is_sound;
    }
    let is_sound = kmem::procfs::meminfo().is_ok_and(|info| info.corrupted_kib == 0);
    *last = Some((Instant::now(), is_sound));
    is_sound
}

/// What becomes of pages that were planned and are not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// They are young again.
    Restart,
    /// They are put off.
    Defer,
}

impl Client {
    /// These runs are not merged: their frames lose the user that was counted ahead.
    pub(crate) fn undo(&self, state: &mut State, id: RegionId, runs: &[PlannedRun], then: Then) {
        if then == Then::Defer && !runs.is_empty() {
            state.budget.left_out = Some(state.totals.full_scans);
        }
        self.give_back(state, id, runs, then);
    }

    /// See [`Client::undo`]; the budget of mappings is not why.
    fn give_back(&self, state: &mut State, id: RegionId, runs: &[PlannedRun], then: Then) {
        for PlannedRun { run, target } in runs {
            for page in run.pages() {
                // A page that was to be moved maps its frame as before.
                if let Some(region) = state.regions.get_mut(&id)
                    && !matches!(region.entry(page), Entry::Merged(_))
                {
                    match then {
                        Then::Restart => region.ages.restart(page),
                        Then::Defer => region.ages.defer(page),
                    }
                }
            }
            if let Target::Frame(first) = *target {
                // No child can map what was never mapped.
                (0..run.len).for_each(|i| self.domain.release(Frame(first.0 + i)));
            }
        }
    }

    /// Records a batch and sends it. The pages' entries become pending; their frames' users were
    /// counted by the caller. Runs with a page that was found written meanwhile are left out.
    /// `Err` gives the other runs back: nothing was sent.
    pub(crate) fn send_batch(
        &self,
        id: RegionId,
        runs: Vec<PlannedRun>,
    ) -> Result<(), (Vec<PlannedRun>, std::io::Error)> {
        let mut state = self.settled();
        let ready = state.link.is_up() && !state.tracking.is_frozen();
        let Some(region) = state.regions.get_mut(&id).filter(|_| ready) else {
            return Err((runs, std::io::ErrorKind::NotConnected.into()));
        };
        let (written, runs): (Vec<_>, Vec<_>) = runs.into_iter().partition(|run| region.ages.is_written(run.run));
        self.undo(&mut state, id, &written, Then::Restart);
        let runs = self.without_left_out(&mut state, id, runs);
        if runs.is_empty() {
            return Ok(());
        }
        let mut wire_runs = Vec::with_capacity(runs.len());
        for &PlannedRun { run, target } in &runs {
            let target = match target {
                Target::Zero => wire::Target::Zero,
                Target::Frame(frame) => match self.announce_segment(&mut state, frame) {
                    Ok(segment) => wire::Target::Frames { segment, slot: frame.slot() },
                    Err(e) => return Err((runs, e)),
                },
            };
            wire_runs.push(MergeRun { run, target });
        }
        let batch = state.flight.next_batch;
        self.memory.control.atomic_u64(control::SOUND).store(memory_is_sound().into(), Release);
        let message = wire::encode(&ToAgent::Merge(Merge { batch, region: id, runs: wire_runs, calm: true }));
        if let Err(e) = self.conn.send(&message, &[]) {
            return Err((runs, e));
        }
        let state = &mut *state;
        let Some(region) = state.regions.get_mut(&id) else { return Ok(()) };
        if let Some(changes) = &mut state.observers.changes {
            changes.batch(region.start, &runs);
        }
        let mut pages = 0;
        let mut origins = HashMap::new();
        for PlannedRun { run, .. } in &runs {
            for page in run.pages() {
                match region.set(page, Entry::Pending) {
                    Entry::Fresh | Entry::Zero | Entry::Recycled => {}
                    Entry::Merged(frame) => drop(origins.insert(page, frame)),
                    before => debug_assert!(false, "page {page} was {before:?}"),
                }
            }
            pages += run.len;
        }
        let mut batch = Batch::new(id, runs);
        batch.origins = origins;
        state.flight.begin(batch, pages);
        Ok(())
    }

    /// Puts off runs that need segments which the agent has no descriptors for.
    fn without_left_out(&self, state: &mut State, id: RegionId, runs: Vec<PlannedRun>) -> Vec<PlannedRun> {
        let is_left_out = |run: &PlannedRun| match run.target {
            Target::Zero => false,
            Target::Frame(frame) => {
                self.domain.store.segment(frame).is_some_and(|segment| state.flight.left_out.contains(&segment.id))
            }
        };
        let (left_out, runs): (Vec<_>, Vec<_>) = runs.into_iter().partition(is_left_out);
        self.give_back(state, id, &left_out, Then::Defer);
        runs
    }

    /// The segments whose descriptors the agent gets with these runs.
    pub(crate) fn new_segments(&self, runs: &[PlannedRun]) -> Vec<SegmentId> {
        let state = self.state();
        let frames = runs.iter().filter_map(|run| match run.target {
            Target::Frame(frame) => Some(frame),
            Target::Zero => None,
        });
        let segments = frames.filter_map(|frame| self.domain.store.segment(frame)).map(|segment| segment.id);
        segments.filter(|id| !state.flight.segments.contains(id)).collect()
    }

    /// Sends the descriptor of a frame's segment before its first use.
    fn announce_segment(&self, state: &mut State, frame: Frame) -> std::io::Result<SegmentId> {
        let segment = self.domain.store.segment(frame).ok_or(std::io::ErrorKind::NotFound)?;
        if !state.flight.segments.contains(&segment.id) {
            self.conn.send(&wire::encode(&ToAgent::Segment { segment: segment.id }), &[segment.fd()])?;
            state.flight.segments.insert(segment.id);
        }
        Ok(segment.id)
    }

    pub(crate) fn drop_segment(&self, segment: SegmentId) {
        if self.state().flight.close(segment) {
            // A full socket leaves the client with one descriptor too many, until it reconnects.
            let _ = self.conn.send(&wire::encode(&ToAgent::DropSegment { segment }), &[]);
        }
    }

    /// Tells the agent to close the segments that its domain did not take: else they would exist
    /// until it ends, though no page maps them any more. What its socket has no room for is told
    /// the next time.
    pub(crate) fn drop_others(&self) {
        let mut state = self.state();
        while let Some(&segment) = state.flight.others.last() {
            // One that was sent since is its domain's.
            let is_own = state.flight.segments.contains(&segment);
            if !is_own && self.conn.send(&wire::encode(&ToAgent::DropSegment { segment }), &[]).is_err() {
                return;
            }
            state.flight.others.pop();
        }
    }
}

#[cfg(test)]
mod tests;
