//! The batches that an agent has and has not reported on.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use wire::{RegionId, Run, SegmentId};

use super::batch::Batch;
use super::credit::Credit;
use crate::core::content::frame::Frame;
use crate::core::content::index::ClientId;

/// Pages outstanding at one agent before a pass ends: a few batches, so that it always has work.
const IN_FLIGHT: u32 = 3072;

pub(crate) struct Flight {
    pub(super) batches: HashMap<u64, Batch>,
    pub(super) next_batch: u64,
    /// Pages in these batches that are not settled.
    pub(crate) outstanding: u32,
    /// CPU time that the agent may charge.
    pub(crate) credit: Credit,
    /// When the agent last reported, or was given something to do after it had been idle.
    pub(super) reported: Instant,
    /// A pass ended because the agent had enough to do; another is due when it has done half.
    full: bool,
    /// A prediction was wrong, so there are candidates that no pass was requested for.
    pub(super) mispredicted: bool,
    /// Clients that got merge requests from a pass of this one that is not over.
    pub(crate) to_notify: HashSet<ClientId>,
    /// Segments whose descriptors the agent has.
    pub(super) segments: HashSet<SegmentId>,
    /// Segments that the agent has and its domain did not take.
    pub(crate) others: Vec<SegmentId>,
    /// Pages that map such segments, or did, ascending.
    pub(crate) earlier: Arc<BTreeMap<RegionId, Vec<Run>>>,
    /// Segments that the agent has no descriptors for, and how many it keeps at most.
    pub(super) left_out: HashSet<SegmentId>,
    most_segments: u32,
}

impl Flight {
    /// `segments`: those whose descriptors the agent has.
    pub(super) fn new(segments: HashSet<SegmentId>) -> Self {
        Self {
            batches: HashMap::new(),
            next_batch: 1,
            outstanding: 0,
            credit: Credit::new(),
            reported: Instant::now(),
            full: false,
            mispredicted: false,
            to_notify: HashSet::new(),
            segments,
            others: Vec::new(),
            earlier: Arc::default(),
            left_out: HashSet::new(),
            most_segments: 0,
        }
    }

    /// The agent keeps `most` segments and not this one. `true`: the first left out that was sent.
    pub(super) fn leave_out(&mut self, segment: SegmentId, most: u32) -> bool {
        let first = self.left_out.is_empty();
        self.most_segments = most;
        self.segments.remove(&segment) && self.left_out.insert(segment) && first
    }

    /// A segment is closed. If the agent had it, there is room for another.
    pub(super) fn close(&mut self, segment: SegmentId) -> bool {
        self.left_out.remove(&segment);
        let had = self.segments.remove(&segment);
        if had {
            self.left_out.clear();
        }
        had
    }

    /// Why pages stay unmerged for lack of descriptors. `None`: no page does.
    pub(crate) fn why_left_out(&self) -> Option<String> {
        let (left_out, most) = (self.left_out.len(), self.most_segments);
        (left_out > 0).then(|| {
            format!(
                "its limit of open files leaves room for {most} segments of the store, and {left_out} more hold what it could \
                 share; start it with a higher limit (ulimit -n, LimitNOFILE)"
            )
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.outstanding == 0
    }

    /// Pages outstanding, unless the agent has not reported for `time`: then it is not working.
    pub(crate) fn in_hand(&self, time: Duration) -> u32 {
        if self.reported.elapsed() < time { self.outstanding } else { 0 }
    }

    /// Whether the agent has pages and has not reported for more than `time`.
    pub(crate) fn is_late(&self, now: Instant, time: Duration) -> bool {
        self.outstanding > 0 && now.duration_since(self.reported) > time
    }

    /// Whether the agent has enough to do. From then on a pass is due when it has done half of it.
    pub(super) fn is_full(&mut self) -> bool {
        self.full |= self.outstanding > IN_FLIGHT;
        self.full
    }

    /// Whether a pass is due after a report: there is room again, or a prediction was wrong.
    pub(super) fn take_due(&mut self) -> bool {
        let room = self.full && self.outstanding <= IN_FLIGHT / 2;
        if !room && self.outstanding > 0 {
            return false;
        }
        self.full = false;
        room | std::mem::take(&mut self.mispredicted)
    }

    pub(super) fn begin(&mut self, batch: Batch, pages: u32) {
        if self.outstanding == 0 {
            self.reported = Instant::now();
        }
        self.outstanding += pages;
        self.credit.batch(pages);
        self.batches.insert(self.next_batch, batch);
        self.next_batch += 1;
    }

    /// Takes the frames that these pages mapped, of those that are under way to another frame.
    pub(super) fn take_origins(&mut self, region: RegionId, run: Run) -> Vec<Frame> {
        let of_region = self.batches.values_mut().filter(|batch| batch.region == region);
        of_region.flat_map(|batch| batch.take_origins(run)).collect()
    }

    pub(super) fn settled(&mut self) {
        self.outstanding = self.outstanding.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_due_when_half_is_done_or_after_a_wrong_prediction() {
        let mut flight = Flight::new(HashSet::new());
        assert!(flight.is_empty() && !flight.is_full() && !flight.take_due());
        flight.begin(Batch::new(RegionId(1), Vec::new()), IN_FLIGHT);
        assert!(!flight.is_full());
        flight.begin(Batch::new(RegionId(1), Vec::new()), 1);
        assert!(flight.is_full() && !flight.take_due());
        (0..=IN_FLIGHT / 2).for_each(|_| flight.settled());
        assert!(flight.take_due() && !flight.take_due(), "once");
        flight.mispredicted = true;
        assert!(!flight.take_due(), "the agent has work");
        (0..IN_FLIGHT / 2).for_each(|_| flight.settled());
        assert!(flight.is_empty() && flight.take_due() && !flight.take_due());
        assert_eq!((flight.batches.len(), flight.next_batch), (2, 3));
    }
}
