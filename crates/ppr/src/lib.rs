//! The Per-Page Recycler: the memory that guest and host share, and both sides of it.
//!
//! The guest says which of its pages it does not need; the host takes them back without asking,
//! within one period, and neither ever interrupts the other. They share two bitmaps indexed by
//! guest frame number: F (*free*), and C (*claimed*: the host is about to zero the page), with one
//! summary level S over F, so that looking for work costs nothing where there is none.
//!
//! ```text
//!   guest                                        host
//!   a page becomes free:  set F                  claim:    set C, then clear F; what was still set is the host's
//!   a page is needed:     clear F,               recycle:  zero the host's pages
//!                         wait while C is set    release:  clear C
//! ```
//!
//! A bit of F is cleared by exactly one side. If by the guest, no host can come to own the page any
//! more. If by the host, then C was set before that, and is cleared only when the page is zero: the
//! guest, having cleared F or found it clear, sees C set until it is safe. So **a page in use is
//! never zeroed**; `docs/design/ppr.md` has the argument in full, and `tests/loom.rs` tries every
//! interleaving.
//!
//! # Who may be a host
//! The guest waits for C; so whoever claims has to release, whatever dies. **Claim, recycle and
//! release in the process that is the guest** (in QEMU: the agent does it, in one go, waiting for
//! nobody). Then a dead host is a dead guest; a stopped one is a stopped guest; and a daemon, which
//! only says when, may die at any time. [`Claim`] releases when it is dropped, also by a panic.
//! A host in a process of its own is possible ([`Host::recover`]), but a guest that meets its
//! claims after its death waits for its successor.
//!
//! # Resets
//! Marks outlive the guest kernel that made them: the pool is memory of a device. A guest that ends
//! in order cancels them all. After a reset that the guest did not see coming (`system_reset`, a
//! triple fault) the pool must be emptied ([`Host::forget`]) **before** the guest runs again: a
//! host has QEMU stop at resets (`-no-reboot -no-shutdown`, or `set-action
//! reboot=shutdown,shutdown=pause`), empties the pool and then lets the reset happen.
//!
//! [`Guest`] serves user-space programs too: [`PageAlloc`] is an allocator that marks the pages
//! that it frees.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "loom builds model the lock-free steps only"))]

mod guest;
mod host;
mod layout;
#[cfg(not(loom))]
mod page_alloc;
mod pool;
mod primitive;
mod ram;
mod words;

#[cfg(test)]
mod tests;

pub use guest::{Cancelled, Guest, Stuck};
pub use host::{BATCH_WORDS, Claim, Host, Recycled};
pub use layout::{Field, GuestState, HostState, Layout, LayoutError, MAGIC, MAX_FRAMES, VERSION, guest_frames};
#[cfg(not(loom))]
pub use page_alloc::PageAlloc;
pub use pool::{Pool, PoolError};
pub use ram::Ram;
