//! The governor on a simulated scanner.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod ksmd;
mod law;
mod limits;
mod plant;
mod settings;
