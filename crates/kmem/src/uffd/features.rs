//! The features of a userfaultfd, and why one cannot be had.

use linux_raw_sys::general as sys;
use rustix::io::Errno;

bitflags::bitflags! {
    /// `UFFD_FEATURE_*`.
    #[derive(Copy, Clone, PartialEq, Eq, Debug, Hash)]
    pub struct Features: u64 {
        /// Write-protect faults on anonymous memory (`UFFD_FEATURE_PAGEFAULT_FLAG_WP`, Linux 5.7).
        const WP = sys::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// [`Event::Fork`] (Linux 4.11); needs CAP_SYS_PTRACE.
        const EVENT_FORK = sys::UFFD_FEATURE_EVENT_FORK as u64;
        /// [`Event::Remap`] (Linux 4.11).
        const EVENT_REMAP = sys::UFFD_FEATURE_EVENT_REMAP as u64;
        /// [`Event::Remove`] (Linux 4.11).
        const EVENT_REMOVE = sys::UFFD_FEATURE_EVENT_REMOVE as u64;
        /// [`Event::Unmap`] (Linux 4.11).
        const EVENT_UNMAP = sys::UFFD_FEATURE_EVENT_UNMAP as u64;
        /// A fault raises SIGBUS instead of an event (Linux 4.14).
        const SIGBUS = sys::UFFD_FEATURE_SIGBUS as u64;
        /// Fault messages carry the thread (Linux 4.14).
        const THREAD_ID = sys::UFFD_FEATURE_THREAD_ID as u64;
        /// Minor faults on shared memory (Linux 5.14).
        const MINOR_SHMEM = sys::UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Fault addresses are not rounded down to the page (Linux 5.18).
        const EXACT_ADDRESS = sys::UFFD_FEATURE_EXACT_ADDRESS as u64;
        /// Write-protection of shared and huge-page memory (Linux 5.19).
        const WP_HUGETLBFS_SHMEM = sys::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        /// Pages that are not populated yet can be write-protected too (Linux 6.4).
        const WP_UNPOPULATED = sys::UFFD_FEATURE_WP_UNPOPULATED as u64;
        /// `UFFDIO_POISON` (Linux 6.6).
        const POISON = sys::UFFD_FEATURE_POISON as u64;
        /// The kernel lifts write-protection itself and remembers the write (Linux 6.7).
        const WP_ASYNC = sys::UFFD_FEATURE_WP_ASYNC as u64;
        /// `UFFDIO_MOVE` (Linux 6.8).
        const MOVE = sys::UFFD_FEATURE_MOVE as u64;
    }
}

impl Features {
    /// The first kernel that has all of these features.
    pub fn since(self) -> &'static str {
        const SINCE: [(Features, &str); 9] = [
            (Features::MOVE, "Linux 6.8"),
            (Features::WP_ASYNC, "Linux 6.7"),
            (Features::POISON, "Linux 6.6"),
            (Features::WP_UNPOPULATED, "Linux 6.4"),
            (Features::WP_HUGETLBFS_SHMEM, "Linux 5.19"),
            (Features::EXACT_ADDRESS, "Linux 5.18"),
            (Features::MINOR_SHMEM, "Linux 5.14"),
            (Features::WP, "Linux 5.7"),
            (Features::SIGBUS.union(Features::THREAD_ID), "Linux 4.14"),
        ];
        SINCE.iter().find(|(feature, _)| self.intersects(*feature)).map_or("Linux 4.11", |(_, since)| since)
    }
}

/// Why a userfaultfd cannot be created.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// Neither the system call nor `/dev/userfaultfd` is allowed; why the device is not.
    #[error(
        "not permitted to create a userfaultfd: run as root or with CAP_SYS_PTRACE, set \
         `sysctl vm.unprivileged_userfaultfd=1`, or give access to /dev/userfaultfd"
    )]
    NoPermission(Errno),
    /// A userfaultfd is allowed, but not the fork event.
    #[error(
        "not permitted to receive fork events on a userfaultfd: run as root or with CAP_SYS_PTRACE, or do without EVENT_FORK"
    )]
    NoForkEvents,
    /// The kernel is too old for some of the features, or was built without them.
    #[error(
        "this kernel's userfaultfd lacks {missing:?}: it needs {} or newer on an architecture that has it",
        missing.since()
    )]
    MissingFeatures {
        /// Features that were requested and that the kernel lacks.
        missing: Features,
    },
    /// `ENOSYS`: the kernel was built without userfaultfd, or a seccomp filter hides it.
    #[error("this kernel has no userfaultfd: it needs CONFIG_USERFAULTFD=y (or a seccomp filter hides it)")]
    NotCompiledIn,
    /// Another error, such as no free descriptor.
    #[error("userfaultfd: {0}")]
    Os(#[from] Errno),
}
