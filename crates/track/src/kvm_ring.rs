//! Dirty frames from KVM's dirty rings.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use dirty::DirtyTree;
use kmem::kvm::{self as api, DirtyRing};

use crate::{Slot, Source, SourceError, kvm};

/// Pages that a guest wrote to, from a ring for each vCPU. The cost of a call depends on the number
/// of writes, not on the size of the guest.
///
/// A vCPU whose ring is full leaves the guest with
/// [`EXIT_DIRTY_RING_FULL`](api::EXIT_DIRTY_RING_FULL); the thread that runs it calls
/// [`Source::collect`] and resumes it. A processor may note pages for some time before it writes
/// them to the ring (page modification logging). For a last, complete report every vCPU must have
/// left the guest.
#[derive(Debug)]
pub struct KvmRingSource {
    vm: OwnedFd,
    slots: Vec<Slot>,
    entries: u32,
    rings: Vec<DirtyRing>,
}

impl KvmRingSource {
    /// A source of these slots of a VM, with rings of `entries` entries. It takes the VM's
    /// descriptor; a duplicate will do. The VM must not have vCPUs yet.
    ///
    /// # Errors
    ///
    /// [`SourceError::NoRings`]: the kernel has none; [`SourceError::Kvm`]: the errors of
    /// [`api::enable_dirty_rings`].
    pub fn new(vm: OwnedFd, entries: u32, slots: Vec<Slot>) -> Result<Self, SourceError> {
        match api::enable_dirty_rings(vm.as_fd(), entries) {
            Ok(true) => Ok(Self { vm, slots, entries, rings: Vec::new() }),
            Ok(false) => Err(SourceError::NoRings),
            Err(errno) => Err(kvm("KVM_CAP_DIRTY_LOG_RING")(errno)),
        }
    }

    /// Adds a vCPU.
    ///
    /// # Errors
    ///
    /// [`SourceError::Kvm`]: its ring cannot be mapped.
    pub fn add_vcpu(&mut self, vcpu: BorrowedFd<'_>) -> Result<(), SourceError> {
        self.rings.push(DirtyRing::map(vcpu, self.entries).map_err(kvm("mapping a vCPU's dirty ring"))?);
        Ok(())
    }
}

impl Source for KvmRingSource {
    fn collect(&mut self, into: &DirtyTree) -> Result<u64, SourceError> {
        let (mut pages, mut unknown) = (0, None);
        for ring in &mut self.rings {
            while let Some(page) = ring.take() {
                pages += 1;
                match self.slots.iter().find(|slot| slot.slot == page.slot && page.offset < u64::from(slot.pages)) {
                    Some(slot) => drop(into.insert(slot.first + page.offset)),
                    None => unknown = Some(SourceError::UnknownPage { slot: page.slot, offset: page.offset }),
                }
            }
        }
        if pages > 0 {
            api::reset_dirty_rings(self.vm.as_fd()).map_err(kvm("KVM_RESET_DIRTY_RINGS"))?;
        }
        unknown.map_or(Ok(pages), Err)
    }
}
