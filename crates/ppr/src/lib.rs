//! The Per-Page Recycler: the memory that guest and host share, and the code of both sides.
//!
//! The guest marks the pages that it does not need. The host takes them back without asking, within
//! one period, and neither ever interrupts the other. They share two bitmaps indexed by guest frame
//! number: F (*free*) and C (*claimed*: the host is about to zero the page). S is a summary level
//! over F, so that a search for work costs next to nothing where there is none.
//!
//! ```text
//!   guest                                        host
//!   a page becomes free:  set F                  claim:    set C, then clear F:
//!                                                          bits still set there are the host's
//!   a page is needed:     clear F,               recycle:  zero the host's pages
//!                         wait while C is set    release:  clear C
//! ```
//!
//! Exactly one side clears a bit of F. If it is the guest, no host can own the page any more. If it
//! is the host, it has set C before, and clears C only when the page is zero. The guest, which has
//! cleared F or found it clear, sees C set until the page is safe. Therefore **a page in use is
//! never zeroed**; `docs/design/ppr.md` has the full argument, and `tests/loom.rs` tries every
//! interleaving.
//!
//! # Who may be a host
//! The guest waits for C, so a host that claims must release, whatever process dies. **Claim,
//! recycle and release in the guest's own process.** In QEMU the agent does this, in one step that
//! waits for no other process. Then a dead host is a dead guest, and a stopped host is a stopped
//! guest. A daemon, which only requests sweeps, may die at any time. [`Claim`] releases when it is
//! dropped, also by a panic. A host in another process is possible ([`Host::recover`]). A guest
//! that meets its claims after its death waits until another host recovers them.
//!
//! # Resets
//! Marks outlive the guest kernel that made them: the pool is memory of a device. A guest that
//! shuts down in order cancels them all. After a reset without a warning to the guest
//! (`system_reset`, a triple fault) the pool must be emptied ([`Host::forget`]) **before** the
//! guest runs again. The host makes QEMU stop at resets (`-no-reboot -no-shutdown`, or `set-action
//! reboot=shutdown,shutdown=pause`), empties the pool and then allows the reset.
//!
//! [`Guest`] serves user-space programs too.

#![cfg_attr(loom, allow(dead_code, unused_imports, reason = "loom builds model the lock-free steps only"))]

mod guest;
mod host;
mod layout;
mod pool;
mod primitive;
mod ram;
mod sweep;
mod words;

#[cfg(test)]
mod tests;

pub use guest::{Cancelled, Guest, Stuck};
pub use host::{BATCH_WORDS, Claim, Host, Recycled};
pub use layout::{Field, GuestState, HostState, Layout, LayoutError, MAGIC, MAX_FRAMES, VERSION, guest_frames};
pub use pool::{Pool, PoolError};
pub use ram::Ram;
pub use sweep::{Ended, SWEEP_PAGES, sweep};
