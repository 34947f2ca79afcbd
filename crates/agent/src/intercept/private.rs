//! The file that a prepared guest's QEMU maps for its RAM: private memory is mapped in its place.
//!
//! QEMU leaves RAM out of its device stream if it is a file's, mapped shared; such memory cannot be
//! merged. `pageone run --snapshots` names a file that nobody else has by device and inode in the
//! environment. Its first mapping is made of private, anonymous memory; QEMU sees no difference.

#![allow(unsafe_code)] // Borrows a descriptor by its number.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Device and inode of the file. Inode 0: there is none. Set once, before the program runs.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);

pub(super) fn at_load() {
    let named = std::env::var(wire::ENV_SNAPSHOT_RAM).ok();
    let identity = named.as_deref().and_then(|text| text.split_once(':'));
    if let Some((device, inode)) = identity
        && let (Ok(device), Ok(inode)) = (device.parse(), inode.parse())
    {
        DEVICE.store(device, Ordering::Relaxed);
        INODE.store(inode, Ordering::Relaxed);
    }
}

/// Flags and descriptor for a call of mmap(2), and whether they are others. No lock, no allocation.
pub(super) fn mapping(flags: i32, fd: i32) -> (i32, i32, bool) {
    let inode = INODE.load(Ordering::Relaxed);
    if inode == 0 || fd < 0 || flags & libc::MAP_SHARED == 0 || flags & libc::MAP_ANONYMOUS != 0 {
        return (flags, fd, false);
    }
    // SAFETY: the caller of mmap(2) passes this descriptor, which is open during the call. If it is
    // not, fstat(2) fails, and mmap(2) will say so.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    match rustix::fs::fstat(file) {
        Ok(stat) if stat.st_ino == inode && stat.st_dev == DEVICE.load(Ordering::Relaxed) => {
            // MAP_SHARED_VALIDATE has the bits of both.
            let private = flags & !(libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC);
            (private | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, true)
        }
        _ => (flags, fd, false),
    }
}
