//! The part of a message that is not applied yet.

use std::collections::VecDeque;

use wire::{RegionId, Run};

/// What a message says of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Discarded,
    Shrunk,
    /// They leave management, and may map their frames for as long as the process lives.
    Retained,
    Recycled,
}

/// The part of a message about pages that is not applied yet. A message can name as many pages as a
/// region has, so that its work is done in slices; other clients are served between two of them.
pub(crate) struct Rest {
    pub(super) what: What,
    pub(super) region: RegionId,
    pub(super) runs: VecDeque<Run>,
}
