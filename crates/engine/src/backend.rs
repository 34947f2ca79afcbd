//! What carries merging out: agents in the clients' processes, or the kernel's module. Both have
//! the core's ledger, index, pass and recycling.

pub(crate) mod agent;
pub(crate) mod lend;
pub(crate) mod module;
