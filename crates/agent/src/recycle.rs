//! Recycling: pages that the guest has marked as free become untouched memory.
//!
//! Claim, zero and release all happen here, in the process that is the guest (see `ppr`). A daemon
//! that dies or stops in the middle leaves no page claimed. A guest that waits for a claim
//! waits for a thread of its own process. The daemon decides when to sweep (`ToAgent::Recycle`) and
//! how much CPU time a sweep may take.
//!
//! The guest is not trusted: [`ppr::Ram`] limits what it can name, and that is limited to parts of
//! regions. The pool cannot shrink.

pub(crate) mod pool;
pub(crate) mod sweep;
