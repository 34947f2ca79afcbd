//! What a user sees: each command, real clients and real guests.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints for who runs it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agree;
mod answers;
mod attach;
mod checkpoint;
mod cli;
mod dirty;
mod doctor;
mod domains;
mod errors;
mod estimate;
mod full;
mod guests;
mod guide;
mod headroom;
mod hostile;
mod memory;
mod metrics;
mod migration;
mod module;
mod outputs;
mod pausing;
mod pool;
mod proxmox;
mod recycling;
mod restarts;
mod seeing;
mod service;
mod sharing;
mod snapshot;
mod upgrade;
mod vmm;
