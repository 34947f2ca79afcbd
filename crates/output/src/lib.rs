//! The ways out of the program, one for each kind of reader.
//!
//! - [`file`]: files that a person names. Nothing but a regular file is ever replaced, by `--force`.
//! - [`stdout`]: what a command answers. Every write is checked.

pub mod file;
pub mod stdout;

pub use file::{Existing, FileError, OutputFile};
pub use stdout::{Stdout, StdoutError, is_closed, print, say};
