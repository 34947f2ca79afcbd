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
//! ledger knows when the last mapping of a frame is gone. It does not know of references that
//! outlive mappings: pipes (`vmsplice`), sockets (`MSG_ZEROCOPY`), devices that read. So a dead
//! slot keeps its bytes until its *piece*, 2 MiB, is punched out of the file as a whole. The kernel
//! then frees its pages, except those that someone holds a reference on; these keep their bytes
//! until the reference is dropped. Single pages are never punched: in a huge page the kernel would
//! clear them in place, and which pages are huge is not the daemon's decision alone (`khugepaged`,
//! and `MADV_COLLAPSE` of a client).
//!
//! *Sealed stores.* Where other processes can only be kept from writing by a seal
//! ([`kmem::memfd::StoreFile::can_punch`]), nothing can be punched. A dead slot is then given back
//! with its segment.
//!
//! A segment without frames is closed; the kernel frees its memory when no mapping of it is left.
//! No count of ours has to be right for that.
//!
//! *Placement.* Runs of pages should stay runs of frames, since each run costs the client one
//! mapping. A worker reserves up to 512 consecutive slots, from a place drawn at random (so that an
//! attacker cannot aim at neighbouring frames), and fills them in the order of the pages that ask;
//! what it leaves over, the next one fills. Pieces that were begun come before fresh ones, unless
//! little of them is free.
//!
//! *One store for files, too.* Where files of `pageonefs` are merged in a domain of this name,
//! segments are files of the kernel's store instead of memfds ([`place`]): their frames can be lent
//! to these files. The store notes which slots changed; [`crate::backend::module`] does the rest.
//!
//! *Huge pages.* A piece of 512 slots of which none was used becomes a huge page at one stroke
//! where the kernel has one (`MADV_COLLAPSE`; `/sys/kernel/mm/transparent_hugepage/shmem_enabled`
//! set to `deny` forbids it). It is taken, cleared and mapped as a whole: neither the daemon that
//! writes frames nor the agent that compares with them takes a page fault for each, which was most
//! of what a frame cost.
//!
//! *Filling.* Where there is no huge page, and the contents of the next frames are likely, slots
//! get memory and bytes in one call for all of them (`UFFDIO_COPY`): pages are not cleared first,
//! and the daemon takes no faults. They become frames only when a page with just these bytes needs
//! one.
//!
//! ```text
//!   domain ──▶ compact ──▶ moves          who shares; which frames go to others of the same bytes
//!                │
//!                ▼
//!   cursor ──▶ reserve ──▶ frames ──▶ segment ──▶ place      frames, slots, and where they are
//!     └▶ fill      evacuate ▲  └────▶ free
//! ```

pub(crate) mod compact;
mod cursor;
pub(crate) mod domain;
mod error;
mod evacuate;
mod fill;
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
