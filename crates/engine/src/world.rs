//! What the workers share.

pub(crate) mod queue;
