//! The ways out of the program, one for each kind of reader.
//!
//! - [`file`]: files that a person names. `--force` replaces a regular file, nothing else.
//! - [`directory`]: the directories that they go into, also new ones.
//! - [`socket`]: Unix sockets that a person names.
//! - [`progress`]: how far a long command is.
//! - [`stdout`]: what a command answers. Every write is checked.
//! - [`text`]: names and messages of others, before a terminal, a log or a page shows them.

pub mod directory;
pub mod file;
pub mod progress;
pub mod socket;
pub mod stdout;
pub mod text;

pub use file::{Existing, FileError, OutputFile};
pub use progress::{Progress, Shown};
pub use socket::Socket;
pub use stdout::{Stdout, StdoutError, is_closed, print, say, width};
