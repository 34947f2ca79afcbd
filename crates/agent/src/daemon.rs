//! The connection to the daemon: what it asks for, and what it is told.

pub mod batch;
pub mod digest;
pub mod link;
pub mod outbox;
