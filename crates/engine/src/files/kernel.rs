//! What the kernel does for files: a mount by its path, and the calls as the merge uses them.

use std::path::PathBuf;

use kmem::pageonefs::{Ask, Entry, File as Listed, MountInfo, OpenError, Stats};
use rustix::io::Errno;

/// Calls on the files of a mount, as [`kmem::pageonefs::Mount`] has them. The tests have a model.
pub(super) trait Kernel: Send + Sync {
    fn harvest(&self, id: u64, start: u64, bits: &mut [u64]) -> Result<u64, Errno>;
    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno>;
    fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno>;
}

/// A mount, by its path.
pub(crate) struct MountPoint {
    path: PathBuf,
    pub(super) device: u64,
    domain: String,
}

impl MountPoint {
    /// # Errors
    /// The mount cannot be managed.
    pub(super) fn new(info: MountInfo) -> Result<Self, OpenError> {
        let mount = kmem::pageonefs::Mount::open(&info.path)?;
        Ok(Self { domain: mount.domain().into(), path: info.path, device: info.device })
    }

    /// Its domain; empty if it shares with no other mount.
    pub(super) fn domain(&self) -> &str {
        &self.domain
    }

    /// Where it is mounted.
    pub(super) fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// How it is called.
    pub(crate) fn name(&self) -> String {
        if self.domain.is_empty() { self.path.display().to_string() } else { self.domain.clone() }
    }

    /// Opens its root for one call.
    fn open(&self) -> Result<kmem::pageonefs::Mount, Errno> {
        match kmem::pageonefs::Mount::open(&self.path) {
            // Another file system may have been mounted there since.
            Ok(mount) if mount.device() == self.device => Ok(mount),
            Ok(_) => Err(Errno::NODEV),
            Err(OpenError::Open { errno, .. }) => Err(errno),
            Err(_) => Err(Errno::NODEV),
        }
    }

    pub(super) fn files(&self) -> Result<Vec<Listed>, Errno> {
        self.open()?.files()
    }

    pub(super) fn stats(&self) -> Result<Stats, Errno> {
        self.open()?.stats()
    }
}

impl Kernel for MountPoint {
    fn harvest(&self, id: u64, start: u64, bits: &mut [u64]) -> Result<u64, Errno> {
        self.open()?.harvest(id, start, bits)
    }

    fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        self.open()?.digest(ask, out)
    }

    fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno> {
        self.open()?.merge(id, entries)
    }
}
