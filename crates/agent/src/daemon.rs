//! The conversation with the daemon: its requests, and the answers.
//!
//! ```text
//! link (a connection, one after the other) ─▶ requests ─▶ batch, digest, detach, given_back
//! ```

pub(crate) mod batch;
pub(crate) mod detach;
pub(crate) mod digest;
pub(crate) mod error;
mod given_back;
pub(crate) mod link;
pub(crate) mod requests;
pub(crate) mod send;
