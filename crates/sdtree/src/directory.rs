//! The directory: the static upper tree. It has a slot for each value of the first bits of a key's
//! head. A slot holds the link to the dynamic tree of the keys whose heads begin with these bits.

use std::ptr;
use std::sync::Arc;

use crate::memory::Zeroed;
use crate::pool::Pool;
use crate::primitive::{AtomicPtr, AtomicU64};
use crate::word::{FINGERPRINT_END, FINGERPRINT_START};

/// The least number of bits of a directory. All bits from here to [`MAX_BITS`] are in fingerprints.
pub(crate) const MIN_BITS: u32 = FINGERPRINT_START;
pub(crate) const MAX_BITS: u32 = if cfg!(loom) { 3 } else { FINGERPRINT_END };

/// The slots, and the state of moving to another directory (module `resize`).
pub(crate) struct Directory {
    /// log₂ of the number of slots.
    pub(crate) bits: u32,
    pub(crate) slots: Zeroed<AtomicU64>,
    /// The nodes that branch within the fingerprint, below this directory.
    pub(crate) pool: Arc<Pool>,
    /// The directory that takes this one's place; set once.
    pub(crate) next: AtomicPtr<Directory>,
    /// Units of `next` that were assigned to operations to be moved; counts on beyond the last one.
    pub(crate) asked: AtomicU64,
    /// Units that were moved to this directory.
    pub(crate) moved: AtomicU64,
    /// The epoch in which this directory was left, or its sweep ended.
    pub(crate) left_at: AtomicU64,
    /// Slots that were assigned to operations to be swept after that, and slots that were swept.
    pub(crate) sweeping: AtomicU64,
    pub(crate) swept: AtomicU64,
    /// The next directory in the list of those to be dropped.
    pub(crate) doomed: AtomicPtr<Directory>,
}

impl Directory {
    pub(crate) fn new(bits: u32, pool: Arc<Pool>) -> Self {
        debug_assert!((MIN_BITS..=MAX_BITS).contains(&bits));
        Self {
            bits,
            slots: Zeroed::new(1 << bits),
            pool,
            next: AtomicPtr::new(ptr::null_mut()),
            asked: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            left_at: AtomicU64::new(0),
            sweeping: AtomicU64::new(0),
            swept: AtomicU64::new(0),
            doomed: AtomicPtr::new(ptr::null_mut()),
        }
    }

    #[inline]
    pub(crate) fn slot(&self, head: u64) -> &AtomicU64 {
        &self.slots[(head >> (64 - self.bits)) as usize]
    }

    /// The number of units in which the tree moves to `next`. A unit is one slot of the smaller
    /// directory, and the slots of the larger one for the same keys.
    pub(crate) fn units(&self, next: &Directory) -> u64 {
        1 << self.bits.min(next.bits)
    }

    pub(crate) fn unit(&self, next: &Directory, head: u64) -> usize {
        (head >> (64 - self.bits.min(next.bits))) as usize
    }

    /// The slots of a unit; `unit_bits` is log₂ of the number of units.
    pub(crate) fn slots_of(&self, unit_bits: u32, unit: usize) -> &[AtomicU64] {
        let shift = self.bits - unit_bits;
        &self.slots[unit << shift..(unit + 1) << shift]
    }

    pub(crate) fn bytes(&self) -> u64 {
        (size_of::<Self>() + size_of_val(&*self.slots)) as u64
    }
}
