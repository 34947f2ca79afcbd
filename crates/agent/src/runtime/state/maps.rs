//! The budget of mappings under `vm.max_map_count`.

use crate::runtime::sabotage::{self, Sabotage};

/// How many mappings (VMAs) the process has, as estimated, and may have.
///
/// The estimate adds the most mappings that each run can make: too many where it replaces another
/// run, or the kernel joins neighbours. So they are counted again where there seems to be no room.
pub(crate) struct MapBudget {
    counted: usize,
    estimate: usize,
    budget: usize,
}

impl MapBudget {
    /// No room before the mappings are counted.
    pub(crate) const fn new() -> Self {
        Self { counted: 0, estimate: 0, budget: 0 }
    }

    /// Sets what was counted, and `vm.max_map_count`, of which a third stays free.
    pub(crate) fn set(&mut self, counted: usize, most: usize) {
        *self = Self { counted, estimate: counted, budget: most - most / 3 };
    }

    pub(crate) fn estimate(&self) -> usize {
        self.estimate
    }

    /// Whether that many more fit into the budget.
    pub(crate) fn has_room(&self, wanted: usize) -> bool {
        self.estimate + wanted <= self.budget || sabotage::is_on(Sabotage::NoBudget)
    }

    pub(crate) fn add(&mut self, count: usize) {
        self.estimate += count;
    }

    /// Whether much was added since the last count.
    pub(crate) fn is_vague(&self) -> bool {
        self.estimate - self.counted > self.budget / 8
    }
}
