//! Merge windows: changing the mappings under a running program.
//!
//! What is changed inside a window ([`crate::runtime::state::uffds`]) keeps its bytes, so no thread
//! can tell. The lock is held throughout. The span leaves tracking before anything in it is
//! unmapped: the event of that would wait for the lock.
//!
//! ```text
//! merge ─▶ select (what can share a window) ─▶ look ─▶ compare ─▶ map
//!   │                                                              │
//!   └─▶ pins (what cannot be merged at all)                        ▼
//! unmerge, restore (memory becomes plain again) ──▶ anonymous, filler
//!   │                                                              │
//!   └──────────▶ gate (what may be taken away) ◀───────────────────┘
//! ```

pub(crate) mod anonymous;
pub(crate) mod compare;
pub(crate) mod filler;
pub(crate) mod gate;
pub(crate) mod look;
pub(crate) mod map;
pub(crate) mod merge;
pub(crate) mod pins;
pub(crate) mod report;
pub(crate) mod restore;
pub(crate) mod runs;
pub(crate) mod safe_read;
pub(crate) mod select;
pub(crate) mod unmerge;

use std::time::Duration;

use kmem::PAGE_SIZE;

/// A page of zeros to compare with.
static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Most pages in one window.
pub(crate) const MAX_PAGES: u32 = wire::MAX_WINDOW_PAGES;

/// How long a window may take, in real time: writers to its pages wait for so long.
pub(crate) const MAX_TIME: Duration = Duration::from_millis(1);
