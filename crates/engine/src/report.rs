//! What the engine says of itself: its status, and the rates at which clients write.

pub(crate) mod rates;
pub(crate) mod status;
