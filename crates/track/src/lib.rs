//! Where dirty frames come from: one trait, and a source for each way in which the kernel reports
//! writes.
//!
//! | source | whose memory | requirements | writes are reported by |
//! |---|---|---|---|
//! | [`PagemapSource`] | any process with registered regions | Linux 6.7 | `PAGEMAP_SCAN` |
//! | [`UffdSource`] | this process | Linux 5.7 | faults, which a thread of this process serves |
//! | [`KvmLogSource`] | a guest | the VM's descriptor | KVM's dirty log |
//! | [`KvmRingSource`] | a guest | descriptors of VM and vCPUs, Linux 5.11 | KVM's dirty rings |
//!
//! The user gives each piece of memory the number of its first frame. [`Source::collect`] adds the
//! frames written since the last call to a [`DirtyTree`], and protects them again, so that further
//! writes are noticed. The order of these steps loses no write: one that comes during the call is
//! reported by this call or by the next. Read a page only after the call that reported it.

mod kvm_log;
mod kvm_ring;
mod pagemap;
mod uffd;

use dirty::DirtyTree;
use kmem::Range;
use rustix::io::Errno;

pub use kvm_log::KvmLogSource;
pub use kvm_ring::KvmRingSource;
pub use pagemap::PagemapSource;
pub use uffd::UffdSource;

/// A source of dirty frames.
pub trait Source {
    /// Adds the frames that were written since the last call to `into`. Returns how many pages were
    /// reported; a page may be reported twice. The first call of a source may report every
    /// populated page.
    ///
    /// # Errors
    ///
    /// [`SourceError`]. The frames collected before the error are in the tree; call again, or treat
    /// all frames as dirty.
    fn collect(&mut self, into: &DirtyTree) -> Result<u64, SourceError>;
}

/// A piece of a process's memory and the frame number of its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Addresses in the process, page aligned.
    pub memory: Range,
    /// Frame number of the first page.
    pub first: u64,
}

/// A memory slot of a VM (with `KVM_MEM_LOG_DIRTY_PAGES`) and the frame number of its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// KVM's number of the slot: address space (upper 16 bits) and slot (lower 16 bits).
    pub slot: u32,
    /// Number of its pages.
    pub pages: u32,
    /// Frame number of the first page.
    pub first: u64,
}

/// Why a source cannot be set up or asked.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// `PAGEMAP_SCAN` failed.
    #[error("PAGEMAP_SCAN: {0}; it needs Linux 6.7 and memory registered with an asynchronous userfaultfd")]
    Scan(Errno),
    /// A call on a VM or vCPU failed.
    #[error("{call}: {errno}")]
    Kvm {
        /// The failed call.
        call: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The kernel's KVM has no dirty rings.
    #[error("this kernel's KVM has no dirty rings (Linux 5.11); use the dirty log")]
    NoRings,
    /// A ring named a slot, or a page of a slot, that the source does not know.
    #[error(
        "a vCPU wrote to page {offset} of memory slot {slot:#x}, which this source does not know, or which is smaller"
    )]
    UnknownPage {
        /// KVM's number of the slot.
        slot: u32,
        /// The page's number in the slot.
        offset: u64,
    },
    /// No userfaultfd could be created.
    #[error(transparent)]
    Create(#[from] kmem::uffd::CreateError),
    /// A call on the userfaultfd failed.
    #[error("{call}: {errno}")]
    Uffd {
        /// The failed call.
        call: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The set of noted frames could not be made.
    #[error(transparent)]
    Set(#[from] dirty::NewError),
}

fn kvm(call: &'static str) -> impl FnOnce(Errno) -> SourceError {
    move |errno| SourceError::Kvm { call, errno }
}

#[cfg(test)]
mod tests;
