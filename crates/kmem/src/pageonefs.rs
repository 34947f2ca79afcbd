//! The control interface of `pageonefs`, the memory file system of `host/linux/pageonefs`: ioctls
//! on a mount's root, for `CAP_SYS_ADMIN`.
//!
//! A file is named by its id, also when it has no name any more; a page by its number in the
//! file; a frame by its handle. The structures are those of `host/linux/pageonefs/uapi.h`, which
//! says what each field means.
//!
//! Source: `host/linux/pageonefs/uapi.h`, and `docs/design/module.md`.

#![allow(unsafe_code)] // ioctls whose arguments hold addresses.

use rustix::io::Errno;
use rustix::ioctl::{Opcode, opcode};

mod mount;
mod mounts;
mod store;
#[cfg(test)]
mod tests;

pub use mount::{Mount, OpenError};
pub use mounts::{MountInfo, is_for, is_loaded, mounts, mounts_in};
pub use store::{Payer, Store, StoreError};

/// The version of the interface that this module speaks.
pub const VERSION: u32 = 9;

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
    /// Whose it is.
    pub uid: u32,
}

/// Why nothing of a file is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// [`Mount::make_plain`] was called.
    Asked,
    /// Its pages are pinned for long: VFIO, vDPA, registered buffers.
    Pinned,
    /// It is a file of a [`Store`]: its pages are lent, and never merged themselves.
    Store,
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
            3 => Some(Plain::Store),
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
    next: u64,
    flags: u32,
    reserved: u32,
}

/// Which pages get a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// Those that were written since their bits were taken.
    Written,
    /// And all that are there, whoever has taken their bits.
    All,
}

/// What [`Mount::harvest`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Harvest {
    /// How many pages have a bit.
    pub dirty: u64,
    /// Behind those that were asked for, the first page that may have a bit, a multiple of 64.
    /// `u64::MAX`: none has.
    pub next: u64,
}

/// PAGEONEFS_HARVEST_ALL.
const HARVEST_ALL: u32 = 1;

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
    /// `EXIST`: it uses a frame already, or is lent as one. `AGAIN`, `BUSY`: later; the first also
    /// where the call ended before it came to this entry. `STALE`: other content. `NOENT`: the
    /// frame has gone. `MLINK`: the frame has as many users as it may have, and the kernel has no
    /// other of its content; else the page uses that, and `frame` says so. `HWPOISON`, `INVAL`,
    /// `NOMEM`.
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
struct RawSlot {
    id: u64,
    index: u64,
    like_id: u64,
    like: u64,
    pid: i32,
    reserved: u32,
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
const _: () = assert!(size_of::<RawHarvest>() == 56 && std::mem::offset_of!(RawHarvest, flags) == 48);
const _: () = assert!(size_of::<RawDigest>() == 64 && std::mem::offset_of!(RawDigest, only) == 32);
const _: () = assert!(size_of::<Entry>() == 24 && std::mem::offset_of!(Entry, result) == 16);
const _: () = assert!(size_of::<RawMerge>() == 24 && std::mem::offset_of!(RawMerge, count) == 16);
const _: () = assert!(size_of::<RawPlain>() == 8);
const _: () = assert!(size_of::<RawPunch>() == 40 && std::mem::offset_of!(RawPunch, held) == 24);
const _: () = assert!(size_of::<RawNotify>() == 8);
const _: () = assert!(size_of::<RawSlot>() == 40 && std::mem::offset_of!(RawSlot, pid) == 32);
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
const SLOT: Opcode = opcode::write::<RawSlot>(b'1', 11);

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
