//! A mount of `pageonefs`, and the calls on it.

#![allow(unsafe_code)] // ioctls whose arguments hold addresses.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Getter, Setter, Updater};

use super::{
    Ask, Bits, DIGEST, DIGEST_FRAMES, Entry, File, HARVEST, HARVEST_ALL, Harvest, INFO, LIST, MAKE_PLAIN, MERGE,
    NOTIFY, PUNCH, RawDigest, RawHarvest, RawInfo, RawList, RawMerge, RawNotify, RawPlain, RawPunch, STATS, Stats,
    VERSION,
};

/// Why a mount cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Its root cannot be opened, or asked.
    #[error(
        "opening {path} as a mount of pageonefs: {errno} (ENOTTY: it is another file system; EPERM: CAP_SYS_ADMIN is needed)"
    )]
    Open {
        /// The mount point.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
    /// The module speaks another version.
    #[error(
        "the module pageonefs speaks version {found} of its interface, this program {VERSION}: update the older one"
    )]
    Version {
        /// The module's.
        found: u32,
    },
    /// It works with pages of another size.
    #[error(transparent)]
    PageSize(#[from] crate::PageSizeError),
}

/// A mount, for its daemon.
#[derive(Debug)]
pub struct Mount {
    pub(super) root: OwnedFd,
    domain: String,
    device: u64,
}

impl Mount {
    /// Opens the mount at `path`.
    ///
    /// # Errors
    ///
    /// It is none, this process has no `CAP_SYS_ADMIN`, or the module is of another version.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let failed = |errno| OpenError::Open { path: path.to_owned(), errno };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
        Self::of(root, path)
    }

    /// The mount with this root, which is called `path` in errors.
    pub(super) fn of(root: OwnedFd, path: &Path) -> Result<Self, OpenError> {
        let failed = |errno| OpenError::Open { path: path.to_owned(), errno };
        // SAFETY: `RawInfo` is PAGEONEFS_INFO's argument, which the kernel fills; any bytes are
        // valid.
        let info = unsafe { ioctl::ioctl(&root, Getter::<INFO, RawInfo>::new()) }.map_err(failed)?;
        if info.version != VERSION {
            return Err(OpenError::Version { found: info.version });
        }
        crate::check_page_size(info.page_size as usize)?;
        let domain = info.domain.split(|&byte| byte == 0).next().unwrap_or_default();
        let device = rustix::fs::fstat(&root).map_err(failed)?.st_dev;
        Ok(Self { root, domain: String::from_utf8_lossy(domain).into_owned(), device })
    }

    /// The number of its device, as `stat(2)` has it for its files.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// The mount's domain; empty if it shares with no other mount.
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// Its regular files, also those without a name, in ascending order of their ids.
    ///
    /// # Errors
    ///
    /// `INTR`: a fatal signal.
    pub fn files(&self) -> Result<Vec<File>, Errno> {
        let mut all = Vec::new();
        loop {
            let mut some = [File::default(); 64];
            let mut list = RawList {
                after: all.last().map_or(0, |file: &File| file.id),
                files: some.as_mut_ptr().expose_provenance() as u64,
                room: some.len() as u32,
                filled: 0,
            };
            // SAFETY: `files` is the address of `room` structures that outlive the call.
            unsafe { ioctl::ioctl(&self.root, Updater::<LIST, _>::new(&mut list)) }?;
            all.extend_from_slice(&some[..list.filled as usize]);
            if (list.filled as usize) < some.len() {
                return Ok(all);
            }
        }
    }

    /// Takes and clears the dirty bits of the pages from `start` on, 64 for each word of `bits`.
    /// A page without one holds what it held at the harvest before.
    ///
    /// # Errors
    ///
    /// `SRCH`: no such file. `INVAL`: `start` is no multiple of 64. After any other error bits
    /// may be lost: all pages count as dirty.
    pub fn harvest(&self, id: u64, start: u64, of: Bits, bits: &mut [u64]) -> Result<Harvest, Errno> {
        let mut harvest = RawHarvest {
            id,
            start,
            pages: bits.len() as u64 * 64,
            bits: bits.as_mut_ptr().expose_provenance() as u64,
            dirty: 0,
            next: 0,
            flags: if of == Bits::All { HARVEST_ALL } else { 0 },
            reserved: 0,
        };
        // SAFETY: `bits` is the address of `pages / 64` words that outlive the call.
        unsafe { ioctl::ioctl(&self.root, Updater::<HARVEST, _>::new(&mut harvest)) }?;
        Ok(Harvest { dirty: harvest.dirty, next: harvest.next })
    }

    /// Says for each page from `ask.start` on what it is, as [`Page::from_word`] reads it. Returns
    /// how many were digested.
    ///
    /// # Errors
    ///
    /// `SRCH`: no such file. `INVAL`: with `only`, `start` or the length of `out` is no multiple of
    /// 64, or `only` is too short. `NOMEM`.
    pub fn digest(&self, ask: &Ask<'_>, out: &mut [u64]) -> Result<u64, Errno> {
        let Ask { id, start, only, seed, frames } = *ask;
        if only.is_some_and(|only| only.len() * 64 < out.len()) {
            return Err(Errno::INVAL);
        }
        let mut digest = RawDigest {
            id,
            start,
            pages: out.len() as u64,
            out: out.as_mut_ptr().expose_provenance() as u64,
            only: only.map_or(0, |only| only.as_ptr().expose_provenance() as u64),
            seed,
            digested: 0,
            flags: if frames { DIGEST_FRAMES } else { 0 },
            reserved: 0,
        };
        // SAFETY: `out` is the address of `pages` words, `only` is 0 or that of `pages / 64`
        // words, and both outlive the call.
        unsafe { ioctl::ioctl(&self.root, Updater::<DIGEST, _>::new(&mut digest)) }?;
        Ok(digest.digested)
    }

    /// Merges pages with frames, or makes frames of them, after a full compare. Each entry says
    /// what became of it. Returns how many were merged.
    ///
    /// # Errors
    ///
    /// `SRCH`: no such file. `INTR`: a signal, before the last entry. `NOMEM`. Entries that the
    /// call did not come to say `AGAIN`.
    pub fn merge(&self, id: u64, entries: &mut [Entry]) -> Result<u32, Errno> {
        let count = u32::try_from(entries.len()).map_err(|_| Errno::INVAL)?;
        let mut merge = RawMerge { id, entries: entries.as_mut_ptr().expose_provenance() as u64, count, merged: 0 };
        // SAFETY: `entries` is the address of `count` structures that outlive the call.
        unsafe { ioctl::ioctl(&self.root, Updater::<MERGE, _>::new(&mut merge)) }?;
        Ok(merge.merged)
    }

    /// Makes all pages of a file private, for good. Mappings made afterwards can be pinned for
    /// long.
    ///
    /// # Errors
    ///
    /// `SRCH`: no such file. `NOMEM`, `NOSPC`: some pages are still merged; nothing more will be.
    /// `INTR`: so are some, and another call goes on.
    pub fn make_plain(&self, id: u64) -> Result<(), Errno> {
        // SAFETY: `RawPlain` is PAGEONEFS_MAKE_PLAIN's argument, which the kernel only reads.
        unsafe { ioctl::ioctl(&self.root, Setter::<MAKE_PLAIN, _>::new(RawPlain { id })) }
    }

    /// Makes `pages` from `start` on holes, but for those that somebody has pinned: a device would
    /// go on with a page that the file has no more. `held` gets a bit for each of these, 64 pages
    /// a word. Returns how many stayed: those, too, of which a lock could not be had in some
    /// milliseconds.
    ///
    /// # Errors
    ///
    /// `SRCH`: no such file. `BUSY`: it is plain. `INTR`: a fatal signal. `INVAL`: beyond what a
    /// file can have, or `held` is too short. After an error some may be holes.
    pub fn punch(&self, id: u64, start: u64, pages: u64, held: &mut [u64]) -> Result<u64, Errno> {
        if (held.len() as u64) < pages.div_ceil(64) {
            return Err(Errno::INVAL);
        }
        let mut punch = RawPunch { id, start, pages, held: held.as_mut_ptr().expose_provenance() as u64, stayed: 0 };
        // SAFETY: `held` is the address of `pages / 64` words, rounded up, that outlive the call.
        unsafe { ioctl::ioctl(&self.root, Updater::<PUNCH, _>::new(&mut punch)) }?;
        Ok(punch.stayed)
    }

    /// From now on this `eventfd(2)` is written to when a file comes, goes, gets another length or
    /// becomes plain, and when the mount goes. A mount has one: the next call's takes its place.
    /// `None`: nobody is told. It holds neither the mount nor the descriptor.
    ///
    /// # Errors
    ///
    /// `INVAL`: it is no eventfd.
    pub fn notify(&self, eventfd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let eventfd = eventfd.map_or(-1, |fd| fd.as_raw_fd());
        // SAFETY: `RawNotify` is PAGEONEFS_NOTIFY's argument, which the kernel only reads.
        unsafe { ioctl::ioctl(&self.root, Setter::<NOTIFY, _>::new(RawNotify { eventfd, reserved: 0 })) }
    }

    /// The counts.
    ///
    /// # Errors
    ///
    /// None is known.
    pub fn stats(&self) -> Result<Stats, Errno> {
        // SAFETY: `Stats` is PAGEONEFS_STATS's argument, which the kernel fills; any bytes are
        // valid.
        unsafe { ioctl::ioctl(&self.root, Getter::<STATS, Stats>::new()) }
    }
}
