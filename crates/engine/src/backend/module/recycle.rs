//! Free pages of guests whose RAM lies in files: the daemon punches them, without an agent.
//!
//! The guest marks its free pages in a pool (see [`ppr`]). The process that is the guest has pool
//! and monitor among its descriptors, as `pageone run --backend module --ppr` left them there.
//!
//! ```text
//!   process that has a file open ──▶ find    environment: pool, monitor; QEMU: where the RAM lies
//!                                     │
//!                                     ▼
//!   each reclaim period, marks? ──▶ sweep    claim ──▶ punch ──▶ ledger ──▶ release
//! ```
//!
//! A guest waits for a page that is claimed. Agents claim in the guest's own process; the daemon
//! may be killed between claim and release. So one daemon alone works on a pool, whose file it
//! locks (`flock(2)`). The kernel gives the lock to the next one when the last thread of the dead
//! one has left its last system call: then nothing is being punched any more, and what was claimed
//! is released ([`pool`]).
//!
//! The ledger has a page as recycled before it is released. What the guest writes afterwards has a
//! dirty bit, and so has what was punched: the scan asks the kernel which of them are still holes.

pub(super) mod find;
pub(super) mod guests;
pub(super) mod known;
mod plug;
mod pool;
mod process;
mod sweep;
#[cfg(test)]
mod tests;
