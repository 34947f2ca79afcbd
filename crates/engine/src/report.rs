//! What the engine tells: its status, the rates at which clients write, where memory went, who
//! shares with whom, and the answers on the control socket.

mod files;
mod handler;
mod map;
mod rates;
mod sharing;
mod status;
mod why;
