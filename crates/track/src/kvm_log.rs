//! Dirty frames from KVM's dirty log.

use std::os::fd::{AsFd, OwnedFd};

use dirty::DirtyTree;
use kmem::kvm as api;

use crate::{Slot, Source, SourceError, kvm};

/// Pages that a guest wrote to, from the log of each memory slot.
///
/// A call reads each slot's whole bitmap, however few pages are dirty. Pages are protected again
/// one slot at a time.
#[derive(Debug)]
pub struct KvmLogSource {
    vm: OwnedFd,
    slots: Vec<Slot>,
    bitmap: Vec<u64>,
    manual: bool,
}

impl KvmLogSource {
    /// A source of these slots of a VM. It takes the VM's descriptor; a duplicate will do.
    ///
    /// # Errors
    ///
    /// [`SourceError::Kvm`]: the descriptor is not a VM's.
    ///
    /// # Safety
    ///
    /// At every call of [`Source::collect`] each slot of the VM has at most as many pages as
    /// [`Slot::pages`] says. The kernel writes one bit for each page that the slot has, whatever
    /// the size of the buffer.
    #[allow(unsafe_code, reason = "the size that the kernel writes depends on `slots`")]
    pub unsafe fn new(vm: OwnedFd, slots: Vec<Slot>) -> Result<Self, SourceError> {
        let manual = api::enable_manual_protect(vm.as_fd()).map_err(kvm("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2"))?;
        let words = slots.iter().map(|slot| slot.pages.div_ceil(64) as usize).max().unwrap_or(0);
        Ok(Self { vm, slots, bitmap: vec![0; words], manual })
    }
}

impl Source for KvmLogSource {
    fn collect(&mut self, into: &DirtyTree) -> Result<u64, SourceError> {
        let mut pages = 0;
        for slot in &self.slots {
            let bitmap = &mut self.bitmap[..slot.pages.div_ceil(64) as usize];
            #[allow(unsafe_code, reason = "the kernel writes to the bitmap")]
            // SAFETY: the kernel writes one bit for each page that the slot has. The bitmap has one
            // for each of `slot.pages`, which by the contract of `new` are at least as many.
            unsafe { api::dirty_log(self.vm.as_fd(), slot.slot, bitmap) }.map_err(kvm("KVM_GET_DIRTY_LOG"))?;
            let dirty: u64 = bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
            if dirty == 0 {
                continue;
            }
            // Reported before it is protected again: if that fails, no write is lost.
            into.merge(slot.first, bitmap);
            pages += dirty;
            if self.manual {
                api::clear_dirty_log(self.vm.as_fd(), slot.slot, slot.pages, bitmap)
                    .map_err(kvm("KVM_CLEAR_DIRTY_LOG"))?;
            }
        }
        Ok(pages)
    }
}
