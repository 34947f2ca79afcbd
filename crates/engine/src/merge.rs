//! The merge pass: scan, read, look up, plan, send.

pub(crate) mod pass;
pub(crate) mod plan;
pub(crate) mod scan;
