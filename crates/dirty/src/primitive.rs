//! The atomics: the standard library's, or loom's where `--cfg loom` asks for a model-checked
//! build.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
