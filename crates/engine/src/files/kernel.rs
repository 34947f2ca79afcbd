//! What the kernel does for files: a mount by its path, and the calls as the merge uses them.

use std::path::PathBuf;

use kmem::pageonefs::{Entry, File as Listed, MountInfo, OpenError, Stats};
use rustix::io::Errno;

/// A page that is to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pairing {
    /// Its number in the file.
    pub(super) index: u32,
    /// The frame that it is to use; `None`: one is to be made of it. Afterwards: the one that it
    /// uses.
    pub(super) frame: Option<u64>,
    /// What became of it.
    pub(super) outcome: Result<(), Errno>,
}

impl Pairing {
    pub(super) fn new(index: u32, frame: Option<u64>) -> Self {
        Self { index, frame, outcome: Err(Errno::AGAIN) }
    }
}

/// Calls on the files of a mount. The tests have a model of it.
pub(super) trait Kernel: Send + Sync {
    /// See [`kmem::pageonefs::Mount::harvest`].
    fn harvest(&self, id: u64, start: u64, bits: &mut [u64]) -> Result<u64, Errno>;
    /// See [`kmem::pageonefs::Mount::digest`].
    fn digest(&self, ask: Ask<'_>, out: &mut [u64]) -> Result<(), Errno>;
    /// See [`kmem::pageonefs::Mount::merge`].
    fn merge(&self, id: u64, pairings: &mut [Pairing]) -> Result<(), Errno>;
}

/// Which pages of which file are to be digested.
pub(super) struct Ask<'a> {
    pub(super) id: u64,
    pub(super) start: u64,
    pub(super) only: &'a [u64],
    pub(super) seed: u64,
    /// Frames are digested, too, and not named.
    pub(super) frames: bool,
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

    fn digest(&self, ask: Ask<'_>, out: &mut [u64]) -> Result<(), Errno> {
        let mount = self.open()?;
        let Ask { id, start, only, seed, frames } = ask;
        match frames {
            true => mount.digest_all(id, start, out, Some(only), seed).map(drop),
            false => mount.digest(id, start, out, Some(only), seed).map(drop),
        }
    }

    fn merge(&self, id: u64, pairings: &mut [Pairing]) -> Result<(), Errno> {
        let mut entries: Vec<Entry> =
            pairings.iter().map(|pairing| Entry::new(pairing.index.into(), pairing.frame)).collect();
        let result = self.open()?.merge(id, &mut entries).map(drop);
        for (pairing, entry) in pairings.iter_mut().zip(&entries) {
            pairing.outcome = entry.result();
            pairing.frame = (entry.frame != 0).then_some(entry.frame);
        }
        result
    }
}
