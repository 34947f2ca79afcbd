//! The layout of a pool.
//!
//! A pool is a piece of memory whose length in bytes is a power of two, as that of every PCI BAR.
//! All its fields are 64-bit little-endian words:
//!
//! ```text
//!   page 0       the header
//!   F pages      F: one bit for each frame f, bit f % 64 of word f / 64
//!                   set: the guest does not need the page
//!   F pages      C: one bit for each frame; set: the host is about to zero the page
//!   F/64 pages   S: one bit for each word of F; set: the word may have bits
//! ```
//!
//! One page of F stands for 32,768 frames, which is 128 MiB of guest. **The layout follows from the
//! pool's length alone.** The host knows the length from the file that it made itself, and trusts
//! nothing in the pool. The header repeats the layout for the guest, which refuses a header that
//! differs.

use thiserror::Error;

/// The first word of an initialised pool: "PAGE1PPR" in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PAGE1PPR");
/// The version of the layout and of the protocol; both sides must have the same.
pub const VERSION: u64 = 1;
/// Bytes of which all offsets are multiples: a page. Small in models, where every word costs time.
pub(crate) const UNIT: usize = if cfg!(loom) { 128 } else { 4096 };
/// Frames that one page of F stands for.
const UNIT_FRAMES: u64 = UNIT as u64 * 8;
/// The most frames of a pool: 64 TiB of 4 KiB pages, more than any guest has. No arithmetic on
/// frames overflows below it.
pub const MAX_FRAMES: u64 = 1 << 34;

/// The header's words, in order. The host writes those of the first cache line once, when it makes
/// the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Field {
    /// [`MAGIC`].
    Magic = 0,
    /// [`VERSION`].
    Version = 1,
    /// Features of the host, as bits; none are defined yet, and a guest refuses those that it does
    /// not know.
    Features = 2,
    /// Frames of the bitmaps: frame numbers are below it.
    Frames = 3,
    /// Offset of F, in bytes.
    Free = 4,
    /// Offset of C, in bytes.
    Claims = 5,
    /// Offset of S, in bytes.
    Summary = 6,
    /// Bytes of the pool that are used.
    Bytes = 7,
    /// The guest's state, a [`GuestState`]. The guest writes it, for reports.
    GuestState = 8,
    /// How often a guest's driver has started on this pool. The guest writes it, for reports.
    GuestStarts = 9,
    /// The host's state, a [`HostState`]. The host writes it, for reports.
    HostState = 12,
    /// How often a host has started on this pool. The host writes it, for reports.
    HostStarts = 13,
}

/// A guest's own account of its state. Only reports use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum GuestState {
    /// No driver has used the pool, or it has cancelled every mark and left.
    Absent = 0,
    /// A driver marks and cancels.
    Active = 1,
    /// A driver has stopped marking, and cancels all marks.
    Leaving = 2,
}

/// A host's own account of its state. Only reports use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum HostState {
    /// No host, or it has left. Marks stay.
    Absent = 0,
    /// A host recycles.
    Active = 1,
}

/// Why a layout cannot be made.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// More frames than [`MAX_FRAMES`].
    #[error("{0} frames are more than a pool can have ({MAX_FRAMES})")]
    Frames(u64),
    /// No room for even one page of each part.
    #[error("a pool of {0} bytes is too small: the smallest has {min}", min = UNIT * 4)]
    Bytes(usize),
}

/// The places of the parts of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Frames of the bitmaps, a multiple of 32,768.
    pub frames: u64,
    /// Offset of F, in bytes.
    pub free: usize,
    /// Offset of C, in bytes.
    pub claims: usize,
    /// Offset of S, in bytes.
    pub summary: usize,
    /// Bytes of the pool that are used: a multiple of the page size, at most the pool's length.
    pub bytes: usize,
}

impl Layout {
    /// The layout of a pool of `len` bytes: the one with the most frames that fits.
    ///
    /// # Errors
    /// [`LayoutError::Bytes`].
    pub fn of_pool(len: usize) -> Result<Self, LayoutError> {
        let most = Self::with_units((MAX_FRAMES / UNIT_FRAMES) as usize);
        let pages = len.min(most.bytes) / UNIT;
        // Of 129 pages behind the header, 64 are F, 64 are C, and one is S.
        let rest = pages.saturating_sub(1);
        let units = rest / 129 * 64 + (rest % 129).saturating_sub(1) / 2;
        if units == 0 {
            return Err(LayoutError::Bytes(len));
        }
        Ok(Self::with_units(units))
    }

    /// The layout of the smallest pool for frames `0..frames`.
    ///
    /// # Errors
    /// [`LayoutError::Frames`].
    pub fn for_frames(frames: u64) -> Result<Self, LayoutError> {
        if frames > MAX_FRAMES {
            return Err(LayoutError::Frames(frames));
        }
        let units = frames.div_ceil(UNIT_FRAMES).max(1) as usize;
        Self::of_pool(Self::with_units(units).bytes.next_power_of_two())
    }

    fn with_units(units: usize) -> Self {
        let (free, bitmap) = (UNIT, units * UNIT);
        let summary = free + 2 * bitmap;
        let bytes = summary + units.div_ceil(64) * UNIT;
        Self { frames: units as u64 * UNIT_FRAMES, free, claims: free + bitmap, summary, bytes }
    }

    /// The length of the pool's file in bytes: a power of two, as PCI requires.
    pub fn pool_bytes(&self) -> usize {
        self.bytes.next_power_of_two()
    }
}

/// The frames that a pool needs for a QEMU x86 guest with `bytes` of RAM (`-m`), with the hole
/// below 4 GiB. From 2816 MiB on, `q35` places the RAM above 2 GiB behind 4 GiB; other machine
/// types leave smaller holes.
pub fn guest_frames(bytes: u64) -> u64 {
    let top = if bytes < 0xb000_0000 { bytes } else { bytes.saturating_add(0x8000_0000) };
    top.div_ceil(4096)
}
