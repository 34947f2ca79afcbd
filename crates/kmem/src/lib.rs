//! The kernel's memory interfaces, typed and thin.
//!
//! One module per interface; each names its manual page or kernel document. Nothing here holds
//! policy, starts a thread, or has global state. The wrappers of [`raw`], [`mm`], [`uffd`],
//! [`pagemap`], [`procmem`] and [`cpu`] allocate nothing and keep `errno`. A library that is loaded
//! into a foreign program can therefore use them at any moment.
//!
//! `mmap`, `munmap`, `mremap` and `madvise` are called by number, never through the C library's
//! symbols: a library that defines those symbols itself is not entered again through this crate.
//! All such calls go through [`raw`].

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("kmem supports 64-bit Linux only");

pub mod cgroup;
pub mod cpu;
pub mod ksm;
pub mod kvm;
pub mod memfd;
pub mod mm;
pub mod numa;
pub mod pagemap;
pub mod pidfd;
pub mod procfs;
pub mod procmem;
pub mod psi;
pub mod range;
pub mod raw;
pub mod sched;
pub mod seqpacket;
pub mod uffd;

pub use range::Range;

/// The page size that the whole project works with, in bytes.
///
/// Kernels with another base page size exist (arm64 with 16 or 64 KiB). Compare with [`page_size`]
/// once at the start, and refuse to work there.
pub const PAGE_SIZE: usize = 4096;

/// The page size of the running kernel, in bytes (`sysconf(_SC_PAGESIZE)`).
pub fn page_size() -> usize {
    rustix::param::page_size()
}

#[doc(hidden)]
#[cfg(any(test, feature = "testing"))]
pub mod testing;
