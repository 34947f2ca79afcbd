//! Benches of data structures.

pub(crate) mod dirty;
pub(crate) mod mpool;
pub(crate) mod sdtree;
