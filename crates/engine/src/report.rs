//! What the engine tells: its status, the rates at which clients write, and the answers on the
//! control socket.

mod handler;
pub(crate) mod rates;
pub(crate) mod status;
