//! Recycling: which clients' free guest pages are taken back, and when.

pub(crate) mod policy;
pub(crate) mod qmp;
pub(crate) mod ram;
