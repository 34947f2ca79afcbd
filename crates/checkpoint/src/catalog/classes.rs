//! Which media class an object of a checkpoint is written to.
//!
//! A pool may have a staging class: a directory on a fast device. It holds what is read again soon:
//! the index, maps, what is kept beside checkpoints (records of snapshots, working sets), and the
//! pages that were written last. [`Catalog::repack`](super::Catalog::repack) moves the pages of
//! earlier checkpoints to the capacity class. Without a staging class, or when it is full, all lie
//! in the capacity class.
//!
//! The catalogue itself lies in the capacity class, as the pool's metadata do: each commit is
//! synced there anyway, and what a pool without its staging device has lost can still be named.

use mpool::{Allocation, Fallback, MblockWriter, MediaClass, ObjectError, Pool};

/// What an object holds, as far as its place depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    /// The index, a map, or what is kept beside a checkpoint; or pages that are new.
    Soon,
    /// Pages that were moved out of other data mblocks, as they are or compressed.
    Moved,
}

/// Allocates an mblock of at most `capacity` bytes.
///
/// # Errors
/// If the pool is full or cannot be written.
pub(super) fn allocate(pool: &Pool, holds: Holds, capacity: u64) -> Result<MblockWriter, ObjectError> {
    let class = match holds {
        Holds::Soon => MediaClass::Staging,
        Holds::Moved => MediaClass::Capacity,
    };
    pool.mblock_alloc(Allocation { class, capacity, fallback: Fallback::Capacity })
}

/// Whether an mblock lies in the staging class.
pub(super) fn is_staged(pool: &Pool, mblock: u64) -> bool {
    pool.mblock(mblock).is_ok_and(|mblock| mblock.props().class == MediaClass::Staging)
}
