//! While an operation is pinned, no identity that it can see is used again.

#[cfg(not(loom))]
pub(crate) use crossbeam_epoch::{Guard, pin};

/// Calls `f` when all operations that are pinned now have ended.
#[cfg(not(loom))]
pub(crate) fn later(guard: &Guard, f: impl FnOnce() + Send + 'static) {
    guard.defer(f);
}

/// Loom cannot model crossbeam's epochs, so there every operation is pinned for ever.
#[cfg(loom)]
pub(crate) struct Guard;

#[cfg(loom)]
pub(crate) fn pin() -> Guard {
    Guard
}

#[cfg(loom)]
pub(crate) fn later(_: &Guard, _: impl FnOnce()) {}
