//! CPU limits and scan times, of our engine and of the kernel's KSM. These tests read the CPU time
//! of threads and change the host's KSM settings, so they run alone.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod governor;
mod ksm;
