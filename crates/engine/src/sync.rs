//! The engine's locks: those of `parking_lot`. A build with the feature `lock-times` also notes how
//! long each is held, for `pageone-bench scale`; no other build has any part of that.

#[cfg(not(feature = "lock-times"))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

#[cfg(feature = "lock-times")]
mod timed;
#[cfg(feature = "lock-times")]
pub(crate) use timed::{Condvar, Mutex, MutexGuard, RwLock, tell};
