//! Where dirty frames come from: one trait, and a source for each way in which the kernel tells of
//! writes.
//!
//! | source | whose memory | what it needs | told of writes by |
//! |---|---|---|---|
//! | [`PagemapSource`] | any process with registered regions | Linux 6.7 | `PAGEMAP_SCAN` |
//! | [`UffdSource`] | this process | Linux 5.7 | a fault that a thread of ours serves |
//! | [`KvmLogSource`] | a guest | the VM's descriptor | KVM's dirty log |
//! | [`KvmRingSource`] | a guest | the VM's and the vCPUs' descriptors, Linux 5.11 | KVM's dirty rings |
//!
//! A source numbers frames as the caller says: each piece of memory has a first frame.
//! [`Source::collect`] adds what was written since the last call to a [`DirtyTree`] and has further
//! writes noticed again, in that order of things that loses none: a write that comes while it works
//! is reported by this call or by the next. Read a page only after the call that reported it.

mod kvm_log;
mod kvm_ring;
mod pagemap;
mod uffd;

use dirty::DirtyTree;
use rustix::io::Errno;

pub use kvm_log::KvmLogSource;
pub use kvm_ring::KvmRingSource;
pub use pagemap::PagemapSource;
pub use uffd::UffdSource;

use crate::Range;

/// A source of dirty frames.
pub trait Source {
    /// Adds the frames that were written since the last call, and returns how many reports of pages
    /// there were. The first call of a source may report everything that is populated.
    ///
    /// # Errors
    ///
    /// [`SourceError`]. What was collected by then is in the tree; call again, or take everything
    /// for dirty.
    fn collect(&mut self, into: &DirtyTree) -> Result<u64, SourceError>;
}

/// A piece of memory and the frame number of its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it lies in its process.
    pub memory: Range,
    /// Its first page's frame.
    pub first: u64,
}

/// A memory slot of a VM (with `KVM_MEM_LOG_DIRTY_PAGES`) and the frame number of its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Address space (upper 16 bits) and slot (lower 16 bits).
    pub slot: u32,
    /// Its pages.
    pub pages: u32,
    /// Its first page's frame.
    pub first: u64,
}

/// Why a source can't be set up or asked.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// `PAGEMAP_SCAN` failed.
    #[error("PAGEMAP_SCAN: {0}; it needs Linux 6.7 and memory registered with an asynchronous userfaultfd")]
    Scan(Errno),
    /// A call on a VM or vCPU failed.
    #[error("{call}: {errno}")]
    Kvm {
        /// The call.
        call: &'static str,
        /// The system's reason.
        errno: Errno,
    },
    /// The kernel's KVM can't do this.
    #[error("this kernel's KVM has no dirty rings (Linux 5.11); use the dirty log")]
    NoRings,
    /// A ring named a slot that the source was not told of.
    #[error(
        "a vCPU wrote to page {offset} of memory slot {slot:#x}, which this source was not told of, or which is smaller"
    )]
    UnknownPage {
        /// The slot.
        slot: u32,
        /// The page.
        offset: u64,
    },
    /// No userfaultfd.
    #[error(transparent)]
    Create(#[from] crate::uffd::CreateError),
    /// A call on the userfaultfd failed.
    #[error("{call}: {errno}")]
    Uffd {
        /// The call.
        call: &'static str,
        /// The system's reason.
        errno: Errno,
    },
    /// No set for the frames.
    #[error(transparent)]
    Set(#[from] dirty::NewError),
}

fn kvm(call: &'static str) -> impl FnOnce(Errno) -> SourceError {
    move |errno| SourceError::Kvm { call, errno }
}

#[cfg(test)]
mod guest;
#[cfg(test)]
mod tests;
