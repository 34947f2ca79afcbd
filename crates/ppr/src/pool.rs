//! A pool: its words and their layout.

#![allow(unsafe_code)] // A pool is made of a raw mapping.

use thiserror::Error;

use crate::layout::{Field, GuestState, HostState, Layout, LayoutError, MAGIC, VERSION};
use crate::primitive::{AtomicU64, Ordering::SeqCst};
use crate::words::Words;

/// Why a mapping is not a pool.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PoolError {
    /// Its length has no layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The mapping does not start at a multiple of 8.
    #[error("a pool has to start at a page: {0:#x} is not aligned")]
    Unaligned(usize),
    /// No host has initialised it.
    #[error(
        "the pool is not initialised (its first word is {0:#x}): the host does that before the guest starts; \
             `pageone run --ppr` does so"
    )]
    Magic(u64),
    /// The other side uses another version.
    #[error("the pool has version {0}, and this side has {VERSION}: update the older side")]
    Version(u64),
    /// The host requires features that this side does not know.
    #[error("the pool requires features {0:#x}, which this side does not know: update this side")]
    Features(u64),
    /// The header contradicts the length.
    #[error(
        "the pool's header has {field:?} = {found}, but its length requires {expected}: it is damaged; start \
             the guest again with `pageone run --ppr`, which makes a new one"
    )]
    Header {
        /// The word of the header.
        field: Field,
        /// Its value.
        found: u64,
        /// The value that follows from the length.
        expected: u64,
    },
}

/// The memory that guest and host share. Its layout follows from its length alone, so no value that
/// the other side writes can lead an access out of it.
pub struct Pool {
    words: Words,
    layout: Layout,
}

impl Pool {
    /// A pool in memory that is mapped already: a `mmap` of the `ivshmem` device's file on the
    /// host, or of its BAR 2 in a guest's user space. The call neither reads nor writes the memory.
    ///
    /// # Errors
    /// [`PoolError::Layout`], [`PoolError::Unaligned`]: the mapping is too small, or not aligned.
    ///
    /// # Safety
    /// As long as the pool lives:
    ///
    /// - `len` bytes from `base` are mapped, readable and writable;
    /// - this process accesses them only through a `Pool`;
    /// - the file behind them does not shrink (`F_SEAL_SHRINK`), which would raise `SIGBUS`.
    #[cfg(not(loom))]
    pub unsafe fn from_mapping(base: std::ptr::NonNull<u8>, len: usize) -> Result<Self, PoolError> {
        let layout = Layout::of_pool(len)?;
        if !base.cast::<AtomicU64>().is_aligned() {
            return Err(PoolError::Unaligned(base.as_ptr() as usize));
        }
        Ok(Self { words: Words::Mapped(base.cast(), layout.bytes / 8), layout })
    }

    /// An initialised pool in private memory, for at least `frames` frames: for an allocator and
    /// its recycler in one process.
    ///
    /// # Errors
    /// [`LayoutError`]: too many frames.
    pub fn private(frames: u64) -> Result<Self, LayoutError> {
        let layout = Layout::for_frames(frames)?;
        let pool = Self { words: Words::new(layout.bytes / 8), layout };
        pool.initialise();
        Ok(pool)
    }

    /// Writes the header; the host calls this first. All bits must be 0, as in a new file. The
    /// magic number is written last.
    pub fn initialise(&self) {
        for (field, value) in self.expected() {
            self.field(field).store(value, SeqCst);
        }
        self.field(Field::Magic).store(MAGIC, SeqCst);
    }

    /// The guest's check of the header: whether a host has made this pool, for this version and for
    /// this length.
    ///
    /// # Errors
    /// [`PoolError`]: no host has, or for another version or length.
    pub fn validate(&self) -> Result<(), PoolError> {
        let read = |field| self.field(field).load(SeqCst);
        if read(Field::Magic) != MAGIC {
            return Err(PoolError::Magic(read(Field::Magic)));
        }
        if read(Field::Version) != VERSION {
            return Err(PoolError::Version(read(Field::Version)));
        }
        if read(Field::Features) != 0 {
            return Err(PoolError::Features(read(Field::Features)));
        }
        for (field, expected) in self.expected() {
            let found = read(field);
            if found != expected {
                return Err(PoolError::Header { field, found, expected });
            }
        }
        Ok(())
    }

    fn expected(&self) -> [(Field, u64); 7] {
        let Layout { frames, free, claims, summary, bytes } = self.layout;
        [
            (Field::Version, VERSION),
            (Field::Features, 0),
            (Field::Frames, frames),
            (Field::Free, free as u64),
            (Field::Claims, claims as u64),
            (Field::Summary, summary as u64),
            (Field::Bytes, bytes as u64),
        ]
    }

    /// The places of the parts.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The number of frames of the bitmaps.
    pub fn frames(&self) -> u64 {
        self.layout.frames
    }

    /// Reads a word of the header. The other side may have written any value.
    pub fn read(&self, field: Field) -> u64 {
        self.field(field).load(SeqCst)
    }

    /// Writes the guest's state, for reports.
    pub fn set_guest_state(&self, state: GuestState) {
        if state == GuestState::Active {
            self.field(Field::GuestStarts).fetch_add(1, SeqCst);
        }
        self.field(Field::GuestState).store(state as u64, SeqCst);
    }

    /// Writes the host's state, for reports.
    pub fn set_host_state(&self, state: HostState) {
        if state == HostState::Active {
            self.field(Field::HostStarts).fetch_add(1, SeqCst);
        }
        self.field(Field::HostState).store(state as u64, SeqCst);
    }

    fn field(&self, field: Field) -> &AtomicU64 {
        &self.words[field as usize]
    }

    /// The number of words of F, and of C.
    #[inline]
    pub(crate) fn bitmap_words(&self) -> usize {
        (self.layout.frames / 64) as usize
    }

    /// F: the bits of free pages.
    #[inline]
    pub(crate) fn free(&self) -> &[AtomicU64] {
        &self.words[self.layout.free / 8..][..self.bitmap_words()]
    }

    /// C: the bits of claimed pages.
    #[inline]
    pub(crate) fn claims(&self) -> &[AtomicU64] {
        &self.words[self.layout.claims / 8..][..self.bitmap_words()]
    }

    /// S: a bit for each word of F that may have bits.
    #[inline]
    pub(crate) fn summary(&self) -> &[AtomicU64] {
        &self.words[self.layout.summary / 8..][..self.bitmap_words().div_ceil(64)]
    }

    /// Sets the bit of a word of F in S.
    #[inline]
    pub(crate) fn raise(&self, word: usize) {
        self.summary()[word / 64].fetch_or(1 << (word % 64), SeqCst);
    }

    /// All words of the pool.
    #[cfg(test)]
    pub(crate) fn words_for_tests(&self) -> &[AtomicU64] {
        &self.words
    }
}
