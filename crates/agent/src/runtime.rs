//! What all floors stand on: the shared state behind its lock, threads, memory, system calls.

pub mod heap;
pub mod lock;
pub mod log;
pub mod regions;
pub mod sabotage;
pub mod state;
pub mod threads;
