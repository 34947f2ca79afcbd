//! What the workers share.

pub(crate) mod headroom;
pub(crate) mod queue;
pub(crate) mod searches;
pub(crate) mod shared;
pub(crate) mod stall;
pub(crate) mod state_file;
