//! When a guest's free pages are taken back, and how much of the time that may take.

/// The part of a reclaim period after which to look for marks. The rest of the period is for the
/// work.
pub(crate) const LOOK_AFTER: f64 = 0.8;
/// The part of a reclaim period that one sweep may take where there is no other limit.
pub(crate) const SWEEP_SHARE: f64 = 0.5;
