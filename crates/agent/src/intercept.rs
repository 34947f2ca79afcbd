//! The calls of the program that the agent sees, and what it does before it makes them.
//!
//! ```text
//! descriptors ─▶ the program's `close` and `dup2` pass over the agent's own
//! interpose ─▶ watch (is it managed?) ─▶ guard ─▶ window
//!     ├──────▶ private (a file that is not mapped: private memory in its place)
//!     ├──────▶ snapshot (the memory of a clone is mapped from its snapshot)
//!     ├──────▶ mark ─▶ probe, start (service)
//!     ├◀────── process_madvise (range by range)
//!     └──────▶ without_tables (in a child whose tables cannot be used)
//! attach ─▶ tables (a program that runs already calls the agent from now on)
//!     ├────▶ loading (the memory of a clone comes while it runs) ─▶ mark
//!     └────▶ probe, mark, start (service)
//! ```

pub(crate) mod attach;
pub(crate) mod descriptors;
pub(crate) mod guard;
pub(crate) mod interpose;
pub(crate) mod loading;
pub(crate) mod mark;
pub(crate) mod next;
pub(crate) mod private;
pub(crate) mod probe;
pub(crate) mod process_madvise;
pub(crate) mod snapshot;
pub(crate) mod tables;
pub(crate) mod without_tables;
