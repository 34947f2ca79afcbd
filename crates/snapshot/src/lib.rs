//! Snapshots of guests: RAM in a pool of checkpoints, with all devices; and new guests, clones,
//! that go on from there.
//!
//! ```text
//! prepare   a command line for a guest that can be stored                 pageone run --snapshots
//! save      RAM while it runs, then a pause: disks, devices, last pages   pageone snapshot save
//! clone     a QEMU with the source's words, whose RAM is a file of        pageone snapshot run
//! memory    the kernel's (FUSE) that is read from the pool on demand
//! ```
//!
//! A snapshot is a checkpoint with bytes beside it ([`record`]). So everything that pools do with
//! checkpoints holds: each page is stored once, the second snapshot of a guest stores what changed.

mod agent;
pub mod archive;
pub mod clone;
mod disks;
mod facts;
#[cfg(test)]
mod fake;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod keep;
mod left;
pub mod memory;
mod monitor;
mod names;
mod ours;
mod prepare;
pub mod qcow2;
pub mod record;
mod reflink;
pub mod rights;
pub mod save;
pub mod still;
mod stream;
mod undo;

pub use agent::{AgentError, NoAgent};
pub use clone::trial::stored_image;
pub use disks::{DiskError, file_name};
pub use facts::Facts;
pub use left::{Left, left};
pub use monitor::MonitorError;
pub use prepare::{PrepareError, Prepared, memory, prepare};
pub use stream::StreamError;
pub use undo::{UndoError, end, lock_of, put_back};
