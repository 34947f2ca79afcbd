//! What a user sees: each command, real clients and real guests.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod checkpoint;
mod cli;
mod dirty;
mod doctor;
mod domains;
mod estimate;
mod guests;
mod metrics;
mod pool;
mod proxmox;
mod recycling;
mod service;
mod upgrade;
mod vmm;
