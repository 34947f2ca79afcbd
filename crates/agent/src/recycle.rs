//! Recycling: pages that the guest has marked as free become untouched memory.
//!
//! Claim, zero and release all happen here, in the process that is the guest (see `ppr`): a daemon
//! that dies or stops leaves no page claimed, and a guest that waits for a claim waits for a thread
//! of its own process. The daemon decides when to sweep, and for how much CPU time.
//!
//! The guest is not trusted: [`ppr::Ram`] limits what it can name to parts of regions.

pub(crate) mod pool;
pub(crate) mod sweep;
