//! The calls of the program that the agent sees, and what it does before it makes them.
//!
//! ```text
//! interpose ─▶ watch (is it managed?) ─▶ guard ─▶ window
//!     ├──────▶ mark ─▶ probe, start (service)
//!     └──────▶ torn (in a child whose tables cannot be used)
//! ```

pub(crate) mod guard;
pub(crate) mod interpose;
pub(crate) mod mark;
pub(crate) mod probe;
pub(crate) mod torn;
