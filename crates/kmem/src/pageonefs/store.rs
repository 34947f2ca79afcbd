//! Mounts of `pageonefs` for stores: their files behave as memfds do, and their pages can be lent
//! to the files of other mounts of the domain ([`super::Mount::merge`]).
//!
//! Such a mount is attached to no tree, so no path leads to it. It goes when its descriptors and
//! the last of its files are closed.
//!
//! Sources: `fsopen(2)`, `fsconfig(2)`, `fsmount(2)`, and `host/linux/pageonefs/uapi.h`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
};

use super::{Mount, OpenError};

/// Why there is no mount for a store.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreMountError {
    /// The file system or its mount cannot be made.
    #[error("a mount of pageonefs for a store: {step}: {errno}{}", remedy(step, *errno))]
    Make {
        /// The call that failed, with what it was told.
        step: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
    /// The mount cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// What helps, where that is known.
fn remedy(step: &str, errno: Errno) -> &'static str {
    match errno {
        Errno::NODEV => " (load the module pageonefs)",
        Errno::PERM => {
            " (CAP_SYS_ADMIN is needed, and a filter on system calls must let fsopen, fsconfig and fsmount pass)"
        }
        Errno::INVAL if step == STORE => " (the module pageonefs is older than this program: update it)",
        _ => "",
    }
}

const STORE: &str = "its option store";

/// A mount for the files of a store.
#[derive(Debug)]
pub struct StoreMount {
    mount: Mount,
    /// The mount itself: files are made in it.
    tree: OwnedFd,
}

impl StoreMount {
    /// Makes a mount for the files of a store in this domain.
    ///
    /// # Errors
    ///
    /// The module is not loaded, or of another version; this process has no `CAP_SYS_ADMIN`; no
    /// domain can have this name.
    pub fn new(domain: &str) -> Result<Self, StoreMountError> {
        let failed = |step| move |errno| StoreMountError::Make { step, errno };
        let context = fsopen("pageonefs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("fsopen"))?;
        fsconfig_set_string(&context, "domain", domain).map_err(failed("its option domain"))?;
        fsconfig_set_flag(&context, "store").map_err(failed(STORE))?;
        // The files have the length of segments, and are as many as the daemon makes.
        fsconfig_set_string(&context, "size", "0").map_err(failed("its option size"))?;
        fsconfig_set_string(&context, "nr_inodes", "0").map_err(failed("its option nr_inodes"))?;
        fsconfig_create(&context).map_err(failed("making it"))?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOEXEC | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
        let tree = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(failed("fsmount"))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(&tree, ".", flags, Mode::empty()).map_err(failed("opening its root"))?;
        let mount = Mount::of(root, Path::new("a mount for a store"))?;
        Ok(Self { mount, tree })
    }

    /// For the calls on its files.
    pub fn mount(&self) -> &Mount {
        &self.mount
    }

    /// Its root directory, in which files are made.
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }
}
