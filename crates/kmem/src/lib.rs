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

/// The descriptor of a type that has it as `fd`.
macro_rules! as_fd {
    ($type:ident) => {
        impl std::os::fd::AsFd for $type {
            fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
                std::os::fd::AsFd::as_fd(&self.fd)
            }
        }
    };
}

pub mod account;
pub mod atomics;
pub mod cgroup;
pub mod cpu;
pub mod keyring;
pub mod ksm;
pub mod kvm;
pub mod memfd;
pub mod mm;
pub mod numa;
pub mod pagemap;
pub mod pageonefs;
pub mod peer;
pub mod pidfd;
pub mod place;
pub mod procfs;
pub mod procmem;
pub mod psi;
pub mod range;
pub mod raw;
pub mod sched;
pub mod seccomp;
pub mod seqpacket;
pub mod uffd;
pub mod words;

pub use range::Range;

/// The page size that the whole project works with, in bytes.
///
/// Kernels with another base page size exist (aarch64 with 16 or 64 KiB). Call [`check_page_size`]
/// once at the start, and refuse to work there.
pub const PAGE_SIZE: usize = 4096;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")))]
compile_error!("64-bit little-endian Linux is needed: x86-64, or aarch64 with pages of 4 KiB");

/// The page size of the running kernel, in bytes (`sysconf(_SC_PAGESIZE)`).
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// The running kernel has pages of another size than [`PAGE_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this kernel has pages of {0} bytes, and only 4096-byte pages are supported: boot a kernel with those")]
pub struct PageSizeError(pub usize);

/// Checks the size of the running kernel's pages, in bytes, as [`page_size`] gives it.
///
/// # Errors
///
/// It is not [`PAGE_SIZE`].
pub fn check_page_size(found: usize) -> Result<(), PageSizeError> {
    if found == PAGE_SIZE { Ok(()) } else { Err(PageSizeError(found)) }
}

#[doc(hidden)]
#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_of_this_size_are_accepted() {
        assert_eq!(check_page_size(page_size()), Ok(()));
        assert_eq!(check_page_size(16_384), Err(PageSizeError(16_384)));
        assert!(PageSizeError(65_536).to_string().contains("pages of 65536 bytes"));
    }
}
