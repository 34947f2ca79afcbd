//! The ways out of the program, one for each kind of reader.
//!
//! - [`stdout`]: what a command answers. Every write is checked.

pub mod stdout;

pub use stdout::{Stdout, StdoutError, is_closed, print, say};
