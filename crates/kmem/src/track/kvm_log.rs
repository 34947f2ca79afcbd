//! Dirty frames from KVM's dirty log.

use std::os::fd::{AsFd, OwnedFd};

use dirty::DirtyTree;

use super::{Slot, Source, SourceError, kvm};
use crate::kvm as api;

/// Pages that a guest wrote to, from the log of each memory slot. Reading costs a walk over the
/// slot's bitmap, however few pages are dirty; pages are protected again a slot at a time.
#[derive(Debug)]
pub struct KvmLogSource {
    vm: OwnedFd,
    slots: Vec<Slot>,
    bitmap: Vec<u64>,
    manual: bool,
}

impl KvmLogSource {
    /// A source of these slots of a VM, whose descriptor it takes (a duplicate will do).
    ///
    /// # Errors
    ///
    /// [`SourceError::Kvm`]: not a VM.
    ///
    /// # Safety
    ///
    /// The slots must have as many pages as is said, or fewer, as long as the source is asked: the
    /// kernel writes a bit for each page that a slot has.
    #[allow(unsafe_code, reason = "what the kernel writes depends on what the caller says")]
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
            #[allow(unsafe_code, reason = "see `new`")]
            // SAFETY: a bit for each page that the slot has, as `new`'s caller promised.
            unsafe { api::dirty_log(self.vm.as_fd(), slot.slot, bitmap) }.map_err(kvm("KVM_GET_DIRTY_LOG"))?;
            let dirty: u64 = bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
            if dirty == 0 {
                continue;
            }
            // Reported before it is protected: if that fails, nothing is lost.
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
