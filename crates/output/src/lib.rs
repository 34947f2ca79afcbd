//! The ways out of the program, one for each kind of reader.
//!
//! - [`file`]: files that a person names. `--force` replaces a regular file, nothing else.
//! - [`stdout`]: what a command answers. Every write is checked.
//! - [`text`]: names and messages of others, before a terminal, a log or a page shows them.

pub mod file;
pub mod stdout;
pub mod text;

pub use file::{Existing, FileError, OutputFile};
pub use stdout::{Stdout, StdoutError, is_closed, print, say};
