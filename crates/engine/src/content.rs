//! Contents and where they are kept: frames, stores, the index, sharing domains.

pub(crate) mod compact;
pub(crate) mod domain;
pub(crate) mod frame;
pub(crate) mod index;
pub(crate) mod seed;
pub(crate) mod store;
