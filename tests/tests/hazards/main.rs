//! The hazards of merging, each with a client that would notice: a real daemon, a real agent, real
//! memory.
//!
//! These tests need no guest; `make test-kernels` runs the same binary inside guests of other
//! kernels. `crates/agent/tests/sabotage.rs` shows that each fails without its guard.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod bounds;
mod failures;
mod hostile;
mod merging;
mod places;
mod poison;
mod programs;
mod readers;
mod swapped;
mod trust;
mod uids;
