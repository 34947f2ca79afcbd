//! The store: where a domain's shared frames live.
//!
//! A store is a growing list of *segments*, memfds of 64 MiB each. The daemon writes a frame
//! through its own mapping; clients get a descriptor for reading ([`kmem::memfd`]) and can map it,
//! privately, and read it.
//!
//! ```text
//! slot:  free ──reserve──▶ reserved ──publish──▶ refs ≥ 1 ──last user──▶ quarantine ──time──▶ dead
//!          ▲                                       │  ▲                                        │
//!          │                        fork of a user │  └ more users (try_ref)                   │
//!          │                                       ▼                                           │
//!          │                                     pinned: goes with its segment                 │
//!          └────────────── the piece is punched, when all its slots are free or dead ◀─────────┘
//! ```
//!
//! *Written once.* A slot that was a frame is not written again while its memory is the same. The
//! ledger knows when the last mapping of a frame is gone, and not whether pipes (`vmsplice`),
//! sockets (`MSG_ZEROCOPY`) or devices still refer to it. So a dead slot keeps its bytes until its
//! *piece*, 2 MiB, is punched out of the file as a whole. The kernel then frees all pages that
//! nobody refers to. Single pages are never punched: in a huge page the kernel would clear them in
//! place, and others decide which pages are huge, too (`khugepaged`, `MADV_COLLAPSE` of a client).
//!
//! *Sealed stores.* Where only a seal keeps other processes from writing
//! ([`kmem::memfd::StoreFile::can_punch`]), nothing can be punched, and a dead slot is given back
//! with its segment. A segment without frames is closed; the kernel frees its memory when no
//! mapping of it is left. No count of ours has to be right for that.
//!
//! *Placement.* Runs of pages should stay runs of frames, since each costs the client one mapping.
//! A worker reserves up to 512 consecutive slots, from a place drawn at random (so that an
//! attacker cannot aim at neighbouring frames), and fills them in the order of the pages that ask.
//! Pieces that were begun come before fresh ones, unless little of them is free.
//!
//! *One store for files, too.* Where files of `pageonefs` are merged in a domain of this name,
//! segments are files of the kernel's store instead of memfds ([`place`]), and their frames can be
//! lent to these files. The store notes which slots changed; [`crate::backend::lend`] does the
//! rest.
//!
//! *Huge pages.* A fresh piece becomes a huge page at one stroke where the kernel has one
//! (`MADV_COLLAPSE`; `deny` in `/sys/kernel/mm/transparent_hugepage/shmem_enabled` forbids it).
//! Neither daemon nor agent then takes a page fault for each frame, which was most of what one
//! cost. Else, where the next contents are likely, slots get memory and bytes in one call for all
//! of them (`UFFDIO_COPY`). They become frames only when a page with just these bytes needs one. In
//! the kernel's store there is neither: clients pay for the slots of their own pages ([`cursor`]).
//!
//! ```text
//!   domain ──▶ compact ──▶ moves          who shares; which frames go to others of the same bytes
//!                │
//!                ▼
//!   cursor ──▶ reserve ──▶ frames ──▶ segment ──▶ place      frames, slots, and where they are
//!                  evacuate ▲  └────▶ free
//! ```

pub(crate) mod compact;
mod cursor;
pub(crate) mod domain;
mod error;
mod evacuate;
mod frames;
mod free;
mod moves;
mod place;
mod reserve;
mod segment;
#[cfg(test)]
mod tests;

pub(crate) use self::cursor::Cursor;
pub(crate) use self::error::GrowError;
pub(crate) use self::frames::Store;
pub(crate) use self::free::Piece;
pub(crate) use self::place::Lending;
pub(crate) use self::segment::Segment;
