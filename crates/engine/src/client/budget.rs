//! The budget of mappings (`vm.max_map_count`) of a client.
//!
//! Each run of merged pages may cost a mapping. An agent refuses runs for which there is no room
//! ([`wire::Outcome::NoMaps`]). Then runs that are too short are left out, twice as long a run each
//! time, and pages that were left out are tried again every [`RETRY_SCANS`] scans.

/// Scans between two attempts at pages that were put off.
const RETRY_SCANS: u64 = 16;
/// Shortest run, in pages, after the budget was first exhausted, and at most.
const MIN_RUN: std::ops::RangeInclusive<u32> = 4..=512;

/// Mappings of a client, and what they leave room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    /// Mappings of the process now, as its agent estimates, and when it became a client.
    pub(crate) maps: u32,
    first_maps: u32,
    /// Runs of fewer pages are left out.
    pub(crate) min_run: u32,
    /// Whether the budget was exhausted since `min_run` was last relaxed.
    exhausted: bool,
    /// The scan at which something was last left out.
    pub(super) left_out: Option<u64>,
}

impl Budget {
    /// Of a process that has `maps` mappings.
    pub(crate) fn new(maps: u32) -> Self {
        Self { maps, first_maps: maps, min_run: 1, exhausted: false, left_out: None }
    }

    /// Mappings more than when it became a client.
    pub(crate) fn more_maps(&self) -> u32 {
        self.maps.saturating_sub(self.first_maps)
    }

    /// The agent had no room for a run.
    pub(super) fn exhaust(&mut self, scan: u64) {
        self.left_out = Some(scan);
        if !self.exhausted {
            self.exhausted = true;
            self.min_run = (self.min_run * 2).clamp(*MIN_RUN.start(), *MIN_RUN.end());
        }
    }

    /// Whether something was left out within the last two rounds of attempts.
    pub(crate) fn is_short(&self, scan: u64) -> bool {
        self.left_out.is_some_and(|left_out| left_out + 2 * RETRY_SCANS >= scan)
    }

    /// Whether pages that were put off are to be tried again at this scan.
    pub(super) fn retry(&mut self, scan: u64) -> bool {
        let retry = scan.is_multiple_of(RETRY_SCANS);
        if retry {
            self.min_run = if self.exhausted { self.min_run } else { 1 };
            self.exhausted = false;
        }
        retry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_to_be_longer_while_the_budget_is_exhausted() {
        let mut budget = Budget::new(100);
        assert!(!budget.is_short(0) && budget.min_run == 1);
        budget.exhaust(3);
        budget.exhaust(3);
        assert_eq!((budget.min_run, budget.is_short(3)), (4, true), "once a round");
        assert!(!budget.retry(15) && budget.retry(16));
        budget.exhaust(16);
        assert_eq!(budget.min_run, 8);
        assert!(budget.retry(32) && budget.min_run == 8 && budget.retry(48) && budget.min_run == 1);
        assert!(budget.is_short(48) && !budget.is_short(49));
    }
}
