//! The event loop: sockets, handshakes, process ends, periods; a restarted daemon takes its clients
//! back.

pub(crate) mod adopt;
pub(crate) mod detach;
pub(crate) mod engine;
pub(crate) mod freeze;
pub(crate) mod place;
pub(crate) mod service;
