//! What all benches share: figures and how they are printed, plots, numbers that look random,
//! waiting that a signal ends, and guests' memory to work on.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]

pub mod dump;
pub mod guest;
pub mod interrupt;
pub mod plot;
pub mod random;
pub mod report;

use std::path::PathBuf;

use anyhow::{Context, Result};

/// This program: benches start themselves anew, as clients and workers.
///
/// # Errors
///
/// When the kernel does not say which file it is.
pub fn own_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find this program")
}
