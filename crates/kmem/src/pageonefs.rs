//! The control interface of `pageonefs`, the memory file system of `host/linux/pageonefs`: ioctls
//! on a mount's root, for `CAP_SYS_ADMIN`.
//!
//! A file is named by its id, also when it has no name any more; a page by its number in the
//! file; a frame by its handle. The structures are those of `host/linux/pageonefs/uapi.h`, which
//! says what each field means.
//!
//! Source: `host/linux/pageonefs/uapi.h`, and `docs/design/module.md`.

#![allow(unsafe_code)] // ioctls whose arguments hold addresses.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{self, Getter, Opcode, Setter, Updater, opcode};

mod mounts;
#[cfg(test)]
mod tests;

pub use mounts::{MountInfo, is_loaded, mounts, mounts_in};

/// The version of the interface that this module speaks.
pub const VERSION: u32 = 5;

const DOMAIN_MAX: usize = 64;

#[repr(C)]
struct RawInfo {
    version: u32,
    page_size: u32,
    digest: u64,
    domain: [u8; DOMAIN_MAX],
}

/// A file of a mount (`struct pageonefs_file`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct File {
    /// Unique while the module is loaded.
    pub id: u64,
    /// Its inode number, as `stat(2)` has it.
    pub inode: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Pages in memory that belong to it alone.
    pub private_pages: u64,
    /// Pages that use a frame.
    pub merged_pages: u64,
    plain: u32,
    reserved: u32,
}

/// Why nothing of a file is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// [`Mount::make_plain`] was called.
    Asked,
    /// Its pages are pinned for long: VFIO, vDPA, registered buffers.
    Pinned,
    /// A reason that this build does not know.
    Other(u32),
}

impl File {
    /// Why nothing of the file is merged; `None` if it may be.
    pub fn plain(&self) -> Option<Plain> {
        match self.plain {
            0 => None,
            1 => Some(Plain::Asked),
            2 => Some(Plain::Pinned),
            other => Some(Plain::Other(other)),
        }
    }
}

#[repr(C)]
struct RawList {
    after: u64,
    files: u64,
    room: u32,
    filled: u32,
}

#[repr(C)]
struct RawHarvest {
    id: u64,
    start: u64,
    pages: u64,
    bits: u64,
    dirty: u64,
}

#[repr(C)]
struct RawDigest {
    id: u64,
    start: u64,
    pages: u64,
    out: u64,
    only: u64,
    seed: u64,
    digested: u64,
    flags: u32,
    reserved: u32,
}

/// PAGEONEFS_DIGEST_FRAMES.
const DIGEST_FRAMES: u32 = 1;

/// Which pages of which file are to be digested.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ask<'a> {
    /// The file.
    pub id: u64,
    /// The first page.
    pub start: u64,
    /// 64 pages for each word: pages without a bit are not looked at. `None`: all are.
    pub only: Option<&'a [u64]>,
    /// The digests' seed.
    pub seed: u64,
    /// Pages that use a frame are digested, too, and not named by it.
    pub frames: bool,
}

/// "Page `index` holds what frame `frame` holds" (`struct pageonefs_entry`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The page's number in the file. A batch is in ascending order.
    pub index: u64,
    /// The frame's handle; 0: a frame is to be made of this page. After the call: its handle.
    pub frame: u64,
    result: i32,
    reserved: u32,
}

impl Entry {
    /// An entry of a batch. `frame`: `None` makes a frame of the page.
    pub fn new(index: u64, frame: Option<u64>) -> Self {
        // A call that ends early leaves it so.
        let result = -Errno::AGAIN.raw_os_error();
        Self { index, frame: frame.unwrap_or(0), result, reserved: 0 }
    }

    /// The same with an outcome: for what stands in for the kernel in tests.
    pub fn with(self, outcome: Result<u64, Errno>) -> Self {
        match outcome {
            Ok(frame) => Self { frame, result: 0, ..self },
            Err(errno) => Self { result: -errno.raw_os_error(), ..self },
        }
    }

    /// What became of it.
    ///
    /// # Errors
    ///
    /// `EXIST`: it uses a frame already. `AGAIN`, `BUSY`: later; the first also where the call
    /// ended before it came to this entry. `STALE`: other content. `NOENT`: the frame has gone.
    /// `MLINK`: the frame has as many users as it may have. `HWPOISON`, `INVAL`, `NOMEM`.
    pub fn result(&self) -> Result<(), Errno> {
        if self.result == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(-self.result)) }
    }
}

#[repr(C)]
struct RawMerge {
    id: u64,
    entries: u64,
    count: u32,
    merged: u32,
}

#[repr(C)]
struct RawPlain {
    id: u64,
}

#[repr(C)]
struct RawNotify {
    eventfd: i32,
    reserved: u32,
}

#[repr(C)]
struct RawPunch {
    id: u64,
    start: u64,
    pages: u64,
    held: u64,
    stayed: u64,
}

/// Counts since the module was loaded; the first two are of now (`struct pageonefs_stats`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Frames of the mount's domain.
    pub frames: u64,
    /// Pages of the mount that use a frame.
    pub merged_pages: u64,
    /// Pages merged.
    pub merges: u64,
    /// Pages that went from a frame to an equal one.
    pub moves: u64,
    /// Merged pages that became private.
    pub copies: u64,
    /// Merges refused because someone held the page.
    pub busy: u64,
    /// Merges refused because the content was another.
    pub differ: u64,
    /// Private pages made for a page that had been merged meanwhile.
    pub late: u64,
    /// Faults that mapped a frame.
    pub frame_faults: u64,
    /// Merged pages mapped beside one that was read.
    pub around: u64,
    /// Faults that mapped a private page.
    pub private_faults: u64,
    /// Dirty bits set by a write through a mapping.
    pub first_writes: u64,
    /// Times that LRU batches were emptied.
    pub drains: u64,
}

// The layout of uapi.h, which control.c asserts with the same numbers.
const _: () = assert!(size_of::<RawInfo>() == 80 && std::mem::offset_of!(RawInfo, domain) == 16);
const _: () = assert!(size_of::<File>() == 48 && std::mem::offset_of!(File, plain) == 40);
const _: () = assert!(size_of::<RawList>() == 24 && std::mem::offset_of!(RawList, room) == 16);
const _: () = assert!(size_of::<RawHarvest>() == 40 && std::mem::offset_of!(RawHarvest, bits) == 24);
const _: () = assert!(size_of::<RawDigest>() == 64 && std::mem::offset_of!(RawDigest, only) == 32);
const _: () = assert!(size_of::<Entry>() == 24 && std::mem::offset_of!(Entry, result) == 16);
const _: () = assert!(size_of::<RawMerge>() == 24 && std::mem::offset_of!(RawMerge, count) == 16);
const _: () = assert!(size_of::<RawPlain>() == 8);
const _: () = assert!(size_of::<RawPunch>() == 40 && std::mem::offset_of!(RawPunch, held) == 24);
const _: () = assert!(size_of::<RawNotify>() == 8);
const _: () = assert!(size_of::<Stats>() == 104 && std::mem::offset_of!(Stats, drains) == 96);

const INFO: Opcode = opcode::read::<RawInfo>(b'1', 1);
const LIST: Opcode = opcode::read_write::<RawList>(b'1', 2);
const HARVEST: Opcode = opcode::read_write::<RawHarvest>(b'1', 3);
const DIGEST: Opcode = opcode::read_write::<RawDigest>(b'1', 4);
const MERGE: Opcode = opcode::read_write::<RawMerge>(b'1', 5);
const MAKE_PLAIN: Opcode = opcode::write::<RawPlain>(b'1', 6);
const STATS: Opcode = opcode::read::<Stats>(b'1', 7);
const PUNCH: Opcode = opcode::read_write::<RawPunch>(b'1', 8);
const NOTIFY: Opcode = opcode::write::<RawNotify>(b'1', 9);

/// What a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Nothing is there, or it was not looked at: reads as zeros.
    None,
    /// Swapped out.
    Away,
    /// It uses the frame with this handle.
    Frame(u64),
    /// Private, with this digest: [`digest_of`] its bytes, or [`ZEROS`].
    Digest(u64),
}

/// The digest of a page that is all zeros.
pub const ZEROS: u64 = 4;

/// The digest of a page that is not all zeros, from the 64 bits that XXH3 makes of its bytes with
/// the same seed. What the lowest bits name is told apart by them.
pub const fn digest_of(xxh3: u64) -> u64 {
    let digest = xxh3 & !1;
    if digest > ZEROS { digest } else { ZEROS + 2 }
}

impl Page {
    /// Of a word that [`Mount::digest`] wrote.
    pub fn from_word(word: u64) -> Self {
        match word {
            0 => Self::None,
            2 => Self::Away,
            _ if word & 1 == 1 => Self::Frame(word / 2),
            digest => Self::Digest(digest),
        }
    }
}

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
    root: OwnedFd,
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
    /// Returns how many there were. A page without one holds what it held at the harvest before.
    ///
    /// # Errors
    ///
    /// `SRCH`: no such file. `INVAL`: `start` is no multiple of 64. After any other error bits
    /// may be lost: all pages count as dirty.
    pub fn harvest(&self, id: u64, start: u64, bits: &mut [u64]) -> Result<u64, Errno> {
        let mut harvest = RawHarvest {
            id,
            start,
            pages: bits.len() as u64 * 64,
            bits: bits.as_mut_ptr().expose_provenance() as u64,
            dirty: 0,
        };
        // SAFETY: `bits` is the address of `pages / 64` words that outlive the call.
        unsafe { ioctl::ioctl(&self.root, Updater::<HARVEST, _>::new(&mut harvest)) }?;
        Ok(harvest.dirty)
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
    pub fn make_plain(&self, id: u64) -> Result<(), Errno> {
        // SAFETY: `RawPlain` is PAGEONEFS_MAKE_PLAIN's argument, which the kernel only reads.
        unsafe { ioctl::ioctl(&self.root, Setter::<MAKE_PLAIN, _>::new(RawPlain { id })) }
    }

    /// Makes `pages` from `start` on holes, but for those that somebody has pinned: a device would
    /// go on with a page that the file has no more. `held` gets a bit for each of these, 64 pages
    /// a word. Returns how many stayed.
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
