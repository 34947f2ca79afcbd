//! What carries merging out: agents in the clients' processes, or the kernel's module.

pub(crate) mod agent;
pub(crate) mod module;
