//! Stores of `pageonefs`: their files behave as memfds do, and their pages can be lent to the files
//! of the mounts of a domain ([`super::Mount::merge`]).
//!
//! A store is a file system that is attached to no tree, so no path leads to it. It goes when its
//! descriptor and the last of its files are closed.
//!
//! Source: `host/linux/pageonefs/uapi.h`.

#![allow(unsafe_code)] // An ioctl that returns a descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::ioctl::{self, Setter};

use super::{Mount, OpenError, RawSlot, SLOT};

/// `PAGEONEFS_STORE`: `_IO('1', 10)`.
const STORE: libc::c_ulong = 0x310a;

/// Why there is no store.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It cannot be made.
    #[error("making a store of pageonefs: {0} (EINVAL: the mount has no domain=)")]
    Make(Errno),
    /// It cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Who pays for a page of a store: a memory cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payer {
    /// That of the process with this number.
    Process(i32),
    /// Who pays for this page.
    Page {
        /// A file of the same store.
        id: u64,
        /// The page's number in it.
        index: u64,
    },
}

/// A store of a domain.
#[derive(Debug)]
pub struct Store(Mount);

impl Store {
    /// Makes a store of the domain that this mount has.
    ///
    /// # Errors
    ///
    /// The mount has no domain; the kernel has no memory, or this process no descriptors left.
    pub fn new(mount: &Mount) -> Result<Self, StoreError> {
        // SAFETY: this request takes no argument.
        let fd = unsafe { libc::ioctl(mount.root.as_raw_fd(), STORE) };
        if fd < 0 {
            let errno = Errno::from_io_error(&std::io::Error::last_os_error());
            return Err(StoreError::Make(errno.unwrap_or(Errno::INVAL)));
        }
        // SAFETY: the kernel has just made this descriptor for this process; nobody else has it.
        let root = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self(Mount::of(root, Path::new("a store"))?))
    }

    /// For the calls on its files.
    pub fn mount(&self) -> &Mount {
        &self.0
    }

    /// Makes page `index` of a file, unless it is there. `payer` pays for it from then on, whoever
    /// uses it.
    ///
    /// # Errors
    ///
    /// `NOMEM`: the payer's cgroup has no room; nobody is killed for it. `SRCH`: no such file,
    /// process or page in memory. `INVAL`: beyond the file's end.
    pub fn make(&self, id: u64, index: u64, payer: Payer) -> Result<(), Errno> {
        let (pid, like_id, like) = match payer {
            Payer::Process(pid) => (pid, 0, 0),
            Payer::Page { id, index } => (0, id, index),
        };
        let slot = RawSlot { id, index, like_id, like, pid, reserved: 0 };
        // SAFETY: `RawSlot` is PAGEONEFS_SLOT's argument, which the kernel only reads.
        unsafe { ioctl::ioctl(&self.0.root, Setter::<SLOT, _>::new(slot)) }
    }

    /// Its root directory, in which files are made.
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.0.root.as_fd()
    }
}
