//! Contents: under which handle each is known, and where it is.

pub(crate) mod frame;
pub(crate) mod index;
pub(crate) mod seed;
