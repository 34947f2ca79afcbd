//! Checkpoints: the memory of a running process, such as a guest's RAM, stored in an mpool and read
//! back.
//!
//! [`take`] stores a checkpoint in three steps:
//!
//! 1. It stores every present page while the process runs. The kernel notes the pages that the
//!    process writes meanwhile.
//! 2. In rounds, it stores the written pages again, until those left can be copied within the
//!    longest pause.
//! 3. It stops the process, copies the pages left, and lets the process run. Only then does it
//!    store the copy.
//!
//! Pages that any checkpoint in the pool already has are not stored again ([`Catalog`]). Pages that
//! the daemon knows to be unchanged since the last checkpoint are not even read ([`Changes`]).
//!
//! The kernel clears its notes of written pages when they are read. The daemon reads them too, so
//! the caller must ask it to freeze the process while the checkpoint is taken ([`Frozen`]). The
//! process does not stay stopped, however the checkpoint ends (crate `guard`).
//!
//! *Direct I/O.* The kernel notes a page when an I/O request pins it. The device may write to the
//! page later, after the page has been stored and its note cleared. In a process that may do direct
//! I/O, the pages noted in any round are therefore copied once more during the pause, the latest
//! first, as far as the longest pause allows.

mod catalog;
mod restore;
pub mod serve;
mod source;
mod take;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod test;

pub use catalog::{
    BeginError, Catalog, CatalogDamage, Checkpoint, FindError, Finding, Flaw, Held, Image, LeaseError, OpenError,
    Others, PageFlaw, PutOff, ReadError, RemoveError, RepackError, Repacked, Repacking, Store, StoreError, Unrepaired,
    Usage, View, Warning, Writer, Wrong, ensure_name, hash, index,
};
pub use restore::RestoreError;
pub use source::{Source, SourceError};
pub use take::{ByStopping, Changes, Frozen, Halt, Options, Phases, TakeError, Taken, store_read, take};

/// An error and its causes, as one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}
