//! Recycling: which clients' free guest pages are taken back, and when.

pub(crate) mod device;
pub(crate) mod layout;
pub(crate) mod policy;
pub(crate) mod ram;
